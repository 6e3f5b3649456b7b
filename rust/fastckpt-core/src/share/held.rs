//! A tensor, the ranks that have or want it, and which of these ranks give bytes to the rank that writes. Pure.

use std::ops::Range;

use super::cover::Cover;
use super::spread::Groups;
use super::table::{Deal, Share};
use crate::error::Result;
use crate::format::geometry::{STRAIGHT, down};

/// A tensor and the ranks that have it.
#[derive(Debug, Clone)]
pub(super) struct Held<'a> {
    pub(super) tensor: usize,
    pub(super) shard: usize,
    /// The bytes of the tensor, counted in the file.
    pub(super) range: Range<u64>,
    pub(super) cover: &'a Cover,
    pub(super) spreads: Vec<&'a Groups>,
    /// The logical shape of the tensor.
    pub(super) sizes: &'a [u64],
    /// The copies from which a save takes the tensor. A load has none.
    deal: Option<&'a Deal>,
    block_size: u64,
    page: u64,
}

impl<'a> Held<'a> {
    pub(super) fn new(share: &'a Share, tensor: usize, deal: Option<&'a Deal>) -> Result<Self> {
        let entry = &share.tensors[tensor];
        Ok(Self {
            tensor,
            shard: entry.shard,
            range: share.in_file(tensor, &(0..entry.stored)),
            cover: share.cover(tensor)?,
            spreads: share.spreads_of(entry),
            sizes: &entry.shape,
            deal,
            block_size: share.block_size,
            page: share.page,
        })
    }

    /// The bytes of an interval, counted in the file.
    pub(super) fn interval(&self, interval: usize) -> Range<u64> {
        let bytes = self.cover.bytes(interval);
        self.range.start + bytes.start..self.range.start + bytes.end
    }

    /// The interval of a byte of the file.
    pub(super) fn at(&self, offset: u64) -> usize {
        self.cover.at(offset - self.range.start)
    }

    /// The ranks that have a part of an interval.
    pub(super) fn everyone(&self, interval: usize) -> &'a [u32] {
        self.cover.everyone(self.cover.section(interval), &self.spreads)
    }

    /// The copy that gives the byte at `offset` to a save, and the range of the file that this copy gives.
    pub(super) fn copy(&self, offset: u64) -> (u32, Range<u64>) {
        self.deal.map_or_else(|| (0, self.range.clone()), |deal| deal.at(offset, &self.range))
    }

    /// The ranks that give a part of a copy of an interval, ascending.
    pub(super) fn givers(&self, interval: usize, copy: u32) -> Vec<u32> {
        let section = self.cover.section(interval);
        let mut cells = self.cover.cells(section);
        if let (Some(only), None) = (cells.next(), cells.next()) {
            return self.cover.source(only, copy, &self.spreads).map(|(rank, _)| rank).into_iter().collect();
        }
        self.cover.givers(section, copy, &self.spreads).to_vec()
    }

    /// The part of the tensor in the block of `offset`, counted in the file.
    pub(super) fn extent(&self, offset: u64) -> Range<u64> {
        let block = down(offset, self.block_size);
        self.range.start.max(block)..self.range.end.min(block + self.block_size)
    }

    /// Whether an extent consists of several long parts, each of which exactly one rank wants as a whole.
    pub(super) fn is_apart(&self, extent: &Range<u64>) -> bool {
        let (first, last) = (self.at(extent.start), self.at(extent.end - 1));
        let has_one_reader = |interval: usize| {
            let lines = self.interval(interval);
            extent.end.min(lines.end) - extent.start.max(lines.start) >= STRAIGHT
                && self.everyone(interval).len() == 1
                && self.cover.is_one(self.cover.section(interval))
        };
        first != last && (first..=last).all(has_one_reader)
    }

    /// The rank that gives a cell of a stretch of an interval to its `writer`, and the rank's tile in the cell.
    ///
    /// It is the rank that has the copy, unless the bytes are always compared: in a page in which a part begins, and
    /// where boxes of several groups overlap. There it may be the writer itself, if it has the cell, or else the
    /// nearest rank. For a thin tensor, all bytes come from one copy, which has relays.
    pub(super) fn giver(
        &self,
        cell: &[u32],
        interval: usize,
        stretch: &Range<u64>,
        writer: u32,
        thin: bool,
    ) -> Option<(u32, u32)> {
        let begins = stretch.start < self.interval(interval).start.next_multiple_of(self.page);
        let strict = self.deal.is_some_and(|deal| deal.strict);
        if strict || thin || !(begins || self.cover.overlaps()) {
            return self.cover.source(cell, self.copy(stretch.start).0, &self.spreads);
        }
        let near = cell.iter().filter_map(|&tile| Some((nearest(self.ranks(tile), writer)?, tile)));
        near.min_by_key(|&(rank, _)| rank ^ writer)
    }

    /// The ranks that have a tile.
    pub(super) fn ranks(&self, tile: u32) -> &'a [u32] {
        self.cover.ranks(tile, &self.spreads)
    }

    /// Cuts `range` of the file, inside an interval, where owners may change: at blocks, and with `pages` at the first
    /// page that begins in the interval.
    pub(super) fn cut(
        &self,
        interval: usize,
        range: Range<u64>,
        pages: bool,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        let page = self.interval(interval).start.next_multiple_of(if pages { self.page } else { 1 });
        let size = self.block_size;
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = at;
            at = range.end.min(down(start, size) + size);
            if start < page {
                at = at.min(page);
            }
            (start < range.end).then_some(start..at)
        })
    }
}

/// The member of `ranks`, ascending, whose number has the most leading bits in common with the number of `owner`. The
/// two ranks are likely to be on one host, and in one copy of the model.
pub(super) fn nearest(mut ranks: &[u32], owner: u32) -> Option<u32> {
    while let [first, _, ..] = *ranks {
        // The highest bit in which the remaining ranks differ. Ranks without this bit come first.
        let bit = 1 << (first ^ ranks[ranks.len() - 1]).ilog2();
        let (without, with) = ranks.split_at(ranks.partition_point(|rank| rank & bit == 0));
        ranks = if owner & bit == 0 { without } else { with };
    }
    ranks.first().copied()
}
