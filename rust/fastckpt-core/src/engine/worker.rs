//! Worker threads. Each takes blocks from the common queue and keeps its backend busy. They know nothing about layout.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::io::backend::{Backend, Completed};
use super::io::transfer::Transfer;
use super::job::{Job, TICK, new_staging};
use super::limiter::Limiter;
use super::options::{Io, Options, STAGING_BUDGET};
use super::path::{Blocks, IoPath, Reason};
use super::report::Fallback;
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;
use crate::sys::priority::Priority;
use crate::sys::slabs::{self, Slab};
use crate::telemetry::{Lane, Operation, State};

/// How long a worker with nothing to do waits for another one to close a file, or for bytes from elsewhere.
const NOT_YET: Duration = Duration::from_millis(1);

/// Makes a backend for the calling thread, with the reason if it is not the chosen one.
pub(super) type Open<'a> = &'a (dyn Fn() -> (Box<dyn Backend>, Option<Fallback>) + Sync);

/// What the workers of a job moved, and how.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) blocks: Blocks,
    /// Bytes that the processor copied.
    pub(super) copied: u64,
    /// Bytes per worker.
    pub(super) thread_bytes: Vec<u64>,
    /// Why the backend of a worker is not of the chosen kind.
    pub(super) refused: Option<Fallback>,
}

/// What the workers of one job share.
pub(super) struct Shared<'a, J> {
    job: &'a J,
    open: Open<'a>,
    pub(super) operation: &'a Operation,
    pub(super) threads: usize,
    queue_depth: usize,
    /// Bytes of staging buffers that one worker may have in flight, and that one block may need.
    room: usize,
    largest: usize,
    /// Whether the caller demanded direct I/O.
    strict: bool,
    limiter: Option<Limiter>,
    next: AtomicUsize,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    moved: Mutex<Moved>,
    /// Workers that have not ended.
    pub(super) running: AtomicUsize,
}

impl<'a, J: Job> Shared<'a, J> {
    /// For `threads` workers with `queue_depth` operations in flight each. `budget` limits the staging buffers of all
    /// workers.
    pub(super) fn new(
        job: &'a J,
        open: Open<'a>,
        options: &Options,
        operation: &'a Operation,
        (threads, queue_depth): (usize, usize),
        (budget, largest): (usize, usize),
    ) -> Self {
        Self {
            job,
            open,
            operation,
            threads,
            queue_depth,
            room: budget / threads,
            largest,
            strict: options.io == Io::Direct,
            limiter: options.bandwidth_limit.map(Limiter::new),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            moved: Mutex::default(),
            running: AtomicUsize::new(threads),
        }
    }

    /// Keeps the first failure and stops all workers.
    pub(super) fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
        self.job.stop();
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// What was moved, or the failure, after all workers have ended.
    pub(super) fn outcome(self) -> Result<Moved> {
        lock(&self.failure).take().map_or(Ok(()), Err)?;
        Ok(std::mem::take(&mut *lock(&self.moved)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The message of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// The life of worker `number`. Its failure, including a panic, ends all workers. `between` is called between blocks.
pub(super) fn attempt<J: Job>(
    shared: &Shared<'_, J>,
    number: usize,
    priority: Priority,
    between: &mut dyn FnMut(),
) {
    // The job's state is not used after a panic: the failure ends the operation.
    match catch_unwind(AssertUnwindSafe(|| work(shared, number, priority, between))) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => shared.fail(error),
        Err(panic) => shared.fail(Error::Panic(panic_text(&*panic))),
    }
}

/// The life of one worker.
fn work<J: Job>(
    shared: &Shared<'_, J>,
    number: usize,
    priority: Priority,
    between: &mut dyn FnMut(),
) -> Result<()> {
    let _ = priority.apply(); // its setter has probed it
    let (backend, refused) = (shared.open)();
    let mut worker = Worker {
        shared,
        lane: Lane::new(shared.operation),
        queue_depth: shared.queue_depth.min(backend.queue_depth()),
        backend,
        in_flight: 0,
        staged: 0,
        waiting: None,
        slabs: Vec::new(),
        blocks: Blocks::default(),
        copied: 0,
        between,
    };
    let outcome = worker.run();
    {
        let mut all = lock(&shared.moved);
        all.blocks += worker.blocks;
        all.copied += worker.copied;
        all.refused = all.refused.take().or(refused);
        let threads = all.thread_bytes.len().max(number + 1);
        all.thread_bytes.resize(threads, 0);
        all.thread_bytes[number] = worker.lane.bytes();
    }
    // Dropping the backend first waits for the operations that a failure left in flight.
    drop(worker.backend);
    slabs::give(worker.slabs, STAGING_BUDGET as usize);
    outcome
}

struct Worker<'a, 'b, J> {
    shared: &'a Shared<'b, J>,
    lane: Lane<'b>,
    backend: Box<dyn Backend>,
    /// The most operations in flight, and how many there are.
    queue_depth: usize,
    in_flight: usize,
    /// Bytes of staging buffers in flight.
    staged: usize,
    /// The block to start once its bytes are there, or a file can be opened again.
    waiting: Option<usize>,
    /// Free staging buffers, for the next blocks.
    slabs: Vec<Slab>,
    blocks: Blocks,
    copied: u64,
    /// Called between blocks.
    between: &'a mut dyn FnMut(),
}

impl<J: Job> Worker<'_, '_, J> {
    fn run(&mut self) -> Result<()> {
        loop {
            while self.in_flight < self.queue_depth && self.has_room() {
                let next = || self.shared.next.fetch_add(1, Ordering::Relaxed);
                let block = self.waiting.take().unwrap_or_else(next);
                if block >= self.shared.job.blocks() || self.shared.stopped() || !self.start(block)? {
                    break;
                }
            }
            match self.backend.wait().map_err(backend_failed)? {
                Some(completed) => self.complete(completed)?,
                None if self.waiting.is_some() => thread::sleep(NOT_YET),
                None => return Ok(()),
            }
            (self.between)();
        }
    }

    /// Whether the staging buffer of one more block stays within the budget. Zero-copy blocks need almost none, so more
    /// of them are in flight.
    fn has_room(&self) -> bool {
        self.staged == 0 || self.staged + self.shared.largest <= self.shared.room
    }

    /// Starts a block. Returns whether another one can follow at once. It cannot if this block has already run, because
    /// its bytes must be summed while they are in cache. Nor can it if this block has to wait: a block in flight may
    /// close the file that it waits for, and blocks are begun in their order.
    fn start(&mut self, block: usize) -> Result<bool> {
        let began = self.lane.begin(self.shared.job.file(block));
        let Self { shared, slabs, .. } = self;
        let mut staging = |len: usize| {
            slabs::smallest_fit(slabs, len).map_or_else(
                || {
                    // The free buffers are too small. They are dropped, so that the worker holds no more than was in
                    // flight.
                    slabs.clear();
                    new_staging(len)
                },
                Ok,
            )
        };
        let started = shared.job.start(block, &mut staging)?;
        self.lane.starved(began);
        let Some(transfer) = started else {
            self.waiting = Some(block);
            return Ok(false);
        };
        self.staged += transfer.buf.slab().len();
        self.pace(transfer.need + transfer.tail.len());
        let direct = transfer.is_direct();
        self.submit(transfer)?;
        Ok(direct)
    }

    /// Waits until the bandwidth limit allows `bytes` more.
    fn pace(&mut self, bytes: usize) {
        let Some(limiter) = &self.shared.limiter else { return };
        let mut left = limiter.book(bytes as u64);
        self.lane.state(State::Limit);
        self.lane.limited(left);
        // In steps, to notice a stop.
        while !left.is_zero() && !self.shared.stopped() {
            let step = left.min(TICK);
            thread::sleep(step);
            left -= step;
            (self.between)();
        }
    }

    fn submit(&mut self, mut transfer: Transfer) -> Result<()> {
        transfer.submitted = self.lane.submitted(transfer.missing() as u64);
        self.in_flight += 1;
        self.backend.submit(transfer).map_err(backend_failed)
    }

    /// Takes a completed operation. Submits what is left of its block, or hands the block to the job.
    fn complete(&mut self, (mut transfer, result): Completed) -> Result<()> {
        self.in_flight -= 1;
        self.lane.completed(transfer.submitted);
        match self.advance(&mut transfer, result) {
            Ok(false) if self.shared.stopped() => Ok(()), // another failure is on its way to the caller
            Ok(false) => {
                transfer.resume();
                self.submit(transfer)
            }
            outcome => self.finish(transfer, outcome.map(drop)),
        }
    }

    /// Adds what an operation moved to its block. Returns whether the block is complete. An error is one that no retry
    /// can fix.
    fn advance(&self, transfer: &mut Transfer, result: io::Result<usize>) -> io::Result<bool> {
        let (direct, missing) = (transfer.is_direct(), transfer.missing());
        match result {
            Ok(0) if missing > 0 => Err(nothing_moved::<J>()),
            Ok(moved) => {
                transfer.advance(moved);
                if moved < missing {
                    self.lane.short();
                }
                // A short direct transfer that moved less than a page would repeat forever.
                if direct && moved < missing.min(PAGE as usize) {
                    if self.shared.strict {
                        return Err(nothing_moved::<J>());
                    }
                    transfer.go_buffered(Reason::Remainder);
                }
                Ok(transfer.missing() == 0)
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {
                    self.lane.retried();
                    thread::yield_now();
                    Ok(false)
                }
                Some(libc::EINVAL) if direct && !self.shared.strict => {
                    // The file system accepts the flag but not this operation, although it is aligned.
                    transfer.file.refuse_direct();
                    Ok(false)
                }
                _ => Err(error),
            },
        }
    }

    /// Hands a block to the job after it moved or failed to move.
    fn finish(&mut self, mut transfer: Transfer, outcome: io::Result<()>) -> Result<()> {
        if outcome.is_err() {
            self.lane.failed();
        }
        let again = self.shared.job.finish(&mut transfer, outcome, &self.lane)?;
        self.staged -= transfer.buf.slab().len();
        self.copied += transfer.copied;
        // Through the page cache, the kernel copies too.
        if transfer.path == IoPath::Buffered && transfer.reason != Reason::Mapped {
            self.copied += transfer.done as u64;
        }
        if again.is_none() {
            self.blocks.count(transfer.path, transfer.reason);
        }
        self.slabs.extend(transfer.buf.into_slab());
        again.map_or(Ok(()), |transfer| {
            self.staged += transfer.buf.slab().len();
            self.submit(transfer)
        })
    }
}

/// The error of a transfer that makes no progress.
fn nothing_moved<J: Job>() -> io::Error {
    if J::WRITE { io::ErrorKind::WriteZero.into() } else { io::ErrorKind::UnexpectedEof.into() }
}

/// The backend itself failed, not an operation.
fn backend_failed(error: io::Error) -> Error {
    Error::Io { operation: "use the I/O engine on", path: "io_uring".into(), source: error }
}
