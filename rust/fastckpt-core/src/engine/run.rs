//! Runs a job: starts its workers, watches them, and reports what ran.

use std::io;
use std::time::Instant;

use super::choice::{Choice, default_threads};
use super::content::BATCH;
use super::io::backend::Backend;
use super::io::blocking::Blocking;
use super::io::fault::Faulty;
use super::io::object::IN_FLIGHT;
use super::io::uring;
use super::job::{Job, Progress, TICK};
use super::memory::Lent;
use super::options::{LOAD_STAGING_BUDGET, MOST_DEPTH, Options, STAGING_BUDGET};
use super::path::{IoPath, Reason};
use super::pool::in_threads;
use super::report::{Engine, Fallback, Fell, Ran};
use super::tell;
use super::worker::{self, Moved, Open, Shared, Staged, Stride};
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;
use crate::sys::buffers::size_within;
use crate::sys::mapping;
use crate::telemetry::{Operation, Phase, Planned};

/// Runs `job` to its end. The first failure stops all workers and is returned.
pub fn run<J: Job>(
    job: &J,
    choice: &Choice,
    options: &Options,
    block_size: u64,
    operation: &Operation,
    progress: Progress<'_>,
) -> Result<Ran> {
    let open = || {
        let (backend, refused): (Box<dyn Backend>, _) = match choice.engine {
            Engine::Uring => match uring::open() {
                Ok(ring) => (Box::new(ring), None),
                Err(reason) => (Box::new(Blocking::default()), Some(reason)),
            },
            Engine::Threads | Engine::Buffered => (Box::new(Blocking::default()), None),
        };
        match &options.faults {
            Some(plan) => (Box::new(Faulty::new(backend, plan.clone())) as Box<dyn Backend>, refused),
            None => (backend, refused),
        }
    };
    run_on(&open, job, choice, options, block_size, operation, progress)
}

/// Like [`run`], with backends that `open` makes.
pub(super) fn run_on<J: Job>(
    open: Open<'_>,
    job: &J,
    choice: &Choice,
    options: &Options,
    block_size: u64,
    operation: &Operation,
    progress: Progress<'_>,
) -> Result<Ran> {
    // Lent memory is used only if it holds at least one block.
    let lent = options
        .staging
        .as_ref()
        .filter(|memory| job.calls() && !job.is_stored() && memory.size() >= job.largest());
    let lent = lent.map(Lent::new).transpose()?;
    // A single thread is not enough here: even a few bytes may be in distant places.
    let few = job.blocks() > 1 && choice.threads == 1;
    let threads = if few { default_threads(choice.engine, options) } else { choice.threads };
    let (threads, staged) = staging(job, threads, options, lent.as_ref())?;
    let queue_depth = match choice.engine {
        // A worker that waits for the bandwidth limit cannot reap completions meanwhile.
        Engine::Uring if options.bandwidth_limit.is_some() => 1,
        Engine::Uring => options.queue_depth.clamp(1, MOST_DEPTH),
        Engine::Threads | Engine::Buffered => 1,
    };
    let (total, files) = (job.total(), job.files());
    operation.start(
        &Planned { bytes: total, files, block_size, threads, queue_depth },
        if J::WRITE { Phase::Write } else { Phase::Read },
    );
    tell::run(operation, choice.engine, choice.fallback.as_ref(), false);
    let shared = Shared::new(job, open, options, operation, (threads, queue_depth), (staged, lent));
    // A job of one blocking call needs no thread: a thread would cost more than the call, and there is nothing to
    // report meanwhile (except while waiting for a limit). A niceness stays with the thread that takes it, and the
    // calling thread has other work to do.
    let inline = job.blocks() <= 1
        && !job.waits()
        && !job.is_stored()
        && choice.engine != Engine::Uring
        && options.bandwidth_limit.is_none()
        && options.nice.is_none();
    let (started, refused) = if inline { (0, None) } else { run_threads(&shared, options, total, progress) };
    if started == 0 {
        run_inline(&shared, total, progress);
    }
    let mut moved = shared.outcome()?;
    let (engine, mut fallback) = match moved.refused.take() {
        Some(reason) => (Engine::Threads, Some(reason)),
        None => (choice.engine, choice.fallback.clone()),
    };
    if let Some(error) = refused.filter(|_| started == 0) {
        fallback = Some(without_workers(fallback, &error, options.nice));
    }
    Ok(conclude(moved, (engine, fallback), started.max(1), operation))
}

/// The fallback in a report if no thread could be started.
fn without_workers(before: Option<Fallback>, error: &io::Error, nice: Option<u8>) -> Fallback {
    let nice = nice.map_or_else(String::new, |nice| format!(", without nice={nice}"));
    let reason = format!(
        "no worker thread can be started ({error}): the calling thread did the work{nice}; \
         see `ulimit -u` and the cgroup's pids.max"
    );
    Fallback::after(before, Fell::Workers, error.raw_os_error().unwrap_or(libc::EAGAIN), &reason)
}

/// How many of `threads` workers get staging memory, and how they use it. If the memory is too small for the number of
/// threads that the caller requested, fails with the number of bytes needed.
fn staging<J: Job>(
    job: &J,
    threads: usize,
    options: &Options,
    lent: Option<&Lent>,
) -> Result<(usize, Staged)> {
    let usual = match (J::WRITE, job.is_stored()) {
        (true, _) => STAGING_BUDGET as usize,
        (_, true) => IN_FLIGHT,
        (_, false) => LOAD_STAGING_BUDGET as usize,
    };
    let (blocks, calls) = (job.blocks(), job.calls());
    let whole = mapping::size_for(job.largest()).unwrap_or(usize::MAX);
    let largest = if calls { job.largest().max(1).next_multiple_of(PAGE as usize) } else { whole };
    // While callbacks fill one half of a worker's memory, the other half is written or read.
    let each = if calls { 2 * lent.map_or(largest, |_| BATCH.max(largest)) } else { largest };
    let threads = threads.min(blocks).max(1);
    let asked = options.threads.map_or(0, |_| threads.saturating_mul(each));
    let budget = match (lent, options.most_staging) {
        (Some(lent), _) => lent.size(),
        (None, Some(most)) if (most as usize) < asked => {
            let needed = format!("{threads} threads need {asked} bytes of staging memory, {each} each");
            return Err(Error::Invalid(format!(
                "{needed}: staging={most} is too little; raise it or use fewer threads"
            )));
        }
        (None, Some(most)) => most as usize,
        (None, None) => usual.max(asked),
    };
    let threads = threads.clamp(1, (budget / each).max(1));
    let room = budget / threads;
    if !calls {
        return Ok((threads, Staged { room, largest, batch: 0, buffers: None, strides: None }));
    }
    let batch = BATCH.min(room / 2).max(largest);
    if !J::WRITE {
        // Blocks arrive in any order, so each has a separate buffer.
        let size = size_within(largest, room);
        let buffers = lent.map(|_| (size, room / size));
        let largest = if lent.is_some() { largest } else { whole };
        return Ok((threads, Staged { room, largest, batch, buffers, strides: None }));
    }
    let mut strides: Vec<Stride> = Vec::new();
    for block in 0..blocks {
        let bytes = job.fetched(block).unwrap_or(0);
        match strides.last_mut() {
            // A stride is within one file: if its first block waited for another file to be closed, a block of that
            // file behind it would keep that file open.
            Some(last)
                if bytes > 0
                    && last.bytes > 0
                    && last.bytes + bytes <= batch
                    && job.file(last.blocks.start) == job.file(block) =>
            {
                last.blocks.end += 1;
                last.bytes += bytes;
            }
            _ => strides.push(Stride { blocks: block..block + 1, bytes }),
        }
    }
    let longest = strides.iter().map(|stride| stride.bytes).max().unwrap_or(0);
    let size = size_within(longest.max(largest), room);
    let (threads, buffers) = (threads.min(strides.len()).max(1), Some((size, (room / size).max(1))));
    Ok((threads, Staged { room, largest, batch, buffers, strides: Some(strides) }))
}

/// Sums up what ran, and reports it to the monitor.
fn conclude(
    moved: Moved,
    (mut engine, mut fallback): (Engine, Option<Fallback>),
    threads: usize,
    operation: &Operation,
) -> Ran {
    let Moved { blocks, copied, thread_bytes, .. } = moved;
    let buffered = blocks.on(IoPath::Buffered);
    let direct = blocks.on(IoPath::ZeroCopy) + blocks.on(IoPath::Staged);
    if engine != Engine::Buffered && buffered > 0 && direct == 0 {
        engine = Engine::Buffered;
        if blocks.of(IoPath::Buffered, Reason::Refused) > 0 {
            let reason = "direct I/O: refused by this file system";
            fallback = Some(Fallback::after(fallback, Fell::Direct, libc::EINVAL, reason));
        }
    }
    let ran = Ran { engine, fallback, threads, thread_bytes, blocks, copied };
    tell::end(operation, &ran);
    ran
}

/// Starts the workers and waits for them. Returns how many started, and an error if not all did.
fn run_threads<J: Job>(
    shared: &Shared<'_, J>,
    options: &Options,
    total: u64,
    progress: Progress<'_>,
) -> (usize, Option<io::Error>) {
    let work = |number: usize| worker::attempt(shared, number, options.nice, &mut || {});
    in_threads("fastckpt", shared.threads, &work, &mut || watch(shared, total, progress))
}

/// Does the work on the calling thread.
fn run_inline<J: Job>(shared: &Shared<'_, J>, total: u64, progress: Progress<'_>) {
    let mut last = Instant::now();
    worker::attempt(shared, 0, None, &mut || {
        if last.elapsed() >= TICK {
            watch(shared, total, progress);
            last = Instant::now();
        }
    });
    if !shared.stopped() && !progress(shared.operation.done(), total) {
        shared.fail(Error::Interrupted);
    }
}

/// The calling thread's recurring work: reports progress, and notices an interrupt.
fn watch<J: Job>(shared: &Shared<'_, J>, total: u64, progress: Progress<'_>) {
    let done = shared.operation.done();
    if J::WRITE && done == total {
        shared.operation.phase(Phase::Fsync);
    }
    shared.operation.tick();
    if !shared.stopped() && !progress(done, total) {
        shared.fail(Error::Interrupted);
    }
}
