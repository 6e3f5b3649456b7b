//! Staging: copies a state into the images of its shards, in pieces and with several threads.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::engine::content::{self, Content};
use crate::engine::job::Tick;
use crate::engine::options::Options;
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;
use crate::format::layout::Plan;
use crate::sys::thread::builder;

/// Bytes of a piece that one thread copies at a time: large enough for `memcpy` to bypass the caches, small enough for
/// the threads to end together and to notice a stop soon.
pub(super) const PIECE: u64 = 16 << 20;
/// The calling thread copies states smaller than this.
const ALONE: u64 = 1 << 20;
/// More threads than this were never faster: what they share is memory.
const MOST_THREADS: usize = 8;
/// How often the calling thread wakes up from waiting.
const TICK: Duration = Duration::from_millis(50);

/// Read and set by other threads while a copy runs.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Bytes copied so far.
    pub(super) done: AtomicU64,
    /// Set to stop: the copy ends with [`Error::Interrupted`].
    pub(super) stop: AtomicBool,
}

/// What a piece consists of.
enum From<'a> {
    Header(&'a [u8]),
    /// Bytes of a tensor, from an offset on.
    Tensor(usize, u64),
}

/// A piece of an image.
struct Piece<'a> {
    from: From<'a>,
    to: &'a mut [u8],
}

/// What the threads of one copy share.
struct Shared<'a> {
    contents: &'a [Content],
    /// Batches of pieces, last first, so that `pop` takes them in order.
    queue: Mutex<Vec<Vec<Piece<'a>>>>,
    progress: &'a Progress,
    failure: Mutex<Option<Error>>,
    failed: AtomicBool,
    running: AtomicUsize,
}

/// Which parts of the images one copy fills.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// One byte per tensor: nonzero if the tensor is copied.
    pub tensors: &'a [u8],
    /// Whether the headers are copied.
    pub headers: bool,
}

/// Copies what is `wanted` into `memory`. There the images of the plan's shards follow each other, and each starts at a
/// page.
///
/// The calling thread calls `tick` now and then. If this fails, what was copied is unusable.
pub(super) fn copy(
    contents: &[Content],
    plan: &Plan,
    wanted: Wanted<'_>,
    memory: &mut [u8],
    options: &Options,
    progress: &Progress,
    tick: Tick<'_>,
) -> Result<()> {
    let (queue, total) = batches(plan, wanted, memory)?;
    let bytes = plan.shards.iter().map(|shard| shard.bytes).sum();
    let mut go_on = || tick(progress.done.load(Ordering::Relaxed), bytes);
    let threads =
        options.threads.unwrap_or_else(|| options.cores().min(MOST_THREADS)).clamp(1, queue.len().max(1));
    let shared = Shared {
        contents,
        queue: Mutex::new(queue),
        progress,
        failure: Mutex::new(None),
        failed: AtomicBool::new(false),
        running: AtomicUsize::new(threads),
    };
    if total < ALONE {
        shared.work(&mut || {});
    } else {
        let caller = thread::current();
        let mut started = 0;
        thread::scope(|scope| {
            for number in 0..threads {
                let (shared, caller) = (&shared, &caller);
                let body = move || {
                    shared.work(&mut || {});
                    shared.running.fetch_sub(1, Ordering::AcqRel);
                    caller.unpark();
                };
                let name = format!("fastckpt-copy-{number}");
                if builder().name(name).spawn_scoped(scope, body).is_err() {
                    // Fewer threads are enough. If there are none, the caller copies.
                    shared.running.fetch_sub(1, Ordering::AcqRel);
                } else {
                    started += 1;
                }
            }
            if started == 0 {
                shared.work(&mut || {
                    if !go_on() {
                        shared.fail(Error::Interrupted);
                    }
                });
            }
            while shared.running.load(Ordering::Acquire) > 0 {
                thread::park_timeout(TICK);
                if !go_on() {
                    shared.fail(Error::Interrupted);
                }
            }
        });
    }
    let failure = shared.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

/// Cuts what is wanted into pieces and bundles small ones, because taking one from the queue is not free.
fn batches<'a>(
    plan: &'a Plan,
    wanted: Wanted<'_>,
    memory: &'a mut [u8],
) -> Result<(Vec<Vec<Piece<'a>>>, u64)> {
    let mut rest = memory;
    let mut next = |len: u64| {
        let (head, tail) = std::mem::take(&mut rest).split_at_mut_checked(len as usize)?;
        rest = tail;
        Some(head)
    };
    let short = || Error::Invalid("the snapshot's memory is too small".to_owned());
    let mut all = Vec::new();
    let mut batch = Vec::new();
    let (mut total, mut batched) = (0, 0);
    let mut add = |piece: Piece<'a>| {
        batched += piece.to.len() as u64;
        total += piece.to.len() as u64;
        batch.push(piece);
        if batched >= PIECE {
            all.push(std::mem::take(&mut batch));
            batched = 0;
        }
    };
    for (shard, room) in plan.shards.iter().zip(rooms(plan)) {
        let to = next(shard.header.len() as u64).ok_or_else(short)?;
        if wanted.headers {
            add(Piece { from: From::Header(&shard.header), to });
        }
        for placement in &shard.placements {
            let to = next(placement.bytes).ok_or_else(short)?;
            if wanted.tensors[placement.tensor] == 0 {
                continue;
            }
            for (to, start) in to.chunks_mut(PIECE as usize).zip((0..).step_by(PIECE as usize)) {
                add(Piece { from: From::Tensor(placement.tensor, start), to });
            }
        }
        next(room.len() as u64 - shard.bytes).ok_or_else(short)?;
    }
    if !batch.is_empty() {
        all.push(batch);
    }
    all.reverse();
    Ok((all, total))
}

impl Shared<'_> {
    /// Keeps the first failure and stops all threads.
    fn fail(&self, error: Error) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// The life of one thread. `beat` is called between batches.
    fn work(&self, beat: &mut dyn FnMut()) {
        loop {
            let batch = self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(batch) = batch else { return };
            beat();
            match catch_unwind(AssertUnwindSafe(|| self.batch(batch))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return self.fail(error),
                Err(_) => return self.fail(Error::Panic("while copying a snapshot".to_owned())),
            }
            if self.failed.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Copies a batch. Callbacks bring what they have of it in one call.
    fn batch(&self, batch: Vec<Piece<'_>>) -> Result<()> {
        let mut wanted = Vec::new();
        for Piece { from, to } in batch {
            if self.progress.stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            if self.failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let (tensor, start) = match from {
                From::Header(header) => {
                    to.copy_from_slice(header);
                    continue;
                }
                From::Tensor(tensor, start) => (tensor, start),
            };
            let content = &self.contents[tensor];
            if let Content::Pull(pull) = content {
                wanted.push((pull, start, to));
            } else if let Some(from) = content.host(start, to.len())? {
                from.copy(to);
                self.progress.done.fetch_add(to.len() as u64, Ordering::Relaxed);
            }
        }
        let bytes = wanted.iter().map(|(_, _, to)| to.len() as u64).sum();
        content::fetch(wanted)?;
        self.progress.done.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// The range of each shard's image in the memory of a snapshot, including the rest of its last page.
pub(super) fn rooms(plan: &Plan) -> impl Iterator<Item = Range<usize>> {
    plan.shards.iter().scan(0, |end, shard| {
        let begin = *end;
        *end += shard.bytes.next_multiple_of(PAGE) as usize;
        Some(begin..*end)
    })
}
