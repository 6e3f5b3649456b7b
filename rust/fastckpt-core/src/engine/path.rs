//! The I/O path of a block between memory and file, and the reason for it.

/// How a block moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoPath {
    /// Direct I/O between the caller's memory and the file, except for the edges.
    ZeroCopy,
    /// Direct I/O through a staging buffer.
    Staged,
    /// I/O through the page cache.
    Buffered,
}

impl IoPath {
    /// All I/O paths, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::ZeroCopy, Self::Staged, Self::Buffered];

    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero-copy",
            Self::Staged => "staged",
            Self::Buffered => "buffered",
        }
    }
}

/// Why a block takes its I/O path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Zero-copy: nothing prevents it.
    Possible,
    /// Staged: the block's tensors are small.
    Small,
    /// Staged: the tensor's address and its offset in the file are not congruent.
    Incongruent,
    /// Staged: a tensor is not contiguous host memory.
    Elsewhere,
    /// Staged: the memory is in small pages, which a device reads in short pieces.
    SmallPages,
    /// Staged: only the checksum is needed.
    Checked,
    /// Staged: only a part of the block is wanted, or parts of it in several places.
    Shares,
    /// Written again: the block's memory changed during the write.
    Changed,
    /// Staged or buffered, as the caller requested.
    Asked,
    /// Buffered: other ranks of this node read the same bytes, which should come from the storage only once.
    Shared,
    /// Buffered: the page cache holds the block.
    Cached,
    /// Buffered: the block is mapped and does not move at all.
    Mapped,
    /// Buffered: the block comes from an object store.
    Stored,
    /// Buffered: this file, or an operation on it, refuses direct I/O.
    Refused,
    /// Buffered: the block is less than a page, or less than a page is left of it after a short direct operation.
    Remainder,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::Possible,
        Self::Small,
        Self::Incongruent,
        Self::Elsewhere,
        Self::SmallPages,
        Self::Checked,
        Self::Shares,
        Self::Changed,
        Self::Asked,
        Self::Shared,
        Self::Cached,
        Self::Mapped,
        Self::Stored,
        Self::Refused,
        Self::Remainder,
    ];

    /// The reason in words; empty for [`Reason::Possible`].
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Possible => "",
            Self::Small => "small tensors",
            Self::Incongruent => "address not congruent",
            Self::Elsewhere => "not contiguous host memory",
            Self::SmallPages => "memory in small pages",
            Self::Checked => "only checked",
            Self::Shares => "wanted in parts",
            Self::Changed => "its memory changed while it was written",
            Self::Asked => "as asked",
            Self::Shared => "shared by the ranks of this node",
            Self::Cached => "in the page cache",
            Self::Mapped => "mapped",
            Self::Stored => "object store",
            Self::Refused => "direct I/O refused",
            Self::Remainder => "less than a page",
        }
    }
}

/// Blocks by I/O path and reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Blocks([[u64; Reason::ALL.len()]; IoPath::ALL.len()]);

impl Blocks {
    /// Counts one block.
    pub const fn count(&mut self, path: IoPath, reason: Reason) {
        self.0[path as usize][reason as usize] += 1;
    }

    /// How many blocks took `path` for `reason`.
    #[must_use]
    pub const fn of(&self, path: IoPath, reason: Reason) -> u64 {
        self.0[path as usize][reason as usize]
    }

    /// How many blocks took `path`.
    #[must_use]
    pub fn on(&self, path: IoPath) -> u64 {
        self.0[path as usize].iter().sum()
    }

    /// The nonzero counts, each with its I/O path and reason in words, such as `staged: small tensors`.
    pub fn by_reason(&self) -> impl Iterator<Item = (String, u64)> {
        let pairs = IoPath::ALL.into_iter().flat_map(|path| Reason::ALL.map(|reason| (path, reason)));
        pairs.filter(|&(path, reason)| self.of(path, reason) > 0).map(|(path, reason)| {
            let colon = if reason.text().is_empty() { "" } else { ": " };
            (format!("{}{colon}{}", path.name(), reason.text()), self.of(path, reason))
        })
    }
}

impl std::ops::AddAssign for Blocks {
    fn add_assign(&mut self, other: Self) {
        for (sum, more) in self.0.as_flattened_mut().iter_mut().zip(other.0.as_flattened()) {
            *sum += more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_by_path_and_by_reason() {
        assert!(Reason::ALL.iter().enumerate().all(|(number, &reason)| reason as usize == number));
        assert!(IoPath::ALL.iter().enumerate().all(|(number, &path)| path as usize == number));
        let mut blocks = Blocks::default();
        blocks.count(IoPath::Buffered, Reason::Cached);
        let mut more = blocks;
        more.count(IoPath::Buffered, Reason::Asked);
        more.count(IoPath::Staged, Reason::Asked);
        more.count(IoPath::ZeroCopy, Reason::Possible);
        blocks += more;
        assert_eq!(IoPath::ALL.map(|path| blocks.on(path)), [1, 1, 3]);
        let named = |name: &str, count| (name.to_owned(), count);
        assert_eq!(
            blocks.by_reason().collect::<Vec<_>>(),
            [
                named("zero-copy", 1),
                named("staged: as asked", 1),
                named("buffered: as asked", 1),
                named("buffered: in the page cache", 2)
            ]
        );
    }
}
