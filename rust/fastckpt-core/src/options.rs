//! Every tunable, once.

use std::env;
use std::str::FromStr;

use crate::align::{self, PAGE};
use crate::bounds;
use crate::error::Error;
use crate::io::fault::FaultPlan;
use crate::sys::priority::Priority;

/// Bytes of a block: the unit of I/O and of checksums (`docs/format.md`, 2.2; why so many: `docs/performance.md`).
pub const BLOCK_SIZE: u64 = 4 << 20;
/// What is smaller than this, in bytes, and lies together is one block, or nearly so.
pub const SINGLE: u64 = BLOCK_SIZE / 2;
/// Default size above which a checkpoint is split, in bytes: what the Hugging Face hub uses.
pub const SHARD_SIZE: u64 = 5_000_000_000;
/// A checkpoint is split over the workers only when their shares are larger than this, in bytes.
pub const SPLIT_ABOVE: u64 = 256 << 20;
/// Operations a ring keeps in flight, as far as slabs allow: those that go straight between memory and file need none.
pub const QUEUE_DEPTH: usize = 32;
/// The most that can be asked for.
pub const MOST_DEPTH: usize = 32;
/// Bytes of staging slabs in one save, all workers together.
pub const STAGING_BUDGET: u64 = 96 << 20;
/// And in one load, which needs most of its memory for what it loads.
pub const LOAD_STAGING_BUDGET: u64 = 56 << 20;

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
    /// Past the page cache or not at all: `io_uring`, else blocking calls, and an error where direct I/O is refused.
    Direct,
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
            "direct" => Ok(Self::Direct),
            "buffered" => Ok(Self::Buffered),
            _ => Err(Error::Invalid(format!(
                "unknown engine `{text}`: give `auto`, `uring`, `threads`, `direct` or `buffered`"
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
    /// Bytes per second that all workers together may move.
    pub bandwidth_limit: Option<u64>,
    /// How much the worker threads stand back behind others.
    pub priority: Priority,
    /// The training step, for the live counters.
    pub step: Option<i64>,
    /// For measurements: bytes of a block of what is saved, a multiple of a page; by default [`BLOCK_SIZE`].
    pub block_size: Option<u64>,
    /// For measurements: operations a ring keeps in flight.
    pub queue_depth: usize,
    /// For measurements: whether what can move straight between memory and file does (but in short shards), or all goes through
    /// slabs; by default a rule decides (`docs/performance.md`).
    pub zero_copy: Option<bool>,
    /// Faults to inject, for tests.
    pub faults: Option<FaultPlan>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io: Io::Auto,
            threads: None,
            bandwidth_limit: None,
            priority: Priority::default(),
            step: None,
            block_size: None,
            queue_depth: QUEUE_DEPTH,
            zero_copy: None,
            faults: None,
        }
    }
}

impl Options {
    /// These options with what the environment says about measurements: `FASTCKPT_BLOCK_SIZE` (bytes, whole pages, at most
    /// 64 MiB), `FASTCKPT_QUEUE_DEPTH` (1 to 32) and `FASTCKPT_ZERO_COPY` (0 or 1).
    pub fn or_environment(mut self) -> Result<Self, Error> {
        let most = bounds::MAX_BLOCK;
        if let Some(bytes) =
            setting("FASTCKPT_BLOCK_SIZE", |&bytes| align::is(bytes, PAGE) && (PAGE..=most).contains(&bytes))?
        {
            self.block_size = Some(bytes);
        }
        if let Some(depth) =
            setting("FASTCKPT_QUEUE_DEPTH", |&depth| (1..=MOST_DEPTH as u64).contains(&depth))?
        {
            self.queue_depth = depth as usize;
        }
        if let Some(flag) = setting("FASTCKPT_ZERO_COPY", |&flag| flag < 2)? {
            self.zero_copy = Some(flag == 1);
        }
        Ok(self)
    }
}

/// The number in an environment variable, where it is set and `good`.
fn setting(name: &str, good: impl Fn(&u64) -> bool) -> Result<Option<u64>, Error> {
    let Some(text) = env::var_os(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok()).filter(good);
    number.map(Some).ok_or_else(|| {
        Error::Invalid(format!("environment variable {name}: `{}` is out of range", text.to_string_lossy()))
    })
}

/// Cores this process may use: its affinity and its cgroup's quota, shared with the other ranks of this node. To ask costs 0.1 ms.
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
