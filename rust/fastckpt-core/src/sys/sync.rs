//! Primitives for waiting and sharing between threads. `rust/models` replaces this module with that of a model checker.

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{current, park_timeout, scope};
