//! What the worker asks of a backend.

use std::io;

use super::transfer::Transfer;

/// A transfer whose operation the kernel is done with: the bytes moved, possibly fewer than asked for, or the
/// system's error.
pub type Completed = (Transfer, io::Result<usize>);

/// Moves buffers for one worker thread.
pub trait Backend {
    /// The most operations that it takes at a time.
    fn queue_depth(&self) -> usize;

    /// Starts the operation that `transfer` is at. Its own failure comes with its completion; an error here is one of
    /// the backend.
    fn submit(&mut self, transfer: Transfer) -> io::Result<()>;

    /// The next finished operation, waiting for it if need be; none if nothing is in flight.
    fn wait(&mut self) -> io::Result<Option<Completed>>;
}
