//! What this process may do here, as a dictionary.

use std::path::PathBuf;

use fastckpt_core::probe::{self, Files, Probe};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::report;

/// Tries what a save would do in `directory`; see the stub for what is in the dictionary.
#[pyfunction]
#[pyo3(name = "probe", signature = (directory, *, io))]
fn run<'py>(py: Python<'py>, directory: PathBuf, io: &str) -> PyResult<Bound<'py, PyDict>> {
    let options = report::options(py, io, None)?;
    let found = py.detach(|| probe::run(&directory, &options));
    to_dict(py, &found)
}

fn to_dict<'py>(py: Python<'py>, found: &Probe) -> PyResult<Bound<'py, PyDict>> {
    let ring = PyDict::new(py);
    ring.set_item("errno", found.ring.refused.as_ref().map_or(0, |refused| refused.errno))?;
    ring.set_item("setup", found.ring.setup)?;
    ring.set_item("enter", found.ring.enter)?;
    ring.set_item("register", found.ring.register)?;
    let dict = PyDict::new(py);
    dict.set_item("ring", ring)?;
    dict.set_item("engine", found.choice.engine.name())?;
    dict.set_item("fallback", found.choice.fallback.as_ref().map(|fallback| &fallback.reason))?;
    dict.set_item("threads", found.choice.threads)?;
    dict.set_item("cores", found.cores)?;
    dict.set_item("huge_pages", found.huge_pages)?;
    dict.set_item("populate", found.populate)?;
    dict.set_item("staging", found.staging)?;
    dict.set_item("counters", found.counters)?;
    let files = found.files.as_ref().ok().map(|files| files_to_dict(py, files)).transpose()?;
    dict.set_item("files", files)?;
    let trouble = found.files.as_ref().err();
    dict.set_item("trouble", trouble.map(|trouble| (trouble.operation, trouble.errno)))?;
    Ok(dict)
}

fn files_to_dict<'py>(py: Python<'py>, files: &Files) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("direct_open", files.direct_open)?;
    dict.set_item("direct_write", files.direct_write)?;
    dict.set_item("direct_read", files.direct_read)?;
    dict.set_item("direct_used", files.direct_used)?;
    dict.set_item("direct_alignment", files.direct_alignment)?;
    dict.set_item("direct_bypasses", files.direct_bypasses)?;
    dict.set_item("cachestat", files.cachestat)?;
    dict.set_item("uncached", files.uncached)?;
    dict.set_item("fallocate", files.fallocate)?;
    dict.set_item("reflink", files.reflink)?;
    dict.set_item("rename_exchange", files.rename_exchange)?;
    dict.set_item("lock", files.lock)?;
    dict.set_item("lock_reach", files.lock_reach.word())?;
    Ok(dict)
}

/// Adds what this file defines to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(run, module)?)
}
