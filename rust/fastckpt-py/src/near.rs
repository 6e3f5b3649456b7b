//! Which processes of this host let this process read their memory.

use fastckpt_core::sys::remote;
use pyo3::prelude::*;

/// See `_core.pyi`.
#[pyfunction]
fn process_token() -> Option<(u64, [u8; 16])> {
    remote::token().map(|token| (token.as_ptr().addr() as u64, *token))
}

/// See `_core.pyi`.
#[pyfunction]
fn reads_process(process: u32, address: u64, token: [u8; 16]) -> PyResult<bool> {
    let mut found = [0; 16];
    remote::read(process, &mut [(address, &mut found[..])])?;
    Ok(found == token)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(process_token, module)?)?;
    module.add_function(wrap_pyfunction!(reads_process, module)?)
}
