//! `_core.RankBase`.

use std::path::PathBuf;
use std::sync::Arc;

use fastckpt_core::Error;
use fastckpt_core::ranks::{self, Sums};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::error::{Raised, to_python};
use crate::ranks_save::{Part, held_by};
use crate::report::tick;
use crate::save::SaveOptions;
use crate::share::{Kind, Share};

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct RankBase {
    pub(crate) core: ranks::RankBase,
    overwrite: bool,
    raised: Arc<Raised>,
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
}

#[pymethods]
impl RankBase {
    #[new]
    #[pyo3(signature = (share, rank, held, fill, options))]
    fn new(
        py: Python<'_>,
        share: &Share,
        rank: u32,
        held: Vec<Part>,
        fill: Option<Py<PyAny>>,
        options: &SaveOptions,
    ) -> PyResult<Self> {
        let table = share.table()?;
        let raised = Arc::new(Raised::default());
        let held = held_by(table, rank, held, fill, &raised)?;
        let core = py
            .detach(|| ranks::RankBase::new(Arc::clone(table), rank, held, options.core.clone()))
            .map_err(|error| to_python(&error, &raised))?;
        Ok(Self { core, overwrite: options.overwrite, raised })
    }

    fn open<'py>(&self, py: Python<'py>, path: PathBuf) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let manifest = self.detached(py, |core| core.open(&path))?;
        Ok(manifest.map(|manifest| PyBytes::new(py, &manifest)))
    }

    fn know(&self, py: Python<'_>, path: PathBuf, manifest: PyBackedBytes) -> PyResult<()> {
        self.detached(py, |core| core.know(&path, manifest.to_vec()))
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
        &self,
        py: Python<'py>,
        path: PathBuf,
        found: PyBackedBytes,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let told = self.detached(py, |core| {
            let found = Sums::decode(&found)?;
            core.take(&path, self.overwrite, &found, &mut self::tick(tick.as_ref(), &self.raised))
        })?;
        Ok(PyBytes::new(py, &told))
    }

    fn follow(&self, py: Python<'_>, told: PyBackedBytes) -> PyResult<()> {
        self.detached(py, |core| core.follow(&told))
    }

    fn share(&self, py: Python<'_>) -> PyResult<Share> {
        Ok(Share(Kind::Save(self.detached(py, ranks::RankBase::table)?)))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.core.close());
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RankBase>()
}
