//! Memory that operations use one after another, because writing to fresh memory is slower than a disk.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::error::{Error, Result};
use crate::sys::buffers::{Buffers, Dealer};
use crate::sys::mapping::Mapping;

/// Host memory for one snapshot at a time, or for the staging buffers of operations.
#[derive(Debug)]
pub struct Memory {
    address: usize,
    size: usize,
    /// `None` while a snapshot or an operation uses it, and after it is closed.
    mapping: Mutex<Option<Arc<Mapping>>>,
}

impl Memory {
    /// Maps at least `size` bytes.
    pub fn new(size: usize) -> Result<Self> {
        let failed = Error::io::<io::Error>("map host", "memory".as_ref());
        let mapping = Mapping::new(size).map_err(failed)?;
        let (address, size) = (mapping.as_ptr().addr(), mapping.len());
        Ok(Self { address, size, mapping: Mutex::new(Some(Arc::new(mapping))) })
    }

    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.address
    }

    /// The size in bytes.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Whether a snapshot or an operation uses the memory, or whether it is closed.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.mapping.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Hands the memory over.
    pub(crate) fn take(&self) -> Result<Arc<Mapping>> {
        let mapping = lock(&self.mapping, "the memory is in use")?.take();
        mapping.ok_or(Error::Misused("the memory is closed or in use"))
    }

    /// Takes back the memory that [`Self::take`] returned.
    pub(crate) fn give(&self, mapping: Arc<Mapping>) -> Result<()> {
        *lock(&self.mapping, "the memory is in use")? = Some(mapping);
        Ok(())
    }

    /// Unmaps it, unless a snapshot or an operation uses it. After that use, the memory can be used and closed again.
    pub fn close(&self) -> Result<()> {
        let mapping = lock(&self.mapping, "the memory is in use")?.take();
        drop(mapping);
        Ok(())
    }
}

/// Memory lent to the staging buffers of an operation, until this is dropped.
#[derive(Debug)]
pub(super) struct Lent {
    memory: Arc<Memory>,
    dealer: Option<Dealer>,
}

impl Lent {
    /// Takes the memory. Fails if anything else uses it.
    pub(super) fn new(memory: &Arc<Memory>) -> Result<Self> {
        let dealer = Dealer::new(memory.take()?).map_err(|mapping| {
            let _ = memory.give(mapping);
            Error::Misused(
                "the staging memory is in use, or belongs to another process: allocate new memory after a fork",
            )
        })?;
        Ok(Self { memory: Arc::clone(memory), dealer: Some(dealer) })
    }

    /// The size in bytes.
    pub(super) fn size(&self) -> usize {
        self.memory.size()
    }

    /// `count` buffers of `size` bytes, or fewer if the memory ends.
    pub(super) fn deal(&mut self, size: usize, count: usize) -> Option<Buffers> {
        self.dealer.as_mut().map(|dealer| dealer.deal(size, count))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(dealer) = self.dealer.take() {
            let _ = self.memory.give(dealer.into_mapping());
        }
    }
}

/// Locks the mutex, or fails with `busy`. Waiting could be a deadlock: the thread that holds the lock may need
/// something from the caller.
pub(crate) fn lock<'a, T>(mutex: &'a Mutex<T>, busy: &'static str) -> Result<MutexGuard<'a, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(guard)) => Ok(guard.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Error::Misused(busy)),
    }
}
