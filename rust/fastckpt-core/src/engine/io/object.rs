//! Objects of a store in the place of files. The caller's callbacks read them, each range by one call.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::sys::gather::Fetched;

/// Bytes of one request: so many that its latency is small beside its transfer, and few enough to send again.
pub const RANGE: u64 = 8 << 20;
/// Wanted ranges closer than this many bytes come with one request.
pub const GAP: u64 = 1 << 20;
/// Requests at a time by default. They wait for the network rather than for a processor.
pub const REQUESTS: usize = 16;
/// Bytes in flight at a time, in one load.
pub const IN_FLIGHT: usize = 256 << 20;

/// The files of one checkpoint in a store. Worker threads call it.
///
/// The error `NotFound` means that an object is missing, and `InvalidData` that there is no checkpoint. All others
/// concern the connection to the store, and not the checkpoint.
pub trait Store: Debug + Send + Sync {
    /// The manifest, or the first `most` bytes of it.
    fn manifest(&self, most: Option<usize>) -> io::Result<Vec<u8>>;
    /// The length of a file, if it is there.
    fn size(&self, file: &str) -> io::Result<Option<u64>>;
    /// The `len` bytes of a file from `start` on; fewer if it ends before.
    fn read(&self, file: &str, start: u64, len: usize) -> io::Result<Box<dyn Fetched>>;
    /// The name of a file in messages.
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
