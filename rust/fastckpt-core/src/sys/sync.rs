//! Primitives for waiting and sharing between threads. `rust/models` replaces this module by a model checker's.

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{current, park_timeout, scope};
