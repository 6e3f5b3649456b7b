//! How much of a file is in the page cache.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::page;

/// The system call `cachestat` (Linux 6.5). Calls this recent have the same number on every architecture.
const CACHESTAT: libc::c_long = 451;

/// Number of bytes of `[offset, offset + len)` that the page cache holds, in whole pages.
pub fn cached_bytes(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<u64> {
    Ok(cached_pages(fd, offset, len)? * page::size() as u64)
}

/// Number of pages of `[offset, offset + len)` that the page cache holds.
pub fn cached_pages(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<u64> {
    let range = [offset, len];
    // nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted
    let mut pages = [0u64; 5];
    // SAFETY: the kernel reads the two numbers of the range and writes five. Both arrays outlive the call.
    let returned = unsafe { libc::syscall(CACHESTAT, fd.as_raw_fd(), range.as_ptr(), pages.as_mut_ptr(), 0) };
    if returned == 0 { Ok(pages[0]) } else { Err(io::Error::last_os_error()) }
}
