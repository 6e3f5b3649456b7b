//! The memory of the live counters: shared through a file, or private where no file is possible (`docs/telemetry.md`, 2
//! and 3).

use std::io;
use std::mem::{align_of, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, SystemTime};

use rustix::fs::{self, AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// How long the segments of dead processes are kept for a post-mortem.
const KEEP: Duration = Duration::from_secs(600);

/// Memory that other processes can see, and the file that holds it.
#[derive(Debug)]
pub struct Shared<T: 'static> {
    /// The memory. It stays mapped until the process ends, because a worker may hold it at any time.
    pub segment: &'static T,
    /// Device and inode of the file, which identify it.
    pub file: (u64, u64),
}

/// Opens the directory and creates it if necessary. Refuses a directory that others own or can write to.
fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    match fs::mkdir(path, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = fs::open(path, flags, Mode::empty())?;
    let stat = fs::fstat(&fd)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o022 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(fd)
}

/// Whether no live process holds the lock of `name`. A missing file counts as free.
fn is_free(directory: BorrowedFd<'_>, name: &str) -> bool {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match fs::openat(directory, name, flags, Mode::empty()) {
        Ok(fd) => fs::flock(&fd, FlockOperation::NonBlockingLockExclusive).is_ok(),
        Err(error) => error == Errno::NOENT,
    }
}

/// Creates a file called `name` in `directory` that holds a `T`, initially `empty`, and maps it. The file gets its name
/// after `fill`.
pub fn publish<T: Sync + 'static>(
    directory: &Path,
    name: &str,
    empty: T,
    fill: impl FnOnce(&T),
) -> io::Result<Shared<T>> {
    let directory = open_directory(directory)?;
    sweep(directory.as_fd());
    let hidden = format!(".{name}");
    if is_free(directory.as_fd(), &hidden) {
        let _ = fs::unlinkat(&directory, &hidden, AtFlags::empty());
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = fs::openat(&directory, &hidden, flags, Mode::from_raw_mode(0o600))?;
    let outcome = map(fd.as_fd(), empty).and_then(|segment| {
        fill(segment);
        let stat = fs::fstat(&fd)?;
        give_name(directory.as_fd(), &hidden, name)?;
        Ok(Shared { segment, file: (stat.st_dev, stat.st_ino) })
    });
    if outcome.is_err() {
        // The mapping stays if it exists: one page of an unnamed file, at most once in the life of a process.
        let _ = fs::unlinkat(&directory, &hidden, AtFlags::empty());
    }
    outcome
}

/// Locks, allocates and maps the file, and puts `value` there. The mapping keeps the lock after the descriptor is
/// closed.
fn map<T: Sync + 'static>(fd: BorrowedFd<'_>, value: T) -> io::Result<&'static T> {
    const { assert!(align_of::<T>() <= 4096) };
    fs::flock(fd, FlockOperation::NonBlockingLockExclusive)?;
    let size = size_of::<T>();
    fs::ftruncate(fd, size as u64)?;
    // Without this, a full tmpfs would raise SIGBUS at the first store.
    fs::fallocate(fd, FallocateFlags::empty(), 0, size as u64)?;
    // SAFETY: a shared mapping of a file just made, at an address the kernel chooses. Nothing shortens the file: it is
    // ours (0600, in a directory of ours), and neither producer nor monitor ever shortens it.
    let base = unsafe {
        mmap(std::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
    }?;
    // SAFETY: the range is the mapping just made.
    if let Err(error) = unsafe { madvise(base, size, Advice::LinuxDontFork) } {
        // SAFETY: as above, and nothing knows of it yet. A child that inherited it would keep a dead parent's lock.
        let _ = unsafe { munmap(base, size) };
        return Err(error.into());
    }
    let segment = NonNull::new(base.cast::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: the mapping is page-aligned, which is enough for a `T`. It is large enough, and nothing else uses it yet.
    unsafe { segment.write(value) };
    // SAFETY: it holds a `T` now and is never unmapped. Other processes only read it.
    Ok(unsafe { segment.as_ref() })
}

/// Gives the finished file its name. Replaces a file of that name if its process is dead.
fn give_name(directory: BorrowedFd<'_>, hidden: &str, name: &str) -> io::Result<()> {
    match fs::renameat_with(directory, hidden, directory, name, RenameFlags::NOREPLACE) {
        Err(Errno::EXIST) if is_free(directory, name) => {
            Ok(fs::renameat(directory, hidden, directory, name)?)
        }
        Err(Errno::INVAL | Errno::NOSYS) => Ok(fs::renameat(directory, hidden, directory, name)?),
        other => Ok(other?),
    }
}

/// Removes old segments of dead processes of this user.
fn sweep(directory: BorrowedFd<'_>) {
    let Ok(entries) = fs::Dir::read_from(directory) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().to_str() else { continue };
        let begins = name.trim_start_matches('.').starts_with(|c: char| c.is_ascii_digit());
        let segment = Path::new(name).extension().is_some_and(|end| end == "seg");
        let Ok(stat) = fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
        let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        let ours = stat.st_uid == rustix::process::geteuid().as_raw();
        if begins && segment && regular && ours && age.is_ok_and(|age| age > KEEP) && is_free(directory, name)
        {
            let _ = fs::unlinkat(directory, name, AtFlags::empty());
        }
    }
}

/// Whether `path` is still the file `file`. If so, sets its times to now, because stores through a mapping do not
/// update them.
#[must_use]
pub fn still_there(path: &Path, file: (u64, u64)) -> bool {
    let same = fs::stat(path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == file);
    if same {
        let now = fs::Timespec { tv_sec: 0, tv_nsec: fs::UTIME_NOW };
        let times = fs::Timestamps { last_access: now, last_modification: now };
        let _ = fs::utimensat(fs::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW);
    }
    same
}
