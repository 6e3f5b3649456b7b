//! Live counters for the monitor (`docs/telemetry.md`). Nothing here can fail, block or slow an operation: where there is no room
//! for counters, they are counted into private memory.

pub mod layout;
mod process;
mod target;

use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::engine::io::Engine;
use crate::engine::options::Options;
use crate::sys::shm;
use layout::{BUCKETS, OperationSlot, Segment, ThreadSlot};

pub use target::{parse_targets, set_target};

/// The width of the window whose best is an operation's peak.
const PEAK_WINDOW: Duration = Duration::from_secs(1);
/// The first latency bucket ends here, nanoseconds; each later one at twice the end of the one before.
const FIRST_BUCKET: u64 = 64_000;

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes a checkpoint.
    Save = 1,
    /// Reads one.
    Load = 2,
    /// Compares one with its checksums.
    Verify = 3,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Looks at what there is to do.
    Plan = 1,
    /// Writes.
    Write = 3,
    /// All is written; waits until all is durable.
    Fsync = 4,
    /// Writes the manifest and renames.
    Commit = 5,
    /// Reads.
    Read = 8,
}

const DONE: u32 = 6;
const FAILED: u32 = 7;

/// What a worker does at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Has nothing to do.
    Idle = 0,
    /// Waits for bytes to write.
    Source = 1,
    /// Waits for the disk.
    Transfer = 2,
    /// Waits for a shard to be durable.
    Fsync = 3,
    /// Has failed.
    Error = 4,
    /// Keeps to the bandwidth limit.
    Limit = 5,
}

/// The monotonic clock, nanoseconds.
#[must_use]
pub fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// One save, load or verification, from its call to its end.
#[derive(Debug)]
pub struct Operation {
    segment: &'static Segment,
    slot: &'static OperationSlot,
    /// Number of the slot in the segment, or [`layout::NO_SLOT`].
    number: u32,
    id: u64,
    kind: Kind,
    begin: u64,
    begin_real: u64,
    /// Bytes that the workers have completed.
    pub(crate) done: AtomicU64,
    /// Bytes that are durable, or checked.
    durable: AtomicU64,
    /// Shards that are finished.
    files_done: AtomicU32,
    closing: Mutex<Closing>,
}

/// What only the end of an operation, or its coordinating thread, looks at.
#[derive(Debug, Default)]
struct Closing {
    ended: bool,
    histogram: [u64; BUCKETS],
    recent: std::collections::VecDeque<(u64, u64)>,
    peak: u64,
    sync_begin: Option<u64>,
    path: String,
    phase: u32,
}

/// What an operation turns out to be once it is planned.
#[derive(Debug, Clone, Copy)]
pub struct Planned {
    /// Bytes that the workers will move.
    pub bytes: u64,
    /// Shards.
    pub files: usize,
    /// Bytes of a block.
    pub block_size: u64,
    /// Worker threads.
    pub threads: usize,
    /// Operations in flight a worker.
    pub depth: usize,
}

impl Operation {
    /// An operation on the checkpoint at `path` begins.
    #[must_use]
    pub fn begin(kind: Kind, path: &Path, options: &Options) -> Self {
        let begin = now();
        let (segment, number, id) = process::take_operation(&options.environment);
        let slot = segment.operations.get(number as usize).unwrap_or(&shm::UNSEEN.operations[0]);
        let operation = Self {
            segment,
            slot,
            number,
            id,
            kind,
            begin,
            begin_real: nanoseconds(ClockId::Realtime),
            done: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            files_done: AtomicU32::new(0),
            closing: Mutex::default(),
        };
        let (save_target, load_target) = target::targets(&options.environment);
        let target = if kind == Kind::Save { save_target } else { load_target };
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let absolute = absolute.to_string_lossy();
        operation.closing().path = absolute.clone().into_owned();
        let device = path.parent().and_then(|parent| {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            rustix::fs::stat(parent).ok()
        });
        operation.write(|slot| {
            slot.kind.store(kind as u32, Relaxed);
            slot.phase.store(Phase::Plan as u32, Relaxed);
            for zero in [&slot.engine, &slot.flags, &slot.fallback_errno, &slot.threads] {
                zero.store(0, Relaxed);
            }
            for zero in [&slot.files_total, &slot.files_done, &slot.block_size, &slot.queue_depth] {
                zero.store(0, Relaxed);
            }
            for zero in [&slot.bytes_total, &slot.bytes_durable, &slot.t_end_mono_ns, &slot.error] {
                zero.store(0, Relaxed);
            }
            slot.t_start_mono_ns.store(begin, Relaxed);
            slot.t_phase_mono_ns.store(begin, Relaxed);
            slot.st_dev.store(device.map_or(0, |stat| stat.st_dev), Relaxed);
            slot.step.store(options.step.unwrap_or(-1), Relaxed);
            slot.target.store(target, Relaxed);
            slot.label.set(&path.file_name().unwrap_or_default().to_string_lossy());
            slot.path.set_tail(&absolute);
            slot.op_id.store(id, Relaxed);
        });
        operation
    }

    /// Changes the slot as one (`docs/telemetry.md`, 6). Only the coordinating thread calls this.
    fn write(&self, change: impl FnOnce(&OperationSlot)) {
        // Whoever took the slot left it odd.
        let odd = self.slot.seq.load(Relaxed) | 1;
        self.slot.seq.store(odd, Relaxed);
        fence(Release); // the odd number comes before the fields
        change(self.slot);
        self.slot.seq.store(odd.wrapping_add(1), Release); // and the even one after them
    }

    /// The plan is made, and work begins.
    pub fn start(&self, planned: &Planned, engine: Engine, errno: Option<i32>, phase: Phase) {
        self.write(|slot| {
            slot.bytes_total.store(planned.bytes, Relaxed);
            slot.files_total.store(clamp(planned.files), Relaxed);
            slot.block_size.store(clamp(planned.block_size), Relaxed);
            slot.threads.store(clamp(planned.threads), Relaxed);
            slot.queue_depth.store(clamp(planned.depth), Relaxed);
        });
        self.ran(engine, errno, false);
        self.phase(phase);
    }

    /// Which engine runs, and the errno for which another was left; `mixed` when some blocks took another way.
    pub fn ran(&self, engine: Engine, errno: Option<i32>, mixed: bool) {
        let code = match engine {
            Engine::Uring => 1,
            Engine::Threads => 2,
            Engine::Buffered => 3,
        };
        let direct = u32::from(engine != Engine::Buffered);
        let flags = direct | u32::from(errno.is_some()) << 1 | u32::from(mixed) << 6;
        self.write(|slot| {
            slot.engine.store(code, Relaxed);
            slot.flags.store(flags, Relaxed);
            slot.fallback_errno.store(errno.map_or(0, i32::unsigned_abs), Relaxed);
        });
    }

    /// The next phase; one that was passed already is no news.
    pub fn phase(&self, phase: Phase) {
        let now = now();
        let mut closing = self.closing();
        // Reading is numbered after the phases of a save, but is followed by none of them.
        if closing.phase >= phase as u32 {
            return;
        }
        closing.phase = phase as u32;
        self.segment.process.heartbeat.fetch_add(1, Relaxed);
        if matches!(phase, Phase::Fsync | Phase::Commit) {
            closing.sync_begin.get_or_insert(now);
        }
        drop(closing);
        self.write(|slot| {
            slot.phase.store(phase as u32, Relaxed);
            slot.t_phase_mono_ns.store(now, Relaxed);
        });
    }

    /// A shard of `bytes` is durable.
    pub fn durable(&self, bytes: u64) {
        self.checked(bytes, true);
    }

    /// So many bytes have been checked, which are the last of their shard or not.
    pub fn checked(&self, bytes: u64, last: bool) {
        self.durable.fetch_add(bytes, Relaxed);
        self.files_done.fetch_add(u32::from(last), Relaxed);
    }

    /// A sign of life, about ten times a second, from the coordinating thread.
    pub fn tick(&self) {
        self.segment.process.heartbeat.fetch_add(1, Relaxed);
        let (at, done) = (now(), self.done.load(Relaxed));
        let mut closing = self.closing();
        let window = PEAK_WINDOW.as_nanos() as u64;
        while closing.recent.len() > 1 && closing.recent.get(1).is_some_and(|&(then, _)| then + window <= at)
        {
            closing.recent.pop_front();
        }
        if let Some(&(then, bytes)) = closing.recent.front().filter(|&&(then, _)| then + window <= at) {
            let rate = u128::from(done - bytes) * 1_000_000_000 / u128::from(at - then);
            closing.peak = closing.peak.max(u64::try_from(rate).unwrap_or(u64::MAX));
        }
        closing.recent.push_back((at, done));
        drop(closing);
        self.write(|slot| {
            slot.bytes_durable.store(self.durable.load(Relaxed), Relaxed);
            slot.files_done.store(self.files_done.load(Relaxed), Relaxed);
        });
    }

    /// A slot for one worker of this operation, for the calling thread.
    #[must_use]
    pub fn lane(&self) -> Lane<'_> {
        let number = process::take_thread(self.segment);
        let slot = number.map_or(&shm::UNSEEN.threads[0], |number| &self.segment.threads[number]);
        slot.op_id.store(0, Release);
        fence(Release);
        for zero in [&slot.in_flight, &slot.state, &slot.file] {
            zero.store(0, Relaxed);
        }
        slot.op_slot.store(self.number, Relaxed);
        slot.latency_max_ns.store(0, Relaxed);
        slot.bytes_op.store(0, Relaxed);
        slot.tid.store(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs(), Relaxed);
        slot.cpu.store(rustix::thread::sched_getcpu() as u32, Relaxed);
        slot.op_id.store(self.id, Release);
        Lane { operation: self, slot, number, busy_since: 0, histogram: [0; BUCKETS] }
    }

    /// The operation has ended: its slot, its record and the totals are closed.
    pub fn end(&self, outcome: Result<(), Option<i32>>) {
        let mut closing = self.closing();
        if std::mem::replace(&mut closing.ended, true) {
            return;
        }
        let end = now();
        let bytes = self.done.load(Relaxed);
        let error = outcome.err().flatten().map_or(0, |errno| u64::from(errno.unsigned_abs()));
        self.write(|slot| {
            slot.phase.store(if outcome.is_ok() { DONE } else { FAILED }, Relaxed);
            slot.t_phase_mono_ns.store(end, Relaxed);
            slot.t_end_mono_ns.store(end, Relaxed);
            slot.error.store(error, Relaxed);
            slot.files_done.store(self.files_done.load(Relaxed), Relaxed);
            let durable = if outcome.is_ok() { &slot.bytes_total } else { &self.durable };
            slot.bytes_durable.store(durable.load(Relaxed), Relaxed);
        });
        let duration = end - self.begin;
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(duration.max(1));
        let peak = closing.peak.max(u64::try_from(rate).unwrap_or(u64::MAX));
        process::finish(self.segment, self.number, self.kind, outcome.is_ok(), bytes, |record| {
            record.kind.store(self.kind as u32, Relaxed);
            record.result.store(if outcome.is_ok() { 1 } else { 2 }, Relaxed);
            record.engine.store(self.slot.engine.load(Relaxed), Relaxed);
            record.threads.store(self.slot.threads.load(Relaxed), Relaxed);
            record.bytes.store(bytes, Relaxed);
            record.t_start_real_ns.store(self.begin_real, Relaxed);
            record.dur_ns.store(duration, Relaxed);
            record.sync_ns.store(closing.sync_begin.map_or(0, |begin| end - begin), Relaxed);
            record.peak_bps.store(peak, Relaxed);
            record.p50_us.store(quantile(&closing.histogram, 50), Relaxed);
            record.p99_us.store(quantile(&closing.histogram, 99), Relaxed);
            record.step.store(self.slot.step.load(Relaxed), Relaxed);
            record.error.store(error, Relaxed);
            record.flags.store(self.slot.flags.load(Relaxed), Relaxed);
            record.fallback_errno.store(self.slot.fallback_errno.load(Relaxed), Relaxed);
            record.label.copy(&self.slot.label);
            record.path.set_tail(&closing.path);
            record.op_id.store(self.id, Release);
        });
    }

    fn closing(&self) -> std::sync::MutexGuard<'_, Closing> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Operation {
    /// An operation that nobody ended was left by an error on the way.
    fn drop(&mut self) {
        self.end(Err(None));
    }
}

/// The bucket of a latency in nanoseconds: 0 below the first end, then one more for each doubling.
fn bucket_of(latency: u64) -> usize {
    let doublings = u64::BITS - (latency / FIRST_BUCKET).leading_zeros();
    (doublings as usize).min(BUCKETS - 1)
}

/// The value below which `percent` of the requests lie: the upper end of their bucket, in microseconds.
fn quantile(histogram: &[u64; BUCKETS], percent: u64) -> u32 {
    let all: u64 = histogram.iter().sum();
    let mut seen = 0;
    let bucket = histogram.iter().position(|count| {
        seen += count;
        seen > 0 && seen * 100 >= all * percent
    });
    bucket.map_or(0, |bucket| clamp((FIRST_BUCKET / 1000) << bucket))
}

fn clamp(value: impl TryInto<u32>) -> u32 {
    value.try_into().unwrap_or(u32::MAX)
}

/// The counters of one worker. Plain loads and stores by their one writer.
#[derive(Debug)]
pub struct Lane<'a> {
    operation: &'a Operation,
    slot: &'static ThreadSlot,
    number: Option<usize>,
    busy_since: u64,
    histogram: [u64; BUCKETS],
}

/// Adds to a counter whose only writer is the calling thread.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(value), Relaxed);
}

impl Lane<'_> {
    /// The operation that the worker works for.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        self.operation
    }

    /// What the worker does now.
    pub fn state(&self, state: State) {
        self.slot.state.store(state as u32, Relaxed);
    }

    /// A request of `bytes` goes to the kernel; returns the time, to be handed to [`Lane::landed`].
    pub fn submitted(&mut self, bytes: u64) -> u64 {
        let now = now();
        let in_flight = self.slot.in_flight.load(Relaxed);
        if in_flight == 0 {
            self.busy_since = now;
        }
        self.slot.in_flight.store(in_flight + 1, Relaxed);
        self.slot.state.store(State::Transfer as u32, Relaxed);
        add(&self.slot.bytes_submitted, bytes);
        now
    }

    /// A request came back.
    pub fn landed(&mut self, submitted: u64) {
        let now = now();
        let latency = now.saturating_sub(submitted);
        let bucket = bucket_of(latency);
        self.histogram[bucket] += 1;
        add(&self.slot.latency_hist[bucket], 1);
        add(&self.slot.requests, 1);
        add(&self.slot.latency_sum_ns, latency);
        if latency > self.slot.latency_max_ns.load(Relaxed) {
            self.slot.latency_max_ns.store(latency, Relaxed);
        }
        let in_flight = self.slot.in_flight.load(Relaxed).saturating_sub(1);
        self.slot.in_flight.store(in_flight, Relaxed);
        add(&self.slot.busy_ns, now.saturating_sub(self.busy_since));
        self.busy_since = now;
        self.slot.last_progress_mono_ns.store(now, Release);
    }

    /// `bytes` of the operation are done.
    pub fn moved(&self, bytes: u64) {
        add(&self.slot.bytes_ever, bytes);
        add(&self.slot.bytes_op, bytes);
        self.operation.done.fetch_add(bytes, Relaxed);
    }

    /// Nothing was in flight while the source delivered, which began at `since`.
    pub fn starved(&self, since: u64) {
        if self.slot.in_flight.load(Relaxed) == 0 {
            add(&self.slot.source_wait_ns, now().saturating_sub(since));
        }
    }

    /// The worker waited for the bandwidth limit.
    pub fn limited(&self, waited: Duration) {
        let milliseconds = self.slot.limit_wait_ms.load(Relaxed).wrapping_add(clamp(waited.as_millis()));
        self.slot.limit_wait_ms.store(milliseconds, Relaxed);
    }

    /// A request is to be tried again.
    pub fn retried(&self) {
        add(&self.slot.retries, 1);
    }

    /// A request moved less than it should.
    pub fn short(&self) {
        add(&self.slot.shorts, 1);
    }

    /// A request failed.
    pub fn failed(&self) {
        self.slot.errors.store(self.slot.errors.load(Relaxed).wrapping_add(1), Relaxed);
        self.state(State::Error);
    }

    /// The worker begins a block of shard `file`; returns the time, to be handed to [`Lane::starved`].
    #[must_use]
    pub fn begin(&self, file: usize) -> u64 {
        self.slot.file.store(clamp(file), Relaxed);
        if self.slot.in_flight.load(Relaxed) == 0 {
            self.state(State::Source);
        }
        now()
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        let mut closing = self.operation.closing();
        for (sum, count) in closing.histogram.iter_mut().zip(self.histogram) {
            *sum += count;
        }
        drop(closing);
        self.slot.in_flight.store(0, Relaxed);
        self.slot.state.store(State::Idle as u32, Relaxed);
        if let Some(number) = self.number {
            process::give_thread(self.operation.segment, number);
        }
    }
}

#[cfg(test)]
mod tests;

/// Whether a slot is free to be taken: never used, or ended; ordered by which ended first.
fn free_since(slot: &OperationSlot) -> Option<u64> {
    let end = slot.t_end_mono_ns.load(Acquire);
    (slot.op_id.load(Acquire) == 0 || end != 0).then_some(end)
}

/// The errno of a failed operation, for [`Operation::end`].
pub(crate) fn outcome<T>(result: &crate::Result<T>) -> Result<(), Option<i32>> {
    result.as_ref().map(drop).map_err(crate::Error::errno)
}
