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
use super::teams::Teams;
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
    /// Messages with bytes that it has or wants itself, or relays, and that others read or write.
    pub boxes: Vec<Message>,
    /// Messages with bytes that it relays, from or to those who have or want them.
    pub relays: Vec<Message>,
}

impl Duties {
    /// Bytes that it has or wants itself, and reads or writes, gives or gets.
    pub(crate) fn own(&self) -> impl Iterator<Item = &Item> {
        let given = self.boxes.iter().flat_map(|message| &message.items);
        self.local.iter().chain(given.filter(|item| item.relayed.is_none()))
    }

    /// The messages that the rank sends, and those that it receives, each in its order.
    #[must_use]
    pub fn lanes(&self, purpose: Purpose) -> (Vec<&Message>, Vec<&Message>) {
        let own = self.boxes.iter().collect();
        match purpose {
            Purpose::Save => (own, self.relays.iter().chain(&self.io).collect()),
            Purpose::Load => (self.io.iter().chain(&self.relays).collect(), own),
        }
    }
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
        let mut work = Work::new(self, rank, deals, load)?;
        let owners = self.owners(purpose)?;
        for shard in 0..self.files.len() {
            if load { work.extents(shard, owners)? } else { work.grains(shard, owners)? }
        }
        // Extents that are read apart came first.
        work.ranges.sort_unstable_by_key(|range| (range.shard, range.start));
        for FileRange { shard, start, end } in std::mem::take(&mut work.ranges) {
            work.range(shard, start, end);
        }
        let (io, (mut boxes, _), (relays, places)) =
            (work.io.finish(load).0, work.boxes.finish(load), work.relays.finish(load));
        let relayed =
            boxes.iter_mut().flat_map(|message| &mut message.items).filter_map(|item| item.relayed.as_mut());
        relayed.for_each(|(message, _)| *message = places[*message]);
        Ok(Duties { ranges: work.ranges, local: work.local, apart: work.apart, io, boxes, relays })
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
    relays: Mailbox,
    teams: Teams<'a>,
}

impl<'a> Work<'a> {
    pub(super) fn new(share: &'a Share, rank: u32, deals: &'a [Deal], load: bool) -> Result<Self> {
        Ok(Self {
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
            relays: Mailbox::new(share.ranks),
            teams: Teams::new(share, load)?,
        })
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
        (len > 0).then_some(Item { tensor: held.tensor, bytes, part, rows, base, len, relayed: None })
    }

    /// The spot of a stretch of a tensor, which is part of `run`, for a message between two ranks: `near` reads or writes
    /// it, or relays it for `far`.
    fn spot(&self, held: &Held<'_>, start: u64, run: &Run, (near, far): (u32, u32)) -> Spot {
        let away = (near + self.share.ranks - far) % self.share.ranks;
        let turn = (run.unit(start, self.share.block_size), away);
        Spot { shard: held.shard, offset: start, turn, hop: near != run.rank }
    }

    /// The rank that relays what `rank` has or wants of a stretch of a tensor, which is part of `run`, if it is `thin`.
    fn relay(&mut self, held: &Held<'_>, start: u64, run: &Run, rank: u32, thin: bool) -> Option<u32> {
        if thin { self.teams.relay(held, start, run, rank) } else { None }
    }

    /// Adds an item of this rank that another reads or writes, as part of a run, for it or for the relay.
    fn hand(&mut self, held: &Held<'_>, start: u64, run: &Run, relay: Option<u32>, item: Item) {
        let near = relay.filter(|&relay| relay != self.rank).unwrap_or(run.rank);
        self.boxes.add(near, self.spot(held, start, run, (near, self.rank)), item);
    }

    /// Adds an item of `peer`, which this rank relays.
    fn pass(&mut self, held: &Held<'_>, start: u64, run: &Run, peer: u32, item: Item) {
        let spot = self.spot(held, start, run, (self.rank, peer));
        let relayed = Some(self.relays.add(peer, spot, item.clone()));
        self.boxes.add(
            run.rank,
            self.spot(held, start, run, (run.rank, self.rank)),
            Item { relayed, ..item },
        );
    }

    /// The intervals of which this rank sends or receives something: its own, and those that it may relay.
    fn near(&mut self, held: &Held<'_>, own: &Own, thin: bool) -> Vec<usize> {
        if !thin {
            return own.intervals.clone();
        }
        let mut all: Vec<usize> =
            own.intervals.iter().flat_map(|&interval| self.teams.around(held, interval).1).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Adds this rank's work on `tile` of rank `peer` in a stretch that it reads or writes, as part of a run.
    fn serve(
        &mut self,
        held: &Held<'_>,
        stretch: &Range<u64>,
        run: &Run,
        (tile, peer): (u32, u32),
        thin: bool,
    ) -> bool {
        let part = part(held.cover, &held.spreads, tile, peer).unwrap_or(0);
        let Some(item) = self.item(held, stretch, tile, part) else { return false };
        if peer != self.rank {
            let far = self.relay(held, stretch.start, run, peer, thin).unwrap_or(peer);
            self.io.add(far, self.spot(held, stretch.start, run, (run.rank, far)), item);
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
            let (own, thin) = (self.own(tensor), self.is_thin(tensor, owners));
            for interval in self.near(tensor, &own, thin) {
                self.send(tensor, interval, &own, owners);
            }
        }
        let rank = self.rank;
        for run in owners.of(shard).iter().filter(|run| run.rank == rank) {
            self.range(shard, run.start, run.end);
            self.write(&held, run, owners);
        }
        Ok(())
    }

    fn is_thin(&self, tensor: &Held<'_>, owners: &Owners) -> bool {
        owners.thin.contains(&self.share.class[tensor.tensor])
    }

    /// Adds the parts of an interval that others write: those of this rank, and those that it relays.
    fn send(&mut self, tensor: &Held<'_>, interval: usize, own: &Own, owners: &Owners) {
        let (section, thin) = (tensor.cover.section(interval), self.is_thin(tensor, owners));
        for (run, range) in owners.within(tensor.shard, tensor.interval(interval)) {
            if run.rank == self.rank {
                continue;
            }
            for stretch in tensor.cut(interval, range, true) {
                let relay = self.relay(tensor, stretch.start, run, self.rank, thin);
                let relays = relay == Some(self.rank);
                let mut own = own.tiles.get(&section).map_or(&[][..], Vec::as_slice);
                for (number, cell) in tensor.cover.cells(section).enumerate() {
                    let (here, rest) = own.split_at(own.partition_point(|own| own.0 <= number));
                    own = rest;
                    if here.is_empty() && !relays {
                        continue;
                    }
                    let Some((giver, tile)) = tensor.giver(cell, interval, &stretch, run.rank, thin) else {
                        continue;
                    };
                    if giver != self.rank && !relays {
                        continue;
                    }
                    let part = part(tensor.cover, &tensor.spreads, tile, giver).unwrap_or(0);
                    let Some(item) = self.item(tensor, &stretch, tile, part) else { continue };
                    if giver == self.rank {
                        self.hand(tensor, stretch.start, run, relay, item);
                    } else if self.relay(tensor, stretch.start, run, giver, thin) == relay {
                        self.pass(tensor, stretch.start, run, giver, item);
                    }
                }
            }
        }
    }

    /// Adds the bytes that this rank needs to write a run.
    fn write(&mut self, held: &[Held<'_>], run: &Run, owners: &Owners) {
        for (tensor, Range { start, end }) in inside(held, run) {
            let thin = self.is_thin(tensor, owners);
            for interval in tensor.at(start)..=tensor.at(end - 1) {
                let lines = tensor.interval(interval);
                for stretch in tensor.cut(interval, start.max(lines.start)..end.min(lines.end), true) {
                    for cell in tensor.cover.cells(tensor.cover.section(interval)) {
                        if let Some(from) = tensor.giver(cell, interval, &stretch, self.rank, thin) {
                            self.serve(tensor, &stretch, run, (from.1, from.0), thin);
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
            let (own, thin) = (self.own(tensor), self.is_thin(tensor, owners));
            for interval in self.near(tensor, &own, thin) {
                for (run, range) in owners.within(shard, tensor.interval(interval)) {
                    for stretch in tensor.cut(interval, range, false) {
                        if is_apart(tensor, stretch.start) {
                            self.read_apart(tensor, interval, &own, &stretch);
                        } else if run.rank != self.rank {
                            self.receive(tensor, interval, &own, (&stretch, run, thin));
                        }
                    }
                }
            }
        }
        let rank = self.rank;
        for run in owners.of(shard).iter().filter(|run| run.rank == rank) {
            for (tensor, Range { start: mut at, end }) in inside(&held, run) {
                let thin = self.is_thin(tensor, owners);
                while at < end {
                    let extent = tensor.extent(at);
                    at = extent.end;
                    if !is_apart(tensor, extent.start) {
                        self.read(tensor, &extent, run, thin);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds this rank's part of an extent that is read apart.
    fn read_apart(&mut self, tensor: &Held<'_>, interval: usize, own: &Own, stretch: &Range<u64>) {
        for &(_, tile, part) in &own.tiles[&tensor.cover.section(interval)] {
            if let Some(item) = self.item(tensor, stretch, tile, part) {
                self.range(tensor.shard, stretch.start, stretch.end);
                self.apart.push(item);
            }
        }
    }

    /// Adds the parts of a stretch that another rank reads: those that this rank wants, and those that it relays.
    fn receive(
        &mut self,
        tensor: &Held<'_>,
        interval: usize,
        own: &Own,
        (stretch, run, thin): (&Range<u64>, &Run, bool),
    ) {
        let section = tensor.cover.section(interval);
        let relay = self.relay(tensor, stretch.start, run, self.rank, thin);
        if relay != Some(self.rank) {
            for &(_, tile, part) in own.tiles.get(&section).into_iter().flatten() {
                if let Some(item) = self.item(tensor, stretch, tile, part) {
                    self.hand(tensor, stretch.start, run, relay, item);
                }
            }
            return;
        }
        for &tile in tensor.cover.cells(section).flatten() {
            for &peer in tensor.ranks(tile) {
                let part = part(tensor.cover, &tensor.spreads, tile, peer).unwrap_or(0);
                let Some(item) = self.item(tensor, stretch, tile, part) else { continue };
                if peer == self.rank {
                    self.hand(tensor, stretch.start, run, relay, item);
                } else if self.relay(tensor, stretch.start, run, peer, thin) == relay {
                    self.pass(tensor, stretch.start, run, peer, item);
                }
            }
        }
    }

    /// Adds an extent that this rank reads, as part of a run, unless no rank wants any of it.
    fn read(&mut self, held: &Held<'_>, extent: &Range<u64>, run: &Run, thin: bool) {
        let mut wanted = false;
        for interval in held.at(extent.start)..=held.at(extent.end - 1) {
            let lines = held.interval(interval);
            let stretch = extent.start.max(lines.start)..extent.end.min(lines.end);
            for &tile in held.cover.cells(held.cover.section(interval)).flatten() {
                for &peer in held.ranks(tile) {
                    wanted |= self.serve(held, &stretch, run, (tile, peer), thin);
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
