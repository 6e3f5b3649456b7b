//! A save that begins before the core writes it: while the caller still copies the state.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::codes::{Kind, Phase};
use super::operation::{Call, Operation};
use crate::environment::Environment;

/// An operation that belongs to its caller until the core takes it over. After that, and after a failure, the caller's
/// calls have no effect. One that no save takes over has failed when this is dropped.
#[derive(Debug)]
pub struct Begun(Mutex<Option<Operation>>);

impl Begun {
    /// Begins a save to `path`, whose `total` bytes are copied first.
    #[must_use]
    pub fn stage(path: &Path, total: u64, call: Call, environment: &Environment) -> Self {
        let operation = Operation::begin(Kind::Save, path, call, environment);
        operation.stage(total);
        Self::of(operation)
    }

    /// An operation that has begun.
    pub(super) const fn of(operation: Operation) -> Self {
        Self(Mutex::new(Some(operation)))
    }

    fn operation(&self) -> MutexGuard<'_, Option<Operation>> {
        let mut operation = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A forked child that continues the save has its own.
        let _ = operation.take_if(|operation| !operation.is_own());
        operation
    }

    /// `bytes` have been copied by now.
    pub fn staged(&self, bytes: u64) {
        if let Some(operation) = &*self.operation() {
            operation.staged(bytes);
        }
    }

    /// The copy is complete.
    pub fn plan(&self) {
        if let Some(operation) = &*self.operation() {
            operation.phase(Phase::Plan);
        }
    }

    /// The copy failed, or the save was given up before it was written.
    pub fn fail(&self, errno: Option<i32>) {
        if let Some(operation) = self.take() {
            operation.end(Err(errno));
        }
    }

    /// The operation, for the caller that ends it.
    pub(crate) fn take(&self) -> Option<Operation> {
        self.operation().take()
    }
}
