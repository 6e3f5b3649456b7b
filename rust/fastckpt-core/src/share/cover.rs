//! The bytes of a tensor that ranks have: intervals of the tensor, each with the ranks that have boxes there. Pure.
//!
//! An interval is a range of **lines**. A line is everything under one index of the first `level` dimensions, so it is
//! contiguous. Every interval has a section, which divides each of its lines among the boxes of ranks. The parts are
//! cells: boxes that do not overlap. A tile is the part of a rank's box in one cell.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::bytes::{Shape, len};
use super::spread::{Bounds, Groups};
use super::tiles::Tiles;

/// If the contiguous pieces of boxes have at least this many bytes on average, their ranks write them: more operations
/// cost less than an exchange.
pub(super) const LONG: u128 = 64 << 10;

/// For each section and copy, the ranks that give a part of it, ascending.
type Givers = HashMap<(u32, u32), Arc<[u32]>>;

/// The bytes of a tensor that ranks have. It is the same for all tensors with the same shape, bytes and spreads.
#[derive(Debug)]
pub(super) struct Cover {
    /// The boxes, and their parts in cells.
    pub(super) tiles: Tiles,
    /// The number of leading dimensions whose indices are counted as lines.
    level: usize,
    /// The first byte of each interval, and then the number of bytes of the tensor.
    starts: Vec<u64>,
    /// The section of each interval.
    sections: Vec<u32>,
    /// The number of the first cell of each section, and then the number of cells.
    cells: Vec<u32>,
    /// The place in `tiled` of the first tile of each cell, and then the length of `tiled`.
    tiles_of: Vec<u32>,
    tiled: Vec<u32>,
    /// For sections of several boxes: the ranks that have a part of the section, ascending.
    everyone: HashMap<u32, OnceLock<Box<[u32]>>>,
    /// The maximum number of ranks that hold the same bytes.
    copies: u32,
    /// Whether boxes of several groups of ranks overlap.
    overlaps: bool,
    /// The place of each spread in the order of copies: first spreads that hold the whole tensor, then by lowest rank.
    /// So copy 0 comes from a single spread that holds the whole tensor, if there is one.
    precedence: Vec<(bool, u32)>,
    /// For each section of several cells and each copy: the ranks that give a part of it, ascending.
    givers: Mutex<Givers>,
    /// A range of the tensor with bytes that no rank has.
    pub(super) gap: Option<Range<u64>>,
}

impl Cover {
    /// The cover of a tensor of the non-empty `shape`, whose logical shape is `sizes`.
    pub(super) fn new(shape: Shape, sizes: &[u64], spreads: &[&Groups]) -> Result<Self, String> {
        let tiles = Tiles::new(shape, sizes, spreads)?;
        let mut cover = Self {
            level: level(&tiles),
            tiles,
            starts: Vec::new(),
            sections: Vec::new(),
            cells: vec![0],
            tiles_of: vec![0],
            tiled: Vec::new(),
            everyone: HashMap::new(),
            copies: 0,
            overlaps: false,
            precedence: Vec::new(),
            givers: Mutex::default(),
            gap: None,
        };
        let sections = cover.sweep();
        cover.split(&sections);
        let mut has = vec![0; spreads.len()];
        for ends in cover.tiles_of.windows(2) {
            let tiles = &cover.tiled[ends[0] as usize..ends[1] as usize];
            let ranks = tiles.iter().map(|&tile| cover.ranks(tile, spreads).len() as u32);
            cover.copies = cover.copies.max(ranks.sum());
            cover.overlaps |= tiles.len() > 1;
            let mut slots: Vec<_> = tiles.iter().map(|&tile| cover.tiles.whose(tile).slot as usize).collect();
            slots.sort_unstable();
            slots.dedup();
            for slot in slots {
                has[slot] += 1;
            }
        }
        let all = cover.tiles_of.len() - 1;
        let lowest = |groups: &&Groups| groups.everybody().first().copied().unwrap_or(u32::MAX);
        cover.precedence = spreads.iter().zip(has).map(|(groups, has)| (has < all, lowest(groups))).collect();
        Ok(cover)
    }

    /// Finds the intervals. Returns the boxes of each section.
    fn sweep(&mut self) -> Sections {
        let shape = self.tiles.shape();
        let count: u64 = shape.sizes[..self.level].iter().product();
        let line = shape.sizes[self.level..].iter().product::<u64>() * shape.item;
        let mut events = Vec::with_capacity(2 * self.tiles.len() as usize);
        for tile in 0..self.tiles.len() {
            runs(&shape.sizes[..self.level], &self.tiles.bounds(tile)[..self.level], |run| {
                events.push((run.start, true, tile));
                events.push((run.end, false, tile));
            });
        }
        events.sort_unstable();
        let mut sections = Sections::new(self.tiles.len());
        let (mut at, mut open, mut next) = (0, Vec::new(), events.as_slice());
        while at < count {
            // Ends come before starts, each in the order of tiles.
            let here = next.iter().take_while(|event| event.0 <= at).count();
            let (here, rest) = next.split_at(here);
            let (gone, new) = here.split_at(here.partition_point(|event| !event.1));
            next = rest;
            if !gone.is_empty() {
                open.retain(|tile| gone.binary_search_by_key(tile, |event| event.2).is_err());
            }
            open.extend(new.iter().map(|event| event.2));
            open.sort_unstable();
            self.starts.push(at * line);
            self.sections.push(sections.of(&open));
            at = next.first().map_or(count, |event| event.0);
        }
        self.starts.push(count * line);
        sections
    }

    /// Splits each section into cells.
    fn split(&mut self, sections: &Sections) {
        let line: u64 = self.tiles.shape().sizes[self.level..].iter().product();
        let (mut known, mut deep) = (HashMap::new(), Bounds::new());
        let mut holes = vec![false; sections.len()];
        for (section, hole) in (0..).zip(&mut holes) {
            let first = self.tiles_of.len() - 1;
            match *sections.boxes(section) {
                [only] => {
                    self.tiled.push(only);
                    self.tiles_of.push(self.tiled.len() as u32);
                }
                ref boxes => {
                    self.cell(boxes, self.level, &mut deep, &mut known);
                    self.everyone.insert(section, OnceLock::new());
                }
            }
            let size = |tile: u32| self.tiles.bounds(tile)[self.level..].iter().map(len).product::<u64>();
            let cells = self.tiles_of[first..].windows(2);
            *hole = cells.map(|ends| size(self.tiled[ends[0] as usize])).sum::<u64>() < line;
            self.cells.push(self.tiles_of.len() as u32 - 1);
        }
        let first = self.sections.iter().position(|&section| holes[section as usize]);
        self.gap = first.map(|interval| self.bytes(interval));
    }

    /// Adds the cells of those parts of lines that are `deep` along the first dimensions of a line. Exactly the `boxes`
    /// contain these parts.
    fn cell(
        &mut self,
        boxes: &[u32],
        dim: usize,
        deep: &mut Bounds,
        known: &mut HashMap<(u32, Bounds), u32>,
    ) {
        if boxes.is_empty() {
            return;
        }
        if dim == self.tiles.shape().sizes.len() {
            for &tile in boxes {
                let tile = self.tiles.cut(tile, deep, known);
                self.tiled.push(tile);
            }
            self.tiles_of.push(self.tiled.len() as u32);
            return;
        }
        let ranges: Vec<_> = boxes.iter().map(|&tile| self.tiles.bounds(tile)[dim].clone()).collect();
        let mut ends: Vec<u64> = ranges.iter().flat_map(|range| [range.start, range.end]).collect();
        ends.sort_unstable();
        ends.dedup();
        let mut among = vec![Vec::new(); ends.len() - 1];
        for (&tile, range) in boxes.iter().zip(ranges) {
            let from = ends.partition_point(|&end| end < range.start);
            let to = ends.partition_point(|&end| end < range.end);
            among[from..to].iter_mut().for_each(|there| there.push(tile));
        }
        for (there, range) in among.iter().zip(ends.windows(2)) {
            deep.push(range[0]..range[1]);
            self.cell(there, dim + 1, deep, known);
            deep.pop();
        }
    }

    /// The number of intervals.
    pub(super) const fn len(&self) -> usize {
        self.sections.len()
    }

    /// The bytes of an interval.
    pub(super) fn bytes(&self, interval: usize) -> Range<u64> {
        self.starts[interval]..self.starts[interval + 1]
    }

    /// The interval of a byte of the tensor.
    pub(super) fn at(&self, byte: u64) -> usize {
        self.starts.partition_point(|&start| start <= byte) - 1
    }

    /// The section of an interval.
    pub(super) fn section(&self, interval: usize) -> u32 {
        self.sections[interval]
    }

    /// The tiles of each cell of a section.
    pub(super) fn cells(&self, section: u32) -> impl ExactSizeIterator<Item = &[u32]> {
        let (from, to) = (self.cells[section as usize] as usize, self.cells[section as usize + 1] as usize);
        self.tiles_of[from..=to].windows(2).map(|ends| &self.tiled[ends[0] as usize..ends[1] as usize])
    }

    /// The maximum number of ranks that hold the same bytes.
    pub(super) const fn copies(&self) -> u32 {
        self.copies
    }

    /// Whether boxes of several groups of ranks overlap, which belong to unrelated spreads.
    pub(super) const fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// The ranks that have a tile.
    pub(super) fn ranks<'a>(&self, tile: u32, spreads: &[&'a Groups]) -> &'a [u32] {
        let whose = self.tiles.whose(tile);
        spreads[whose.slot as usize].ranks(whose.group)
    }

    /// The ranks that have a cell, each with its first tile there: spread by spread, ascending in each spread.
    pub(super) fn holders(&self, cell: &[u32], spreads: &[&Groups]) -> Vec<(u32, u32)> {
        let slot = |tile| self.tiles.whose(tile).slot as usize;
        let of = |&tile: &u32| self.ranks(tile, spreads).iter().map(move |&rank| (rank, tile));
        let mut all: Vec<_> = cell.iter().flat_map(of).collect();
        all.sort_unstable_by_key(|&(rank, tile)| (rank, self.precedence[slot(tile)], tile));
        all.dedup_by_key(|&mut (rank, _)| rank);
        all.sort_by_key(|&(rank, tile)| (self.precedence[slot(tile)], rank));
        all
    }

    /// The rank that has a copy of a cell, and its tile.
    pub(super) fn source(&self, cell: &[u32], copy: u32, spreads: &[&Groups]) -> Option<(u32, u32)> {
        if let [tile] = *cell {
            let ranks = self.ranks(tile, spreads);
            return Some((*ranks.get(copy as usize % ranks.len().max(1))?, tile));
        }
        let all = self.holders(cell, spreads);
        all.get(copy as usize % all.len().max(1)).copied()
    }

    /// The ranks that give a part of a copy of a section, ascending.
    pub(super) fn givers(&self, section: u32, copy: u32, spreads: &[&Groups]) -> Arc<[u32]> {
        let mut known = self.givers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known.entry((section, copy)).or_insert_with(|| {
            let sources = self.cells(section).filter_map(|cell| self.source(cell, copy, spreads));
            let mut all: Vec<u32> = sources.map(|(rank, _)| rank).collect();
            all.sort_unstable();
            all.dedup();
            all.into()
        });
        Arc::clone(found)
    }

    /// Whether a section is a single tile that covers its whole lines.
    pub(super) fn is_one(&self, section: u32) -> bool {
        let mut cells = self.cells(section);
        let (Some(&[tile]), None) = (cells.next(), cells.next()) else { return false };
        let sizes = &self.tiles.shape().sizes[self.level..];
        self.tiles.bounds(tile)[self.level..].iter().zip(sizes).all(|(range, &size)| len(range) == size)
    }

    /// The ranks that have a part of a section, ascending.
    pub(super) fn everyone<'a>(&'a self, section: u32, spreads: &[&'a Groups]) -> &'a [u32] {
        let ranks = |&tile: &u32| self.ranks(tile, spreads);
        let mut tiles = self.cells(section).flatten();
        let Some(known) = self.everyone.get(&section) else { return tiles.next().map_or(&[], ranks) };
        known.get_or_init(|| {
            let mut all: Vec<u32> = tiles.flat_map(ranks).copied().collect();
            all.sort_unstable();
            all.dedup();
            all.into()
        })
    }

    /// The intervals that contain a part of `boxes`, ascending.
    pub(super) fn intervals(&self, boxes: impl Iterator<Item = u32>) -> Vec<usize> {
        let shape = self.tiles.shape();
        let line = shape.sizes[self.level..].iter().product::<u64>() * shape.item;
        let mut found = Vec::new();
        for tile in boxes {
            runs(&shape.sizes[..self.level], &self.tiles.bounds(tile)[..self.level], |run| {
                found.extend(self.at(run.start * line)..=self.at(run.end * line - 1));
            });
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// The boxes of sections, while sections are found.
struct Sections {
    /// For each box, the section that has only this box; [`NONE`] if there is none.
    single: Vec<u32>,
    several: HashMap<Box<[u32]>, u32>,
    /// The start of each section's boxes in `boxes`, and then the length of `boxes`.
    firsts: Vec<u32>,
    boxes: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Sections {
    fn new(boxes: u32) -> Self {
        Self {
            single: vec![NONE; boxes as usize],
            several: HashMap::new(),
            firsts: vec![0],
            boxes: Vec::new(),
        }
    }

    fn len(&self) -> usize {
        self.firsts.len() - 1
    }

    fn boxes(&self, section: u32) -> &[u32] {
        &self.boxes[self.firsts[section as usize] as usize..self.firsts[section as usize + 1] as usize]
    }

    /// The section of `boxes`, which are ascending.
    fn of(&mut self, boxes: &[u32]) -> u32 {
        let fresh = self.len() as u32;
        let section = match *boxes {
            [only] if self.single[only as usize] == NONE => {
                self.single[only as usize] = fresh;
                fresh
            }
            [only] => self.single[only as usize],
            _ => match self.several.get(boxes) {
                Some(&section) => section,
                None => *self.several.entry(boxes.into()).or_insert(fresh),
            },
        };
        if section == fresh {
            self.boxes.extend_from_slice(boxes);
            self.firsts.push(self.boxes.len() as u32);
        }
        section
    }
}

/// The number of leading dimensions whose indices are counted as lines.
///
/// It counts the dimensions up to the first one with a size other than 1. It counts more if boxes are cut along a later
/// dimension and their contiguous pieces are long even then.
fn level(tiles: &Tiles) -> usize {
    let sizes = &tiles.shape().sizes;
    let first = (sizes.iter().take_while(|&&size| size == 1).count() + 1).min(sizes.len());
    let is_cut = |dim: usize| (0..tiles.len()).any(|tile| len(&tiles.bounds(tile)[dim]) < sizes[dim]);
    let deepest = (first..sizes.len()).rev().find(|&dim| is_cut(dim)).map_or(first, |dim| dim + 1);
    let is_long = |level: usize| {
        let (mut bytes, mut runs) = (0, 0);
        for tile in 0..tiles.len() {
            let lens: Vec<_> = tiles.bounds(tile).iter().map(|range| u128::from(len(range))).collect();
            bytes += lens.iter().product::<u128>() * u128::from(tiles.shape().item);
            runs += lens[..level - 1].iter().product::<u128>();
        }
        bytes >= LONG * runs
    };
    (first + 1..=deepest).rev().find(|&level| is_long(level)).unwrap_or(first)
}

/// The lines of a box, as ranges.
fn runs(sizes: &[u64], bounds: &[Range<u64>], mut each: impl FnMut(Range<u64>)) {
    let (Some((last, outer)), Some((size, around))) = (bounds.split_last(), sizes.split_last()) else {
        return;
    };
    let count: u64 = outer.iter().map(len).product();
    let mut joined: Option<Range<u64>> = None;
    for index in 0..count {
        let (mut rest, mut first, mut step) = (index, 0, *size);
        for (range, size) in outer.iter().zip(around).rev() {
            first += (range.start + rest % len(range)) * step;
            rest /= len(range);
            step *= size;
        }
        let run = first + last.start..first + last.end;
        match &mut joined {
            Some(joined) if joined.end == run.start => joined.end = run.end,
            _ => {
                joined.take().into_iter().for_each(&mut each);
                joined = Some(run);
            }
        }
    }
    joined.into_iter().for_each(each);
}
