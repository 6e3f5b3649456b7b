//! The backends: how a worker moves one buffer between memory and a file.
//!
//! - [`uring`]: several operations in flight per thread, with the fewest system calls. Most containers do not allow it,
//!   because the default seccomp profiles of Docker and containerd block it.
//! - [`blocking`]: one call at a time, so depth comes from threads. Works everywhere. The oracle for the other backend.
//! - [`fault`]: wraps either of them and injects faults, for tests.

pub mod backend;
pub mod blocking;
pub mod fault;
pub mod files;
#[cfg(test)]
pub(super) mod memory;
pub mod object;
pub mod transfer;
pub mod uring;
