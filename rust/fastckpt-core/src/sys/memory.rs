//! The caller's memory: the bytes of a tensor to save, and the destination of a tensor to load.

use std::ffi::c_void;
use std::hint::black_box;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crc_fast::Digest;
use rustix::mm::{Advice, madvise};

use super::page;

/// The maximum number of stretches of memory per operation of the kernel (`UIO_MAXIOV`).
pub(super) const MOST_VECTORS: usize = 1024;

/// Memory to read, of the caller or of this crate. Its owner may write to it meanwhile, so there is no slice of it: a
/// slice would promise the compiler that it does not change. Its bytes are copied, summed, or passed to the kernel.
#[derive(Debug, Clone, Copy)]
#[repr(C)] // the layout of the kernel's `iovec`
pub struct Bytes<'a> {
    base: *const u8,
    len: usize,
    owner: PhantomData<&'a [u8]>,
}

/// Memory of the caller that holds a tensor.
pub type Source = Bytes<'static>;

// SAFETY: the caller of `new` promised that the memory may be read from any thread, and so may a slice's.
unsafe impl Send for Bytes<'_> {}
// SAFETY: as for `Send`, and there are only reads.
unsafe impl Sync for Bytes<'_> {}

impl Bytes<'_> {
    /// The `len` bytes at `base`.
    ///
    /// # Safety
    /// Until this and every copy of it are gone, the bytes must be readable from any thread, and no `&mut` may cover
    /// one of them. The bytes may change.
    #[must_use]
    pub const unsafe fn new(base: *const u8, len: usize) -> Self {
        Self { base, len, owner: PhantomData }
    }

    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.addr()
    }

    /// The first byte, for the kernel.
    pub(super) const fn pointer(&self) -> *const u8 {
        self.base
    }

    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the memory is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part of `len` bytes that begins at `start`, or `None` if there are fewer bytes.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Option<Self> {
        let inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Self { base: self.base.wrapping_add(start), len, owner: PhantomData })
    }

    /// Copies the bytes to `to`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len, "a copy has two sides of one length");
        if self.is_empty() {
            return; // an empty tensor's address may be null
        }
        // The compiler cannot see which function this is. If it knew that this is a copy, it could read the source a
        // second time where the copy is used, and the two reads could differ.
        let memcpy: Memcpy = black_box(libc::memcpy);
        // SAFETY: by the contract of `new`, the source is readable, and no `&mut`, such as `to`, covers a byte of it.
        // Where the source changes, the C library reads it as the processor does: the copy mixes old and new bytes.
        unsafe { memcpy(to.as_mut_ptr().cast(), self.base.cast(), self.len) };
    }

    /// Adds the bytes to a checksum, in place: copying them first would double the cost.
    pub fn sum(&self, digest: &mut Digest) {
        if self.is_empty() {
            return;
        }
        // SAFETY: the memory is readable by the contract of `new`. `update` only accepts a slice, and the promise that
        // the bytes of a slice do not change cannot be kept here. `update` computes a number from them and keeps no
        // reference. Whatever it reads, once or twice, it stays within the slice, and within tables that have an entry
        // for each byte. So the number for changing bytes may belong to no bytes that ever existed, and nothing else is
        // wrong. A save that wrote such bytes sums them again (`Assembler::has_changed`).
        digest.update(unsafe { std::slice::from_raw_parts(self.base, self.len) });
    }
}

type Memcpy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { base: bytes.as_ptr(), len: bytes.len(), owner: PhantomData }
    }
}

impl Default for Bytes<'_> {
    fn default() -> Self {
        Self::from(&[][..])
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

    /// The first `len` bytes as a separate region. `self` keeps the rest.
    ///
    /// # Panics
    /// If the region has fewer bytes.
    #[must_use]
    pub fn split_off_front(&mut self, len: usize) -> Self {
        assert!(len <= self.len, "{len} bytes of {}", self.len);
        let front = Self { base: self.base, len };
        self.base = self.base.wrapping_add(len);
        self.len -= len;
        front
    }

    /// The whole region; `self` is empty afterwards.
    #[must_use]
    pub fn take(&mut self) -> Self {
        self.split_off_front(self.len)
    }

    /// Makes the pages of the region present before the kernel writes into them, because a page fault per 4 KiB inside
    /// a direct read costs as much as the read. This is only advice.
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
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;

    use super::super::thread::builder;
    use super::*;
    use crate::format::checksum::Pair;

    #[test]
    fn what_is_copied_has_its_sum_while_another_thread_writes_to_the_source() {
        let source: Vec<_> = (0..100_000).map(AtomicU64::new).collect();
        let (mut room, done) = (vec![0; source.len() * 8 + 64], AtomicBool::new(false));
        // The copy starts at an address at which stores may bypass the caches.
        let start = room.as_ptr().align_offset(64);
        let to = &mut room[start..][..source.len() * 8];
        // SAFETY: `source` outlives the bytes, and nothing has them as `&mut`.
        let bytes = unsafe { Bytes::new(source.as_ptr().cast(), to.len()) };
        thread::scope(|scope| {
            builder()
                .spawn_scoped(scope, || {
                    for word in source.iter().cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                        word.fetch_add(1, Ordering::Relaxed);
                    }
                })
                .unwrap();
            let right = (0..50).all(|_| Pair::copy(to, bytes) == Pair::of(to));
            done.store(true, Ordering::Relaxed);
            assert!(right, "a sum belongs to its copy");
        });
        assert_eq!(Pair::of_memory(bytes), Pair::copy(to, bytes), "no thread writes any more");
    }

    #[test]
    fn no_bytes_may_have_no_address() {
        // SAFETY: there are no bytes.
        let none: Source = unsafe { Bytes::new(std::ptr::null(), 0) };
        none.copy(&mut []);
        assert_eq!((Pair::of_memory(none), none.part(0, 1).is_none()), (Pair::of(&[]), true));
    }

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
