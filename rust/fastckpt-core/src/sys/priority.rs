//! How far worker threads yield to others: niceness and I/O priority, each set for the calling thread alone.

use std::io;
use std::str::FromStr;

use super::thread::builder;

/// The I/O class that a thread requests (`ioprio_set(2)`). Schedulers without priorities ignore it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoPriority {
    /// The usual class, with its level from 0 (first) to 7.
    BestEffort(u8),
    /// Only when nothing else wants the device.
    Idle,
}

impl FromStr for IoPriority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "idle" {
            return Ok(Self::Idle);
        }
        let level = text.strip_prefix("best-effort:").and_then(|level| level.parse().ok());
        match level {
            Some(level @ 0..=7) => Ok(Self::BestEffort(level)),
            _ => Err(format!(
                "unknown I/O priority `{text}`: give `idle`, or `best-effort:0` (first) to `best-effort:7`"
            )),
        }
    }
}

/// What a worker thread sets for itself when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Priority {
    /// Niceness, 0 to 19. `None` keeps that of the process.
    pub nice: Option<u8>,
    /// I/O priority. `None` keeps that of the process.
    pub io: Option<IoPriority>,
}

// From linux/ioprio.h, which libc lacks.
const WHO_PROCESS: libc::c_int = 1;
const CLASS_SHIFT: u32 = 13;
const BEST_EFFORT: libc::c_int = 2;
const IDLE: libc::c_int = 3;

impl Priority {
    /// Sets both for the calling thread. Returns the first error, if any.
    pub fn apply(self) -> io::Result<()> {
        let mut outcome = Ok(());
        if let Some(nice) = self.nice {
            // SAFETY: a plain system call without pointers. On Linux, "process 0" is the calling thread.
            if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, libc::c_int::from(nice)) } != 0 {
                outcome = Err(io::Error::last_os_error());
            }
        }
        if let Some(priority) = self.io {
            let value = match priority {
                IoPriority::BestEffort(level) => BEST_EFFORT << CLASS_SHIFT | libc::c_int::from(level),
                IoPriority::Idle => IDLE << CLASS_SHIFT,
            };
            // SAFETY: likewise.
            if unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, value) } != 0 && outcome.is_ok() {
                outcome = Err(io::Error::last_os_error());
            }
        }
        outcome
    }

    /// Whether threads of this process may set these priorities. Tries it in a thread that ends at once.
    pub fn probe(self) -> io::Result<()> {
        builder().spawn(move || self.apply())?.join().unwrap_or(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io_priority() -> i64 {
        // SAFETY: a plain system call without pointers.
        unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0) }
    }

    fn niceness() -> i32 {
        // SAFETY: likewise.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    #[test]
    fn only_the_calling_thread_stands_back() {
        let before = (niceness(), io_priority());
        let set = Priority { nice: Some(7), io: Some(IoPriority::BestEffort(6)) };
        let thread = builder().spawn(move || {
            set.apply().unwrap();
            assert_eq!((niceness(), io_priority()), (7, 2 << 13 | 6));
            Priority { nice: None, io: Some(IoPriority::Idle) }.apply().unwrap();
            assert_eq!((niceness(), io_priority() >> 13), (7, 3));
        });
        thread.unwrap().join().unwrap();
        set.probe().unwrap();
        assert_eq!((niceness(), io_priority()), before);
    }

    #[test]
    fn priorities_parse_by_name_and_nothing_else_does() {
        assert_eq!("idle".parse::<IoPriority>().unwrap(), IoPriority::Idle);
        assert_eq!("best-effort:7".parse::<IoPriority>().unwrap(), IoPriority::BestEffort(7));
        for text in ["best-effort:8", "best-effort", "realtime:0", "best-effort:-1", ""] {
            assert!(text.parse::<IoPriority>().unwrap_err().contains("`idle`"), "{text}");
        }
    }
}
