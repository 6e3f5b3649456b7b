//! The numbers that stand for kinds, phases and states (`docs/telemetry.md`, 5.3 and 5.4).

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes a checkpoint.
    Save = 1,
    /// Reads one.
    Load = 2,
    /// Compares one with its checksums.
    Verify = 3,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Looks at what there is to do.
    Plan = 1,
    /// Writes.
    Write = 3,
    /// All is written; waits until all is durable.
    Fsync = 4,
    /// Writes the manifest and renames.
    Commit = 5,
    /// Reads.
    Read = 8,
}

/// The phase of an operation that has ended well.
pub(super) const DONE: u32 = 6;
/// The phase of one that has failed.
pub(super) const FAILED: u32 = 7;

/// What a worker does at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Has nothing to do.
    Idle = 0,
    /// Waits for bytes to write.
    Source = 1,
    /// Waits for the disk.
    Transfer = 2,
    /// Waits for a shard to be durable.
    Fsync = 3,
    /// Has failed.
    Error = 4,
    /// Keeps to the bandwidth limit.
    Limit = 5,
}
