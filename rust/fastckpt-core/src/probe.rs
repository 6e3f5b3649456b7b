//! Finds out by trials what works for this process in a directory: the facts for `fastckpt doctor`, which judges them.
//!
//! A result is an errno: 0 if the feature works, `None` if it was not tried. The ring, the engine and the files are
//! requested in the same way as by a save. Every trial happens in one directory, which is removed afterwards.

use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags, FallocateFlags, Mode, OFlags, RenameFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use crate::commit::{Reach, reach};
use crate::engine::choice::Choice;
use crate::engine::io::uring;
use crate::engine::options::{Options, STAGING_BUDGET};
use crate::engine::report::Fallback;
use crate::sys::cachestat::cached_pages;
use crate::sys::file::{DataFile, open_directory};
use crate::sys::lock;
use crate::sys::probe::{memory_advice, ring_calls};
use crate::sys::slabs::{self, Slab};
use crate::sys::thread::builder;
use crate::telemetry::layout::Segment;

/// The size of the trial file in bytes: enough for a few large pages.
const TRIAL: usize = 256 << 10;
/// The minimum number of direct writes to watch, and the time to watch: a single write may be too quick. On a busy
/// machine the watching thread may get no core, so it must look this often during writes, unless that takes too long.
const WATCHED_LEAST: usize = 4;
const WATCH: Duration = Duration::from_millis(30);
const LOOKS: usize = 100;
const WATCH_MOST: Duration = Duration::from_secs(2);
/// `RWF_DONTCACHE` of linux/fs.h.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// An errno: 0 if the feature works, `None` if it was not tried.
pub type Answer = Option<i32>;

/// Whether a ring is available.
#[derive(Debug, Clone)]
pub struct Ring {
    /// Why a save cannot use a ring; `None` if it can.
    pub refused: Option<Fallback>,
    /// The result of a plain `io_uring_setup`.
    pub setup: i32,
    /// The result of `io_uring_enter` without a ring: `EBADF` comes from the kernel, any other result from a filter in
    /// front of it.
    pub enter: i32,
    /// The result of `io_uring_register` without a ring: `EBADF` or `EINVAL` comes from the kernel.
    pub register: i32,
}

/// The step that failed in the directory, so that nothing else could be tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trouble {
    /// The failed operation, for the text "cannot ... DIR".
    pub operation: &'static str,
    /// The errno of the failure.
    pub errno: i32,
}

/// The features of the directory's file system.
#[derive(Debug, Clone, Default)]
pub struct Files {
    /// Opening with `O_DIRECT`.
    pub direct_open: Answer,
    /// An aligned direct write.
    pub direct_write: Answer,
    /// An aligned direct read.
    pub direct_read: Answer,
    /// Whether a save would try direct I/O.
    pub direct_used: bool,
    /// The alignments of memory and of offsets that statx reports; `None` if it reports none.
    pub direct_alignment: Option<(u32, u32)>,
    /// Whether direct writes bypass the page cache; `None` if that cannot be observed.
    pub direct_bypasses: Option<bool>,
    /// `cachestat`.
    pub cachestat: Answer,
    /// A write with `RWF_DONTCACHE`.
    pub uncached: Answer,
    /// `fallocate` to the final size.
    pub fallocate: Answer,
    /// `FICLONE`.
    pub reflink: Answer,
    /// `RENAME_EXCHANGE` of two directories.
    pub rename_exchange: Answer,
    /// The lock that shows that a writer is alive.
    pub lock: Answer,
    /// The machines that see that lock.
    pub lock_reach: Reach,
}

/// The results of a probe.
#[derive(Debug)]
pub struct Probe {
    /// The ring.
    pub ring: Ring,
    /// The engine that a save would use, as far as the ring determines it.
    pub choice: Choice,
    /// The cores that this process may use.
    pub cores: usize,
    /// `MADV_HUGEPAGE`.
    pub huge_pages: i32,
    /// `MADV_POPULATE_WRITE`.
    pub populate: i32,
    /// The maximum staging memory of an operation, in bytes.
    pub staging: u64,
    /// The size of a process's live counters, in bytes.
    pub counters: usize,
    /// The file system, or why nothing can be written there.
    pub files: Result<Files, Trouble>,
}

/// Tries everything. `options` are the options that a save would get.
#[must_use]
pub fn run(directory: &Path, options: &Options) -> Probe {
    let [setup, enter, register] = ring_calls();
    let [huge_pages, populate] = memory_advice();
    Probe {
        ring: Ring { refused: uring::open().err(), setup, enter, register },
        choice: Choice::new(options, u64::MAX),
        cores: options.cores(),
        huge_pages,
        populate,
        staging: STAGING_BUDGET,
        counters: size_of::<Segment>(),
        files: files(directory),
    }
}

#[expect(clippy::unnecessary_wraps, reason = "callers store it where there may also be no probe")]
fn system<T>(outcome: rustix::io::Result<T>) -> Answer {
    Some(outcome.err().map_or(0, Errno::raw_os_error))
}

/// A directory for trials. It is removed with everything in it.
struct Trials {
    parent: OwnedFd,
    name: String,
    directory: OwnedFd,
}

impl Trials {
    const FILES: [&str; 3] = ["data", "plain", "copy"];
    const DIRECTORIES: [&str; 2] = ["a", "b"];

    fn create(path: &Path) -> Result<Self, Trouble> {
        let failed = |operation| {
            move |error: io::Error| Trouble { operation, errno: error.raw_os_error().unwrap_or(libc::EIO) }
        };
        let parent = open_directory(path).map_err(failed("open the directory"))?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let mut name = String::new();
        let nanoseconds = now.map_or(0, |now| now.as_nanos() as u64);
        let _ = write!(name, ".fastckpt-doctor-{}-{nanoseconds:x}", std::process::id());
        let made = fs::mkdirat(&parent, &name, Mode::from_raw_mode(0o700));
        made.map_err(|error| failed("create a directory in")(error.into()))?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match retry_on_intr(|| fs::openat(&parent, &name, flags, Mode::empty())) {
            Ok(directory) => Ok(Self { parent, name, directory }),
            Err(error) => {
                let _ = fs::unlinkat(&parent, &name, AtFlags::REMOVEDIR);
                Err(failed("open a new directory in")(error.into()))
            }
        }
    }

    fn open(&self, name: &str, extra: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | extra;
        retry_on_intr(|| fs::openat(&self.directory, name, flags, Mode::from_raw_mode(0o600)))
    }
}

impl Drop for Trials {
    fn drop(&mut self) {
        for name in Self::FILES {
            let _ = fs::unlinkat(&self.directory, name, AtFlags::empty());
        }
        for name in Self::DIRECTORIES {
            let _ = fs::unlinkat(&self.directory, name, AtFlags::REMOVEDIR);
        }
        let _ = fs::unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

fn files(path: &Path) -> Result<Files, Trouble> {
    let trials = Trials::create(path)?;
    let failed = |operation| {
        move |error: io::Error| Trouble { operation, errno: error.raw_os_error().unwrap_or(libc::EIO) }
    };
    let mut slab = slabs::take(TRIAL).map_err(failed("map memory to write to"))?;
    slab[..TRIAL].fill(0xA5);
    DataFile::create(trials.directory.as_fd(), "data", TRIAL as u64, &mut || true)
        .map_err(failed("allocate a file in"))?;
    let plain = trials.open("plain", OFlags::CREATE | OFlags::EXCL);
    let plain = plain.map_err(|error| failed("create a file in")(error.into()))?;
    let mut found = Files {
        fallocate: system(fs::fallocate(&plain, FallocateFlags::empty(), 0, TRIAL as u64)),
        lock: Some(lock::take(&plain).map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0)),
        lock_reach: reach(trials.directory.as_fd()),
        ..Files::default()
    };
    retry_on_intr(|| rustix::io::pwrite(&plain, &slab[..TRIAL], 0))
        .map_err(|error| failed("write a file in")(error.into()))?;
    // Pages that were just written are certainly cached. If cachestat does not report them, it reports nothing at all
    // (on overlayfs it queries the wrong file).
    let control = cached_pages(plain.as_fd(), 0, TRIAL as u64);
    found.cachestat =
        Some(control.as_ref().map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |_| 0));
    direct(&trials, &mut slab, control.is_ok_and(|pages| pages > 0), &mut found);
    let block = [io::IoSlice::new(&slab[..TRIAL])];
    found.uncached = system(rustix::io::pwritev2(&plain, &block, 0, DONTCACHE));
    retry_on_intr(|| fs::fdatasync(&plain)).map_err(|error| failed("sync a file in")(error.into()))?;
    found.reflink = system(
        trials.open("copy", OFlags::CREATE | OFlags::EXCL).and_then(|copy| fs::ioctl_ficlone(&copy, &plain)),
    );
    renames(&trials, &mut found).map_err(|error| failed("create a directory in")(error.into()))?;
    slabs::give(vec![slab], STAGING_BUDGET as usize);
    Ok(found)
}

/// Tries direct I/O on the file that a save would have made.
fn direct(trials: &Trials, slab: &mut Slab, sees_cache: bool, found: &mut Files) {
    found.direct_used =
        DataFile::open_write(trials.directory.as_fd(), "data", true).is_ok_and(|file| file.is_direct());
    let file = match trials.open("data", OFlags::DIRECT) {
        Ok(file) => file,
        Err(error) => {
            found.direct_open = Some(error.raw_os_error());
            return;
        }
    };
    found.direct_open = Some(0);
    found.direct_alignment = fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .map(|stat| (stat.stx_dio_mem_align, stat.stx_dio_offset_align));
    let (outcome, cached) = watched(&file, &slab[..TRIAL]);
    found.direct_write = system(outcome);
    if found.direct_write == Some(0) && sees_cache {
        found.direct_bypasses = Some(!cached);
    }
    found.direct_read = system(retry_on_intr(|| rustix::io::pread(&file, &mut slab[..TRIAL], 0)));
}

/// Writes `bytes` a few times while another thread looks for them in the page cache. Looking afterwards is not enough:
/// a file system that buffers direct writes (btrfs, if it keeps checksums) drops the pages before the write returns.
fn watched(file: &OwnedFd, bytes: &[u8]) -> (rustix::io::Result<usize>, bool) {
    let (writing, written, seen) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
    // The watching thread looks for the first time before the first write.
    let (ready, looks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let look = || {
        let began = writing.load(Ordering::SeqCst);
        let pages = cached_pages(file.as_fd(), 0, bytes.len() as u64);
        seen.fetch_or(pages.is_ok_and(|pages| pages > 0), Ordering::Relaxed);
        looks.fetch_add(usize::from(began && writing.load(Ordering::SeqCst)), Ordering::Relaxed);
        ready.store(true, Ordering::Relaxed);
    };
    let mut outcome = Ok(0);
    thread::scope(|scope| {
        let watch = || {
            while !seen.load(Ordering::Relaxed) && !written.load(Ordering::Relaxed) {
                look();
            }
        };
        // Without that thread, only pages that stay in the cache are detected.
        let watched = builder().spawn_scoped(scope, watch).is_ok();
        while watched && !ready.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let begin = Instant::now();
        for turn in 0.. {
            writing.store(true, Ordering::SeqCst);
            outcome = retry_on_intr(|| rustix::io::pwrite(file, bytes, 0));
            writing.store(false, Ordering::SeqCst);
            let looked = !watched || looks.load(Ordering::Relaxed) >= LOOKS || begin.elapsed() > WATCH_MOST;
            let enough = turn >= WATCHED_LEAST && begin.elapsed() > WATCH && looked;
            if outcome.is_err() || enough || seen.load(Ordering::Relaxed) {
                break;
            }
        }
        written.store(true, Ordering::Relaxed);
    });
    look();
    (outcome, seen.into_inner())
}

/// Tries to exchange two names, as a commit does.
fn renames(trials: &Trials, found: &mut Files) -> rustix::io::Result<()> {
    let directory = &trials.directory;
    for name in ["a", "b"] {
        fs::mkdirat(directory, name, Mode::from_raw_mode(0o700))?;
    }
    found.rename_exchange = system(fs::renameat_with(directory, "a", directory, "b", RenameFlags::EXCHANGE));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_leaves_nothing_behind_and_answers_everything() {
        let directory = tempfile::tempdir().unwrap();
        let probe = run(directory.path(), &Options::default());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let files = probe.files.unwrap();
        assert_eq!(files.direct_open == Some(0), files.direct_write.is_some());
        for tried in [files.uncached, files.reflink, files.rename_exchange, files.lock] {
            assert!(tried.is_some());
        }
        assert_eq!(probe.ring.refused.is_some(), probe.choice.fallback.is_some());
        assert!(probe.cores > 0 && probe.counters > 0 && probe.staging > 0);
    }

    #[test]
    fn trouble_names_the_step() {
        let trouble = run(Path::new("/proc/self/no-such"), &Options::default()).files.unwrap_err();
        assert_eq!(trouble, Trouble { operation: "open the directory", errno: libc::ENOENT });
        assert_eq!(files(Path::new("/proc")).unwrap_err().operation, "create a directory in");
    }

    #[test]
    fn the_kernel_itself_answers_a_call_without_a_ring() {
        let [_, enter, register] = ring_calls();
        // If a filter or a kernel without io_uring responds instead, both calls show it.
        let hidden = [libc::EPERM, libc::ENOSYS, libc::EACCES];
        assert!(enter == libc::EBADF || hidden.contains(&enter), "{enter}");
        assert!([libc::EBADF, libc::EINVAL].contains(&register) || hidden.contains(&register), "{register}");
    }
}
