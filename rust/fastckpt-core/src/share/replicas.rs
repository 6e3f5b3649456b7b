//! The bytes that several ranks hold, and which of them are compared. Pure.
//!
//! The unit of comparison is a cell of an interval, not a part: if boxes overlap partly, the overlap is compared. All
//! ranks that hold a cell choose the same bytes of it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Range;

use super::duties::Work;
use super::held::Held;
use super::messages::Item;
use super::table::Share;
use crate::error::Result;
use crate::sys::strided::Rows;

/// How many of the shared bytes are compared. If boxes of several groups of ranks overlap, all bytes of the tensor are
/// compared, because the groups may hold different tensors of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Only overlaps are compared.
    Overlaps,
    /// Samples are compared, at places that this number determines. Small parts are compared whole.
    Samples(u64),
    /// Everything is compared.
    All,
}

/// A cell of an interval that a rank and others hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// The tensor.
    pub tensor: usize,
    /// The first byte of the interval, counted in the tensor.
    pub start: u64,
    /// The number of the cell.
    pub cell: u32,
    /// The ranks that hold the cell: an index into the sets of ranks that [`Share::copied`] returns.
    pub holders: usize,
    /// The part of the rank that has the cell, and whether the cell is the whole part.
    pub part: (u32, bool),
    /// The compared ranges, in order.
    pub items: Vec<Item>,
    /// Whether `items` are all of the cell.
    pub whole: bool,
}

/// Parts up to this size are compared whole.
const SMALL: u64 = 64 << 10;
/// The approximate number of bytes of a sample.
const SAMPLE: u64 = 4 << 10;
/// A sample is drawn from each stretch of this many bytes.
const DRAWN: u64 = 4 << 20;

impl Share {
    /// The cells that `rank` and other ranks hold and of which `depth` compares some bytes, and each set of ranks that
    /// holds a cell, ascending. `Share::first` has no effect on the result.
    pub fn copied(&self, rank: u32, depth: Depth) -> Result<(Vec<Copied>, Vec<Vec<u32>>)> {
        let (mut found, mut sets) = (Vec::new(), Vec::<Vec<u32>>::new());
        let mut known = HashMap::<Vec<u32>, usize>::new();
        let mut work = Work::new(self, rank, (&[], false), u64::MAX)?;
        // Includes the files that no rank writes: they are linked because one copy is unchanged.
        for tensor in self.with_bytes() {
            let cover = self.cover(tensor)?;
            if cover.copies() < 2 || (depth == Depth::Overlaps && !cover.overlaps()) {
                continue;
            }
            let held = Held::new(self, tensor, None)?;
            let own = work.own(&held);
            for &interval in &own.intervals {
                let section = cover.section(interval);
                let (lines, mut last) = (cover.bytes(interval), None);
                for &(number, tile, part) in &own.tiles[&section] {
                    // Of several tiles of one cell, the first represents this rank.
                    let Some(cell) = cover.cells(section).nth(number).filter(|_| last != Some(number)) else {
                        continue;
                    };
                    last = Some(number);
                    let holders = cover.holders(cell, &held.spreads);
                    if holders.len() < 2 {
                        continue;
                    }
                    let stretch = held.interval(interval);
                    let Some(all) = work.item(&held, &stretch, tile, rank) else { continue };
                    let mut ranks: Vec<u32> = holders.into_iter().map(|(rank, _)| rank).collect();
                    ranks.sort_unstable();
                    let holders = *known.entry(ranks).or_insert_with_key(|ranks| {
                        sets.push(ranks.clone());
                        sets.len() - 1
                    });
                    let (start, cell) = (lines.start, number as u32);
                    let whole = cover.overlaps() || all.len <= SMALL;
                    let (items, whole) = match depth {
                        Depth::Samples(seed) if !whole => {
                            let mut hasher = DefaultHasher::new();
                            (seed, &self.tensors[tensor].name, start, cell).hash(&mut hasher);
                            (samples(&all, self.page, hasher.finish()), false)
                        }
                        _ => (pieces(&all), true),
                    };
                    let of_part = self.part_bytes(rank, tensor, part)? == all.len;
                    found.push(Copied { tensor, start, cell, holders, part: (part, of_part), items, whole });
                }
            }
        }
        Ok((found, sets))
    }
}

/// Cuts an item into items of at most [`DRAWN`] bytes of the tensor.
fn pieces(all: &Item) -> Vec<Item> {
    let starts = (all.bytes.start..all.bytes.end).step_by(DRAWN as usize);
    starts.filter_map(|start| part(all, start..all.bytes.end.min(start + DRAWN))).collect()
}

/// The beginning, the middle and the end of an item, and a random place in each stretch of it.
fn samples(all: &Item, page: u64, seed: u64) -> Vec<Item> {
    let (rows, Range { start, end }) = (&*all.rows, all.bytes.clone());
    let from = |start| grown(rows, start, end);
    let mut chosen = vec![from(start), from(start + (end - start) / 2), last(rows, start, end)];
    // The rank that writes the page in which the item begins may use its own copy of the item there.
    chosen[0] = start..chosen[0].end.max(end.min(start + page));
    for (number, at) in (0..).zip((start..end).step_by(DRAWN as usize)) {
        let room = (end.min(at + DRAWN) - at).saturating_sub(SAMPLE);
        chosen.push(from(at + ((u128::from(drawn(seed, number)) * u128::from(room)) >> 64) as u64));
    }
    chosen.into_iter().filter_map(|bytes| part(all, bytes)).collect()
}

/// A part of an item; `None` if the item has no bytes there.
fn part(all: &Item, bytes: Range<u64>) -> Option<Item> {
    let len = all.rows.bytes_in(&bytes);
    (len > 0).then(|| Item { bytes, len, ..all.clone() })
}

/// A range of the tensor that holds about one sample of the bytes of `rows`, from the first row after `start` on.
fn grown(rows: &Rows, start: u64, end: u64) -> Range<u64> {
    let start = rows.lines(start..end).next().map_or(start, |line| line.at);
    let mut len = SAMPLE;
    while start + len < end && rows.bytes_in(&(start..start + len)) < SAMPLE {
        len *= 2;
    }
    start..end.min(start + len)
}

/// Like [`grown`], but up to the end.
fn last(rows: &Rows, start: u64, end: u64) -> Range<u64> {
    let end = end.min(rows.range().end);
    let mut len = SAMPLE;
    while start + len < end && rows.bytes_in(&(end - len..end)) < SAMPLE {
        len *= 2;
    }
    start.max(end.saturating_sub(len))..end
}

/// The number that `seed` has drawn for `number` (`SplitMix64`).
const fn drawn(seed: u64, number: u64) -> u64 {
    let mut mixed = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}
