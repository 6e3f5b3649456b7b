//! Memory that is divided into several staging buffers.

use std::io;
use std::sync::Arc;

use super::dealt::{Buffer, Dealt, PAGES};
use super::mapping::{HUGE_PAGE, Mapping};
use super::slabs::{self, Slab};

/// A mapping that is dealt out to several [`Buffers`].
#[derive(Debug)]
pub struct Dealer {
    mapping: Arc<Mapping>,
    used: usize,
}

impl Dealer {
    /// Deals out `mapping`. Fails and returns it if it is in use elsewhere or belongs to another process.
    pub fn new(mut mapping: Arc<Mapping>) -> Result<Self, Arc<Mapping>> {
        let alone = Arc::get_mut(&mut mapping).is_some_and(|mapping| mapping.is_ours());
        if alone { Ok(Self { mapping, used: 0 }) } else { Err(mapping) }
    }

    /// The next `count` buffers of `size` bytes, or fewer if there is not enough memory.
    pub fn deal(&mut self, size: usize, count: usize) -> Buffers {
        let count = count.min((self.mapping.size() - self.used) / size.max(1));
        let buffer = |number| {
            let start = self.used + number * size;
            Buffer::new(Arc::clone(&self.mapping), start..start + size)
        };
        let all = (0..count).map(buffer).collect();
        self.used += count * size;
        Buffers { all, size, most: 0 }
    }

    /// The mapping. Parts that are alive hold references to it, too.
    #[must_use]
    pub fn into_mapping(self) -> Arc<Mapping> {
        self.mapping
    }
}

/// The staging memory of one worker: buffers of equal size.
#[derive(Debug)]
pub struct Buffers {
    all: Vec<Buffer>,
    size: usize,
    /// The maximum number of buffers to take from the pool on demand.
    most: usize,
}

impl Buffers {
    /// A set that takes up to `most` buffers of `size` bytes from the pool.
    #[must_use]
    pub fn own(size: usize, most: usize) -> Self {
        Self { all: Vec::new(), size, most }
    }

    /// Whether [`Self::take`] would return `len` bytes.
    pub fn has(&mut self, len: usize) -> bool {
        self.all.iter_mut().any(|buffer| buffer.has(len)) || (self.all.len() < self.most && len <= self.size)
    }

    /// `len` bytes that begin at a page boundary, or `None` if so many are not free now.
    pub fn take(&mut self, len: usize) -> io::Result<Option<Dealt>> {
        if !self.has(len) {
            return Ok(None);
        }
        if !self.all.iter_mut().any(|buffer| buffer.has(len)) {
            let Slab::Whole(mapping) = slabs::take(self.size)? else { return Ok(None) };
            self.all.push(Buffer::new(Arc::new(mapping), 0..self.size));
        }
        let found = self.all.iter_mut().find_map(|buffer| buffer.has(len).then_some(buffer));
        Ok(found.map(|buffer| buffer.deal(len)))
    }

    /// Gives buffers of the pool back to it. The pool keeps at most `keep` bytes.
    pub fn give(self, keep: usize) {
        let own = if self.most > 0 { self.all } else { Vec::new() };
        let free =
            own.into_iter().filter_map(|buffer| Arc::into_inner(buffer.into_mapping())).map(Slab::Whole);
        slabs::give(free.collect(), keep);
    }
}

/// The size of a buffer for `len` bytes: whole huge pages if two such buffers fit in `share`, else whole pages.
#[must_use]
pub fn size_within(len: usize, share: usize) -> usize {
    let huge = len.next_multiple_of(HUGE_PAGE);
    if huge <= share / 2 { huge } else { len.next_multiple_of(PAGES) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_a_buffer_is_dealt_again_when_all_are_gone() {
        let size = 4 * PAGES;
        let mut dealer = Dealer::new(Arc::new(Mapping::new(HUGE_PAGE).unwrap())).unwrap();
        let (mut first, mut second) = (dealer.deal(size, 1), dealer.deal(size, 2));
        let mut parts: Vec<_> = [5, 2 * PAGES, 1].map(|len| first.take(len).unwrap().unwrap()).into();
        assert!(!first.has(1) && first.take(1).unwrap().is_none());
        parts.extend([second.take(size).unwrap().unwrap(), second.take(size).unwrap().unwrap()]);
        assert!(!second.has(1));
        let (front, back) = parts.remove(1).split(7);
        parts.extend([front, back]);
        let mut places: Vec<_> = parts.iter().map(|part| (part.as_ptr().addr(), part.len())).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{places:?}");
        for (number, part) in parts.iter_mut().enumerate() {
            part.fill(number as u8);
        }
        assert!((0..).zip(&parts).all(|(number, part)| part.iter().all(|&byte| byte == number)));
        let last = parts.swap_remove(0);
        drop(parts);
        assert!(second.has(size) && !first.has(size), "one part is alive");
        drop(last);
        assert!(first.take(size).unwrap().is_some());
    }

    #[test]
    fn a_mapping_is_dealt_by_one_at_a_time_and_stays_for_its_parts() {
        let mapping = Arc::new(Mapping::new(1).unwrap());
        let other = Arc::clone(&mapping);
        let mapping = Dealer::new(mapping).unwrap_err();
        drop(other);
        let mut dealer = Dealer::new(mapping).unwrap();
        let mut part = dealer.deal(HUGE_PAGE, 9).take(HUGE_PAGE).unwrap().unwrap();
        let mapping = Dealer::new(dealer.into_mapping()).unwrap_err();
        drop(mapping);
        part.fill(7);
        assert!(part.iter().all(|&byte| byte == 7), "the part keeps its memory");
    }

    #[test]
    fn own_buffers_come_from_the_pool_and_go_back() {
        let mut buffers = Buffers::own(HUGE_PAGE, 2);
        let parts = [0, 1].map(|_| buffers.take(HUGE_PAGE).unwrap().unwrap());
        assert!(buffers.take(1).unwrap().is_none() && !buffers.has(1));
        let places = parts.each_ref().map(|part| part.as_ptr());
        drop(parts);
        buffers.give(usize::MAX);
        let found = (0..64).map(|_| slabs::take(HUGE_PAGE).unwrap()).collect::<Vec<_>>();
        assert!(found.iter().any(|slab| places.contains(&slab.as_ptr())));
        slabs::give(found, 0);
    }
}
