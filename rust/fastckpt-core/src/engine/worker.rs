//! Worker threads: each takes blocks from the common queue and keeps its backend busy. They know nothing of layout.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::engine::choice::Crew;
use crate::engine::io::blocking::Blocking;
use crate::engine::io::fault::Faulty;
use crate::engine::io::files::OpenFile;
use crate::engine::io::{Backend, Engine, Op, uring};
use crate::engine::limiter::Limiter;
use crate::engine::options::{self, Io, LOAD_STAGING_BUDGET, Options, STAGING_BUDGET};
use crate::engine::report::{Blocks, Fallback, Way};
use crate::error::{Error, Result};
use crate::format::geometry::{self, PAGE};
use crate::sys::buf::{self, Slab};
use crate::sys::gather::Buf;
use crate::sys::priority::Priority;
use crate::telemetry::{Lane, Operation, Phase, Planned, State};

/// How long a worker waits that can do nothing before another one closes a file.
const NO_FILE: Duration = Duration::from_millis(1);

/// How often the calling thread looks up from waiting, to report progress and to notice an interrupt.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// Told the bytes done so far and in all, about ten times a second; answers whether to go on.
pub type Tick<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// One block on its way.
#[derive(Debug)]
pub struct Transfer {
    /// The file.
    pub file: Arc<OpenFile>,
    /// Where in the file the transfer begins.
    pub offset: u64,
    /// Which bytes of the buffer move. For direct I/O, offset and range are aligned.
    pub range: Range<usize>,
    /// How many of them must: fewer at the end of a file.
    pub need: usize,
    /// How many have.
    pub moved: usize,
    /// The memory.
    pub buf: Buf,
    /// Past the page cache, or through it.
    pub direct: bool,
    /// The way it takes.
    pub way: Way,
    /// Bytes that were copied for it.
    pub copied: u64,
}

/// What the workers of a job moved, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// Blocks by the way they took.
    pub blocks: Blocks,
    /// Bytes that the processor copied.
    pub copied: u64,
}

/// What workers do, block by block.
pub trait Job: Sync {
    /// Whether blocks go to the disk or come from it.
    const WRITE: bool;

    /// Number of blocks.
    fn blocks(&self) -> usize;

    /// Number of files.
    fn files(&self) -> usize;

    /// Bytes to move, padding not counted.
    fn total(&self) -> u64;

    /// The file that a block belongs to.
    fn file(&self, block: usize) -> usize;

    /// Bytes of the largest slab that [`Job::start`] asks for.
    fn largest(&self) -> usize;

    /// Makes a block ready to move, unless its file has to wait until another one is closed. `slab` hands out a slab of at least so
    /// many bytes.
    fn start(&self, block: usize, slab: &mut dyn FnMut(usize) -> Result<Slab>) -> Result<Option<Transfer>>;

    /// Takes the block after it moved, or failed to, and tells `lane` how many of the total bytes it had.
    fn finish(
        &self,
        block: usize,
        transfer: &mut Transfer,
        moved: io::Result<()>,
        lane: &Lane<'_>,
    ) -> Result<()>;
}

/// Bytes of staging slabs for the workers of a save, or of a load.
const fn budget(write: bool) -> u64 {
    if write { STAGING_BUDGET } else { LOAD_STAGING_BUDGET }
}

/// What the workers of one job share.
struct Shared<'a, J> {
    job: &'a J,
    depth: usize,
    /// Bytes of slabs that one worker may have in flight, and that one block may need.
    room: usize,
    largest: usize,
    next: AtomicUsize,
    stop: AtomicBool,
    limiter: Option<Limiter>,
    operation: &'a Operation,
    failure: Mutex<Option<Error>>,
    moved: Mutex<Moved>,
    strict: bool,
    fallback: Mutex<Option<Fallback>>,
    running: AtomicUsize,
}

impl<J> Shared<'_, J> {
    /// Keeps the first failure and stops everybody.
    fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `job` to its end; on the first failure all workers stop and that failure is returned.
/// The crew is corrected to what really ran.
pub fn run<J: Job>(
    job: &J,
    crew: &mut Crew,
    options: &Options,
    block_size: u64,
    operation: &Operation,
    tick: Tick<'_>,
) -> Result<Moved> {
    // A few bytes may lie far apart.
    if job.blocks() > 1 && crew.threads == 1 {
        crew.staff(options);
    }
    let slab = buf::slab_size(job.largest()) as u64;
    let slabs = budget(J::WRITE) / slab;
    crew.threads = crew.threads.min(job.blocks()).clamp(1, slabs.max(1) as usize);
    let depth = match crew.engine {
        // Whoever waits for the limit should not have completions lie unreaped meanwhile.
        Engine::Uring if options.bandwidth_limit.is_some() => 1,
        Engine::Uring => options.queue_depth.clamp(1, options::MOST_DEPTH),
        Engine::Threads | Engine::Buffered => 1,
    };
    let total = job.total();
    let planned = Planned { bytes: total, files: job.files(), block_size, threads: crew.threads, depth };
    let phase = if J::WRITE { Phase::Write } else { Phase::Read };
    operation.start(&planned, crew.engine, crew.errno(), phase);
    let shared = Shared {
        job,
        depth,
        room: budget(J::WRITE) as usize / crew.threads,
        largest: slab as usize,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        limiter: options.bandwidth_limit.map(Limiter::new),
        operation,
        failure: Mutex::new(None),
        moved: Mutex::new(Moved::default()),
        strict: options.io == Io::Direct,
        fallback: Mutex::new(None),
        running: AtomicUsize::new(crew.threads),
    };
    let stands_back = options.priority != Priority::default();
    let mut refused = None;
    // One blocking call: a thread would cost more than it does, and there is nothing to report meanwhile (but waiting for a limit).
    // A priority stays with the thread that takes it, and the caller goes on to other things.
    let inline =
        job.blocks() <= 1 && crew.engine != Engine::Uring && shared.limiter.is_none() && !stands_back;
    let mut started = 0;
    if !inline {
        (started, refused) = staff(&shared, crew, options, total, tick);
    }
    if started == 0 {
        let mut last = Instant::now();
        attempt(&shared, crew.engine, options, Priority::default(), &mut || {
            if last.elapsed() >= TICK {
                watch(&shared, total, tick);
                last = Instant::now();
            }
        });
        if !shared.stop.load(Ordering::Relaxed) && !tick(operation.done.load(Ordering::Relaxed), total) {
            shared.fail(Error::Interrupted);
        }
    }
    if let Some(error) = lock(&shared.failure).take() {
        return Err(error);
    }
    crew.threads = started.max(1);
    if let Some(reason) = lock(&shared.fallback).take() {
        crew.engine = Engine::Threads;
        crew.fallback = Some(reason);
    }
    if let Some(error) = refused.filter(|_| started == 0) {
        let priority = if stands_back { ", without its priority" } else { "" };
        let reason = format!(
            "no worker thread can be started ({error}): the calling thread did the work{priority}; \
             see `ulimit -u` and the cgroup's pids.max"
        );
        crew.note(error.raw_os_error().unwrap_or(libc::EAGAIN), &reason);
    }
    let moved = *lock(&shared.moved);
    let past = moved.blocks.kind("direct") + moved.blocks.kind("staged");
    let through = moved.blocks.kind("buffered");
    if crew.direct() && through > 0 && past == 0 {
        crew.engine = Engine::Buffered;
        if moved.blocks.of(Way::Refused) > 0 {
            crew.note(libc::EINVAL, "direct I/O: refused by this file system");
        }
    }
    operation.ran(crew.engine, crew.errno(), through > 0 && past > 0);
    Ok(moved)
}

/// Starts the workers and waits for them. Returns how many there were, and why not more.
fn staff<J: Job>(
    shared: &Shared<'_, J>,
    crew: &Crew,
    options: &Options,
    total: u64,
    tick: Tick<'_>,
) -> (usize, Option<io::Error>) {
    let caller = thread::current();
    let (mut started, mut refused) = (0, None);
    thread::scope(|scope| {
        for number in 0..crew.threads {
            let (caller, engine) = (&caller, crew.engine);
            let body = move || {
                attempt(shared, engine, options, options.priority, &mut || {});
                shared.running.fetch_sub(1, Ordering::AcqRel);
                caller.unpark();
            };
            let name = format!("fastckpt-{number}");
            if let Err(error) = options::thread_builder().name(name).spawn_scoped(scope, body) {
                // Fewer workers do as well.
                shared.running.fetch_sub(1, Ordering::AcqRel);
                refused = Some(error);
            } else {
                started += 1;
            }
        }
        while shared.running.load(Ordering::Acquire) > 0 {
            thread::park_timeout(TICK);
            watch(shared, total, tick);
        }
    });
    (started, refused)
}

/// What the calling thread does now and then: it reports progress, and notices an interrupt.
fn watch<J: Job>(shared: &Shared<'_, J>, total: u64, tick: Tick<'_>) {
    let done = shared.operation.done.load(Ordering::Relaxed);
    if J::WRITE && done == total {
        shared.operation.phase(Phase::Fsync);
    }
    shared.operation.tick();
    if !shared.stop.load(Ordering::Relaxed) && !tick(done, total) {
        shared.fail(Error::Interrupted);
    }
}

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// A block in flight; its buffer travels with the operation.
struct Flight {
    block: usize,
    submitted: u64,
    offset: u64,
    range: Range<usize>,
    need: usize,
    moved: usize,
    /// Bytes of its slab.
    staged: usize,
    way: Way,
    copied: u64,
    /// The rest goes through the page cache, which takes any length.
    cached: bool,
}

/// The life of one worker, whose failure, be it a panic, is everybody's. `beat` is called between blocks.
fn attempt<J: Job>(
    shared: &Shared<'_, J>,
    engine: Engine,
    options: &Options,
    priority: Priority,
    beat: &mut dyn FnMut(),
) {
    // The job's state is not used after a panic: the failure ends the operation.
    match catch_unwind(AssertUnwindSafe(|| work(shared, engine, options, priority, beat))) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => shared.fail(error),
        Err(panic) => shared.fail(Error::Panic(panic_text(&*panic))),
    }
}

/// The life of one worker.
fn work<J: Job>(
    shared: &Shared<'_, J>,
    engine: Engine,
    options: &Options,
    priority: Priority,
    beat: &mut dyn FnMut(),
) -> Result<()> {
    let _ = priority.apply(); // whoever sets one has probed it
    let mut depth = 1;
    let mut backend: Box<dyn Backend> = match engine {
        Engine::Uring => match uring::open() {
            Ok(ring) => {
                depth = shared.depth;
                Box::new(ring)
            }
            Err(reason) => {
                lock(&shared.fallback).get_or_insert(reason);
                Box::new(Blocking::default())
            }
        },
        Engine::Threads | Engine::Buffered => Box::new(Blocking::default()),
    };
    if let Some(plan) = &options.faults {
        backend = Box::new(Faulty::new(backend, plan.clone()));
    }
    let mut worker = Worker {
        shared,
        lane: shared.operation.lane(),
        backend,
        flights: (0..depth).map(|_| None).collect(),
        staged: 0,
        waiting: None,
        slabs: Vec::new(),
        moved: Moved::default(),
        beat,
    };
    let outcome = worker.run();
    {
        let mut all = lock(&shared.moved);
        all.blocks += worker.moved.blocks;
        all.copied += worker.moved.copied;
    }
    // Dropping the backend first waits for what a failure left in flight.
    drop(worker.backend);
    buf::give_slabs(worker.slabs, STAGING_BUDGET as usize);
    outcome
}

struct Worker<'a, 'b, J> {
    shared: &'a Shared<'b, J>,
    lane: Lane<'b>,
    backend: Box<dyn Backend>,
    flights: Vec<Option<Flight>>,
    /// Bytes of slabs in flight.
    staged: usize,
    /// The block that is next when a file can be opened again.
    waiting: Option<usize>,
    /// Free slabs, for the next blocks.
    slabs: Vec<Slab>,
    moved: Moved,
    /// Called between blocks.
    beat: &'a mut dyn FnMut(),
}

impl<J: Job> Worker<'_, '_, J> {
    fn run(&mut self) -> Result<()> {
        loop {
            while let Some(token) = self.flights.iter().position(Option::is_none).filter(|_| self.has_room())
            {
                let next = || self.shared.next.fetch_add(1, Ordering::Relaxed);
                let block = self.waiting.take().unwrap_or_else(next);
                if block >= self.shared.job.blocks() || self.shared.stop.load(Ordering::Relaxed) {
                    break;
                }
                if !self.start(token, block)? {
                    break;
                }
            }
            match self.backend.wait().map_err(backend_failed)? {
                Some(done) => self.land(done)?,
                None if self.waiting.is_some() => thread::sleep(NO_FILE),
                None => return Ok(()),
            }
            (self.beat)();
        }
    }

    /// Whether the slabs of one more block stay within the budget. Blocks that move straight need next to none, so that more of
    /// them are in flight.
    fn has_room(&self) -> bool {
        self.staged == 0 || self.staged + self.shared.largest <= self.shared.room
    }

    /// Starts a block, and tells whether another one may follow at once. Not if this one has run already: what it read is to be
    /// summed while it is in cache. Nor if it has to wait for a file: what is in flight may close one.
    fn start(&mut self, token: usize, block: usize) -> Result<bool> {
        let begin = self.lane.begin(self.shared.job.file(block));
        let Self { shared, slabs, .. } = self;
        let mut slab = |len: usize| {
            buf::smallest_fit(slabs, len).map_or_else(
                || {
                    // The free ones are too small: they go, so that no more is held than was in flight.
                    slabs.clear();
                    buf::take_slab(len)
                        .map_err(Error::io("map memory for staging", std::path::Path::new("memory")))
                },
                Ok,
            )
        };
        let started = shared.job.start(block, &mut slab)?;
        self.lane.starved(begin);
        let Some(transfer) = started else {
            self.waiting = Some(block);
            return Ok(false);
        };
        let Transfer { file, offset, range, need, buf, direct, way, copied, .. } = transfer;
        let staged = buf.slab().len();
        self.staged += staged;
        self.pace(need);
        let submitted = self.lane.submitted(need as u64);
        self.flights[token] = Some(Flight {
            block,
            submitted,
            offset,
            range: range.clone(),
            need,
            moved: 0,
            staged,
            way,
            copied,
            cached: !direct,
        });
        let op = Op { token, file, direct, write: J::WRITE, offset, range, buf };
        self.backend.submit(op).map_err(backend_failed)?;
        Ok(direct)
    }

    /// Waits until the bandwidth limit lets so many bytes go.
    fn pace(&mut self, bytes: usize) {
        let Some(limiter) = &self.shared.limiter else { return };
        let mut left = limiter.book(bytes as u64);
        self.lane.state(State::Limit);
        self.lane.limited(left);
        // In steps, so that a stop is noticed.
        while !left.is_zero() && !self.shared.stop.load(Ordering::Relaxed) {
            let step = left.min(TICK);
            thread::sleep(step);
            left -= step;
            (self.beat)();
        }
    }

    /// Takes a finished operation: submits again what is left of it, or hands the block to the job.
    fn land(&mut self, done: crate::engine::io::Done) -> Result<()> {
        let crate::engine::io::Done { mut op, result } = done;
        let Some(mut flight) = self.flights[op.token].take() else { return Ok(()) };
        self.lane.landed(flight.submitted);
        let outcome = match result {
            Ok(0) if flight.need > flight.moved => Err(nothing_moved::<J>()),
            Ok(moved) => {
                // A short direct transfer that did not get past a page would be the same again for ever.
                let stuck = op.direct && moved < flight.need - flight.moved && moved < PAGE as usize;
                if stuck && !self.shared.strict {
                    (flight.cached, flight.way) = (true, Way::Remainder);
                }
                flight.moved += moved;
                if flight.moved < flight.need {
                    self.lane.short();
                }
                if stuck && self.shared.strict {
                    Err(nothing_moved::<J>())
                } else {
                    Ok(flight.moved >= flight.need)
                }
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {
                    self.lane.retried();
                    thread::yield_now();
                    Ok(false)
                }
                Some(libc::EINVAL) if op.direct && !self.shared.strict => {
                    // The file system takes the flag but not this operation, aligned as it is.
                    op.file.refuse_direct();
                    Ok(false)
                }
                _ => Err(error),
            },
        };
        let moved = match outcome {
            Ok(false) if !self.shared.stop.load(Ordering::Relaxed) => {
                op.direct = op.file.is_direct() && !flight.cached;
                if op.direct {
                    // The rest must begin aligned; moving some bytes twice does no harm.
                    flight.moved = geometry::down(flight.moved as u64, PAGE) as usize;
                }
                op.offset = flight.offset + flight.moved as u64;
                op.range = flight.range.start + flight.moved..flight.range.end;
                flight.submitted = self.lane.submitted((flight.need - flight.moved) as u64);
                self.flights[op.token] = Some(flight);
                return self.backend.submit(op).map_err(backend_failed);
            }
            Ok(false) => return Ok(()), // stopped: another failure is on its way to the caller
            Ok(true) => Ok(()),
            Err(error) => {
                self.lane.failed();
                Err(error)
            }
        };
        let Flight { block, offset, range, need, moved: so_far, staged, way, copied, .. } = flight;
        self.staged -= staged;
        let (file, buf, direct) = (op.file, op.buf, op.direct);
        let way = if direct || way.words().0 == "buffered" { way } else { Way::Refused };
        let mut transfer = Transfer { file, offset, range, need, moved: so_far, buf, direct, way, copied };
        self.shared.job.finish(block, &mut transfer, moved, &self.lane)?;
        self.moved.blocks.count(transfer.way);
        // Through the page cache the kernel copies too.
        let by_kernel = if direct || way == Way::Mapped { 0 } else { so_far as u64 };
        self.moved.copied += transfer.copied + by_kernel;
        self.slabs.extend(transfer.buf.into_slab());
        Ok(())
    }
}

/// A transfer that does not get on.
fn nothing_moved<J: Job>() -> io::Error {
    if J::WRITE { io::ErrorKind::WriteZero.into() } else { io::ErrorKind::UnexpectedEof.into() }
}

/// The backend itself failed, not an operation.
fn backend_failed(error: io::Error) -> Error {
    Error::Io { operation: "use the I/O engine on", path: "io_uring".into(), source: error }
}
