//! The mail of ranks and the pool of workers, compiled with the locks and threads of shuttle, which draws the order in
//! which threads run. The source files are those of the core. This crate replaces the modules that these files import.
#![allow(missing_docs, dead_code)]

pub mod error {
    pub use fastckpt_core::error::{Error, Result};
    pub(crate) fn panic_text(_: &(dyn std::any::Any + Send)) -> String {
        "it has panicked".to_owned()
    }
}

pub mod format {
    pub mod checksum {
        pub use fastckpt_core::format::checksum::to_hex;
        /// All bytes in these tests are zeros, so their checksum is 0.
        pub fn of(_: &[u8]) -> u64 {
            0
        }
    }
    pub use fastckpt_core::format::geometry;
}

pub mod sys {
    pub(crate) mod calls {
        pub(crate) use fastckpt_core::sys::calls::Calls;
    }

    pub mod nice {
        pub(crate) fn apply(_: Option<u8>) -> std::io::Result<()> {
            Ok(())
        }
    }

    pub(crate) mod sync {
        pub(crate) use shuttle::sync::atomic::{AtomicUsize, Ordering};
        pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
        pub(crate) use shuttle::thread::{current, park_timeout, scope};
    }

    pub(crate) mod thread {
        use shuttle::thread::{Scope, ScopedJoinHandle};

        pub(crate) struct Builder;

        pub(crate) fn builder() -> Builder {
            Builder
        }

        impl Builder {
            pub(crate) fn name(self, _: String) -> Self {
                self
            }

            pub(crate) fn spawn_scoped<'s, T: Send + 's>(
                self,
                scope: &'s Scope<'s, '_>,
                body: impl FnOnce() -> T + Send + 's,
            ) -> std::io::Result<ScopedJoinHandle<'s, T>> {
                Ok(scope.spawn(body))
            }
        }
    }
}

#[path = "../../fastckpt-core/src/ranks"]
pub mod ranks {
    pub mod mail;

    /// A mail with a small budget.
    pub fn mail(
        outgoing: Vec<mail::Envelope>,
        incoming: Vec<mail::Envelope>,
        fill: Option<mail::Fill>,
        budget: u64,
    ) -> mail::Mail {
        mail::Mail::with_budget(outgoing, incoming, Box::new(|_| String::new()), fill, budget)
    }
}

#[path = "../../fastckpt-core/src/engine"]
pub mod engine {
    pub(crate) mod job {
        pub(crate) use fastckpt_core::engine::job::TICK;
    }

    pub(crate) mod options {
        pub(crate) use fastckpt_core::engine::options::{BLOCK_SIZE, Options};
    }

    mod pool;

    /// Runs `work` for each number below `count` in `threads` threads.
    pub fn run(
        threads: usize,
        count: usize,
        progress: &mut dyn FnMut() -> bool,
        work: &(dyn Fn(usize) -> crate::error::Result<()> + Sync),
    ) -> crate::error::Result<()> {
        pool::Pool::of("model", threads).run(count, progress, work)
    }
}
