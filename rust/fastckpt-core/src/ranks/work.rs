//! The work of one rank that writes ranges of shards: its own bytes, and those of messages from other ranks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::held::{Held, scatter, span, unpack, whole_run};
use super::mail::{Mail, Received};
use super::near::Near;
use super::table::Table;
use crate::engine::content::{self, Content, Pull};
use crate::error::{Error, Result};
use crate::format::checksum::Pair;
use crate::format::geometry::{self, Extent};
use crate::format::layout::Plan;
use crate::save::work::{Unit, Work, extents};
use crate::share::Piece;
use crate::share::{Duties, Item};
use crate::sys::memory::Source;

/// The source of the bytes of an item.
#[derive(Debug)]
enum From {
    /// The rank's own memory, contiguous.
    Run(Range<u64>),
    /// The rank's own memory, row by row.
    Rows,
    /// A message.
    Message(Place),
}

/// The place of an item's bytes in an incoming message, given by number. Messages to relay are numbered first.
#[derive(Debug)]
struct Place {
    message: usize,
    at: u64,
}

/// Bytes of a unit from one source. `item` is an index into the items of the message, or into those of this rank.
#[derive(Debug)]
struct Supply {
    item: usize,
    from: From,
}

impl Supply {
    fn item<'a>(&self, duties: &'a Duties) -> &'a Item {
        match &self.from {
            From::Message(place) => &duties.io[place.message - duties.relays.len()].items[self.item],
            From::Run(_) | From::Rows => &duties.local[self.item],
        }
    }
}

/// The sources of a unit.
#[derive(Debug)]
struct Needs {
    unit: Unit,
    first_piece: usize,
    /// The unit's supplies, in the order of the file.
    supplies: Range<usize>,
    /// Each message with bytes for the unit, and the range of these.
    messages: Vec<(usize, Range<u64>)>,
}

/// The ranges that a rank writes.
#[derive(Debug)]
pub(super) struct Ranges {
    table: Arc<Table>,
    duties: Arc<Duties>,
    held: Arc<Held>,
    mail: Arc<Mail>,
    near: Box<Near>,
    units: Vec<Needs>,
    supplies: Vec<Supply>,
    /// The number of bytes to write of each shard that has any.
    bytes: BTreeMap<usize, u64>,
    /// Pieces of all units in order: shard, first byte and length.
    pieces: Vec<(usize, u64, u64)>,
    sums: Vec<[AtomicU64; 2]>,
    /// Number of tensors with bytes to write.
    tensors: usize,
    /// The messages of each unit, from the first copy out of them until the unit no longer needs them.
    taken: Vec<Mutex<Vec<Received>>>,
}

impl Ranges {
    /// The work of the rank with these `duties` and the memory `held`. Refuses duties in which a byte has no source.
    pub(super) fn new(
        table: &Arc<Table>,
        duties: &Arc<Duties>,
        held: &Arc<Held>,
        mail: &Arc<Mail>,
    ) -> Result<Self> {
        let plan = &table.plan;
        let mut supplies = supplies(duties);
        let place = |supply: &Supply| {
            let item = supply.item(duties);
            let (shard, offset) = plan.places[item.tensor];
            (shard, offset + item.bytes.start, offset + item.bytes.end)
        };
        supplies.sort_by_key(place);
        let (mut units, mut pieces, mut bytes) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (mut used, mut tensors, mut last) = (0, 0, None);
        for unit in cut(duties, plan) {
            *bytes.entry(unit.shard).or_insert(0) += unit.len();
            let first_piece = pieces.len();
            for extent in extents(plan, &unit) {
                pieces.push((unit.shard, extent.offset, extent.len));
                tensors += usize::from(last.replace(extent.tensor) != Some(extent.tensor));
            }
            let first = used;
            let mut given = 0;
            while let Some(supply) = supplies.get(used) {
                let (shard, start, end) = place(supply);
                if shard != unit.shard || start < unit.start || end > unit.end {
                    break;
                }
                given += supply.item(duties).len;
                used += 1;
            }
            let needed: u64 = pieces[first_piece..].iter().map(|(_, _, len)| len).sum();
            if given != needed {
                return Err(incomplete(plan, &unit, given, needed));
            }
            let messages = messages(&supplies[first..used], duties);
            units.push(Needs { unit, first_piece, supplies: first..used, messages });
        }
        if used < supplies.len() {
            let what = "a rank would get bytes that it does not write: the plans of the ranks are wrong";
            return Err(Error::Invalid(what.to_owned()));
        }
        Ok(Self {
            table: Arc::clone(table),
            duties: Arc::clone(duties),
            held: Arc::clone(held),
            mail: Arc::clone(mail),
            near: Box::default(),
            supplies,
            bytes,
            tensors,
            sums: pieces.iter().map(|_| Default::default()).collect(),
            taken: units.iter().map(|_| Mutex::default()).collect(),
            pieces,
            units,
        })
    }

    /// The checksums of the written bytes.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let piece = |(&(shard, start, len), [crc, xz]): (&(usize, u64, u64), &[AtomicU64; 2])| Piece {
            shard: shard as u32,
            start,
            len,
            sum: Pair { crc: crc.load(Ordering::Relaxed), xz: xz.load(Ordering::Relaxed) },
        };
        self.pieces.iter().zip(&self.sums).map(piece).collect()
    }

    /// Bytes of tensors to write.
    pub(super) fn total(&self) -> u64 {
        self.pieces.iter().map(|(_, _, len)| len).sum()
    }

    /// Number of tensors with bytes to write.
    pub(super) const fn tensors(&self) -> usize {
        self.tensors
    }

    /// The messages of a unit.
    pub(super) fn taken(&self, number: usize) -> MutexGuard<'_, Vec<Received>> {
        self.taken[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the work read from the memory of ranks of the same host from now on.
    pub(super) fn read_near(&mut self, near: Near) {
        for needs in &mut self.units {
            let brought = |message: usize| {
                let number = message.checked_sub(self.duties.relays.len());
                number.is_some_and(|number| near.brings(&self.duties.io[number]))
            };
            needs.messages.retain(|(message, _)| !brought(*message));
        }
        *self.near = near;
    }

    /// Copies the bytes of an item in a message to their places in `to`, which begins at byte `start` of the tensor.
    fn given(&self, number: usize, place: &Place, item: &Item, to: (&mut [u8], u64)) -> Result<()> {
        let message = &self.duties.io[place.message - self.duties.relays.len()];
        if !self.near.brings(message) {
            return self.with(number, place, item.len, |payload| unpack(payload, item, to));
        }
        self.near.read(message.peer, item, to)?.map_err(|error| {
            let why = format!("its memory cannot be read: {error}");
            self.mail.lose(message.peer, &why)
        })
    }

    /// Calls `action` with `len` bytes of a message that has arrived.
    fn with(
        &self,
        number: usize,
        place: &Place,
        len: u64,
        action: impl FnOnce(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let messages = &self.units[number].messages;
        let mut taken = self.taken(number);
        if taken.is_empty() {
            for (message, bytes) in messages {
                taken.push(self.mail.take(*message, bytes.clone())?);
            }
        }
        let index = messages.partition_point(|(message, _)| *message < place.message);
        let skip = (place.at - messages[index].1.start) as usize;
        action(&taken[index][skip..skip + len as usize])
    }

    /// The supplies of a unit, in the order of the file.
    fn supplies(&self, number: usize) -> impl Iterator<Item = (&Item, &From)> {
        self.supplies[self.units[number].supplies.clone()].iter().map(|supply| self.with_item(supply))
    }

    fn with_item<'a>(&'a self, supply: &'a Supply) -> (&'a Item, &'a From) {
        (supply.item(&self.duties), &supply.from)
    }

    /// The start of a tensor in its file.
    fn offset(&self, tensor: usize) -> u64 {
        self.table.plan.places[tensor].1
    }

    /// The callback for a supply, if its bytes belong to this rank and are not in host memory.
    fn pulled(&self, item: &Item, from: &From) -> Option<&Pull> {
        if let From::Message(_) = from { None } else { self.held.pull(item) }
    }

    /// The part of a unit's `bytes` for an item, and the first byte of the tensor there.
    fn slot<'b>(&self, unit: &Unit, item: &Item, bytes: &'b mut [u8]) -> (&'b mut [u8], u64) {
        let at = (self.offset(item.tensor) + item.bytes.start - unit.start) as usize;
        let len = (item.bytes.end - item.bytes.start) as usize;
        (&mut bytes[at..at + len], item.bytes.start)
    }

    /// The supplies of a unit for bytes of a tensor. There may be others among them.
    fn around(
        &self,
        number: usize,
        tensor: usize,
        bytes: &Range<u64>,
    ) -> impl Iterator<Item = (&Item, &From)> {
        let offset = self.offset(tensor);
        let start = |supply: &Supply| {
            let item = supply.item(&self.duties);
            self.offset(item.tensor) + item.bytes.start
        };
        let all = &self.supplies[self.units[number].supplies.clone()];
        let last = all.partition_point(|supply| start(supply) < offset + bytes.end);
        let first = all.partition_point(|supply| start(supply) < offset);
        let inside = move |(item, _): &(&Item, &From)| item.tensor == tensor && item.bytes.end > bytes.start;
        all[first.min(last)..last].iter().map(|supply| self.with_item(supply)).filter(inside)
    }
}

/// The sources of the bytes that a rank writes.
fn supplies(duties: &Duties) -> Vec<Supply> {
    let own = |(item, of): (usize, &Item)| {
        let from = whole_run(of, &of.bytes).map_or(From::Rows, From::Run);
        Supply { item, from }
    };
    let mut all: Vec<_> = duties.local.iter().enumerate().map(own).collect();
    for (message, letter) in (duties.relays.len()..).zip(&duties.io) {
        let mut at = 0;
        for (item, of) in letter.items.iter().enumerate() {
            all.push(Supply { item, from: From::Message(Place { message, at }) });
            at += of.len;
        }
    }
    all
}

/// The ranges of `duties`, cut at the blocks of their files.
fn cut(duties: &Duties, plan: &Plan) -> impl Iterator<Item = Unit> {
    duties.ranges.iter().flat_map(move |range| {
        let mut start = range.start;
        std::iter::from_fn(move || {
            let end = range.end.min(geometry::down(start, plan.block_size) + plan.block_size);
            let unit = Unit { shard: range.shard, start, end };
            start = end;
            (unit.start < unit.end).then_some(unit)
        })
    })
}

/// The messages of a unit, and the bytes of each that are for it. The items of a message are in the order of the file,
/// so the items for a unit are adjacent.
fn messages(supplies: &[Supply], duties: &Duties) -> Vec<(usize, Range<u64>)> {
    let mut found = BTreeMap::new();
    for supply in supplies {
        if let From::Message(Place { message, at }) = &supply.from {
            let bytes: &mut Range<u64> = found.entry(*message).or_insert(*at..*at);
            *bytes = bytes.start.min(*at)..bytes.end.max(at + supply.item(duties).len);
        }
    }
    found.into_iter().collect()
}

fn incomplete(plan: &Plan, unit: &Unit, given: u64, needed: u64) -> Error {
    Error::Invalid(format!(
        "the ranks have {given} of {needed} bytes of tensors in bytes {}..{} of `{}`: the plans of the \
         ranks are wrong",
        unit.start, unit.end, plan.shards[unit.shard].file
    ))
}

impl Work for Ranges {
    fn plan(&self) -> &Plan {
        &self.table.plan
    }

    fn units(&self) -> usize {
        self.units.len()
    }

    fn unit(&self, number: usize) -> Unit {
        self.units[number].unit
    }

    fn files(&self) -> usize {
        self.bytes.len()
    }

    fn bytes_of(&self, index: usize) -> u64 {
        self.bytes.get(&index).copied().unwrap_or(0)
    }

    fn is_ready(&self, number: usize) -> Result<bool> {
        let messages = &self.units[number].messages;
        Ok(messages.is_empty() || self.mail.are_here(messages.iter().map(|(message, _)| *message))?)
    }

    fn calls(&self) -> bool {
        self.held.calls()
    }

    fn fetched(&self, number: usize) -> Option<u64> {
        let mut found = None;
        for (item, from) in self.supplies(number) {
            let placed = if let From::Run(_) = from { item.len } else { 0 };
            if self.pulled(item, from).is_some() {
                found = Some(found.unwrap_or(0) + placed);
            }
        }
        found
    }

    fn fetch(&self, units: Range<usize>, mut to: &mut [u8]) -> Result<()> {
        // Rows at other addresses are first gathered, and then scattered: at the destination, each is a few bytes.
        let rows = |number: usize| {
            let some = self.supplies(number).filter(|(_, from)| matches!(from, From::Rows));
            some.filter_map(move |(item, _)| Some((number, item, self.held.pull(item)?)))
        };
        let rows: Vec<_> = units.clone().flat_map(rows).collect();
        let spans: Vec<_> = rows.iter().map(|(_, item, _)| span(item, &item.bytes)).collect();
        let mut together: Vec<_> =
            spans.iter().map(|span| vec![0; (span.end - span.start) as usize]).collect();
        {
            let mut wanted = Vec::new();
            for ((&(_, _, pull), span), bytes) in rows.iter().zip(&spans).zip(&mut together) {
                wanted.push((pull, span.start, &mut bytes[..]));
            }
            let mut rest = &mut *to;
            for number in units.clone() {
                let unit = self.units[number].unit;
                let (mut bytes, after) = rest.split_at_mut(unit.padded());
                rest = after;
                let mut at = unit.start;
                for (item, from) in self.supplies(number) {
                    let (From::Run(run), Some(pull)) = (from, self.pulled(item, from)) else { continue };
                    let place = self.offset(item.tensor) + item.bytes.start;
                    let (slot, after) = bytes[(place - at) as usize..].split_at_mut(item.len as usize);
                    (bytes, at) = (after, place + item.len);
                    wanted.push((pull, run.start, slot));
                }
            }
            content::fetch(wanted)?;
        }
        let mut rows = rows.iter().zip(&spans).zip(&together).peekable();
        for number in units {
            let unit = self.units[number].unit;
            let (bytes, rest) = to.split_at_mut(unit.padded());
            to = rest;
            while let Some(((&(_, item, _), span), from)) = rows.next_if(|((row, _), _)| row.0 == number) {
                scatter(item, &item.bytes, (from[..].into(), span.start), self.slot(&unit, item, bytes))?;
            }
        }
        Ok(())
    }

    fn complete(&self, number: usize, to: &mut [u8]) -> Result<()> {
        let unit = self.units[number].unit;
        for (item, from) in self.supplies(number) {
            let slot = self.slot(&unit, item, to);
            match from {
                _ if self.pulled(item, from).is_some() => {}
                From::Run(run) => {
                    let source = self.held.memory(item, run)?.ok_or_else(Content::too_short)?;
                    source.copy(slot.0);
                }
                From::Rows => self.held.spread(item, &item.bytes, slot)?,
                From::Message(place) => {
                    self.given(number, place, item, slot)?;
                }
            }
        }
        Ok(())
    }

    fn memory(&self, number: usize, extent: &Extent, found: &mut Vec<(u64, Source)>) -> Result<()> {
        let wanted = extent.start..extent.start + extent.len;
        for (item, from) in self.around(number, extent.tensor, &wanted) {
            let From::Run(run) = from else { continue };
            if let Some(source) = self.held.memory(item, run)? {
                found.push((extent.offset + (item.bytes.start - extent.start), source));
            }
        }
        Ok(())
    }

    fn copy(&self, number: usize, tensor: usize, start: u64, to: &mut [u8]) -> Result<Pair> {
        let wanted = start..start + to.len() as u64;
        for (item, from) in self.around(number, tensor, &wanted) {
            let inside = item.bytes.start.max(wanted.start)..item.bytes.end.min(wanted.end);
            match from {
                From::Run(run) => {
                    let from = run.start + (inside.start - item.bytes.start);
                    let place = (inside.start - start) as usize..(inside.end - start) as usize;
                    let sum = self.held.copy(item, from, &mut to[place])?;
                    if inside == wanted {
                        return Ok(sum);
                    }
                }
                From::Rows => self.held.spread(item, &inside, (&mut *to, start))?,
                // No part of such an item is written without a copy, so all of it is copied at once.
                From::Message(place) => {
                    self.given(number, place, item, (&mut *to, start))?;
                }
            }
        }
        Ok(Pair::of(to))
    }

    fn summed(&self, number: usize, place: usize, _: &Extent, sum: Pair) {
        let [crc, xz] = &self.sums[self.units[number].first_piece + place];
        crc.store(sum.crc, Ordering::Relaxed);
        xz.store(sum.xz, Ordering::Relaxed);
    }

    fn assembled(&self, number: usize, _: u64, again: bool) {
        if !again {
            self.written(number);
        }
    }

    fn written(&self, number: usize) {
        self.taken(number).clear();
    }
}
