//! Whether keys would crowd a hash table of Python's: keys that a file chose can make each insertion walk over all
//! others.

use pyo3::prelude::*;

/// Steps that one key may cost on average. Powers of two, of which Python's hash knows 61, take a hundred when there
/// are 5000.
const STEPS: usize = 128;
/// The bits of a hash that each further step brings in.
const SHIFT: u32 = 5;
/// The smallest table.
const SMALLEST: usize = 8;

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (keys, *, neighbours))]
fn crowded(keys: Vec<Bound<'_, PyAny>>, neighbours: usize) -> PyResult<bool> {
    let hashes = keys.iter().map(PyAnyMethods::hash).collect::<PyResult<Vec<isize>>>()?;
    let mut size = SMALLEST;
    // A table grows from the smallest, and always holds the first keys; a copy may be given more room.
    while size / 4 <= hashes.len() {
        let held = hashes.len().min(size / 3 * 2);
        if !fits(&hashes[..held], size, neighbours) {
            return Ok(true);
        }
        size *= 2;
    }
    Ok(false)
}

/// Inserts keys as Python does, and stops where they take more steps than they may.
fn fits(hashes: &[isize], size: usize, neighbours: usize) -> bool {
    let mask = size - 1;
    let mut taken = vec![false; size];
    let mut left = hashes.len() * STEPS;
    for &hash in hashes {
        let mut rest = usize::from_le_bytes(hash.to_le_bytes());
        let mut at = rest & mask;
        let place = loop {
            // A set looks at the places behind the first one, where there is room for all of them.
            let last = if at + neighbours <= mask { at + neighbours } else { at };
            match taken[at..=last].iter().position(|taken| !taken) {
                Some(free) => break at + free,
                None if left <= last - at => return false,
                None => left -= last - at + 1,
            }
            rest >>= SHIFT;
            at = (at * 5 + 1 + rest) & mask;
        };
        taken[place] = true;
    }
    true
}

/// Adds what this file defines to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(crowded, module)?)
}
