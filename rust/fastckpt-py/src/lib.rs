//! The compiled module `fastckpt._core`. It extracts the arguments, releases the GIL, calls the core and maps the
//! error. It does nothing else.
#![expect(clippy::needless_pass_by_value, reason = "arguments come from Python by value")]

use fastckpt_core::format::limits;
use pyo3::prelude::*;

mod buffers;
mod checksum;
mod commit;
mod error;
mod hashes;
mod mail;
mod near;
mod probe;
mod ranks_base;
mod ranks_load;
mod ranks_save;
mod reader;
mod report;
mod save;
mod share;
mod single;
mod snapshot;
mod store;
mod telemetry;

#[pymodule]
#[pyo3(name = "_core")]
fn core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DEBUG_BUILD", cfg!(debug_assertions))?;
    module.add("MAX_DIMENSIONS", limits::MAX_DIMENSIONS)?;
    module.add("MAX_TOKENS", limits::MAX_TOKENS)?;
    module.add("MOST_THREADS", fastckpt_core::engine::choice::MOST_THREADS)?;
    module.add("PLAN", fastckpt_core::share::PLAN)?;
    save::register(module)?;
    commit::register(module)?;
    single::register(module)?;
    probe::register(module)?;
    hashes::register(module)?;
    checksum::register(module)?;
    snapshot::register(module)?;
    telemetry::register(module)?;
    reader::register(module)?;
    share::register(module)?;
    near::register(module)?;
    mail::register(module)?;
    ranks_base::register(module)?;
    ranks_save::register(module)?;
    ranks_load::register(module)
}
