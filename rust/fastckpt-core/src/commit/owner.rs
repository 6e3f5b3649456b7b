//! The process that made a temporary directory, and whether it is provably dead (`docs/format.md`, 6.2).
//!
//! A wrong verdict of death would make a live save fail. It could not destroy a checkpoint, because everything is
//! renamed before it is removed.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::time::{ClockId, clock_gettime};

use super::locks::{Reach, reach};
use crate::format::manifest;
use crate::sys::fs::{self, AtFlags, Mode, OFlags};
use crate::sys::lock;

/// A process, as other processes can identify it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// The first 64 bits of the kernel's boot id, which is unique, unlike host names.
    boot: u64,
    /// The inode of the process's PID namespace, 0 if unknown.
    namespace: u64,
    /// The process id in that namespace.
    pub(super) pid: u32,
    /// When the process started, in clock ticks since boot; 0 if unknown. Process ids are reused: after a restart, a
    /// container's first process has id 1 again, in a namespace that may have the inode of the old one.
    start: u64,
}

impl Owner {
    /// This process.
    pub(super) fn myself() -> Self {
        static BOOT: OnceLock<u64> = OnceLock::new();
        let boot = *BOOT.get_or_init(|| {
            let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
            u64::from_str_radix(&digits, 16).unwrap_or(0)
        });
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |stat| stat.ino());
        let pid = std::process::id();
        Self { boot, namespace, pid, start: start_of("self").unwrap_or(0) }
    }

    /// Parses the output of [`fmt::Display`], from the end and without the host.
    pub(super) fn parse([start, pid, namespace, boot]: [&[u8]; 4]) -> Option<Self> {
        let decimal = |part: &[u8]| std::str::from_utf8(part).ok()?.parse().ok();
        let boot = std::str::from_utf8(boot).ok().filter(|boot| boot.len() == 16)?;
        Some(Self {
            boot: u64::from_str_radix(boot, 16).ok()?,
            namespace: decimal(namespace)?,
            pid: decimal(pid)?.try_into().ok()?,
            start: decimal(start)?,
        })
    }

    /// Whether the process runs; `None` if it cannot be seen from here.
    fn runs(self) -> Option<bool> {
        let me = Self::myself();
        if me.boot == 0 || me.namespace == 0 || (self.boot, self.namespace) != (me.boot, me.namespace) {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let there = test_kill_process(pid) != Err(Errno::SRCH);
        // Another process may have the same id by now.
        let other = |start| self.start != 0 && start != self.start;
        Some(there && !start_of(&self.pid.to_string()).is_some_and(other))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let host: String = name.chars().take(40).map(plain).collect();
        let host = if host.is_empty() { "_" } else { &host };
        write!(f, "{host}-{:016x}-{}-{}-{}", self.boot, self.namespace, self.pid, self.start)
    }
}

/// When a process started: field 22 of `/proc/PID/stat` (`proc(5)`). Fields are counted after the process name, which
/// may contain anything.
fn start_of(process: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// Whether the writer of a workspace lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// The writer's process runs, or its lock is held.
    Alive,
    /// The writer is provably dead.
    Dead,
    /// This host has no proof that the writer is alive or dead.
    Unknown,
}

/// A [`Life`], valid as long as this is held: a writer that is about to lock its manifest finds the manifest locked.
#[derive(Debug)]
pub(super) struct Verdict {
    pub(super) life: Life,
    _lock: Option<OwnedFd>,
}

/// Judges `owner`, the maker of the workspace `directory`.
pub(super) fn judge(owner: Owner, directory: BorrowedFd<'_>) -> Verdict {
    let (life, lock) = match owner.runs() {
        // The process may have become another program (`execve`), which closed the manifest. A manifest with content
        // proves nothing: a commit displaces checkpoints, and their manifests are not locked.
        Some(true) => match by_lock(owner, directory) {
            (Life::Dead, lock) if is_unsealed(directory) => (Life::Dead, lock),
            _ => (Life::Alive, None),
        },
        // The lock can overrule this: copies of one virtual machine share the boot id.
        Some(false) => match by_lock(owner, directory) {
            (Life::Unknown, lock) => (Life::Dead, lock),
            sure => sure,
        },
        None => by_lock(owner, directory),
    };
    Verdict { life, _lock: lock }
}

/// Whether the manifest in `directory` is empty, which means that the save had not sealed it.
fn is_unsealed(directory: BorrowedFd<'_>) -> bool {
    fs::statat(directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| stat.st_size == 0)
}

/// The verdict that follows from the lock.
fn by_lock(owner: Owner, directory: BorrowedFd<'_>) -> (Life, Option<OwnedFd>) {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = fs::openat(directory, manifest::FILE, flags, Mode::empty()) else {
        return (Life::Unknown, None);
    };
    match lock::take(&file) {
        Err(error) if lock::is_taken(&error) => return (Life::Alive, None),
        Err(_) => return (Life::Unknown, None),
        Ok(()) => {}
    }
    let dead = match reach(directory) {
        // An earlier boot of this machine looks the same as another machine to which this machine exports the file
        // system. Only the time of the last change in the directory distinguishes them.
        Reach::Machine => {
            (owner.boot != 0 && owner.boot == Owner::myself().boot) || unchanged_since_boot(directory)
        }
        Reach::Everywhere => true,
        Reach::Unknown => false,
    };
    (if dead { Life::Dead } else { Life::Unknown }, Some(file))
}

/// Whether nothing was created, removed or renamed in `directory` since this kernel booted.
fn unchanged_since_boot(directory: BorrowedFd<'_>) -> bool {
    let boot = clock_gettime(ClockId::Realtime).tv_sec - clock_gettime(ClockId::Boottime).tv_sec;
    fs::fstat(directory.as_fd()).is_ok_and(|stat| stat.st_ctime < boot)
}
