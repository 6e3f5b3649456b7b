//! A part of memory that serves several staging buffers.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use super::file::PAGE;
use super::mapping::Mapping;

/// The alignment of parts.
pub(super) const PAGES: usize = PAGE as usize;

/// A part of a mapping. It has a single owner, and keeps the mapping mapped.
#[derive(Debug)]
pub struct Dealt {
    mapping: Arc<Mapping>,
    range: Range<usize>,
    /// Shared with the other parts of a buffer. The buffer is not dealt again while one of its parts is alive.
    live: Arc<()>,
}

impl Dealt {
    /// Splits off the first `len` bytes. Returns them and the rest.
    ///
    /// # Panics
    /// If there are fewer than `len` bytes.
    #[must_use]
    pub fn split(self, len: usize) -> (Self, Self) {
        assert!(len <= self.range.len(), "{len} bytes of {}", self.range.len());
        let Self { mapping, range, live } = self;
        let middle = range.start + len;
        let front =
            Self { mapping: Arc::clone(&mapping), range: range.start..middle, live: Arc::clone(&live) };
        (front, Self { mapping, range: middle..range.end, live })
    }
}

impl Deref for Dealt {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let Some(base) = self.mapping.pointer(&self.range) else { return &[] };
        // SAFETY: the range lies in the mapping, which `self` keeps. No other part has a byte of it: a `Dealer` (`sys/buffers.rs`) is the
        // only owner of its mapping when it begins, it deals each byte to one buffer, and a buffer deals its bytes
        // again only when all its parts are gone.
        unsafe { std::slice::from_raw_parts(base.as_ptr(), self.range.len()) }
    }
}

impl DerefMut for Dealt {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Some(base) = self.mapping.pointer(&self.range) else { return &mut [] };
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), self.range.len()) }
    }
}

/// Memory whose parts are dealt one after another, until all of them are gone.
#[derive(Debug)]
pub(super) struct Buffer {
    mapping: Arc<Mapping>,
    range: Range<usize>,
    used: usize,
    live: Arc<()>,
}

impl Buffer {
    /// Deals out `range` of a mapping. No byte of it may belong to another buffer.
    pub(super) fn new(mapping: Arc<Mapping>, range: Range<usize>) -> Self {
        Self { mapping, range, used: 0, live: Arc::default() }
    }

    /// Whether `len` bytes are free.
    pub(super) fn has(&mut self, len: usize) -> bool {
        if Arc::get_mut(&mut self.live).is_some() {
            self.used = 0;
        }
        len <= self.range.len() - self.used
    }

    /// The next `len` bytes. [`Self::has`] must have returned true for them.
    pub(super) fn deal(&mut self, len: usize) -> Dealt {
        let start = self.range.start + self.used;
        self.used = (self.used + len).next_multiple_of(PAGES).min(self.range.len());
        let (mapping, live) = (Arc::clone(&self.mapping), Arc::clone(&self.live));
        Dealt { mapping, range: start..start + len, live }
    }

    /// The mapping.
    pub(super) fn into_mapping(self) -> Arc<Mapping> {
        self.mapping
    }
}
