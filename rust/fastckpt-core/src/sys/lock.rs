//! A lock that shows whether its holder is alive. It is taken on an open file. Every process of the machine sees it,
//! and so do other machines if the file system supports that (NFS, Ceph, Lustre with `flock`).
//!
//! The lock covers one byte far beyond the end of the file, because some file systems (CIFS) prevent other processes
//! from reading locked bytes.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::calls;

/// The locked byte.
const BYTE: libc::off_t = 1 << 62;

fn request(kind: libc::c_int) -> libc::flock {
    // SAFETY: a plain C structure of integers, for which all zeros is a value; the kernel wants `l_pid` to be zero.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = BYTE;
    request.l_len = 1;
    request
}

/// Takes the lock of `fd`, a file open for writing, without waiting. The lock is held until the last descriptor of this
/// open file is closed, including those of forked children.
pub fn take(fd: impl AsFd) -> io::Result<()> {
    set(fd, libc::F_WRLCK)
}

/// Like [`take`], but the lock is shared with other processes. `fd` must also be open for reading. If it holds the lock
/// exclusively, it shares the lock from now on.
pub fn share(fd: impl AsFd) -> io::Result<()> {
    set(fd, libc::F_RDLCK)
}

fn set(fd: impl AsFd, kind: libc::c_int) -> io::Result<()> {
    let request = request(kind);
    let _call = calls::on("lock", &fd);
    loop {
        // SAFETY: the command takes a pointer to a `flock`, which outlives the call. So does the borrow of the
        // descriptor.
        let outcome = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
        if outcome == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Whether `error`, returned by [`take`] or [`share`], means that someone else holds the lock. (EACCES means that a security module
/// forbids locks.)
#[must_use]
pub fn is_taken(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_until_its_file_is_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let holder = std::fs::File::create(&path).unwrap();
        let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        take(&holder).unwrap();
        assert!(is_taken(&take(&other).unwrap_err()));
        drop(holder);
        take(&other).unwrap();
    }

    #[test]
    fn a_lock_is_shared_by_those_that_share_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let open =
            || std::fs::File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let (one, two) = (open().unwrap(), open().unwrap());
        take(&one).unwrap();
        assert!(is_taken(&share(&two).unwrap_err()));
        share(&one).unwrap();
        share(&two).unwrap();
        assert!(is_taken(&take(&one).unwrap_err()));
        drop(two);
        take(&one).unwrap();
    }
}
