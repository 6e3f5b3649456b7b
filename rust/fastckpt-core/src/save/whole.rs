//! The work of one process that writes whole shards, block by block.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::part::{Bytes, Part};
use super::work::{Unit, Work};
use crate::engine::content::{self, Content};
use crate::engine::direct::{Direct, Moved};
use crate::error::Result;
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Extent, Placement};
use crate::format::layout::{Plan, Shard, TensorSpec};
use crate::format::manifest::{Logical, ShardEntry, TensorEntry};
use crate::sys::mapping::Stretch;
use crate::sys::memory::Source;

/// The blocks of a part, and their checksums.
pub(super) struct Whole<'a> {
    part: &'a Part<'a>,
    /// Where each tensor lies; empty if there are `images`.
    contents: &'a [Content],
    /// The shards as they will be on the disk.
    images: &'a [Stretch],
    /// Number of the first block of each shard, then the number of all blocks.
    first_block: Vec<usize>,
    /// Number of the first extent of each tensor, then the number of all extents.
    first_extent: Vec<usize>,
    extent_crcs: Vec<AtomicU64>,
    extent_xzs: Vec<AtomicU64>,
    /// Tensors with extents that callbacks moved, which took the first checksum alone.
    moved: HashSet<usize>,
    block_crcs: Vec<AtomicU64>,
    /// The blocks that workers write, ascending.
    left: Vec<usize>,
}

/// The sum before each element, then the sum of all.
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
            left: (0..first_block.last().copied().unwrap_or(0)).collect(),
            extent_crcs: zeros(&first_extent),
            extent_xzs: zeros(&first_extent),
            moved: HashSet::new(),
            block_crcs: zeros(&first_block),
            first_block,
            first_extent,
        }
    }

    /// The blocks that lie inside one of the tensors that `direct` moves, ascending, each with its extent and its shard.
    pub(super) fn inside(&self, direct: &Direct) -> Vec<(usize, Extent, usize)> {
        let size = self.part.plan.block_size;
        let mut found = Vec::new();
        for (tensor, (content, &(shard, offset))) in
            self.contents.iter().zip(&self.part.plan.places).enumerate()
        {
            let wanted = matches!(content, Content::Pull(pull) if direct.indices.contains(&pull.index));
            let bytes = self.part.tensors[tensor].bytes().unwrap_or(0);
            if !wanted || !self.part.has(shard) {
                continue;
            }
            let placement = Placement { tensor, offset, bytes };
            for block in offset.div_ceil(size)..placement.end() / size {
                let extent = geometry::extent(&placement, block * size, size);
                found.extend(extent.map(|extent| (self.first_block[shard] + block as usize, extent, shard)));
            }
        }
        found.sort_unstable_by_key(|&(block, ..)| block);
        found
    }

    /// The number that callbacks know a tensor by.
    pub(super) fn index_of(&self, tensor: usize) -> usize {
        match &self.contents[tensor] {
            Content::Pull(pull) => pull.index,
            Content::Memory(_) | Content::Image(_) => tensor,
        }
    }

    /// Notes the checksums of the blocks of `inside` that were moved, and leaves the others to workers.
    pub(super) fn moved(&mut self, inside: &[(usize, Extent, usize)], moved: &Moved) {
        for &(block, sum) in &moved.blocks {
            let found = inside.binary_search_by_key(&block, |&(block, ..)| block);
            let Some((_, extent, _)) = found.ok().and_then(|at| inside.get(at)) else { continue };
            self.block_crcs[block].store(sum, Ordering::Relaxed);
            self.summed(0, 0, extent, Pair { crc: sum, xz: 0 });
            self.moved.insert(extent.tensor);
        }
        self.left.retain(|&block| !moved.has(block));
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
            let crc = self.extent_crcs[extents.clone()].iter().map(|crc| checksum::to_hex(load(crc)));
            let place_of = Placement { tensor: index, offset: place.1, bytes: tensor.bytes().unwrap_or(0) };
            let xz = whole_xz(place_of, plan.block_size, self.extent_xzs[extents].iter().map(load));
            let crc64xz = if self.moved.contains(&index) { String::new() } else { checksum::to_hex(xz) };
            TensorEntry { crc64xz, ..tensor_entry(tensor, place, crc.collect()) }
        });
        (shards.collect(), tensors.collect())
    }
}

impl Work for Whole<'_> {
    fn plan(&self) -> &Plan {
        self.part.plan
    }

    fn units(&self) -> usize {
        self.left.len()
    }

    fn unit(&self, number: usize) -> Unit {
        let block = self.left[number];
        let shard = self.first_block.partition_point(|&first| first <= block) - 1;
        let start = (block - self.first_block[shard]) as u64 * self.part.plan.block_size;
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
            // Units of one shard lie one after another here as they do there, so a tensor is asked for in one piece.
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
                to[at..at + from.len()].copy_from_slice(from);
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
        self.block_crcs[self.left[number]].store(sum, Ordering::Relaxed);
    }
}

/// The second checksum of a tensor, given those of its extents.
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

/// The manifest's entry for a tensor.
pub(crate) fn tensor_entry(tensor: &TensorSpec, (shard, offset): (usize, u64), crc: String) -> TensorEntry {
    TensorEntry {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        shard,
        offset,
        crc,
        crc64xz: String::new(),
        logical: tensor.logical.clone().map(|(dtype, shape)| Logical { dtype, shape }),
    }
}
