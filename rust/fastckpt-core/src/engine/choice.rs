//! Which engine runs a job, with how many workers, and why it is not the requested one.

use super::io::object::REQUESTS;
use super::io::uring;
use super::options::{BLOCK_SIZE, Io, Options, SINGLE, STAGING_BUDGET};
use super::report::{Engine, Fallback, Fell};

/// Threads of an engine that has one direct operation in flight per thread: enough to keep a device busy while some
/// threads copy.
const BLOCKING_THREADS: usize = 12;
/// Threads that use the page cache, where the processor does the work and a file allows one writer at a time.
const BUFFERED_THREADS: usize = 4;
/// More ring threads than this were never faster: more threads speed up the copying, not the submission.
const RING_THREADS: usize = 8;

/// The maximum number of workers of an operation.
pub const MOST_THREADS: usize = 256;
/// The default maximum: the staging memory suffices for this many workers.
const USUAL_THREADS: usize = (STAGING_BUDGET / BLOCK_SIZE) as usize;

/// The engine for a job, chosen before the job runs. [`super::report::Ran`] records what ran in the end.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The engine.
    pub engine: Engine,
    /// Why the engine is not the requested one.
    pub fallback: Option<Fallback>,
    /// Number of workers.
    pub threads: usize,
}

impl Choice {
    /// Chooses the engine and the number of workers for `bytes`. Tests whether a ring is possible by opening one in
    /// the calling thread.
    #[must_use]
    pub fn new(options: &Options, bytes: u64) -> Self {
        let (engine, fallback) = match options.io {
            // A ring gains nothing with one operation, and its setup costs more than the operation.
            Io::Auto if bytes < SINGLE => (Engine::Threads, None),
            Io::Auto | Io::Uring | Io::Direct => match uring::open() {
                Ok(_) => (Engine::Uring, None),
                Err(reason) => (Engine::Threads, Some(reason)),
            },
            Io::Threads => (Engine::Threads, None),
            Io::Buffered => (Engine::Buffered, None),
        };
        // Counting cores takes longer than copying one small block.
        let threads = if bytes < SINGLE { 1 } else { default_threads(engine, options) };
        Self { engine, fallback, threads }
    }

    /// The choice for an object store, which has one engine.
    #[must_use]
    pub fn stored(options: &Options) -> Self {
        let other = !matches!(options.io, Io::Auto | Io::Buffered);
        let why = "an object store is read over the network";
        let fallback = other.then(|| Fallback::after(None, Fell::Direct, libc::EINVAL, why));
        let threads = options.threads.unwrap_or(REQUESTS).clamp(1, MOST_THREADS);
        Self { engine: Engine::Buffered, fallback, threads }
    }

    /// Whether to open files for direct I/O.
    #[must_use]
    pub fn direct(&self) -> bool {
        self.engine != Engine::Buffered
    }
}

/// The number of workers from the options, or else the engine's default for this number of cores.
pub(super) fn default_threads(engine: Engine, options: &Options) -> usize {
    let usual = || match engine {
        Engine::Uring => options.cores().min(RING_THREADS),
        Engine::Threads => options.cores().clamp(BLOCKING_THREADS, USUAL_THREADS),
        Engine::Buffered => options.cores().clamp(BUFFERED_THREADS, USUAL_THREADS),
    };
    options.threads.unwrap_or_else(usual).clamp(1, MOST_THREADS)
}
