//! Shards that are open while their blocks are in work, and only then: a checkpoint may have more shards than a process may
//! have open files.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::sys::file::DataFile;

/// One slot a shard.
#[derive(Debug)]
pub struct OpenFiles {
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    file: Mutex<Option<Arc<DataFile>>>,
    blocks_left: AtomicUsize,
}

impl OpenFiles {
    /// Slots for shards with so many blocks each.
    pub fn new(blocks: impl IntoIterator<Item = usize>) -> Self {
        let slot = |blocks| Slot { file: Mutex::new(None), blocks_left: AtomicUsize::new(blocks) };
        Self { slots: blocks.into_iter().map(slot).collect() }
    }

    /// The file of `shard`, opened by `open` if this is its first block.
    pub fn acquire(&self, shard: usize, open: impl FnOnce() -> Result<DataFile>) -> Result<Arc<DataFile>> {
        let mut file = self.slots[shard].file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*file {
            return Ok(Arc::clone(file));
        }
        Ok(Arc::clone(file.insert(Arc::new(open()?))))
    }

    /// Notes that a block of `shard` is done with; returns the file when it was the last one.
    pub fn release(&self, shard: usize) -> Option<Arc<DataFile>> {
        let slot = &self.slots[shard];
        // Acquire-release: whoever takes the last block sees what the workers of all others did to the file.
        if slot.blocks_left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return None;
        }
        slot.file.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
