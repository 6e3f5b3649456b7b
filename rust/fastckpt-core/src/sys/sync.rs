//! What threads wait for and share, where `rust/models` checks it: there, this module is a checker's.

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{current, park_timeout, scope};
