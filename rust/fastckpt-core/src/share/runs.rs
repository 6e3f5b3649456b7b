//! Ranges of files that one rank writes or reads. Pure.

use std::collections::HashMap;
use std::ops::Range;

/// The purpose of duties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To save. Everything is written; a grain has one writer ([`super::Share::in_teams`]).
    Save,
    /// To load. One rank reads the part of a tensor in a block. Extents that no rank wants are not read.
    Load,
}

/// A range of a file that one rank writes or reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) rank: u32,
    /// The place of the rank among those of the team that owns its first byte.
    pub(super) seat: u32,
    /// The number of its first block among all that its rank writes or reads, in order.
    pub(super) unit: u64,
}

impl Run {
    /// The number of the block of `offset` among those of its rank. Blocks have `block_size` bytes.
    pub(super) fn unit(&self, offset: u64, block_size: u64) -> u64 {
        self.unit + (offset / block_size - self.start / block_size)
    }
}

/// The owners of all ranges.
#[derive(Debug)]
pub(super) struct Owners {
    /// The runs of every file, in order. Only a load leaves gaps: bytes that no rank wants.
    runs: Vec<Vec<Run>>,
    /// The classes of tensors that are relayed.
    relays: HashMap<usize, Relays>,
    /// The blocks of a window ([`super::messages::Turn`]).
    pub(super) window: u64,
}

/// Who relays the pieces of a tensor ([`super::teams`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relays {
    /// A member of the team.
    Team,
    /// In a load, one of the ranks that want the same piece.
    Copies,
}

impl Owners {
    /// The owners with these runs of each file.
    pub(super) const fn new(runs: Vec<Vec<Run>>, relays: HashMap<usize, Relays>, window: u64) -> Self {
        Self { runs, relays, window }
    }

    /// Who relays the pieces of tensors of a class, if anyone does.
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
