//! The entry of one worker in the live counters.

use std::cell::Cell;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::clock::now;
use super::codes::State;
use super::layout::{BUCKETS, ThreadSlot, UNSEEN};
use super::operation::{Operation, bucket_of, clamp};
use super::{process, seqlock};

/// The counters of one worker. They have one writer, which uses plain loads and stores.
#[derive(Debug)]
pub struct Lane<'a> {
    operation: &'a Operation,
    pub(super) slot: &'static ThreadSlot,
    number: Option<usize>,
    /// Bytes that the worker moved.
    bytes: Cell<u64>,
    /// For each kind of wait, the nanoseconds that do not make up a full millisecond in the slot yet.
    rest: [Cell<u64>; 3],
    pub(super) histogram: [u64; BUCKETS],
}

/// Adds to a counter whose only writer is the calling thread.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(value), Relaxed);
}

/// Adds nanoseconds to a counter of milliseconds. `rest` keeps the remainder.
fn add_milliseconds(counter: &AtomicU32, rest: &Cell<u64>, nanoseconds: u64) {
    let all = rest.get() + nanoseconds;
    rest.set(all % 1_000_000);
    counter.store(counter.load(Relaxed).wrapping_add((all / 1_000_000) as u32), Relaxed);
}

impl<'a> Lane<'a> {
    /// Takes a slot for the calling thread, a worker of `operation`.
    #[must_use]
    pub fn new(operation: &'a Operation) -> Self {
        let number = process::take_thread(operation.segment);
        let slot = number.map_or(&UNSEEN.threads[0], |number| &operation.segment.threads[number]);
        seqlock::hand_over(&slot.op_id, operation.id, || {
            for zero in [&slot.in_flight, &slot.state, &slot.file] {
                zero.store(0, Relaxed);
            }
            slot.op_slot.store(operation.number, Relaxed);
            slot.latency_max_ns.store(0, Relaxed);
            slot.bytes_op.store(0, Relaxed);
            slot.tid.store(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs(), Relaxed);
            slot.cpu.store(rustix::thread::sched_getcpu() as u32, Relaxed);
        });
        let rest = [const { Cell::new(0) }; 3];
        Self { operation, slot, number, bytes: Cell::new(0), rest, histogram: [0; BUCKETS] }
    }

    /// The worker's operation.
    #[must_use]
    pub fn operation(&self) -> &'a Operation {
        self.operation
    }

    /// Sets the state of the worker.
    pub fn state(&self, state: State) {
        self.slot.state.store(state as u32, Relaxed);
    }

    /// Records a request of `bytes` to the kernel. Returns the time, to be passed to [`Lane::completed`].
    pub fn submitted(&mut self, bytes: u64) -> u64 {
        let now = now();
        self.slot.in_flight.store(self.slot.in_flight.load(Relaxed) + 1, Relaxed);
        self.slot.state.store(State::Transfer as u32, Relaxed);
        add(&self.slot.bytes_submitted, bytes);
        now
    }

    /// Records the completion of a request that was `submitted` at this time.
    pub fn completed(&mut self, submitted: u64) {
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
        self.slot.last_progress_mono_ns.store(now, Release);
    }

    /// Records that `bytes` of the operation are done.
    pub fn moved(&self, bytes: u64) {
        add(&self.slot.bytes_ever, bytes);
        add(&self.slot.bytes_op, bytes);
        self.bytes.set(self.bytes.get() + bytes);
        self.operation.moved(bytes);
    }

    /// Bytes of the operation that this worker moved.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// The worker waits for requests. Returns the time, to be passed to [`Lane::waited`].
    #[must_use]
    pub fn wait(&self) -> u64 {
        self.state(State::Transfer);
        now()
    }

    /// Records that the worker has waited for requests since `since`.
    pub fn waited(&self, since: u64) {
        add(&self.slot.busy_ns, now().saturating_sub(since));
    }

    /// Records that the source has delivered the request begun at `since`.
    pub fn prepared(&self, since: u64) {
        add(&self.slot.source_wait_ns, now().saturating_sub(since));
    }

    /// Runs `action`, during which the worker only waits, and counts the time as a wait of this kind.
    pub fn during<T>(&self, state: State, action: impl FnOnce() -> T) -> T {
        self.state(state);
        let begin = now();
        let outcome = action();
        let waited = now().saturating_sub(begin);
        let [limit, fsync, peers] = &self.rest;
        match state {
            State::Limit => add_milliseconds(&self.slot.limit_wait_ms, limit, waited),
            State::Fsync => add_milliseconds(&self.slot.fsync_wait_ms, fsync, waited),
            State::Peers => add_milliseconds(&self.slot.peer_wait_ms, peers, waited),
            State::Transfer => add(&self.slot.busy_ns, waited),
            State::Idle | State::Source | State::Error => {}
        }
        outcome
    }

    /// Records that a request will be tried again.
    pub fn retried(&self) {
        self.slot.retries.store(self.slot.retries.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// Records that a request moved fewer bytes than it should have.
    pub fn short(&self) {
        self.slot.shorts.store(self.slot.shorts.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// Records that a request failed.
    pub fn failed(&self) {
        self.slot.errors.store(self.slot.errors.load(Relaxed).wrapping_add(1), Relaxed);
        self.state(State::Error);
    }

    /// The worker begins to prepare a block of shard `file`. Returns the time, to be passed to [`Lane::prepared`].
    #[must_use]
    pub fn begin(&self, file: usize) -> u64 {
        self.slot.file.store(clamp(file), Relaxed);
        self.state(State::Source);
        now()
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        self.operation.add_latencies(&self.histogram, self.slot.latency_max_ns.load(Relaxed));
        self.slot.in_flight.store(0, Relaxed);
        self.slot.state.store(State::Idle as u32, Relaxed);
        if let Some(number) = self.number {
            process::give_thread(self.operation.segment, number);
        }
    }
}
