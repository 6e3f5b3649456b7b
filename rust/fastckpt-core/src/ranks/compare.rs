//! Compares one rank's part of a state with the checksums of a base. Reads nothing from storage.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::held::{Held, scatter, span, whole_run};
use super::sums::Sums;
use super::table::Table;
use crate::engine::content;
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::engine::pool::{Pool, batches};
use crate::error::{Error, Result};
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Extent};
use crate::format::manifest::{Body, TensorEntry};
use crate::save::compare::counterparts;
use crate::share::{Duties, Item};
use crate::sys::memory::Bytes;

/// The number of bytes that are summed at a time in cache: rows at their places, with zeros between them.
const SPREAD: u64 = 256 << 10;

/// Bytes of an item in one extent of the base.
struct Stretch<'a> {
    item: &'a Item,
    entry: &'a TensorEntry,
    extent: Extent,
    /// A range of the tensor, and the number of its bytes that the item has.
    range: Range<u64>,
    own: u64,
}

/// The sums of a stretch.
struct Summed {
    tensor: usize,
    len: u64,
    xz: u64,
    /// The number and the first checksum of an extent of which this rank has only a part.
    part: Option<(u64, u64)>,
}

/// Sums a rank's part of the tensors that the base also has. If several ranks have the same bytes, `duties` decide
/// which of them sums these: the one that writes or sends them. The sum of a tensor stops at an extent that differs.
pub(super) fn sums(
    table: &Table,
    duties: &Duties,
    held: &Held,
    base: &Body,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Sums> {
    let mut number = vec![None; table.tensors.len()];
    for (tensor, index) in counterparts(&table.tensors, base) {
        number[tensor] = Some(index);
    }
    let mut stretches = Vec::new();
    for item in duties.own() {
        let Some(entry) = number[item.tensor].map(|index: usize| &base.tensors[index]) else { continue };
        let extents = geometry::extents(entry.placement(item.tensor), item.bytes.clone(), base.block_size);
        for (extent, range) in extents {
            let own = item.rows.bytes_in(&range);
            if own > 0 {
                stretches.push(Stretch { item, entry, extent, range, own });
            }
        }
    }
    let part =
        |Stretch { item, range, .. }: &Stretch<'_>| (range.end - range.start, held.pull(item).is_some());
    let (batches, total) = batches(stretches.iter().map(part));
    let changed: Vec<_> = table.tensors.iter().map(|_| AtomicBool::new(false)).collect();
    let found = Mutex::new(Sums::default());
    let batch = |number: usize| {
        let live = stretches[batches[number].clone()].iter();
        let live: Vec<_> =
            live.filter(|stretch| !changed[stretch.item.tensor].load(Ordering::Relaxed)).collect();
        let summed = batch(held, &live, &changed)?;
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        for Summed { tensor, len, xz, part } in summed {
            let found = found.of(tensor);
            found.bytes += len;
            found.xz ^= xz;
            if let Some((number, sum)) = part {
                *found.extents.entry(number).or_default() ^= sum;
            }
        }
        Ok(())
    };
    let pool = Pool::new("fastckpt-compare", total, options);
    pool.run(batches.len(), &mut || progress(0, 0), &batch)?;
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (tensor, changed) in changed.iter().enumerate() {
        if changed.load(Ordering::Relaxed) {
            found.of(tensor).changed = true;
        }
    }
    Ok(found)
}

/// Sums stretches in memory, or stretches that callbacks copy in one call.
fn batch(held: &Held, stretches: &[&Stretch<'_>], changed: &[AtomicBool]) -> Result<Vec<Summed>> {
    let spans: Vec<_> = stretches.iter().map(|stretch| span(stretch.item, &stretch.range)).collect();
    let pulls: Vec<_> = stretches.iter().map(|stretch| held.pull(stretch.item)).collect();
    let bytes = |span: &Range<u64>| (span.end - span.start) as usize;
    let pulled = spans.iter().zip(&pulls).filter(|(_, pull)| pull.is_some());
    let mut fetched = vec![0; pulled.map(|(span, _)| bytes(span)).sum()];
    let mut wanted = Vec::new();
    let mut rest = &mut fetched[..];
    for (span, pull) in spans.iter().zip(&pulls) {
        let Some(pull) = pull else { continue };
        let (to, after) = rest.split_at_mut(bytes(span));
        rest = after;
        wanted.push((*pull, span.start, to));
    }
    content::fetch(wanted)?;
    let mut rest = &fetched[..];
    let mut found = Vec::with_capacity(stretches.len());
    for ((stretch, span), pull) in stretches.iter().zip(&spans).zip(&pulls) {
        let source = if pull.is_some() { None } else { held.memory(stretch.item, span)? };
        let from = if let Some(source) = source {
            source
        } else {
            let (from, after) = rest.split_at(if pull.is_some() { bytes(span) } else { 0 });
            rest = after;
            from.into()
        };
        found.extend(sum(stretch, (from, span.start), &changed[stretch.item.tensor])?);
    }
    Ok(found)
}

/// Sums a stretch whose bytes are in `from`, which begins at byte `low` of the local memory.
fn sum(
    &Stretch { item, entry, ref extent, ref range, own }: &Stretch<'_>,
    (from, low): (Bytes<'_>, u64),
    changed: &AtomicBool,
) -> Result<Option<Summed>> {
    let (whole, len) = (whole_run(item, range), range.end - range.start);
    let sum = match &whole {
        Some(run) => {
            let bytes = from.part((run.start - low) as usize, len as usize);
            let bytes = bytes.ok_or_else(|| Error::Invalid("a part of a tensor is too short".to_owned()))?;
            Pair::of_memory(bytes)
        }
        None => spread(item, range, (from, low))?,
    };
    let is_all = whole.is_some() && len == extent.len;
    if is_all && entry.extent_crc(extent.index) != Some(sum.crc) {
        changed.store(true, Ordering::Relaxed);
        return Ok(None);
    }
    let added = sum ^ Pair::zeros(len);
    let after = extent.start + extent.len - range.end;
    let part = (!is_all).then(|| (extent.index, checksum::combine(added.crc, 0, after)));
    let xz = checksum::combine_xz(added.xz, 0, entry.bytes() - range.end);
    Ok(Some(Summed { tensor: item.tensor, len: own, xz, part }))
}

/// The checksums of `range` of the tensor, with zeros in the place of bytes that the item does not have.
fn spread(item: &Item, range: &Range<u64>, from: (Bytes<'_>, u64)) -> Result<Pair> {
    let mut to = vec![0; SPREAD.min(range.end - range.start) as usize];
    let (mut all, mut start) = (Pair::of(&[]), range.start);
    while start < range.end {
        let part = start..range.end.min(start + SPREAD);
        let to = &mut to[..(part.end - start) as usize];
        to.fill(0);
        scatter(item, &part, from, (to, start))?;
        all = all.then(Pair::of(to), part.end - start);
        start = part.end;
    }
    Ok(all)
}
