//! One save, load or verification, as the live counters show it.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::clock::{now, time_of_day};
use super::codes::{DONE, FAILED, Kind, Phase, WHOLE};
use super::layout::{BUCKETS, OperationSlot, Record, Segment, UNSEEN};
use super::{process, seqlock, target};
use crate::environment::Environment;
use crate::sys::fs::{self, AtFlags, StatxFlags};

/// The width of the time window in which an operation's peak throughput is measured.
const PEAK_WINDOW: Duration = Duration::from_secs(1);
/// The end of the first latency bucket, in nanoseconds. Each later bucket ends at twice the end of the one before.
const FIRST_BUCKET: u64 = 64_000;

/// One save, load or verification, from its call to its end.
#[derive(Debug)]
pub struct Operation {
    pub(super) segment: &'static Segment,
    pub(super) slot: &'static OperationSlot,
    /// Number of the slot in the segment, or [`super::layout::NO_SLOT`].
    pub(super) number: u32,
    pub(super) id: u64,
    /// The process that began the operation.
    pid: u32,
    kind: Kind,
    begin: u64,
    begin_real: u64,
    /// Bytes that the workers have completed.
    done: AtomicU64,
    /// Bytes that are durable or checked.
    durable: AtomicU64,
    /// Shards that are finished.
    files_done: AtomicU32,
    /// Whether the slot may now belong to another operation. Threads of an abandoned save can still call methods then.
    over: AtomicBool,
    closing: Mutex<Closing>,
}

/// Read only when the operation ends, or by its coordinating thread.
#[derive(Debug, Default)]
struct Closing {
    ended: bool,
    histogram: [u64; BUCKETS],
    longest: u64,
    recent: std::collections::VecDeque<(u64, u64)>,
    peak: u64,
    sync_begin: Option<u64>,
    path: String,
    /// [`Phase::order`] of the phase.
    phase: u32,
}

/// The caller's facts about an operation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Call {
    /// The training step.
    pub step: Option<i64>,
    /// When the program made the call; `None` stands for the beginning of the operation.
    pub at: Option<Instant>,
}

/// What is known about an operation once its plan is complete.
#[derive(Debug, Clone, Copy)]
pub struct Planned {
    /// Bytes that the workers will move.
    pub bytes: u64,
    /// The number of shards.
    pub files: usize,
    /// Bytes of a block.
    pub block_size: u64,
    /// Worker threads.
    pub threads: usize,
    /// The number of blocks that one worker may have in flight.
    pub queue_depth: usize,
}

/// How an operation runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ran {
    /// The number of the engine.
    pub engine: u32,
    /// Whether the engine uses direct I/O.
    pub direct: bool,
    /// Whether some blocks took another I/O path.
    pub mixed: bool,
    /// The errno that caused the first fallback.
    pub errno: Option<i32>,
    /// The fallbacks: flags of `docs/telemetry.md`, 5.3.
    pub fell: u32,
}

impl Operation {
    /// Begins an operation on the checkpoint at `path`.
    #[must_use]
    pub fn begin(kind: Kind, path: &Path, call: Call, environment: &Environment) -> Self {
        let late = call.at.map_or(0, |at| u64::try_from(at.elapsed().as_nanos()).unwrap_or(0));
        let [begin, begin_real] = [now(), time_of_day()].map(|at| at.saturating_sub(late)); // making a segment is slow
        let (segment, number, id) = process::take_operation(environment);
        let slot = segment.operations.get(number as usize).unwrap_or(&UNSEEN.operations[0]);
        let operation = Self {
            segment,
            slot,
            number,
            id,
            pid: std::process::id(),
            kind,
            begin,
            begin_real,
            done: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            files_done: AtomicU32::new(0),
            over: AtomicBool::new(false),
            closing: Mutex::default(),
        };
        let (save_target, load_target) = target::targets(environment);
        let target = match kind {
            Kind::Save => save_target,
            Kind::Load | Kind::Verify => load_target,
            Kind::Copy | Kind::Drain | Kind::Fetch => 0,
        };
        let name = path.to_string_lossy().into_owned();
        let absolute = if name.contains("://") { None } else { std::path::absolute(path).ok() };
        let absolute = absolute.map_or(name, |path| path.to_string_lossy().into_owned());
        operation.closing().path.clone_from(&absolute);
        let device = path.parent().and_then(|parent| {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            // Cached attributes suffice: this must not wait for storage that does not answer.
            let known = AtFlags::STATX_DONT_SYNC;
            fs::statx(fs::CWD, parent, known, StatxFlags::empty()).ok()
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
            for zero in [&slot.bytes_linked, &slot.bytes_staged, &slot.bytes_to_stage] {
                zero.store(0, Relaxed);
            }
            slot.t_start_mono_ns.store(begin, Relaxed);
            slot.t_phase_mono_ns.store(begin, Relaxed);
            slot.st_dev
                .store(device.map_or(0, |stat| fs::makedev(stat.stx_dev_major, stat.stx_dev_minor)), Relaxed);
            slot.step.store(call.step.unwrap_or(-1), Relaxed);
            slot.target.store(target, Relaxed);
            slot.label.set(&path.file_name().unwrap_or_default().to_string_lossy());
            slot.path.set_tail(&absolute);
            slot.op_id.store(id, Relaxed);
        });
        operation
    }

    /// Makes a consistent change to the slot (`docs/telemetry.md`, 6). Only the coordinating thread calls this.
    fn write(&self, change: impl FnOnce(&OperationSlot)) {
        if !self.over.load(Relaxed) {
            seqlock::write(&self.slot.seq, || change(self.slot));
        }
    }

    /// The plan is complete, and work begins.
    pub fn start(&self, planned: &Planned, phase: Phase) {
        self.write(|slot| {
            slot.bytes_total.store(planned.bytes, Relaxed);
            slot.files_total.store(clamp(planned.files), Relaxed);
            slot.block_size.store(clamp(planned.block_size), Relaxed);
            slot.threads.store(clamp(planned.threads), Relaxed);
            slot.queue_depth.store(clamp(planned.queue_depth), Relaxed);
        });
        self.phase(phase);
    }

    /// Records how the operation runs.
    pub fn ran(&self, ran: &Ran) {
        let &Ran { engine, direct, mixed, errno, fell } = ran;
        let flags = u32::from(direct) | u32::from(errno.is_some()) << 1 | u32::from(mixed) << 6 | fell;
        self.write(|slot| {
            slot.engine.store(engine, Relaxed);
            slot.flags.store(flags, Relaxed);
            slot.fallback_errno.store(errno.map_or(0, i32::unsigned_abs), Relaxed);
        });
    }

    /// Enters the next phase. Ignores a phase that has already passed.
    pub fn phase(&self, phase: Phase) {
        let now = now();
        let mut closing = self.closing();
        // The read phase has a higher number than all phases of a save, but no phase of a save follows it.
        if closing.phase >= phase.order() {
            return;
        }
        closing.phase = phase.order();
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

    /// Records that files with `bytes` of tensors are linked from an earlier checkpoint instead of written.
    pub(crate) fn linked(&self, bytes: u64) {
        self.write(|slot| slot.bytes_linked.store(bytes, Relaxed));
    }

    /// Records that the copy of a state of `total` bytes begins.
    pub(super) fn stage(&self, total: u64) {
        self.phase(Phase::Stage);
        self.write(|slot| slot.bytes_to_stage.store(total, Relaxed));
    }

    /// Records that `bytes` of the state have been copied.
    pub(super) fn staged(&self, bytes: u64) {
        self.segment.process.heartbeat.fetch_add(1, Relaxed);
        self.write(|slot| slot.bytes_staged.store(bytes, Relaxed));
    }

    /// Records that `bytes` of `total` have been copied. The first call ends the plan phase.
    pub(super) fn copied(&self, bytes: u64, total: u64) {
        if self.closing().phase < Phase::of_copy(self.kind).order() {
            let planned = Planned { bytes: total, files: 0, block_size: 0, threads: 0, queue_depth: 0 };
            self.start(&planned, Phase::of_copy(self.kind));
        }
        // If a file is copied again, `bytes` may be smaller than before.
        self.done.fetch_max(bytes, Relaxed);
        self.durable.store(self.done(), Relaxed);
        self.tick();
    }

    /// Ends a copy. `whole`: the checkpoint at the target is whole.
    pub(super) fn end_copy(&self, whole: bool) {
        self.write(|slot| slot.flags.store(if whole { WHOLE } else { 0 }, Relaxed));
        self.end(Ok(()));
    }

    /// Records that a shard of `bytes` is durable.
    pub fn durable(&self, bytes: u64) {
        self.checked(bytes, true);
    }

    /// Records that `bytes` more have been checked. `last`: these bytes complete their shard.
    pub fn checked(&self, bytes: u64, last: bool) {
        self.durable.fetch_add(bytes, Relaxed);
        self.files_done.fetch_add(u32::from(last), Relaxed);
    }

    /// A sign of life from the coordinating thread, about ten times per second.
    pub fn tick(&self) {
        self.segment.process.heartbeat.fetch_add(1, Relaxed);
        let (at, done) = (now(), self.done());
        let mut closing = self.closing();
        let window = PEAK_WINDOW.as_nanos() as u64;
        while closing.recent.get(1).is_some_and(|&(then, _)| then + window <= at) {
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

    /// Bytes that the workers have completed.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    /// Records that a worker completed `bytes` more.
    pub(super) fn moved(&self, bytes: u64) {
        self.done.fetch_add(bytes, Relaxed);
    }

    /// Adds the latencies that a worker has counted, and the `longest` of them in nanoseconds.
    pub(super) fn add_latencies(&self, histogram: &[u64; BUCKETS], longest: u64) {
        let mut closing = self.closing();
        closing.longest = closing.longest.max(longest);
        for (sum, count) in closing.histogram.iter_mut().zip(histogram) {
            *sum += count;
        }
    }

    /// Whether this process began it. A forked child must not touch its parent's counters: it has no such memory.
    pub(super) fn is_own(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Ends the operation: completes its slot, its record and the totals. Only the first call has an effect, and none
    /// in a forked child.
    pub fn end(&self, outcome: Result<(), Option<i32>>) {
        if !self.is_own() {
            return;
        }
        let mut closing = self.closing();
        if std::mem::replace(&mut closing.ended, true) {
            return;
        }
        let end = now();
        let bytes = self.done();
        let error = outcome.err().flatten().map_or(0, |errno| u64::from(errno.unsigned_abs()));
        let duration = end - self.begin;
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(duration.max(1));
        let peak = closing.peak.max(u64::try_from(rate).unwrap_or(u64::MAX));
        let close = || {
            self.write(|slot| {
                slot.phase.store(if outcome.is_ok() { DONE } else { FAILED }, Relaxed);
                slot.t_phase_mono_ns.store(end, Relaxed);
                slot.t_end_mono_ns.store(end, Relaxed);
                slot.error.store(error, Relaxed);
                slot.files_done.store(self.files_done.load(Relaxed), Relaxed);
                let durable = if outcome.is_ok() { &slot.bytes_total } else { &self.durable };
                slot.bytes_durable.store(durable.load(Relaxed), Relaxed);
            });
            self.over.store(true, Relaxed);
        };
        let fill = |record: &Record| {
            record.kind.store(self.kind as u32, Relaxed);
            record.result.store(if outcome.is_ok() { 1 } else { 2 }, Relaxed);
            record.engine.store(self.slot.engine.load(Relaxed), Relaxed);
            record.threads.store(self.slot.threads.load(Relaxed), Relaxed);
            record.bytes.store(bytes, Relaxed);
            record.t_start_real_ns.store(self.begin_real, Relaxed);
            record.dur_ns.store(duration, Relaxed);
            record.sync_ns.store(closing.sync_begin.map_or(0, |begin| end - begin), Relaxed);
            record.peak_bps.store(peak, Relaxed);
            record.p50_us.store(quantile(&closing.histogram, 50, closing.longest), Relaxed);
            record.p99_us.store(quantile(&closing.histogram, 99, closing.longest), Relaxed);
            record.step.store(self.slot.step.load(Relaxed), Relaxed);
            record.error.store(error, Relaxed);
            record.flags.store(self.slot.flags.load(Relaxed), Relaxed);
            record.fallback_errno.store(self.slot.fallback_errno.load(Relaxed), Relaxed);
            record.label.copy(&self.slot.label);
            record.path.set_tail(&closing.path);
        };
        process::finish(self.segment, (self.number, self.id), self.kind, outcome.is_ok(), bytes, fill, close);
    }

    fn closing(&self) -> std::sync::MutexGuard<'_, Closing> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Operation {
    /// An operation that was not ended explicitly was abandoned after an error.
    fn drop(&mut self) {
        self.end(Err(None));
    }
}

/// The bucket of a latency in nanoseconds: 0 below the end of the first bucket, then one more per doubling.
pub(super) fn bucket_of(latency: u64) -> usize {
    let doublings = u64::BITS - (latency / FIRST_BUCKET).leading_zeros();
    (doublings as usize).min(BUCKETS - 1)
}

/// The latency in microseconds that `percent` of the requests do not exceed: the upper end of its bucket, or, for the
/// last bucket, which has no upper end, the `longest` latency (passed in nanoseconds).
pub(super) fn quantile(histogram: &[u64; BUCKETS], percent: u64, longest: u64) -> u32 {
    let all: u64 = histogram.iter().sum();
    let mut seen = 0;
    let bucket = histogram.iter().position(|count| {
        seen += count;
        seen > 0 && seen * 100 >= all * percent
    });
    let end = |bucket| if bucket == BUCKETS - 1 { longest } else { FIRST_BUCKET << bucket };
    bucket.map_or(0, |bucket| clamp(end(bucket) / 1000))
}

pub(super) fn clamp(value: impl TryInto<u32>) -> u32 {
    value.try_into().unwrap_or(u32::MAX)
}
