//! Tests of workers on files in memory.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use super::choice::Choice;
use super::io::backend::Backend;
use super::io::fault::{Fault, FaultPlan, Faulty};
use super::io::files::{OpenFile, OpenFiles, ShardFile};
use super::io::memory::{Memory, Operation, Stored};
use super::io::transfer::Transfer;
use super::job::{Job, Next, Progress, Staging, Start};
use super::options::{Io, Options};
use super::path::{IoPath, Reason};
use super::report::{Engine, Fallback, Fell, Ran};
use super::run::run_on;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;
use crate::sys::dealt::Dealt;
use crate::sys::file::DataFile;
use crate::sys::gather::Buf;
use crate::telemetry::{self, Kind, Lane};

const PAGES: usize = PAGE as usize;
const BLOCK: usize = 3 * PAGES;
/// Four blocks, a page and 100 bytes, so that the last block has a tail.
const BYTES: usize = 4 * BLOCK + PAGES + 100;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Moves a file with that pattern, block by block.
struct Blocks<const WRITE: bool> {
    bytes: usize,
    file: Arc<OpenFile>,
    strict: bool,
    /// The bytes that were read.
    read: Mutex<Vec<u8>>,
    /// Whether the first completed block must be moved again.
    again: AtomicBool,
    /// The channel that the first block waits for.
    held: Mutex<Option<mpsc::Receiver<()>>>,
}

impl<const WRITE: bool> Blocks<WRITE> {
    fn new(bytes: usize, direct: bool) -> Self {
        let files = OpenFiles::new([1]);
        let file = files.acquire(0, || Ok(ShardFile::Local(DataFile::unused(direct)))).unwrap().unwrap();
        let (again, held) = (AtomicBool::new(false), Mutex::new(None));
        Self { bytes, file, strict: false, read: Mutex::new(vec![0; bytes]), again, held }
    }

    fn transfer(&self, block: usize, path: (IoPath, Reason), staging: Staging<'_>) -> Result<Transfer> {
        let offset = block * BLOCK;
        let need = BLOCK.min(self.bytes - offset);
        let direct = path.0 != IoPath::Buffered;
        let len = if direct && !WRITE { need.next_multiple_of(PAGE as usize) } else { need };
        let mut slab = staging(len)?;
        slab[..len].fill(0);
        if WRITE {
            slab[..need].copy_from_slice(&pattern(self.bytes)[offset..offset + need]);
        }
        let file = (Arc::clone(&self.file), offset as u64);
        let transfer = Transfer::new(block, WRITE, file, Buf::staged(slab, len), path);
        let need = transfer.need.min(need);
        Ok(Transfer { need, copied: 1, ..transfer })
    }
}

impl<const WRITE: bool> Job for Blocks<WRITE> {
    const WRITE: bool = WRITE;

    fn blocks(&self) -> usize {
        self.bytes.div_ceil(BLOCK)
    }

    fn files(&self) -> usize {
        1
    }

    fn total(&self) -> u64 {
        self.bytes as u64
    }

    fn file(&self, _: usize) -> usize {
        0
    }

    fn largest(&self) -> usize {
        BLOCK
    }

    fn start(&self, block: usize, _: &mut Option<Dealt>, staging: Staging<'_>) -> Result<Start> {
        if let Some(held) = self.held.lock().unwrap().take() {
            let _ = held.recv();
        }
        let direct = self.file.is_direct();
        let path = match direct && BLOCK.min(self.bytes - block * BLOCK) >= PAGES {
            true => (IoPath::Staged, Reason::Small),
            false if direct => (IoPath::Buffered, Reason::Remainder),
            false => (IoPath::Buffered, Reason::Refused),
        };
        self.transfer(block, path, staging).map(Start::Now)
    }

    fn finish(&self, transfer: &mut Transfer, outcome: io::Result<()>, lane: &Lane<'_>) -> Result<Next> {
        outcome.map_err(|error| Error::transfer("move", Path::new("file"), error, self.strict))?;
        if self.again.swap(false, Ordering::Relaxed) {
            let mut staging = |len| Ok(crate::sys::slabs::take(len).unwrap());
            return self
                .transfer(transfer.block, (IoPath::Staged, Reason::Changed), &mut staging)
                .map(Next::Again);
        }
        let offset = transfer.block * BLOCK;
        let len = BLOCK.min(self.bytes - offset);
        if !WRITE {
            self.read.lock().unwrap()[offset..offset + len].copy_from_slice(&transfer.buf.slab()[..len]);
        }
        lane.moved(len as u64);
        Ok(Next::Done)
    }
}

/// Runs `job` on `stored` with this many threads, under `faults`.
fn run<const WRITE: bool>(
    job: &Blocks<WRITE>,
    stored: &Arc<Mutex<Stored>>,
    threads: usize,
    faults: Option<&FaultPlan>,
    progress: Progress<'_>,
) -> Result<Ran> {
    let options = Options { threads: Some(threads), ..Options::default() };
    run_with(job, stored, options, faults, progress)
}

/// Like [`run`], with these options.
fn run_with<const WRITE: bool>(
    job: &Blocks<WRITE>,
    stored: &Arc<Mutex<Stored>>,
    options: Options,
    faults: Option<&FaultPlan>,
    progress: Progress<'_>,
) -> Result<Ran> {
    let open = || {
        let memory: Box<dyn Backend> = Box::new(Memory::on(stored));
        let backend: Box<dyn Backend> = match faults {
            Some(plan) => Box::new(Faulty::new(memory, plan.clone())),
            None => memory,
        };
        (backend, None)
    };
    let io = if job.strict { Io::Direct } else { Io::Auto };
    let options = Options { io, ..options };
    let threads = options.threads.unwrap_or(1);
    // Uses the queue depth of a ring without a ring: `open` makes the backends.
    let choice = Choice { engine: Engine::Uring, fallback: None, threads };
    let kind = if WRITE { Kind::Save } else { Kind::Load };
    let operation = telemetry::Operation::begin(
        kind,
        Path::new("/nowhere/run"),
        telemetry::Call::default(),
        &Environment::default(),
    );
    run_on(&open, job, &choice, &options, BLOCK as u64, &operation, progress)
}

/// Writes, then reads, each under the faults of `plan`, and compares. Returns what ran, and how many faults were met.
fn round_trip(bytes: usize, threads: usize, plan: impl Fn() -> Option<FaultPlan>) -> ([Ran; 2], usize) {
    let (stored, plans) = (Memory::of(Vec::new()), [plan(), plan()]);
    let writing = Blocks::<true>::new(bytes, true);
    let written = run(&writing, &stored, threads, plans[0].as_ref(), &mut |_, _| true).unwrap();
    assert!(stored.lock().unwrap().bytes == pattern(bytes), "written");
    let reading = Blocks::<false>::new(bytes, true);
    let read = run(&reading, &stored, threads, plans[1].as_ref(), &mut |_, _| true).unwrap();
    assert!(*reading.read.lock().unwrap() == pattern(bytes), "read");
    ([written, read], plans.iter().flatten().filter(|plan| plan.struck()).count())
}

fn go_on(_: u64, _: u64) -> bool {
    true
}

#[test]
fn every_byte_moves_and_each_worker_counts_its_own() {
    for threads in [1, 3] {
        for bytes in [BYTES, 2 * BLOCK, BLOCK + 1, 1] {
            let (both, _) = round_trip(bytes, threads, || None);
            for ran in both {
                assert_eq!(ran.thread_bytes.iter().sum::<u64>(), bytes as u64);
                assert!(ran.thread_bytes.len() <= ran.threads && ran.threads <= threads);
            }
        }
    }
}

#[test]
fn short_and_interrupted_transfers_go_on_where_they_stopped() {
    let shorts = [1, 512, PAGES, PAGES + 1].map(Fault::Short);
    for fault in shorts.into_iter().chain([libc::EINTR, libc::EAGAIN].map(Fault::Errno)) {
        for before in 0..6 {
            let (_, struck) = round_trip(BYTES, 2, || Some(FaultPlan::new(before, fault, false)));
            assert!(before > 4 || struck == 2, "{fault:?} after {before}");
        }
    }
    let ([written, _], _) = round_trip(BYTES, 2, || Some(FaultPlan::new(0, Fault::Short(512), true)));
    assert_eq!(written.blocks.of(IoPath::Buffered, Reason::Remainder), 5, "less than a page was moved");
    let ([written, _], _) = round_trip(BYTES, 2, || Some(FaultPlan::new(0, Fault::Short(PAGES), true)));
    assert_eq!(written.blocks.on(IoPath::Staged), 5, "each transfer moves one page");
}

#[test]
fn what_is_refused_for_the_moment_for_ever_ends() {
    let job = Blocks::<true>::new(BYTES, true);
    let plan = FaultPlan::new(1, Fault::Errno(libc::EAGAIN), true);
    let error = run(&job, &Memory::of(Vec::new()), 2, Some(&plan), &mut go_on).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EAGAIN));
}

#[test]
fn direct_io_that_is_refused_in_mid_file_goes_through_the_page_cache_from_there() {
    // Four operations are in flight when the refusal comes.
    for (blocks, before, counted) in [(4, 0, (3, 1)), (4, 2, (3, 1)), (8, 0, (3, 5)), (8, 5, (5, 3))] {
        let plan = || Some(FaultPlan::new(before, Fault::Errno(libc::EINVAL), false));
        let (both, _) = round_trip(blocks * BLOCK, 1, plan);
        for ran in both {
            let refused = ran.blocks.of(IoPath::Buffered, Reason::Refused);
            assert_eq!((ran.blocks.on(IoPath::Staged), refused), counted, "{blocks} blocks, {before} before");
            assert_eq!((ran.engine, ran.fallback), (Engine::Uring, None));
        }
    }
}

#[test]
fn a_file_system_that_refuses_the_first_operation_is_reported_as_buffered() {
    let (both, _) = round_trip(BLOCK, 1, || Some(FaultPlan::new(0, Fault::Errno(libc::EINVAL), false)));
    for ran in both {
        let reason = "direct I/O: refused by this file system".to_owned();
        let fallback = Some(Fallback::after(None, Fell::Direct, libc::EINVAL, &reason));
        assert_eq!((ran.engine, ran.fallback), (Engine::Buffered, fallback));
    }
}

#[test]
fn a_file_that_does_not_open_for_direct_io_is_reported_as_buffered() {
    let job = Blocks::<true>::new(BYTES, false);
    let ran = run(&job, &Memory::of(Vec::new()), 2, None, &mut go_on).unwrap();
    assert_eq!((ran.engine, ran.fallback.unwrap().errno), (Engine::Buffered, libc::EINVAL));
    assert_eq!(ran.copied, BYTES as u64 + 5, "copied by the kernel, plus the job's own 5");
}

#[test]
fn where_direct_io_is_demanded_its_refusal_is_the_error() {
    for fault in [Fault::Errno(libc::EINVAL), Fault::Short(512)] {
        let job = Blocks::<true> { strict: true, ..Blocks::new(4 * BLOCK, true) };
        let plan = FaultPlan::new(1, fault, false);
        let error = run(&job, &Memory::of(Vec::new()), 1, Some(&plan), &mut go_on).unwrap_err();
        let text = error.to_string();
        assert_eq!(text.contains("use direct I/O"), fault == Fault::Errno(libc::EINVAL), "{text}");
        assert!(job.file.is_direct());
    }
}

#[test]
fn the_tail_is_an_operation_of_its_own_that_comes_first() {
    let stored = Memory::of(Vec::new());
    let job = Blocks::<true>::new(PAGES + 100, true);
    let ran = run(&job, &stored, 1, None, &mut go_on).unwrap();
    let operation = |offset: usize, len, direct| Operation { offset: offset as u64, len, direct };
    let operations = std::mem::take(&mut stored.lock().unwrap().operations);
    assert_eq!(operations, [operation(PAGES, 100, false), operation(0, PAGES, true)]);
    assert_eq!((ran.blocks.on(IoPath::Staged), ran.blocks.on(IoPath::Buffered)), (1, 0));
    // The tail can fail, too.
    let plan = FaultPlan::new(0, Fault::Errno(libc::EIO), false);
    let error = run(&job, &stored, 1, Some(&plan), &mut go_on).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EIO));
    stored.lock().unwrap().operations.clear();
    run(&job, &stored, 1, Some(&FaultPlan::new(0, Fault::Short(30), false)), &mut go_on).unwrap();
    let operations = std::mem::take(&mut stored.lock().unwrap().operations);
    let expected = [operation(PAGES, 30, false), operation(PAGES + 30, 70, false), operation(0, PAGES, true)];
    assert_eq!(operations, expected);
}

#[test]
fn a_block_that_has_to_be_moved_once_more_counts_once() {
    let stored = Memory::of(Vec::new());
    let job = Blocks::<true> { again: AtomicBool::new(true), ..Blocks::new(2 * BLOCK, true) };
    let ran = run(&job, &stored, 1, None, &mut go_on).unwrap();
    assert_eq!(stored.lock().unwrap().operations.len(), 3);
    let counted = [Reason::Changed, Reason::Small].map(|reason| ran.blocks.of(IoPath::Staged, reason));
    assert_eq!((counted, ran.copied), ([1, 1], 3));
    assert!(stored.lock().unwrap().bytes == pattern(2 * BLOCK));
}

#[test]
fn what_fails_in_one_worker_ends_them_all() {
    for threads in [1, 3] {
        for (fault, before) in [(Fault::Panic, 0), (Fault::Panic, 3), (Fault::Errno(libc::ENOSPC), 2)] {
            let job = Blocks::<true>::new(200 * BLOCK, true);
            let plan = FaultPlan::new(before, fault, true);
            let error = run(&job, &Memory::of(Vec::new()), threads, Some(&plan), &mut go_on).unwrap_err();
            match fault {
                Fault::Panic => {
                    assert!(matches!(&error, Error::Panic(text) if text == "injected"), "{error}");
                }
                _ => assert_eq!(error.errno(), Some(libc::ENOSPC)),
            }
        }
    }
}

#[test]
fn a_tick_that_says_no_interrupts() {
    // The first block waits until progress is reported for the first time.
    let (release, held) = mpsc::channel();
    let job = Blocks::<true> { held: Mutex::new(Some(held)), ..Blocks::new(BYTES, true) };
    let mut asked = Vec::new();
    let mut progress = |done, total| {
        asked.push((done, total));
        let _ = release.send(());
        false
    };
    let error = run(&job, &Memory::of(Vec::new()), 1, None, &mut progress).unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");
    assert_eq!(asked, [(0, BYTES as u64)]);
}

#[test]
fn a_file_that_is_too_short_ends_the_read() {
    let stored = Memory::of(pattern(BLOCK + 50));
    let job = Blocks::<false>::new(2 * BLOCK, false);
    let error = run(&job, &stored, 1, None, &mut go_on).unwrap_err();
    assert!(matches!(&error, Error::Io { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof));
}

#[test]
fn bytes_in_flight_stay_within_their_limit() {
    for (in_flight, most) in [(None, 4), (Some(8 * BLOCK), 4), (Some(2 * BLOCK), 2), (Some(1), 1)] {
        let (stored, job) = (Memory::of(Vec::new()), Blocks::<true>::new(20 * BLOCK, true));
        let in_flight = in_flight.map(|bytes| bytes as u64);
        let options = Options { threads: Some(1), in_flight, ..Options::default() };
        run_with(&job, &stored, options, None, &mut go_on).unwrap();
        assert!(stored.lock().unwrap().bytes == pattern(20 * BLOCK));
        assert_eq!(stored.lock().unwrap().most, most * BLOCK, "{in_flight:?}");
    }
}
