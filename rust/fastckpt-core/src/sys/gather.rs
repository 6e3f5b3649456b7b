//! The memory that one operation moves: stretches of a staging buffer and of the caller's memory, in file order.

use std::fmt::Debug;
use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::Arc;

use super::map::FileMap;
use super::mapping::Stretch;
use super::memory::{Bytes, Region, Source};
use super::slabs::Slab;

/// One stretch of the memory of an operation.
#[derive(Debug)]
pub enum Part {
    /// Bytes of the operation's staging buffer.
    Slab(Range<usize>),
    /// The caller's memory, written to a file.
    Source(Source),
    /// Memory of a snapshot, written to a file.
    Stretch(Stretch),
    /// The caller's memory, to be filled from a file.
    Region(Region),
    /// Bytes of a mapped file, to be brought into memory. This is always the only part.
    Mapped(Arc<FileMap>, Range<usize>),
}

impl Part {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Slab(range) | Self::Mapped(_, range) => range.len(),
            Self::Source(source) => source.len(),
            Self::Stretch(stretch) => stretch.len(),
            Self::Region(region) => region.len(),
        }
    }

    /// Whether the part has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes that a store sent, in memory of its client. They never change.
pub trait Fetched: AsRef<[u8]> + Debug + Send + Sync {}
impl<T: AsRef<[u8]> + Debug + Send + Sync> Fetched for T {}

/// The memory of an operation. The operation owns it while the kernel may access it.
#[derive(Debug)]
pub struct Buf {
    slab: Option<Slab>,
    parts: Vec<Part>,
    fetched: Option<Box<dyn Fetched>>,
}

impl Buf {
    /// Memory that consists of `parts`. The parts in the staging buffer must be in its order, without overlap.
    ///
    /// # Panics
    /// If a part is outside the staging buffer or starts before the end of the previous one.
    #[must_use]
    pub fn new(slab: Option<Slab>, parts: Vec<Part>) -> Self {
        let mut at = 0;
        for part in &parts {
            if let Part::Slab(range) = part {
                assert!(at <= range.start && range.start <= range.end, "parts of a slab follow each other");
                at = range.end;
            }
        }
        assert!(at <= slab.as_ref().map_or(0, |slab| slab.len()), "{at} bytes of a slab that is smaller");
        Self { slab, parts, fetched: None }
    }

    /// The first `len` bytes of `slab`.
    #[must_use]
    pub fn staged(slab: Slab, len: usize) -> Self {
        Self::new(Some(slab), vec![Part::Slab(0..len)])
    }

    /// The parts.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The mapped file and the range of its bytes, or `None` if this is not a mapped part.
    #[must_use]
    pub fn mapped(&self) -> Option<(&FileMap, &Range<usize>)> {
        match self.parts.first() {
            Some(Part::Mapped(map, range)) => Some((map, range)),
            _ => None,
        }
    }

    /// The bytes of the staging buffer, or the bytes that a store sent instead; empty if there are none.
    #[must_use]
    pub fn slab(&self) -> &[u8] {
        let fetched = self.fetched.as_deref().map(AsRef::as_ref);
        fetched.or(self.slab.as_deref()).unwrap_or_default()
    }

    /// Keeps the bytes that a store sent.
    pub fn fetched(&mut self, bytes: Box<dyn Fetched>) {
        self.fetched = Some(bytes);
    }

    /// Bytes of staging memory.
    #[must_use]
    pub fn staging(&self) -> usize {
        self.slab.as_deref().map_or(0, <[u8]>::len)
    }

    /// Returns the staging buffer, for reuse.
    #[must_use]
    pub fn into_slab(self) -> Option<Slab> {
        self.slab
    }

    /// The bytes of `range`, counted over all parts, for writing to a file.
    #[must_use]
    pub fn slices(&self, range: Range<usize>) -> Vec<Bytes<'_>> {
        let mut at = 0;
        let mut slices = Vec::with_capacity(self.parts.len());
        let slab = self.slab();
        for part in &self.parts {
            let bytes = match part {
                Part::Slab(range) => Bytes::from(&slab[range.clone()]),
                Part::Source(source) => *source,
                Part::Stretch(stretch) => Bytes::from(&**stretch),
                Part::Region(region) => Bytes::from(&**region),
                Part::Mapped(map, range) => map.bytes(range.clone()).into(),
            };
            let inside = clip(&range, at, bytes.len());
            at += bytes.len();
            slices.extend(bytes.part(inside.start, inside.len()).filter(|part| !part.is_empty()));
        }
        slices
    }

    /// The bytes of `range`, counted over all parts, for filling from a file.
    ///
    /// # Panics
    /// If one of the parts is a [`Part::Source`], [`Part::Stretch`] or [`Part::Mapped`].
    #[must_use]
    pub fn slices_mut(&mut self, range: Range<usize>) -> Vec<IoSliceMut<'_>> {
        let (mut at, mut passed) = (0, 0);
        let mut slices = Vec::with_capacity(self.parts.len());
        let mut rest: &mut [u8] = self.slab.as_deref_mut().unwrap_or_default();
        for part in &mut self.parts {
            let bytes: &mut [u8] = match part {
                Part::Slab(range) => {
                    let (part, after) = rest.split_at_mut(range.end - passed);
                    rest = after;
                    let part = &mut part[range.start - passed..];
                    passed = range.end;
                    part
                }
                Part::Region(region) => region,
                Part::Source(_) | Part::Stretch(_) | Part::Mapped(..) => {
                    panic!("memory that is only read cannot be filled")
                }
            };
            let inside = clip(&range, at, bytes.len());
            at += bytes.len();
            if !inside.is_empty() {
                slices.push(IoSliceMut::new(&mut bytes[inside]));
            }
        }
        slices
    }
}

/// The bytes in `range` of a part that starts at `at` and is `len` bytes long.
fn clip(range: &Range<usize>, at: usize, len: usize) -> Range<usize> {
    let from = range.start.clamp(at, at + len) - at;
    from..range.end.clamp(at + from, at + len) - at
}

#[cfg(test)]
mod tests {
    use super::super::slabs;
    use super::*;

    /// `ab` in the staging buffer, `cde` in memory, `fg` in the staging buffer.
    fn buf(memory: &mut [u8]) -> Buf {
        let mut slab = slabs::take(4).unwrap();
        slab[..4].copy_from_slice(b"abfg");
        memory.copy_from_slice(b"cde");
        // SAFETY: the tests keep `memory` alive and do not access it until they are done with the buffer.
        let region = unsafe { Region::new(memory.as_mut_ptr(), memory.len()) };
        Buf::new(Some(slab), vec![Part::Slab(0..2), Part::Region(region), Part::Slab(2..4)])
    }

    #[test]
    fn every_range_is_made_of_the_right_slices() {
        let mut memory = [0; 3];
        let mut buf = buf(&mut memory);
        for start in 0..=7 {
            for end in start..=7 {
                let wanted = &b"abcdefg"[start..end];
                let copied = |part: &Bytes<'_>| {
                    let mut bytes = vec![0; part.len()];
                    part.copy(&mut bytes);
                    bytes
                };
                assert_eq!(buf.slices(start..end).iter().flat_map(copied).collect::<Vec<_>>(), wanted);
                let filled: Vec<u8> = buf.slices_mut(start..end).iter().flat_map(|s| s.to_vec()).collect();
                assert_eq!(filled, wanted);
            }
        }
    }

    #[test]
    fn what_is_filled_lands_in_slab_and_memory() {
        let mut memory = [0; 3];
        let mut buf = buf(&mut memory);
        for (slice, with) in buf.slices_mut(1..6).into_iter().zip([&b"B"[..], b"CDE", b"F"]) {
            let mut slice = slice;
            slice.copy_from_slice(with);
        }
        assert_eq!(&buf.slab()[..4], b"aBFg");
        drop(buf);
        assert_eq!(&memory, b"CDE");
    }

    #[test]
    #[should_panic(expected = "follow each other")]
    fn parts_of_a_slab_that_overlap_are_refused() {
        let slab = slabs::take(4).unwrap();
        let _ = Buf::new(Some(slab), vec![Part::Slab(0..3), Part::Slab(2..4)]);
    }

    #[test]
    #[should_panic(expected = "cannot be filled")]
    fn memory_that_is_only_read_is_not_filled() {
        let memory = [0u8; 4];
        // SAFETY: `memory` outlives the source.
        let source = unsafe { Source::new(memory.as_ptr(), memory.len()) };
        let _ = Buf::new(None, vec![Part::Source(source)]).slices_mut(0..4);
    }
}
