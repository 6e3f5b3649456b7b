//! How an operation runs: the settings, from the call or the environment, and the defaults.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use super::cores;
use super::io::fault::FaultPlan;
use super::memory::Memory;
use crate::environment::Environment;
use crate::error::Error;
use crate::format::geometry::PAGE;
use crate::format::limits;
use crate::telemetry::{Begun, Call, Kind, Operation};

pub use crate::format::geometry::{BLOCK_SIZE, SINGLE};

/// Operations that a ring keeps in flight, as far as staging buffers allow. Zero-copy operations need no buffers.
pub const QUEUE_DEPTH: usize = 32;
/// The largest queue depth that a caller can request.
pub const MOST_DEPTH: usize = 32;
/// The maximum number of bytes of staging buffers in one save, in all workers together, unless the caller sets it.
pub const STAGING_BUDGET: u64 = 96 << 20;
/// The same limit for one load, which needs most of its memory for the loaded tensors.
pub const LOAD_STAGING_BUDGET: u64 = 56 << 20;

/// The requested engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// The best engine that works: `Uring`, else `Threads`. Buffered if direct I/O is refused.
    #[default]
    Auto,
    /// `io_uring` with direct I/O.
    Uring,
    /// Blocking calls with direct I/O, one per thread in several threads.
    Threads,
    /// Direct I/O or an error: `io_uring`, else blocking calls.
    Direct,
    /// I/O through the page cache.
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
    /// The engine to use: the one given in the call, else `FASTCKPT_IO`, else `Auto`.
    pub fn or_environment(self, environment: &Environment) -> Result<Self, Error> {
        match environment.text("FASTCKPT_IO") {
            Some(text) if self == Self::Auto => text
                .parse()
                .map_err(|error| Error::Invalid(format!("environment variable FASTCKPT_IO: {error}"))),
            _ => Ok(self),
        }
    }
}

/// The processes of one job on one node, as torchrun describes them.
#[derive(Debug, Clone, Default)]
pub struct Ranks {
    /// The number of processes; 0 if unknown.
    pub local: usize,
    /// The numbers of this process among all ranks and on its node.
    pub own: Vec<u64>,
}

impl Ranks {
    fn of(environment: &Environment) -> Self {
        let number = |name| environment.text(name).and_then(|text| text.parse::<u64>().ok());
        Self {
            local: number("LOCAL_WORLD_SIZE").map_or(0, |ranks| ranks as usize),
            own: ["RANK", "LOCAL_RANK"].into_iter().filter_map(number).collect(),
        }
    }

    /// Whether other ranks of this node also read from `path`. If the last or second-to-last component of the path
    /// names this rank (`rank-3`, `mp_rank_03`), the path belongs to this rank alone. Any other path counts as one that
    /// every rank loads.
    #[must_use]
    pub fn share(&self, path: &Path) -> bool {
        let mut names = path.components().rev().take(2).map(|name| name.as_os_str().to_string_lossy());
        self.local > 1 && !names.any(|name| self.is_named_in(&name.to_ascii_lowercase()))
    }

    fn is_named_in(&self, name: &str) -> bool {
        name.match_indices("rank").any(|(at, word)| {
            // Ignores `frank3`, which may be a user's name.
            if name[..at].ends_with(|c: char| c.is_ascii_alphabetic()) {
                return false;
            }
            let number = name[at + word.len()..].trim_start_matches(['-', '_', '=']);
            let digits = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
            number[..digits].parse().is_ok_and(|number| self.own.contains(&number))
        })
    }
}

/// How an operation runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The requested engine.
    pub io: Io,
    /// The number of worker threads. By default, it depends on the engine and the number of cores.
    pub threads: Option<usize>,
    /// Bytes per second that all workers together may move.
    pub bandwidth_limit: Option<u64>,
    /// Niceness of the worker threads, 0 to 19. The caller has checked that the kernel allows it (`sys::nice::probe`).
    /// `None` keeps the niceness of the process.
    pub nice: Option<u8>,
    /// The caller's facts about the operation, for the live counters.
    pub call: Call,
    /// The options of a save that its manifest records, as names and texts.
    pub kept: Vec<(String, String)>,
    /// The operation of the save, if it has already begun.
    pub begun: Option<Arc<Begun>>,
    /// Memory for the staging buffers; `None` to allocate it in the core.
    pub staging: Option<Arc<Memory>>,
    /// The most bytes that the core allocates for all workers. By default the budget above, or more for `threads`.
    pub most_staging: Option<u64>,
    /// The block size of a save in bytes, a multiple of a page, for measurements. By default [`BLOCK_SIZE`].
    pub block_size: Option<u64>,
    /// The maximum number of bytes that all workers together have in flight. Each may have at least one block.
    pub in_flight: Option<u64>,
    /// The number of operations that a ring keeps in flight, for measurements.
    pub queue_depth: usize,
    /// For measurements: `true` makes everything zero-copy that can be (except in short shards), `false` moves
    /// everything through staging buffers. By default, a rule decides (`docs/measurements.md`).
    pub zero_copy: Option<bool>,
    /// Faults to inject, for tests.
    pub faults: Option<FaultPlan>,
    /// The environment at the start of the operation.
    pub environment: Environment,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            io: Io::Auto,
            threads: None,
            bandwidth_limit: None,
            nice: None,
            call: Call::default(),
            kept: Vec::new(),
            begun: None,
            staging: None,
            most_staging: None,
            block_size: None,
            in_flight: None,
            queue_depth: QUEUE_DEPTH,
            zero_copy: None,
            faults: None,
            environment: Environment::default(),
        }
    }
}

impl Options {
    /// These options with the settings for measurements from their environment: `FASTCKPT_BLOCK_SIZE` (bytes, whole
    /// pages, at most 64 MiB), `FASTCKPT_QUEUE_DEPTH` (1 to 32) and `FASTCKPT_ZERO_COPY` (0 or 1).
    pub fn or_environment(mut self) -> Result<Self, Error> {
        let most = limits::MAX_BLOCK;
        let environment = &self.environment;
        let whole = |&bytes: &u64| bytes.is_multiple_of(PAGE) && (PAGE..=most).contains(&bytes);
        if let Some(bytes) = setting(environment, "FASTCKPT_BLOCK_SIZE", whole)? {
            self.block_size = Some(bytes);
        }
        let possible = |&depth: &u64| (1..=MOST_DEPTH as u64).contains(&depth);
        if let Some(depth) = setting(environment, "FASTCKPT_QUEUE_DEPTH", possible)? {
            self.queue_depth = depth as usize;
        }
        if let Some(flag) = setting(environment, "FASTCKPT_ZERO_COPY", |&flag| flag < 2)? {
            self.zero_copy = Some(flag == 1);
        }
        Ok(self)
    }

    /// The operation on the checkpoint at `path`, for the live counters: the one that has begun, or a new one.
    #[must_use]
    pub fn operation(&self, kind: Kind, path: &Path) -> Operation {
        let begun = self.begun.as_ref().and_then(|begun| begun.take());
        begun.unwrap_or_else(|| Operation::begin(kind, path, self.call, &self.environment))
    }

    /// The position of this process among the ranks of its node.
    #[must_use]
    pub fn ranks(&self) -> Ranks {
        Ranks::of(&self.environment)
    }

    /// The cores of this process among the ranks of its node (`LOCAL_WORLD_SIZE`).
    #[must_use]
    pub fn cores(&self) -> usize {
        cores::of(self.ranks().local)
    }
}

/// The number in an environment variable, if it is set. Fails if it is not a number or not `good`.
fn setting(environment: &Environment, name: &str, good: impl Fn(&u64) -> bool) -> Result<Option<u64>, Error> {
    let Some(text) = environment.get(name) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok()).filter(good);
    number.map(Some).ok_or_else(|| {
        Error::Invalid(format!("environment variable {name}: `{}` is out of range", text.to_string_lossy()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_parse_by_name_and_nothing_else_does() {
        assert_eq!("uring".parse::<Io>().unwrap(), Io::Uring);
        assert!("io_uring".parse::<Io>().unwrap_err().to_string().contains("`threads`"));
    }

    #[test]
    fn a_path_is_shared_unless_it_names_its_rank() {
        let ranks = Ranks { local: 8, own: vec![19, 3] };
        for path in [
            "/c/rank-3",
            "rank-3",
            "/c/rank3/step-7",
            "/c/mp_rank_03",
            "/c/step-7/rank=19",
            "/c/Rank_00019.d",
            "/c/frank3-rank3",
        ] {
            assert!(!ranks.share(Path::new(path)), "{path}");
        }
        let others =
            ["/c/step-3", "/c/rank-4", "/c/rank-30", "/c/rank-", "/c/frank/3", "/c/llama-3", "/", ""];
        let words = ["/c/frank3", "/home/frank3/c", "/c/prank_03x", "/c/Crank-19/step-7", "/c/step-3/rank"];
        let far = ["/rank-3/run/c", "/home/rank3/runs/step-7/"];
        for path in others.into_iter().chain(words).chain(far) {
            assert!(ranks.share(Path::new(path)), "{path}");
        }
        for local in [0, 1] {
            assert!(!Ranks { local, own: vec![] }.share(Path::new("/c/step-3")));
        }
    }
}
