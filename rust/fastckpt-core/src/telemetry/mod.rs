//! Live counters for the monitor (`docs/telemetry.md`). Nothing here can fail an operation, or delay it by more than a
//! local file system. Without room for its counters in the segment, an operation or a worker counts in private memory.

mod begun;
pub mod clock;
mod codes;
mod group;
mod lane;
pub mod layout;
mod operation;
mod process;
mod seqlock;
mod target;
#[cfg(test)]
mod tests;

pub use begun::Begun;
pub use codes::{Kind, Phase, State};
pub use lane::Lane;
pub use operation::{Call, Operation, Planned, Ran};
pub use process::{places, refused, set_changed, set_group, set_target, wait_for, warn};
pub use target::parse_targets;

use crate::error::{Error, Result};

/// The errno of a failed operation, for [`Operation::end`].
pub(crate) fn outcome<T>(result: &Result<T>) -> std::result::Result<(), Option<i32>> {
    result.as_ref().map(drop).map_err(Error::errno)
}
