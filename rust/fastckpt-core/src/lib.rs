//! The checkpoint engine: plan, write, commit, read, verify.
//!
//! Data flows one way: a [`plan`] turns tensors into shards, extents and blocks; [`worker`]s take blocks and move them
//! through an [`io`] backend to the disk; [`commit`] makes the result durable and visible. [`save`] and [`read`] tie them together.
//! The format is described in `docs/format.md`, whose sections the code cites.
//!
//! The crate knows no Python. All unsafe code stands under `sys`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod align;
pub mod bounds;
pub mod checksum;
pub mod commit;
pub mod crew;
pub mod environment;
pub mod error;
pub mod io;
pub mod limit;
pub mod manifest;
pub mod options;
pub mod plan;
pub mod probe;
pub mod read;
pub mod report;
pub mod save;
pub mod snapshot;
pub mod source;
pub mod sys;
pub mod telemetry;
pub mod worker;

pub use environment::Environment;
pub use error::{Error, Result};
pub use options::{Io, Options};
pub use report::{Damage, Fallback, Report};
