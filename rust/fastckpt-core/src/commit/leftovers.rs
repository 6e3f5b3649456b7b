//! What writers that died left beside a checkpoint: swept by the next save, put back by whoever opens it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags, FileType, FlockOperation};
use rustix::io::{Errno, retry_on_intr};

use super::names::{Temporary, host};
use super::{entries, has_magic, open_child, remove, split};
use crate::error::{Error, Result};
use crate::sys::file::open_directory;

/// How long a load waits for a commit that has moved the old checkpoint away and not yet put the new one there.
const COMMIT_WAIT: Duration = Duration::from_secs(5);

/// Removes what dead writers left in the target's parent. A writer is dead when it ran on this host and its lock can be taken;
/// age proves nothing, and neither does a process number, which another container may not see.
pub(super) fn sweep(parent: BorrowedFd<'_>, name: &OsStr) {
    let host = host();
    let mut synced = false;
    for (found, kind) in entries(parent).unwrap_or_default() {
        let found = OsStr::from_bytes(found.to_bytes());
        let Some(temporary) = Temporary::parse(found.as_bytes()) else { continue };
        // An old checkpoint of another name may be the only one: that is for its own recovery to say.
        let sweepable = temporary.kind == b"tmp" || temporary.is_of(name);
        if kind != FileType::Directory || temporary.host != host.as_bytes() || !sweepable {
            continue;
        }
        let Ok(directory) = open_child(parent, found) else { continue };
        if fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        // Its writer may have died since the recovery, between its two renames: then this is all there is.
        if temporary.kind == b"old" && fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).is_err() {
            continue;
        }
        // It may be an old checkpoint whose successor took its name a moment ago: that rename first.
        if !synced && retry_on_intr(|| fs::fsync(parent)).is_err() {
            return;
        }
        synced = true;
        let _ = remove(parent, found);
    }
}

/// Puts an old checkpoint back whose writer died between the two plain renames.
/// Returns the name under which it can be read if that fails (a read-only mount).
pub(super) fn recover(parent_path: &Path, parent: BorrowedFd<'_>, name: &OsStr) -> Option<PathBuf> {
    let give_up = Instant::now() + COMMIT_WAIT;
    loop {
        if fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return None;
        }
        let mut busy = false;
        for (found, _) in entries(parent).unwrap_or_default() {
            let old = OsStr::from_bytes(found.to_bytes());
            if !Temporary::parse(old.as_bytes()).is_some_and(|t| t.kind == b"old" && t.is_of(name)) {
                continue;
            }
            let Ok(directory) = open_child(parent, old) else { continue };
            if fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
                busy = true;
            } else if has_magic(directory.as_fd()).unwrap_or(false) {
                if fs::renameat(parent, old, parent, name).is_err() {
                    return Some(parent_path.join(old));
                }
                let _ = retry_on_intr(|| fs::fsync(parent));
                return None;
            }
        }
        if !busy || Instant::now() > give_up {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Opens the directory of the checkpoint at `path` for reading, after undoing a save that died half-way.
pub fn open_checkpoint(path: &Path) -> Result<OwnedFd> {
    let open = |path: &Path| open_directory(path);
    match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let instead = split(path).ok().and_then(|(parent_path, name)| {
                let parent = open_directory(&parent_path).ok()?;
                recover(&parent_path, parent.as_fd(), &name)
            });
            open(instead.as_deref().unwrap_or(path))
        }
        other => other,
    }
    .map_err(Error::io("open checkpoint", path))
}

#[cfg(test)]
mod tests {
    use crate::commit::Workspace;
    use crate::commit::names::temporary_name;
    use crate::commit::tests::{checkpoint, content};

    use super::*;

    #[test]
    fn left_overs_of_the_dead_are_swept_and_the_living_are_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let living = Workspace::create(&path, true).unwrap();
        let dead = parent.path().join(temporary_name(OsStr::new("c"), "tmp"));
        let foreign = parent.path().join(".c.tmp-elsewhere-00000000-1-00000000");
        let sibling = parent.path().join(temporary_name(OsStr::new("b-1.tmp"), "tmp"));
        let old_sibling = parent.path().join(temporary_name(OsStr::new("b"), "old"));
        let lookalike = parent.path().join(".c.tmp-backup");
        for path in [&dead, &foreign, &sibling, &old_sibling, &lookalike] {
            std::fs::create_dir(path).unwrap();
            std::fs::write(path.join("model.safetensors"), "half").unwrap();
        }
        checkpoint(parent.path(), "c", "one");
        assert!(!dead.exists() && !sibling.exists());
        assert!(foreign.exists() && old_sibling.exists() && lookalike.exists());
        assert!(living.path_of("").exists());
    }

    #[test]
    fn a_save_that_died_between_two_renames_is_undone() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let aside = parent.path().join(temporary_name(OsStr::new("c"), "old"));
        std::fs::rename(&path, &aside).unwrap();
        open_checkpoint(&path).unwrap();
        assert!(content(&path).ends_with("one"));
        std::fs::rename(&path, &aside).unwrap();
        drop(Workspace::create(&path, true).unwrap());
        assert!(content(&path).ends_with("one"));
    }
}
