//! What a directory holds: a fastckpt manifest, our files, other files.

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{self, AtFlags};
use rustix::io::retry_on_intr;

use crate::format::{groups, index, manifest};
use crate::sys::file::open_regular;

/// What torch.distributed.checkpoint and tools around it look for. `fastckpt.dcp` puts one beside the manifest for them,
/// and nothing here reads it.
pub(super) const TORCH_METADATA: &str = ".metadata";

/// Whether fastckpt writes files called `name` in a checkpoint.
pub(super) fn is_ours(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    groups::is_shard_name(name) || [manifest::FILE, index::FILE, TORCH_METADATA].contains(&name)
}

/// The temporary name of a file that is being carried over.
pub(super) const ON_ITS_WAY: &CStr = c".fastckpt-carried";

/// Whether `name` is what an interrupted carry-over left, or what a file system (NFS, FUSE) makes of a file that is
/// removed while a process has it open.
pub(super) fn is_remnant(name: &[u8]) -> bool {
    name == ON_ITS_WAY.to_bytes() || name.starts_with(b".nfs0") || name.starts_with(b".fuse_hidden")
}

/// Whether a directory holds a fastckpt manifest of any version, intact or damaged.
pub(super) fn has_magic(directory: BorrowedFd<'_>) -> io::Result<bool> {
    let mut begin = [0; manifest::MAGIC.len()];
    match open_regular(directory, manifest::FILE) {
        Ok((fd, _)) => {
            let read = retry_on_intr(|| rustix::io::pread(&fd, &mut begin[..], 0))?;
            Ok(read == begin.len() && begin == *manifest::MAGIC)
        }
        // There is no manifest, or something else has its name. Any other failure says nothing about what is there.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(false),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// When the manifest of the checkpoint in `directory` was written, in seconds and nanoseconds.
pub(super) fn written(directory: BorrowedFd<'_>) -> Option<(i64, u64)> {
    let stat = fs::statat(directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some((stat.st_mtime, stat.st_mtime_nsec))
}
