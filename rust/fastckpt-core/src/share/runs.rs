//! Ranges of files that one rank writes or reads. Pure.

use std::collections::HashMap;
use std::ops::Range;

/// The purpose of duties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A save: every byte is written, and a grain has one writer ([`super::Share::in_teams`]).
    Save,
    /// A load: an extent has one reader, and extents that no rank wants are not read.
    Load,
}

/// A range of a file that one rank writes or reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) rank: u32,
    /// The position of the rank among the ranks of the team that owns the run's first byte.
    pub(super) seat: u32,
    /// The number of the run's first block among all blocks that its rank reads or writes, in order.
    pub(super) unit: u64,
}

impl Run {
    /// The number of the block at `offset` among all blocks of its rank. Blocks have `block_size` bytes.
    pub(super) fn unit(&self, offset: u64, block_size: u64) -> u64 {
        self.unit + (offset / block_size - self.start / block_size)
    }
}

/// The owners of all ranges.
#[derive(Debug)]
pub(super) struct Owners {
    /// The runs of every file, in order. Only a load has gaps, where no rank wants the bytes.
    runs: Vec<Vec<Run>>,
    /// How the tensors of a class are relayed; classes without relays are missing.
    relays: HashMap<usize, Relays>,
    /// The number of blocks in a window ([`super::messages::Turn`]).
    pub(super) window: u64,
}

/// Which ranks relay the pieces of a tensor ([`super::teams`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relays {
    /// A member of the team relays.
    Team,
    /// In a load, one of the ranks that want the same piece relays it.
    Copies,
}

impl Owners {
    /// Owners, from the runs of each file.
    pub(super) const fn new(runs: Vec<Vec<Run>>, relays: HashMap<usize, Relays>, window: u64) -> Self {
        Self { runs, relays, window }
    }

    /// Which ranks relay the pieces of tensors of a class; `None` if no rank does.
    pub(super) fn relays(&self, class: usize) -> Option<Relays> {
        self.relays.get(&class).copied()
    }

    /// The runs of a file.
    pub(super) fn of(&self, shard: usize) -> &[Run] {
        &self.runs[shard]
    }

    /// The parts of the runs of a file that lie in a range of it.
    pub(super) fn within(&self, shard: usize, range: Range<u64>) -> impl Iterator<Item = (&Run, Range<u64>)> {
        let runs = &self.runs[shard];
        let first = runs.partition_point(|run| run.end <= range.start);
        let inside = runs[first..].iter().take_while(move |run| run.start < range.end);
        inside.map(move |run| (run, run.start.max(range.start)..run.end.min(range.end)))
    }
}
