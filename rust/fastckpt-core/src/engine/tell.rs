//! Reports to the monitor which engine runs.

use super::path::IoPath;
use super::report::{Engine, Fallback, Ran};
use crate::telemetry::{self, Operation};

/// Reports which engine runs.
pub(super) fn run(operation: &Operation, engine: Engine, fallback: Option<&Fallback>, mixed: bool) {
    operation.ran(&telemetry::Ran {
        engine: engine as u32,
        direct: engine != Engine::Buffered,
        mixed,
        errno: fallback.map(|fallback| fallback.errno),
        fell: fallback.map_or(0, |fallback| fallback.fell),
    });
}

/// Reports what ran.
pub(super) fn end(operation: &Operation, ran: &Ran) {
    let buffered = ran.blocks.on(IoPath::Buffered);
    let direct = ran.blocks.on(IoPath::ZeroCopy) + ran.blocks.on(IoPath::Staged);
    run(operation, ran.engine, ran.fallback.as_ref(), buffered > 0 && direct > 0);
}
