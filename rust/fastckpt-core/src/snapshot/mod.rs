//! Snapshots: the tensors of a state copied into host memory of our own, so that the state may change while it is written.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::engine::content::Content;
use crate::engine::options::Options;
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;
use crate::sys::thread::builder;

/// Bytes of a piece that one thread copies at a time: large enough for `memcpy` to go past the caches, small enough for
/// the threads to end together and for a stop to be noticed soon.
const PIECE: u64 = 16 << 20;
/// From this size on a tensor is laid out for direct I/O.
const LARGE: u64 = 1 << 20;
/// Where in a page large tensors begin: where torch's allocator puts them, and so where a save expects most of them.
const RESIDUE: u64 = 64;
/// Alignment of small tensors: a cache line, and more than any element needs.
const SMALL: u64 = 64;
/// States smaller than this are copied by the calling thread.
const ALONE: u64 = 1 << 20;
/// More threads than this were never faster: memory is what they share.
const MOST_THREADS: usize = 8;
/// How often the calling thread looks up from waiting.
const TICK: Duration = Duration::from_millis(50);

/// Where the tensors of a snapshot lie in its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of each tensor.
    pub sizes: Vec<u64>,
    /// Where each begins, ascending.
    pub offsets: Vec<u64>,
    /// Bytes of memory for all of them.
    pub bytes: u64,
}

impl Layout {
    /// A place for each tensor of so many bytes. Nothing if that is beyond `u64`.
    #[must_use]
    pub fn of(sizes: Vec<u64>) -> Option<Self> {
        let mut bytes = 0u64;
        let mut offsets = Vec::with_capacity(sizes.len());
        for &size in &sizes {
            let offset = if size >= LARGE {
                // The next address of that residue.
                bytes.checked_add(PAGE - 1 - RESIDUE)? / PAGE * PAGE + RESIDUE
            } else {
                bytes.checked_next_multiple_of(SMALL)?
            };
            offsets.push(offset);
            bytes = offset.checked_add(size)?;
        }
        Some(Self { sizes, offsets, bytes })
    }
}

/// Seen and set from other threads while a copy runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Bytes copied so far.
    pub done: AtomicU64,
    /// Set to stop: the copy ends with [`Error::Interrupted`].
    pub stop: AtomicBool,
}

/// A piece of one tensor and where it goes.
struct Piece<'a> {
    tensor: usize,
    start: u64,
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

/// Copies tensors into `memory`, each of `wanted` to its offset, in pieces and with several threads.
///
/// `wanted` ascends; `tick` is called now and then on the calling thread and answers whether to go on. What has been copied when
/// it fails is of no use.
///
/// # Panics
/// If there is not one content for each tensor of the layout.
pub fn copy(
    contents: &[Content],
    layout: &Layout,
    wanted: &[usize],
    memory: &mut [u8],
    options: &Options,
    progress: &Progress,
    tick: &mut dyn FnMut() -> bool,
) -> Result<()> {
    assert_eq!(contents.len(), layout.sizes.len());
    let (queue, total) = batches(layout, wanted, memory)?;
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
                    // Fewer threads do as well; the caller copies where there is none.
                    shared.running.fetch_sub(1, Ordering::AcqRel);
                } else {
                    started += 1;
                }
            }
            if started == 0 {
                shared.work(&mut || {
                    if !tick() {
                        shared.fail(Error::Interrupted);
                    }
                });
            }
            while shared.running.load(Ordering::Acquire) > 0 {
                thread::park_timeout(TICK);
                if !tick() {
                    shared.fail(Error::Interrupted);
                }
            }
        });
    }
    let failure = shared.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

/// Cuts the tensors into pieces, and bundles small ones: taking one from the queue is not free.
fn batches<'a>(
    layout: &Layout,
    wanted: &[usize],
    memory: &'a mut [u8],
) -> Result<(Vec<Vec<Piece<'a>>>, u64)> {
    let Layout { sizes, offsets, .. } = layout;
    let short = || Error::Invalid("the snapshot's memory is too small".to_owned());
    let mut all = Vec::new();
    let mut batch = Vec::new();
    let (mut total, mut batched) = (0, 0);
    let (mut rest, mut passed) = (memory, 0);
    for &tensor in wanted {
        // `wanted` ascends, as the offsets do, so that the memory can be split as it goes.
        let skip = offsets[tensor].checked_sub(passed).ok_or_else(short)?;
        rest = rest.split_at_mut_checked(skip as usize).ok_or_else(short)?.1;
        let (mut to, after) = rest.split_at_mut_checked(sizes[tensor] as usize).ok_or_else(short)?;
        rest = after;
        passed = offsets[tensor] + sizes[tensor];
        total += sizes[tensor];
        let mut start = 0;
        while !to.is_empty() {
            let len = (to.len() as u64).min(PIECE);
            let (head, tail) = to.split_at_mut(len as usize);
            batch.push(Piece { tensor, start, to: head });
            (to, start, batched) = (tail, start + len, batched + len);
            if batched >= PIECE {
                all.push(std::mem::take(&mut batch));
                batched = 0;
            }
        }
    }
    if !batch.is_empty() {
        all.push(batch);
    }
    all.reverse();
    Ok((all, total))
}

impl Shared<'_> {
    /// Keeps the first failure and stops everybody.
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
            for piece in batch {
                if self.progress.stop.load(Ordering::Relaxed) {
                    self.fail(Error::Interrupted);
                }
                if self.failed.load(Ordering::Relaxed) {
                    return;
                }
                let bytes = piece.to.len() as u64;
                match catch_unwind(AssertUnwindSafe(|| self.piece(piece))) {
                    Ok(Ok(())) => self.progress.done.fetch_add(bytes, Ordering::Relaxed),
                    Ok(Err(error)) => return self.fail(error),
                    Err(_) => return self.fail(Error::Panic("while copying a snapshot".to_owned())),
                };
            }
        }
    }

    fn piece(&self, piece: Piece<'_>) -> Result<()> {
        let Piece { tensor, start, to } = piece;
        match &self.contents[tensor] {
            Content::Memory(source) => {
                let from = source.bytes().get(start as usize..start as usize + to.len());
                let from =
                    from.ok_or_else(|| Error::Invalid("a tensor is shorter than its shape".to_owned()))?;
                to.copy_from_slice(from);
                Ok(())
            }
            Content::Pull(fill) => fill(start, to).map_err(Error::Callback),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn pattern(tensor: usize) -> Content {
        Content::Pull(Arc::new(move |start, to| {
            for (at, byte) in to.iter_mut().enumerate() {
                *byte = ((start as usize + at) * 31 + tensor * 7 + 1) as u8;
            }
            Ok(())
        }))
    }

    fn options(threads: usize) -> Options {
        Options { threads: Some(threads), ..Options::default() }
    }

    #[test]
    fn large_tensors_begin_64_bytes_into_a_page_and_nothing_overlaps() {
        let sizes = [3, 0, 5 << 20, 1, LARGE, LARGE - 1, 4096 * 300, 64];
        let layout = Layout::of(sizes.to_vec()).unwrap();
        let mut last = 0;
        for (&offset, &size) in layout.offsets.iter().zip(&sizes) {
            assert!(offset >= last);
            assert!(offset - last < PAGE);
            assert_eq!(offset % if size >= LARGE { PAGE } else { 64 }, if size >= LARGE { 64 } else { 0 });
            last = offset + size;
        }
        assert_eq!(layout.bytes, last);
        assert_eq!(Layout::of(vec![u64::MAX, 1]), None);
    }

    #[test]
    fn every_byte_arrives_whatever_the_number_of_threads() {
        let sizes = [PIECE * 2 + 5, 3, 0, 70_000, LARGE];
        let contents: Vec<_> = (0..sizes.len()).map(pattern).collect();
        let layout = Layout::of(sizes.to_vec()).unwrap();
        for threads in [1, 3] {
            let mut memory = vec![0; layout.bytes as usize];
            let progress = Progress::default();
            let mut calls = 0;
            for wanted in [&[1, 3][..], &[0, 2, 4]] {
                copy(&contents, &layout, wanted, &mut memory, &options(threads), &progress, &mut || {
                    calls += 1;
                    true
                })
                .unwrap();
            }
            assert!(calls > 0);
            assert_eq!(progress.done.into_inner(), sizes.iter().sum::<u64>());
            for (tensor, (&offset, &size)) in layout.offsets.iter().zip(&sizes).enumerate() {
                let found = &memory[offset as usize..(offset + size) as usize];
                assert!(found.iter().enumerate().all(|(at, &byte)| byte == (at * 31 + tensor * 7 + 1) as u8));
            }
        }
    }

    #[test]
    fn a_failure_a_panic_and_a_stop_end_the_copy() {
        let sizes = [LARGE, LARGE];
        let layout = Layout::of(sizes.to_vec()).unwrap();
        let mut memory = vec![0; layout.bytes as usize];
        let mut run = |second: Content, progress: &Progress| {
            let contents = [pattern(0), second];
            copy(&contents, &layout, &[0, 1], &mut memory, &options(2), progress, &mut || true)
        };
        let failing = Content::Pull(Arc::new(|_, _| Err("no".to_owned())));
        assert!(matches!(run(failing, &Progress::default()), Err(Error::Callback(text)) if text == "no"));
        let panicking = Content::Pull(Arc::new(|_, _| panic!("no")));
        assert!(matches!(run(panicking, &Progress::default()), Err(Error::Panic(_))));
        let stopped = Progress { stop: AtomicBool::new(true), ..Progress::default() };
        assert!(matches!(run(pattern(1), &stopped), Err(Error::Interrupted)));
        assert_eq!(stopped.done.into_inner(), 0);
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let layout = Layout::of(vec![10, 10]).unwrap();
        let contents = [pattern(0), pattern(1)];
        let mut memory = [0; 70];
        let outcome =
            copy(&contents, &layout, &[0, 1], &mut memory, &options(1), &Progress::default(), &mut || true);
        assert!(matches!(outcome, Err(Error::Invalid(_))));
    }
}
