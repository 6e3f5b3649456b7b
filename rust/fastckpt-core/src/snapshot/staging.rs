//! Staging: copies contents into one memory region, each to its place, in pieces and with several threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::content::{self, Content};
use crate::engine::memory::Memory;
use crate::engine::options::Options;
use crate::engine::pool::Pool;
use crate::error::{Error, Result};
use crate::format::geometry::Placement;
use crate::sys::mapping::Mapping;

/// Bytes of a piece that one thread copies at a time: large enough for `memcpy` to bypass the caches, and small enough
/// for all threads to end at about the same time and to notice a stop soon.
pub(super) const PIECE: u64 = 16 << 20;

/// Read and set by other threads while a copy runs.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Bytes copied so far.
    pub(super) done: AtomicU64,
    /// Set to stop: the copy ends with [`Error::Interrupted`].
    pub(super) stop: AtomicBool,
}

/// The progress of copying.
#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// Contents are still to be copied.
    Staging,
    /// The copy is complete.
    Staged,
    /// A copy failed. The contents of the memory are unusable.
    Failed,
}

/// Contents that are copied, and the memory that they are copied to.
#[derive(Debug)]
pub(super) struct Staging {
    /// Empty once everything is copied.
    contents: Vec<Content>,
    /// The place of each content in the memory, ascending.
    places: Vec<Placement>,
    phase: Phase,
    /// The memory's owner, and the memory.
    memory: Option<(Arc<Memory>, Arc<Mapping>)>,
}

/// The bytes of a content from `start` on, and their destination.
struct Piece<'a> {
    content: &'a Content,
    start: u64,
    to: &'a mut [u8],
}

impl Staging {
    /// Creates the staging of contents. Each has one of `places`, which are in the order of the memory. In a place,
    /// `tensor` is the content's number, and `offset` is the offset in the memory.
    pub(super) const fn new(contents: Vec<Content>, places: Vec<Placement>) -> Self {
        Self { contents, places, phase: Phase::Staging, memory: None }
    }

    /// Takes memory of at least `size` bytes.
    pub(super) fn attach(&mut self, memory: &Arc<Memory>, size: usize) -> Result<()> {
        if memory.size() < size {
            return Err(short());
        }
        if self.memory.is_some() {
            return Err(Error::Misused("the snapshot already has memory"));
        }
        self.memory = Some((Arc::clone(memory), memory.take()?));
        Ok(())
    }

    /// Gives the memory back to its owner.
    pub(super) fn detach(self) -> Result<()> {
        self.memory.map_or(Ok(()), |(owner, mapping)| owner.give(mapping))
    }

    /// For each content, the address and the size in bytes of its place.
    pub(super) fn addresses(&self) -> Result<Vec<(usize, u64)>> {
        let (memory, _) = self.memory.as_ref().ok_or(NO_MEMORY)?;
        let mut all = vec![(0, 0); self.places.len()];
        for place in &self.places {
            all[place.tensor] = (memory.address() + place.offset as usize, place.bytes);
        }
        Ok(all)
    }

    /// The memory, once everything is copied.
    pub(super) fn staged(&self) -> Result<&Arc<Mapping>> {
        let memory = self.memory.as_ref().filter(|_| self.phase == Phase::Staged);
        memory.map(|(_, memory)| memory).ok_or(Error::Misused("the snapshot is not staged"))
    }

    /// The memory, for writing.
    pub(super) fn writable(&mut self) -> Result<&mut [u8]> {
        writable(&mut self.memory)
    }

    /// Copies the contents whose byte in `wanted` is not 0. After the `last` copy, `total` bytes must have been copied.
    /// After the last copy or a failed copy, the contents are not read again.
    pub(super) fn stage(
        &mut self,
        wanted: &[u8],
        last: Option<u64>,
        options: &Options,
        counters: &Counters,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        if self.phase != Phase::Staging {
            return Err(Error::Misused("the snapshot is staged, or its staging failed"));
        }
        if wanted.len() != self.places.len() {
            return Err(Error::Invalid("there must be one byte for each tensor".to_owned()));
        }
        let Self { contents, places, memory, .. } = &mut *self;
        let mut outcome = copy((contents, places), wanted, writable(memory)?, options, counters, go_on);
        // Bytes that were not copied would come from an earlier snapshot, with correct checksums.
        if last.is_some_and(|total| total != counters.done.load(Ordering::Relaxed)) && outcome.is_ok() {
            outcome = Err(Error::Misused("the snapshot is not whole: not every tensor was copied"));
        }
        if last.is_some() || outcome.is_err() {
            self.contents = Vec::new();
            self.phase = if outcome.is_ok() { Phase::Staged } else { Phase::Failed };
        }
        outcome
    }
}

const NO_MEMORY: Error = Error::Misused("the snapshot has no memory");

fn short() -> Error {
    Error::Invalid("the snapshot's memory is too small".to_owned())
}

/// The memory of a snapshot, for writing. Fails if anything else still reads it.
fn writable(memory: &mut Option<(Arc<Memory>, Arc<Mapping>)>) -> Result<&mut [u8]> {
    let (_, memory) = memory.as_mut().ok_or(NO_MEMORY)?;
    let memory = Arc::get_mut(memory).ok_or(Error::Misused("the snapshot's memory is in use"))?;
    Ok(&mut *memory)
}

/// Copies the `wanted` contents to their places in `memory`.
fn copy(
    (contents, places): (&[Content], &[Placement]),
    wanted: &[u8],
    memory: &mut [u8],
    options: &Options,
    counters: &Counters,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<()> {
    let (batches, bytes) = batches(contents, places, wanted, memory)?;
    let pool = Pool::new("fastckpt-copy", bytes, options).as_nice_as_the_caller();
    pool.run(batches.len(), go_on, &|number| {
        let batch = std::mem::take(&mut *batches[number].lock().unwrap_or_else(PoisonError::into_inner));
        copy_batch(batch, counters)
    })
}

/// Pieces that one thread takes at a time.
type Batch<'a> = Mutex<Vec<Piece<'a>>>;

/// Cuts the wanted contents into pieces, and puts small ones together, because each batch has a cost. Also returns the
/// total number of bytes.
fn batches<'a>(
    contents: &'a [Content],
    places: &[Placement],
    wanted: &[u8],
    memory: &'a mut [u8],
) -> Result<(Vec<Batch<'a>>, u64)> {
    let (mut rest, mut end) = (memory, 0);
    let mut all = Vec::new();
    let mut batch = Vec::new();
    let (mut total, mut batched) = (0, 0);
    for place in places {
        let gap = place.offset.checked_sub(end).ok_or_else(short)?;
        let (_, after) = std::mem::take(&mut rest).split_at_mut_checked(gap as usize).ok_or_else(short)?;
        let (to, after) = after.split_at_mut_checked(place.bytes as usize).ok_or_else(short)?;
        (rest, end) = (after, place.end());
        if wanted[place.tensor] == 0 {
            continue;
        }
        for (to, start) in to.chunks_mut(PIECE as usize).zip((0..).step_by(PIECE as usize)) {
            batched += to.len() as u64;
            batch.push(Piece { content: &contents[place.tensor], start, to });
            if batched >= PIECE {
                all.push(Mutex::new(std::mem::take(&mut batch)));
                total += std::mem::take(&mut batched);
            }
        }
    }
    if !batch.is_empty() {
        all.push(Mutex::new(batch));
    }
    Ok((all, total + batched))
}

/// Copies a batch. A callback copies all its pieces of the batch in one call.
fn copy_batch(batch: Vec<Piece<'_>>, counters: &Counters) -> Result<()> {
    let mut wanted = Vec::new();
    for Piece { content, start, to } in batch {
        if counters.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        if let Content::Pull(pull) = content {
            wanted.push((pull, start, to));
        } else if let Some(from) = content.host(start, to.len())? {
            from.copy(to);
            counters.done.fetch_add(to.len() as u64, Ordering::Relaxed);
        }
    }
    let bytes = wanted.iter().map(|(_, _, to)| to.len() as u64).sum();
    content::fetch(wanted)?;
    counters.done.fetch_add(bytes, Ordering::Relaxed);
    Ok(())
}
