//! Compares a state in memory with the checksums that an earlier checkpoint has of it. Reads nothing from a disk.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use super::whole::whole_xz;
use crate::engine::content::{self, Content};
use crate::engine::job::{TICK, Tick};
use crate::engine::options::{BLOCK_SIZE, Options};
use crate::error::{Error, Result, panic_text};
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Extent, SINGLE};
use crate::format::layout::TensorSpec;
use crate::format::manifest::{Body, TensorEntry};
use crate::sys::nice;
use crate::sys::thread::builder;

/// More threads than this were never faster: what they share is memory.
pub(super) const MOST_THREADS: usize = 8;

/// Bytes that one call brings from elsewhere, to be compared: in all threads together less than the staging buffers of a
/// save, of which none is in use yet.
pub(crate) const FETCHED: u64 = 8 << 20;

/// A tensor that may be the one of the base.
struct Candidate<'a> {
    tensor: usize,
    index: usize,
    entry: &'a TensorEntry,
    /// Number of its first extent among those of all candidates.
    first: usize,
    changed: AtomicBool,
}

/// The candidates, and the second checksums of their extents.
struct Comparison<'a> {
    contents: &'a [Content],
    candidates: Vec<Candidate<'a>>,
    block_size: u64,
    xzs: Vec<AtomicU64>,
    /// Extents, by candidate and number.
    extents: Vec<(usize, u64)>,
    /// Ranges of `extents` that one thread takes at a time.
    batches: Vec<Range<usize>>,
    total: u64,
}

/// For each tensor of a state, its number in the checkpoint `base`, if it has the same name, type and content there. Of a
/// tensor that differs, little more is read than up to the first block that differs.
pub(super) fn unchanged(
    tensors: &[TensorSpec],
    contents: &[Content],
    base: &Body,
    options: &Options,
    tick: Tick<'_>,
) -> Result<Vec<Option<usize>>> {
    let comparison = Comparison::new(tensors, contents, base);
    let batch = |number: usize| comparison.batch(number);
    in_parallel(comparison.batches.len(), comparison.total, options, tick, &batch)?;
    let mut found = vec![None; tensors.len()];
    for candidate in &comparison.candidates {
        found[candidate.tensor] = comparison.is_same(candidate).then_some(candidate.index);
    }
    Ok(found)
}

impl<'a> Comparison<'a> {
    fn new(tensors: &[TensorSpec], contents: &'a [Content], base: &'a Body) -> Self {
        let mut all = Self {
            contents,
            candidates: Vec::new(),
            block_size: base.block_size,
            xzs: Vec::new(),
            extents: Vec::new(),
            batches: Vec::new(),
            total: 0,
        };
        // Of the batch that is being filled: its first extent, its bytes, and whether callbacks bring them.
        let (mut begin, mut bytes, mut pulled) = (0, 0, false);
        for (tensor, index) in counterparts(tensors, base) {
            let entry = &base.tensors[index];
            let first = all.extents.len();
            for (extent, _) in geometry::extents(entry.placement(tensor), 0..entry.bytes(), base.block_size) {
                let pulls = matches!(contents[tensor], Content::Pull(_));
                let most = if pulls { FETCHED } else { BLOCK_SIZE };
                if bytes > 0 && (pulls != pulled || bytes + extent.len > most) {
                    all.batches.push(begin..all.extents.len());
                    (begin, bytes) = (all.extents.len(), 0);
                }
                pulled = pulls;
                bytes += extent.len;
                all.total += extent.len;
                all.extents.push((all.candidates.len(), extent.index));
            }
            all.candidates.push(Candidate { tensor, index, entry, first, changed: AtomicBool::new(false) });
        }
        if begin < all.extents.len() {
            all.batches.push(begin..all.extents.len());
        }
        all.xzs = all.extents.iter().map(|_| AtomicU64::new(0)).collect();
        all
    }

    /// Sums the extents of a batch, except those of tensors that are known to have changed.
    fn batch(&self, number: usize) -> Result<()> {
        let live: Vec<(usize, Extent)> = self.extents[self.batches[number].clone()]
            .iter()
            .filter(|(candidate, _)| !self.candidates[*candidate].changed.load(Ordering::Relaxed))
            .filter_map(|&(candidate, index)| Some((candidate, self.extent(candidate, index)?)))
            .collect();
        let pulled = |tensor: usize| match &self.contents[tensor] {
            Content::Pull(pull) => Some(pull),
            _ => None,
        };
        if live.first().is_none_or(|(_, extent)| pulled(extent.tensor).is_none()) {
            return live.iter().try_for_each(|(candidate, extent)| {
                let bytes = self.contents[extent.tensor].host(extent.start, extent.len as usize)?;
                self.compare(*candidate, extent, Pair::of_memory(bytes.unwrap_or_default()));
                Ok(())
            });
        }
        let mut buffer = vec![0; live.iter().map(|(_, extent)| extent.len as usize).sum()];
        let mut rest = &mut buffer[..];
        let mut wanted = Vec::with_capacity(live.len());
        for (_, extent) in &live {
            let (to, after) = rest.split_at_mut(extent.len as usize);
            rest = after;
            wanted.extend(pulled(extent.tensor).map(|pull| (pull, extent.start, to)));
        }
        content::fetch(wanted)?;
        let mut rest = &buffer[..];
        for (candidate, extent) in &live {
            let (bytes, after) = rest.split_at(extent.len as usize);
            rest = after;
            self.compare(*candidate, extent, Pair::of(bytes));
        }
        Ok(())
    }

    fn extent(&self, candidate: usize, index: u64) -> Option<Extent> {
        let Candidate { tensor, entry, .. } = &self.candidates[candidate];
        let block = geometry::down(entry.offset, self.block_size) + index * self.block_size;
        geometry::extent(&entry.placement(*tensor), block, self.block_size)
    }

    fn compare(&self, candidate: usize, extent: &Extent, found: Pair) {
        let Candidate { entry, first, changed, .. } = &self.candidates[candidate];
        if entry.extent_crc(extent.index) == Some(found.crc) {
            self.xzs[first + extent.index as usize].store(found.xz, Ordering::Relaxed);
        } else {
            changed.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a tensor whose first checksums are all those of the base has its second one, too.
    fn is_same(&self, candidate: &Candidate<'_>) -> bool {
        let Candidate { entry, first, changed, .. } = candidate;
        let xzs = self.xzs[*first..].iter().map(|xz| xz.load(Ordering::Relaxed));
        let xz = whole_xz(entry.placement(0), self.block_size, xzs);
        !changed.load(Ordering::Relaxed) && checksum::to_hex(xz) == entry.crc64xz
    }
}

/// The tensors that have one of the same name, type and shape in `base`, with both checksums: its number there.
pub(crate) fn counterparts(tensors: &[TensorSpec], base: &Body) -> Vec<(usize, usize)> {
    let known: HashMap<_, _> =
        base.tensors.iter().enumerate().map(|(index, entry)| (entry.name.as_str(), index)).collect();
    let counterpart = |(tensor, spec): (usize, &TensorSpec)| {
        let &index = known.get(spec.name.as_str())?;
        let entry = &base.tensors[index];
        let fits = is_like(spec, entry) && checksum::from_hex(entry.crc64xz.as_bytes()).is_some();
        fits.then_some((tensor, index))
    };
    tensors.iter().enumerate().filter_map(counterpart).collect()
}

/// Whether a tensor has the type and the shape of an entry.
fn is_like(spec: &TensorSpec, entry: &TensorEntry) -> bool {
    let logical = entry.logical.as_ref().map(|logical| (&logical.dtype, &logical.shape));
    (spec.dtype, &spec.shape) == (entry.dtype, &entry.shape)
        && spec.logical.as_ref().map(|(dtype, shape)| (dtype, shape)) == logical
}

/// Calls `work` with each number below `count`, in threads, or in the calling one if there are few bytes in `total`. The
/// first failure ends that.
pub(crate) fn in_parallel(
    count: usize,
    total: u64,
    options: &Options,
    tick: Tick<'_>,
    work: &(dyn Fn(usize) -> Result<()> + Sync),
) -> Result<()> {
    let threads = options.threads.unwrap_or_else(|| options.cores()).min(MOST_THREADS);
    let threads = if total < SINGLE { 0 } else { threads.min(count) };
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let fail = |error: Error| {
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        next.store(count, Ordering::Relaxed);
    };
    let one = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= count {
            return false;
        }
        match catch_unwind(AssertUnwindSafe(|| work(number))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => fail(error),
            Err(panic) => fail(Error::Panic(panic_text(&*panic))),
        }
        true
    };
    let running = AtomicUsize::new(threads);
    let caller = thread::current();
    let mut started = 0;
    thread::scope(|scope| {
        for number in 0..threads {
            let (one, running, caller) = (&one, &running, &caller);
            let body = move || {
                let _ = nice::apply(options.nice); // the caller has probed it
                while one() {}
                running.fetch_sub(1, Ordering::AcqRel);
                caller.unpark();
            };
            let name = format!("fastckpt-compare-{number}");
            // Fewer threads are enough. If there are none, the caller does the work.
            if builder().name(name).spawn_scoped(scope, body).is_err() {
                running.fetch_sub(1, Ordering::AcqRel);
            } else {
                started += 1;
            }
        }
        while running.load(Ordering::Acquire) > 0 {
            thread::park_timeout(TICK);
            if !tick(0, 0) {
                fail(Error::Interrupted);
            }
        }
    });
    let mut last = Instant::now();
    while started == 0 && one() {
        if last.elapsed() >= TICK {
            last = Instant::now();
            if !tick(0, 0) {
                fail(Error::Interrupted);
            }
        }
    }
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
