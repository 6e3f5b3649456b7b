//! Objects of a store in place of files. The caller's callbacks read them, one range per call.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::sys::gather::Fetched;

/// Bytes of one request: enough that the latency is small beside the transfer time, and few enough to send again.
pub const RANGE: u64 = 8 << 20;
/// Wanted ranges that are closer together than this many bytes are fetched by one request.
pub const GAP: u64 = 1 << 20;
/// The default number of concurrent requests. They wait for the network rather than for a processor.
pub const REQUESTS: usize = 16;
/// The maximum number of bytes in flight in one load.
pub const IN_FLIGHT: usize = 256 << 20;

/// The files of one checkpoint in a store. Worker threads call these methods.
///
/// The error `NotFound` means that an object is missing, and `InvalidData` that there is no checkpoint. All other
/// errors concern the connection to the store, not the checkpoint.
pub trait Store: Debug + Send + Sync {
    /// The manifest, or its first `most` bytes.
    fn manifest(&self, most: Option<usize>) -> io::Result<Vec<u8>>;
    /// The length of a file; `None` if it does not exist.
    fn size(&self, file: &str) -> io::Result<Option<u64>>;
    /// The `len` bytes of a file from `start` on, or fewer if the file ends earlier.
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
