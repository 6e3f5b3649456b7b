//! What a worker requires of a backend.

use std::io;

use super::transfer::Transfer;

/// A transfer whose operation has completed. The result is the number of bytes moved, possibly fewer than requested, or
/// the system's error.
pub type Completed = (Transfer, io::Result<usize>);

/// Moves buffers for one worker thread.
pub trait Backend {
    /// The maximum number of operations in flight at a time.
    fn queue_depth(&self) -> usize;

    /// Starts the current operation of `transfer`. If the operation fails, its completion has the error. An error
    /// returned here is a failure of the backend.
    fn submit(&mut self, transfer: Transfer) -> io::Result<()>;

    /// The next completed operation, after waiting if necessary; `None` if nothing is in flight.
    fn wait(&mut self) -> io::Result<Option<Completed>>;
}
