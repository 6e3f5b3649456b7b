//! The memory of one rank that holds boxes of tensors. Copies rows out of this memory and out of messages.

use std::collections::HashMap;
use std::ops::Range;

use super::mail::Mail;
use crate::engine::content::{self, Content, Pull};
use crate::error::{Error, Result};
use crate::format::checksum::{self, Pair};
use crate::share::{Duties, Item};
use crate::sys::memory::{Bytes, Source};
use crate::sys::remote;

/// The parts that a rank holds, by tensor and part.
#[derive(Debug, Default)]
pub struct Held(HashMap<(usize, u32), Content>);

/// A contiguous range of bytes in the local memory of a part.
type Run = Range<u64>;

impl Held {
    /// The parts of a rank, each with its memory, by tensor and part.
    #[must_use]
    pub fn new(parts: impl IntoIterator<Item = ((usize, u32), Content)>) -> Self {
        Self(parts.into_iter().collect())
    }

    /// Checks that the parts that these duties read are here.
    pub(super) fn check(&self, duties: &Duties) -> Result<()> {
        duties.own().try_for_each(|item| self.content(item).map(drop))
    }

    fn content(&self, &Item { tensor, part, .. }: &Item) -> Result<&Content> {
        self.0.get(&(tensor, part)).ok_or_else(|| {
            Error::Invalid(format!("part {part} of tensor {tensor} is not in this rank's memory"))
        })
    }

    /// The address of a part, given by tensor and number; `None` if another process cannot read it.
    pub(super) fn address(&self, part: (usize, u32)) -> Option<u64> {
        let Content::Memory(bytes) = self.0.get(&part)? else { return None };
        let address = bytes.address() as u64;
        // Memory of a driver may not be readable in this way, so the first and the last byte are tried.
        let (mut first, mut last) = ([0], [0]);
        let ends =
            &mut [(address, &mut first[..]), (address + (bytes.len() as u64).max(1) - 1, &mut last[..])];
        remote::read(std::process::id(), ends).is_ok().then_some(address)
    }

    /// The host memory of the range `run` of an item's part; `None` if it is elsewhere.
    pub(super) fn memory(&self, item: &Item, run: &Run) -> Result<Option<Source>> {
        match self.content(item)? {
            Content::Memory(source) => {
                let len = (run.end - run.start) as usize;
                source.part(run.start as usize, len).map(Some).ok_or_else(Content::too_short)
            }
            Content::Image(_) | Content::Pull(_) => Ok(None),
        }
    }

    /// Copies the bytes of an item's part from `start` on and returns their checksums.
    pub(super) fn copy(&self, item: &Item, start: u64, to: &mut [u8]) -> Result<Pair> {
        let content = self.content(item)?;
        if let Content::Pull(pull) = content {
            content::fetch([(pull, start, &mut *to)])?;
            return Ok(Pair::of(to));
        }
        let from = content.host(start, to.len())?.unwrap_or_default();
        Ok(Pair::copy(to, from))
    }

    /// Whether callbacks copy any part.
    pub(super) fn calls(&self) -> bool {
        self.0.values().any(|content| matches!(content, Content::Pull(_)))
    }

    /// The callback for an item's part, if it is not in host memory.
    pub(super) fn pull(&self, item: &Item) -> Option<&Pull> {
        match self.content(item) {
            Ok(Content::Pull(pull)) => Some(pull),
            _ => None,
        }
    }

    /// Packs the bytes of a message's items, one after another, each in its tensor's order. Items that this rank relays
    /// come from `mail`. Callbacks copy their parts in one call at the end. Before that, `filled` is called with the
    /// filled beginning of `to`.
    pub(super) fn pack_all(
        &self,
        items: &[Item],
        mail: Option<&Mail>,
        mut to: &mut [u8],
        mut filled: impl FnMut(&[u8]),
    ) -> Result<()> {
        let (mut at, mut wanted) = (0, Vec::new());
        for item in items {
            let misfit = || misfit("a message", &item.bytes);
            let end = at + item.len as usize;
            if let (Some(&(message, start)), Some(mail)) = (item.relayed.first(), mail) {
                mail.copy(message, start, to.get_mut(at..end).ok_or_else(misfit)?)?;
                at = end;
                if wanted.is_empty() {
                    filled(&to[..at]);
                }
                continue;
            }
            let content = self.content(item)?;
            for run in runs(item, &item.bytes) {
                let place = at..at + (run.end - run.start) as usize;
                at = place.end;
                let slot = to.get_mut(place.clone()).filter(|_| at <= end).ok_or_else(misfit)?;
                if let Content::Pull(pull) = content {
                    wanted.push((pull, run.start, place));
                } else if let Some(from) = content.host(run.start, slot.len())? {
                    let mut done = place.start;
                    for part in checksum::passes(from) {
                        part.copy(&mut to[done..][..part.len()]);
                        done += part.len();
                        if wanted.is_empty() {
                            filled(&to[..done]);
                        }
                    }
                }
            }
            if at != end {
                return Err(misfit());
            }
        }
        let mut passed = 0;
        let slots = wanted.into_iter().map(|(pull, start, place)| {
            let (slot, rest) = std::mem::take(&mut to)[place.start - passed..].split_at_mut(place.len());
            (to, passed) = (rest, place.end);
            (pull, start, slot)
        });
        content::fetch(slots)
    }

    /// The checksums of items, each of the item's bytes in its tensor's order. Callbacks copy their parts in one call.
    pub(super) fn sums(&self, items: &[&Item]) -> Result<Vec<u64>> {
        let run = |item: &Item| whole_run(item, &item.bytes).filter(|run| run.end - run.start == item.len);
        let (mut packed, mut bytes) = (Vec::new(), 0);
        let mut lying = Vec::with_capacity(items.len());
        for &item in items {
            let source = run(item).map(|run| self.memory(item, &run)).transpose()?.flatten();
            if source.is_none() {
                packed.push(item.clone());
                bytes += item.len as usize;
            }
            lying.push(source);
        }
        let mut fetched = vec![0; bytes];
        self.pack_all(&packed, None, &mut fetched, |_| ())?;
        let mut rest = &fetched[..];
        let sum = |(&source, item): (&Option<Source>, &&Item)| {
            if let Some(source) = source {
                return checksum::of_memory(source);
            }
            let (front, after) = rest.split_at(item.len as usize);
            rest = after;
            checksum::of(front)
        };
        Ok(lying.iter().zip(items).map(sum).collect())
    }

    /// Copies the bytes of an item in `range` of the tensor to their places in `to`, which begins at byte `start` of
    /// the tensor.
    pub(super) fn spread(
        &self,
        item: &Item,
        range: &Range<u64>,
        (to, start): (&mut [u8], u64),
    ) -> Result<()> {
        let span = span(item, range);
        let source = self.memory(item, &span)?;
        let mut fetched = vec![0; if source.is_some() { 0 } else { (span.end - span.start) as usize }];
        if let Some(pull) = self.pull(item) {
            content::fetch([(pull, span.start, &mut *fetched)])?;
        }
        let from = source.unwrap_or_else(|| Bytes::from(&*fetched));
        scatter(item, range, (from, span.start), (to, start))
    }
}

/// The local memory from the first to the last byte that an item has in `range`. It is fetched as one piece.
pub(super) fn span(item: &Item, range: &Range<u64>) -> Run {
    let reach = |span: Option<Run>, run: Run| match span {
        Some(span) => Some(span.start.min(run.start)..span.end.max(run.end)),
        None => Some(run),
    };
    runs(item, range).fold(None, reach).unwrap_or(0..0)
}

/// Copies the bytes of an item in `range` of the tensor from `from` to their places in `to`. `from` begins at byte
/// `low` of the local memory, and `to` at byte `start` of the tensor.
pub(super) fn scatter(
    item: &Item,
    range: &Range<u64>,
    (from, low): (Bytes<'_>, u64),
    to: (&mut [u8], u64),
) -> Result<()> {
    lines(item, range, to, |local, len| from.part((local - low) as usize, len))
}

/// Copies the bytes that a message has of an item, one after another, to their places in `to`, which begins at byte
/// `start` of the tensor.
pub(super) fn unpack(mut payload: &[u8], item: &Item, to: (&mut [u8], u64)) -> Result<()> {
    lines(item, &item.bytes, to, |_, len| {
        let (front, rest) = payload.split_at_checked(len)?;
        payload = rest;
        Some(front.into())
    })
}

/// The contiguous local memory with all bytes of `range` of the tensor; `None` if they are not contiguous.
pub(super) fn whole_run(item: &Item, range: &Range<u64>) -> Option<Run> {
    let line = item.rows.lines(range.clone()).next()?;
    let start = place(item, line.to);
    let whole = (line.at, line.len) == (range.start, range.end - range.start);
    whole.then_some(start..start + line.len)
}

/// The contiguous ranges of local memory with the bytes of an item in `range`, in the tensor's order.
fn runs(item: &Item, range: &Range<u64>) -> impl Iterator<Item = Run> {
    let mut pieces = item.rows.lines(range.clone()).flat_map(move |line| {
        line.rows().map(move |(_, to)| place(item, to)..place(item, to).wrapping_add(line.len))
    });
    let mut next = pieces.next();
    std::iter::from_fn(move || {
        let mut run = next.take()?;
        for piece in pieces.by_ref() {
            if piece.start != run.end {
                next = Some(piece);
                break;
            }
            run.end = piece.end;
        }
        Some(run)
    })
}

/// The address of a row in local memory.
pub(super) const fn place(item: &Item, to: i64) -> u64 {
    item.base.wrapping_add(to).cast_unsigned()
}

/// Copies each row in `range` of the tensor to its place in `to`. `from` returns the bytes of a row, given its place in
/// local memory and its length.
fn lines<'a>(
    item: &Item,
    range: &Range<u64>,
    (to, start): (&mut [u8], u64),
    mut from: impl FnMut(u64, usize) -> Option<Bytes<'a>>,
) -> Result<()> {
    for line in item.rows.lines(range.clone()) {
        let len = line.len as usize;
        for (at, local) in line.rows() {
            let slot = at.checked_sub(start).and_then(|at| to.get_mut(at as usize..)?.get_mut(..len));
            let bytes = from(place(item, local), len);
            let (Some(slot), Some(bytes)) = (slot, bytes) else { return Err(misfit("a block", range)) };
            bytes.copy(slot);
        }
    }
    Ok(())
}

pub(super) fn misfit(what: &str, range: &Range<u64>) -> Error {
    Error::Invalid(format!(
        "bytes {range:?} of a tensor do not fit into {what}: the plans of the ranks are wrong"
    ))
}
