//! Memory for snapshots: large, reused between saves, and touched for the first time by whoever fills it.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const HUGE_PAGE: usize = 2 << 20;

/// A zeroed mapping of whole huge pages, never inherited by a forked child.
///
/// Unlike a slab it is not populated: the threads that copy into it take its page faults together.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    owner: u32,
}

// SAFETY: an arena is the only owner of its mapping, which is plain memory.
unsafe impl Send for Arena {}
// SAFETY: through a shared arena only reads are possible.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps at least `len` bytes.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).checked_next_multiple_of(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
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
                // SAFETY: both ranges are page-aligned parts of the mapping just made, outside the arena, and nobody knows of them.
                let _ = unsafe { munmap(at.cast(), size) };
            }
        }
        let arena = Self {
            base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?,
            len,
            owner: std::process::id(),
        };
        // Advice only: without huge pages or fork protection the arena still works.
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: the range is the mapping just made, and neither advice drops content.
            let _ = unsafe { madvise(arena.base.as_ptr().cast(), arena.len, advice) };
        }
        Ok(arena)
    }

    /// Whether this process made it. In a forked child the memory is not there.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // In a child the range was never mapped, and may be somebody else's by now.
        if self.is_ours() {
            // SAFETY: the mapping is ours alone, and whoever borrowed from it has ended.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

impl Deref for Arena {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        if !self.is_ours() {
            return &[];
        }
        // SAFETY: the mapping is `len` readable, initialised bytes that live as long as the arena.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for Arena {
    fn deref_mut(&mut self) -> &mut [u8] {
        if !self.is_ours() {
            return &mut [];
        }
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_aligned_zeroed_and_writable_to_its_end() {
        let mut arena = Arena::new(HUGE_PAGE + 1).unwrap();
        assert_eq!(arena.len(), 2 * HUGE_PAGE);
        assert!(arena.as_ptr().addr().is_multiple_of(HUGE_PAGE));
        assert!(arena.iter().step_by(4096).all(|&byte| byte == 0));
        arena.fill(7);
        assert_eq!((arena[0], arena[2 * HUGE_PAGE - 1]), (7, 7));
        assert!(Arena::new(usize::MAX).is_err());
    }

    #[test]
    fn a_child_sees_nothing_of_it_and_unmaps_nothing() {
        let mut arena = Arena::new(1).unwrap();
        arena.owner ^= 1; // as after a fork
        assert!(arena.is_empty());
        let (base, len) = (arena.base, arena.len);
        drop(arena);
        let again = Arena { base, len, owner: std::process::id() };
        assert_eq!(again[0], 0, "still mapped");
    }
}
