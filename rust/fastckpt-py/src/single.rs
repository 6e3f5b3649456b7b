//! `_core.SingleFile`.

use std::path::PathBuf;
use std::sync::RwLock;

use fastckpt_core::commit;
use pyo3::prelude::*;

use crate::buffers::summed;
use crate::commit::{detached, opened, taken};

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct SingleFile(RwLock<Option<commit::SingleFile>>);

#[pymethods]
impl SingleFile {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, direct: bool) -> PyResult<Self> {
        Ok(Self(RwLock::new(Some(detached(py, || commit::SingleFile::create(&path, direct))?))))
    }

    fn is_direct(&self, py: Python<'_>) -> PyResult<bool> {
        opened(py, &self.0, |file| Ok(file.is_direct()))
    }

    fn reserve(&self, py: Python<'_>, start: u64, end: u64) -> PyResult<()> {
        opened(py, &self.0, |file| file.reserve(start, end))
    }

    fn write(&self, py: Python<'_>, offset: u64, address: usize, nbytes: usize) -> PyResult<u64> {
        let bytes = summed(address, nbytes);
        opened(py, &self.0, |file| file.write(offset, bytes))
    }

    fn publish(&self, py: Python<'_>, nbytes: u64, crc: u64) -> PyResult<()> {
        let file = taken(py, &self.0)?;
        detached(py, || file.publish(nbytes, crc))
    }

    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        let file = taken(py, &self.0)?;
        py.detach(|| drop(file));
        Ok(())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SingleFile>()
}
