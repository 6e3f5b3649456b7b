//! What writers that died left beside a checkpoint: put back by whoever needs it, swept by the next save, listed for people.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags, FileType};
use rustix::io::Errno;

use super::directory::{Id, entries, id, id_of, id_of_renamed, open_child, refresh, sync};
use super::names::{Kind, Temporary};
use super::owner::{Life, Verdict, judge};
use super::target::has_magic;
use super::{TURNS, split};
use crate::error::{Error, Result};
use crate::manifest;
use crate::sys::file::open_directory;

/// How long a commit may stand between its two plain renames before others finish it, unless its writer is provably dead.
const COMMIT_WAIT: Duration = Duration::from_secs(5);
/// How long to wait before looking again.
const PAUSE: Duration = Duration::from_millis(10);

/// The temporary directories in `parent`.
fn temporaries(parent: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let all = entries(parent)?.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
    let all = all.map(|(name, _)| OsStr::from_bytes(name.to_bytes()).to_owned());
    Ok(all.filter(|name| Temporary::parse(name.as_bytes()).is_some()).collect())
}

/// Takes the directory `found`, which is `expected`, away from whoever else may want it, and removes it. The rename decides: of all who
/// try, one wins, and a directory that has its final name by now is not touched. The `verdict` that it may be removed is held until then,
/// and no longer: its file is open, and NFS only renames what is open.
pub(super) fn remove(
    parent: BorrowedFd<'_>,
    found: &OsStr,
    expected: Id,
    verdict: Option<Verdict>,
) -> io::Result<()> {
    let Some(temporary) = Temporary::parse(found.as_bytes()) else { return Ok(()) };
    let (claimed, garbage) = (temporary.renamed(Kind::Tmp), temporary.renamed(Kind::Del));
    match fs::renameat(parent, found, parent, &claimed) {
        Err(Errno::NOENT | Errno::STALE) => return Ok(()),
        other => other?,
    }
    drop(verdict);
    if id_of_renamed(parent, &claimed) != Some(expected) {
        // Another one came to lie there since it was looked at.
        return Ok(fs::renameat(parent, &claimed, parent, found)?);
    }
    fs::renameat(parent, &claimed, parent, &garbage)?;
    destroy(parent, &garbage, expected)
}

/// Removes a directory of plain files, its manifest first: what is half removed is not a checkpoint. What is already gone is not a failure.
fn destroy(parent: BorrowedFd<'_>, name: &OsStr, expected: Id) -> io::Result<()> {
    let gone = |outcome: rustix::io::Result<()>| match outcome {
        Err(Errno::NOENT | Errno::STALE) => Ok(()),
        other => other,
    };
    let directory = match open_child(parent, name) {
        Err(Errno::NOENT | Errno::STALE) => return Ok(()),
        other => other?,
    };
    if id(&fs::fstat(&directory)?) != expected {
        return Err(Errno::STALE.into()); // a client of NFS still believes another one to be here
    }
    let all = entries(directory.as_fd())?;
    if !all.iter().all(|(_, kind)| *kind == FileType::RegularFile) {
        return Err(Errno::NOTEMPTY.into()); // somebody's own: nothing here is removed
    }
    gone(fs::unlinkat(&directory, manifest::FILE, AtFlags::empty()))?;
    for (file, _) in all {
        gone(fs::unlinkat(&directory, &file, AtFlags::empty()))?;
    }
    Ok(gone(fs::unlinkat(parent, name, AtFlags::REMOVEDIR))?)
}

/// What a temporary directory is, as things stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Its writer lives.
    Alive,
    /// Nobody needs it: the next save into this directory removes it.
    Dead,
    /// Its writer may live: nothing proves its death here.
    Unknown,
    /// The only copy of an old checkpoint, or the workspace that belongs to it: a commit stands between its two renames, or
    /// the successor was removed.
    Kept,
    /// Not made by fastckpt: what somebody put in a save's way.
    Foreign,
}

impl State {
    /// One word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Dead => "dead",
            Self::Unknown => "unknown",
            Self::Kept => "kept",
            Self::Foreign => "foreign",
        }
    }
}

/// What was found out about a temporary directory. It holds as long as this is held.
struct Finding {
    state: State,
    id: Id,
    verdict: Option<Verdict>,
}

/// Finds out what the temporary directory `found` is, unless it has gone.
fn examine(parent: BorrowedFd<'_>, found: &OsStr) -> Option<Finding> {
    let temporary = Temporary::parse(found.as_bytes())?;
    let directory = open_child(parent, found).ok()?;
    let id = id(&fs::fstat(&directory).ok()?);
    let files = entries(directory.as_fd()).ok()?;
    let plain = files.iter().all(|(_, kind)| *kind == FileType::RegularFile);
    let manifest = files.iter().any(|(file, _)| file.to_bytes() == manifest::FILE.as_bytes());
    let (state, verdict) = match temporary.kind {
        Kind::Del if plain => (State::Dead, None),
        // A workspace has a manifest before it has anything else. This is somebody's own, displaced by a save that was killed.
        _ if !plain || (!manifest && !files.is_empty()) => (State::Foreign, None),
        Kind::Del => (State::Foreign, None),
        Kind::Old if is_superseded(parent, temporary.of(), found) => (State::Dead, None),
        Kind::Old => (State::Kept, None),
        Kind::Tmp => {
            let verdict = judge(temporary.owner()?, directory.as_fd());
            let state = match verdict.life {
                Life::Alive => State::Alive,
                // Looked for after the verdict: a writer that lives may take an old checkpoint aside at any moment.
                _ if has_partner(parent, found) => State::Kept,
                Life::Dead => State::Dead,
                Life::Unknown => State::Unknown,
            };
            (state, Some(verdict))
        }
    };
    Some(Finding { state, id, verdict })
}

/// Whether an old checkpoint was taken aside for the workspace `found`: together they tell that it is to be put back.
fn has_partner(parent: BorrowedFd<'_>, found: &OsStr) -> bool {
    refresh(parent);
    let is_partner = |name: &OsString| {
        let partner =
            Temporary::parse(name.as_bytes()).filter(|t| t.kind == Kind::Old && t.workspace() == found);
        // Without a manifest it is somebody's own, and waits for nothing.
        let old = partner.and_then(|_| open_child(parent, name).ok());
        old.is_some_and(|old| has_magic(old.as_fd()).unwrap_or(true))
    };
    temporaries(parent).map_or(true, |all| all.iter().any(is_partner))
}

/// Whether a later checkpoint has the name that the one at `old` had.
pub(super) fn is_superseded(parent: BorrowedFd<'_>, name: &OsStr, old: &OsStr) -> bool {
    refresh(parent);
    let Ok(holder) = open_child(parent, name) else { return false };
    // A client of NFS may believe for a while that the old one has its name still.
    let other = fs::fstat(&holder).is_ok_and(|stat| Some(id(&stat)) != id_of(parent, old));
    let Ok(old) = open_child(parent, old) else { return false };
    let later =
        written(holder.as_fd()).is_some_and(|holder| written(old.as_fd()).is_none_or(|old| holder >= old));
    other && later && has_magic(holder.as_fd()).unwrap_or(false)
}

/// When the manifest of the checkpoint in `directory` was written, seconds and nanoseconds.
fn written(directory: BorrowedFd<'_>) -> Option<(i64, u64)> {
    let stat = fs::statat(directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some((stat.st_mtime, stat.st_mtime_nsec))
}

/// Removes what nobody needs from the target's parent.
pub(super) fn sweep(parent: BorrowedFd<'_>) {
    let mut synced = false;
    let mut all = temporaries(parent).unwrap_or_default();
    // Old checkpoints go first: while one is there, its workspace is kept for it.
    for workspaces in [false, true] {
        if synced {
            all = temporaries(parent).unwrap_or_default();
        }
        let is_workspace =
            |found: &OsStr| Temporary::parse(found.as_bytes()).is_some_and(|t| t.kind == Kind::Tmp);
        for found in all.iter().filter(|found| is_workspace(found) == workspaces) {
            let Some(finding) = examine(parent, found) else { continue };
            match finding.state {
                State::Dead => {}
                State::Unknown => {
                    // Empty, it needs no proof: a writer that lives makes another.
                    let _ = fs::unlinkat(parent, found, AtFlags::REMOVEDIR);
                    continue;
                }
                State::Alive | State::Kept | State::Foreign => continue,
            }
            // It may be an old checkpoint whose successor took its name a moment ago: that rename first.
            if !synced && sync(parent).is_err() {
                return;
            }
            synced = true;
            let _ = remove(parent, found, finding.id, finding.verdict);
        }
    }
}

/// What a name that was found to be free is, by one listing.
pub(super) enum Free {
    /// Somebody has it again.
    Taken,
    /// Nothing has it, and nothing was taken aside from it.
    Truly,
    /// Only an old checkpoint that a commit took aside had it.
    For(Aside),
}

/// An old checkpoint that a commit took aside and has put nothing in the place of yet.
pub(super) struct Aside {
    pub(super) name: OsString,
    /// Its writer's, while this is held.
    verdict: Option<Verdict>,
}

/// Looks for the newest checkpoint that was taken aside from `name`, which was found to be free.
///
/// One listing must show that nothing has the name and that nothing is aside: two looks could both miss what moves between them.
pub(super) fn taken_aside(parent: BorrowedFd<'_>, name: &OsStr) -> Free {
    let mut turn = 0;
    let all = loop {
        let before = changed(parent);
        let all = entries(parent).unwrap_or_default();
        turn += 1;
        // A listing that others change is not of one moment.
        if changed(parent) == before || turn == TURNS {
            break all;
        }
    };
    if all.iter().any(|(found, _)| found.to_bytes() == name.as_bytes()) && !is_free(parent, name) {
        return Free::Taken;
    }
    let mut newest: Option<(_, Aside)> = None;
    for (found, _) in all {
        let found = OsStr::from_bytes(found.to_bytes()).to_owned();
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
        // Looked for after the verdict. Without its workspace, its successor had the name: if that is gone, somebody removed it.
        if id_of(parent, &old.workspace()).is_none() {
            continue;
        }
        if newest.as_ref().is_none_or(|(other, _)| written > *other) {
            newest = Some((written, Aside { name: found, verdict }));
        }
    }
    newest.map_or(Free::Truly, |(_, aside)| Free::For(aside))
}

/// When something was last made, removed or renamed in a directory, asked afresh.
fn changed(directory: BorrowedFd<'_>) -> Option<(i64, u64)> {
    refresh(directory);
    fs::fstat(directory).ok().map(|stat| (stat.st_ctime, stat.st_ctime_nsec))
}

/// Whether nothing has the name, or an empty directory that somebody laid there.
pub(super) fn is_free(parent: BorrowedFd<'_>, name: &OsStr) -> bool {
    match open_child(parent, name) {
        Ok(directory) => entries(directory.as_fd()).is_ok_and(|all| all.is_empty()),
        Err(error) => matches!(error, Errno::NOENT | Errno::STALE),
    }
}

/// Puts an old checkpoint back whose writer died between the two plain renames.
/// Returns the name under which it can be read where it must stay: the mount is read-only, or its writer may live.
fn recover(parent_path: &Path, parent: BorrowedFd<'_>, name: &OsStr) -> Option<PathBuf> {
    let give_up = Instant::now() + COMMIT_WAIT;
    while is_free(parent, name) {
        let aside = match taken_aside(parent, name) {
            Free::Taken => continue,
            Free::Truly => return None,
            Free::For(aside) => aside,
        };
        if aside.verdict.as_ref().is_some_and(|verdict| verdict.life == Life::Dead) {
            // Replaces nothing but an empty directory.
            match fs::renameat(parent, &aside.name, parent, name) {
                Ok(()) => {
                    let _ = sync(parent);
                    return None;
                }
                // Somebody else did.
                Err(Errno::NOENT | Errno::EXIST | Errno::NOTEMPTY | Errno::STALE) => refresh(parent),
                Err(_) => return Some(parent_path.join(aside.name)),
            }
        } else if Instant::now() > give_up {
            return Some(parent_path.join(aside.name));
        }
        std::thread::sleep(PAUSE);
    }
    None
}

/// Opens the directory of the checkpoint at `path` for reading, after undoing a save that died half-way.
pub fn open_checkpoint(path: &Path) -> Result<OwnedFd> {
    let missing = |directory: &io::Result<OwnedFd>| match directory {
        Ok(directory) => entries(directory.as_fd()).is_ok_and(|all| all.is_empty()),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let mut directory = open_directory(path);
    if missing(&directory) {
        let instead = split(path).ok().and_then(|(parent_path, name)| {
            let parent = open_directory(&parent_path).ok()?;
            recover(&parent_path, parent.as_fd(), &name)
        });
        // What is read where it lies may have got its name meanwhile.
        directory = instead.map_or_else(|| open_directory(path), |instead| open_directory(&instead));
        directory = directory.or_else(|_| open_directory(path));
    }
    directory.map_err(Error::io("open checkpoint", path))
}

/// What lies in a directory of checkpoints under a temporary name.
#[derive(Debug)]
pub struct LeftOver {
    /// The name of the directory.
    pub name: OsString,
    /// Which checkpoint it belongs to.
    pub of: String,
    /// The host it was made on.
    pub host: String,
    /// What it is.
    pub state: State,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds since 1970 when something was last made, removed or renamed in it.
    pub changed: i64,
}

/// Lists what lies in `directory` under temporary names.
pub fn left_overs(directory: &Path) -> Result<Vec<LeftOver>> {
    let parent = open_directory(directory).map_err(Error::io("open", directory))?;
    let all = temporaries(parent.as_fd()).map_err(Error::io("list", directory))?;
    let mut found = Vec::new();
    for name in &all {
        let Some(temporary) = Temporary::parse(name.as_bytes()) else { continue };
        let Ok(inside) = open_child(parent.as_fd(), name) else { continue };
        let Ok(stat) = fs::fstat(&inside) else { continue };
        let files = entries(inside.as_fd()).unwrap_or_default();
        let sizes = files.iter().filter_map(|(file, _)| {
            let stat = fs::statat(&inside, file, AtFlags::SYMLINK_NOFOLLOW).ok()?;
            u64::try_from(stat.st_blocks).ok().map(|blocks| blocks * 512)
        });
        let Some(Finding { state, .. }) = examine(parent.as_fd(), name) else { continue };
        found.push(LeftOver {
            of: temporary.of().to_string_lossy().into_owned(),
            host: temporary.host(),
            state,
            bytes: sizes.sum(),
            changed: stat.st_ctime,
            name: name.clone(),
        });
    }
    Ok(found)
}

/// Removes one of [`left_overs`]. With `force` also one whose writer is not provably dead, or an old checkpoint that is kept; never one
/// whose writer lives. Returns whether it was removed.
pub fn remove_left_over(directory: &Path, name: &OsStr, force: bool) -> Result<bool> {
    let parent = open_directory(directory).map_err(Error::io("open", directory))?;
    let Some(finding) = examine(parent.as_fd(), name) else { return Ok(false) };
    match finding.state {
        State::Dead => {}
        State::Unknown | State::Kept if force => {}
        _ => return Ok(false),
    }
    sync(parent.as_fd()).map_err(Error::io("sync the directory", directory))?;
    remove(parent.as_fd(), name, finding.id, finding.verdict)
        .map_err(Error::io("remove", &directory.join(name)))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use crate::commit::Workspace;
    use crate::commit::names::{aside_name, workspace_name};
    use crate::commit::tests::{checkpoint, content};

    use super::*;

    /// The name of a workspace for `name` as another process would give it.
    fn name_by(name: &str, pid: u32) -> OsString {
        let made = workspace_name(OsStr::new(name)).into_string().unwrap();
        let (begin, random) = made.rsplit_once('-').unwrap();
        let (begin, _) = begin.rsplit_once('-').unwrap();
        format!("{begin}-{pid}-{random}").into()
    }

    /// The number of a process that has ended.
    fn dead() -> u32 {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    }

    /// A process that lives until it is killed.
    fn living() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    fn half(path: PathBuf) -> PathBuf {
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(manifest::FILE), "").unwrap();
        std::fs::write(path.join("model.safetensors"), "half").unwrap();
        path
    }

    #[test]
    fn left_overs_of_the_dead_are_swept_and_the_living_are_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let mine = Workspace::create(&path, true).unwrap();
        let mut other = living();
        let at = |name: OsString| half(parent.path().join(name));
        let gone = [
            at(name_by("c", dead())),
            at(name_by("b-1.tmp", dead())),
            at(".c.del-elsewhere-0000000000000001-1-1-00000000".into()),
            at(".b.del-elsewhere-0000000000000001-1-1-00000000".into()),
        ];
        let own = parent.path().join(name_by("c", dead()));
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("notes.txt"), "displaced by a save that was killed").unwrap();
        let empty = parent.path().join(".c.tmp-elsewhere-0000000000000001-1-1-00000000");
        std::fs::create_dir(&empty).unwrap();
        let kept = [
            at(name_by("c", other.id())),
            // Another boot, no lock, changed since this one: perhaps a machine that this one exports the file system to.
            at(".c.tmp-elsewhere-0000000000000001-1-1-00000001".into()),
            at(aside_name(&name_by("b", dead()), 0)),
            at(".c.tmp-backup".into()),
        ];
        checkpoint(parent.path(), "c", "one");
        assert!(gone.iter().all(|path| !path.exists()) && !empty.exists());
        assert!(kept.iter().all(|path| path.join("model.safetensors").exists()));
        assert!(mine.path_of("").exists() && own.join("notes.txt").exists());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn the_lock_proves_where_the_process_cannot_be_seen() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        // As from a container: the same boot, another PID namespace.
        let made = name_by("c", 7).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(4, '-').collect();
        let name = format!("{}-1-{}-{}", fields[3], fields[1], fields[0]);
        let workspace = half(parent.path().join(&name));
        let manifest = std::fs::File::create(workspace.join(manifest::FILE)).unwrap();
        crate::sys::lock::take(&manifest).unwrap();
        drop(Workspace::create(&path, true).unwrap());
        assert!(workspace.exists());
        drop(manifest);
        drop(Workspace::create(&path, true).unwrap());
        assert!(!workspace.exists());
    }

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
        // A save takes it over, with the files of others, and never has to put it back.
        std::fs::write(path.join("config.json"), "{}").unwrap();
        put_aside();
        checkpoint(parent.path(), "c", "two");
        assert!(content(&path).ends_with("two") && path.join("config.json").exists());
        sweep();
    }

    #[test]
    fn what_was_replaced_does_not_come_back() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let aside = parent.path().join(aside_name(&name_by("c", dead()), 0));
        std::fs::rename(&path, &aside).unwrap();
        // The successor had the name, and somebody removed it.
        assert!(open_checkpoint(&path).is_err());
        assert!(aside.exists());
        assert_eq!(left_overs(parent.path()).unwrap()[0].state, State::Kept);
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
        // The first entry of a directory is not always the one that was made first.
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

    #[test]
    fn left_overs_are_listed_and_removed_on_request() {
        let parent = tempfile::tempdir().unwrap();
        let mut other = living();
        let alive = half(parent.path().join(name_by("c", other.id())));
        let gone = half(parent.path().join(name_by("c", dead())));
        let unknown = half(parent.path().join(".step-1.tmp-node7-0000000000000001-1-1-00000001"));
        let all = left_overs(parent.path()).unwrap();
        let state =
            |path: &Path| all.iter().find(|one| Some(one.name.as_os_str()) == path.file_name()).unwrap();
        assert_eq!(state(&alive).state, State::Alive);
        assert_eq!(state(&gone).state, State::Dead);
        assert_eq!((state(&unknown).state, state(&unknown).of.as_str()), (State::Unknown, "step-1"));
        assert_eq!((state(&unknown).host.as_str(), state(&unknown).bytes > 0), ("node7", true));
        let remove =
            |path: &Path, force| remove_left_over(parent.path(), path.file_name().unwrap(), force).unwrap();
        assert!(!remove(&alive, true) && !remove(&unknown, false) && !remove(Path::new("/c"), true));
        assert!(remove(&unknown, true) && remove(&gone, false));
        assert!(alive.exists() && !unknown.exists() && !gone.exists());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
