//! Objects of a store in the place of files. The caller's callbacks read them, each range by one call.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::sys::gather::Fetched;

/// Bytes of one request: enough that its latency is small beside its transfer, and little to send again.
pub const RANGE: u64 = 8 << 20;
/// Wanted ranges closer than this many bytes come with one request.
pub const GAP: u64 = 1 << 20;
/// Requests at a time, unless the caller says. They wait for the network rather than for a processor.
pub const REQUESTS: usize = 16;
/// Bytes on their way at a time, in one load.
pub const IN_FLIGHT: usize = 256 << 20;

/// The files of one checkpoint in a store. Worker threads call it.
///
/// Errors of the kind `NotFound` say that an object is missing, and of `InvalidData` that there is no checkpoint. All
/// others are of the way to the store, and say nothing of the checkpoint.
pub trait Store: Debug + Send + Sync {
    /// The manifest, or the first `most` bytes of it.
    fn manifest(&self, most: Option<usize>) -> io::Result<Vec<u8>>;
    /// The length of a file, if it is there.
    fn size(&self, file: &str) -> io::Result<Option<u64>>;
    /// The `len` bytes of a file from `start` on; fewer if it ends before.
    fn read(&self, file: &str, start: u64, len: usize) -> io::Result<Box<dyn Fetched>>;
    /// What messages call a file.
    fn path_of(&self, file: &str) -> PathBuf;
}

/// A file in a store.
#[derive(Debug)]
pub struct Object {
    /// The store.
    pub store: Arc<dyn Store>,
    /// The name of the file.
    pub file: String,
}

impl Object {
    /// See [`Store::read`].
    pub fn read(&self, start: u64, len: usize) -> io::Result<Box<dyn Fetched>> {
        self.store.read(&self.file, start, len)
    }
}
