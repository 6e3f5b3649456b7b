//! Which engine runs a job, how many workers it has, and why it is not the one that was asked for.

use super::io::uring;
use super::options::{BLOCK_SIZE, Io, Options, SINGLE, STAGING_BUDGET};
use super::report::{Engine, Fallback};

/// Threads of the engine that has one direct operation in flight each: enough to keep a device busy while others copy.
const BLOCKING_THREADS: usize = 12;
/// Threads that go through the page cache, where the processor does the work and a file takes one writer at a time.
const BUFFERED_THREADS: usize = 4;
/// More ring threads than this were never faster: copying, not submitting, is what they share.
const RING_THREADS: usize = 8;

/// The engine for a job, chosen before it runs. What ran in the end is a [`super::report::Ran`].
#[derive(Debug, Clone)]
pub struct Choice {
    /// The engine.
    pub engine: Engine,
    /// Why it is not the one that was asked for.
    pub fallback: Option<Fallback>,
    /// Number of workers.
    pub threads: usize,
}

impl Choice {
    /// Chooses engine and number of workers for `bytes`. The probe for a ring is the ring itself, in the calling
    /// thread.
    #[must_use]
    pub fn new(options: &Options, bytes: u64) -> Self {
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
        // To count cores takes longer than to copy one small block.
        let threads = if bytes < SINGLE { 1 } else { default_threads(engine, options) };
        Self { engine, fallback, threads }
    }

    /// Whether files are to be opened for direct I/O.
    #[must_use]
    pub fn direct(&self) -> bool {
        self.engine != Engine::Buffered
    }
}

/// The number of workers that the options name, or else the engine's own on these cores.
pub(super) fn default_threads(engine: Engine, options: &Options) -> usize {
    let threads = options.threads.unwrap_or_else(|| match engine {
        Engine::Uring => options.cores().min(RING_THREADS),
        Engine::Threads => options.cores().max(BLOCKING_THREADS),
        Engine::Buffered => options.cores().max(BUFFERED_THREADS),
    });
    threads.clamp(1, (STAGING_BUDGET / BLOCK_SIZE) as usize)
}
