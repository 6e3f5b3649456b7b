//! `_core.save`, and the parts shared with a snapshot: `SaveOptions` and the state.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fastckpt_core::engine::deadline::{refuse, within};
use fastckpt_core::engine::job::Progress;
use fastckpt_core::format::groups::{self, Group};
use fastckpt_core::format::layout::{self, TensorSpec};
use fastckpt_core::format::manifest;
use fastckpt_core::save::{Contents, Request, save as core_save};
use fastckpt_core::snapshot::State;
use fastckpt_core::{Options, Report};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::PyDict;

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::report::{options, tick, to_dict};
use crate::snapshot::Memory;
use crate::telemetry::{Operation, called};

/// `fastckpt._tensors.described.Tensor`. It is a tuple, because a class of this module would cost more time for each of
/// many small tensors.
#[derive(FromPyObject)]
pub(crate) struct Tensor {
    #[pyo3(item(0))]
    name: String,
    #[pyo3(item(1))]
    dtype: PyBackedStr,
    #[pyo3(item(2))]
    shape: Vec<u64>,
    #[pyo3(item(3))]
    address: usize,
    #[pyo3(item(4))]
    capacity: u64,
    #[pyo3(item(5))]
    logical: Option<(String, Vec<u64>)>,
}

/// The state in the core's types. `fill` supplies the bytes of tensors without an address.
pub(crate) fn state(
    tensors: Vec<Tensor>,
    structure: String,
    metadata: String,
    fill: Option<Py<PyAny>>,
    raised: &Arc<Raised>,
) -> PyResult<State> {
    let fill = buffers::fill(fill, raised);
    let mut specs = Vec::with_capacity(tensors.len());
    let mut contents = Vec::with_capacity(tensors.len());
    for (index, tensor) in tensors.into_iter().enumerate() {
        let Tensor { name, dtype, shape, address, capacity, logical } = tensor;
        let dtype = layout::dtype(&dtype)
            .ok_or_else(|| PyValueError::new_err(format!("safetensors has no dtype `{dtype}`")))?;
        let spec = TensorSpec { name, dtype, shape, logical };
        let nbytes = spec
            .bytes()
            .ok_or_else(|| PyValueError::new_err(format!("tensor `{}` has an impossible size", spec.name)))?;
        contents.push(buffers::content(index, (address, capacity), nbytes, fill.as_ref())?);
        specs.push(spec);
    }
    Ok(State { tensors: specs, contents, structure, metadata })
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct SaveOptions {
    pub(crate) groups: Vec<Group>,
    pub(crate) shard_size: u64,
    pub(crate) overwrite: bool,
    files: Vec<(String, PyBackedBytes)>,
    pub(crate) base: Option<PathBuf>,
    pub(crate) frozen: Vec<bool>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) core: Options,
}

impl SaveOptions {
    pub(crate) fn files(&self) -> Vec<(&str, &[u8])> {
        self.files.iter().map(|(name, content)| (name.as_str(), &**content)).collect()
    }
}

#[pymethods]
impl SaveOptions {
    #[new]
    #[pyo3(signature = (*, shard_size, model_prefix="", training_prefix="", overwrite=true, files=Vec::new(), base=None,
        frozen=Vec::new(), kept=Vec::new(), io="auto", threads=None, bandwidth_limit=None, nice=None, step=None,
        elapsed=0.0, operation=None, staging=None, most_staging=None, deadline=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a save, one by one")]
    fn new(
        py: Python<'_>,
        shard_size: u64,
        model_prefix: &str,
        training_prefix: &str,
        overwrite: bool,
        files: Vec<(String, PyBackedBytes)>,
        base: Option<PathBuf>,
        frozen: Vec<bool>,
        kept: Vec<(String, String)>,
        io: &str,
        threads: Option<usize>,
        bandwidth_limit: Option<u64>,
        nice: Option<u8>,
        step: Option<i64>,
        elapsed: f64,
        operation: Option<&Operation>,
        staging: Option<&Memory>,
        most_staging: Option<u64>,
        deadline: Option<Duration>,
    ) -> PyResult<Self> {
        manifest::check_options(&kept).map_err(|error| to_python(&error, &Raised::default()))?;
        let (call, begun) = (called(step, elapsed), operation.map(Operation::begun));
        let staging = Memory::lent(staging);
        let own = options(py, io, (threads, most_staging))?;
        let core = Options { bandwidth_limit, nice, call, kept, begun, staging, ..own };
        let groups = groups::beside(model_prefix, training_prefix);
        Ok(Self { groups, shard_size, overwrite, files, base, frozen, deadline, core })
    }
}

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (path, tensors, structure, metadata, options, fill, tick, keep=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
fn save(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<Tensor>,
    structure: String,
    metadata: String,
    options: Py<SaveOptions>,
    fill: Option<Py<PyAny>>,
    tick: Option<Py<PyAny>>,
    keep: Option<Py<PyAny>>,
) -> PyResult<Bound<'_, PyDict>> {
    let raised = Arc::new(Raised::default());
    let state = state(tensors, structure, metadata, fill, &raised)?;
    let (deadline, target) = (options.get().deadline, path.clone());
    let job = move |progress: Progress<'_>| {
        let (options, _keep) = (options.get(), keep);
        let request = Request {
            path: &path,
            tensors: &state.tensors,
            groups: &options.groups,
            shard_size: options.shard_size,
            contents: Contents::Tensors(&state.contents),
            base: options.base.as_deref(),
            frozen: &options.frozen,
            structure: &state.structure,
            metadata: &state.metadata,
            files: &options.files(),
            overwrite: options.overwrite,
        };
        core_save(&request, &options.core, progress)
    };
    let report = py.detach(|| {
        refuse(deadline, &target)?;
        within(deadline, &target, &mut self::tick(tick.as_ref(), &raised), job)
    });
    saved(py, &report.map_err(|error| to_python(&error, &raised))?)
}

/// The report of a save: the fields of all reports, and the linked files.
pub(crate) fn saved<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = to_dict(py, report)?;
    dict.set_item("linked_files", report.linked.files)?;
    dict.set_item("linked_bytes", report.linked.bytes)?;
    Ok(dict)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SaveOptions>()?;
    module.add_function(wrap_pyfunction!(save, module)?)
}
