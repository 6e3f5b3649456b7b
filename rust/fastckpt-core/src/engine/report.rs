//! The report of an operation.

use std::fmt;

use super::path::Blocks;

/// The engine that runs, which may differ from the requested one. The numbers are those of `docs/telemetry.md`, 5.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring`, with direct I/O if the file system supports it.
    Uring = 1,
    /// Blocking calls, with direct I/O if the file system supports it.
    Threads = 2,
    /// Blocking calls through the page cache.
    Buffered = 3,
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

/// A refused feature. The numbers are the flags of `docs/telemetry.md`, 5.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fell {
    /// `io_uring`.
    Ring = 1 << 7,
    /// Direct I/O.
    Direct = 1 << 8,
    /// Worker threads.
    Workers = 1 << 9,
}

/// Why the engine that ran is not the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// All refused features: the sum of their numbers in [`Fell`].
    pub fell: u32,
    /// The errno of the first cause.
    pub errno: i32,
    /// The cause, and what to do about it.
    pub reason: String,
}

impl Fallback {
    /// Adds a reason to the reasons in `before`, and keeps its errno. Without `before`, this is the first reason.
    #[must_use]
    pub fn after(before: Option<Self>, fell: Fell, errno: i32, reason: &str) -> Self {
        let fell = fell as u32;
        match before {
            None => Self { fell, errno, reason: reason.to_owned() },
            Some(before) => Self {
                fell: before.fell | fell,
                reason: format!("{}; {reason}", before.reason),
                errno: before.errno,
            },
        }
    }
}

/// How the workers of one operation moved its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// The engine.
    pub engine: Engine,
    /// Why the engine is not the requested one.
    pub fallback: Option<Fallback>,
    /// Worker threads.
    pub threads: usize,
    /// The number of bytes that each worker moved, without padding.
    pub thread_bytes: Vec<u64>,
    /// Blocks by I/O path and reason.
    pub blocks: Blocks,
    /// Bytes of tensors that the processor copied, in this library or between memory and the page cache.
    pub copied: u64,
}

/// What one save, load or verification did.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Bytes of tensors moved.
    pub bytes: u64,
    /// Wall-clock seconds by phase, in order.
    pub phases: Vec<(&'static str, f64)>,
    /// Wall-clock seconds in total.
    pub seconds: f64,
    /// How the blocks moved.
    pub ran: Ran,
    /// Further messages for the caller.
    pub warnings: Vec<String>,
    /// Shards touched.
    pub shards: usize,
    /// Tensors moved.
    pub tensors: usize,
    /// The files that a save linked from an earlier checkpoint; none for other operations.
    pub linked: Linked,
}

/// Files of an earlier checkpoint that were linked into another one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Linked {
    /// The number of files.
    pub files: usize,
    /// Bytes of the tensors in them.
    pub bytes: u64,
}

/// A range of a file that differs from what was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The name of the file inside the checkpoint.
    pub file: String,
    /// First byte of the range.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The tensor that these bytes belong to, if any.
    pub tensor: Option<String>,
    /// What is wrong with the bytes.
    pub reason: String,
}
