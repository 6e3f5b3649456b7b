//! An `io_uring` for one thread. It owns the buffers of its operations in flight.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, Probe, opcode, types};

use super::calls::{self, Noted};
use super::fork::Note;
use super::gather::Buf;
use super::memory::MOST_VECTORS;
use super::thread::Backoff;

/// The number of entries of a ring. It is small, because the kernel counts the entries of all ranks together against
/// the user's `RLIMIT_MEMLOCK`.
pub const ENTRIES: u32 = 32;

/// An operation for a ring. The ring owns the operation, its open file and its memory until the operation completes.
/// The memory is a [`Buf`], so the kernel writes to no other place: that memory does not move with its owner, and the
/// creator of the [`Buf`] vouched for it.
pub trait Payload: 'static {
    /// The open file. An error refuses the operation.
    fn fd(&self) -> io::Result<BorrowedFd<'_>>;

    /// The file offset at which the operation starts.
    fn file_offset(&self) -> u64;

    /// Whether the operation writes to the file; otherwise it reads.
    fn is_write(&self) -> bool;

    /// The memory, and which of its bytes to move.
    fn memory(&mut self) -> (&mut Buf, Range<usize>);
}

/// An operation in flight, and the kernel's list of its stretches of memory.
struct InFlight<T> {
    payload: T,
    _vectors: Vec<libc::iovec>,
}

/// A ring and its operations in flight.
///
/// When this is dropped, it first waits for every operation, because the kernel writes to the buffers until the
/// operations complete. Then the ring itself is dropped, then the buffers (the order of the fields).
pub struct Ring<T: Payload> {
    _note: Note,
    inner: IoUring,
    slots: Vec<Option<InFlight<T>>>,
    in_flight: usize,
}

impl<T: Payload> Ring<T> {
    /// Sets up a ring for the calling thread only, with the newest set of flags that the kernel accepts.
    pub fn new() -> io::Result<Self> {
        let mut newest = IoUring::builder();
        newest.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
        let mut older = IoUring::builder();
        older.setup_coop_taskrun();
        let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
        for builder in [newest, older, IoUring::builder()] {
            match builder.clone().dontfork().build(ENTRIES) {
                Ok(ring) => return Self::probed(ring),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
                Err(error) => return Err(error),
            }
        }
        Err(refused)
    }

    fn probed(ring: IoUring) -> io::Result<Self> {
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Readv::CODE, opcode::Writev::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        // SAFETY: the ring is open, and nothing closes it while it is noted: the note is dropped first (the order of
        // the fields).
        let note = Note::new(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) });
        Ok(Self { _note: note, inner: ring, slots: (0..ENTRIES).map(|_| None).collect(), in_flight: 0 })
    }

    /// Hands `payload` to the kernel.
    ///
    /// # Panics
    /// If every entry of the ring is in flight. A worker's queue depth prevents that.
    pub fn submit(&mut self, mut payload: T) -> io::Result<()> {
        let slot = self.slots.iter().position(Option::is_none).expect("queue depth below ring entries");
        let fd = types::Fd(payload.fd()?.as_raw_fd());
        let (write, offset) = (payload.is_write(), payload.file_offset());
        let (buf, range) = payload.memory();
        // If there are more stretches than the kernel accepts at once, the transfer is short and the rest follows.
        let vectors: Vec<libc::iovec> = if write {
            let slices = buf.slices(range);
            slices.iter().take(MOST_VECTORS).map(|s| vector(s.pointer().cast_mut(), s.len())).collect()
        } else {
            let mut slices = buf.slices_mut(range);
            slices.iter_mut().take(MOST_VECTORS).map(|s| vector(s.as_mut_ptr(), s.len())).collect()
        };
        let count = u32::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let entry = match (write, vectors.as_slice()) {
            (true, [one]) => opcode::Write::new(fd, one.iov_base.cast(), length(one)?).offset(offset).build(),
            (false, [one]) => opcode::Read::new(fd, one.iov_base.cast(), length(one)?).offset(offset).build(),
            (true, all) => opcode::Writev::new(fd, all.as_ptr(), count).offset(offset).build(),
            (false, all) => opcode::Readv::new(fd, all.as_ptr(), count).offset(offset).build(),
        }
        .user_data(slot as u64);
        self.slots[slot] = Some(InFlight { payload, _vectors: vectors });
        self.in_flight += 1;
        // SAFETY: the descriptor, the memory and the list of its stretches belong to the payload that is now in
        // `slots`. The payload stays there until its completion is reaped, even when the ring is dropped. If it moves,
        // they do not (all are behind pointers).
        if unsafe { self.inner.submission().push(&entry) }.is_err() {
            self.slots[slot] = None;
            self.in_flight -= 1;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.enter(0)
    }

    /// Submits the queue and waits for `want` completions.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        let _call = self.slots.iter().flatten().next().map(|first| noted(&first.payload)).transpose()?;
        let mut backoff = Backoff::default();
        loop {
            match self.inner.submit_and_wait(want) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of a resource for the moment. Reaping completions may free it.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    if want == 0 || !self.inner.completion().is_empty() {
                        return Ok(()); // entries left in the queue are submitted with the next one
                    }
                    if !backoff.wait() {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The next completion, after waiting if necessary; `None` if nothing is in flight.
    pub fn wait(&mut self) -> io::Result<Option<(T, io::Result<usize>)>> {
        if self.in_flight == 0 {
            return Ok(None);
        }
        loop {
            let next = self.inner.completion().next();
            let Some(entry) = next else {
                self.enter(1)?;
                continue;
            };
            let slot = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let Some(done) = self.slots.get_mut(slot).and_then(Option::take) else { continue };
            self.in_flight -= 1;
            let result =
                usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            return Ok(Some((done.payload, result)));
        }
    }
}

/// Records a call that waits for an operation.
fn noted(payload: &impl Payload) -> io::Result<Noted> {
    Ok(calls::on(if payload.is_write() { "write" } else { "read" }, payload.fd()?))
}

/// A stretch of memory, as the kernel's `iovec`.
fn vector(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

/// The length of a stretch, as a single operation needs it.
fn length(vector: &libc::iovec) -> io::Result<u32> {
    u32::try_from(vector.iov_len).map_err(|_| io::ErrorKind::InvalidInput.into())
}

impl<T: Payload> Drop for Ring<T> {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if self.wait().is_err() {
                // The kernel no longer completes operations, so it may still write. These buffers must never be freed.
                let _ = ManuallyDrop::new(std::mem::take(&mut self.slots));
                return;
            }
        }
    }
}

impl<T: Payload> std::fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}
