//! A backend that fails on purpose: the n-th operation of a save or load, counted over all its workers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::{Backend, Done, Op};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The system's answer is this errno.
    Errno(i32),
    /// Only so many bytes move.
    Short(usize),
    /// The worker panics.
    Panic,
}

/// Which operation fails, how, and whether those after it fail too. Clones share the countdown.
#[derive(Debug, Clone)]
pub struct FaultPlan {
    countdown: Arc<AtomicI64>,
    fault: Fault,
    permanent: bool,
}

impl FaultPlan {
    /// Lets `before` operations pass; the next one meets `fault`, and with `permanent` all that follow.
    #[must_use]
    pub fn new(before: u32, fault: Fault, permanent: bool) -> Self {
        Self { countdown: Arc::new(AtomicI64::new(i64::from(before))), fault, permanent }
    }

    fn strike(&self) -> Option<Fault> {
        let left = self.countdown.fetch_sub(1, Ordering::Relaxed);
        (left == 0 || (left < 0 && self.permanent)).then_some(self.fault)
    }

    /// Whether the countdown ran out, so that the fault was really met.
    #[must_use]
    pub fn struck(&self) -> bool {
        self.countdown.load(Ordering::Relaxed) < 0
    }
}

/// Injects the faults of a plan into another backend.
pub struct Faulty {
    inner: Box<dyn Backend>,
    plan: FaultPlan,
    failed: Vec<Done>,
}

impl Faulty {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Box<dyn Backend>, plan: FaultPlan) -> Self {
        Self { inner, plan, failed: Vec::new() }
    }
}

impl Backend for Faulty {
    fn submit(&mut self, mut op: Op) -> io::Result<()> {
        match self.plan.strike() {
            None => self.inner.submit(op),
            Some(Fault::Errno(errno)) => {
                self.failed.push(Done { op, result: Err(io::Error::from_raw_os_error(errno)) });
                Ok(())
            }
            Some(Fault::Short(bytes)) => {
                op.range.end = op.range.end.min(op.range.start + bytes);
                self.inner.submit(op)
            }
            Some(Fault::Panic) => panic!("injected"),
        }
    }

    fn wait(&mut self) -> io::Result<Option<Done>> {
        self.failed.pop().map_or_else(|| self.inner.wait(), |done| Ok(Some(done)))
    }
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").field("plan", &self.plan).finish_non_exhaustive()
    }
}
