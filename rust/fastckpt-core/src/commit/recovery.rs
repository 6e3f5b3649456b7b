//! An old checkpoint that a commit moved aside. A process that finds its name free looks for it, and puts it back if
//! the writer of the commit is dead.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::content::{has_magic, written};
use super::directory::{TURNS, entries, id_of, is_empty, open_child, refresh, split, sync};
use super::names::{Kind, Temporary};
use super::owner::{Life, Verdict, judge};
use crate::error::{Error, Result};
use crate::format::manifest;
use crate::sys::file::open_directory;
use crate::sys::fs::{self, AtFlags};

/// How long a load waits for a commit that is between its two plain renames. After that, the load reads the old
/// checkpoint in place. If the writer is provably dead, the load does not wait.
const COMMIT_WAIT: Duration = Duration::from_secs(5);
/// How long a load looks at a free name whose directory keeps changing, because such a directory does not prove that
/// there is no checkpoint.
const PATIENCE: Duration = Duration::from_secs(30);
/// The number of symbolic links that the kernel follows.
const LINKS: usize = 40;
/// How long to wait before looking again.
const PAUSE: Duration = Duration::from_millis(10);

/// What is known about a free name.
pub(super) enum Free {
    /// Something has the name again.
    Taken,
    /// Nothing has the name, and nothing was moved aside from it.
    Truly,
    /// Nothing has the name, but an old checkpoint was moved aside from it.
    For(Aside),
}

/// An old checkpoint that a commit moved aside and has not replaced yet.
pub(super) struct Aside {
    pub(super) name: OsString,
    /// The verdict about its writer, valid while this is held.
    verdict: Option<Verdict>,
}

/// The names in `parent` that are `name` itself or temporary names for it.
fn family(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<Vec<OsString>> {
    let all = entries(parent)?.into_iter().map(|(found, _)| OsStr::from_bytes(found.to_bytes()).to_owned());
    let related =
        |found: &OsString| found == name || Temporary::parse(found.as_bytes()).is_some_and(|t| t.is_of(name));
    Ok(all.filter(related).collect())
}

/// Looks for the newest checkpoint that was moved aside from `name`, which was found to be free.
///
/// A single listing must show that nothing has the name and that nothing was moved aside. Two separate lookups could
/// both miss a directory that moves between them. So can a listing during which other processes make changes.
pub(super) fn taken_aside(parent: BorrowedFd<'_>, name: &OsStr) -> Free {
    let mut turn = 0;
    let all = loop {
        let before = changed(parent);
        let Ok(all) = family(parent, name) else { return Free::Truly };
        if all.iter().any(|found| found == name) && !is_free(parent, name) {
            return Free::Taken;
        }
        if changed(parent) == before || turn == TURNS {
            break all;
        }
        std::thread::sleep(PAUSE);
        turn += 1;
    };
    let mut newest: Option<(_, Aside)> = None;
    for found in all {
        let Some(old) = Temporary::parse(found.as_bytes()).filter(|t| t.kind == Kind::Old && t.is_of(name))
        else {
            continue;
        };
        let Ok(directory) = open_child(parent, &found) else { continue };
        if !has_magic(directory.as_fd()).unwrap_or(false) {
            continue;
        }
        let Some(written) = written(directory.as_fd()) else { continue };
        let Ok(workspace) = open_child(parent, &old.workspace()) else { continue };
        let verdict = old.owner().map(|owner| judge(owner, workspace.as_fd()));
        // Checked after the verdict. If the workspace is gone, the successor has taken the name. The name is free again
        // because the successor was removed.
        if id_of(parent, &old.workspace()).is_none() {
            continue;
        }
        if newest.as_ref().is_none_or(|(other, _)| written > *other) {
            newest = Some((written, Aside { name: found, verdict }));
        }
    }
    newest.map_or(Free::Truly, |(_, aside)| Free::For(aside))
}

/// When something was last created, removed or renamed in a directory, according to a new query.
fn changed(directory: BorrowedFd<'_>) -> Option<(i64, u64)> {
    refresh(directory);
    fs::fstat(directory).ok().map(|stat| (stat.st_ctime, stat.st_ctime_nsec))
}

/// Whether nothing or only an empty directory has the name.
pub(super) fn is_free(parent: BorrowedFd<'_>, name: &OsStr) -> bool {
    match open_child(parent, name) {
        Ok(directory) => is_empty(directory.as_fd()),
        Err(error) => matches!(error, Errno::NOENT | Errno::STALE),
    }
}

/// The action for a checkpoint whose name is free.
enum Then {
    /// Open the checkpoint again: it has its name back, or may have it soon.
    OpenAgain,
    /// Read the old checkpoint under this path.
    Read(PathBuf),
    /// There is no checkpoint.
    Missing,
}

/// Puts back an old checkpoint whose writer died between the two plain renames. If it must stay (the mount is
/// read-only, or its writer may be alive and has taken too `long`), it is read in place.
fn recover(parent_path: &Path, parent: BorrowedFd<'_>, name: &OsStr, long: bool) -> Then {
    let before = changed(parent);
    let aside = match taken_aside(parent, name) {
        Free::Taken => return Then::OpenAgain,
        // The clock of a file system advances only with the kernel's tick, so a change during the listing may not show.
        // Only a second listing after a pause proves that nothing is there.
        Free::Truly => {
            std::thread::sleep(PAUSE);
            let still = matches!(taken_aside(parent, name), Free::Truly) && changed(parent) == before;
            return if still && is_free(parent, name) { Then::Missing } else { Then::OpenAgain };
        }
        Free::For(aside) => aside,
    };
    if aside.verdict.as_ref().is_some_and(|verdict| verdict.life == Life::Dead) {
        // Replaces nothing but an empty directory.
        match fs::renameat(parent, &aside.name, parent, name) {
            Ok(()) => {
                let _ = sync(parent);
            }
            // Another process put it back, or took the name.
            Err(Errno::NOENT | Errno::EXIST | Errno::NOTEMPTY | Errno::STALE) => refresh(parent),
            Err(_) => return Then::Read(parent_path.join(aside.name)),
        }
    } else if long {
        return Then::Read(parent_path.join(aside.name));
    }
    Then::OpenAgain
}

/// The target of a symbolic link such as `latest`: the checkpoint that was replaced.
fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_path_buf();
    for _ in 0..LINKS {
        let Ok(to) = std::fs::read_link(&path) else { break };
        path = path.parent().unwrap_or(Path::new(".")).join(to);
    }
    path
}

/// Opens the directory of the checkpoint at `path` for reading, after undoing a save that died halfway.
pub fn open_checkpoint(path: &Path) -> Result<OwnedFd> {
    let began = Instant::now();
    open_by(path, &mut || began.elapsed())
}

/// Like [`open_checkpoint`], with a clock for the time since the beginning. The clock is read once before each attempt,
/// so that the last attempt comes after the end of the wait: on a busy machine a single attempt may take longer.
fn open_by(path: &Path, clock: &mut dyn FnMut() -> Duration) -> Result<OwnedFd> {
    let missing = |directory: &io::Result<OwnedFd>| match directory {
        Ok(directory) => {
            let manifest = fs::statat(directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW);
            manifest.is_err_and(|error| error == Errno::NOENT) && is_empty(directory.as_fd())
        }
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let mut directory = open_directory(path);
    while missing(&directory) {
        let taken = clock();
        if taken > PATIENCE {
            // The error is not "not found", on which a program would start a new run.
            directory = Err(Errno::BUSY.into());
            break;
        }
        let named = followed(path);
        let then = split(&named).and_then(|(parent_path, name)| {
            let parent = open_directory(&parent_path).ok()?;
            Some(recover(&parent_path, parent.as_fd(), &name, taken > COMMIT_WAIT))
        });
        match then {
            None | Some(Then::Missing) => break,
            Some(Then::Read(instead)) => {
                // The checkpoint may have got its name back meanwhile.
                directory = open_directory(&instead).or_else(|_| open_directory(path));
                break;
            }
            Some(Then::OpenAgain) => directory = open_directory(path),
        }
        if missing(&directory) {
            std::thread::sleep(PAUSE);
        }
    }
    directory.map_err(Error::io("open checkpoint", path))
}

#[cfg(test)]
mod tests {
    use crate::commit::leftovers::State;
    use crate::commit::leftovers::temporaries;
    use crate::commit::leftovers::tests::{dead, half, name_by};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use crate::commit::leftovers::remove;
    use crate::commit::names::aside_name;
    use crate::commit::takeover::Step;
    use crate::commit::target::look;
    use crate::commit::tests::{checkpoint, content, sealed};
    use crate::commit::{Published, Workspace, leftovers};
    use crate::sys::thread::builder;

    use super::*;

    #[test]
    fn a_save_that_died_between_two_renames_is_undone() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let temporary = name_by("c", dead());
        let aside = parent.path().join(aside_name(&temporary, 0));
        let put_aside = || {
            std::fs::rename(&path, &aside).unwrap();
            half(parent.path().join(&temporary));
        };
        let sweep = || {
            drop(Workspace::create(&path, true).unwrap());
            assert_eq!(temporaries(open_directory(parent.path()).unwrap().as_fd()).unwrap().len(), 0);
        };
        for somebody_makes_a_directory in [false, true] {
            put_aside();
            if somebody_makes_a_directory {
                std::fs::create_dir(&path).unwrap();
            }
            open_checkpoint(&path).unwrap();
            assert!(content(&path).ends_with("one"));
            sweep();
        }
        // A save takes the old checkpoint over, with the files that fastckpt did not write, and never puts it back.
        std::fs::write(path.join("config.json"), "{}").unwrap();
        put_aside();
        checkpoint(parent.path(), "c", "two");
        assert!(content(&path).ends_with("two") && path.join("config.json").exists());
        sweep();
    }

    #[test]
    fn a_checkpoint_that_is_replaced_again_and_again_is_always_found() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let (saves, missed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let going_on = || saves.load(Ordering::Relaxed) < 1000 && !missed.load(Ordering::Relaxed);
        let save = || {
            while going_on() {
                let workspace = sealed(&path, "next");
                let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap();
                let done = old.map(|old| workspace.replace_in_two_steps(&old, 0, &mut Published::default()));
                // If a rival had the name first, this checkpoint is not published.
                if let Some(Ok(Step::Done(Some((aside, id))))) = done {
                    remove(workspace.parent.as_fd(), &aside, id, None).unwrap();
                    saves.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            builder().spawn_scoped(scope, save).unwrap();
            builder().spawn_scoped(scope, save).unwrap();
            while going_on() {
                let error = open_checkpoint(&path).err();
                missed.store(error.is_some(), Ordering::Relaxed);
                assert!(error.is_none(), "{error:?}");
            }
        });
    }

    #[test]
    fn a_look_that_takes_longer_than_the_wait_does_not_say_that_nothing_is_there() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let workspace = sealed(&path, "two");
        let aside = parent.path().join(aside_name(workspace.temporary(), 0));
        std::fs::rename(&path, &aside).unwrap();
        // The writer is alive, so the checkpoint is read in place once the wait is over.
        let mut times = [Duration::ZERO, COMMIT_WAIT * 2].into_iter();
        let opened = open_by(&path, &mut || times.next().unwrap()).unwrap();
        assert_eq!(fs::fstat(opened).unwrap().st_ino, fs::stat(&aside).unwrap().st_ino);
        // A directory that never stops changing proves nothing.
        let error = open_by(&path, &mut || PATIENCE * 2).unwrap_err();
        assert!(error.to_string().contains("busy"), "{error}");
    }

    #[test]
    fn what_was_replaced_does_not_come_back() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let aside = parent.path().join(aside_name(&name_by("c", dead()), 0));
        std::fs::rename(&path, &aside).unwrap();
        // The successor had the name and was removed.
        assert!(open_checkpoint(&path).is_err());
        assert!(aside.exists());
        assert_eq!(leftovers(parent.path()).unwrap()[0].state, State::Kept);
        checkpoint(parent.path(), "c", "two");
        drop(Workspace::create(&path, true).unwrap());
        assert!(!aside.exists() && content(&path).ends_with("two"));
    }

    #[test]
    fn of_two_that_were_taken_aside_the_newer_is_put_back() {
        let parent = tempfile::tempdir().unwrap();
        let aside = |text: &str| {
            let made = checkpoint(parent.path(), text, text);
            let temporary = name_by("c", dead());
            (made, aside_name(&temporary, 0), temporary)
        };
        // The first entry of a directory is not always the oldest.
        let all = [aside("one"), aside("three"), aside("two")];
        let newest = std::fs::File::open(all[1].0.join(manifest::FILE)).unwrap();
        newest.set_modified(std::time::SystemTime::now() + Duration::from_secs(60)).unwrap();
        for (made, aside, temporary) in all {
            half(parent.path().join(temporary));
            std::fs::rename(made, parent.path().join(aside)).unwrap();
        }
        let path = parent.path().join("c");
        open_checkpoint(&path).unwrap();
        assert!(content(&path).ends_with("three"));
    }
}
