//! `_core.set_target`, `_core.set_group` and `_core.wait_for`: what the live counters show beside operations.

use fastckpt_core::telemetry;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// See `_core.pyi`.
#[pyfunction]
fn set_target(py: Python<'_>, target: &str) -> PyResult<(f64, f64)> {
    let (save, load) = telemetry::parse_targets(target).ok_or_else(|| {
        PyValueError::new_err(format!(
            "{target:?} is not a target: give light, medium, high, GB/s per GPU (as in 2.5), or save=X,load=Y"
        ))
    })?;
    py.detach(|| telemetry::set_target(save, load));
    Ok((save as f64 / 1e9, load as f64 / 1e9))
}

/// See `_core.pyi`.
#[pyfunction]
fn set_group(py: Python<'_>, group: u64, rank: u32, size: u32) {
    py.detach(|| telemetry::set_group(group, rank, size));
}

/// See `_core.pyi`.
#[pyfunction]
fn wait_for(py: Python<'_>, rank: Option<u32>) {
    py.detach(|| telemetry::wait_for(rank));
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(set_target, module)?)?;
    module.add_function(wrap_pyfunction!(set_group, module)?)?;
    module.add_function(wrap_pyfunction!(wait_for, module)?)
}
