//! What writers that died left beside a checkpoint: told apart from what is needed, and swept by the next save.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{self, AtFlags, FileType, Mode};
use rustix::io::Errno;

use super::content::{has_magic, written};
use super::directory::{Id, OWNER, entries, id, id_of, id_of_renamed, open_child, refresh, sync};
use super::names::{Kind, Temporary, displaced_name};
use super::owner::{Life, Verdict, judge};
use crate::format::manifest;

/// The temporary directories in `parent`.
pub(super) fn temporaries(parent: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let all = entries(parent)?.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
    let all = all.map(|(name, _)| OsStr::from_bytes(name.to_bytes()).to_owned());
    Ok(all.filter(|name| Temporary::parse(name.as_bytes()).is_some()).collect())
}

/// Takes the directory `found`, which is `expected`, away from whoever else may want it, and removes it. The rename
/// decides: of all who try, one wins, and a directory that has its final name by now is not touched. The `verdict` that
/// it may be removed is held until then, and no longer: its file is open, and NFS only renames what is open.
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

/// Renames `found` to the temporary name `claimed`. Returns whether it was `expected`; if not, it has its name again.
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
    // Another one came to lie there since it was looked at.
    unclaim(parent, found, claimed).map(|()| false)
}

/// Gives what was claimed its name back; if that is taken, a name that nobody sweeps.
pub(super) fn unclaim(parent: BorrowedFd<'_>, found: &OsStr, claimed: &OsStr) -> io::Result<()> {
    fs::renameat(parent, claimed, parent, found).map_err(|error| {
        let _ = fs::renameat(parent, claimed, parent, displaced_name(claimed));
        error.into()
    })
}

/// Removes a directory of plain files, its manifest first: what is half removed is not a checkpoint. What is already
/// gone is not a failure.
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
        return Err(Errno::STALE.into()); // a client of NFS still believes another one to be here
    }
    let all = entries(directory.as_fd())?;
    if !all.iter().all(|(_, kind)| *kind == FileType::RegularFile) {
        return Err(Errno::NOTEMPTY.into()); // somebody's own: nothing here is removed
    }
    // A checkpoint may have been closed to its owner, too.
    let _ = fs::fchmod(&directory, Mode::from_raw_mode(OWNER));
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
    /// The only copy of an old checkpoint, or the workspace that belongs to it: a commit stands between its two
    /// renames, or the successor was removed.
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
pub(super) struct Finding {
    pub(super) state: State,
    pub(super) id: Id,
    pub(super) verdict: Option<Verdict>,
}

/// Finds out what the temporary directory `found` is, unless it has gone.
pub(super) fn examine(parent: BorrowedFd<'_>, found: &OsStr) -> Option<Finding> {
    let temporary = Temporary::parse(found.as_bytes())?;
    let directory = open_child(parent, found).ok()?;
    let id = id(&fs::fstat(&directory).ok()?);
    let files = entries(directory.as_fd()).ok()?;
    let plain = files.iter().all(|(_, kind)| *kind == FileType::RegularFile);
    let manifest = files.iter().any(|(file, _)| file.to_bytes() == manifest::FILE.as_bytes());
    // A workspace has a manifest before it has anything else. This is somebody's own, displaced by a save that was
    // killed.
    let foreign = !plain || (temporary.kind != Kind::Del && !manifest && !files.is_empty());
    let (state, verdict) = match temporary.kind {
        _ if foreign => (State::Foreign, None),
        Kind::Del => (State::Dead, None),
        Kind::Old if is_superseded(parent, &holder(parent, &temporary), found) => (State::Dead, None),
        Kind::Old => (State::Kept, None),
        Kind::Tmp => {
            let verdict = judge(temporary.owner()?, directory.as_fd());
            let state = match verdict.life {
                Life::Alive => State::Alive,
                Life::Unknown => State::Unknown,
                // Looked for after the verdict: a writer that lives may take an old checkpoint aside at any moment.
                Life::Dead if has_partner(parent, found) => State::Kept,
                Life::Dead => State::Dead,
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

/// The name of the checkpoint that `temporary` belongs to, which is cut in there if it is long.
fn holder(parent: BorrowedFd<'_>, temporary: &Temporary<'_>) -> OsString {
    let of = temporary.of();
    if temporary.is_of(of) {
        return of.to_owned();
    }
    let all = entries(parent).unwrap_or_default();
    let mut names = all.into_iter().map(|(name, _)| OsStr::from_bytes(name.to_bytes()).to_owned());
    names.find(|name| temporary.is_of(name)).unwrap_or_else(|| of.to_owned())
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

#[cfg(test)]
pub(super) mod tests {
    use std::path::PathBuf;
    use std::process::{Child, Command};

    use crate::commit::Workspace;
    use crate::commit::names::{aside_name, workspace_name};
    use crate::commit::tests::checkpoint;

    use super::*;

    /// The name of a workspace for `name` as another process would give it.
    pub(in crate::commit) fn name_by(name: &str, pid: u32) -> OsString {
        let made = workspace_name(OsStr::new(name)).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(4, '-').collect();
        format!("{}-{pid}-0-{}", fields[3], fields[0]).into()
    }

    /// The number of a process that has ended.
    pub(in crate::commit) fn dead() -> u32 {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    }

    /// A process that lives until it is killed.
    pub(in crate::commit) fn living() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    pub(in crate::commit) fn half(path: PathBuf) -> PathBuf {
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(manifest::FILE), "").unwrap();
        std::fs::write(path.join("model.safetensors"), "half").unwrap();
        path
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
            // Another boot, no lock, changed since this one: perhaps a machine that this one exports the file system
            // to.
            at(".c.tmp-elsewhere-0000000000000001-1-1-1-00000001".into()),
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
    fn a_process_that_has_the_number_of_a_dead_one_is_another() {
        let parent = tempfile::tempdir().unwrap();
        let made = workspace_name(OsStr::new("c")).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(3, '-').collect();
        let earlier = half(parent.path().join(format!("{}-1-{}", fields[2], fields[0])));
        let mine = half(parent.path().join(&made));
        drop(Workspace::create(&parent.path().join("c"), true).unwrap());
        assert!(!earlier.exists() && mine.exists());
    }

    #[test]
    fn a_lock_that_is_held_outweighs_a_process_that_is_not_seen() {
        let parent = tempfile::tempdir().unwrap();
        let clone = half(parent.path().join(name_by("c", dead())));
        let manifest = std::fs::File::create(clone.join(manifest::FILE)).unwrap();
        crate::sys::lock::take(&manifest).unwrap();
        drop(Workspace::create(&parent.path().join("c"), true).unwrap());
        assert!(clone.exists());
        drop(manifest);
        drop(Workspace::create(&parent.path().join("c"), true).unwrap());
        assert!(!clone.exists());
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
        // As from a container: the same boot, another PID namespace.
        let made = name_by("c", 7).into_string().unwrap();
        let fields: Vec<&str> = made.rsplitn(5, '-').collect();
        let name = format!("{}-1-{}-{}-{}", fields[4], fields[2], fields[1], fields[0]);
        let workspace = half(parent.path().join(&name));
        let manifest = std::fs::File::create(workspace.join(manifest::FILE)).unwrap();
        crate::sys::lock::take(&manifest).unwrap();
        drop(Workspace::create(&path, true).unwrap());
        assert!(workspace.exists());
        drop(manifest);
        drop(Workspace::create(&path, true).unwrap());
        assert!(!workspace.exists());
    }
}
