//! Leftovers of dead writers beside a checkpoint. The next save distinguishes them from directories that are still
//! needed, and sweeps them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::io::Errno;

use super::content::{files, has_magic, in_training, is_ours, written};
use super::directory::{Id, OWNER, entries, id, id_of, id_of_renamed, open_child, refresh, sync};
use super::names::{Kind, Temporary, displaced_name};
use super::owner::{Life, Verdict, judge};
use crate::format::groups::TRAINING;
use crate::format::manifest;
use crate::sys::fs::{self, AtFlags, FileType, Mode};

/// The temporary directories in `parent`.
pub(super) fn temporaries(parent: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let all = entries(parent)?.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
    let all = all.map(|(name, _)| OsStr::from_bytes(name.to_bytes()).to_owned());
    Ok(all.filter(|name| Temporary::parse(name.as_bytes()).is_some()).collect())
}

/// Claims the directory `found`, whose id is `expected`, and removes it. The rename decides: if several processes try,
/// one of them wins, and a directory that has its final name by then is not touched. `verdict` proves that the
/// directory may be removed. It is held until the rename and then dropped: it keeps a file open, and NFS renames an
/// open file instead of removing it.
pub(super) fn remove(
    parent: BorrowedFd<'_>,
    found: &OsStr,
    expected: Id,
    verdict: Option<Verdict>,
) -> io::Result<()> {
    let Some(temporary) = Temporary::parse(found.as_bytes()) else { return Ok(()) };
    if temporary.kind == Kind::Del {
        return destroy(parent, found, expected);
    }
    let claimed = temporary.renamed(Kind::Tmp);
    if !claim(parent, found, &claimed, expected)? {
        return Ok(());
    }
    let garbage = temporary.renamed(Kind::Del);
    fs::renameat(parent, &claimed, parent, &garbage)?;
    drop(verdict);
    destroy(parent, &garbage, expected)
}

/// Renames `found` to the temporary name `claimed`. Returns whether it was `expected`. If it was not, it gets its name
/// back.
pub(super) fn claim(
    parent: BorrowedFd<'_>,
    found: &OsStr,
    claimed: &OsStr,
    expected: Id,
) -> io::Result<bool> {
    match fs::renameat(parent, found, parent, claimed) {
        Err(Errno::NOENT | Errno::STALE) => return Ok(false),
        other => other?,
    }
    if id_of_renamed(parent, claimed) == Some(expected) {
        return Ok(true);
    }
    // Another directory has taken the name since the check.
    unclaim(parent, found, claimed).map(|()| false)
}

/// Gives a claimed directory its name back or, if that name is taken, a name that no sweep removes.
pub(super) fn unclaim(parent: BorrowedFd<'_>, found: &OsStr, claimed: &OsStr) -> io::Result<()> {
    fs::renameat(parent, claimed, parent, found).map_err(|error| {
        let _ = fs::renameat(parent, claimed, parent, displaced_name(claimed));
        error.into()
    })
}

/// Removes the directory of a checkpoint, which holds plain files only. The manifest goes first, because a half-removed
/// directory must not be a checkpoint. A file that is already gone is not a failure.
pub(super) fn destroy(parent: BorrowedFd<'_>, name: &OsStr, expected: Id) -> io::Result<()> {
    let gone = |outcome: rustix::io::Result<()>| match outcome {
        Err(Errno::NOENT | Errno::STALE) => Ok(()),
        other => other,
    };
    let directory = match open_child(parent, name) {
        Err(Errno::NOENT | Errno::STALE) => return Ok(()),
        other => other?,
    };
    if id(&fs::fstat(&directory)?) != expected {
        return Err(Errno::STALE.into()); // an NFS client still sees another directory here
    }
    let files = files(directory.as_fd())?;
    if !files.are_plain() {
        return Err(Errno::NOTEMPTY.into()); // not a directory of fastckpt: nothing in it is removed
    }
    // The checkpoint's mode may deny access even to its owner.
    let training = files.training.as_ref();
    for inside in [Some(&directory), training].into_iter().flatten() {
        let _ = fs::fchmod(inside, Mode::from_raw_mode(OWNER));
    }
    gone(fs::unlinkat(&directory, manifest::FILE, AtFlags::empty()))?;
    for (file, _) in &files.all {
        let (inside, file) = training.zip(in_training(file)).unwrap_or((&directory, file));
        gone(fs::unlinkat(inside, file, AtFlags::empty()))?;
    }
    if training.is_some() {
        gone(fs::unlinkat(&directory, TRAINING, AtFlags::REMOVEDIR))?;
    }
    Ok(gone(fs::unlinkat(parent, name, AtFlags::REMOVEDIR))?)
}

/// The state of a temporary directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The writer is alive.
    Alive,
    /// The directory is not needed: the next save into this directory removes it.
    Dead,
    /// Its writer may be alive: nothing here proves that it is dead.
    Unknown,
    /// The only copy of an old checkpoint, or the workspace that belongs to that copy. Either a commit is between its
    /// two renames, or the successor was removed.
    Kept,
    /// Not made by fastckpt: something that was put in the way of a save.
    Foreign,
}

impl State {
    /// The state as one word.
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

/// The verdict on a temporary directory. It is valid as long as this value is held.
pub(super) struct Finding {
    pub(super) state: State,
    pub(super) id: Id,
    pub(super) verdict: Option<Verdict>,
}

/// Determines the state of the temporary directory `found`; `None` if the directory is gone.
pub(super) fn examine(parent: BorrowedFd<'_>, found: &OsStr) -> Option<Finding> {
    let temporary = Temporary::parse(found.as_bytes())?;
    let directory = open_child(parent, found).ok()?;
    let id = id(&fs::fstat(&directory).ok()?);
    let files = files(directory.as_fd()).ok()?;
    let manifest = files.all.iter().any(|(file, _)| file.to_bytes() == manifest::FILE.as_bytes());
    // A workspace gets its manifest before anything else. A directory without one comes from another program: a save
    // displaced it and was killed. If it holds only files with fastckpt's names, a user may have removed the manifest.
    let without = temporary.kind != Kind::Del && !manifest && !files.is_empty();
    let spoilt = temporary.kind == Kind::Tmp && files.all.iter().all(|(file, _)| is_ours(file.to_bytes()));
    let foreign = !files.are_plain() || (without && !spoilt);
    let (state, verdict) = match temporary.kind {
        _ if foreign => (State::Foreign, None),
        Kind::Del => (State::Dead, None),
        Kind::Old if is_superseded(parent, &holder(parent, &temporary), found) => (State::Dead, None),
        Kind::Old => (State::Kept, None),
        Kind::Tmp => {
            let verdict = judge(temporary.owner()?, directory.as_fd());
            let state = match verdict.life {
                Life::Dead if without => State::Unknown,
                Life::Alive => State::Alive,
                Life::Unknown => State::Unknown,
                // Checked after the verdict: a live writer may move an old checkpoint aside at any moment.
                Life::Dead if has_partner(parent, found) => State::Kept,
                Life::Dead => State::Dead,
            };
            (state, Some(verdict))
        }
    };
    Some(Finding { state, id, verdict })
}

/// Whether an old checkpoint was moved aside for the workspace `found`. If both exist, the old checkpoint must be put
/// back.
fn has_partner(parent: BorrowedFd<'_>, found: &OsStr) -> bool {
    refresh(parent);
    let is_partner = |name: &OsString| {
        let partner =
            Temporary::parse(name.as_bytes()).filter(|t| t.kind == Kind::Old && t.workspace() == found);
        // Without a manifest, the directory is not a checkpoint of fastckpt and needs no workspace.
        let old = partner.and_then(|_| open_child(parent, name).ok());
        old.is_some_and(|old| has_magic(old.as_fd()).unwrap_or(true))
    };
    temporaries(parent).map_or(true, |all| all.iter().any(is_partner))
}

/// The name of the checkpoint that `temporary` belongs to. `temporary` contains only the start of a long name.
fn holder(parent: BorrowedFd<'_>, temporary: &Temporary<'_>) -> OsString {
    let of = temporary.of();
    if temporary.is_of(of) {
        return of.to_owned();
    }
    let all = entries(parent).unwrap_or_default();
    let mut names = all.into_iter().map(|(name, _)| OsStr::from_bytes(name.to_bytes()).to_owned());
    names.find(|name| temporary.is_of(name)).unwrap_or_else(|| of.to_owned())
}

/// Whether a later checkpoint has `name`, which was the name of the checkpoint at `old`.
pub(super) fn is_superseded(parent: BorrowedFd<'_>, name: &OsStr, old: &OsStr) -> bool {
    refresh(parent);
    let Ok(holder) = open_child(parent, name) else { return false };
    // For a while, an NFS client may still show the old checkpoint under this name.
    let other = fs::fstat(&holder).is_ok_and(|stat| Some(id(&stat)) != id_of(parent, old));
    let Ok(old) = open_child(parent, old) else { return false };
    let later =
        written(holder.as_fd()).is_some_and(|holder| written(old.as_fd()).is_none_or(|old| holder >= old));
    other && later && has_magic(holder.as_fd()).unwrap_or(false)
}

/// Removes unneeded directories from the parent of the target path.
pub(super) fn sweep(parent: BorrowedFd<'_>) {
    let mut synced = false;
    let mut all = temporaries(parent).unwrap_or_default();
    // Old checkpoints go first: while one exists, its workspace is kept for it.
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
                    // An empty directory needs no proof: a live writer makes another one.
                    let _ = fs::unlinkat(parent, found, AtFlags::REMOVEDIR);
                    continue;
                }
                State::Alive | State::Kept | State::Foreign => continue,
            }
            // This may be an old checkpoint whose successor took its name a moment ago. That rename must be durable
            // before the old checkpoint is removed.
            if !synced && sync(parent).is_err() {
                return;
            }
            synced = true;
            let _ = remove(parent, found, finding.id, finding.verdict);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;
    use std::process::{Child, Command};

    use crate::commit::Workspace;
    use crate::commit::names::{aside_name, workspace_name};
    use crate::commit::tests::checkpoint;

    use super::*;

    /// The name that another process would give a workspace for `name`.
    pub(in crate::commit) fn name_by(name: &str, pid: u32) -> OsString {
        let made = workspace_name(OsStr::new(name)).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(4, '-').collect();
        format!("{}-{pid}-0-{}", fields[3], fields[0]).into()
    }

    /// The id of a process that has ended.
    pub(in crate::commit) fn dead() -> u32 {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    }

    /// A process that runs until it is killed.
    pub(in crate::commit) fn living() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    pub(in crate::commit) fn half(path: PathBuf) -> PathBuf {
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(manifest::FILE), "").unwrap();
        std::fs::write(path.join("model.safetensors"), "half").unwrap();
        path
    }

    /// Holds the lock of a workspace, as its writer does.
    pub(in crate::commit) fn lock(workspace: &std::path::Path) -> std::fs::File {
        let manifest = std::fs::File::create(workspace.join(manifest::FILE)).unwrap();
        crate::sys::lock::take(&manifest).unwrap();
        manifest
    }

    /// A child that another test has just forked holds a lock of this process until it starts its program.
    fn sweep_until_gone(workspace: &std::path::Path) {
        while workspace.exists() {
            drop(Workspace::create(&workspace.with_file_name("c"), true).unwrap());
        }
    }

    #[test]
    fn leftovers_of_the_dead_are_swept_and_the_living_are_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let mine = Workspace::create(&path, true).unwrap();
        let mut other = living();
        let at = |name: OsString| half(parent.path().join(name));
        let gone = [
            at(name_by("c", dead())),
            at(name_by("b-1.tmp", dead())),
            at(".c.del-elsewhere-0000000000000001-1-1-1-00000000".into()),
            at(".b.del-elsewhere-0000000000000001-1-1-1-00000000".into()),
        ];
        let own = parent.path().join(name_by("c", dead()));
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("notes.txt"), "displaced by a save that was killed").unwrap();
        let empty = parent.path().join(".c.tmp-elsewhere-0000000000000001-1-1-1-00000000");
        std::fs::create_dir(&empty).unwrap();
        let kept = [
            at(name_by("c", other.id())),
            // Another boot, no lock held, and changed since this boot. The directory may belong to a machine to which
            // this machine exports the file system.
            at(".c.tmp-elsewhere-0000000000000001-1-1-1-00000001".into()),
            at(aside_name(&name_by("b", dead()), 0)),
            at(".c.tmp-backup".into()),
        ];
        let _held = lock(&kept[0]);
        checkpoint(parent.path(), "c", "one");
        assert!(gone.iter().all(|path| !path.exists()) && !empty.exists());
        assert!(kept.iter().all(|path| path.join("model.safetensors").exists()));
        assert!(mine.path_of("").exists() && own.join("notes.txt").exists());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_process_that_has_the_number_of_a_dead_one_is_another() {
        let parent = tempfile::tempdir().unwrap();
        let made = workspace_name(OsStr::new("c")).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(3, '-').collect();
        let earlier = half(parent.path().join(format!("{}-1-{}", fields[2], fields[0])));
        let mine = half(parent.path().join(&made));
        let _held = lock(&mine);
        drop(Workspace::create(&parent.path().join("c"), true).unwrap());
        assert!(!earlier.exists() && mine.exists());
    }

    #[test]
    fn a_lock_that_is_held_outweighs_a_process_that_is_not_seen() {
        let parent = tempfile::tempdir().unwrap();
        let clone = half(parent.path().join(name_by("c", dead())));
        let manifest = lock(&clone);
        drop(Workspace::create(&parent.path().join("c"), true).unwrap());
        assert!(clone.exists());
        drop(manifest);
        sweep_until_gone(&clone);
    }

    #[test]
    fn a_lock_that_nobody_holds_outweighs_a_process_that_runs() {
        let parent = tempfile::tempdir().unwrap();
        let mut other = living();
        // The state that an `execve` in the middle of a save leaves.
        let unsealed = half(parent.path().join(name_by("c", other.id())));
        // The state after an exchange of names: the replaced checkpoint may have to get its name back.
        let displaced = half(parent.path().join(name_by("b", other.id())));
        std::fs::write(displaced.join(manifest::FILE), "{\"fastckpt\":1,").unwrap();
        drop(Workspace::create(&parent.path().join("c"), true).unwrap());
        assert!(!unsealed.exists() && displaced.exists());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_workspace_that_lost_any_of_its_files_is_swept_or_removed_on_request() {
        for lost in ["", "model.safetensors", "model.safetensors.index.json", manifest::FILE] {
            let parent = tempfile::tempdir().unwrap();
            let name = name_by("c", dead());
            let workspace = half(parent.path().join(&name));
            std::fs::write(workspace.join("model.safetensors.index.json"), "{}").unwrap();
            if !lost.is_empty() {
                std::fs::remove_file(workspace.join(lost)).unwrap();
            }
            drop(Workspace::create(&parent.path().join("c"), true).unwrap());
            // Without its manifest, the directory may be another program's model that a save displaced.
            assert_eq!(workspace.exists(), lost == manifest::FILE, "{lost}");
            let remove = |force| crate::commit::remove_leftover(parent.path(), &name, force).unwrap();
            assert!(!remove(false));
            assert_eq!(remove(true), lost == manifest::FILE);
            assert!(!workspace.exists());
        }
    }

    #[test]
    fn an_old_checkpoint_of_a_long_name_is_swept() {
        let parent = tempfile::tempdir().unwrap();
        let name = "n".repeat(200);
        let old = half(parent.path().join(aside_name(&name_by(&name, dead()), 0)));
        checkpoint(parent.path(), &name, "one");
        drop(Workspace::create(&parent.path().join("other"), true).unwrap());
        assert!(!old.exists());
    }

    #[test]
    fn the_lock_proves_where_the_process_cannot_be_seen() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        // A name from a container: the same boot, another PID namespace.
        let made = name_by("c", 7).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(5, '-').collect();
        let name = format!("{}-1-{}-{}-{}", fields[4], fields[2], fields[1], fields[0]);
        let workspace = half(parent.path().join(&name));
        let manifest = lock(&workspace);
        drop(Workspace::create(&path, true).unwrap());
        assert!(workspace.exists());
        drop(manifest);
        sweep_until_gone(&workspace);
    }
}
