//! What a directory holds: a manifest of fastckpt, files of ours, files of other people.

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{self, AtFlags};
use rustix::io::retry_on_intr;

use crate::format::{groups, index, manifest};
use crate::sys::file::open_regular;

/// Whether `name` inside a checkpoint is one that fastckpt writes.
pub(super) fn is_ours(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    groups::is_shard_name(name) || [manifest::FILE, index::FILE].contains(&name)
}

/// A file of other people that is being taken along.
pub(super) const ON_ITS_WAY: &CStr = c".fastckpt-carried";

/// Whether `name` is what an interrupted carrying left, or what a file system makes of a file that is removed while
/// somebody has it open (NFS, FUSE).
pub(super) fn is_remnant(name: &[u8]) -> bool {
    name == ON_ITS_WAY.to_bytes() || name.starts_with(b".nfs0") || name.starts_with(b".fuse_hidden")
}

/// Whether a directory holds a manifest of fastckpt, of any version, whole or damaged.
pub(super) fn has_magic(directory: BorrowedFd<'_>) -> io::Result<bool> {
    let mut begin = [0; manifest::MAGIC.len()];
    match open_regular(directory, manifest::FILE) {
        Ok((fd, _)) => {
            let read = retry_on_intr(|| rustix::io::pread(&fd, &mut begin[..], 0))?;
            Ok(read == begin.len() && begin == *manifest::MAGIC)
        }
        // There is none, or something else has its name. Any other failure says nothing about what is there.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(false),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// When the manifest of the checkpoint in `directory` was written, seconds and nanoseconds.
pub(super) fn written(directory: BorrowedFd<'_>) -> Option<(i64, u64)> {
    let stat = fs::statat(directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some((stat.st_mtime, stat.st_mtime_nsec))
}
