//! Keeps several operations in flight through the thread's own ring, and checks whether a ring is possible.

use std::io;
use std::sync::Mutex;

use super::backend::{Backend, Completed};
use super::transfer::Transfer;
use crate::engine::report::{Fallback, Fell};
use crate::sys::ring::{ENTRIES, Ring};

/// A thread's ring for direct operations. All other operations are blocking calls, because the ring would hand buffered
/// writes to a kernel thread, one at a time per file.
#[derive(Debug)]
pub struct Uring {
    ring: Ring<Transfer>,
    buffered: Vec<Completed>,
}

impl Backend for Uring {
    fn queue_depth(&self) -> usize {
        ENTRIES as usize
    }

    fn submit(&mut self, mut transfer: Transfer) -> io::Result<()> {
        if transfer.is_direct() {
            return self.ring.submit(transfer);
        }
        let result = transfer.carry_out();
        self.buffered.push((transfer, result));
        Ok(())
    }

    fn wait(&mut self) -> io::Result<Option<Completed>> {
        self.buffered.pop().map_or_else(|| self.ring.wait(), |done| Ok(Some(done)))
    }
}

/// A refusal that is permanent for this process, and the process that met it. Other rules may hold for a child.
static REFUSED: Mutex<Option<(u32, i32)>> = Mutex::new(None);

/// Sets up a ring for the calling thread, or returns why there is none and what helps.
pub fn open() -> Result<Uring, Fallback> {
    let pid = std::process::id();
    // Not waiting for the lock costs at most one more attempt. A wait could last forever in a forked child.
    let known = REFUSED.try_lock().ok().and_then(|refused| *refused);
    if let Some((_, errno)) = known.filter(|(owner, _)| *owner == pid) {
        return Err(refusal(&io::Error::from_raw_os_error(errno)));
    }
    let ring = Ring::new().map_err(|error| {
        if let (Some(errno @ (libc::EPERM | libc::EACCES | libc::ENOSYS)), Ok(mut refused)) =
            (error.raw_os_error(), REFUSED.try_lock())
        {
            *refused = Some((pid, errno));
        }
        refusal(&error)
    })?;
    Ok(Uring { ring, buffered: Vec::new() })
}

/// Why there is no ring, and the remedy.
fn refusal(error: &io::Error) -> Fallback {
    let remedy = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "blocked by a seccomp profile (Docker's default) or by sysctl kernel.io_uring_disabled; \
             allow io_uring_setup, io_uring_enter and io_uring_register there"
        }
        Some(libc::ENOSYS) => {
            "not in this kernel, or hidden by a seccomp profile (Podman's default) or by gVisor"
        }
        Some(libc::ENOMEM) => {
            "locked memory is used up; raise it (`ulimit -l`, or `--ulimit memlock=-1` in Docker)"
        }
        Some(libc::EMFILE | libc::ENFILE) => "too many open files; raise `ulimit -n`",
        _ => "the kernel refused it",
    };
    let errno = error.raw_os_error().unwrap_or(libc::ENOSYS);
    Fallback::after(None, Fell::Ring, errno, &format!("io_uring: {error}: {remedy}"))
}
