//! What an operation reports about itself.

use std::fmt;

use super::path::Blocks;

/// The engine that runs, as opposed to the one that is asked for. The numbers are those of `docs/telemetry.md`, 5.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring`, direct where the file system does it.
    Uring = 1,
    /// Blocking calls, direct where the file system does it.
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

/// Why the engine that ran is not the one that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The system's number for the cause.
    pub errno: i32,
    /// The cause and what helps, in words.
    pub reason: String,
}

impl Fallback {
    /// One more thing that is not as asked for, after what there was `before`, whose number stays.
    #[must_use]
    pub fn after(before: Option<Self>, errno: i32, reason: &str) -> Self {
        match before {
            None => Self { errno, reason: reason.to_owned() },
            Some(before) => Self { reason: format!("{}; {reason}", before.reason), ..before },
        }
    }
}

/// What ran: how the workers of one operation moved its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// The engine.
    pub engine: Engine,
    /// Why it is not the one that was asked for.
    pub fallback: Option<Fallback>,
    /// Worker threads.
    pub threads: usize,
    /// Bytes that each of them moved, padding not counted.
    pub thread_bytes: Vec<u64>,
    /// Blocks by I/O path and reason.
    pub blocks: Blocks,
    /// Bytes that the processor copied, by us or between memory and the page cache.
    pub copied: u64,
}

/// What one save, load or verification did.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Bytes of tensors moved.
    pub bytes: u64,
    /// Wall-clock seconds by phase, in order.
    pub phases: Vec<(&'static str, f64)>,
    /// Wall-clock seconds in all.
    pub seconds: f64,
    /// How the blocks moved.
    pub ran: Ran,
    /// What else the caller should know, in words.
    pub warnings: Vec<String>,
    /// Shards touched.
    pub shards: usize,
    /// Tensors moved.
    pub tensors: usize,
}

/// A range of a file that is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The file, inside the checkpoint.
    pub file: String,
    /// First byte of the range.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The tensor that these bytes belong to, if any.
    pub tensor: Option<String>,
    /// What was found.
    pub reason: String,
}
