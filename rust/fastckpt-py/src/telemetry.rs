//! `_core.Operation`, `_core.begin_copy`, `_core.set_target`, `_core.set_group`, `_core.wait_for`, `_core.set_changed`,
//! `_core.warn` and `_core.counters_refused`: the live counters of operations that the core does not run, or has not
//! begun, the counters beside operations, and the reason why counters are hidden.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastckpt_core::telemetry::{self, Begun, Call, Kind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::report::{environment, options};

/// The caller's facts about an operation: `elapsed` seconds have passed since the program's call.
pub(crate) fn called(step: Option<i64>, elapsed: f64) -> Call {
    let elapsed = Duration::try_from_secs_f64(elapsed).unwrap_or_default();
    Call { step, at: Instant::now().checked_sub(elapsed) }
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct Operation(Arc<Begun>);

impl Operation {
    /// The operation, to be passed to the save that it belongs to.
    pub(crate) fn begun(&self) -> Arc<Begun> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl Operation {
    #[new]
    #[pyo3(signature = (path, nbytes, *, step=None, elapsed=0.0))]
    fn new(py: Python<'_>, path: PathBuf, nbytes: u64, step: Option<i64>, elapsed: f64) -> PyResult<Self> {
        let environment = options(py, "auto", (None, None))?.environment;
        let call = called(step, elapsed);
        Ok(Self(Arc::new(py.detach(|| Begun::stage(&path, nbytes, call, &environment)))))
    }

    fn staged(&self, nbytes: u64) {
        self.0.staged(nbytes);
    }

    fn plan(&self) {
        self.0.plan();
    }

    fn copied(&self, nbytes: u64, total: u64) {
        self.0.copied(nbytes, total);
    }

    fn end_copy(&self, py: Python<'_>, whole: bool) {
        py.detach(|| self.0.end_copy(whole));
    }

    #[pyo3(signature = (errno=None))]
    fn fail(&self, py: Python<'_>, errno: Option<i32>) {
        py.detach(|| self.0.fail(errno));
    }
}

/// See `_core.pyi`.
#[pyfunction]
fn begin_copy(py: Python<'_>, kind: &str, path: PathBuf, step: Option<i64>) -> Operation {
    let environment = environment(py);
    let kind = match kind {
        "drain" => Kind::Drain,
        "fetch" => Kind::Fetch,
        _ => Kind::Copy,
    };
    Operation(Arc::new(py.detach(|| Begun::copy(kind, &path, step, &environment))))
}

/// See `_core.pyi`.
#[pyfunction]
fn set_target(py: Python<'_>, target: &str) -> PyResult<(u64, u64)> {
    let (save, load) = telemetry::parse_targets(target).ok_or_else(|| {
        PyValueError::new_err(format!(
            "{target:?} is not a target: give light, medium, high, a rate per GPU (2.5GB/s), or save=RATE,load=RATE"
        ))
    })?;
    py.detach(|| telemetry::set_target(save, load));
    Ok((save, load))
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

/// See `_core.pyi`.
#[pyfunction]
fn set_changed(py: Python<'_>, step: i64, model: Option<f64>, optimizer: Option<f64>) {
    py.detach(|| telemetry::set_changed(step, model, optimizer));
}

/// See `_core.pyi`.
#[pyfunction]
fn warn(py: Python<'_>, text: &str) {
    py.detach(|| telemetry::warn(text));
}

/// See `_core.pyi`.
#[pyfunction]
fn counters_refused() -> Option<String> {
    telemetry::refused()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Operation>()?;
    module.add_function(wrap_pyfunction!(begin_copy, module)?)?;
    module.add_function(wrap_pyfunction!(set_target, module)?)?;
    module.add_function(wrap_pyfunction!(set_group, module)?)?;
    module.add_function(wrap_pyfunction!(wait_for, module)?)?;
    module.add_function(wrap_pyfunction!(set_changed, module)?)?;
    module.add_function(wrap_pyfunction!(warn, module)?)?;
    module.add_function(wrap_pyfunction!(counters_refused, module)?)
}
