//! Memory that the kernel reads and writes: staging slabs of our own, and regions of the caller's.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Mutex, TryLockError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::page;

/// Slabs are aligned to this and backed by pages of it where the kernel grants them. With 4 KiB pages a request to the
/// device breaks into pieces of about 1 MiB and costs three times the CPU.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of the slab that holds `len` bytes.
#[must_use]
pub const fn slab_size(len: usize) -> usize {
    let len = if len == 0 { 1 } else { len };
    len.next_multiple_of(HUGE_PAGE)
}

/// A page-aligned buffer for direct I/O, populated, never inherited by a forked child.
#[derive(Debug)]
pub struct Slab {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a slab is the only owner of its mapping, which is plain memory.
unsafe impl Send for Slab {}
// SAFETY: through a shared slab only reads are possible.
unsafe impl Sync for Slab {}

impl Slab {
    /// Maps `len` bytes, rounded up to whole huge pages.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = slab_size(len);
        // One huge page more, so that an aligned range of `len` lies inside; the rest is given back.
        let whole = len + HUGE_PAGE;
        // SAFETY: a private anonymous mapping at an address the kernel chooses overlaps nothing.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                whole,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?
        .cast::<u8>();
        let lead = start.align_offset(HUGE_PAGE);
        let base = start.wrapping_add(lead);
        for (at, size) in [(start, lead), (base.wrapping_add(len), HUGE_PAGE - lead)] {
            if size > 0 {
                // SAFETY: both ranges are page-aligned parts of the mapping just made, outside the slab, and nobody knows of them.
                let _ = unsafe { munmap(at.cast(), size) };
            }
        }
        let mut slab = Self { base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, len };
        // Advice only: without huge pages or fork protection the slab still works.
        slab.advise(Advice::LinuxHugepage);
        slab.advise(Advice::LinuxDontFork);
        if !slab.advise(Advice::LinuxPopulateWrite) {
            slab.fill(0);
        }
        Ok(slab)
    }

    fn advise(&self, advice: Advice) -> bool {
        // SAFETY: the range is this slab's own mapping; none of the advices used drops its content.
        unsafe { madvise(self.base.as_ptr().cast(), self.len, advice) }.is_ok()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and no operation of the kernel's holds it: operations own their slabs.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Deref for Slab {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is `len` readable, zero-initialised bytes that live as long as the slab.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

/// Slabs kept for the next operation, with the process they belong to: first touch of memory costs as much as the disk.
static POOL: Mutex<(u32, Vec<Slab>)> = Mutex::new((0, Vec::new()));

/// Runs `action` on the pool, or not at all: a child forked while another thread held the lock would wait for ever,
/// and an empty-handed caller just maps fresh memory.
fn with_pool<T>(action: impl FnOnce(&mut Vec<Slab>) -> T) -> Option<T> {
    let mut pool = (0..1000).find_map(|_| match POOL.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(pool)) => Some(pool.into_inner()),
        Err(TryLockError::WouldBlock) => {
            std::thread::yield_now();
            None
        }
    })?;
    let pid = std::process::id();
    if pool.0 != pid {
        // A forked child has the list but not the memory (MADV_DONTFORK): unmapping what may since be somebody
        // else's mapping at that address would be worse than forgetting it.
        std::mem::take(&mut pool.1).into_iter().for_each(std::mem::forget);
        pool.0 = pid;
    }
    Some(action(&mut pool.1))
}

/// A slab of at least `len` bytes, reused where one is free.
pub fn take_slab(len: usize) -> io::Result<Slab> {
    let (fits, _unmapped) = with_pool(|pool| {
        let fits = smallest_fit(pool, len);
        // One that is too small goes for each new one, or the pool would only grow.
        let small = if fits.is_none() { pool.pop() } else { None };
        (fits, small)
    })
    .unwrap_or_default();
    fits.map_or_else(|| Slab::new(len), Ok)
}

/// Takes the smallest of `slabs` that holds `len` bytes.
pub fn smallest_fit(slabs: &mut Vec<Slab>, len: usize) -> Option<Slab> {
    let fits = slabs.iter().enumerate().filter(|(_, slab)| slab.len() >= len);
    let (at, _) = fits.min_by_key(|(_, slab)| slab.len())?;
    Some(slabs.swap_remove(at))
}

/// Gives slabs back for reuse; what exceeds `keep` bytes in all is unmapped.
pub fn give_slabs(slabs: Vec<Slab>, keep: usize) {
    with_pool(|pool| {
        let mut kept: usize = pool.iter().map(|slab| slab.len()).sum();
        for slab in slabs {
            if kept + slab.len() <= keep {
                kept += slab.len();
                pool.push(slab);
            }
        }
    });
}

/// Read-only memory of the caller's: where a tensor lies.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    base: *const u8,
    len: usize,
}

// SAFETY: whoever made the source promised that the memory may be read from any thread.
unsafe impl Send for Source {}
// SAFETY: likewise, and there are only reads.
unsafe impl Sync for Source {}

impl Source {
    /// A view of `len` bytes at `base`.
    ///
    /// # Safety
    /// Until the source and every copy of it is gone, the bytes must be readable from any thread and not change.
    #[must_use]
    pub const unsafe fn new(base: *const u8, len: usize) -> Self {
        Self { base, len }
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.addr()
    }

    /// The part of `len` bytes from `start` on, or nothing if there are fewer.
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

/// Writable memory of the caller's: where a tensor is to go.
#[derive(Debug)]
pub struct Region {
    base: *mut u8,
    len: usize,
}

// SAFETY: whoever made the region promised exclusive access from any thread.
unsafe impl Send for Region {}
// SAFETY: through a shared region there are only reads, of memory that its owner promised is nobody else's.
unsafe impl Sync for Region {}

impl Region {
    /// Exclusive access to `len` bytes at `base`.
    ///
    /// # Safety
    /// Until the region and everything split from it is gone, the bytes must be writable from any thread, and nobody else may
    /// read or write them.
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

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes as a region of their own; this one keeps the rest.
    ///
    /// # Panics
    /// If there are fewer.
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

    /// Makes the pages of the region present before the kernel writes into them: a page fault for each 4 KiB inside
    /// a direct read costs as much as the read. Advice only.
    pub fn populate(&self) {
        let pages = page::inside(self.address()..self.address() + self.len, page::size());
        if !pages.is_empty() {
            let at = self.base.wrapping_add(pages.start - self.address()).cast();
            // SAFETY: the range lies in the region, which the contract of `new` makes writable memory; populating changes no
            // content.
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
        // SAFETY: the contract of `new`, and splitting leaves no byte in two regions; and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_aligned_zeroed_and_reused() {
        let slab = take_slab(1 << 20).unwrap();
        assert!(slab.as_ptr().addr().is_multiple_of(HUGE_PAGE));
        assert!(slab.len() >= 1 << 20);
        let address = slab.as_ptr();
        give_slabs(vec![slab], usize::MAX);
        let found = (0..64).map(|_| take_slab(1 << 20).unwrap()).collect::<Vec<_>>();
        assert!(found.iter().any(|slab| slab.as_ptr() == address));
        give_slabs(found, 0);
    }

    #[test]
    fn regions_split_without_overlap() {
        let mut memory = *b"frontrest";
        // SAFETY: `memory` outlives the region and is not touched beside it.
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
