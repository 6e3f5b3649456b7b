//! Descriptors that a forked child does not keep. They belong to operations that only the parent's threads continue.
//!
//! `O_CLOEXEC` acts at exec, which a data loader's worker never reaches. Without this module, the worker would keep
//! these open for its whole life: shards, whose gigabytes stay allocated after they are replaced; rings; and the
//! manifest whose lock shows that its writer is alive.
//!
//! A table records each such descriptor, and the child replaces each of them with an empty one instead of closing it.
//! Their numbers stay taken, so if the child still runs code of the parent (the fork can happen inside a callback),
//! that code gets an error and never reaches an unrelated file. A descriptor that is opened at the very moment of the
//! fork may be missed. In that case, the child keeps it open, at the cost of disk space.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use super::calls::Closing;

const FREE: i32 = -1;

/// Twice the usual limit of open files per process. If the table is full, a descriptor is inherited.
static NOTED: [AtomicI32; 2048] = [const { AtomicI32::new(FREE) }; 2048];
/// Where the search for a free place starts.
static NEXT: AtomicUsize = AtomicUsize::new(0);
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// A descriptor's place in the table. It must be dropped before the descriptor.
#[derive(Debug)]
pub struct Note {
    place: Option<&'static AtomicI32>,
    fd: RawFd,
}

impl Note {
    /// Records `fd`.
    #[must_use]
    pub fn new(fd: BorrowedFd<'_>) -> Self {
        if !REGISTERED.swap(true, Ordering::Relaxed) {
            // SAFETY: the handler is a function of this library, which is never unloaded. It only makes calls that are
            // allowed in the child of a process with threads.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
        let (first, fd) = (NEXT.fetch_add(1, Ordering::Relaxed), fd.as_raw_fd());
        let mut places = (0..NOTED.len()).map(|step| &NOTED[first.wrapping_add(step) % NOTED.len()]);
        let place = places
            .find(|place| place.compare_exchange(FREE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        Self { place, fd }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            // In a child, the place may be free or hold another descriptor.
            let _ = place.compare_exchange(self.fd, FREE, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Runs in the child before `fork` returns. Only the forking thread exists there, and the missing threads may have held
/// locks.
extern "C" fn in_child() {
    let mut empty = -1;
    for place in &NOTED {
        let fd = place.swap(FREE, Ordering::Relaxed);
        if fd == FREE {
            continue;
        }
        if empty < 0 {
            // SAFETY: a system call on numbers, which is allowed here.
            empty = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        }
        // SAFETY: as for `eventfd`. `fd` belongs to an operation of the parent, whose threads are not in this process.
        if empty < 0 || unsafe { libc::dup3(empty, fd, libc::O_CLOEXEC) } < 0 {
            // No descriptor is left for the empty one, so `fd` is closed.
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
    }
    if empty >= 0 {
        // SAFETY: as for `eventfd`. The descriptor was opened above.
        unsafe { libc::close(empty) };
    }
}

/// A descriptor that a forked child does not keep.
#[derive(Debug)]
pub struct Held {
    // Dropped before the descriptor: once its number is closed, another file may get it at any time.
    _note: Note,
    fd: Closing<OwnedFd>,
}

impl<T: Into<Closing<OwnedFd>>> From<T> for Held {
    fn from(fd: T) -> Self {
        let fd = fd.into();
        Self { _note: Note::new(fd.as_fd()), fd }
    }
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_noted_for_as_long_as_it_is_held() {
        let noted = |fd| NOTED.iter().filter(|place| place.load(Ordering::Relaxed) == fd).count();
        let held = Held::from(OwnedFd::from(tempfile::tempfile().unwrap()));
        let fd = held.as_fd().as_raw_fd();
        assert_eq!(noted(fd), 1);
        let Held { _note: note, fd: kept } = held;
        drop(note);
        assert_eq!(noted(fd), 0);
        drop(kept);
    }
}
