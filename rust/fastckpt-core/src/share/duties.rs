//! The duties of one rank: the ranges of files that it reads or writes, and its messages. Pure.
//!
//! Both sides of a message compute its items from the same cuts in the same order: intervals, blocks and pages cut a
//! tensor into stretches with one owner each, and the cells and tiles of a stretch are in order.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::cover::Cover;
use super::held::Held;
use super::messages::{Item, Mailbox, Message, Spot};
use super::place::Places;
use super::runs::{Owners, Purpose, Relays, Run};
use super::spread::Groups;
use super::table::{Deal, Share};
use super::teams::{Teams, of_copies};
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
    /// The ranges that the rank reads or writes, in order. No two are adjacent.
    pub ranges: Vec<FileRange>,
    /// Bytes in `ranges` that the rank has or wants itself, in order.
    pub local: Vec<Item>,
    /// The same as `local`, for parts of extents whose other parts other ranks read ([`Share::read_apart`]).
    pub apart: Vec<Item>,
    /// Messages with bytes in `ranges` that other ranks have or want.
    pub io: Vec<Message>,
    /// Messages with bytes that the rank has, wants or relays, and that other ranks read or write.
    pub boxes: Vec<Message>,
    /// Messages with bytes that the rank relays, from or to the ranks that have or want them.
    pub relays: Vec<Message>,
}

impl Duties {
    /// Bytes that the rank has or wants itself, whether it or another rank reads or writes them.
    pub(crate) fn own(&self) -> impl Iterator<Item = &Item> {
        let given = self.boxes.iter().flat_map(|message| &message.items);
        self.local.iter().chain(given.filter(|item| item.own))
    }

    /// The messages that the rank sends, and the messages that it receives, each in order.
    #[must_use]
    pub fn lanes(&self, purpose: Purpose) -> (Vec<&Message>, Vec<&Message>) {
        let own = self.boxes.iter().collect();
        match purpose {
            Purpose::Save => (own, self.relays.iter().chain(&self.io).collect()),
            Purpose::Load => {
                let mut sent: Vec<_> = self.io.iter().chain(&self.relays).collect();
                sent.sort_by_key(|message| message.phase);
                (sent, own)
            }
        }
    }

    /// The positions of the messages of `io` and of `relays` in the order in which a load sends all messages.
    #[must_use]
    pub fn sent(&self) -> [Vec<usize>; 2] {
        let places = |of: &[Message], others: &[Message]| {
            let before = |message: &Message| others.partition_point(|other| other.phase < message.phase);
            of.iter().enumerate().map(|(number, message)| number + before(message)).collect()
        };
        [places(&self.io, &self.relays), places(&self.relays, &self.io)]
    }
}

impl Share {
    /// The duties of `rank`. Its parts count as memory without gaps. Fails if a spread does not fit its tensor. A save
    /// also fails if no rank has some of the bytes.
    pub fn duties(&self, rank: u32, purpose: Purpose) -> Result<Duties> {
        if rank >= self.ranks {
            return Err(Error::Invalid(format!("there is no rank {rank} of {}", self.ranks)));
        }
        let load = purpose == Purpose::Load;
        if !load {
            self.check_held()?;
        }
        let deals = if load { &[] } else { self.deals()? };
        let owners = self.owners(purpose)?;
        let mut work = Work::new(self, rank, (deals, load), owners.window)?;
        for shard in 0..self.files.len() {
            if load { work.extents(shard, owners)? } else { work.grains(shard, owners)? }
        }
        // The ranges of extents that several ranks read in parts were added first.
        work.ranges.sort_unstable_by_key(|range| (range.shard, range.start));
        for FileRange { shard, start, end } in std::mem::take(&mut work.ranges) {
            work.range(shard, start, end);
        }
        let (io, (mut boxes, _), (relays, places)) =
            (work.io.finish(load).0, work.boxes.finish(load), work.relays.finish(load));
        let relayed =
            boxes.iter_mut().flat_map(|message| &mut message.items).flat_map(|item| &mut item.relayed);
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
                return Err(Error::Invalid("a file is longer than its tensors".to_owned()));
            }
        }
        Ok(())
    }
}

/// The tiles of one rank in the tensors of one class.
pub(super) struct Own {
    /// The intervals of the rank, in order.
    pub(super) intervals: Vec<usize>,
    /// For each section, the number of the cell, the tile and the part of each of the rank's tiles, in order.
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

/// A stretch of a tensor, which is part of a run.
pub(super) struct At<'a, 'b> {
    pub(super) held: &'a Held<'b>,
    pub(super) stretch: &'a Range<u64>,
    pub(super) run: &'a Run,
    pub(super) relays: Option<Relays>,
}

/// The duties of one rank, while they are found.
pub(super) struct Work<'a> {
    pub(super) share: &'a Share,
    pub(super) rank: u32,
    /// The deals of a save, by tensor.
    deals: &'a [Deal],
    /// The tiles of this rank, by class.
    own: HashMap<usize, Rc<Own>>,
    places: Places,
    ranges: Vec<FileRange>,
    local: Vec<Item>,
    pub(super) apart: Vec<Item>,
    io: Mailbox,
    boxes: Mailbox,
    relays: Mailbox,
    teams: Teams<'a>,
}

impl<'a> Work<'a> {
    pub(super) fn new(
        share: &'a Share,
        rank: u32,
        (deals, load): (&'a [Deal], bool),
        window: u64,
    ) -> Result<Self> {
        Ok(Self {
            share,
            rank,
            deals,
            own: HashMap::new(),
            places: Places::default(),
            ranges: Vec::new(),
            local: Vec::new(),
            apart: Vec::new(),
            io: Mailbox::new(share.ranks, window),
            boxes: Mailbox::new(share.ranks, window),
            relays: Mailbox::new(share.ranks, window),
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
    pub(super) fn held(&self, shard: usize) -> Result<Vec<Held<'a>>> {
        let held = self.share.order[shard].iter();
        held.map(|&tensor| Held::new(self.share, tensor, self.deals.get(tensor))).collect()
    }

    /// Adds a range of a file to read or write.
    pub(super) fn range(&mut self, shard: usize, start: u64, end: u64) {
        match self.ranges.last_mut() {
            Some(last) if last.shard == shard && last.end == start => last.end = end,
            _ => self.ranges.push(FileRange { shard, start, end }),
        }
    }

    /// The item of `tile` of `rank` in `stretch` of the file; `None` if the tile has no bytes there.
    pub(super) fn item(
        &mut self,
        held: &Held<'_>,
        stretch: &Range<u64>,
        tile: u32,
        rank: u32,
    ) -> Option<Item> {
        let place = self.places.of(self.share.class[held.tensor], held, tile);
        let bytes = stretch.start - held.range.start..stretch.end - held.range.start;
        let len = place.rows.bytes_in(&bytes);
        let (rows, base) = (Arc::clone(&place.rows), place.base);
        let part = part(held.cover, &held.spreads, tile, rank).unwrap_or(0);
        let (tensor, relayed) = (held.tensor, Vec::new());
        (len > 0).then_some(Item { tensor, bytes, part, rows, base, len, own: true, relayed })
    }

    /// The spot of a stretch for a message between two ranks: `near` reads or writes it, or relays it for `far`.
    fn spot(&self, at: &At<'_, '_>, (near, far): (u32, u32)) -> Spot {
        let away = (near + self.share.ranks - far) % self.share.ranks;
        let turn = (at.run.unit(at.stretch.start, self.share.block_size), away);
        Spot { shard: at.held.shard, offset: at.stretch.start, turn, hop: near != at.run.rank }
    }

    /// The rank that relays the bytes that `rank` has or wants of `tile` in a stretch.
    pub(super) fn relay(&mut self, at: &At<'_, '_>, rank: u32, tile: u32) -> Option<u32> {
        match at.relays? {
            Relays::Team => self.teams.relay(at.held, at.stretch.start, at.run, rank),
            Relays::Copies => of_copies(at.held.ranks(tile), at.run.rank, rank),
        }
    }

    /// Adds an item that `far` has, wants or relays, and that this rank reads or writes.
    pub(super) fn deal(&mut self, at: &At<'_, '_>, far: u32, item: Item) {
        self.io.add(far, self.spot(at, (self.rank, far)), item);
    }

    /// Adds an item of this rank that another rank reads or writes. The item is sent directly or through the relay.
    pub(super) fn hand(&mut self, at: &At<'_, '_>, relay: Option<u32>, item: Item) {
        let near = relay.filter(|&relay| relay != self.rank).unwrap_or(at.run.rank);
        self.boxes.add(near, self.spot(at, (near, self.rank)), item);
    }

    /// Adds an item that this rank relays for `peer`. Returns its place.
    pub(super) fn pass(&mut self, at: &At<'_, '_>, peer: u32, item: Item) -> (usize, u64) {
        self.relays.add(peer, self.spot(at, (self.rank, peer)), item)
    }

    /// The intervals of which this rank sends or receives bytes: its own, and intervals that it may relay.
    pub(super) fn near(&mut self, held: &Held<'_>, own: &Own, relays: Option<Relays>) -> Vec<usize> {
        if relays != Some(Relays::Team) {
            return own.intervals.clone();
        }
        let mut all: Vec<usize> =
            own.intervals.iter().flat_map(|&interval| self.teams.around(held, interval).1).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Adds an item of this rank that this rank also reads or writes. The stretch of the item begins at `start`.
    pub(super) fn keep(&mut self, start: u64, item: Item) {
        match self.local.last_mut() {
            Some(last)
                if (last.tensor, last.part, last.bytes.end) == (item.tensor, item.part, item.bytes.start)
                    && Arc::ptr_eq(&last.rows, &item.rows)
                    && !start.is_multiple_of(self.share.block_size) =>
            {
                last.bytes.end = item.bytes.end;
                last.len += item.len;
            }
            _ => self.local.push(item),
        }
    }

    pub(super) fn relays_of(&self, held: &Held<'_>, owners: &Owners) -> Option<Relays> {
        owners.relays(self.share.class[held.tensor])
    }

    /// Adds the ranges of a file that this rank writes, and the items that it sends of the rest.
    fn grains(&mut self, shard: usize, owners: &Owners) -> Result<()> {
        let held = self.held(shard)?;
        for tensor in &held {
            let own = self.own(tensor);
            for interval in self.near(tensor, &own, self.relays_of(tensor, owners)) {
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

    /// Adds the parts of an interval that other ranks write: parts that this rank has, and parts that it relays.
    fn send(&mut self, held: &Held<'_>, interval: usize, own: &Own, owners: &Owners) {
        let (section, relays) = (held.cover.section(interval), self.relays_of(held, owners));
        for (run, range) in owners.within(held.shard, held.interval(interval)) {
            if run.rank == self.rank {
                continue;
            }
            for stretch in held.cut(interval, range, true) {
                let at = At { held, stretch: &stretch, run, relays };
                let relay = self.relay(&at, self.rank, 0);
                let is_relay = relay == Some(self.rank);
                let mut own = own.tiles.get(&section).map_or(&[][..], Vec::as_slice);
                for (number, cell) in held.cover.cells(section).enumerate() {
                    let (here, rest) = own.split_at(own.partition_point(|own| own.0 <= number));
                    own = rest;
                    if here.is_empty() && !is_relay {
                        continue;
                    }
                    let Some((giver, tile)) =
                        held.giver(cell, interval, &stretch, run.rank, relays.is_some())
                    else {
                        continue;
                    };
                    if giver != self.rank && !is_relay {
                        continue;
                    }
                    let Some(item) = self.item(held, &stretch, tile, giver) else { continue };
                    if giver == self.rank {
                        self.hand(&at, relay, item);
                    } else if self.relay(&at, giver, tile) == relay {
                        let relayed = vec![self.pass(&at, giver, item.clone())];
                        self.hand(&at, relay, Item { own: false, relayed, ..item });
                    }
                }
            }
        }
    }

    /// Adds the bytes that this rank needs to write a run.
    fn write(&mut self, held: &[Held<'_>], run: &Run, owners: &Owners) {
        for (held, Range { start, end }) in inside(held, run) {
            let relays = self.relays_of(held, owners);
            for interval in held.at(start)..=held.at(end - 1) {
                let lines = held.interval(interval);
                for stretch in held.cut(interval, start.max(lines.start)..end.min(lines.end), true) {
                    let at = At { held, stretch: &stretch, run, relays };
                    for cell in held.cover.cells(held.cover.section(interval)) {
                        let from = held.giver(cell, interval, &stretch, self.rank, relays.is_some());
                        let Some((giver, tile)) = from else { continue };
                        let Some(item) = self.item(held, &stretch, tile, giver) else { continue };
                        if giver == self.rank {
                            self.keep(stretch.start, item);
                        } else {
                            let far = self.relay(&at, giver, tile).unwrap_or(giver);
                            self.deal(&at, far, Item { own: far == giver, ..item });
                        }
                    }
                }
            }
        }
    }
}

/// The tensors of a file that lie in a run, each with its bytes in the run, counted in the file.
pub(super) fn inside<'a, 'b>(
    held: &'a [Held<'b>],
    run: &Run,
) -> impl Iterator<Item = (&'a Held<'b>, Range<u64>)> {
    let Run { start, end, .. } = *run;
    let first = held.partition_point(|tensor| tensor.range.end <= start);
    let within = held[first..].iter().take_while(move |tensor| tensor.range.start < end);
    within.map(move |tensor| (tensor, start.max(tensor.range.start)..end.min(tensor.range.end)))
}
