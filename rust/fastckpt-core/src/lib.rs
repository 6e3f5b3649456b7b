//! The checkpoint engine: plan, write, commit, read, verify.
//!
//! Data flows in one direction. The [`mod@format`] defines the place of each byte. The workers of the [`engine`] take
//! blocks and move them to storage through a backend. [`commit`] makes the result durable and visible. [`save`] and
//! [`read`] connect these parts. `docs/format.md` describes the format, and the code cites its sections.
//!
//! The crate is independent of Python. All unsafe code is under `sys`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod commit;
pub mod engine;
pub mod environment;
pub mod error;
pub mod format;
pub mod probe;
pub mod ranks;
pub mod read;
pub mod save;
pub mod share;
pub mod snapshot;
pub mod sys;
pub mod telemetry;

pub use engine::options::{Io, Options};
pub use engine::report::{Damage, Fallback, Report};
pub use environment::Environment;
pub use error::{Error, Result};
