//! CRC-64/NVME of memory that Python vouches for (`docs/format.md`, 3.3).

use fastckpt_core::format::checksum;
use pyo3::prelude::*;

use crate::buffers;

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (address, nbytes, before = None))]
fn crc64(py: Python<'_>, address: usize, nbytes: usize, before: Option<u64>) -> u64 {
    let memory = buffers::summed(address, nbytes);
    py.detach(|| {
        let crc = checksum::of_memory(memory);
        before.map_or(crc, |before| checksum::combine(before, crc, nbytes as u64))
    })
}

/// See `_core.pyi`.
#[pyfunction]
fn crc64_joined(first: u64, parts: Vec<(u64, u64)>) -> u64 {
    parts.into_iter().fold(first, |crc, (next, nbytes)| checksum::combine(crc, next, nbytes))
}

/// Adds the functions of this file to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(crc64, module)?)?;
    module.add_function(wrap_pyfunction!(crc64_joined, module)?)
}
