//! Opens, lists, identifies and syncs directories.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::{Errno, Result, retry_on_intr};

use super::locks::is_nfs;
use crate::sys::calls;
use crate::sys::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat, StatxFlags};

/// The number of attempts while other processes save to and remove the same name.
pub(super) const TURNS: u8 = 100;
/// The permissions that the owner needs to fill a directory.
pub(super) const OWNER: u32 = 0o700;

/// Splits a path into its parent and its last component; `None` if the path does not end in a name.
pub(super) fn split(path: &Path) -> Option<(PathBuf, OsString)> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some((parent.to_path_buf(), path.file_name()?.to_owned()))
}

/// Identifies a directory independently of its name. Its inode number is not reused while the directory is open.
pub(super) type Id = (u64, u64);

pub(super) fn id(stat: &Stat) -> Id {
    (stat.st_dev, stat.st_ino)
}

/// The id of the file or directory called `name` in `parent`.
pub(super) fn id_of(parent: BorrowedFd<'_>, name: &OsStr) -> Option<Id> {
    fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok().as_ref().map(id)
}

/// The id of the directory that a rename has just moved to `name` in `parent`.
///
/// A network client renames by name, and assumes that the new name refers to the directory to which, in its view, the
/// old name referred. This is wrong if another client has put something else there before. On NFS, a second query does
/// not correct it: only a listing shows the truth.
pub(super) fn id_of_renamed(parent: BorrowedFd<'_>, name: &OsStr) -> Option<Id> {
    refresh(parent);
    let listed = if is_nfs(parent) { Some(number_of(parent, name)?) } else { None };
    // On FUSE, the cached attributes of the inode may be stale.
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    let _ = fs::statx(parent, name, flags, StatxFlags::BASIC_STATS);
    let (device, number) = id_of(parent, name)?;
    Some((device, listed.unwrap_or(number)))
}

/// The inode number that a listing of `parent` gives for `name`.
fn number_of(parent: BorrowedFd<'_>, name: &OsStr) -> Option<u64> {
    let _call = calls::on("list", parent);
    let mut entries = Dir::read_from(parent).ok()?;
    entries.find_map(|entry| {
        let entry = entry.ok()?;
        (entry.file_name().to_bytes() == name.as_bytes()).then(|| entry.ino())
    })
}

/// The entries of a directory.
pub(super) fn entries(directory: BorrowedFd<'_>) -> Result<Vec<(CString, FileType)>> {
    let mut all = Vec::new();
    let _call = calls::on("list", directory);
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

/// Whether a directory is empty. Stops at the first entry.
pub(super) fn is_empty(directory: BorrowedFd<'_>) -> bool {
    let _call = calls::on("list", directory);
    let is_real = |name: &std::ffi::CStr| name != c"." && name != c"..";
    Dir::read_from(directory)
        .is_ok_and(|mut all| all.all(|entry| entry.is_ok_and(|entry| !is_real(entry.file_name()))))
}

/// Opens the directory `name` in `parent`. Does not follow a symbolic link.
pub(super) fn open_child(parent: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| fs::openat(parent, name, flags, Mode::empty()))
}

/// Makes a network file system ask its server for the entries of `directory`. Its cached names may be half a minute
/// old.
pub(crate) fn refresh(directory: impl AsFd) {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let _ = fs::statx(directory, "", flags, StatxFlags::BASIC_STATS);
}

/// Makes the names in `directory` durable. Returns whether the file system supports this: some (vboxsf, 9p, old CIFS)
/// refuse to sync directories, but write names through.
pub(super) fn sync(directory: BorrowedFd<'_>) -> Result<bool> {
    match retry_on_intr(|| fs::fsync(directory)) {
        Err(Errno::INVAL | Errno::BADF) => Ok(false),
        other => other.map(|()| true),
    }
}
