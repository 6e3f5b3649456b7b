//! Who made a temporary directory, and whether it is provably dead (`docs/format.md`, 6.2).
//!
//! A wrong proof would make a save fail that lives. It could not destroy a checkpoint: whatever is removed is renamed
//! first.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::time::{ClockId, clock_gettime};

use super::locks::{Reach, reach};
use crate::format::manifest;
use crate::sys::lock;

/// A process, as far as others can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// The first 64 bits of the id of the kernel's boot. Names of hosts are not unique; this is.
    boot: u64,
    /// Inode of the PID namespace, 0 if unknown.
    namespace: u64,
    /// Its number in there.
    pub(super) pid: u32,
    /// When it was started, in clock ticks since the boot; 0 if unknown. Numbers of processes are given again, and
    /// after a restart a container's first process has the number 1 in a namespace that may have the old one's inode.
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

    /// What [`fmt::Display`] wrote, from its end, without the host.
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

    /// Whether the process is seen to live or to be gone; nothing where it cannot be seen.
    fn runs(self) -> Option<bool> {
        let me = Self::myself();
        if me.boot == 0 || me.namespace == 0 || (self.boot, self.namespace) != (me.boot, me.namespace) {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let there = test_kill_process(pid) != Err(Errno::SRCH);
        // Another process may have its number by now.
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

/// When a process was started: field 22 of `/proc/PID/stat` (`proc(5)`), counted behind the name, which may hold
/// anything.
fn start_of(process: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// What is known of the writer of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// Its process is there, or its lock is held.
    Alive,
    /// It is dead, provably.
    Dead,
    /// Nothing here proves either.
    Unknown,
}

/// A [`Life`], as long as this is held: a writer that is about to lock its manifest finds it locked.
#[derive(Debug)]
pub(super) struct Verdict {
    pub(super) life: Life,
    _lock: Option<OwnedFd>,
}

/// Judges `owner`, whose workspace is `directory`.
pub(super) fn judge(owner: Owner, directory: BorrowedFd<'_>) -> Verdict {
    let (life, lock) = match owner.runs() {
        Some(true) => (Life::Alive, None),
        // Unless the lock says otherwise: copies of one virtual machine share the boot id.
        Some(false) => match by_lock(owner, directory) {
            (Life::Unknown, lock) => (Life::Dead, lock),
            sure => sure,
        },
        None => by_lock(owner, directory),
    };
    Verdict { life, _lock: lock }
}

/// The verdict where the process cannot be seen.
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
        // An earlier boot of this machine cannot be told from a machine that this one exports the file system to,
        // except by what happened there last.
        Reach::Machine => {
            (owner.boot != 0 && owner.boot == Owner::myself().boot) || unchanged_since_boot(directory)
        }
        Reach::Everywhere => true,
        Reach::Unknown => false,
    };
    (if dead { Life::Dead } else { Life::Unknown }, Some(file))
}

/// Whether nothing was made, removed or renamed in `directory` since this kernel booted.
fn unchanged_since_boot(directory: BorrowedFd<'_>) -> bool {
    let boot = clock_gettime(ClockId::Realtime).tv_sec - clock_gettime(ClockId::Boottime).tv_sec;
    fs::fstat(directory.as_fd()).is_ok_and(|stat| stat.st_ctime < boot)
}
