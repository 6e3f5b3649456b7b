//! A backend without files, for tests. The bytes are in memory, and every operation is recorded.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::backend::{Backend, Completed};
use super::transfer::Transfer;

/// One operation, as a backend received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Operation {
    pub(in crate::engine) offset: u64,
    pub(in crate::engine) len: usize,
    pub(in crate::engine) direct: bool,
}

/// The content of a file that all backends share, and the operations on it.
#[derive(Debug, Default)]
pub(in crate::engine) struct Stored {
    pub(in crate::engine) bytes: Vec<u8>,
    pub(in crate::engine) operations: Vec<Operation>,
    /// The maximum number of bytes that one backend had in flight.
    pub(in crate::engine) most: usize,
}

/// Moves bytes between buffers and a vector that several backends share.
#[derive(Debug)]
pub(in crate::engine) struct Memory {
    stored: Arc<Mutex<Stored>>,
    completed: VecDeque<Completed>,
}

impl Memory {
    /// A file that holds `bytes`.
    pub(in crate::engine) fn of(bytes: Vec<u8>) -> Arc<Mutex<Stored>> {
        Arc::new(Mutex::new(Stored { bytes, operations: Vec::new(), most: 0 }))
    }

    pub(in crate::engine) fn on(stored: &Arc<Mutex<Stored>>) -> Self {
        Self { stored: Arc::clone(stored), completed: VecDeque::new() }
    }

    fn carry_out(&self, transfer: &mut Transfer) -> usize {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let (range, direct) = (transfer.range(), transfer.is_direct());
        let offset = transfer.offset + range.start as u64;
        stored.operations.push(Operation { offset, len: range.len(), direct });
        let mut at = offset as usize;
        if transfer.write {
            let end = stored.bytes.len().max(at + range.len());
            stored.bytes.resize(end, 0);
            for slice in transfer.buf.slices(range) {
                slice.copy(&mut stored.bytes[at..at + slice.len()]);
                at += slice.len();
            }
        } else {
            for mut slice in transfer.buf.slices_mut(range) {
                let from = stored.bytes.get(at..).unwrap_or_default();
                let len = from.len().min(slice.len());
                slice[..len].copy_from_slice(&from[..len]);
                at += len;
            }
        }
        at - offset as usize
    }
}

impl Backend for Memory {
    fn queue_depth(&self) -> usize {
        4
    }

    fn submit(&mut self, mut transfer: Transfer) -> io::Result<()> {
        let moved = self.carry_out(&mut transfer);
        self.completed.push_back((transfer, Ok(moved)));
        let in_flight = self.completed.iter().map(|(transfer, _)| transfer.missing()).sum();
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        stored.most = stored.most.max(in_flight);
        Ok(())
    }

    fn wait(&mut self) -> io::Result<Option<Completed>> {
        Ok(self.completed.pop_front())
    }
}
