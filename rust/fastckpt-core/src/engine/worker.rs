//! Worker threads. Each takes blocks from the common queue and keeps its backend busy. The layout is unknown here.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::io::backend::{Backend, Completed};
use super::io::transfer::Transfer;
use super::job::{Job, Next, Start, TICK, new_staging};
use super::limiter::Limiter;
use super::memory::Lent;
use super::options::{Io, Options, STAGING_BUDGET};
use super::path::{Blocks, IoPath, Reason};
use super::report::Fallback;
use crate::error::{Error, Result, panic_text};
use crate::format::geometry::PAGE;
use crate::sys::buffers::Buffers;
use crate::sys::dealt::Dealt;
use crate::sys::nice;
use crate::sys::slabs::{self, Slab};
use crate::telemetry::{Lane, Operation, State};

/// How long an idle worker waits for another worker to close a file, or for bytes from elsewhere.
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

/// Consecutive blocks that one worker takes at a time.
#[derive(Debug, Clone)]
pub(super) struct Stride {
    pub(super) blocks: Range<usize>,
    /// Bytes of staging memory that the blocks need together. If it is not 0, callbacks supply bytes of each block.
    pub(super) bytes: usize,
}

/// How the workers use their staging memory.
pub(super) struct Staged {
    /// Bytes that one worker may have in flight, and that one block may need.
    pub(super) room: usize,
    pub(super) largest: usize,
    /// The maximum number of bytes of blocks that are handed over at once.
    pub(super) batch: usize,
    /// The size and number of the buffers into which each worker divides its staging memory. If `None`, each block has
    /// a separate mapping.
    pub(super) buffers: Option<(usize, usize)>,
    /// The strides that workers take. If `None`, they take one block at a time.
    pub(super) strides: Option<Vec<Stride>>,
}

/// What the workers of one job share.
pub(super) struct Shared<'a, J> {
    job: &'a J,
    open: Open<'a>,
    pub(super) operation: &'a Operation,
    pub(super) threads: usize,
    queue_depth: usize,
    /// The maximum number of bytes that one worker has in flight.
    most_in_flight: usize,
    staged: Staged,
    /// The buffers of each worker until the worker begins, and the memory of the buffers, if it was lent.
    buffers: Mutex<Vec<Buffers>>,
    _lent: Option<Lent>,
    /// Whether the caller demanded direct I/O.
    strict: bool,
    limiter: Option<Limiter>,
    next: AtomicUsize,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    moved: Mutex<Moved>,
}

impl<'a, J: Job> Shared<'a, J> {
    /// Creates what `threads` workers share, with `queue_depth` operations in flight each.
    pub(super) fn new(
        job: &'a J,
        open: Open<'a>,
        options: &Options,
        operation: &'a Operation,
        (threads, queue_depth): (usize, usize),
        (staged, mut lent): (Staged, Option<Lent>),
    ) -> Self {
        let deal = |(size, count): (usize, usize)| match &mut lent {
            Some(lent) => lent.deal(size, count).into_iter().next(),
            None => Some(Buffers::own(size, count)),
        };
        let buffers = staged.buffers.map(|each| std::iter::repeat_n(each, threads).filter_map(deal));
        let buffers = Mutex::new(buffers.into_iter().flatten().collect());
        Self {
            job,
            open,
            operation,
            threads,
            queue_depth,
            most_in_flight: options.in_flight.map_or(usize::MAX, |bytes| bytes as usize / threads),
            staged,
            buffers,
            _lent: lent,
            strict: options.io == Io::Direct,
            limiter: options.bandwidth_limit.map(Limiter::new),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            moved: Mutex::default(),
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

    /// Takes the next blocks, so that no other worker takes them.
    fn next(&self) -> Option<Stride> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        match &self.staged.strides {
            Some(strides) => strides.get(number).cloned(),
            None => (number < self.job.blocks()).then(|| Stride { blocks: number..number + 1, bytes: 0 }),
        }
    }

    /// The result, after all workers have ended: what was moved, or the first failure.
    pub(super) fn outcome(self) -> Result<Moved> {
        lock(&self.failure).take().map_or(Ok(()), Err)?;
        Ok(std::mem::take(&mut *lock(&self.moved)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs worker `number` to its end. A failure, including a panic, ends all workers. Calls `between` between blocks.
pub(super) fn attempt<J: Job>(
    shared: &Shared<'_, J>,
    number: usize,
    niceness: Option<u8>,
    between: &mut dyn FnMut(),
) {
    // Unwinding is safe: the failure ends the operation, so the job's state is not used after a panic.
    match catch_unwind(AssertUnwindSafe(|| work(shared, number, niceness, between))) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => shared.fail(error),
        Err(panic) => shared.fail(Error::Panic(panic_text(&*panic))),
    }
}

/// Runs one worker to its end.
fn work<J: Job>(
    shared: &Shared<'_, J>,
    number: usize,
    niceness: Option<u8>,
    between: &mut dyn FnMut(),
) -> Result<()> {
    let _ = nice::apply(niceness); // the caller has checked that the kernel allows it
    let (backend, refused) = (shared.open)();
    let mut worker = Worker {
        shared,
        lane: Lane::new(shared.operation),
        queue_depth: shared.queue_depth.min(backend.queue_depth()),
        backend,
        in_flight: 0,
        bytes_in_flight: 0,
        staged: 0,
        todo: VecDeque::new(),
        awaits: State::Idle,
        unfetched: 0,
        held: Vec::new(),
        held_bytes: 0,
        buffers: lock(&shared.buffers).pop(),
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
    drop((worker.todo, worker.held));
    slabs::give(worker.slabs, STAGING_BUDGET as usize);
    if let Some(buffers) = worker.buffers {
        buffers.give(STAGING_BUDGET as usize);
    }
    outcome
}

struct Worker<'a, 'b, J> {
    shared: &'a Shared<'b, J>,
    lane: Lane<'b>,
    backend: Box<dyn Backend>,
    /// The maximum number of operations in flight, and how many there are.
    queue_depth: usize,
    in_flight: usize,
    bytes_in_flight: usize,
    /// Bytes of staging buffers in flight.
    staged: usize,
    /// Blocks to start, in order, with the bytes fetched for them. The first block may wait for its bytes, or until a
    /// file can be opened again.
    todo: VecDeque<(usize, Option<Dealt>)>,
    /// The state of the worker while the first block waits.
    awaits: State,
    /// Bytes of staging memory that these blocks need, until callbacks have supplied their bytes.
    unfetched: usize,
    /// Finished blocks with bytes for callbacks, and the bytes of these blocks.
    held: Vec<Transfer>,
    held_bytes: usize,
    /// Staging memory. Without it, each block has a separate mapping.
    buffers: Option<Buffers>,
    /// Free mappings, for the next blocks.
    slabs: Vec<Slab>,
    blocks: Blocks,
    copied: u64,
    /// Called between blocks.
    between: &'a mut dyn FnMut(),
}

impl<J: Job> Worker<'_, '_, J> {
    fn run(&mut self) -> Result<()> {
        loop {
            while self.may_submit() && self.prepare()? && self.start()? {}
            let since = self.lane.wait();
            let completed = self.backend.wait().map_err(backend_failed)?;
            self.lane.waited(since);
            match completed {
                Some(completed) => self.complete(completed)?,
                // The next block may be waiting for its memory or its file.
                None if !self.held.is_empty() => self.hand_over()?,
                None if !self.todo.is_empty() => self.lane.during(self.awaits, || thread::sleep(NOT_YET)),
                None => return Ok(()),
            }
            (self.between)();
        }
    }

    fn may_submit(&self) -> bool {
        let room = self.in_flight == 0 || self.bytes_in_flight < self.shared.most_in_flight;
        room && self.in_flight < self.queue_depth
    }

    /// Whether the staging buffer of one more block stays within the budget. Zero-copy blocks need almost none, so more
    /// of them are in flight.
    fn has_room(&mut self) -> bool {
        let Staged { room, largest, .. } = self.shared.staged;
        match &mut self.buffers {
            Some(buffers) => buffers.has(largest),
            None => self.staged == 0 || self.staged + largest <= room,
        }
    }

    /// Takes the next blocks unless some are left to start, and makes callbacks supply their bytes. Returns whether a
    /// block can be started.
    fn prepare(&mut self) -> Result<bool> {
        if self.shared.stopped() {
            self.todo.clear();
            return Ok(false);
        }
        if self.todo.is_empty() {
            if !self.has_room() {
                return Ok(false);
            }
            let Some(Stride { blocks, bytes }) = self.shared.next() else { return Ok(false) };
            self.todo.extend(blocks.map(|block| (block, None)));
            self.unfetched = bytes;
        }
        if self.unfetched > 0 && !self.fetch()? {
            return Ok(false);
        }
        let Some((_, fetched)) = self.todo.front() else { return Ok(false) };
        Ok(fetched.is_some() || self.has_room())
    }

    /// Makes callbacks supply their bytes of the blocks to start. Returns `false` if there is not enough free memory.
    fn fetch(&mut self) -> Result<bool> {
        let Self { shared, todo, buffers, lane, .. } = self;
        let (Some(&(first, _)), Some(buffers)) = (todo.front(), buffers) else { return Ok(false) };
        let memory = buffers.take(self.unfetched).map_err(no_memory)?;
        let Some(memory) = memory else { return Ok(false) };
        let began = lane.begin(shared.job.file(first));
        let fetched = shared.job.fetch(first..first + todo.len(), memory)?;
        lane.prepared(began);
        for ((_, slot), part) in todo.iter_mut().zip(fetched) {
            *slot = Some(part);
        }
        self.unfetched = 0;
        Ok(true)
    }

    /// Starts the first block. Returns whether another one can follow at once. It cannot if this block has already
    /// moved, because its bytes must be summed while they are in cache. Nor can it if this block has to wait: a block
    /// in flight may close the file that it waits for, and blocks start in their order.
    fn start(&mut self) -> Result<bool> {
        let Self { shared, slabs, todo, buffers, lane, awaits, .. } = self;
        let Some((block, fetched)) = todo.front_mut() else { return Ok(false) };
        let began = lane.begin(shared.job.file(*block));
        let mut staging = |len: usize| {
            if let Some(part) = buffers.as_mut().and_then(|buffers| buffers.take(len).transpose()) {
                return part.map(Slab::Part).map_err(no_memory);
            }
            slabs::smallest_fit(slabs, len).map_or_else(
                || {
                    // The free buffers are too small. They are dropped, so that the worker holds no more memory than it
                    // had in flight.
                    slabs.clear();
                    new_staging(len)
                },
                Ok,
            )
        };
        let started = shared.job.start(*block, fetched, &mut staging)?;
        lane.prepared(began);
        let transfer = match started {
            Start::Now(transfer) => transfer,
            Start::Later(what) => {
                *awaits = what;
                return Ok(false);
            }
        };
        todo.pop_front();
        self.staged += transfer.buf.staging();
        self.pace(transfer.need + transfer.tail.len());
        let direct = transfer.is_direct();
        self.submit(transfer)?;
        Ok(direct)
    }

    /// Waits until the bandwidth limit allows `bytes` more.
    fn pace(&mut self, bytes: usize) {
        let Some(limiter) = &self.shared.limiter else { return };
        let mut left = limiter.book(bytes as u64);
        // Waits in steps, so that it notices a stop.
        while !left.is_zero() && !self.shared.stopped() {
            let step = left.min(TICK);
            self.lane.during(State::Limit, || thread::sleep(step));
            left -= step;
            (self.between)();
        }
    }

    fn submit(&mut self, mut transfer: Transfer) -> Result<()> {
        transfer.submitted = self.lane.submitted(transfer.missing() as u64);
        self.in_flight += 1;
        self.bytes_in_flight += transfer.missing();
        let since = transfer.submitted;
        // A blocking call completes here.
        let outcome = self.backend.submit(transfer).map_err(backend_failed);
        self.lane.waited(since);
        outcome
    }

    /// Takes a completed operation. Submits the rest of its block, or hands the block to the job.
    fn complete(&mut self, (mut transfer, result): Completed) -> Result<()> {
        self.in_flight -= 1;
        self.bytes_in_flight -= transfer.missing();
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

    /// Adds the bytes that an operation moved to its block. Returns whether the block is complete, or an error that no
    /// retry can fix.
    fn advance(&self, transfer: &mut Transfer, result: io::Result<usize>) -> io::Result<bool> {
        let (direct, missing) = (transfer.is_direct(), transfer.missing());
        match result {
            Ok(0) if missing > 0 => Err(nothing_moved::<J>()),
            Ok(moved) => {
                transfer.advance(moved);
                if moved < missing {
                    self.lane.short();
                }
                // Without this, a direct transfer that moves less than a page would be repeated forever.
                if direct && moved < missing.min(PAGE as usize) {
                    if self.shared.strict {
                        return Err(nothing_moved::<J>());
                    }
                    transfer.go_buffered(Reason::Remainder);
                }
                Ok(transfer.missing() == 0)
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {
                    self.lane.retried();
                    Ok(false)
                }
                Some(libc::EAGAIN) if transfer.backoff.wait() => {
                    self.lane.retried();
                    Ok(false)
                }
                Some(libc::EINVAL) if direct && !self.shared.strict => {
                    // The file system accepts the flag but not this operation, although it is aligned.
                    transfer.file.local()?.refuse_direct();
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
        let next = self.shared.job.finish(&mut transfer, outcome, &self.lane)?;
        self.copied += transfer.copied;
        // The kernel copies all bytes that pass through the page cache.
        if transfer.path == IoPath::Buffered && !matches!(transfer.reason, Reason::Mapped | Reason::Stored) {
            self.copied += transfer.done as u64;
        }
        if !matches!(next, Next::Again(_)) {
            self.blocks.count(transfer.path, transfer.reason);
        }
        match next {
            Next::Hold => {
                self.held_bytes += transfer.need;
                self.held.push(transfer);
                let Staged { batch, largest, .. } = self.shared.staged;
                if self.held_bytes + largest <= batch { Ok(()) } else { self.hand_over() }
            }
            Next::Done => {
                self.free(transfer);
                Ok(())
            }
            Next::Again(again) => {
                self.free(transfer);
                self.staged += again.buf.staging();
                self.submit(again)
            }
        }
    }

    /// Hands the bytes of the held blocks to callbacks, all in one call.
    fn hand_over(&mut self) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        self.held_bytes = 0;
        if !self.shared.stopped() {
            self.copied += self.shared.job.hand_over(&held)?;
        }
        for transfer in held {
            self.free(transfer);
        }
        Ok(())
    }

    /// Keeps the staging buffer of a block for the next one.
    fn free(&mut self, transfer: Transfer) {
        self.staged -= transfer.buf.staging();
        self.slabs.extend(transfer.buf.into_slab().filter(|slab| matches!(slab, Slab::Whole(_))));
    }
}

/// The error of a transfer that makes no progress.
fn nothing_moved<J: Job>() -> io::Error {
    if J::WRITE { io::ErrorKind::WriteZero.into() } else { io::ErrorKind::UnexpectedEof.into() }
}

/// The error for a lack of memory for staging buffers.
fn no_memory(error: io::Error) -> Error {
    Error::io("map staging", "memory".as_ref())(error)
}

/// The error of the backend itself, not of an operation.
fn backend_failed(error: io::Error) -> Error {
    Error::Io { operation: "run", path: "io_uring".into(), source: error }
}
