//! The process group in which this process saves or loads, and the rank that it waits for.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::layout;

/// The values of a segment that concern the group, kept for a segment that is created later.
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

/// Records that this process waits for a rank of its group, or that it no longer waits.
pub(super) fn wait_for(rank: Option<u32>) {
    GROUP.waits_for.store(rank.map_or(0, |rank| u64::from(rank) + 1), Relaxed);
}

/// Stores the values of the group in a segment.
pub(super) fn fill(process: &layout::Process) {
    process.group_rank.store(GROUP.rank.load(Relaxed), Relaxed);
    process.group_size.store(GROUP.size.load(Relaxed), Relaxed);
    process.waits_for.store(GROUP.waits_for.load(Relaxed), Relaxed);
    process.group.store(GROUP.id.load(Relaxed), Relaxed);
}
