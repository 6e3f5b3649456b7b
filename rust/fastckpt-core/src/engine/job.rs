//! The work of the workers, block by block.

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::io::transfer::Transfer;
use crate::error::{Error, Result};
use crate::sys::dealt::Dealt;
use crate::sys::slabs::{self, Slab};
use crate::telemetry::{Lane, State};

/// How often the calling thread wakes up to report progress and to notice an interrupt.
pub const TICK: Duration = Duration::from_millis(100);

/// Receives the bytes done so far and the total, about ten times a second. Returns whether to continue.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// Hands out a staging buffer of at least the given number of bytes.
pub type Staging<'a> = &'a mut dyn FnMut(usize) -> Result<Slab>;

/// A staging buffer: a new one, or one that an earlier operation left.
pub fn new_staging(len: usize) -> Result<Slab> {
    slabs::take(len).map_err(Error::io("map staging", "memory".as_ref()))
}

/// How a block starts.
#[derive(Debug)]
pub enum Start {
    /// The block goes to the backend.
    Now(Transfer),
    /// The block has to wait. The worker asks for it again.
    Later(State),
}

/// What follows after a block has moved.
#[derive(Debug)]
pub enum Next {
    /// The block is done.
    Done,
    /// The block needs another transfer.
    Again(Transfer),
    /// Callbacks need bytes of the block, so it is kept for [`Job::hand_over`].
    Hold,
}

/// Blocks to move.
pub trait Job: Sync {
    /// Whether blocks go to the disk or come from it.
    const WRITE: bool;

    /// Whether blocks may wait for other processes. If so, the calling thread moves none: it keeps reporting progress.
    fn waits(&self) -> bool {
        false
    }

    /// Whether blocks come from a store. If so, the store's client supplies the memory, and the calling thread moves no
    /// blocks and keeps reporting progress.
    fn is_stored(&self) -> bool {
        false
    }

    /// Ends all waits for other processes. Called after a failure that is already recorded as the operation's failure.
    fn stop(&self) {}

    /// Number of blocks.
    fn blocks(&self) -> usize;

    /// Number of files.
    fn files(&self) -> usize;

    /// Bytes to move, without padding.
    fn total(&self) -> u64;

    /// The file that a block belongs to.
    fn file(&self, block: usize) -> usize;

    /// Bytes of the largest staging buffer that [`Job::start`] asks for.
    fn largest(&self) -> usize;

    /// Whether callbacks supply or take bytes of any block. One call serves many blocks.
    fn calls(&self) -> bool {
        false
    }

    /// Bytes of staging memory that a block needs, in whole pages, if callbacks supply any of its bytes.
    fn fetched(&self, _block: usize) -> Option<usize> {
        None
    }

    /// Makes callbacks supply their bytes of `blocks`, each in its [`Job::fetched`] part of `memory`. Returns these.
    fn fetch(&self, _blocks: Range<usize>, _memory: Dealt) -> Result<Vec<Dealt>> {
        Ok(Vec::new())
    }

    /// Prepares a block to move. Uses the bytes `fetched` for it, if any. The block may have to wait: for its bytes, or
    /// until another file is closed.
    fn start(&self, block: usize, fetched: &mut Option<Dealt>, staging: Staging<'_>) -> Result<Start>;

    /// Takes a block after it has moved or failed to move, and adds its bytes to the worker's counters.
    fn finish(&self, transfer: &mut Transfer, outcome: io::Result<()>, lane: &Lane<'_>) -> Result<Next>;

    /// Hands the bytes of kept blocks to callbacks. Returns the number of bytes copied for that.
    fn hand_over(&self, _held: &[Transfer]) -> Result<u64> {
        Ok(0)
    }
}
