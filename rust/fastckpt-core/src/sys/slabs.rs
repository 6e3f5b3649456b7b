//! The pool of staging buffers: mappings with all pages present, kept from one operation to the next.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, TryLockError};

use super::dealt::Dealt;
use super::mapping::Mapping;

/// A staging buffer.
#[derive(Debug)]
pub enum Slab {
    /// A separate mapping.
    Whole(Mapping),
    /// A part of a larger mapping.
    Part(Dealt),
}

impl Deref for Slab {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Whole(mapping) => mapping,
            Self::Part(part) => part,
        }
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Whole(mapping) => mapping,
            Self::Part(part) => part,
        }
    }
}

/// Staging buffers kept for the next operation, because the first touch of memory costs as much as the disk.
static POOL: Mutex<Vec<Slab>> = Mutex::new(Vec::new());

/// Runs `action` on the pool, or not at all if the lock stays taken, because a child forked while another thread held
/// the lock would wait forever. A caller that gets `None` maps fresh memory.
fn with_pool<T>(action: impl FnOnce(&mut Vec<Slab>) -> T) -> Option<T> {
    let mut pool = (0..1000).find_map(|_| match POOL.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(pool)) => Some(pool.into_inner()),
        Err(TryLockError::WouldBlock) => {
            std::thread::yield_now();
            None
        }
    })?;
    // A forked child inherits the list but not the memory.
    pool.retain(|slab| matches!(slab, Slab::Whole(mapping) if mapping.is_ours()));
    Some(action(&mut pool))
}

/// A staging buffer of at least `len` bytes, reused if one is free.
pub fn take(len: usize) -> io::Result<Slab> {
    let (fits, _unmapped) = with_pool(|pool| {
        let fits = smallest_fit(pool, len);
        // For each new buffer, one that is too small is unmapped. Otherwise, the pool would only grow.
        let small = if fits.is_none() { pool.pop() } else { None };
        (fits, small)
    })
    .unwrap_or_default();
    fits.map_or_else(|| Mapping::populated(len).map(Slab::Whole), Ok)
}

/// Takes the smallest of `slabs` that has room for `len` bytes.
pub fn smallest_fit(slabs: &mut Vec<Slab>, len: usize) -> Option<Slab> {
    let fits = slabs.iter().enumerate().filter(|(_, slab)| slab.len() >= len);
    let (at, _) = fits.min_by_key(|(_, slab)| slab.len())?;
    Some(slabs.swap_remove(at))
}

/// Gives staging buffers back for reuse. Unmaps those that would exceed `keep` bytes in total. Parts are not kept.
pub fn give(slabs: Vec<Slab>, keep: usize) {
    with_pool(|pool| {
        let mut kept: usize = pool.iter().map(|slab| slab.len()).sum();
        for slab in slabs.into_iter().filter(|slab| matches!(slab, Slab::Whole(_))) {
            if kept + slab.len() <= keep {
                kept += slab.len();
                pool.push(slab);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::mapping::HUGE_PAGE;
    use super::*;

    #[test]
    fn slabs_are_aligned_zeroed_and_reused() {
        let slab = take(1 << 20).unwrap();
        assert!(slab.as_ptr().addr().is_multiple_of(HUGE_PAGE));
        assert!(slab.len() >= 1 << 20);
        let address = slab.as_ptr();
        give(vec![slab], usize::MAX);
        let found = (0..64).map(|_| take(1 << 20).unwrap()).collect::<Vec<_>>();
        assert!(found.iter().any(|slab| slab.as_ptr() == address));
        give(found, 0);
    }
}
