//! Who runs a job: which engine, how many workers, and why not what was asked for.

use crate::engine::io::{Engine, uring};
use crate::engine::options::{self, Io, Options, SINGLE, STAGING_BUDGET};
use crate::engine::report::Fallback;

/// Threads of the engine that has one direct operation in flight each: enough to keep a device busy while others copy.
const BLOCKING_THREADS: usize = 12;
/// Threads that go through the page cache, where the processor does the work and a file takes one writer at a time.
const BUFFERED_THREADS: usize = 4;
/// More ring threads than this were never faster: copying, not submitting, is what they share.
const RING_THREADS: usize = 8;

/// Who runs a job.
#[derive(Debug, Clone)]
pub struct Crew {
    /// The engine.
    pub engine: Engine,
    /// Why it is not the one that was asked for.
    pub fallback: Option<Fallback>,
    /// Number of workers.
    pub threads: usize,
}

impl Crew {
    /// Chooses engine and number of workers for `bytes`. The probe for a ring is the ring itself, in the calling thread.
    #[must_use]
    pub fn choose(options: &Options, bytes: u64) -> Self {
        let (engine, fallback) = match options.io {
            // A ring has nothing to gain with one operation, and setting it up costs more than that.
            Io::Auto if bytes < SINGLE => (Engine::Threads, None),
            Io::Auto | Io::Uring | Io::Direct => match uring::open() {
                Ok(_) => (Engine::Uring, None),
                Err(reason) => (Engine::Threads, Some(reason)),
            },
            Io::Threads => (Engine::Threads, None),
            Io::Buffered => (Engine::Buffered, None),
        };
        let mut crew = Self { engine, fallback, threads: 1 };
        // To count cores takes longer than to copy one small block.
        if bytes >= SINGLE {
            crew.staff(options);
        }
        crew
    }

    /// As many workers as the engine likes, if nobody says how many.
    pub(crate) fn staff(&mut self, options: &Options) {
        let threads = options.threads.unwrap_or_else(|| match self.engine {
            Engine::Uring => options.cores().min(RING_THREADS),
            Engine::Threads => options.cores().max(BLOCKING_THREADS),
            Engine::Buffered => options.cores().max(BUFFERED_THREADS),
        });
        self.threads = threads.clamp(1, (STAGING_BUDGET / options::BLOCK_SIZE) as usize);
    }

    /// Notes one more thing that is not as asked for, with the system's number for it.
    pub(crate) fn note(&mut self, errno: i32, reason: &str) {
        self.fallback = Some(match self.fallback.take() {
            None => Fallback { errno, reason: reason.to_owned() },
            Some(before) => Fallback { reason: format!("{}; {reason}", before.reason), ..before },
        });
    }

    /// The errno for which another engine was left.
    pub(crate) fn errno(&self) -> Option<i32> {
        self.fallback.as_ref().map(|fallback| fallback.errno)
    }

    /// Whether files are to be opened for direct I/O.
    #[must_use]
    pub fn direct(&self) -> bool {
        self.engine != Engine::Buffered
    }
}
