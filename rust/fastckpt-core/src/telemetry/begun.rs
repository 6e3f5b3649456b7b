//! Operations whose caller does the work: copies of checkpoints, and saves that begin while the caller still copies the
//! state, before the core writes it.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::codes::{Kind, Phase};
use super::operation::{Call, Operation};
use crate::environment::Environment;

/// An operation that belongs to its caller until the core takes it over. After that, and after a failure, the caller's
/// calls have no effect. If no save takes it over, it has failed when this is dropped.
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

    /// Begins a copy to the checkpoint at `path`. `kind` must be a copy.
    #[must_use]
    pub fn copy(kind: Kind, path: &Path, step: Option<i64>, environment: &Environment) -> Self {
        Self::of(Operation::begin(kind, path, Call { step, at: None }, environment))
    }

    /// An operation that has begun.
    pub(super) const fn of(operation: Operation) -> Self {
        Self(Mutex::new(Some(operation)))
    }

    fn operation(&self) -> MutexGuard<'_, Option<Operation>> {
        let mut operation = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A forked child must not use the operation of its parent. If it continues the save, it begins its own.
        let _ = operation.take_if(|operation| !operation.is_own());
        operation
    }

    /// Records that `bytes` of the state have been copied.
    pub fn staged(&self, bytes: u64) {
        if let Some(operation) = &*self.operation() {
            operation.staged(bytes);
        }
    }

    /// Records that a copy has moved `bytes` of `total`.
    pub fn copied(&self, bytes: u64, total: u64) {
        if let Some(operation) = &*self.operation() {
            operation.copied(bytes, total);
        }
    }

    /// Ends a complete copy. `whole`: the checkpoint at its path is complete, too, although others may copy to it.
    pub fn end_copy(&self, whole: bool) {
        if let Some(operation) = self.take() {
            operation.end_copy(whole);
        }
    }

    /// Records that the copy of the state is complete.
    pub fn plan(&self) {
        if let Some(operation) = &*self.operation() {
            operation.phase(Phase::Plan);
        }
    }

    /// Ends the operation: the copy failed, or the save was abandoned before it was written.
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
