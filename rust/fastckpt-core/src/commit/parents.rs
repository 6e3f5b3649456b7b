//! The directories above a checkpoint. A save creates missing ones, durably.

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::io::{Errno, retry_on_intr};

use super::directory::{is_empty, open_child, sync};
use crate::error::{Error, OPEN_PARENT, Result};
use crate::sys::file::open_directory;
use crate::sys::fs::{self, Access, AtFlags, Mode, OFlags};

/// Opens the directory `path`. Creates it and the directories above it if they are missing, and makes their names
/// durable. Other processes may create the same directories at the same time.
pub(super) fn open_or_make(path: &Path) -> Result<OwnedFd> {
    let (mut at, missing) = nearest(path)?;
    // A killed save may have created this directory without syncing its name. No save creates anything in a directory
    // before that sync, so only the name of an empty directory is in doubt.
    if is_empty(at.as_fd()) {
        match open_child(at.as_fd(), OsStr::new("..")).and_then(|above| sync(above.as_fd())) {
            // The directory above may be unreadable.
            Ok(_) | Err(Errno::ACCESS) => {}
            Err(error) => return Err(Error::io("sync the directories above", path)(error)),
        }
    }
    for path in missing.into_iter().rev() {
        // Unlike `file_name`, this also works for `..`, which exists.
        let Some(name) = path.components().next_back() else { continue };
        match fs::mkdirat(&at, name.as_os_str(), Mode::from_raw_mode(0o777)) {
            // Another process may have created it a moment ago without syncing it yet.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(Error::io("make the directory", path)(error)),
        }
        sync(at.as_fd()).map_err(Error::io("sync the parent directory of", path))?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        at = retry_on_intr(|| fs::openat(&at, name.as_os_str(), flags, Mode::empty()))
            .map_err(Error::io(OPEN_PARENT, path))?;
    }
    Ok(at)
}

/// Opens the nearest existing directory at or above `path`, and returns whether it is `path` itself. If it is not,
/// [`open_or_make`] could create `path`. Fails if a save could not create a directory there, as far as this can be
/// known without trying.
pub(super) fn open_or_judge(path: &Path) -> Result<(OwnedFd, bool)> {
    let (at, missing) = nearest(path)?;
    match fs::accessat(&at, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS) {
        Err(error @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) => {
            let operation = if missing.is_empty() { "create a directory in" } else { "make the directory" };
            Err(Error::io(operation, missing.last().unwrap_or(&path))(error))
        }
        // Any other failure proves nothing about permissions.
        _ => Ok((at, missing.is_empty())),
    }
}

/// The nearest existing directory at or above `path`. If there is none, the save reports why.
pub(crate) fn directory_at(path: &Path) -> Option<OwnedFd> {
    nearest(path).ok().map(|(directory, _)| directory)
}

/// The nearest existing directory at or above `path`, and the missing directories on the way, the lowest first.
fn nearest(path: &Path) -> Result<(OwnedFd, Vec<&Path>)> {
    let mut missing: Vec<(&Path, io::Error)> = Vec::new();
    for above in path.ancestors() {
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        match open_directory(above) {
            Ok(directory) => {
                // A file or a dangling link is in the way.
                let in_the_way = |(path, error): &mut (&Path, io::Error)| {
                    error.kind() != ErrorKind::NotFound || path.is_symlink()
                };
                if let Some((path, error)) = missing.pop_if(in_the_way) {
                    return Err(Error::io(OPEN_PARENT, path)(error));
                }
                let missing: Vec<_> = missing.into_iter().map(|(path, _)| path).collect();
                check_lengths(&directory, &missing)?;
                return Ok((directory, missing));
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                missing.push((above, error));
            }
            Err(error) => return Err(Error::io(OPEN_PARENT, above)(error)),
        }
    }
    let gone = io::Error::from_raw_os_error(libc::ENOENT);
    Err(Error::io(OPEN_PARENT, path)(gone))
}

/// Refuses names that the file system of `directory` finds too long, before any directory is made.
fn check_lengths(directory: &OwnedFd, missing: &[&Path]) -> Result<()> {
    for path in missing {
        if let Some(name) = path.file_name() {
            check_length(directory, name).map_err(Error::io("make the directory", path))?;
        }
    }
    Ok(())
}

/// Fails if `name` is too long for a directory in the file system of `directory`.
pub(super) fn check_length(directory: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    match fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(error @ Errno::NAMETOOLONG) => Err(error),
        // Any other result means nothing: the name does not belong in this directory.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn errno(outcome: Result<impl Sized>) -> Option<i32> {
        outcome.err().and_then(|error| error.errno())
    }

    #[test]
    fn missing_parents_are_made_and_looking_makes_none() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/c");
        assert!(!open_or_judge(&path).unwrap().1);
        assert!(!root.path().join("a").exists());
        for _ in 0..2 {
            open_or_make(&path).unwrap();
            assert!(path.is_dir() && open_or_judge(&path).unwrap().1);
        }
        symlink("a", root.path().join("link")).unwrap();
        open_or_make(&root.path().join("link/d")).unwrap();
        open_or_make(&root.path().join("new/../e")).unwrap();
        assert!(root.path().join("a/d").is_dir() && root.path().join("e").is_dir());
        assert!(!open_or_judge(Path::new("relative")).unwrap().1);
    }

    #[test]
    fn where_a_name_is_too_long_nothing_is_made() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a").join("x".repeat(300)).join("b");
        assert_eq!(errno(open_or_judge(&path)), Some(libc::ENAMETOOLONG));
        assert_eq!(errno(open_or_make(&path)), Some(libc::ENAMETOOLONG));
        assert!(!root.path().join("a").exists());
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let link = root.path().join("link");
        symlink("nowhere", &link).unwrap();
        for (obstacle, number) in [(&file, libc::ENOTDIR), (&link, libc::ENOENT)] {
            for path in [obstacle.clone(), obstacle.join("b"), obstacle.join("b/c")] {
                for error in [open_or_make(&path).unwrap_err(), open_or_judge(&path).unwrap_err()] {
                    assert_eq!(error.errno(), Some(number), "{error}");
                    assert!(error.to_string().contains(&format!("`{}`", obstacle.display())), "{error}");
                }
            }
        }
        assert!(!root.path().join("nowhere").exists());
        assert_eq!(errno(open_or_make(Path::new("/proc/self/mine"))), Some(libc::ENOENT));
    }
}
