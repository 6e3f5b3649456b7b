//! Files of a checkpoint: opened relative to a directory, with and without the page cache.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{self, AtFlags, FallocateFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use super::cachestat::cached_bytes;
use super::fork::Held;

/// The alignment of address, offset and length that every file system met so far takes on its fast path:
/// ext4 reports 512 and accepts it, but then serialises the writes.
pub const PAGE: u64 = 4096;

/// `RWF_DONTCACHE` of linux/fs.h: a buffered write whose pages are written back at once and then dropped.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// Opens a directory for use with the other functions of this module.
pub fn open_directory(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| fs::open(path, flags, Mode::empty()))?)
}

/// How long to wait for a lease to be given back, looking so often. The kernel takes it after fs.lease-break-time, by
/// default 45 s.
const LEASE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_millis(2));

/// Opens `name`, a single path component, for reading: a regular file directly inside `directory`, reached through no
/// symbolic link.
///
/// `O_NONBLOCK` keeps the open of a FIFO from waiting for a writer. So it does not wait either for somebody who holds
/// a lease of a file (Samba, or the kernel's NFS server, on their own disks), but has the kernel ask for it back:
/// that is waited for here.
fn open_beneath(directory: BorrowedFd<'_>, name: &str, extra: OFlags) -> io::Result<OwnedFd> {
    let begin = Instant::now();
    loop {
        match open_now(directory, name, extra) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && begin.elapsed() < LEASE.0 => {
                std::thread::sleep(LEASE.1);
            }
            other => return other,
        }
    }
}

/// Likewise, without waiting for anything.
fn open_now(directory: BorrowedFd<'_>, name: &str, extra: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | extra;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match retry_on_intr(|| fs::openat2(directory, name, flags, Mode::empty(), resolve)) {
        // No openat2 (before 5.6), or hidden by a seccomp filter: `name` is one component, which NOFOLLOW covers.
        Err(Errno::NOSYS | Errno::PERM) => {
            Ok(retry_on_intr(|| fs::openat(directory, name, flags, Mode::empty()))?)
        }
        other => Ok(other?),
    }
}

/// Takes `O_NONBLOCK` back: `io_uring` would take it for a wish to have an error rather than to wait.
fn blocking_again(fd: BorrowedFd<'_>) {
    if let Ok(flags) = fs::fcntl_getfl(fd) {
        let _ = fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK);
    }
}

/// Opens `name` inside `directory` for reading through the page cache and returns it with its length in bytes.
pub fn open_regular(directory: BorrowedFd<'_>, name: &str) -> io::Result<(OwnedFd, u64)> {
    let fd = open_beneath(directory, name, OFlags::empty())?;
    let stat = fs::fstat(&fd)?;
    blocking_again(fd.as_fd());
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((fd, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// Fills `buf` from `offset` on; returns how much there was, which is less only at the end of the file.
pub fn read_at(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match retry_on_intr(|| rustix::io::pread(fd, &mut buf[done..], offset + done as u64))? {
            0 => break,
            moved => done += moved,
        }
    }
    Ok(done)
}

/// The alignment that direct I/O on `fd` asks of file offsets, lengths and memory: at least a page, more where the
/// file system says so.
fn direct_alignment(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some(PAGE); // silent about it (before 6.1, btrfs, NFS): trying tells
    }
    let wanted = u64::from(stat.stx_dio_mem_align.max(stat.stx_dio_offset_align));
    (wanted > 0).then_some(wanted.max(PAGE)) // both zero: this file cannot do direct I/O
}

/// Bytes that are allocated at a time. A call takes a moment then, and what a signal undoes of it is little: tmpfs
/// before Linux 6.11 gives the whole range back at any signal, and a profiler sends one every few milliseconds.
const STEP: u64 = 256 << 20;
/// So often an allocation that a signal interrupted is tried again.
const INTERRUPTIONS: usize = 8;

/// Gives a new file `len` bytes, allocated `step` by `step` as long as `go_on` says so.
fn allocate(fd: BorrowedFd<'_>, len: u64, step: u64, go_on: &mut dyn FnMut() -> bool) -> io::Result<()> {
    let (mut at, mut interrupted) = (0, 0);
    while at < len {
        let part = step.min(len - at);
        match fs::fallocate(fd, FallocateFlags::empty(), at, part) {
            Ok(()) => at += part,
            Err(Errno::INTR) if interrupted < INTERRUPTIONS => interrupted += 1,
            // Not on this file system, or never in peace: the size at least can be final.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::INTR) => {
                return Ok(retry_on_intr(|| fs::ftruncate(fd, len))?);
            }
            Err(error) => return Err(error.into()),
        }
        if !go_on() {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    Ok(())
}

/// A shard, open for reading or writing: directly where that is wanted and works, and through the page cache.
#[derive(Debug)]
pub struct DataFile {
    cached: Held,
    direct: Option<Held>,
    /// Set when the first direct operation is refused; the file is then used through the page cache.
    refused: OnceLock<()>,
    /// Set when the file system refuses [`DONTCACHE`].
    plain: AtomicBool,
    /// How much of the whole file the page cache held when it was first asked; see [`DataFile::is_cached`].
    residency: OnceLock<Option<Residency>>,
}

/// How much of a range the page cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Residency {
    None,
    Some,
    All,
}

/// From this share on, in hundredths, a range is read faster through the cache than past it.
const MOSTLY_CACHED: u64 = 70;

impl DataFile {
    /// Creates `name` inside `directory` (it must not exist) with `len` bytes allocated, so that no write extends it
    /// and a full file system is noticed before the first byte. The mode is 0666 less the umask.
    ///
    /// `go_on` is asked now and then; once it says no, the error is of kind `Interrupted`, and the file is for the
    /// caller to remove.
    pub fn create(
        directory: BorrowedFd<'_>,
        name: &str,
        len: u64,
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = retry_on_intr(|| fs::openat(directory, name, flags, Mode::from_raw_mode(0o666)))?;
        allocate(fd.as_fd(), len, STEP, go_on)
    }

    fn pair(
        cached: OwnedFd,
        direct: bool,
        open: impl FnOnce(OFlags) -> io::Result<OwnedFd>,
    ) -> io::Result<Self> {
        let direct = if direct {
            match open(OFlags::DIRECT) {
                Ok(fd) if direct_alignment(fd.as_fd()) == Some(PAGE) => Some(fd),
                // Alignments above a page would need larger blocks everywhere; nobody has reported one.
                Ok(_) => None,
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => None,
                Err(error) => return Err(error),
            }
        } else {
            None
        };
        Ok(Self {
            cached: cached.into(),
            direct: direct.map(Held::from),
            refused: OnceLock::new(),
            plain: AtomicBool::new(false),
            residency: OnceLock::new(),
        })
    }

    /// Opens a file made by [`DataFile::create`] for writing.
    pub fn open_write(directory: BorrowedFd<'_>, name: &str, direct: bool) -> io::Result<Self> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = |extra| Ok(retry_on_intr(|| fs::openat(directory, name, flags | extra, Mode::empty()))?);
        Self::pair(open(OFlags::empty())?, direct, open)
    }

    /// Opens a regular file inside `directory` for reading and returns it with its length.
    pub fn open_read(directory: BorrowedFd<'_>, name: &str, direct: bool) -> io::Result<(Self, u64)> {
        let (cached, len) = open_regular(directory, name)?;
        let file = Self::pair(cached, direct, |extra| open_beneath(directory, name, extra))?;
        if let Some(fd) = &file.direct {
            blocking_again(fd.as_fd());
        }
        Ok((file, len))
    }

    /// A file for tests that do no I/O on it, opened for direct I/O or not.
    #[cfg(test)]
    pub(crate) fn unused(direct: bool) -> Self {
        let null = || open_directory(std::path::Path::new("/")).unwrap();
        let file = Self::pair(null(), false, |_| Ok(null())).unwrap();
        Self { direct: direct.then(|| Held::from(null())), ..file }
    }

    /// Opens once more the regular file behind `fd`, which may have no name by now, and returns it with its length.
    /// Direct I/O needs a descriptor of its own, which comes by way of `/proc`; without that the page cache is used.
    pub fn open_again(fd: BorrowedFd<'_>, direct: bool) -> io::Result<(Self, u64)> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let open = |extra| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | extra;
            retry_on_intr(|| fs::open(path.as_str(), flags, Mode::empty())).map_err(|error| match error {
                Errno::MFILE | Errno::NFILE => error.into(),
                _ => io::Error::from_raw_os_error(libc::EINVAL),
            })
        };
        let len = u64::try_from(fs::fstat(fd)?.st_size).unwrap_or(0);
        Ok((Self::pair(fd.try_clone_to_owned()?, direct, open)?, len))
    }

    /// Whether operations on this file go past the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.is_some() && self.refused.get().is_none()
    }

    /// Notes that the file system refused a direct operation that was aligned.
    pub fn refuse_direct(&self) {
        let _ = self.refused.set(());
    }

    /// Whether the page cache holds most of `[start, end)`, in a file of `len` bytes. Where the kernel does not tell,
    /// it does not.
    ///
    /// The first call looks at the whole file: a file that is not cached at all is asked about once.
    #[must_use]
    pub fn is_cached(&self, start: u64, end: u64, len: u64) -> bool {
        let whole = *self.residency.get_or_init(|| {
            let bytes = cached_bytes(self.cached.as_fd(), 0, len).ok()?;
            Some(match bytes {
                0 => Residency::None,
                _ if bytes >= len => Residency::All,
                _ => Residency::Some,
            })
        });
        match whole {
            None | Some(Residency::None) => false,
            Some(Residency::All) => true,
            Some(Residency::Some) => cached_bytes(self.cached.as_fd(), start, end - start)
                .is_ok_and(|bytes| bytes * 100 >= (end - start) * MOSTLY_CACHED),
        }
    }

    /// The descriptor for an operation of the given kind.
    #[must_use]
    pub fn fd(&self, direct: bool) -> BorrowedFd<'_> {
        match &self.direct {
            Some(fd) if direct => fd.as_fd(),
            _ => self.cached.as_fd(),
        }
    }

    /// Reads into `bufs`, one after another, at `offset`; returns how many bytes came.
    pub fn read_at(&self, direct: bool, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        Ok(match bufs {
            [one] => rustix::io::pread(self.fd(direct), &mut **one, offset)?,
            all => rustix::io::preadv(self.fd(direct), all, offset)?,
        })
    }

    /// Writes `bufs`, one after another, at `offset`; returns how many bytes went.
    pub fn write_at(&self, direct: bool, bufs: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
        if direct {
            return write(self.fd(true), bufs, offset);
        }
        if !self.plain.load(Ordering::Relaxed) {
            match rustix::io::pwritev2(&self.cached, bufs, offset, DONTCACHE) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    self.plain.store(true, Ordering::Relaxed);
                }
                other => return Ok(other?),
            }
        }
        let written = write(self.cached.as_fd(), bufs, offset)?;
        start_write_back(self.cached.as_fd(), offset, written as u64);
        Ok(written)
    }

    /// Makes data and size durable. A failure is final: the kernel may have dropped the dirty pages and would report
    /// success the next time. (An interrupted call has not failed.)
    pub fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| fs::fdatasync(&self.cached))?)
    }
}

/// Asks the kernel to begin writing a range back, so that the sync to come finds little to do. Pacing only, never
/// durability.
pub fn start_write_back(fd: BorrowedFd<'_>, offset: u64, len: u64) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    // SAFETY: a system call without pointers, on a descriptor that is borrowed for as long as it lasts.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Writes `bufs`, one after another, at `offset`.
fn write(fd: BorrowedFd<'_>, bufs: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
    Ok(match bufs {
        [one] => rustix::io::pwrite(fd, one, offset)?,
        all => rustix::io::pwritev(fd, all, offset)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_goes_step_by_step_and_stops_when_told() {
        let file = tempfile::tempfile().unwrap();
        let len = || file.metadata().unwrap().len();
        let mut asked = 0;
        let mut go_on = || {
            asked += 1;
            asked < 3
        };
        let error = allocate(file.as_fd(), 10 << 20, 1 << 20, &mut go_on).unwrap_err();
        assert_eq!((error.kind(), asked, len()), (io::ErrorKind::Interrupted, 3, 3 << 20));
        allocate(file.as_fd(), (10 << 20) + 5, 1 << 20, &mut || true).unwrap();
        assert_eq!(len(), (10 << 20) + 5);
        allocate(file.as_fd(), 0, 1 << 20, &mut || false).unwrap();
    }
}
