//! Blocks that a callback moves between a device and a file, past host memory. They move before the workers begin. What
//! the callback could not move is left to the workers.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use super::content::BATCH;
use super::job::{TICK, Tick};
use super::limiter::Limiter;
use super::path::{IoPath, Reason};
use super::report::{Fallback, Fell, Ran};
use super::tell;
use crate::error::{Error, Result, panic_text};
use crate::sys::thread::builder;
use crate::telemetry::{Lane, Operation, Phase, Planned, State};

/// Threads that call the callback. Each call moves up to 16 MiB, which is long enough for a device; the threads
/// hide the time between calls.
pub const THREADS: usize = 4;

/// Whole blocks of one tensor that follow each other in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// The number that the callback knows the tensor by.
    pub index: usize,
    /// First byte, counted in the tensor.
    pub start: u64,
    /// The path of the file. It is valid in this process.
    pub path: String,
    /// First byte, counted in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Moves stretches, of up to 16 MiB together, and returns the CRC of each of their blocks, whose size is the
/// second argument; with 0 none is wanted. Several threads call it. After an error nothing is under way any more, and
/// nothing is known of what was moved.
pub type Move = Arc<dyn Fn(&[Stretch], u64) -> std::result::Result<Vec<u64>, String> + Send + Sync>;

/// The tensors whose blocks a callback may move, by the numbers that callbacks know them by.
#[derive(Clone)]
pub struct Direct {
    /// The numbers.
    pub indices: Arc<HashSet<usize>>,
    /// What moves them.
    pub mover: Move,
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Direct({} tensors)", self.indices.len())
    }
}

/// A block that a callback may move.
pub struct Candidate {
    /// Its number.
    pub block: usize,
    /// Where it is, on both sides.
    pub stretch: Stretch,
    /// The file's number, for the monitor.
    pub file: usize,
}

/// What was moved.
#[derive(Debug, Default)]
pub struct Moved {
    /// Numbers of blocks, ascending, each with its CRC (or 0, if none was wanted).
    pub blocks: Vec<(usize, u64)>,
    /// Why some were not.
    pub refused: Option<String>,
}

impl Moved {
    /// Whether a block was moved.
    #[must_use]
    pub fn has(&self, block: usize) -> bool {
        self.blocks.binary_search_by_key(&block, |&(moved, _)| moved).is_ok()
    }

    /// Adds this to what the workers moved. Also tells the monitor.
    pub fn report(&self, ran: &mut Ran, operation: &Operation) {
        for _ in &self.blocks {
            ran.blocks.count(IoPath::Gds, Reason::Possible);
        }
        if let Some(refused) = &self.refused {
            let why = format!("gds: {refused}: the rest went through host memory");
            ran.fallback = Some(Fallback::after(ran.fallback.take(), Fell::Gds, libc::EIO, &why));
            tell::end(operation, ran);
        }
    }
}

/// One call: neighbours among the candidates.
struct Batch {
    file: usize,
    stretches: Vec<Stretch>,
    blocks: Vec<usize>,
    len: u64,
}

/// The path of the file `name` in an open directory, for this process: whatever has become of the directory's own name.
#[must_use]
pub fn path_of(directory: BorrowedFd<'_>, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())
}

/// Has `mover` move `candidates`, which are in the order of their blocks. The first failure ends that, and is not an error.
pub fn run(
    mover: &Move,
    candidates: Vec<Candidate>,
    (block_size, sums): (u64, bool),
    bandwidth_limit: Option<u64>,
    (operation, phase, planned): (&Operation, Phase, &Planned),
    tick: Tick<'_>,
) -> Result<Moved> {
    let batches = batches(candidates);
    if batches.is_empty() {
        return Ok(Moved::default());
    }
    operation.start(planned, phase);
    let all = Shared {
        mover,
        batches,
        chunk: if sums { block_size } else { 0 },
        limiter: bandwidth_limit.map(Limiter::new),
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        moved: Mutex::default(),
        panic: OnceLock::new(),
    };
    let running = AtomicUsize::new(0);
    let mut interrupted = false;
    thread::scope(|scope| {
        let caller = thread::current();
        for number in 0..THREADS.min(all.batches.len()) {
            let (all, running, caller) = (&all, &running, caller.clone());
            running.fetch_add(1, Ordering::AcqRel);
            let ended = Ended { running, caller };
            let body = move || {
                let _ended = ended;
                all.work(operation);
            };
            // Without a thread, its batches are left to the workers.
            if let Err(error) = builder().name(format!("fastckpt-gds-{number}")).spawn_scoped(scope, body) {
                all.refuse(format!("no thread can be started ({error})"));
            }
        }
        while running.load(Ordering::Acquire) > 0 {
            thread::park_timeout(TICK);
            operation.tick();
            if !interrupted && !tick(operation.done(), planned.bytes) {
                interrupted = true;
                all.stop.store(true, Ordering::Relaxed);
            }
        }
    });
    let mut done = all.moved.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.blocks.sort_unstable();
    if let Some(text) = all.panic.into_inner() {
        return Err(Error::Panic(text));
    }
    if interrupted { Err(Error::Interrupted) } else { Ok(done) }
}

/// Counts a thread down when it ends, and also when it could not start or panicked.
struct Ended<'a> {
    running: &'a AtomicUsize,
    caller: thread::Thread,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::AcqRel);
        self.caller.unpark();
    }
}

/// Joins neighbours: to stretches, and these to batches.
fn batches(candidates: Vec<Candidate>) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for Candidate { block, stretch, file } in candidates {
        let len = stretch.len;
        match batches.last_mut() {
            Some(batch) if batch.len + len <= BATCH as u64 => {
                batch.blocks.push(block);
                batch.len += len;
                match batch.stretches.last_mut() {
                    Some(last)
                        if (last.index, &last.path) == (stretch.index, &stretch.path)
                            && last.offset + last.len == stretch.offset =>
                    {
                        last.len += len;
                    }
                    _ => batch.stretches.push(stretch),
                }
            }
            _ => batches.push(Batch { file, stretches: vec![stretch], blocks: vec![block], len }),
        }
    }
    batches
}

/// What the threads share.
struct Shared<'a> {
    mover: &'a Move,
    batches: Vec<Batch>,
    /// Bytes that have a CRC, or 0.
    chunk: u64,
    limiter: Option<Limiter>,
    next: AtomicUsize,
    stop: AtomicBool,
    moved: Mutex<Moved>,
    /// The message of a panic of the callback, of which something may still be under way: the workers must not begin.
    panic: OnceLock<String>,
}

impl Shared<'_> {
    fn refuse(&self, why: String) {
        self.stop.store(true, Ordering::Relaxed);
        self.moved.lock().unwrap_or_else(PoisonError::into_inner).refused.get_or_insert(why);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn work(&self, operation: &Operation) {
        let mut lane = Lane::new(operation);
        while !self.stopped() {
            let Some(batch) = self.batches.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            lane.prepared(lane.begin(batch.file));
            self.pace(batch.len, &lane);
            if self.stopped() {
                return;
            }
            let submitted = lane.submitted(batch.len);
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.mover)(&batch.stretches, self.chunk)));
            lane.completed(submitted);
            lane.waited(submitted);
            let wanted = if self.chunk > 0 { batch.blocks.len() } else { 0 };
            match outcome {
                Ok(Ok(sums)) if sums.len() == wanted => {
                    let sums = sums.into_iter().chain(std::iter::repeat(0));
                    let blocks = batch.blocks.iter().copied().zip(sums);
                    self.moved.lock().unwrap_or_else(PoisonError::into_inner).blocks.extend(blocks);
                    lane.moved(batch.len);
                }
                Ok(Ok(sums)) => self.refuse(format!("{} checksums for {wanted} blocks", sums.len())),
                Ok(Err(why)) => {
                    lane.failed();
                    self.refuse(why);
                }
                Err(panic) => {
                    lane.failed();
                    self.stop.store(true, Ordering::Relaxed);
                    let _ = self.panic.set(panic_text(&*panic));
                }
            }
        }
    }

    /// Waits until the bandwidth limit allows `bytes` more, in steps, to notice a stop.
    fn pace(&self, bytes: u64, lane: &Lane<'_>) {
        let Some(limiter) = &self.limiter else { return };
        let mut left = limiter.book(bytes);
        while !left.is_zero() && !self.stopped() {
            let step = left.min(TICK);
            lane.during(State::Limit, || thread::sleep(step));
            left -= step;
        }
    }
}
