//! The duties of one rank: the ranges of files that it reads or writes, and its messages. Pure.
//!
//! Both sides of a message compute its items from the same cuts, in the same order: intervals, blocks and pages cut a
//! tensor into stretches with one owner each, and cells and tiles have their order.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::cover::Cover;
use super::held::Held;
use super::messages::{Item, Mailbox, Message, Spot};
use super::place::Places;
use super::runs::{Owners, Purpose, Run};
use super::spread::Groups;
use super::table::{Deal, Share};
use super::tiles::Whose;
use crate::error::{Error, Result};

/// A range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRange {
    /// The file.
    pub shard: usize,
    /// The first byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
}

/// The duties of one rank.
#[derive(Debug, Default)]
pub struct Duties {
    /// The ranges that it reads or writes, in order, not adjacent.
    pub ranges: Vec<FileRange>,
    /// Bytes in `ranges` that it has or wants itself, in order.
    pub local: Vec<Item>,
    /// Likewise, but these are parts of extents whose other parts other ranks read ([`Share::read_apart`]).
    pub apart: Vec<Item>,
    /// Messages with bytes in `ranges` that others have or want.
    pub io: Vec<Message>,
    /// Messages with bytes that it has or wants itself, and that others read or write.
    pub boxes: Vec<Message>,
}

impl Share {
    /// What `rank` does. Its parts count as memory without gaps. Fails if a spread does not fit its tensor; for a save,
    /// also if no rank has some of the bytes.
    pub fn duties(&self, rank: u32, purpose: Purpose) -> Result<Duties> {
        if rank >= self.ranks {
            return Err(Error::Invalid(format!("there is no rank {rank} of {}", self.ranks)));
        }
        let load = purpose == Purpose::Load;
        if !load {
            self.check_held()?;
        }
        let deals = if load { &[] } else { self.deals()? };
        let mut work = Work::new(self, rank, deals);
        let owners = self.owners(purpose)?;
        for shard in 0..self.files.len() {
            if load { work.extents(shard, owners)? } else { work.grains(shard, owners)? }
        }
        // Extents that are read apart came first.
        work.ranges.sort_unstable_by_key(|range| (range.shard, range.start));
        for FileRange { shard, start, end } in std::mem::take(&mut work.ranges) {
            work.range(shard, start, end);
        }
        Ok(Duties {
            ranges: work.ranges,
            local: work.local,
            apart: work.apart,
            io: work.io.finish(load),
            boxes: work.boxes.finish(load),
        })
    }

    /// Fails if no rank has some of the bytes, or if a file has bytes that belong to no tensor.
    fn check_held(&self) -> Result<()> {
        for (&(mut at, end), tensors) in self.files.iter().zip(&self.order) {
            for &tensor in tensors {
                if let Some(gap) = &self.cover(tensor)?.gap {
                    let why = format!("no rank has all of its bytes from {} to {}", gap.start, gap.end);
                    return Err(self.invalid(tensor, &why));
                }
                if self.tensors[tensor].offset != at {
                    return Err(self.invalid(tensor, "there is a gap before it in its file"));
                }
                at += self.tensors[tensor].stored;
            }
            if at != end {
                return Err(Error::Invalid("a file ends after its last tensor".to_owned()));
            }
        }
        Ok(())
    }
}

/// The tiles of one rank in the tensors of one class.
pub(super) struct Own {
    /// Its intervals, in order.
    pub(super) intervals: Vec<usize>,
    /// By section: the number of the cell, the tile and the part of each of its tiles, in order.
    pub(super) tiles: HashMap<u32, Vec<(usize, u32, u32)>>,
}

impl Own {
    fn new(cover: &Cover, spreads: &[&Groups], rank: u32) -> Self {
        let mut parts = Vec::new();
        for (slot, groups) in (0..).zip(spreads) {
            for group in groups.of(rank) {
                parts.push((Whose { slot, group }, parts.len() as u32));
            }
        }
        let intervals = cover.intervals(parts.iter().flat_map(|&(whose, _)| cover.tiles.of(whose)));
        let mut tiles = HashMap::new();
        for &interval in &intervals {
            let section = cover.section(interval);
            tiles.entry(section).or_insert_with(|| {
                let all = (0..).zip(cover.cells(section));
                let all = all.flat_map(|(cell, tiles)| tiles.iter().map(move |&tile| (cell, tile)));
                let part = |tile: u32| {
                    let whose = cover.tiles.whose(tile);
                    parts.iter().find(|part| part.0 == whose).map(|part| part.1)
                };
                all.filter_map(|(cell, tile)| Some((cell, tile, part(tile)?))).collect()
            });
        }
        Self { intervals, tiles }
    }
}

/// The part of `rank` that a tile is in.
fn part(cover: &Cover, spreads: &[&Groups], tile: u32, rank: u32) -> Option<u32> {
    let whose = cover.tiles.whose(tile);
    let slot = whose.slot as usize;
    let within = spreads[slot].of(rank).position(|group| group == whose.group)?;
    let before: usize = spreads[..slot].iter().map(|groups| groups.of(rank).len()).sum();
    Some((before + within) as u32)
}

/// The duties of one rank, while they are found.
pub(super) struct Work<'a> {
    share: &'a Share,
    rank: u32,
    /// Of a save, by tensor.
    deals: &'a [Deal],
    /// By class.
    own: HashMap<usize, Rc<Own>>,
    places: Places,
    ranges: Vec<FileRange>,
    local: Vec<Item>,
    apart: Vec<Item>,
    io: Mailbox,
    boxes: Mailbox,
}

impl<'a> Work<'a> {
    pub(super) fn new(share: &'a Share, rank: u32, deals: &'a [Deal]) -> Self {
        Self {
            share,
            rank,
            deals,
            own: HashMap::new(),
            places: Places::default(),
            ranges: Vec::new(),
            local: Vec::new(),
            apart: Vec::new(),
            io: Mailbox::new(share.ranks),
            boxes: Mailbox::new(share.ranks),
        }
    }

    pub(super) fn own(&mut self, held: &Held<'_>) -> Rc<Own> {
        let class = self.share.class[held.tensor];
        let own =
            self.own.entry(class).or_insert_with(|| Rc::new(Own::new(held.cover, &held.spreads, self.rank)));
        Rc::clone(own)
    }

    /// The tensors of a file, in order.
    fn held(&self, shard: usize) -> Result<Vec<Held<'a>>> {
        let held = self.share.order[shard].iter();
        held.map(|&tensor| Held::new(self.share, tensor, self.deals.get(tensor))).collect()
    }

    /// Adds a range of a file to read or write.
    fn range(&mut self, shard: usize, start: u64, end: u64) {
        match self.ranges.last_mut() {
            Some(last) if last.shard == shard && last.end == start => last.end = end,
            _ => self.ranges.push(FileRange { shard, start, end }),
        }
    }

    /// The item of `tile`, of part `part` of a rank, in `stretch` of the file. `None` if it has no bytes there.
    pub(super) fn item(
        &mut self,
        held: &Held<'_>,
        stretch: &Range<u64>,
        tile: u32,
        part: u32,
    ) -> Option<Item> {
        let place = self.places.of(self.share.class[held.tensor], held, tile);
        let bytes = stretch.start - held.range.start..stretch.end - held.range.start;
        let len = place.rows.bytes_in(&bytes);
        let (rows, base) = (Arc::clone(&place.rows), place.base);
        (len > 0).then_some(Item { tensor: held.tensor, bytes, part, rows, base, len })
    }

    /// The spot of a stretch of a tensor, which is part of `run`, for a message from or to `other`, the rank that does not
    /// read or write it.
    fn spot(&self, held: &Held<'_>, start: u64, run: &Run, other: u32) -> Spot {
        let away = (run.rank + self.share.ranks - other) % self.share.ranks;
        let turn = (run.unit(start, self.share.block_size), away);
        Spot { shard: held.shard, offset: start, turn }
    }

    /// Adds this rank's work on `tile` of rank `peer` in a stretch that it reads or writes, as part of a run.
    fn serve(&mut self, held: &Held<'_>, stretch: &Range<u64>, run: &Run, (tile, peer): (u32, u32)) -> bool {
        let part = part(held.cover, &held.spreads, tile, peer).unwrap_or(0);
        let Some(item) = self.item(held, stretch, tile, part) else { return false };
        if peer != self.rank {
            self.io.add(peer, self.spot(held, stretch.start, run, peer), item);
            return true;
        }
        match self.local.last_mut() {
            Some(last)
                if (last.tensor, last.part, last.bytes.end) == (item.tensor, item.part, item.bytes.start)
                    && Arc::ptr_eq(&last.rows, &item.rows)
                    && !stretch.start.is_multiple_of(self.share.block_size) =>
            {
                last.bytes.end = item.bytes.end;
                last.len += item.len;
            }
            _ => self.local.push(item),
        }
        true
    }

    /// The ranges that this rank writes of a file, and the items that it sends for the rest of it.
    fn grains(&mut self, shard: usize, owners: &Owners) -> Result<()> {
        let held = self.held(shard)?;
        for tensor in &held {
            let own = self.own(tensor);
            for &interval in &own.intervals {
                self.send(tensor, interval, &own, owners);
            }
        }
        let rank = self.rank;
        for run in owners.of(shard).iter().filter(|run| run.rank == rank) {
            self.range(shard, run.start, run.end);
            self.write(&held, run);
        }
        Ok(())
    }

    /// Adds the parts of an interval of this rank that others write.
    fn send(&mut self, tensor: &Held<'_>, interval: usize, own: &Own, owners: &Owners) {
        let section = tensor.cover.section(interval);
        for (run, range) in owners.within(tensor.shard, tensor.interval(interval)) {
            if run.rank == self.rank {
                continue;
            }
            for stretch in tensor.cut(interval, range, true) {
                let mut own = own.tiles[&section].as_slice();
                for (number, cell) in tensor.cover.cells(section).enumerate() {
                    let (here, rest) = own.split_at(own.partition_point(|own| own.0 <= number));
                    own = rest;
                    let Some(&(_, _, part)) = here.first() else { continue };
                    let Some((giver, tile)) = tensor.giver(cell, interval, &stretch, run.rank) else {
                        continue;
                    };
                    if giver == self.rank {
                        let part = here.iter().find(|own| own.1 == tile).map_or(part, |own| own.2);
                        if let Some(item) = self.item(tensor, &stretch, tile, part) {
                            self.boxes.add(run.rank, self.spot(tensor, stretch.start, run, self.rank), item);
                        }
                    }
                }
            }
        }
    }

    /// Adds the bytes that this rank needs to write a run.
    fn write(&mut self, held: &[Held<'_>], run: &Run) {
        for (tensor, Range { start, end }) in inside(held, run) {
            for interval in tensor.at(start)..=tensor.at(end - 1) {
                let lines = tensor.interval(interval);
                for stretch in tensor.cut(interval, start.max(lines.start)..end.min(lines.end), true) {
                    for cell in tensor.cover.cells(tensor.cover.section(interval)) {
                        if let Some((giver, tile)) = tensor.giver(cell, interval, &stretch, self.rank) {
                            self.serve(tensor, &stretch, run, (tile, giver));
                        }
                    }
                }
            }
        }
    }

    /// The ranges that this rank reads of a file, and the items that it receives of the rest of it. A member of a team
    /// reads what others of it want, too, and perhaps only that.
    fn extents(&mut self, shard: usize, owners: &Owners) -> Result<()> {
        let held = self.held(shard)?;
        let apart = self.share.apart && self.share.team_size()? == 1;
        let is_apart = |tensor: &Held<'_>, at| apart && tensor.is_apart(&tensor.extent(at));
        for tensor in &held {
            let own = self.own(tensor);
            for &interval in &own.intervals {
                for (run, range) in owners.within(shard, tensor.interval(interval)) {
                    for stretch in tensor.cut(interval, range, false) {
                        let apart = is_apart(tensor, stretch.start);
                        if !apart && run.rank == self.rank {
                            continue;
                        }
                        for &(_, tile, part) in &own.tiles[&tensor.cover.section(interval)] {
                            let Some(item) = self.item(tensor, &stretch, tile, part) else { continue };
                            if apart {
                                self.range(shard, stretch.start, stretch.end);
                                self.apart.push(item);
                            } else {
                                self.boxes.add(
                                    run.rank,
                                    self.spot(tensor, stretch.start, run, self.rank),
                                    item,
                                );
                            }
                        }
                    }
                }
            }
        }
        let rank = self.rank;
        for run in owners.of(shard).iter().filter(|run| run.rank == rank) {
            for (tensor, Range { start: mut at, end }) in inside(&held, run) {
                while at < end {
                    let extent = tensor.extent(at);
                    at = extent.end;
                    if !is_apart(tensor, extent.start) {
                        self.read(tensor, &extent, run);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds an extent that this rank reads, as part of a run, unless no rank wants any of it.
    fn read(&mut self, held: &Held<'_>, extent: &Range<u64>, run: &Run) {
        let mut wanted = false;
        for interval in held.at(extent.start)..=held.at(extent.end - 1) {
            let lines = held.interval(interval);
            let stretch = extent.start.max(lines.start)..extent.end.min(lines.end);
            for &tile in held.cover.cells(held.cover.section(interval)).flatten() {
                for &peer in held.ranks(tile) {
                    wanted |= self.serve(held, &stretch, run, (tile, peer));
                }
            }
        }
        if wanted {
            self.range(held.shard, extent.start, extent.end);
        }
    }
}

/// The tensors of a file that lie in a run, each with its bytes there, counted in the file.
fn inside<'a, 'b>(held: &'a [Held<'b>], run: &Run) -> impl Iterator<Item = (&'a Held<'b>, Range<u64>)> {
    let Run { start, end, .. } = *run;
    let first = held.partition_point(|tensor| tensor.range.end <= start);
    let within = held[first..].iter().take_while(move |tensor| tensor.range.start < end);
    within.map(move |tensor| (tensor, start.max(tensor.range.start)..end.min(tensor.range.end)))
}
