//! The files of a checkpoint in an object store, read by Python.

use std::io;
use std::path::PathBuf;

use fastckpt_core::engine::io::object::Store;
use fastckpt_core::sys::gather::Fetched;
use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyFileNotFoundError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::buffers;
use crate::error::CheckpointError;

/// `fastckpt._stores.files.StoredFiles`, or an object with its methods.
#[derive(Debug)]
pub(crate) struct StoredFiles(pub(crate) Py<PyAny>);

impl StoredFiles {
    /// Calls a method. If it raises an exception, the error contains that exception.
    fn call<T>(
        &self,
        method: &str,
        arguments: impl for<'py> PyCallArgs<'py>,
        take: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> io::Result<T> {
        Python::attach(|py| {
            self.0.bind(py).call_method1(method, arguments).and_then(|found| take(&found)).map_err(|error| {
                let kind = if error.is_instance_of::<PyFileNotFoundError>(py) {
                    io::ErrorKind::NotFound
                } else if error.is_instance_of::<CheckpointError>(py) {
                    io::ErrorKind::InvalidData
                } else {
                    io::ErrorKind::Other
                };
                io::Error::new(kind, error)
            })
        })
    }
}

impl Store for StoredFiles {
    fn manifest(&self, most: Option<usize>) -> io::Result<Vec<u8>> {
        self.call("manifest", (most,), |found| Ok(found.extract::<PyBackedBytes>()?.to_vec()))
    }

    fn size(&self, file: &str) -> io::Result<Option<u64>> {
        self.call("size", (file,), |found| found.extract())
    }

    fn read(&self, file: &str, start: u64, len: usize) -> io::Result<Box<dyn Fetched>> {
        self.call("read", (file, start, len), buffers::fetched)
    }

    fn path_of(&self, file: &str) -> PathBuf {
        let path = self.call("path_of", (file,), |found| found.extract());
        path.unwrap_or_else(|_| file.into())
    }
}
