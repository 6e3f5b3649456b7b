//! The checkpoint engine: plan, write, commit, read, verify.
//!
//! Data flows one way: the [`mod@format`] says where each byte lies; the workers of the [`engine`] take blocks and move
//! them through a backend to the disk; [`commit`] makes the result durable and visible. [`save`] and [`read`] tie them
//! together. The format is described in `docs/format.md`, whose sections the code cites.
//!
//! The crate knows no Python. All unsafe code stands under `sys`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod commit;
pub mod engine;
pub mod environment;
pub mod error;
pub mod format;
pub mod probe;
pub mod read;
pub mod save;
pub mod snapshot;
pub mod sys;
pub mod telemetry;

pub use engine::options::{Io, Options};
pub use engine::report::{Damage, Fallback, Report};
pub use environment::Environment;
pub use error::{Error, Result};
