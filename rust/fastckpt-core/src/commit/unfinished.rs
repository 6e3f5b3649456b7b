//! Finds, judges and removes the directories in which the files of copies are gathered (`docs/format.md`, 6.4). An
//! interrupted copy leaves such a directory, and the next copy of the same checkpoint continues it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use super::content::files;
use super::directory::{Id, entries, id, id_of_renamed, open_child};
use super::leftovers::{State, destroy};
use super::locks::{Reach, reach};
use super::names::{Kind, Temporary, parse_gathering, workspace_name};
use crate::format::manifest;
use crate::sys::file::{open_regular, read_at};
use crate::sys::fs::{self, FileType, Mode, OFlags};
use crate::sys::lock;

/// The file on which gathering processes hold a shared lock.
pub(super) const LOCK: &str = ".lock";
/// The bytes of a manifest that contain its checksum.
const FIRST_LINE: usize = 64;

/// The directories in `parent` in which copies are gathered.
pub(super) fn unfinished(parent: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let all = entries(parent)?.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
    let all = all.map(|(name, _)| OsStr::from_bytes(name.to_bytes()).to_owned());
    Ok(all.filter(|name| parse_gathering(name).is_some()).collect())
}

/// The verdict on the directory of a copy. If it is dead, no other process gathers in it while this value is held.
pub(super) struct Judged {
    pub(super) state: State,
    pub(super) id: Id,
    _lock: Option<OwnedFd>,
}

/// Determines whether a process gathers in `found`; `None` if the directory is gone.
pub(super) fn judge(parent: BorrowedFd<'_>, found: &OsStr) -> Option<Judged> {
    let directory = open_child(parent, found).ok()?;
    let id = id(&fs::fstat(&directory).ok()?);
    let files = files(directory.as_fd()).ok()?;
    let (state, lock) = if files.are_plain() {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match fs::openat(&directory, LOCK, flags, Mode::empty()) {
            // The creator is about to create the lock, or was killed before that.
            Err(_) if files.is_empty() => (State::Dead, None),
            Err(_) => (State::Foreign, None),
            Ok(file) => match lock::take(&file) {
                Err(error) if lock::is_taken(&error) => (State::Alive, None),
                Ok(()) if reach(directory.as_fd()) != Reach::Unknown => (State::Dead, Some(file)),
                _ => (State::Unknown, None),
            },
        }
    } else {
        (State::Foreign, None)
    };
    Some(Judged { state, id, _lock: lock })
}

/// Whether the checkpoint that was gathered in `found` has its final name, so that no copy continues in `found`.
pub(super) fn is_finished(parent: BorrowedFd<'_>, found: &OsStr) -> bool {
    let Some((of, seal)) = parse_gathering(found) else { return false };
    let mut begin = [0; FIRST_LINE];
    let mut read = || -> io::Result<usize> {
        let (file, _) = open_regular(open_child(parent, of)?.as_fd(), manifest::FILE)?;
        read_at(file.as_fd(), &mut begin, 0)
    };
    read().is_ok_and(|len| manifest::seal_of(&begin[..len]) == Some(seal))
}

/// Removes `found`, whose id is `expected`. A process that gathers there fails. The rename decides, as for a workspace.
pub(super) fn throw_away(parent: BorrowedFd<'_>, found: &OsStr, expected: Id) -> io::Result<()> {
    let Some((of, _)) = parse_gathering(found) else { return Ok(()) };
    let claimed = workspace_name(of);
    let Some(garbage) = Temporary::parse(claimed.as_bytes()).map(|made| made.renamed(Kind::Del)) else {
        return Ok(());
    };
    fs::renameat(parent, found, parent, &garbage)?;
    if id_of_renamed(parent, &garbage) != Some(expected) {
        // Another directory has taken the name since the check. It holds copies of files that exist elsewhere.
        return Ok(fs::renameat(parent, &garbage, parent, found)?);
    }
    destroy(parent, &garbage, expected)
}

/// Removes from `parent` the remains of copies that ended between the commit and the clean-up.
pub(super) fn sweep_finished(parent: BorrowedFd<'_>) {
    for found in unfinished(parent).unwrap_or_default() {
        if !is_finished(parent, &found) {
            continue;
        }
        if let Some(Judged { state: State::Dead, id, _lock }) = judge(parent, &found) {
            let _ = throw_away(parent, &found, id);
        }
    }
}
