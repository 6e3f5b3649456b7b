//! `_core.save`.

use std::path::PathBuf;
use std::sync::Arc;

use fastckpt_core::Options;
use fastckpt_core::format::groups;
use fastckpt_core::format::layout::{self, TensorSpec};
use fastckpt_core::save::{Request, save as core_save};
use fastckpt_core::telemetry;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::report::{options, tick, to_dict};

/// Name, stored dtype, stored shape, address, bytes that are there, true dtype and shape where they differ.
pub(crate) type Tensor = (String, String, Vec<u64>, usize, u64, Option<(String, Vec<u64>)>);

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (path, tensors, structure, metadata, *, model_prefix, overwrite, shard_size,
    io, threads, bandwidth_limit, step, fill, tick))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
fn save<'py>(
    py: Python<'py>,
    path: PathBuf,
    tensors: Vec<Tensor>,
    structure: &str,
    metadata: &str,
    model_prefix: &str,
    overwrite: bool,
    shard_size: u64,
    io: &str,
    threads: Option<usize>,
    bandwidth_limit: Option<u64>,
    step: Option<i64>,
    fill: Option<Py<PyAny>>,
    tick: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = Options { bandwidth_limit, step, ..options(py, io, threads)? };
    let raised = Arc::new(Raised::default());
    let fill = fill.map(Arc::new);
    let mut specs = Vec::with_capacity(tensors.len());
    let mut contents = Vec::with_capacity(tensors.len());
    for (index, (name, dtype, shape, address, capacity, logical)) in tensors.into_iter().enumerate() {
        let dtype = layout::dtype(&dtype)
            .ok_or_else(|| PyValueError::new_err(format!("safetensors has no dtype `{dtype}`")))?;
        let spec = TensorSpec { name, dtype, shape, logical };
        let nbytes = spec
            .bytes()
            .ok_or_else(|| PyValueError::new_err(format!("tensor `{}` has an impossible size", spec.name)))?;
        contents.push(buffers::content(index, (address, capacity), nbytes, fill.as_ref(), &raised)?);
        specs.push(spec);
    }
    let report = py.detach(|| {
        let request = Request {
            path: &path,
            tensors: &specs,
            groups: &groups::of(model_prefix),
            contents: &contents,
            structure,
            metadata,
            overwrite,
            shard_size,
            steady: false,
        };
        core_save(&request, &options, &mut self::tick(tick.as_ref(), &raised))
    });
    to_dict(py, &report.map_err(|error| to_python(&error, &raised))?)
}

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

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(save, module)?)?;
    module.add_function(wrap_pyfunction!(set_target, module)?)
}
