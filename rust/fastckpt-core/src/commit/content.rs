//! The contents of a directory: a fastckpt manifest, files of fastckpt, other files.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};

use super::directory::{entries, open_child, sync};
use crate::format::groups::{self, ADAPTER, MODEL, TRAINING};
use crate::format::{index, manifest};
use crate::sys::file::open_regular;
use crate::sys::fs::{self, AtFlags, FileType};

/// The file that torch.distributed.checkpoint and its tools look for. `fastckpt.dcp` writes this file beside the
/// manifest for them. Nothing in the core reads it.
pub(super) const TORCH_METADATA: &str = ".metadata";

/// The contents of a checkpoint's directory.
pub(super) struct Files {
    /// All names and kinds. The files of the directory `training` are listed as `training/NAME`; the directory is not.
    pub(super) all: Vec<(CString, FileType)>,
    /// The directory `training`, if there is one.
    pub(super) training: Option<OwnedFd>,
}

impl Files {
    /// Whether the directory is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.training.is_none()
    }

    /// Whether fastckpt wrote `file`, one of the listed files. A model's shards have one of two names. If `model` is
    /// here, a file named like an adapter belongs to another program.
    pub(super) fn has_own(&self, file: &CStr) -> bool {
        let is_named = |group, file: &CStr| file.to_str().is_ok_and(|file| groups::is_named(group, file));
        let foreign = || is_named(ADAPTER, file) && self.all.iter().any(|(other, _)| is_named(MODEL, other));
        is_ours(file.to_bytes()) && !foreign()
    }

    /// Whether the directory holds regular files only.
    pub(super) fn are_plain(&self) -> bool {
        self.all.iter().all(|(_, kind)| *kind == FileType::RegularFile)
    }
}

/// Lists the directory of a checkpoint.
pub(super) fn files(directory: BorrowedFd<'_>) -> rustix::io::Result<Files> {
    let mut all = entries(directory)?;
    let is_training = |(name, kind): &(CString, FileType)| {
        *kind == FileType::Directory && name.to_bytes() == TRAINING.as_bytes()
    };
    let Some(at) = all.iter().position(is_training) else { return Ok(Files { all, training: None }) };
    all.swap_remove(at);
    let training = match open_child(directory, OsStr::new(TRAINING)) {
        Err(Errno::NOENT) => return Ok(Files { all, training: None }),
        other => other?,
    };
    for (name, kind) in entries(training.as_fd())? {
        let name = [TRAINING.as_bytes(), b"/", name.to_bytes()].concat();
        all.extend(CString::new(name).ok().map(|name| (name, kind)));
    }
    Ok(Files { all, training: Some(training) })
}

/// The name of a file in the directory `training`; `None` for the name of any other file.
pub(super) fn in_training(name: &CStr) -> Option<&CStr> {
    let rest = name.to_bytes_with_nul().strip_prefix(TRAINING.as_bytes())?.strip_prefix(b"/")?;
    CStr::from_bytes_with_nul(rest).ok()
}

/// Makes the names of all files of a checkpoint durable. Returns whether the file system supports this.
pub(super) fn sync_names(directory: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    match open_child(directory, OsStr::new(TRAINING)) {
        Err(Errno::NOENT | Errno::NOTDIR) => {}
        training => drop(sync(training?.as_fd())?),
    }
    sync(directory)
}

/// Whether fastckpt writes files called `name` in some checkpoint.
pub(super) fn is_ours(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    groups::is_shard_name(name) || [manifest::FILE, index::FILE, TORCH_METADATA].contains(&name)
}

/// The temporary name of a file that is being carried over.
pub(super) const ON_ITS_WAY: &CStr = c".fastckpt-carried";

/// Whether `name` was left by an interrupted carry-over, or is a name that a file system (NFS, FUSE) gives to a file
/// that is removed while a process has it open.
pub(super) fn is_remnant(name: &CStr) -> bool {
    let name = in_training(name).unwrap_or(name).to_bytes();
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
        // There is no manifest, or something else has its name. Any other failure proves nothing about the contents.
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
