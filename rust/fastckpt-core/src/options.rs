//! Every tunable, once.

use std::env;
use std::str::FromStr;

use crate::error::Error;
use crate::io::fault::FaultPlan;
use crate::sys::priority::Priority;

/// Bytes of a block: the unit of I/O and of checksums (`docs/format.md`, 2.2).
pub const BLOCK_SIZE: u64 = 4 << 20;
/// Default size above which a checkpoint is split, in bytes: what the Hugging Face hub uses.
pub const SHARD_SIZE: u64 = 5_000_000_000;
/// A checkpoint is split over the workers only when their shares are larger than this, in bytes.
pub const SPLIT_ABOVE: u64 = 256 << 20;
/// Operations a ring keeps in flight: 8 blocks of 4 MiB saturate what was measured, more only adds latency.
pub const QUEUE_DEPTH: usize = 8;
/// Bytes of staging slabs in one save or load, all workers together.
pub const STAGING_BUDGET: u64 = 96 << 20;

/// Which engine is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// The best that works: `Uring`, else `Threads`; buffered where direct I/O is refused.
    #[default]
    Auto,
    /// `io_uring` with direct I/O.
    Uring,
    /// Blocking calls with direct I/O, one in each of several threads.
    Threads,
    /// Through the page cache.
    Buffered,
}

impl FromStr for Io {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "threads" => Ok(Self::Threads),
            "buffered" => Ok(Self::Buffered),
            _ => Err(Error::Invalid(format!(
                "unknown engine `{text}`: give `auto`, `uring`, `threads` or `buffered`"
            ))),
        }
    }
}

impl Io {
    /// What to use: the choice made in the call, else `FASTCKPT_IO`, else `Auto`.
    pub fn or_environment(self) -> Result<Self, Error> {
        match env::var("FASTCKPT_IO") {
            Ok(text) if self == Self::Auto && !text.is_empty() => text
                .parse()
                .map_err(|error| Error::Invalid(format!("environment variable FASTCKPT_IO: {error}"))),
            _ => Ok(self),
        }
    }
}

/// How an operation runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The engine asked for.
    pub io: Io,
    /// Worker threads; by default what the engine likes on these cores.
    pub threads: Option<usize>,
    /// Cores this process may use.
    pub cores: usize,
    /// Bytes per second that all workers together may move.
    pub bandwidth_limit: Option<u64>,
    /// How much the worker threads stand back behind others.
    pub priority: Priority,
    /// The training step, for the live counters.
    pub step: Option<i64>,
    /// Faults to inject, for tests.
    pub faults: Option<FaultPlan>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io: Io::Auto,
            threads: None,
            cores: cores(),
            bandwidth_limit: None,
            priority: Priority::default(),
            step: None,
            faults: None,
        }
    }
}

/// Cores this process may use: its affinity and its cgroup's quota, shared with the other ranks of this node.
#[must_use]
pub fn cores() -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let ranks = env::var("LOCAL_WORLD_SIZE").ok().and_then(|text| text.parse::<usize>().ok()).unwrap_or(1);
    (all / ranks.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_parse_by_name_and_nothing_else_does() {
        assert_eq!("uring".parse::<Io>().unwrap(), Io::Uring);
        assert!("io_uring".parse::<Io>().unwrap_err().to_string().contains("`threads`"));
    }
}
