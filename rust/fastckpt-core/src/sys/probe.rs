//! System calls for diagnosis only: harmless queries to the kernel, each of which gives an errno.

use std::io;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Size in bytes of `struct io_uring_params`.
const RING_PARAMETERS: usize = 120;
/// An opcode of `io_uring_register` that exists in every kernel with this call: `IORING_REGISTER_FILES`.
const REGISTER_FILES: libc::c_long = 2;

/// The errno of the last call if it returned -1, else 0.
fn errno(returned: libc::c_long) -> i32 {
    if returned == -1 { io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { 0 }
}

/// The errnos of `io_uring_setup`, `io_uring_enter` and `io_uring_register`; 0 means success.
///
/// Only the first call can succeed. The others get no ring, so the kernel itself returns `EBADF` or `EINVAL`, whatever
/// `kernel.io_uring_disabled` is. Any other errno comes from a filter in front of the kernel.
#[must_use]
pub fn ring_calls() -> [i32; 3] {
    let mut parameters = [0u64; RING_PARAMETERS / 8];
    // SAFETY: the kernel writes at most the size of the structure to the array, which is that large and zeroed.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    let setup = errno(ring);
    if let Ok(fd) = libc::c_int::try_from(ring)
        && fd >= 0
    {
        // SAFETY: the call above made this descriptor, and nothing else knows of it.
        unsafe { libc::close(fd) };
    }
    // SAFETY: the call names no descriptor and no memory.
    let enter = errno(unsafe { libc::syscall(libc::SYS_io_uring_enter, -1, 0, 0, 0, 0, 0) });
    // SAFETY: the call names no descriptor and no memory.
    let register = errno(unsafe { libc::syscall(libc::SYS_io_uring_register, -1, REGISTER_FILES, 0, 0) });
    [setup, enter, register]
}

/// The errnos of a request for huge pages and of a request for populated pages; 0 means success.
#[must_use]
pub fn memory_advice() -> [i32; 2] {
    const LEN: usize = 64 << 10;
    let errno = |outcome: Result<(), Errno>| outcome.err().map_or(0, Errno::raw_os_error);
    // SAFETY: a private anonymous mapping at an address the kernel chooses overlaps nothing.
    let mapped = unsafe {
        mmap_anonymous(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let base = match mapped {
        Ok(base) => base,
        Err(refused) => return [refused.raw_os_error(); 2],
    };
    // SAFETY: the range is the mapping just made; neither advice drops its content.
    let huge = errno(unsafe { madvise(base, LEN, Advice::LinuxHugepage) });
    // SAFETY: as above.
    let populate = errno(unsafe { madvise(base, LEN, Advice::LinuxPopulateWrite) });
    // SAFETY: the mapping just made, which nothing else knows of.
    let _ = unsafe { munmap(base, LEN) };
    [huge, populate]
}
