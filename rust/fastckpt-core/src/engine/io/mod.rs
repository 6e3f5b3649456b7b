//! The backend seam: how a worker moves one buffer between memory and a file.
//!
//! - [`uring`]: several operations in flight from one thread. Fewest system calls; absent in most containers, because Docker's and
//!   containerd's default seccomp profiles block it.
//! - [`blocking`]: one call at a time, so depth comes from threads. Works everywhere; the oracle for the other.
//! - [`fault`]: wraps either and injects faults, for tests.

pub mod blocking;
pub mod fault;
pub mod files;
pub mod uring;

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use self::files::OpenFile;
use crate::sys::gather::Buf;

/// The engine that runs, as opposed to the one that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring`, direct where the file system does it.
    Uring,
    /// Blocking calls, direct where the file system does it.
    Threads,
    /// Blocking calls through the page cache.
    Buffered,
}

impl Engine {
    /// The name in reports, manifests and settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Threads => "threads",
            Self::Buffered => "buffered",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One transfer between a buffer and a file. It owns both while it is in flight.
#[derive(Debug)]
pub struct Op {
    /// What the worker knows it by.
    pub token: usize,
    /// The file.
    pub file: Arc<OpenFile>,
    /// Past the page cache, or through it.
    pub direct: bool,
    /// To the file, or from it.
    pub write: bool,
    /// Where in the file the transfer begins.
    pub offset: u64,
    /// Which bytes of the buffer move.
    pub range: Range<usize>,
    /// The memory.
    pub buf: Buf,
}

/// A transfer that the kernel is done with.
#[derive(Debug)]
pub struct Done {
    /// The operation, buffer and all.
    pub op: Op,
    /// Bytes moved, possibly fewer than asked for, or the system's error.
    pub result: io::Result<usize>,
}

/// Moves buffers for one worker thread.
pub trait Backend {
    /// Starts an operation. A failure of the operation itself shows in its [`Done`]; an error here is one of the backend.
    fn submit(&mut self, op: Op) -> io::Result<()>;

    /// The next finished operation, waiting for it if need be; none if nothing is in flight.
    fn wait(&mut self) -> io::Result<Option<Done>>;
}
