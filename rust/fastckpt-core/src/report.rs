//! What an operation tells about itself.

use crate::io::Engine;

/// Why the engine that ran is not the one that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The system's number for the cause.
    pub errno: i32,
    /// The cause and what helps, in words.
    pub reason: String,
}

/// Blocks by the way they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Direct I/O straight between the caller's memory and the file.
    pub direct: u64,
    /// Direct I/O through a staging slab.
    pub staged: u64,
    /// Through the page cache.
    pub buffered: u64,
}

impl std::ops::AddAssign for Blocks {
    fn add_assign(&mut self, other: Self) {
        self.direct += other.direct;
        self.staged += other.staged;
        self.buffered += other.buffered;
    }
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
    /// Worker threads.
    pub threads: usize,
    /// The engine that ran.
    pub engine: Engine,
    /// Why it is not the one that was asked for.
    pub fallback: Option<Fallback>,
    /// Blocks by the way they took.
    pub blocks: Blocks,
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
