//! Files as memory: pages of the page cache. The first write to a page copies the page, so no write reaches the file.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::page;

/// A private mapping of a file.
#[derive(Debug)]
pub struct FileMap {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping lives as long as this object, which only hands out its address and, through `bytes`, shared
// reads.
unsafe impl Send for FileMap {}
// SAFETY: as for `Send`.
unsafe impl Sync for FileMap {}

impl FileMap {
    /// Maps the first `len > 0` bytes of `fd`, which may be open for reading only.
    pub fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address the kernel chooses overlaps nothing.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE, fd, 0)
        }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }

    /// The address of the file's first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Bytes mapped.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the mapping has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Brings the pages of `range` into memory and maps them. A failing disk is an error here. Later, it would raise a
    /// signal.
    pub fn populate(&self, range: &Range<usize>) -> io::Result<()> {
        self.populate_pages(range, page::size())
    }

    fn populate_pages(&self, range: &Range<usize>, page: usize) -> io::Result<()> {
        let pages = page::around(range.start.min(self.len)..range.end.min(self.len), page);
        let at = self.base.as_ptr().wrapping_add(pages.start).cast();
        // The first advice makes the file system read the whole range. Page faults would request little at a time.
        for advice in [Advice::WillNeed, Advice::LinuxPopulateRead] {
            // SAFETY: the pages are those of the mapping, and neither advice changes their content.
            match unsafe { madvise(at, pages.len(), advice) } {
                Err(Errno::FAULT | Errno::HWPOISON) => return Err(Errno::IO.into()),
                // Every kernel supports the first advice, so the kernel refuses the range. If that were ignored, a
                // failing disk would raise a signal.
                Err(Errno::INVAL) if advice == Advice::WillNeed => return Err(Errno::INVAL.into()),
                // Any other failure only means that pages are read at the first access, as before Linux 5.14.
                _ => {}
            }
        }
        Ok(())
    }

    /// The bytes of `range`. They are valid as long as nothing writes through the address.
    ///
    /// # Panics
    /// If the file has fewer bytes.
    #[must_use]
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        // SAFETY: the range lies in the mapping. Writing through the address takes unsafe code, which must wait until
        // these bytes are no longer read: Python hands out this memory only after the load has ended. If a process
        // changes the file in place meanwhile, which is forbidden, bytes change under a reader. Their checksum then
        // fails, or has already matched. Nothing else depends on them.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().wrapping_add(range.start), range.len()) }
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and every user of its address keeps this object alive.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_mapping_holds_the_file_and_writes_stay_in_it() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let map = FileMap::new(file.as_fd(), 5000).unwrap();
        map.populate(&(10..5000)).unwrap();
        assert_eq!(map.bytes(0..5000), [7; 5000]);
        // SAFETY: the first byte of a writable mapping, which nothing reads meanwhile.
        unsafe { map.base.as_ptr().write(8) };
        let other = FileMap::new(file.as_fd(), 5000).unwrap();
        assert_eq!((map.bytes(0..2), other.bytes(0..2)), (&[8, 7][..], &[7, 7][..]));
    }

    #[test]
    fn a_range_that_the_kernel_refuses_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 8192]).unwrap();
        let map = FileMap::new(file.as_fd(), 8192).unwrap();
        // This assumes smaller pages than the machine has, like code that assumes 4096 on a machine with 64 KiB pages.
        let outcome = map.populate_pages(&(600..5000), 512);
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        map.populate(&(600..5000)).unwrap();
    }

    #[test]
    fn what_the_file_does_not_have_is_an_error_and_no_signal() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 8192]).unwrap();
        let map = FileMap::new(file.as_fd(), 8192).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(map.populate(&(0..8192)).unwrap_err().raw_os_error(), Some(libc::EIO));
    }
}
