//! The segment of this process: made when the first operation begins, made anew after a fork or when its file was taken away; and
//! who has which of its slots. Everything here runs at the begin or the end of an operation or a worker, never in between.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Mutex, MutexGuard, TryLockError};

use rustix::fs::stat;
use rustix::time::ClockId;

use super::layout::{
    HISTORY, Header, MAGIC, MAJOR, MINOR, NO_SLOT, OPERATIONS, OperationSlot, Record, Segment, THREADS,
    ThreadSlot,
};
use super::{Kind, free_since, nanoseconds, now};
use crate::sys::shm::{self, Shared};

/// Tries for a name, where processes of several PID namespaces share a directory.
const NAMES: u32 = 16;

/// What the process knows of its own segment.
struct Process {
    pid: u32,
    segment: &'static Segment,
    /// Where it lies, if others can see it.
    file: Option<(PathBuf, (u64, u64))>,
    generation: u32,
    /// Operations begun, ever.
    operations: u64,
    running: u32,
    /// Threads slots in use, a bit each.
    threads: u64,
    targets: (u64, u64),
}

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

/// The process's record; none if the lock cannot be had, as in a child forked while another thread held it.
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
    fn new(before: Option<&Self>) -> Self {
        let generation = before.map_or(1, |before| before.generation + 1);
        let published =
            if env::var("FASTCKPT_TOP").as_deref() == Ok("0") { None } else { publish(generation) };
        let (segment, file) = match published {
            Some((path, Shared { segment, file })) => (segment, Some((path, file))),
            None => (&shm::UNSEEN, None),
        };
        let targets = before.map_or_else(environment_targets, |before| before.targets);
        segment.process.target_save.store(targets.0, Relaxed);
        segment.process.target_load.store(targets.1, Relaxed);
        Self {
            pid: std::process::id(),
            segment,
            file,
            generation,
            operations: before.map_or(0, |before| before.operations),
            running: 0,
            threads: 0,
            targets,
        }
    }

    /// Takes totals and history along into a new segment.
    fn inherit(&self, old: &Segment) {
        let (new, old) = (&self.segment.process, &old.process);
        for (to, from) in [
            (&new.bytes_written, &old.bytes_written),
            (&new.bytes_read, &old.bytes_read),
            (&new.saves_ok, &old.saves_ok),
            (&new.saves_failed, &old.saves_failed),
            (&new.loads_ok, &old.loads_ok),
            (&new.loads_failed, &old.loads_failed),
            (&new.verifies_ok, &old.verifies_ok),
            (&new.verifies_failed, &old.verifies_failed),
        ] {
            to.store(from.load(Relaxed), Relaxed);
        }
    }
}

/// This process's record, with a segment that is its own and still has its file.
fn current(process: &mut Option<Process>) -> &mut Process {
    let pid = std::process::id();
    match process.take() {
        // A fork has the record but not the memory: nothing of it may be touched.
        Some(known) if known.pid != pid => *process = Some(Process { generation: 1, ..Process::new(None) }),
        Some(known) => {
            let lost = known.file.as_ref().is_some_and(|(path, file)| !shm::still_there(path, *file));
            if lost && known.running == 0 {
                let new = Process::new(Some(&known));
                new.inherit(known.segment);
                *process = Some(new);
            } else {
                *process = Some(known);
            }
        }
        None => *process = Some(Process::new(None)),
    }
    process.get_or_insert_with(|| Process::new(None))
}

/// A segment, the number of an operation slot in it ([`NO_SLOT`] if none is free), and the operation's number.
pub(super) fn take_operation() -> (&'static Segment, u32, u64) {
    let Some(mut guard) = lock() else { return (&shm::UNSEEN, NO_SLOT, 0) };
    let process = current(&mut guard);
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
    // Taken from now on: neither unused nor ended.
    let slot = &segment.operations[number];
    slot.t_end_mono_ns.store(0, Relaxed);
    slot.op_id.store(process.operations, Release);
    (segment, number as u32, process.operations)
}

/// A free thread slot of `segment`.
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

/// The worker that had slot `number` has ended.
pub(super) fn give_thread(segment: &'static Segment, number: usize) {
    let Some(mut guard) = lock() else { return };
    if let Some(process) = guard.as_mut().filter(|process| std::ptr::eq(process.segment, segment)) {
        process.threads &= !(1 << number);
    }
}

/// Closes an operation: its history record, the totals, the state.
pub(super) fn finish(
    segment: &'static Segment,
    number: u32,
    kind: Kind,
    ok: bool,
    bytes: u64,
    fill: impl FnOnce(&Record),
) {
    let Some(mut guard) = lock() else { return };
    let Some(process) = guard.as_mut().filter(|process| std::ptr::eq(process.segment, segment)) else {
        return;
    };
    process.running = process.running.saturating_sub(1);
    let totals = &segment.process;
    if number != NO_SLOT {
        let head = totals.hist_head.load(Relaxed);
        let record = &segment.history[(head % HISTORY as u64) as usize];
        record.op_id.store(0, Release);
        fill(record);
        totals.hist_head.store(head + 1, Release);
    }
    let (moved, counter) = match (kind, ok) {
        (Kind::Save, true) => (&totals.bytes_written, &totals.saves_ok),
        (Kind::Save, false) => (&totals.bytes_written, &totals.saves_failed),
        (Kind::Load, true) => (&totals.bytes_read, &totals.loads_ok),
        (Kind::Load, false) => (&totals.bytes_read, &totals.loads_failed),
        (Kind::Verify, true) => (&totals.bytes_read, &totals.verifies_ok),
        (Kind::Verify, false) => (&totals.bytes_read, &totals.verifies_failed),
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

/// What the process wants of its saves and loads, bytes/s per GPU; 0 for nothing.
pub fn set_target(save: u64, load: u64) {
    let Some(mut guard) = lock() else { return };
    let process = current(&mut guard);
    process.targets = (save, load);
    process.segment.process.target_save.store(save, Relaxed);
    process.segment.process.target_load.store(load, Relaxed);
}

/// `FASTCKPT_TOP_TARGET` as bytes/s for saves and loads; anything that does not parse is no target.
fn environment_targets() -> (u64, u64) {
    env::var("FASTCKPT_TOP_TARGET").ok().and_then(|text| parse_targets(&text)).unwrap_or((0, 0))
}

/// A tier's name, GB/s for both, or `save=X,load=Y` (GB being 10^9 bytes), as bytes/s.
/// The tiers are those of NVIDIA's DGX H100 sizing, per GPU.
#[must_use]
pub fn parse_targets(text: &str) -> Option<(u64, u64)> {
    let number = |text: &str| {
        let value: f64 = text.trim().parse().ok()?;
        #[expect(clippy::cast_sign_loss, reason = "checked to be positive")]
        (value.is_finite() && value > 0.0 && value < 1e9).then_some((value * 1e9) as u64)
    };
    match text.trim() {
        "light" => return Some((750_000_000, 1_000_000_000)),
        "medium" => return Some((1_500_000_000, 2_000_000_000)),
        "high" => return Some((3_000_000_000, 4_000_000_000)),
        _ => {}
    }
    if let Some(both) = number(text) {
        return Some((both, both));
    }
    let mut targets = (0, 0);
    for part in text.split(',') {
        match part.split_once('=').map(|(name, value)| (name.trim(), number(value))) {
            Some(("save", Some(value))) => targets.0 = value,
            Some(("load", Some(value))) => targets.1 = value,
            _ => return None,
        }
    }
    Some(targets)
}

/// Publishes a segment in the first directory that takes it.
fn publish(generation: u32) -> Option<(PathBuf, Shared)> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let directories = variable("FASTCKPT_TOP_DIR").map_or_else(
        || {
            let shared = PathBuf::from(format!("/dev/shm/fastckpt-{}", rustix::process::geteuid().as_raw()));
            let runtime = variable("XDG_RUNTIME_DIR").map(|directory| directory.join("fastckpt"));
            std::iter::once(shared).chain(runtime).collect()
        },
        |directory| vec![directory],
    );
    let pid = std::process::id();
    let ticks = start_ticks();
    for directory in directories {
        for attempt in 1..=NAMES {
            let name = match attempt {
                1 => format!("{pid}-{ticks}.seg"),
                n => format!("{pid}-{ticks}-{n}.seg"),
            };
            match shm::publish(&directory, &name, generation, |segment| fill_header(&segment.header, ticks)) {
                Ok(shared) => return Some((std::path::absolute(directory.join(&name)).ok()?, shared)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(_) => break,
            }
        }
    }
    None
}

/// Field 22 of /proc/self/stat; the name in field 2 may hold anything, so counting begins after its closing parenthesis.
fn start_ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or(0)
}

fn fill_header(header: &Header, ticks: u64) {
    let size = |size: usize| size as u32;
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<i32>().ok()).unwrap_or(-1);
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
    header.real0_ns.store(nanoseconds(ClockId::Realtime), Relaxed);
    for (word, value) in header.boot_id.iter().zip(boot_id()) {
        word.store(value, Relaxed);
    }
    header.rank.store(number("RANK"), Relaxed);
    header.local_rank.store(number("LOCAL_RANK"), Relaxed);
    header.world.store(number("WORLD_SIZE"), Relaxed);
    header.local_world.store(number("LOCAL_WORLD_SIZE"), Relaxed);
    header.gpu.store(number("LOCAL_RANK"), Relaxed);
    header.numa.store(-1, Relaxed);
    header.version.set(env!("CARGO_PKG_VERSION"));
    header.job.set(&job());
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

/// What the job is called: `FASTCKPT_JOB`, else the script or program.
fn job() -> String {
    let base = |text: &str| Path::new(text).file_name().map(|name| name.to_string_lossy().into_owned());
    env::var("FASTCKPT_JOB").ok().filter(|job| !job.is_empty()).unwrap_or_else(|| {
        let arguments = std::fs::read("/proc/self/cmdline").unwrap_or_default();
        let mut arguments = arguments.split(|&byte| byte == 0).map(String::from_utf8_lossy);
        let program = arguments.next().unwrap_or_default().into_owned();
        // An interpreter is not what the job is called; its script is.
        let script = arguments.find(|text| text.ends_with(".py")).map(std::borrow::Cow::into_owned);
        script.as_deref().or(Some(&program)).and_then(base).unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_tiers_or_numbers() {
        assert_eq!(parse_targets("high"), Some((3_000_000_000, 4_000_000_000)));
        assert_eq!(parse_targets("2.5"), Some((2_500_000_000, 2_500_000_000)));
        assert_eq!(parse_targets("save=3, load=4"), Some((3_000_000_000, 4_000_000_000)));
        assert_eq!(parse_targets("load=4"), Some((0, 4_000_000_000)));
        for bad in ["", "fast", "-1", "nan", "save", "save=x", "read=1"] {
            assert_eq!(parse_targets(bad), None, "{bad}");
        }
    }
}
