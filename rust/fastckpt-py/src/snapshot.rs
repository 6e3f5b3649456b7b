//! `_core.Memory` and `_core.Snapshot`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastckpt_core::engine::deadline::{given_up, refuse, within};
use fastckpt_core::engine::job::Progress;
use fastckpt_core::snapshot::Layout;
use fastckpt_core::sys::nice;
use fastckpt_core::{Error, snapshot};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::report::tick;
use crate::save::{SaveOptions, Tensor, saved, state};

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct Memory(Arc<snapshot::Memory>);

impl Memory {
    /// The memory to lend to an operation as staging buffers.
    pub(crate) fn lent(memory: Option<&Self>) -> Option<Arc<snapshot::Memory>> {
        memory.map(|memory| Arc::clone(&memory.0))
    }
}

#[pymethods]
impl Memory {
    #[new]
    fn new(py: Python<'_>, nbytes: usize) -> PyResult<Self> {
        let memory = py.detach(|| snapshot::Memory::new(nbytes));
        Ok(Self(Arc::new(mapped(memory)?)))
    }

    #[getter]
    fn address(&self) -> usize {
        self.0.address()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.size()
    }

    #[getter]
    fn is_in_use(&self) -> bool {
        self.0.is_in_use()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        mapped(py.detach(|| self.0.close()))
    }
}

/// The fields of a `fastckpt._tensors.described.Tensor` for a snapshot of parts.
#[derive(FromPyObject)]
struct Part {
    #[pyo3(item(3))]
    address: usize,
    #[pyo3(item(4))]
    capacity: u64,
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Snapshot {
    core: snapshot::Snapshot,
    raised: Arc<Raised>,
    /// Whether an abandoned save still uses the snapshot.
    is_left: AtomicBool,
}

/// An abandoned save still reads `kept`: if it is a snapshot, its memory stays until nothing uses it.
pub(crate) fn leave(kept: &Py<PyAny>) {
    Python::attach(|py| {
        if let Ok(snapshot) = kept.bind(py).cast::<Snapshot>() {
            snapshot.get().is_left.store(true, Ordering::Relaxed);
        }
    });
}

#[pymethods]
impl Snapshot {
    #[new]
    fn new(
        py: Python<'_>,
        tensors: Vec<Tensor>,
        structure: String,
        metadata: String,
        options: &SaveOptions,
        fill: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let raised = Arc::new(Raised::default());
        let state = state(tensors, structure, metadata, fill, &raised)?;
        let core = py.detach(|| {
            let SaveOptions { groups, shard_size, frozen, core, .. } = options;
            let (groups, frozen) = (groups.clone(), frozen.clone());
            snapshot::Snapshot::new(state, Layout { groups, shard_size: *shard_size, frozen }, core)
        });
        Ok(Self { core: mapped(core)?, raised, is_left: AtomicBool::new(false) })
    }

    #[staticmethod]
    fn of_parts(parts: Vec<Part>, joins: &[u8], fill: Option<Py<PyAny>>) -> PyResult<Self> {
        if joins.len() != parts.len() {
            return Err(PyValueError::new_err("there must be one byte for each part"));
        }
        let raised = Arc::new(Raised::default());
        let fill = buffers::fill(fill, &raised);
        let part = |(index, (Part { address, capacity: bytes }, joins)): (usize, (Part, &u8))| {
            let content = buffers::content(index, (address, bytes), bytes, fill.as_ref())?;
            Ok(snapshot::Part { content, bytes, joins: *joins != 0 })
        };
        let parts = parts.into_iter().zip(joins).enumerate().map(part).collect::<PyResult<_>>()?;
        Ok(Self { core: snapshot::Snapshot::of_parts(parts), raised, is_left: AtomicBool::new(false) })
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.core.size()
    }

    #[getter]
    fn total(&self) -> u64 {
        self.core.total()
    }

    #[getter]
    fn staged(&self) -> u64 {
        self.core.staged()
    }

    fn stop(&self) {
        self.core.stop();
    }

    fn attach(&self, memory: &Memory) -> PyResult<()> {
        mapped(self.core.attach(&memory.0))
    }

    fn places(&self) -> PyResult<Vec<(usize, u64)>> {
        mapped(self.core.places())
    }

    fn copied(&self, nbytes: u64) -> PyResult<()> {
        mapped(self.core.copied(nbytes))
    }

    #[pyo3(signature = (wanted, *, last, options))]
    fn stage(&self, py: Python<'_>, wanted: &[u8], last: bool, options: &SaveOptions) -> PyResult<()> {
        let outcome =
            py.detach(|| self.core.stage(wanted, last, &options.core, &mut tick(None, &self.raised)));
        outcome.map_err(|error| to_python(&error, &self.raised))
    }

    fn save(
        slf: Py<Self>,
        py: Python<'_>,
        path: PathBuf,
        options: Py<SaveOptions>,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'_, PyDict>> {
        let (own, deadline, target) = (slf.get(), options.get().deadline, path.clone());
        let job = {
            let slf = slf.clone_ref(py);
            move |progress: Progress<'_>| {
                let options = options.get();
                let (files, base) = (options.files(), options.base.as_deref());
                slf.get().core.save(&path, &files, options.overwrite, base, &options.core, progress)
            }
        };
        let report = py.detach(|| {
            refuse(deadline, &target)?;
            within(deadline, &target, &mut self::tick(tick.as_ref(), &own.raised), job)
        });
        own.is_left.fetch_or(given_up(&report), Ordering::Relaxed);
        saved(py, &report.map_err(|error| to_python(&error, &own.raised))?)
    }

    #[getter]
    fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Relaxed)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_left.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Freeing names and shapes by the hundred thousand needs no GIL.
        mapped(py.detach(|| self.core.close()))
    }
}

/// Maps the outcome of a call that runs no Python code.
fn mapped<T>(outcome: Result<T, Error>) -> PyResult<T> {
    outcome.map_err(|error| to_python(&error, &Raised::default()))
}

/// See `_core.pyi`.
#[pyfunction]
fn try_nice(py: Python<'_>, nice: u8) -> PyResult<()> {
    Ok(py.detach(|| nice::probe(nice))?)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Memory>()?;
    module.add_class::<Snapshot>()?;
    module.add_function(wrap_pyfunction!(try_nice, module)?)
}
