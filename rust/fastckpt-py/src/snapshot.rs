//! `_core.Arena` and `_core.Snapshot`.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use fastckpt_core::engine::content::Content;
use fastckpt_core::format::groups;
use fastckpt_core::format::layout::{self, TensorSpec};
use fastckpt_core::save::{Request, save as core_save};
use fastckpt_core::snapshot::{self, Layout, Progress};
use fastckpt_core::sys::arena::Arena as Memory;
use fastckpt_core::sys::priority::Priority;
use fastckpt_core::{Error, Options};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::report::{options, tick, to_dict};
use crate::save::Tensor;

/// Locks, or refuses: to wait with the GIL for somebody who may want it would be a deadlock.
fn lock<'a, T>(mutex: &'a Mutex<T>, what: &str) -> PyResult<MutexGuard<'a, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(guard)) => Ok(guard.into_inner()),
        Err(TryLockError::WouldBlock) => Err(PyRuntimeError::new_err(format!("the {what} is in use"))),
    }
}

fn outcome_of<T>(outcome: Result<T, Error>, raised: &Raised) -> PyResult<T> {
    outcome.map_err(|error| to_python(&error, raised))
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Arena {
    memory: Mutex<Option<Memory>>,
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
}

#[pymethods]
impl Arena {
    #[new]
    fn new(py: Python<'_>, nbytes: usize) -> PyResult<Self> {
        let memory = py.detach(|| Memory::new(nbytes));
        let memory = memory.map_err(Error::io("map memory for a snapshot in", "memory".as_ref()));
        let memory = outcome_of(memory, &Raised::default())?;
        let (address, nbytes) = (memory.as_ptr().addr(), memory.len());
        Ok(Self { memory: Mutex::new(Some(memory)), address, nbytes })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let memory = lock(&self.memory, "snapshot's memory")?.take();
        py.detach(|| drop(memory));
        Ok(())
    }
}

/// What a save needs to know, taken from Python once.
struct State {
    specs: Vec<TensorSpec>,
    contents: Vec<Content>,
    structure: String,
    metadata: String,
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Snapshot {
    state: Mutex<Option<State>>,
    layout: Layout,
    #[pyo3(get)]
    total: u64,
    progress: Progress,
    raised: Arc<Raised>,
}

#[pymethods]
impl Snapshot {
    #[new]
    fn new(
        tensors: Vec<Tensor>,
        structure: String,
        metadata: String,
        fill: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let raised = Arc::new(Raised::default());
        let fill = fill.map(Arc::new);
        let mut state = State { specs: Vec::new(), contents: Vec::new(), structure, metadata };
        let mut sizes = Vec::with_capacity(tensors.len());
        for (index, (name, dtype, shape, address, capacity, logical)) in tensors.into_iter().enumerate() {
            let dtype = layout::dtype(&dtype)
                .ok_or_else(|| PyValueError::new_err(format!("safetensors has no dtype `{dtype}`")))?;
            let spec = TensorSpec { name, dtype, shape, logical };
            let size = spec.bytes().ok_or_else(|| {
                PyValueError::new_err(format!("tensor `{}` has an impossible size", spec.name))
            })?;
            let memory = (address, capacity);
            state.contents.push(buffers::content(index, memory, size, fill.as_ref(), &raised)?);
            state.specs.push(spec);
            sizes.push(size);
        }
        let total = sizes.iter().sum();
        let layout = Layout::of(sizes).ok_or_else(|| PyValueError::new_err("the state is too large"))?;
        Ok(Self { total, state: Mutex::new(Some(state)), layout, progress: Progress::default(), raised })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.bytes
    }

    #[getter]
    fn staged(&self) -> u64 {
        self.progress.done.load(Ordering::Relaxed)
    }

    fn stop(&self) {
        self.progress.stop.store(true, Ordering::Relaxed);
    }

    #[pyo3(signature = (arena, wanted, *, last, threads))]
    fn stage(
        &self,
        py: Python<'_>,
        arena: &Arena,
        wanted: &[u8],
        last: bool,
        threads: Option<usize>,
    ) -> PyResult<()> {
        let options = options(py, "auto", threads)?;
        let mut memory = lock(&arena.memory, "snapshot's memory")?;
        let memory = memory.as_deref_mut().ok_or_else(gone)?;
        let mut state = lock(&self.state, "snapshot")?;
        let state = state.as_mut().ok_or_else(gone)?;
        if wanted.len() != self.layout.sizes.len() {
            return Err(PyValueError::new_err("there must be one byte for each tensor"));
        }
        let outcome = py.detach(|| {
            let wanted: Vec<usize> = (0..wanted.len()).filter(|&index| wanted[index] != 0).collect();
            let mut tick = tick(None, &self.raised);
            let mut tick = || tick(0, 0);
            let outcome = snapshot::copy(
                &state.contents,
                &self.layout,
                &wanted,
                memory,
                &options,
                &self.progress,
                &mut tick,
            );
            if last || outcome.is_err() {
                // The state's own memory is not needed any more, and must not be looked at again.
                state.contents = Vec::new();
            }
            outcome
        });
        outcome_of(outcome, &self.raised)
    }

    #[pyo3(signature = (arena, path, *, model_prefix, overwrite, shard_size, io, threads, bandwidth_limit, nice, io_priority,
        step, tick))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
    fn save<'py>(
        &self,
        py: Python<'py>,
        arena: &Arena,
        path: PathBuf,
        model_prefix: &str,
        overwrite: bool,
        shard_size: u64,
        io: &str,
        threads: Option<usize>,
        bandwidth_limit: Option<u64>,
        nice: Option<u8>,
        io_priority: Option<&str>,
        step: Option<i64>,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let priority = priority(nice, io_priority)?;
        let options = Options { bandwidth_limit, priority, step, ..options(py, io, threads)? };
        let memory = lock(&arena.memory, "snapshot's memory")?;
        let memory = memory.as_deref().ok_or_else(gone)?;
        let state = lock(&self.state, "snapshot")?.take().ok_or_else(gone)?;
        let report = py.detach(|| {
            let State { specs, contents: taken, structure, metadata } = state;
            drop(taken);
            let contents: Option<Vec<Content>> = self
                .layout
                .offsets
                .iter()
                .zip(&self.layout.sizes)
                .map(|(&at, &size)| buffers::part(memory, at, size))
                .collect();
            let contents =
                contents.ok_or_else(|| Error::Invalid("the snapshot's memory is too small".to_owned()))?;
            let request = Request {
                path: &path,
                tensors: &specs,
                groups: &groups::of(model_prefix),
                contents: &contents,
                structure: &structure,
                metadata: &metadata,
                overwrite,
                shard_size,
                steady: true,
            };
            core_save(&request, &options, &mut self::tick(tick.as_ref(), &self.raised))
            // Names and shapes by the hundred thousand are freed here, without the GIL.
        });
        to_dict(py, &outcome_of(report, &self.raised)?)
    }

    /// Frees what it knows without holding the GIL meanwhile.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let state = lock(&self.state, "snapshot")?.take();
        py.detach(|| drop(state));
        Ok(())
    }
}

fn gone() -> PyErr {
    PyRuntimeError::new_err("the snapshot is used up")
}

fn priority(nice: Option<u8>, io: Option<&str>) -> PyResult<Priority> {
    let io = io.map(|text| text.parse().map_err(Error::Invalid)).transpose();
    Ok(Priority { nice, io: outcome_of(io, &Raised::default())? })
}

/// See `_core.pyi`.
#[pyfunction]
fn try_priority(py: Python<'_>, nice: Option<u8>, io_priority: Option<&str>) -> PyResult<()> {
    let priority = priority(nice, io_priority)?;
    Ok(py.detach(|| priority.probe())?)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Arena>()?;
    module.add_class::<Snapshot>()?;
    module.add_function(wrap_pyfunction!(try_priority, module)?)
}
