//! A backend that fails on purpose, at the n-th operation of a save or load, counted over all workers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::backend::{Backend, Completed};
use super::transfer::Transfer;

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The operation fails with this errno.
    Errno(i32),
    /// The operation moves only this many bytes.
    Short(usize),
    /// The worker panics.
    Panic,
}

/// Which operation fails, how, and whether later operations fail, too. Clones share the countdown.
#[derive(Debug, Clone)]
pub struct FaultPlan {
    countdown: Arc<AtomicI64>,
    fault: Fault,
    permanent: bool,
}

impl FaultPlan {
    /// Lets `before` operations pass. The next one meets `fault`. If `permanent`, all later ones meet it, too.
    #[must_use]
    pub fn new(before: u32, fault: Fault, permanent: bool) -> Self {
        Self { countdown: Arc::new(AtomicI64::new(i64::from(before))), fault, permanent }
    }

    fn strike(&self) -> Option<Fault> {
        let left = self.countdown.fetch_sub(1, Ordering::Relaxed);
        (left == 0 || (left < 0 && self.permanent)).then_some(self.fault)
    }

    /// Whether the countdown ran out, which means that the fault was injected.
    #[must_use]
    pub fn struck(&self) -> bool {
        self.countdown.load(Ordering::Relaxed) < 0
    }
}

/// Injects the faults of a plan into another backend.
pub struct Faulty {
    inner: Box<dyn Backend>,
    plan: FaultPlan,
    failed: Vec<Completed>,
    /// Blocks in flight that request too few bytes: for each, its number, and the real ends of its memory and tail.
    cut: Vec<(usize, usize, usize)>,
}

impl Faulty {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Box<dyn Backend>, plan: FaultPlan) -> Self {
        Self { inner, plan, failed: Vec::new(), cut: Vec::new() }
    }
}

impl Backend for Faulty {
    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }

    fn submit(&mut self, mut transfer: Transfer) -> io::Result<()> {
        match self.plan.strike() {
            None => self.inner.submit(transfer),
            Some(Fault::Errno(errno)) => {
                self.failed.push((transfer, Err(io::Error::from_raw_os_error(errno))));
                Ok(())
            }
            Some(Fault::Short(bytes)) => {
                self.cut.push((transfer.block, transfer.len, transfer.tail.end));
                let end = transfer.range().end.min(transfer.range().start + bytes);
                *if transfer.tail.is_empty() { &mut transfer.len } else { &mut transfer.tail.end } = end;
                self.inner.submit(transfer)
            }
            Some(Fault::Panic) => panic!("injected"),
        }
    }

    fn wait(&mut self) -> io::Result<Option<Completed>> {
        if let Some(failed) = self.failed.pop() {
            return Ok(Some(failed));
        }
        let mut completed = self.inner.wait()?;
        if let Some((transfer, _)) = &mut completed
            && let Some(at) = self.cut.iter().position(|&(block, ..)| block == transfer.block)
        {
            (_, transfer.len, transfer.tail.end) = self.cut.swap_remove(at);
        }
        Ok(completed)
    }
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").field("plan", &self.plan).finish_non_exhaustive()
    }
}
