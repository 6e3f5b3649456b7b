//! The caller's memory: where a tensor to save lies, and where a tensor that is read goes.

use std::ops::{Deref, DerefMut};

use rustix::mm::{Advice, madvise};

use super::page;

/// Read-only memory of the caller, where a tensor lies.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    base: *const u8,
    len: usize,
}

// SAFETY: the caller of `new` promised that the memory may be read from any thread.
unsafe impl Send for Source {}
// SAFETY: likewise, and there are only reads.
unsafe impl Sync for Source {}

impl Source {
    /// A view of `len` bytes at `base`.
    ///
    /// # Safety
    /// Until the source and every copy of it are gone, the bytes must be readable from any thread and must not change.
    #[must_use]
    pub const unsafe fn new(base: *const u8, len: usize) -> Self {
        Self { base, len }
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.addr()
    }

    /// The part of `len` bytes from `start` on, or `None` if there are fewer bytes.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Option<Self> {
        let inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Self { base: self.base.wrapping_add(start), len })
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[]; // an empty tensor's address may be null
        }
        // SAFETY: the contract of `new`.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

/// Writable memory of the caller: the destination of a tensor.
#[derive(Debug)]
pub struct Region {
    base: *mut u8,
    len: usize,
}

// SAFETY: the caller of `new` promised exclusive access from any thread.
unsafe impl Send for Region {}
// SAFETY: a shared region allows only reads, of memory that nothing else uses, as its owner promised.
unsafe impl Sync for Region {}

impl Region {
    /// Exclusive access to `len` bytes at `base`.
    ///
    /// # Safety
    /// Until the region and everything split from it are gone, the bytes must be writable from any thread, and nothing
    /// else may read or write them.
    #[must_use]
    pub const unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.addr()
    }

    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes as a separate region. This one keeps the rest.
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[must_use]
    pub fn split_off_front(&mut self, len: usize) -> Self {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        let front = Self { base: self.base, len };
        self.base = self.base.wrapping_add(len);
        self.len -= len;
        front
    }

    /// The whole region; this one is empty afterwards.
    #[must_use]
    pub fn take(&mut self) -> Self {
        self.split_off_front(self.len)
    }

    /// Makes the pages of the region present before the kernel writes into them. A page fault per 4 KiB inside a direct
    /// read costs as much as the read. This is only advice.
    pub fn populate(&self) {
        let pages = page::inside(self.address()..self.address() + self.len, page::size());
        if !pages.is_empty() {
            let at = self.base.wrapping_add(pages.start - self.address()).cast();
            // SAFETY: the range lies in the region, which is writable memory by the contract of `new`. Populating
            // changes no content.
            let _ = unsafe { madvise(at, pages.len(), Advice::LinuxPopulateWrite) };
        }
    }
}

impl Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the contract of `new`.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the contract of `new`. Splitting leaves no byte in two regions, and `&mut self` makes this the only
        // access.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_split_without_overlap() {
        let mut memory = *b"frontrest";
        // SAFETY: `memory` outlives the region and is not accessed otherwise.
        let mut rest = unsafe { Region::new(memory.as_mut_ptr(), memory.len()) };
        let front = rest.split_off_front(5);
        assert_eq!((&*front, &*rest), (&b"front"[..], &b"rest"[..]));
        assert_eq!((rest.take().len(), rest.len()), (4, 0));
    }

    #[test]
    #[should_panic(expected = "2 bytes of 1")]
    fn a_part_cannot_be_larger_than_its_region() {
        let mut memory = [0u8; 1];
        // SAFETY: as above.
        let mut region = unsafe { Region::new(memory.as_mut_ptr(), memory.len()) };
        let _ = region.split_off_front(2);
    }
}
