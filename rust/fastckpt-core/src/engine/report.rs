//! What an operation tells about itself.

use crate::engine::io::Engine;

/// Why the engine that ran is not the one that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The system's number for the cause.
    pub errno: i32,
    /// The cause and what helps, in words.
    pub reason: String,
}

/// How a block moved, and why so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Way {
    /// Direct I/O straight between the caller's memory and the file, but for the edges.
    Straight,
    /// Direct I/O through a slab: its tensors are small.
    Small,
    /// Likewise: the tensor's address and its place in the file differ modulo a page.
    Incongruent,
    /// Likewise: a tensor is not contiguous host memory.
    Elsewhere,
    /// Likewise: its memory is in small pages, which devices take in short stretches.
    SmallPages,
    /// Likewise: asked for.
    Preferred,
    /// Likewise: only the checksum is wanted.
    Checked,
    /// Likewise, after it was written straight: somebody changed its memory meanwhile.
    Changed,
    /// Through the page cache: asked for.
    Asked,
    /// Likewise: other ranks of this node read the same, which is to come from the storage once.
    Shared,
    /// Likewise: it was there.
    Cached,
    /// Likewise: mapped, and not moved at all.
    Mapped,
    /// Likewise: this file, or an operation on it, refuses direct I/O.
    Refused,
    /// Likewise: it is less than a page, or what a short direct operation left of it.
    Remainder,
}

impl Way {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 14] = [
        Self::Straight,
        Self::Small,
        Self::Incongruent,
        Self::Elsewhere,
        Self::SmallPages,
        Self::Preferred,
        Self::Checked,
        Self::Changed,
        Self::Asked,
        Self::Shared,
        Self::Cached,
        Self::Mapped,
        Self::Refused,
        Self::Remainder,
    ];

    /// Kind and reason, as reports show them.
    #[must_use]
    pub const fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Straight => ("direct", "zero-copy"),
            Self::Small => ("staged", "small tensors"),
            Self::Incongruent => ("staged", "address not congruent"),
            Self::Elsewhere => ("staged", "not contiguous host memory"),
            Self::SmallPages => ("staged", "memory in small pages"),
            Self::Preferred => ("staged", "as asked"),
            Self::Checked => ("staged", "only checked"),
            Self::Changed => ("staged", "its memory changed while it was written"),
            Self::Asked => ("buffered", "as asked"),
            Self::Shared => ("buffered", "shared by the ranks of this node"),
            Self::Cached => ("buffered", "in the page cache"),
            Self::Mapped => ("buffered", "mapped"),
            Self::Refused => ("buffered", "direct I/O refused"),
            Self::Remainder => ("buffered", "less than a page"),
        }
    }
}

/// Blocks by the way they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Blocks([u64; Way::ALL.len()]);

impl Blocks {
    /// Counts one.
    pub const fn count(&mut self, way: Way) {
        self.0[way as usize] += 1;
    }

    /// How many took `way`.
    #[must_use]
    pub const fn of(&self, way: Way) -> u64 {
        self.0[way as usize]
    }

    /// How many are of a kind: `direct`, `staged` or `buffered`.
    #[must_use]
    pub fn kind(&self, kind: &str) -> u64 {
        Way::ALL.into_iter().filter(|way| way.words().0 == kind).map(|way| self.of(way)).sum()
    }
}

impl std::ops::AddAssign for Blocks {
    fn add_assign(&mut self, other: Self) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum += more;
        }
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
    /// What else the caller should know, in words.
    pub warnings: Vec<String>,
    /// Blocks by the way they took.
    pub blocks: Blocks,
    /// Bytes that the processor copied on the way, by us or between memory and the page cache.
    pub copied: u64,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_counted_apart_and_by_kind() {
        assert!(Way::ALL.iter().enumerate().all(|(number, &way)| way as usize == number));
        let mut blocks = Blocks::default();
        blocks.count(Way::Cached);
        let mut more = Blocks::default();
        more.count(Way::Cached);
        more.count(Way::Asked);
        blocks += more;
        assert_eq!((blocks.of(Way::Cached), blocks.of(Way::Asked)), (2, 1));
        assert_eq!(["direct", "staged", "buffered"].map(|kind| blocks.kind(kind)), [0, 0, 3]);
    }
}
