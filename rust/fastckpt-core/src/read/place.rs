//! Where the files of an open checkpoint are: in a directory, or in an object store.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use crate::engine::io::files::ShardFile;
use crate::engine::io::object::{Object, Store};
use crate::sys::file::DataFile;
use crate::sys::fork::Held;

/// The place of the files.
#[derive(Debug)]
pub(super) enum Place {
    Directory(Directory),
    Store(Arc<dyn Store>),
}

/// An open directory.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) fd: OwnedFd,
    /// Set after a file was missing from the directory although the directory still had its name.
    pub(super) certain: OnceLock<()>,
    pub(super) kept: Kept,
}

/// Shards that stay open, so that they can be read after the checkpoint is replaced or removed. A forked child does not
/// keep them and opens its own.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) files: Vec<Option<Held>>,
    pub(super) process: u32,
}

impl Directory {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, certain: OnceLock::new(), kept: Kept::default() }
    }
}

impl Place {
    /// Opens `file`, the shard `index`, and returns it with its length.
    pub(super) fn open(&self, index: usize, file: &str, direct: bool) -> io::Result<(ShardFile, u64)> {
        let directory = match self {
            Self::Directory(directory) => directory,
            Self::Store(store) => {
                let object = Object { store: Arc::clone(store), file: file.to_owned() };
                let missing = || io::Error::from_raw_os_error(libc::ENOENT);
                return Ok((ShardFile::Stored(object), store.size(file)?.ok_or_else(missing)?));
            }
        };
        let ours = directory.kept.process == std::process::id();
        let (file, len) = match directory.kept.files.get(index) {
            Some(Some(kept)) if ours => DataFile::open_again(kept.as_fd(), direct)?,
            _ => DataFile::open_read(directory.fd.as_fd(), file, direct)?,
        };
        Ok((ShardFile::Local(file), len))
    }
}
