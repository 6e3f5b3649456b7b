//! How an operation runs: what can be chosen, in the call or by the environment, and the defaults.

use std::path::Path;
use std::str::FromStr;
use std::thread;

use super::io::fault::FaultPlan;
use crate::environment::Environment;
use crate::error::Error;
use crate::format::geometry::PAGE;
use crate::format::limits;
use crate::sys::priority::Priority;

pub use crate::format::geometry::{BLOCK_SIZE, SINGLE};

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
    pub fn or_environment(self, environment: &Environment) -> Result<Self, Error> {
        match environment.text("FASTCKPT_IO") {
            Some(text) if self == Self::Auto => text
                .parse()
                .map_err(|error| Error::Invalid(format!("environment variable FASTCKPT_IO: {error}"))),
            _ => Ok(self),
        }
    }
}

/// The processes of one job on one node, as torchrun tells them of each other.
#[derive(Debug, Clone, Default)]
pub struct Ranks {
    /// How many there are; 0 where nobody says.
    pub local: usize,
    /// The numbers that this one has: among all, and on its node.
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

    /// Whether what lies at `path` is to be read by other ranks of this node, too. A path whose last or last but one
    /// component names its rank (`rank-3`, `mp_rank_03`) is that rank's alone; all else is taken for what every rank
    /// loads.
    #[must_use]
    pub fn share(&self, path: &Path) -> bool {
        let mut names = path.components().rev().take(2).map(|name| name.as_os_str().to_string_lossy());
        self.local > 1 && !names.any(|name| self.is_named_in(&name.to_ascii_lowercase()))
    }

    fn is_named_in(&self, name: &str) -> bool {
        name.match_indices("rank").any(|(at, word)| {
            // Not in `frank3`, who may be a user.
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
    /// For measurements: whether what can move straight between memory and file does (but in short shards), or all
    /// goes through slabs; by default a rule decides (`docs/performance.md`).
    pub zero_copy: Option<bool>,
    /// Faults to inject, for tests.
    pub faults: Option<FaultPlan>,
    /// What the environment said when the operation began.
    pub environment: Environment,
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
            environment: Environment::default(),
        }
    }
}

impl Options {
    /// These options with what their environment says about measurements: `FASTCKPT_BLOCK_SIZE` (bytes, whole pages,
    /// at most 64 MiB), `FASTCKPT_QUEUE_DEPTH` (1 to 32) and `FASTCKPT_ZERO_COPY` (0 or 1).
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

    /// This process among the ranks of its node.
    #[must_use]
    pub fn ranks(&self) -> Ranks {
        Ranks::of(&self.environment)
    }

    /// Cores this process may use: its affinity and its cgroup's quota, shared with the other ranks of this node
    /// (`LOCAL_WORLD_SIZE`). To ask costs 0.1 ms.
    #[must_use]
    pub fn cores(&self) -> usize {
        let all = thread::available_parallelism().map_or(1, usize::from);
        let ranks = self.environment.text("LOCAL_WORLD_SIZE").and_then(|text| text.parse().ok()).unwrap_or(1);
        (all / ranks.max(1)).max(1)
    }
}

/// The number in an environment variable, where it is set and `good`.
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
