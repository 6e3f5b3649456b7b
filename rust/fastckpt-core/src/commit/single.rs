//! One file that appears at its path whole and durable, or not at all. It is written in a workspace beside the path and
//! renamed to the path. If the process is killed, its leftovers are removed like any workspace.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::io::{Errno, retry_on_intr};

use super::directory::{Id, id, sync};
use super::incoming::Incoming;
use super::leftovers::sweep;
use super::parents::open_or_make;
use super::target::split_target;
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::sys::fs::{
    self, Access, AtFlags, FileType, Gid, Mode, Timespec, Timestamps, UTIME_NOW, XattrFlags,
};
use crate::sys::memory::Bytes;

/// The name of the file in its workspace.
const DATA: &str = "data";
/// The extended attribute with the checksum of the file.
const CHECKSUM: &str = "user.fastckpt.crc64nvme";

/// A file that is being written.
#[derive(Debug)]
pub struct SingleFile {
    // The order matters: the file is closed before its workspace is removed.
    file: Incoming,
    workspace: Workspace,
    /// The permissions and the group of the file that is replaced.
    old: Option<(Mode, Gid)>,
}

impl SingleFile {
    /// Creates a file for `target`, with direct I/O or through the page cache. A file at `target` stays unchanged.
    pub fn create(target: &Path, direct: bool) -> Result<Self> {
        let (parent_path, name) = split_target(target)?;
        let parent = open_or_make(&parent_path)?;
        let exists = |why: &str| Error::Exists { path: target.to_path_buf(), why: why.to_owned() };
        let old = match fs::statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => None,
            Err(error) => return Err(Error::io("look at", target)(error)),
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {
                    Some((Mode::from_raw_mode(stat.st_mode & 0o777), Gid::from_raw(stat.st_gid)))
                }
                FileType::Directory => return Err(exists("it is a directory, not a file")),
                FileType::Symlink => {
                    return Err(exists("it is a symbolic link: save to the path it points to"));
                }
                _ => return Err(exists("it is not a regular file")),
            },
        };
        if old.is_some() {
            // A rename checks the permissions of the directory only.
            fs::accessat(&parent, &name, Access::WRITE_OK, AtFlags::EACCESS)
                .map_err(Error::io("replace the write-protected file", target))?;
        }
        if is_new(&parent) {
            sweep(parent.as_fd());
        }
        // The new file is never readable by more users than the old one. A directory may pass its group to new files.
        let inherited = fs::fstat(&parent).map_or(0, |stat| stat.st_mode & 0o2000);
        let hidden = old.map(|_| inherited);
        let workspace = Workspace::begin((parent, parent_path), name, target, true, (None, hidden))?;
        let file = Incoming::create(workspace.directory(), DATA, 0, direct)
            .map_err(Error::io("create", &workspace.path_of(DATA)))?;
        Ok(Self { file, workspace, old })
    }

    /// Whether its writes bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.file.file.is_direct()
    }

    /// Allocates the bytes from `start` to `end`, so that writes there need not extend the file one after another.
    pub fn reserve(&self, start: u64, end: u64) -> Result<()> {
        let reserved = self.file.file.reserve(start..end);
        reserved.map_err(Error::io("allocate", &self.workspace.path_of(DATA)))
    }

    /// Writes `bytes` at `offset` and returns their CRC-64/NVME. Whole pages at page boundaries bypass the page cache.
    pub fn write(&self, offset: u64, bytes: Bytes<'_>) -> Result<u64> {
        self.file.write(offset, bytes).map_err(Error::io("write", &self.workspace.path_of(DATA)))
    }

    /// Cuts the file to its first `nbytes` bytes, whose CRC-64/NVME is `sum`, and gives it its path, durably. The sum
    /// is stored with the file if the file system supports that.
    pub fn publish(self, nbytes: u64, sum: u64) -> Result<()> {
        let Self { workspace, file: Incoming { file, .. }, old } = self;
        let (path, fd) = (workspace.path_of(DATA), file.fd(false));
        retry_on_intr(|| fs::ftruncate(fd, nbytes)).map_err(Error::io("truncate", &path))?;
        // Comes before the change of the mode, which may forbid it.
        let _ = keep_sum(fd, nbytes, sum);
        if let Some((mode, group)) = old {
            let same = fs::fstat(fd).is_ok_and(|stat| stat.st_gid == group.as_raw());
            // A different group must not get the permissions of the old file's group.
            let mode =
                if same || fs::fchown(fd, None, Some(group)).is_ok() { mode } else { mode - Mode::RWXG };
            // This fails if the file system has no modes.
            let _ = fs::fchmod(fd, mode);
        }
        file.sync().map_err(Error::io("sync", &path))?;
        // NFS and FUSE keep an open file under another name if it is replaced later.
        drop(file);
        fs::renameat(workspace.directory(), DATA, &workspace.parent, &workspace.name)
            .map_err(Error::io("rename the finished file to", &workspace.target))?;
        sync(workspace.parent.as_fd()).map_err(Error::io("sync the directory of", &workspace.target))?;
        Ok(())
    }
}

/// Whether this process has not written here yet. Only the first of many small files in one directory sweeps.
fn is_new(directory: &OwnedFd) -> bool {
    static KNOWN: Mutex<BTreeSet<Id>> = Mutex::new(BTreeSet::new());
    let Ok(stat) = fs::fstat(directory) else { return true };
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).insert(id(&stat))
}

/// Stores the checksum of a file in an extended attribute, with the file's length and the time of its last change. A
/// program that writes to the file later changes that time, so the checksum is void.
fn keep_sum(fd: BorrowedFd<'_>, nbytes: u64, sum: u64) -> rustix::io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    fs::futimens(fd, &Timestamps { last_access: now, last_modification: now })?;
    // Reads the time back, because some file systems round it.
    let stat = fs::fstat(fd)?;
    let value = format!("{sum:016x} {nbytes} {}.{:09}", stat.st_mtime, stat.st_mtime_nsec);
    fs::fsetxattr(fd, CHECKSUM, value.as_bytes(), XattrFlags::empty())
}
