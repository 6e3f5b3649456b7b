//! `_core.check_target`, `_core.left_overs`, `_core.remove_left_over`.

use std::ffi::OsString;
use std::path::PathBuf;

use fastckpt_core::commit;
use pyo3::prelude::*;

use crate::error::{Raised, to_python};

/// See `_core.pyi`.
#[pyfunction]
fn check_target(py: Python<'_>, path: PathBuf, overwrite: bool) -> PyResult<()> {
    py.detach(|| commit::check(&path, overwrite)).map_err(|error| to_python(&error, &Raised::default()))
}

/// Name, checkpoint, host, state, bytes, when it was changed.
type LeftOver = (OsString, String, String, &'static str, u64, i64);

/// See `_core.pyi`.
#[pyfunction]
fn left_overs(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<LeftOver>> {
    let found = py.detach(|| commit::left_overs(&directory));
    let found = found.map_err(|error| to_python(&error, &Raised::default()))?;
    Ok(found
        .into_iter()
        .map(|one| (one.name, one.of, one.host, one.state.word(), one.bytes, one.changed))
        .collect())
}

/// See `_core.pyi`.
#[pyfunction]
fn remove_left_over(py: Python<'_>, directory: PathBuf, name: OsString, force: bool) -> PyResult<bool> {
    let removed = py.detach(|| commit::remove_left_over(&directory, &name, force));
    removed.map_err(|error| to_python(&error, &Raised::default()))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(check_target, module)?)?;
    module.add_function(wrap_pyfunction!(left_overs, module)?)?;
    module.add_function(wrap_pyfunction!(remove_left_over, module)?)
}
