//! Anonymous memory in huge pages, for staging buffers and snapshots.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Mappings are aligned to this size and backed by pages of this size where the kernel grants them. With 4 KiB pages, a
/// request to the device breaks into pieces of about 1 MiB and costs three times the CPU time.
pub const HUGE_PAGE: usize = 2 << 20;

/// Size of the mapping that holds `len` bytes, or `None` if it exceeds `usize`.
#[must_use]
pub const fn size_for(len: usize) -> Option<usize> {
    let len = if len == 0 { 1 } else { len };
    len.checked_next_multiple_of(HUGE_PAGE)
}

/// A zeroed mapping of whole huge pages. A forked child never inherits it, and sees it as empty.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    owner: u32,
}

// SAFETY: a mapping is the only owner of its memory, which is plain bytes.
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping allows only reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len` bytes. The threads that fill them first take the page faults.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = size_for(len).ok_or(io::ErrorKind::OutOfMemory)?;
        // Maps one more huge page, so that an aligned range of `len` bytes lies inside. The rest is unmapped.
        let whole = len.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a private anonymous mapping at an address the kernel chooses overlaps nothing.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?
        .cast::<u8>();
        let lead = start.align_offset(HUGE_PAGE);
        let base = start.wrapping_add(lead);
        for (at, size) in [(start, lead), (base.wrapping_add(len), HUGE_PAGE - lead)] {
            if size > 0 {
                // SAFETY: both ranges are page-aligned parts of the mapping just made, outside the part that is kept,
                // and nothing else knows of them.
                let _ = unsafe { munmap(at.cast(), size) };
            }
        }
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { base, len, owner: std::process::id() };
        // This is only advice: without huge pages or fork protection, the memory still works.
        mapping.advise(Advice::LinuxHugepage);
        mapping.advise(Advice::LinuxDontFork);
        Ok(mapping)
    }

    /// Like [`Self::new`], with every page present.
    pub fn populated(len: usize) -> io::Result<Self> {
        let mut mapping = Self::new(len)?;
        if !mapping.advise(Advice::LinuxPopulateWrite) {
            mapping.fill(0);
        }
        Ok(mapping)
    }

    fn advise(&self, advice: Advice) -> bool {
        // SAFETY: the range is this mapping's own, and no advice used here drops its content.
        unsafe { madvise(self.base.as_ptr().cast(), self.len, advice) }.is_ok()
    }

    /// The number of bytes. It is the same in a child.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.len
    }

    /// The start of `range`, or `None` if the mapping does not have all of it, or belongs to another process.
    pub(super) fn pointer(&self, range: &Range<usize>) -> Option<NonNull<u8>> {
        let inside = range.start <= range.end && range.end <= self.len && self.is_ours();
        NonNull::new(self.base.as_ptr().wrapping_add(range.start)).filter(|_| inside)
    }

    /// Whether this process made the mapping.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a child, the range was never mapped and may belong to another mapping by now.
        if self.is_ours() {
            // SAFETY: the mapping is ours alone, nothing borrows from it, and no kernel operation holds it: operations
            // own the memory that they move.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

impl Deref for Mapping {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        if !self.is_ours() {
            return &[];
        }
        // SAFETY: the mapping is `len` readable, zero-initialised bytes that live as long as this object.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        if !self.is_ours() {
            return &mut [];
        }
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

/// Bytes of a mapping with several readers. While a stretch exists, nothing writes to any part of its mapping.
#[derive(Debug, Clone)]
pub struct Stretch {
    mapping: Arc<Mapping>,
    range: Range<usize>,
}

impl Stretch {
    /// The bytes of `range`, or `None` if the mapping does not have all of them.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, range: Range<usize>) -> Option<Self> {
        mapping.get(range.clone())?;
        Some(Self { mapping: Arc::clone(mapping), range })
    }

    /// The bytes of `range`, counted within this stretch, or `None` if it does not have all of them.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        self.get(range.clone())?;
        Self::new(&self.mapping, self.range.start + range.start..self.range.start + range.end)
    }
}

impl Deref for Stretch {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.mapping.get(self.range.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_aligned_zeroed_and_writable_to_its_end() {
        for make in [Mapping::new, Mapping::populated] {
            let mut mapping = make(HUGE_PAGE + 1).unwrap();
            assert_eq!(mapping.len(), 2 * HUGE_PAGE);
            assert!(mapping.as_ptr().addr().is_multiple_of(HUGE_PAGE));
            assert!(mapping.iter().step_by(4096).all(|&byte| byte == 0));
            mapping.fill(7);
            assert_eq!((mapping[0], mapping[2 * HUGE_PAGE - 1]), (7, 7));
            assert!(make(usize::MAX).is_err());
        }
    }

    #[test]
    fn a_child_sees_nothing_of_it_and_unmaps_nothing() {
        let mut mapping = Mapping::new(1).unwrap();
        mapping.owner ^= 1; // as after a fork
        assert!(mapping.is_empty());
        let (base, len) = (mapping.base, mapping.len);
        drop(mapping);
        let again = Mapping { base, len, owner: std::process::id() };
        assert_eq!(again[0], 0, "still mapped");
    }
}
