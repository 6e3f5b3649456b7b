//! Files of a checkpoint, opened relative to a directory, for direct I/O or through the page cache.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd as _, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use super::cachestat::cached_bytes;
use super::calls::{self, Closing};
use super::fork::Held;
use super::fs::{self, AtFlags, FallocateFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use super::memory::{Bytes, MOST_VECTORS};

/// The alignment of address, offset and length with which I/O takes the fast path of every file system tried so far.
/// ext4 reports and accepts 512, but then serialises the writes.
pub const PAGE: u64 = 4096;

/// `RWF_DONTCACHE` of linux/fs.h: a buffered write whose pages are written back at once and then dropped.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// Opens a directory for use with the other functions of this module.
pub fn open_directory(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| fs::open(path, flags, Mode::empty()))?)
}

/// A file inside a directory: the directory that holds it, and its name there. The name passed to [`Located::find`] has
/// one or two path components. The first of two components is a directory. No symbolic link is followed.
#[derive(Debug)]
pub struct Located<'a> {
    outer: BorrowedFd<'a>,
    inner: Option<OwnedFd>,
    /// The name in [`Located::directory`].
    pub name: &'a str,
}

impl<'a> Located<'a> {
    /// Finds the directory that contains `name`.
    pub fn find(outer: BorrowedFd<'a>, name: &'a str) -> io::Result<Self> {
        let Some((folder, name)) = name.split_once('/') else { return Ok(Self { outer, inner: None, name }) };
        let strange = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        if matches!(folder, "" | "." | "..") || name.contains('/') {
            return Err(strange("not the name of a file in this directory".to_owned()));
        }
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match retry_on_intr(|| fs::openat(outer, folder, flags, Mode::empty())) {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                Err(strange(format!("`{folder}` is a file or a symbolic link, which is not followed")))
            }
            other => Ok(Self { outer, inner: Some(other?), name }),
        }
    }

    /// Like [`Self::find`], but creates the directory if it is missing.
    pub fn make(outer: BorrowedFd<'a>, name: &'a str) -> io::Result<Self> {
        match (Self::find(outer, name), name.split_once('/')) {
            (Err(error), Some((folder, _))) if error.kind() == io::ErrorKind::NotFound => {
                match fs::mkdirat(outer, folder, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(Errno::EXIST) => Self::find(outer, name),
                    Err(error) => Err(error.into()),
                }
            }
            (found, _) => found,
        }
    }

    /// The directory that holds the file.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.inner.as_ref().map_or(self.outer, AsFd::as_fd)
    }

    /// The attributes of the entry with that name.
    pub fn stat(&self) -> io::Result<fs::Stat> {
        Ok(fs::statat(self.directory(), self.name, AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

/// The attributes of the file `name` inside `directory` (see [`Located`]).
pub fn stat(directory: BorrowedFd<'_>, name: &str) -> io::Result<fs::Stat> {
    Located::find(directory, name)?.stat()
}

/// The time at which the file `name` inside `directory` was last changed, in nanoseconds since 1970 UTC, and its inode.
/// An empty name stands for `directory` itself. A network file system asks its server, because its cache may be older
/// than what other clients have written.
pub fn changed(directory: BorrowedFd<'_>, name: &str) -> io::Result<(i64, u64)> {
    let file = if name.is_empty() {
        Located { outer: directory, inner: None, name }
    } else {
        Located::find(directory, name)?
    };
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    let wanted = StatxFlags::MTIME | StatxFlags::INO;
    let nanoseconds = |seconds: i64, rest: i64| seconds.wrapping_mul(1_000_000_000).wrapping_add(rest);
    match fs::statx(file.directory(), file.name, flags | AtFlags::STATX_FORCE_SYNC, wanted) {
        Ok(stat) => Ok((nanoseconds(stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()), stat.stx_ino)),
        // Linux is older than 4.11, or a filter refuses the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            let stat = fs::statat(file.directory(), file.name, flags)?;
            Ok((nanoseconds(stat.st_mtime, stat.st_mtime_nsec.cast_signed()), stat.st_ino))
        }
        Err(error) => Err(error.into()),
    }
}

/// How long to wait until the holder of a lease gives it back, and how often to check. The kernel revokes a lease after
/// fs.lease-break-time, 45 s by default.
const LEASE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_millis(2));

/// Opens the file `name` inside `directory` for reading: see [`Located`]. Follows no symbolic link.
///
/// `O_NONBLOCK` keeps the open of a FIFO from waiting for a writer. It also keeps the open from waiting for the holder
/// of a lease (Samba or the kernel's NFS server, on their own disks). Instead, the kernel asks the holder to give the
/// lease back, and this function waits for that.
fn open_beneath(directory: BorrowedFd<'_>, name: &str, extra: OFlags) -> io::Result<OwnedFd> {
    let begin = Instant::now();
    let file = Located::find(directory, name)?;
    loop {
        match open_now(file.directory(), file.name, extra) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && begin.elapsed() < LEASE.0 => {
                std::thread::sleep(LEASE.1);
            }
            other => return other,
        }
    }
}

/// Opens `name`, a single path component, in `directory`, and never waits.
fn open_now(directory: BorrowedFd<'_>, name: &str, extra: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | extra;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match retry_on_intr(|| fs::openat2(directory, name, flags, Mode::empty(), resolve)) {
        // openat2 does not exist (before 5.6) or is filtered. `name` is one component, so NOFOLLOW is enough.
        Err(Errno::NOSYS | Errno::PERM) => {
            Ok(retry_on_intr(|| fs::openat(directory, name, flags, Mode::empty()))?)
        }
        other => Ok(other?),
    }
}

/// Clears `O_NONBLOCK`. With it, `io_uring` would return an error instead of waiting.
fn blocking_again(fd: BorrowedFd<'_>) {
    if let Ok(flags) = fs::fcntl_getfl(fd) {
        let _ = fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK);
    }
}

/// Opens the regular file `name` inside `directory` for reading through the page cache. Returns it with its length in
/// bytes.
pub fn open_regular(directory: BorrowedFd<'_>, name: &str) -> io::Result<(Closing<OwnedFd>, u64)> {
    let fd = Closing::from(open_beneath(directory, name, OFlags::empty())?);
    let stat = fs::fstat(&fd)?;
    blocking_again(fd.as_fd());
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok((fd, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// Fills `buf` with the bytes at `offset`. Returns the number of bytes read, which is smaller than `buf` only at the
/// end of the file.
pub fn read_at(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        let _call = calls::on("read", fd);
        match retry_on_intr(|| rustix::io::pread(fd, &mut buf[done..], offset + done as u64))? {
            0 => break,
            moved => done += moved,
        }
    }
    Ok(done)
}

/// The alignment that direct I/O on `fd` requires of file offsets, lengths and memory: at least a page, or more if the
/// file system requires more. `None` if the file does not support direct I/O.
fn direct_alignment(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let Some(stat) = stat.ok().filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0) else {
        // Not reported (before 6.1, btrfs, NFS), or a filter refuses the call. An attempt will show the alignment.
        return Some(PAGE);
    };
    let wanted = u64::from(stat.stx_dio_mem_align.max(stat.stx_dio_offset_align));
    (wanted > 0).then_some(wanted.max(PAGE)) // both are zero if this file does not support direct I/O
}

/// Bytes per allocation call. A call of this size takes only a moment, so a signal undoes little work: before Linux
/// 6.11, tmpfs frees the whole range on any signal, and a profiler sends a signal every few milliseconds.
const STEP: u64 = 256 << 20;
/// How often an allocation is retried after a signal interrupted it.
const INTERRUPTIONS: usize = 8;

/// Allocates the bytes of `range` for a new file, `step` by `step`, as long as `go_on` returns true.
fn allocate(
    fd: BorrowedFd<'_>,
    range: Range<u64>,
    step: u64,
    go_on: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let (mut at, mut interrupted) = (range.start, 0);
    while at < range.end {
        let part = step.min(range.end - at);
        match fs::fallocate(fd, FallocateFlags::empty(), at, part) {
            Ok(()) => at += part,
            Err(Errno::INTR) if interrupted < INTERRUPTIONS => interrupted += 1,
            // This file system cannot allocate, or signals keep interrupting it. At least make the size final.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::INTR) => {
                return Ok(retry_on_intr(|| fs::ftruncate(fd, range.end))?);
            }
            Err(error) => return Err(error.into()),
        }
        if !go_on() {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    Ok(())
}

/// A shard, open for reading or writing: with direct I/O if that is requested and works, else through the page cache.
#[derive(Debug)]
pub struct DataFile {
    cached: Held,
    direct: Option<Held>,
    /// Set when the first direct operation is refused. From then on, the file is used through the page cache.
    refused: OnceLock<()>,
    /// Set when the file system refuses [`DONTCACHE`].
    plain: AtomicBool,
    /// How much of the whole file was in the page cache at the first query; see [`DataFile::is_cached`].
    residency: OnceLock<Option<Residency>>,
}

/// How much of a range is in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Residency {
    None,
    Some,
    All,
}

/// If the page cache holds at least this percentage of a range, reading through the cache is faster than direct I/O.
const MOSTLY_CACHED: u64 = 70;

impl DataFile {
    /// Creates the file `name` (see [`Located`]), which must not exist, in `directory` with `len` bytes allocated. So
    /// no write extends it, and a full file system is noticed before the first byte. The mode is 0666 minus the umask.
    ///
    /// `go_on` is called repeatedly. Once it returns false, this fails with an error of kind `Interrupted`, and the
    /// caller must remove the file.
    pub fn create(
        directory: BorrowedFd<'_>,
        name: &str,
        len: u64,
        go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = Located::make(directory, name)?;
        let mode = Mode::from_raw_mode(0o666);
        let fd = Closing::from(retry_on_intr(|| fs::openat(file.directory(), file.name, flags, mode))?);
        allocate(fd.as_fd(), 0..len, STEP, go_on)
    }

    /// Allocates the bytes of `range`, which may extend the file.
    pub fn reserve(&self, range: Range<u64>) -> io::Result<()> {
        allocate(self.cached.as_fd(), range, STEP, &mut || true)
    }

    fn pair(
        cached: impl Into<Held>,
        direct: bool,
        open: impl FnOnce(OFlags) -> io::Result<OwnedFd>,
    ) -> io::Result<Self> {
        let direct = if direct {
            match open(OFlags::DIRECT) {
                Ok(fd) if direct_alignment(fd.as_fd()) == Some(PAGE) => Some(fd),
                // An alignment above a page would require larger blocks everywhere. No such file system is known.
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
        let file = Located::find(directory, name)?;
        let open = |extra| {
            Ok(retry_on_intr(|| fs::openat(file.directory(), file.name, flags | extra, Mode::empty()))?)
        };
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

    /// A file for tests that do no I/O on it, open for direct I/O or not.
    #[cfg(test)]
    pub(crate) fn unused(direct: bool) -> Self {
        let null = || open_directory(std::path::Path::new("/")).unwrap();
        let file = Self::pair(null(), false, |_| Ok(null())).unwrap();
        Self { direct: direct.then(|| Held::from(null())), ..file }
    }

    /// Reopens the regular file behind `fd`, which may no longer have a name, and returns it with its length. Direct
    /// I/O needs its own descriptor, which is opened through `/proc`. Without it, the page cache is used.
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

    /// Whether operations on this file bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.is_some() && self.refused.get().is_none()
    }

    /// Records that the file system refused an aligned direct operation.
    pub fn refuse_direct(&self) {
        let _ = self.refused.set(());
    }

    /// Whether the page cache holds most of `[start, end)` in a file of `len` bytes. False if the kernel does not
    /// report it.
    ///
    /// The first call checks the whole file, so a file that is not cached at all costs only one query.
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

    /// Makes the page cache drop `[start, end)`, even dirty pages, so that the next read comes from the device. Pages
    /// that others have mapped stay.
    pub fn forget(&self, start: u64, end: u64) {
        let _ = retry_on_intr(|| fs::fdatasync(&self.cached));
        let len = std::num::NonZeroU64::new(end.saturating_sub(start));
        let _ = fs::fadvise(&self.cached, start, len, fs::Advice::DontNeed);
    }

    /// Makes the kernel read `[start, end)` into the page cache, without waiting for it. One request reads at most the
    /// kernel's read-ahead window, which has this size nearly everywhere.
    pub fn read_ahead(&self, start: u64, end: u64) {
        const WINDOW: u64 = 128 << 10;
        for at in (start..end).step_by(WINDOW as usize) {
            let len = std::num::NonZeroU64::new(WINDOW.min(end - at));
            let _ = fs::fadvise(&self.cached, at, len, fs::Advice::WillNeed);
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

    /// Reads at `offset` into `bufs`, one after another. Returns the number of bytes read.
    pub fn read_at(&self, direct: bool, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let _call = calls::on("read", self.fd(direct));
        Ok(match bufs {
            [one] => rustix::io::pread(self.fd(direct), &mut **one, offset)?,
            all => rustix::io::preadv(self.fd(direct), all, offset)?,
        })
    }

    /// Writes `bufs`, one after another, at `offset`. Returns the number of bytes written.
    pub fn write_at(&self, direct: bool, bufs: &[Bytes<'_>], offset: u64) -> io::Result<usize> {
        if direct {
            return Ok(write(self.fd(true), bufs, offset, ReadWriteFlags::empty())?);
        }
        if !self.plain.load(Ordering::Relaxed) {
            match write(self.cached.as_fd(), bufs, offset, DONTCACHE) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    self.plain.store(true, Ordering::Relaxed);
                }
                other => return Ok(other?),
            }
        }
        let written = write(self.cached.as_fd(), bufs, offset, ReadWriteFlags::empty())?;
        start_write_back(self.cached.as_fd(), offset, written as u64);
        Ok(written)
    }

    /// Makes data and size durable. A failure is final: the kernel may have dropped the dirty pages, so another call
    /// would report success. (An interrupted call is not a failure.)
    pub fn sync(&self) -> io::Result<()> {
        retry_on_intr(|| fs::fdatasync(&self.cached))?;
        if !is_in_user_space(self.cached.as_fd()) {
            return Ok(()); // one sync covers the file
        }
        if let Some(direct) = &self.direct {
            retry_on_intr(|| fs::fdatasync(direct))?;
            flush(direct.as_fd())?;
        }
        flush(self.cached.as_fd())
    }
}

/// Makes a file durable that was written through `fd` alone. A failure is final, as in [`DataFile::sync`].
pub fn sync(fd: BorrowedFd<'_>) -> io::Result<()> {
    retry_on_intr(|| fs::fsync(fd))?;
    if is_in_user_space(fd) { flush(fd) } else { Ok(()) }
}

/// Whether the file belongs to a daemon in user space (FUSE), which may buffer written bytes for each descriptor.
fn is_in_user_space(fd: BorrowedFd<'_>) -> bool {
    const FUSE: fs::FsWord = 0x6573_5546;
    fs::fstatfs(fd).is_ok_and(|found| found.f_type == FUSE)
}

/// Closes a duplicate of `fd`. A daemon may write the bytes only at a close, and the close reports a failure.
fn flush(fd: BorrowedFd<'_>) -> io::Result<()> {
    let twin = fd.try_clone_to_owned()?;
    let _call = calls::on("close", fd);
    // SAFETY: the descriptor was owned here, and is given up.
    let closed = unsafe { libc::close(twin.into_raw_fd()) };
    match io::Error::last_os_error() {
        // Linux closes the descriptor even if the call is interrupted.
        error if closed != 0 && error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

/// Asks the kernel to start writing a range back, so that the later sync has little to do. This is for pacing only,
/// never for durability.
pub fn start_write_back(fd: BorrowedFd<'_>, offset: u64, len: u64) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    let _call = calls::on("write back", fd);
    // SAFETY: a system call without pointers, on a descriptor that is borrowed for the whole call.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Writes `bufs`, one after another, at `offset`. Returns the number of bytes written, which may not be all.
fn write(fd: BorrowedFd<'_>, bufs: &[Bytes<'_>], offset: u64, flags: ReadWriteFlags) -> Result<usize, Errno> {
    let _call = calls::on("write", fd);
    let (fd, flags) = (fd.as_raw_fd(), flags.bits().cast_signed());
    let offset = i64::try_from(offset).map_err(|_| Errno::INVAL)?;
    let written = match bufs {
        // SAFETY: the kernel only reads the bytes, which are readable for as long as they are borrowed here.
        [one] if flags == 0 => unsafe { libc::pwrite(fd, one.pointer().cast(), one.len(), offset) },
        all => {
            let count = i32::try_from(all.len().min(MOST_VECTORS)).map_err(|_| Errno::INVAL)?;
            let vectors = all.as_ptr().cast();
            // A sandbox may allow only the older call.
            if flags == 0 {
                // SAFETY: as above, and `Bytes` are laid out as the `iovec` that the kernel takes: an address and a
                // length.
                unsafe { libc::pwritev(fd, vectors, count, offset) }
            } else {
                // SAFETY: as for `pwritev`.
                unsafe { libc::pwritev2(fd, vectors, count, offset, flags) }
            }
        }
    };
    usize::try_from(written)
        .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_one_directory_down_and_through_no_link() {
        let parent = tempfile::tempdir().unwrap();
        let directory = open_directory(parent.path()).unwrap();
        let create = |name: &str| DataFile::create(directory.as_fd(), name, 3, &mut || true);
        assert_eq!(open_regular(directory.as_fd(), "a/b").unwrap_err().kind(), io::ErrorKind::NotFound);
        create("a/b").unwrap();
        create("a/c").unwrap();
        assert_eq!(create("a/b").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(open_regular(directory.as_fd(), "a/b").unwrap().1, 3);
        assert!(DataFile::open_write(directory.as_fd(), "a/b", false).is_ok());
        std::os::unix::fs::symlink("a", parent.path().join("link")).unwrap();
        std::fs::write(parent.path().join("file"), "").unwrap();
        for name in ["link/b", "file/b", "../a/b", "./b", "/b", "a/../b", "a/b/c", "a//b"] {
            let refused =
                |error: io::Error| assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name}: {error}");
            refused(open_regular(directory.as_fd(), name).unwrap_err());
            refused(create(name).unwrap_err());
            refused(stat(directory.as_fd(), name).unwrap_err());
            refused(DataFile::open_write(directory.as_fd(), name, false).unwrap_err());
        }
    }

    #[test]
    fn a_file_tells_when_it_was_changed_by_its_name_and_by_itself() {
        use std::os::unix::fs::MetadataExt as _;
        let parent = tempfile::tempdir().unwrap();
        let directory = open_directory(parent.path()).unwrap();
        DataFile::create(directory.as_fd(), "a/b", 3, &mut || true).unwrap();
        let file = std::fs::File::open(parent.path().join("a/b")).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + Duration::from_nanos(5_000_000_007)).unwrap();
        let expected = (5_000_000_007, file.metadata().unwrap().ino());
        assert_eq!(changed(directory.as_fd(), "a/b").unwrap(), expected);
        assert_eq!(changed(file.as_fd(), "").unwrap(), expected);
        assert!(changed(directory.as_fd(), "a/c").is_err());
    }

    #[test]
    fn allocation_goes_step_by_step_and_stops_when_told() {
        let file = tempfile::tempfile().unwrap();
        let len = || file.metadata().unwrap().len();
        let mut asked = 0;
        let mut go_on = || {
            asked += 1;
            asked < 3
        };
        let error = allocate(file.as_fd(), 0..10 << 20, 1 << 20, &mut go_on).unwrap_err();
        assert_eq!((error.kind(), asked, len()), (io::ErrorKind::Interrupted, 3, 3 << 20));
        allocate(file.as_fd(), 5 << 20..(10 << 20) + 5, 1 << 20, &mut || true).unwrap();
        assert_eq!(len(), (10 << 20) + 5);
        allocate(file.as_fd(), 0..0, 1 << 20, &mut || false).unwrap();
    }
}
