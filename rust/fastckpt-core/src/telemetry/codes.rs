//! The numbers of kinds, phases and states (`docs/telemetry.md`, 5.3 and 5.4).

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes a checkpoint.
    Save = 1,
    /// Reads a checkpoint.
    Load = 2,
    /// Compares a checkpoint with its checksums.
    Verify = 3,
    /// Copies a checkpoint because the caller asked for it.
    Copy = 4,
    /// Copies a checkpoint to the remote tier.
    Drain = 5,
    /// Copies a checkpoint from the remote tier.
    Fetch = 6,
}

/// The phase of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Determines the next step.
    Plan = 1,
    /// Copies the state, so that the caller may change it.
    Stage = 2,
    /// Writes the shards.
    Write = 3,
    /// Waits until everything that was written is durable.
    Fsync = 4,
    /// Writes the manifest and renames.
    Commit = 5,
    /// Reads the shards.
    Read = 8,
    /// Copies for [`Kind::Copy`].
    Copy = 9,
    /// Copies for [`Kind::Drain`].
    Drain = 10,
    /// Copies for [`Kind::Fetch`].
    Fetch = 11,
}

impl Phase {
    /// The phase in which the bytes of a copy move.
    pub(super) const fn of_copy(kind: Kind) -> Self {
        match kind {
            Kind::Drain => Self::Drain,
            Kind::Fetch => Self::Fetch,
            _ => Self::Copy,
        }
    }

    /// The position of a phase in the order of phases. Staging precedes the plan for the copied bytes.
    pub(super) const fn order(self) -> u32 {
        match self {
            Self::Stage => 1,
            Self::Plan => 2,
            later => later as u32,
        }
    }
}

/// The phase of an operation that has succeeded.
pub(super) const DONE: u32 = 6;
/// The flag of a copy that has left a whole checkpoint at its target path.
pub(super) const WHOLE: u32 = 1 << 11;
/// The phase of an operation that has failed.
pub(super) const FAILED: u32 = 7;

/// The state of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Has nothing to do.
    Idle = 0,
    /// Prepares bytes to write.
    Source = 1,
    /// Waits for the disk.
    Transfer = 2,
    /// Waits until a shard is durable.
    Fsync = 3,
    /// Has failed.
    Error = 4,
    /// Waits because of the bandwidth limit.
    Limit = 5,
    /// Waits for bytes from other ranks.
    Peers = 6,
}
