//! Directories: opened, listed, told apart, synced.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::{Errno, Result, retry_on_intr};

/// Which directory it is, whatever its name. An inode's number is not given away again while the directory is open.
pub(super) type Id = (u64, u64);

pub(super) fn id(stat: &Stat) -> Id {
    (stat.st_dev, stat.st_ino)
}

/// Which file or directory has the name `name` inside `parent`.
pub(super) fn id_of(parent: BorrowedFd<'_>, name: &OsStr) -> Option<Id> {
    fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok().as_ref().map(id)
}

/// The entries of a directory.
pub(super) fn entries(directory: BorrowedFd<'_>) -> Result<Vec<(CString, FileType)>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            let kind = match entry.file_type() {
                FileType::Unknown => match fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Err(Errno::NOENT) => continue,
                    stat => FileType::from_raw_mode(stat?.st_mode),
                },
                known => known,
            };
            all.push((name.to_owned(), kind));
        }
    }
    Ok(all)
}

/// Opens the directory `name` inside `parent`, not through a symbolic link.
pub(super) fn open_child(parent: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| fs::openat(parent, name, flags, Mode::empty()))
}

/// Has a network file system ask its server what is in `directory`: what is believed of names in there may be half a minute old.
pub(crate) fn refresh(directory: impl AsFd) {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let _ = fs::statx(directory, "", flags, StatxFlags::BASIC_STATS);
}

/// Makes the names in `directory` durable. Returns whether that can be asked for: some file systems (vboxsf, 9p, old CIFS) refuse it on
/// directories, and write names through.
pub(super) fn sync(directory: BorrowedFd<'_>) -> Result<bool> {
    match retry_on_intr(|| fs::fsync(directory)) {
        Err(Errno::INVAL | Errno::BADF) => Ok(false),
        other => other.map(|()| true),
    }
}
