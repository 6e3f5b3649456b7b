//! The segment of this process, and which of its slots are in use. The segment is created when the first operation
//! begins. It is created anew after a fork, or when its file was removed. Everything here runs when an operation or a
//! worker begins or ends, never in between.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::fs::stat;

use super::clock::{now, time_of_day};
use super::codes::Kind;
use super::group;
use super::layout::{
    HISTORY, Header, MAGIC, MAJOR, MINOR, NO_SLOT, OPERATIONS, OperationSlot, Record, Segment, THREADS,
    ThreadSlot, UNSEEN, empty,
};
use super::{seqlock, target};
use crate::environment::Environment;
use crate::sys::mounts::{local, mounts};
use crate::sys::shm::{self, Shared};

/// The number of names to try: processes of several PID namespaces may share a directory.
const NAMES: u32 = 16;

/// The process's record, for a caller that has already used it. A fork cannot have left the lock locked, because this
/// process held the lock at that time.
fn lock_for_certain() -> MutexGuard<'static, Option<Process>> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the targets of the process for saves and for loads, in bytes/s per GPU. 0 means no target.
pub fn set_target(save: u64, load: u64) {
    target::set(save, load);
    with_segment(|segment| {
        segment.process.target_save.store(save, Relaxed);
        segment.process.target_load.store(load, Relaxed);
    });
}

/// Reports to the monitor that this process is `rank` of a group of `size` processes. `id` is not 0, equal in all
/// processes of the group, and different from the ids of all other groups.
pub fn set_group(id: u64, rank: u32, size: u32) {
    group::set(id, rank, size);
    with_segment(|segment| group::fill(&segment.process));
}

/// Reports to the monitor that this process waits for a rank of its group, or that it no longer waits.
pub fn wait_for(rank: Option<u32>) {
    group::wait_for(rank);
    with_segment(|segment| group::fill(&segment.process));
}

/// Reports to the monitor which shares of the model's and of the optimizer's bytes the save of `step` found changed;
/// `None` if unknown.
#[expect(clippy::cast_sign_loss, reason = "a share is clamped to what is positive")]
pub fn set_changed(step: i64, model: Option<f64>, optimizer: Option<f64>) {
    let [model, optimizer] = [model, optimizer].map(|share| {
        // Stores millionths, rounded up, so that only a share of 0 is shown as 0.
        share.map_or(0, |share| 1 + (share.clamp(0.0, 1.0) * 1e6).ceil() as u64)
    });
    with_segment(|segment| {
        // A reader that sees these shares also sees the step that they belong to.
        let Segment { process, .. } = segment;
        seqlock::hand_over(&process.changed, optimizer << 32 | model, || {
            process.changed_step.store(step, Relaxed);
        });
    });
}

/// Shows a warning of this process in the monitor: up to 64 bytes.
pub fn warn(text: &str) {
    with_segment(|segment| {
        let process = &segment.process;
        // A reader that sees the new number also sees the text of the warning.
        seqlock::hand_over(&process.warned, process.warned.load(Relaxed) + 1, || process.warning.set(text));
    });
}

/// Changes the segment of this process, if it has one.
fn with_segment(change: impl FnOnce(&Segment)) {
    let Some(guard) = lock() else { return };
    if let Some(process) = guard.as_ref().filter(|process| process.pid == std::process::id()) {
        change(process.segment);
    }
}

/// The facts about a process's own segment.
struct Process {
    pid: u32,
    segment: &'static Segment,
    /// The path and identity of its file, if other processes can see it.
    file: Option<(PathBuf, (u64, u64))>,
    generation: u32,
    /// The number of operations that have ever begun.
    operations: u64,
    running: u32,
    /// Thread slots in use, one bit each.
    threads: u64,
}

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);
/// Why a directory was not tried; `None` once a directory holds the segment.
static REFUSED: Mutex<Option<String>> = Mutex::new(None);

/// Why the counters of this process are not in their intended directory, if its file system is the reason.
#[must_use]
pub fn refused() -> Option<String> {
    REFUSED.try_lock().ok()?.clone()
}

/// The process's record. `None` if the lock is not available, as in a child that was forked while a thread held it.
fn lock() -> Option<MutexGuard<'static, Option<Process>>> {
    (0..1000).find_map(|_| match PROCESS.try_lock() {
        Ok(process) => Some(process),
        Err(TryLockError::Poisoned(process)) => Some(process.into_inner()),
        Err(TryLockError::WouldBlock) => {
            std::thread::yield_now();
            None
        }
    })
}

impl Process {
    /// Creates a segment for this process, with the totals and the history of the one before.
    fn new(environment: &Environment, before: Option<&Self>) -> Self {
        let generation = before.map_or(1, |before| before.generation + 1);
        let prepare = |segment: &Segment| {
            let targets = target::targets(environment);
            segment.process.target_save.store(targets.0, Relaxed);
            segment.process.target_load.store(targets.1, Relaxed);
            group::fill(&segment.process);
            if let Some(before) = before {
                inherit(segment, before.segment);
            }
        };
        let off = environment.text("FASTCKPT_TOP") == Some("0");
        let published = if off { None } else { publish(environment, generation, prepare) };
        let (segment, file) = match published {
            Some((path, Shared { segment, file })) => (segment, Some((path, file))),
            None => (&UNSEEN, None),
        };
        Self {
            pid: std::process::id(),
            segment,
            file,
            generation,
            operations: before.map_or(0, |before| before.operations),
            running: 0,
            threads: 0,
        }
    }
}

/// Copies totals and history into a new segment.
fn inherit(segment: &Segment, old: &Segment) {
    let (new, old_totals) = (&segment.process, &old.process);
    for (to, from) in [
        (&new.bytes_written, &old_totals.bytes_written),
        (&new.bytes_read, &old_totals.bytes_read),
        (&new.saves_ok, &old_totals.saves_ok),
        (&new.saves_failed, &old_totals.saves_failed),
        (&new.loads_ok, &old_totals.loads_ok),
        (&new.loads_failed, &old_totals.loads_failed),
        (&new.verifies_ok, &old_totals.verifies_ok),
        (&new.verifies_failed, &old_totals.verifies_failed),
        (&new.bytes_copied, &old_totals.bytes_copied),
        (&new.copies_ok, &old_totals.copies_ok),
        (&new.copies_failed, &old_totals.copies_failed),
        (&new.ops_unslotted, &old_totals.ops_unslotted),
        (&new.hist_head, &old_totals.hist_head),
    ] {
        to.store(from.load(Relaxed), Relaxed);
    }
    new.changed_step.store(old_totals.changed_step.load(Relaxed), Relaxed);
    new.changed.store(old_totals.changed.load(Relaxed), Relaxed);
    new.warning.copy(&old_totals.warning);
    new.warned.store(old_totals.warned.load(Relaxed), Relaxed);
    for (to, from) in segment.history.iter().zip(&old.history) {
        to.copy(from);
    }
}

/// When a slot became free; `None` if it is in use. Slots that were never used come first, then those whose operations
/// ended first.
fn free_since(slot: &OperationSlot) -> Option<u64> {
    let end = slot.t_end_mono_ns.load(Acquire);
    (slot.op_id.load(Acquire) == 0 || end != 0).then_some(end)
}

/// This process's record, with its own segment. Replaces the segment if its file was removed, unless an operation is
/// running.
fn current<'a>(process: &'a mut Option<Process>, environment: &Environment) -> &'a mut Process {
    let pid = std::process::id();
    match process.take() {
        // A forked child inherits the record but not the memory, so it must not access the segment.
        Some(known) if known.pid != pid => *process = Some(Process::new(environment, None)),
        Some(known) => {
            let lost = known.file.as_ref().is_some_and(|(path, file)| !shm::still_there(path, *file));
            if lost && known.running == 0 {
                *process = Some(Process::new(environment, Some(&known)));
            } else {
                *process = Some(known);
            }
        }
        None => *process = Some(Process::new(environment, None)),
    }
    process.get_or_insert_with(|| Process::new(environment, None))
}

/// Takes an operation slot. Returns the segment, the number of the slot in it ([`NO_SLOT`] if none is free), and the
/// number of the operation.
pub(super) fn take_operation(environment: &Environment) -> (&'static Segment, u32, u64) {
    let Some(mut guard) = lock() else { return (&UNSEEN, NO_SLOT, 0) };
    let process = current(&mut guard, environment);
    process.operations += 1;
    process.running += 1;
    let segment = process.segment;
    segment.process.state.store(1, Relaxed);
    let slots = segment.operations.iter().enumerate();
    let free = slots.filter_map(|(number, slot)| Some((free_since(slot)?, number))).min();
    let Some((_, number)) = free else {
        segment.process.ops_unslotted.fetch_add(1, Relaxed);
        return (segment, NO_SLOT, process.operations);
    };
    // From here on the slot is taken: neither unused nor ended.
    let slot = &segment.operations[number];
    // The number stays odd until the operation first writes its slot, which still holds values of an earlier operation.
    seqlock::open(&slot.seq);
    slot.t_end_mono_ns.store(0, Relaxed);
    slot.op_id.store(process.operations, Release);
    (segment, number as u32, process.operations)
}

/// Takes a free thread slot of `segment`.
pub(super) fn take_thread(segment: &'static Segment) -> Option<usize> {
    let mut guard = lock()?;
    let process = guard.as_mut().filter(|process| std::ptr::eq(process.segment, segment))?;
    let number = process.threads.trailing_ones() as usize;
    if number >= THREADS {
        return None;
    }
    process.threads |= 1 << number;
    segment.process.threads_used.fetch_max(number as u64 + 1, Relaxed);
    Some(number)
}

/// Frees slot `number`, because its worker has ended.
pub(super) fn give_thread(segment: &'static Segment, number: usize) {
    let mut guard = lock_for_certain();
    if let Some(process) = guard.as_mut().filter(|process| std::ptr::eq(process.segment, segment)) {
        process.threads &= !(1 << number);
    }
}

/// Whether another thread holds the lock under which slots are handed out.
#[cfg(test)]
pub(super) fn is_locked() -> bool {
    PROCESS.try_lock().is_err()
}

/// Closes an operation: fills its history record, closes its slot (`close`), and updates totals and state. A slot is
/// free as soon as it shows the end of its operation, so the lock is released after all accesses to the slot.
pub(super) fn finish(
    segment: &'static Segment,
    (number, id): (u32, u64),
    kind: Kind,
    ok: bool,
    bytes: u64,
    fill: impl FnOnce(&Record),
    close: impl FnOnce(),
) {
    let mut guard = lock();
    let process = guard.as_mut().and_then(|guard| guard.as_mut());
    let Some(process) = process.filter(|process| std::ptr::eq(process.segment, segment)) else {
        return close();
    };
    process.running = process.running.saturating_sub(1);
    let totals = &segment.process;
    if number != NO_SLOT {
        let head = totals.hist_head.load(Relaxed);
        let record = &segment.history[(head % HISTORY as u64) as usize];
        seqlock::hand_over(&record.op_id, id, || fill(record));
        totals.hist_head.store(head + 1, Release);
    }
    close();
    let (moved, counter) = match (kind, ok) {
        (Kind::Save, true) => (&totals.bytes_written, &totals.saves_ok),
        (Kind::Save, false) => (&totals.bytes_written, &totals.saves_failed),
        (Kind::Load, true) => (&totals.bytes_read, &totals.loads_ok),
        (Kind::Load, false) => (&totals.bytes_read, &totals.loads_failed),
        (Kind::Verify, true) => (&totals.bytes_read, &totals.verifies_ok),
        (Kind::Verify, false) => (&totals.bytes_read, &totals.verifies_failed),
        (Kind::Copy | Kind::Drain | Kind::Fetch, true) => (&totals.bytes_copied, &totals.copies_ok),
        (Kind::Copy | Kind::Drain | Kind::Fetch, false) => (&totals.bytes_copied, &totals.copies_failed),
    };
    moved.fetch_add(bytes, Relaxed);
    counter.fetch_add(1, Relaxed);
    if process.running == 0 {
        totals.state.store(0, Relaxed);
    }
    if let Some((path, file)) = &process.file {
        let _ = shm::still_there(path, *file);
    }
}

/// The directories where this process may publish its counters, in order. Each comes with its path without symbolic
/// links, or with the reason why it is not tried.
#[must_use]
pub fn places(environment: &Environment) -> Vec<(PathBuf, Result<PathBuf, String>)> {
    let variable = |name| environment.get(name).map(PathBuf::from);
    let directories = variable("FASTCKPT_TOP_DIR").map_or_else(
        || {
            let shared = PathBuf::from(format!("/dev/shm/fastckpt-{}", rustix::process::geteuid().as_raw()));
            let runtime = variable("XDG_RUNTIME_DIR").map(|directory| directory.join("fastckpt"));
            std::iter::once(shared).chain(runtime).collect()
        },
        |directory| vec![directory],
    );
    let mounts = mounts();
    let judged = |directory: PathBuf| {
        let found = local(&directory, &mounts);
        (directory, found)
    };
    directories.into_iter().map(judged).collect()
}

/// Publishes a segment in the first directory that works.
fn publish(
    environment: &Environment,
    generation: u32,
    fill: impl Fn(&Segment),
) -> Option<(PathBuf, Shared<Segment>)> {
    let pid = std::process::id();
    let ticks = start_ticks_of("self");
    let mut refused = None;
    for (_, place) in places(environment) {
        let directory = match place {
            Ok(directory) => directory,
            Err(why) => {
                refused = Some(why);
                continue;
            }
        };
        for attempt in 1..=NAMES {
            let name = match attempt {
                1 => format!("{pid}-{ticks}.seg"),
                n => format!("{pid}-{ticks}-{n}.seg"),
            };
            let outcome = shm::publish(&directory, &name, empty(), |segment| {
                fill_header(&segment.header, environment, ticks);
                fill(segment);
                // Last, so that a reader who sees it also sees the rest.
                segment.header.generation.store(generation, Release);
            });
            match outcome {
                Ok(shared) => return Some((directory.join(&name), shared)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(_) => break,
            }
        }
    }
    if let Ok(mut last) = REFUSED.try_lock() {
        *last = refused;
    }
    None
}

/// When a process (a pid, or `self`) started: field 22 of its `stat`. The name in field 2 may contain anything, so
/// counting starts after its closing parenthesis.
fn start_ticks_of(process: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or(0)
}

fn number(environment: &Environment, name: &str) -> Option<i32> {
    environment.text(name).and_then(|text| text.parse().ok())
}

/// The ranks of the job on this machine: the launcher's number, or all if they meet only here; -1 if unknown.
pub(super) fn local_world(environment: &Environment) -> i32 {
    let nodes = number(environment, "SLURM_STEP_NUM_NODES").unwrap_or(1);
    let address = environment.text("MASTER_ADDR").unwrap_or("localhost");
    let here = nodes == 1 && (matches!(address, "localhost" | "::1") || address.starts_with("127."));
    let world = if here { number(environment, "WORLD_SIZE") } else { None };
    number(environment, "LOCAL_WORLD_SIZE").or(world).unwrap_or(-1)
}

fn fill_header(header: &Header, environment: &Environment, ticks: u64) {
    let size = |size: usize| size as u32;
    let number = |name| number(environment, name).unwrap_or(-1);
    let inode = |path: &str| stat(path).map_or(0, |stat| stat.st_ino);
    header.magic.store(MAGIC, Relaxed);
    header.major.store(MAJOR, Relaxed);
    header.minor.store(MINOR, Relaxed);
    header.header_size.store(size(size_of::<Header>()), Relaxed);
    header.total_size.store(size(size_of::<Segment>()), Relaxed);
    header.endian_tag.store(0x0102_0304, Relaxed);
    header.features.store(1, Relaxed);
    header.op_off.store(size(std::mem::offset_of!(Segment, operations)), Relaxed);
    header.op_stride.store(size(size_of::<OperationSlot>()), Relaxed);
    header.op_count.store(size(OPERATIONS), Relaxed);
    header.thr_off.store(size(std::mem::offset_of!(Segment, threads)), Relaxed);
    header.thr_stride.store(size(size_of::<ThreadSlot>()), Relaxed);
    header.thr_count.store(size(THREADS), Relaxed);
    header.hist_off.store(size(std::mem::offset_of!(Segment, history)), Relaxed);
    header.hist_stride.store(size(size_of::<Record>()), Relaxed);
    header.hist_count.store(size(HISTORY), Relaxed);
    header.pid.store(std::process::id(), Relaxed);
    header.uid.store(rustix::process::geteuid().as_raw(), Relaxed);
    header.start_ticks.store(ticks, Relaxed);
    header.pid_ns.store(inode("/proc/self/ns/pid"), Relaxed);
    header.time_ns.store(inode("/proc/self/ns/time"), Relaxed);
    header.mono0_ns.store(now(), Relaxed);
    header.real0_ns.store(time_of_day(), Relaxed);
    for (word, value) in header.boot_id.iter().zip(boot_id()) {
        word.store(value, Relaxed);
    }
    header.rank.store(number("RANK"), Relaxed);
    header.local_rank.store(number("LOCAL_RANK"), Relaxed);
    header.world.store(number("WORLD_SIZE"), Relaxed);
    header.local_world.store(local_world(environment), Relaxed);
    header.gpu.store(number("LOCAL_RANK"), Relaxed);
    header.numa.store(-1, Relaxed);
    header.version.set(env!("CARGO_PKG_VERSION"));
    header.job.set(&job(environment));
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    header.launch.store(launch(environment, parent, ticks), Relaxed);
}

/// The common feature of the processes of one job on this machine: the job step of Slurm; else the process that started
/// them (torchrun's agent, mpirun, the shell); else, for ranks that no process here has started (each is the first
/// process of a Kubernetes container), the store where they meet. Any other process is a separate job.
pub(super) fn launch(environment: &Environment, parent: i32, own_ticks: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    let both = |first, second| environment.text(first).zip(environment.text(second));
    let meeting = environment.text("RANK").and_then(|_| both("MASTER_ADDR", "MASTER_PORT"));
    if let Some(step) = both("SLURM_JOB_ID", "SLURM_STEP_ID") {
        ("slurm", step).hash(&mut hasher);
    } else if parent > 1 {
        ("parent", parent, start_ticks_of(&parent.to_string())).hash(&mut hasher);
    } else if let Some(meeting) = meeting {
        ("meeting", meeting).hash(&mut hasher);
    } else {
        ("own", std::process::id(), own_ticks).hash(&mut hasher);
    }
    hasher.finish().max(1)
}

/// The kernel's boot id as two words, in the order of its text.
fn boot_id() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let word = |part: Option<&str>| {
        part.and_then(|part| u64::from_str_radix(part, 16).ok()).map_or(0, u64::swap_bytes)
    };
    [word(digits.get(..16)), word(digits.get(16..32))]
}

/// The name of the job: `FASTCKPT_JOB`, else the script or program.
fn job(environment: &Environment) -> String {
    if let Some(job) = environment.text("FASTCKPT_JOB") {
        return job.to_owned();
    }
    let base = |text: &str| Path::new(text).file_name().map(|name| name.to_string_lossy().into_owned());
    let arguments = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let mut arguments = arguments.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let program = arguments.next().unwrap_or_default().into_owned();
    // The job is named after its script, not after the interpreter.
    let script = arguments.find(|text| text.ends_with(".py")).map(std::borrow::Cow::into_owned);
    script.as_deref().or(Some(&program)).and_then(base).unwrap_or_default()
}
