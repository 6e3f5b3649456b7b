//! `_core.RankBase`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastckpt_core::Error;
use fastckpt_core::engine::deadline::{given_up, within};
use fastckpt_core::engine::job::Progress;
use fastckpt_core::ranks::{self, Sums};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::{Raised, to_python};
use crate::ranks_save::{Part, held_by};
use crate::report::tick;
use crate::save::SaveOptions;
use crate::share::{Kind, Share};
use crate::snapshot::leave;

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct RankBase {
    pub(crate) core: ranks::RankBase,
    overwrite: bool,
    deadline: Option<Duration>,
    raised: Arc<Raised>,
    /// Whether an abandoned step still uses the base.
    is_left: AtomicBool,
    /// The Python object that keeps the memory of the parts alive.
    keep: Option<Py<PyAny>>,
}

impl RankBase {
    /// Runs `action` without the GIL.
    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&ranks::RankBase) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| action(&self.core)).map_err(|error| to_python(&error, &self.raised))
    }

    /// Runs a step that accesses the storage of `path`, without the GIL and within the deadline.
    fn step<T: Send + 'static>(
        slf: &Bound<'_, Self>,
        path: &Path,
        progress: &mut (dyn FnMut(u64, u64) -> bool + Send),
        action: impl FnOnce(&ranks::RankBase, Progress<'_>) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let (own, job) = (slf.get(), slf.clone().unbind());
        let job = move |progress: Progress<'_>| action(&job.get().core, progress);
        let outcome = slf.py().detach(|| within(own.deadline, path, progress, job));
        if given_up(&outcome) {
            own.is_left.store(true, Ordering::Relaxed);
            own.keep.as_ref().map(leave);
        }
        outcome.map_err(|error| to_python(&error, &own.raised))
    }
}

#[pymethods]
impl RankBase {
    #[new]
    #[pyo3(signature = (share, rank, held, fill, options, keep=None))]
    fn new(
        py: Python<'_>,
        share: &Share,
        rank: u32,
        held: Vec<Part>,
        fill: Option<Py<PyAny>>,
        options: &SaveOptions,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let table = share.table()?;
        let raised = Arc::new(Raised::default());
        let held = held_by(table, rank, held, fill, &raised)?;
        let core = py
            .detach(|| ranks::RankBase::new(Arc::clone(table), rank, held, options.core.clone()))
            .map_err(|error| to_python(&error, &raised))?;
        let SaveOptions { overwrite, deadline, .. } = *options;
        Ok(Self { core, overwrite, deadline, raised, is_left: AtomicBool::new(false), keep })
    }

    fn open<'py>(slf: &Bound<'py, Self>, path: PathBuf) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let place = path.clone();
        let manifest = Self::step(slf, &place, &mut |_, _| true, move |core, _| core.open(&path))?;
        Ok(manifest.map(|manifest| PyBytes::new(slf.py(), &manifest)))
    }

    fn know(&self, py: Python<'_>, path: PathBuf, manifest: PyBackedBytes) -> PyResult<()> {
        self.detached(py, |core| core.know(&path, &manifest))
    }

    fn compare<'py>(&self, py: Python<'py>, tick: Option<Py<PyAny>>) -> PyResult<Bound<'py, PyBytes>> {
        let sums = self
            .detached(py, |core| Ok(core.compare(&mut self::tick(tick.as_ref(), &self.raised))?.encode()))?;
        Ok(PyBytes::new(py, &sums))
    }

    #[staticmethod]
    fn merge(py: Python<'_>, found: Vec<PyBackedBytes>) -> PyResult<Bound<'_, PyBytes>> {
        let merged = py.detach(|| {
            let mut all = Sums::default();
            found.iter().try_for_each(|one| Sums::decode(one).map(|one| all.add(one)))?;
            Ok(all.encode())
        });
        Ok(PyBytes::new(py, &merged.map_err(|error: Error| to_python(&error, &Raised::default()))?))
    }

    fn take<'py>(
        slf: &Bound<'py, Self>,
        path: PathBuf,
        found: PyBackedBytes,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (place, own) = (path.clone(), slf.get());
        let overwrite = own.overwrite;
        let told =
            Self::step(slf, &place, &mut self::tick(tick.as_ref(), &own.raised), move |core, progress| {
                let found = Sums::decode(&found)?;
                core.take(&path, overwrite, &found, progress)
            })?;
        Ok(PyBytes::new(slf.py(), &told))
    }

    fn follow(&self, py: Python<'_>, told: PyBackedBytes) -> PyResult<()> {
        self.detached(py, |core| core.follow(&told))
    }

    fn share(&self, py: Python<'_>) -> PyResult<Share> {
        Ok(Share(Kind::Save(self.detached(py, ranks::RankBase::table)?)))
    }

    fn close(slf: &Bound<'_, Self>) {
        let close = |core: &ranks::RankBase, _: Progress<'_>| {
            core.close();
            Ok(())
        };
        if !slf.get().is_left.load(Ordering::Relaxed) {
            let _ = Self::step(slf, Path::new(""), &mut |_, _| true, close);
        }
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RankBase>()
}
