//! The work of one process that writes whole shards, block by block.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::part::{Bytes, Part};
use super::work::{Unit, Work};
use crate::engine::content::{self, Content};
use crate::error::Result;
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Extent, Placement};
use crate::format::layout::{Plan, Shard, TensorSpec};
use crate::format::manifest::{Logical, ShardEntry, TensorEntry, Unpacked};
use crate::sys::mapping::Stretch;
use crate::sys::memory::Source;

/// The blocks of a part, and their checksums.
pub(super) struct Whole<'a> {
    part: &'a Part<'a>,
    /// The contents of each tensor; empty if there are `images`.
    contents: &'a [Content],
    /// The shards as they will be on the disk.
    images: &'a [Stretch],
    /// The number of the first block of each shard, and then the number of all blocks.
    first_block: Vec<usize>,
    /// The number of the first extent of each tensor, and then the number of all extents.
    first_extent: Vec<usize>,
    extent_crcs: Vec<AtomicU64>,
    extent_xzs: Vec<AtomicU64>,
    block_crcs: Vec<AtomicU64>,
}

/// The sum of all elements before each element, and then the sum of all.
fn running_sum(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all = vec![0];
    all.extend(counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    }));
    all
}

impl<'a> Whole<'a> {
    pub(super) fn new(part: &'a Part<'a>) -> Self {
        let plan = part.plan;
        let blocks = plan.shards.iter().enumerate().map(|(index, shard)| {
            if part.has(index) { geometry::block_count(shard.bytes, plan.block_size) as usize } else { 0 }
        });
        let extents = part.tensors.iter().zip(&plan.places).map(|(tensor, &(shard, offset))| {
            let bytes = tensor.bytes().filter(|_| part.has(shard)).unwrap_or(0);
            geometry::extent_count(offset, bytes, plan.block_size) as usize
        });
        let first_block = running_sum(blocks);
        let first_extent = running_sum(extents);
        let zeros =
            |sums: &[usize]| (0..sums.last().copied().unwrap_or(0)).map(|_| AtomicU64::new(0)).collect();
        let (contents, images) = match part.bytes {
            Bytes::Tensors(contents) => (contents, &[][..]),
            Bytes::Images(images) => (&[][..], images),
        };
        Self {
            part,
            contents,
            images,
            extent_crcs: zeros(&first_extent),
            extent_xzs: zeros(&first_extent),
            block_crcs: zeros(&first_block),
            first_block,
            first_extent,
        }
    }

    /// The manifest's entries for the shards and their tensors, after all blocks are written.
    pub(super) fn entries(&self) -> (Vec<ShardEntry>, Vec<TensorEntry>) {
        let plan = self.part.plan;
        let load = |crc: &AtomicU64| crc.load(Ordering::Relaxed);
        let shards = self.part.shards.iter().map(|&index| {
            let shard = &plan.shards[index];
            let crcs = &self.block_crcs[self.first_block[index]..self.first_block[index + 1]];
            let crc = (0..).zip(crcs).fold(checksum::of(&[]), |all, (block, crc)| {
                let len = geometry::block_len(block * plan.block_size, shard.bytes, plan.block_size);
                checksum::combine(all, load(crc), len)
            });
            shard_entry(shard, crc)
        });
        let tensors = (self.part.tensors.iter().zip(&plan.places).enumerate())
            .filter(|(_, (_, (shard, _)))| self.part.has(*shard));
        let tensors = tensors.map(|(index, (tensor, &place))| {
            let extents = self.first_extent[index]..self.first_extent[index + 1];
            let crc: String =
                self.extent_crcs[extents.clone()].iter().map(|crc| checksum::to_hex(load(crc))).collect();
            let place_of = Placement { tensor: index, offset: place.1, bytes: tensor.bytes().unwrap_or(0) };
            let xz = whole_xz(place_of, plan.block_size, self.extent_xzs[extents].iter().map(load));
            tensor_entry(tensor, place, (&crc, &checksum::to_hex(xz)))
        });
        (shards.collect(), tensors.collect())
    }
}

impl Work for Whole<'_> {
    fn plan(&self) -> &Plan {
        self.part.plan
    }

    fn units(&self) -> usize {
        self.block_crcs.len()
    }

    fn unit(&self, number: usize) -> Unit {
        let shard = self.first_block.partition_point(|&first| first <= number) - 1;
        let start = (number - self.first_block[shard]) as u64 * self.part.plan.block_size;
        let bytes = self.part.plan.shards[shard].bytes;
        Unit { shard, start, end: start + geometry::block_len(start, bytes, self.part.plan.block_size) }
    }

    fn files(&self) -> usize {
        self.part.shards.len()
    }

    fn bytes_of(&self, index: usize) -> u64 {
        self.part.plan.shards[index].bytes
    }

    fn image(&self, index: usize) -> Option<&Stretch> {
        self.images.get(index)
    }

    fn calls(&self) -> bool {
        self.contents.iter().any(|content| matches!(content, Content::Pull(_)))
    }

    fn fetched(&self, number: usize) -> Option<u64> {
        let pulled = |extent: &Extent| matches!(self.contents.get(extent.tensor), Some(Content::Pull(_)));
        let bytes = self.extents(&self.unit(number)).filter(pulled).map(|extent| extent.len).sum();
        (bytes > 0).then_some(bytes)
    }

    fn fetch(&self, units: Range<usize>, mut to: &mut [u8]) -> Result<()> {
        let mut units = units.map(|number| self.unit(number)).peekable();
        let mut wanted = Vec::new();
        while let Some(mut run) = units.next() {
            // Adjacent units of a shard are also adjacent in `to`, so a tensor is requested in one piece.
            while let Some(next) = units.next_if(|next| (next.shard, next.start) == (run.shard, run.end)) {
                run.end = next.end;
            }
            let (mut bytes, rest) = std::mem::take(&mut to).split_at_mut(run.padded());
            to = rest;
            let mut at = run.start;
            for placement in
                geometry::touching(&self.part.plan.shards[run.shard].placements, run.start..run.end)
            {
                let (from, end) = (placement.offset.max(run.start), placement.end().min(run.end));
                let Content::Pull(pull) = &self.contents[placement.tensor] else { continue };
                let (slot, after) = bytes[(from - at) as usize..].split_at_mut((end - from) as usize);
                (bytes, at) = (after, end);
                wanted.push((pull, from - placement.offset, slot));
            }
        }
        content::fetch(wanted)
    }

    fn complete(&self, number: usize, to: &mut [u8]) -> Result<()> {
        let unit = self.unit(number);
        for extent in self.extents(&unit) {
            if let Some(from) = self.contents[extent.tensor].host(extent.start, extent.len as usize)? {
                let at = (extent.offset - unit.start) as usize;
                from.copy(&mut to[at..at + from.len()]);
            }
        }
        Ok(())
    }

    fn memory(&self, _: usize, extent: &Extent, found: &mut Vec<(u64, Source)>) -> Result<()> {
        if let Content::Memory(source) = &self.contents[extent.tensor] {
            let part = source.part(extent.start as usize, extent.len as usize);
            found.push((extent.offset, part.ok_or_else(Content::too_short)?));
        }
        Ok(())
    }

    fn copy(&self, _: usize, tensor: usize, start: u64, to: &mut [u8]) -> Result<Pair> {
        if let Content::Pull(pull) = &self.contents[tensor] {
            content::fetch([(pull, start, &mut *to)])?;
            return Ok(Pair::of(to));
        }
        let from = self.contents[tensor].host(start, to.len())?.unwrap_or_default();
        Ok(Pair::copy(to, from))
    }

    fn summed(&self, _: usize, _: usize, extent: &Extent, sum: Pair) {
        let number = self.first_extent[extent.tensor] + extent.index as usize;
        self.extent_crcs[number].store(sum.crc, Ordering::Relaxed);
        self.extent_xzs[number].store(sum.xz, Ordering::Relaxed);
    }

    fn assembled(&self, number: usize, sum: u64, _: bool) {
        self.block_crcs[number].store(sum, Ordering::Relaxed);
    }
}

/// The second checksum of a tensor, given the second checksums of its extents.
pub(crate) fn whole_xz(placement: Placement, block_size: u64, xzs: impl Iterator<Item = u64>) -> u64 {
    let extents = geometry::extents(placement, 0..placement.bytes, block_size);
    extents
        .zip(xzs)
        .fold(Pair::of(&[]).xz, |all, ((extent, _), xz)| checksum::combine_xz(all, xz, extent.len))
}

/// The manifest's entry for a shard.
pub(crate) fn shard_entry(shard: &Shard, crc: u64) -> ShardEntry {
    ShardEntry {
        file: shard.file.clone(),
        prefix: shard.prefix.clone(),
        bytes: shard.bytes,
        data_offset: shard.header.len() as u64,
        header_crc: checksum::to_hex(checksum::of(&shard.header)),
        crc: checksum::to_hex(crc),
    }
}

/// The manifest's entry for a tensor with these checksums: those of its extents, and its second checksum.
pub(crate) fn tensor_entry(
    tensor: &TensorSpec,
    (shard, offset): (usize, u64),
    (crc, crc64xz): (&str, &str),
) -> TensorEntry {
    let (crc, crc64xz) = (crc.into(), crc64xz.into());
    let TensorSpec { name, dtype, shape, logical } = tensor;
    let logical = logical.as_ref();
    let logical =
        logical.map(|(dtype, shape)| Logical { dtype: dtype.as_str().into(), shape: shape.clone() });
    let (name, dtype, shape) = (name.as_str().into(), *dtype, shape.clone());
    Unpacked { name, dtype, shape, shard, offset, crc, crc64xz, logical }.into()
}
