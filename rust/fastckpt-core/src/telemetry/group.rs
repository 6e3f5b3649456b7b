//! The process group in which this process saves or loads, and the rank that it waits for.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::layout;

/// The segment's entries about the group, for a segment that is made later.
struct Group {
    id: AtomicU64,
    rank: AtomicU32,
    size: AtomicU32,
    waits_for: AtomicU64,
}

static GROUP: Group = Group {
    id: AtomicU64::new(0),
    rank: AtomicU32::new(0),
    size: AtomicU32::new(0),
    waits_for: AtomicU64::new(0),
};

/// Notes that this process is `rank` of a group of `size` processes.
pub(super) fn set(id: u64, rank: u32, size: u32) {
    GROUP.id.store(id, Relaxed);
    GROUP.rank.store(rank, Relaxed);
    GROUP.size.store(size, Relaxed);
}

/// Notes that this process waits for a rank of its group, or that it waits no more.
pub(super) fn wait_for(rank: Option<u32>) {
    GROUP.waits_for.store(rank.map_or(0, |rank| u64::from(rank) + 1), Relaxed);
}

/// Stores the facts about the group.
pub(super) fn fill(process: &layout::Process) {
    process.group_rank.store(GROUP.rank.load(Relaxed), Relaxed);
    process.group_size.store(GROUP.size.load(Relaxed), Relaxed);
    process.waits_for.store(GROUP.waits_for.load(Relaxed), Relaxed);
    process.group.store(GROUP.id.load(Relaxed), Relaxed);
}
