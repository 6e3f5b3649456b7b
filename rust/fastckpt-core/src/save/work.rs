//! The work of a job as the job sees it: units of bytes, their sources, and their checksums.

use std::ops::Range;

use crate::error::Result;
use crate::format::checksum::Pair;
use crate::format::geometry::{self, Extent, PAGE};
use crate::format::layout::{Plan, Shard};
use crate::sys::mapping::Stretch;
use crate::sys::memory::Source;

/// Bytes of one shard that one transfer writes. They are in one block. They begin at a page boundary, and end at a page
/// boundary or at the end of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Index of the shard in the plan.
    pub(crate) shard: usize,
    /// First byte, counted in the file.
    pub(crate) start: u64,
    /// The offset after the last byte.
    pub(crate) end: u64,
}

impl Unit {
    pub(crate) const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// The length in whole pages.
    pub(crate) const fn padded(&self) -> usize {
        self.len().next_multiple_of(PAGE) as usize
    }
}

/// The units of a job, in the order in which they are begun.
pub(crate) trait Work: Sync {
    /// The layout of the checkpoint.
    fn plan(&self) -> &Plan;

    /// Number of units.
    fn units(&self) -> usize;

    /// Unit `number`.
    fn unit(&self, number: usize) -> Unit;

    /// The number of shards with units.
    fn files(&self) -> usize;

    /// The bytes of shard `index` that belong to units.
    fn bytes_of(&self, index: usize) -> u64;

    /// The extents in a unit. See [`extents`].
    fn extents(&self, unit: &Unit) -> impl Iterator<Item = Extent> {
        extents(self.plan(), unit)
    }

    /// Whether the bytes of a unit have arrived. Until they have, the unit is requested repeatedly.
    fn is_ready(&self, _number: usize) -> Result<bool> {
        Ok(true)
    }

    /// Shard `index` as it will be on the disk, in memory that cannot change.
    fn image(&self, _index: usize) -> Option<&Stretch> {
        None
    }

    /// Whether callbacks copy bytes of any unit.
    fn calls(&self) -> bool {
        false
    }

    /// The number of bytes of a unit that callbacks copy to the place from which they are written; `None` if callbacks
    /// copy none.
    fn fetched(&self, _number: usize) -> Option<u64> {
        None
    }

    /// Makes callbacks copy their bytes of `units`. In `to`, each unit takes whole pages, and its bytes are at the same
    /// places as in the file.
    fn fetch(&self, _units: Range<usize>, _to: &mut [u8]) -> Result<()> {
        Ok(())
    }

    /// Copies the bytes of a fetched unit that are still missing, except its header. `to` has all bytes of the unit.
    fn complete(&self, _number: usize, _to: &mut [u8]) -> Result<()> {
        Ok(())
    }

    /// Adds to `found` the stretches of `extent` that are in host memory, in the order of the file, each with its file
    /// offset.
    fn memory(&self, number: usize, extent: &Extent, found: &mut Vec<(u64, Source)>) -> Result<()>;

    /// Copies bytes of `tensor`, from `start` on, and returns their checksums.
    fn copy(&self, number: usize, tensor: usize, start: u64, to: &mut [u8]) -> Result<Pair>;

    /// Takes the checksums of an extent, or of its part in the unit. The extent has the number `place` in the unit.
    fn summed(&self, number: usize, place: usize, extent: &Extent, sum: Pair);

    /// Takes the CRC of a unit that is ready to be written. `again` is whether its bytes may be requested again.
    fn assembled(&self, number: usize, sum: u64, again: bool);

    /// Called when a unit is in its file.
    fn written(&self, _number: usize) {}
}

/// The extents in a unit of a plan, or their parts in the unit.
pub(crate) fn extents(plan: &Plan, unit: &Unit) -> impl Iterator<Item = Extent> {
    let range = unit.start..unit.end;
    let block = geometry::down(unit.start, plan.block_size);
    let placements = geometry::touching(&plan.shards[unit.shard].placements, range.clone());
    placements
        .iter()
        .filter_map(move |placement| geometry::extent(placement, block, plan.block_size)?.clip(range.clone()))
}

/// The header bytes of `shard` in `unit`.
pub(super) fn header<'a>(shard: &'a Shard, unit: &Unit) -> &'a [u8] {
    let end = shard.header.len().min(unit.end as usize);
    shard.header.get(unit.start as usize..end).unwrap_or_default()
}
