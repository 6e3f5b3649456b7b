//! Checks whether an open checkpoint was replaced or removed, after a file was missing from it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::commit;
use crate::format::manifest;
use crate::sys::file;

/// How long to keep looking for a file if a client may have an outdated name of its directory. Clients of network file
/// systems cache names: FUSE does so for a second by default.
pub(super) const DOUBT: Duration = Duration::from_secs(2);
/// How long to wait before looking again.
pub(super) const PAUSE: Duration = Duration::from_millis(5);

/// Whether `error` means that a file or its directory was removed.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
}

pub(super) fn is_local(path: &Path) -> bool {
    file::open_directory(path)
        .is_ok_and(|directory| commit::reach(directory.as_fd()) == commit::Reach::Machine)
}

pub(super) fn is_stale(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESTALE)
}

/// Whether the open directory is no longer the one at `path`, after `error` in it. `certain` records that the directory
/// was still the one there, so that the wait happens only once.
pub(super) fn is_replaced(
    directory: &OwnedFd,
    path: &Path,
    seal: &[u8],
    error: &io::Error,
    certain: &OnceLock<()>,
) -> bool {
    if is_stale(error) {
        return true;
    }
    let begin = Instant::now();
    loop {
        let local = commit::reach(directory.as_fd()) == commit::Reach::Machine;
        if has_other_name(directory, path) || !local && has_other_manifest(path, seal) {
            return true;
        }
        let sure = local || certain.get().is_some();
        if sure || begin.elapsed() > DOUBT {
            let _ = certain.set(());
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

pub(super) fn has_other_name(directory: &OwnedFd, path: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Ok(parent) = file::open_directory(parent) {
        commit::refresh(&parent);
    }
    commit::refresh(directory);
    match (rustix::fs::fstat(directory), rustix::fs::stat(path)) {
        (Ok(held), Ok(named)) => (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino),
        _ => true,
    }
}

/// Whether the manifest at `path` is gone or does not start with `seal`.
fn has_other_manifest(path: &Path, seal: &[u8]) -> bool {
    let mut begin = vec![0; seal.len()];
    let read = file::open_directory(path)
        .and_then(|directory| file::open_regular(directory.as_fd(), manifest::FILE))
        .and_then(|(fd, _)| file::read_at(fd.as_fd(), &mut begin, 0));
    match read {
        Ok(read) => begin[..read] != *seal,
        Err(error) => is_gone(&error),
    }
}
