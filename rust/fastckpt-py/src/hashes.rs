//! Detects keys that would collide in a Python hash table. An attacker can choose the keys of a file so that each
//! insertion steps over all other keys.

use pyo3::prelude::*;

/// The number of steps that one key may cost on average. For 5000 powers of two, which have only 61 distinct hashes in
/// Python, the average is about a hundred.
const STEPS: usize = 128;
/// The number of hash bits that each further step uses.
const SHIFT: u32 = 5;
/// The size of the smallest table.
const SMALLEST: usize = 8;

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (keys, *, neighbours))]
fn crowded(keys: Vec<Bound<'_, PyAny>>, neighbours: usize) -> PyResult<bool> {
    let hashes = keys.iter().map(PyAnyMethods::hash).collect::<PyResult<Vec<isize>>>()?;
    let mut size = SMALLEST;
    // A table starts at the smallest size, grows, and holds the first keys at each size. A copy may get a larger one.
    while size / 4 <= hashes.len() {
        let held = hashes.len().min(size / 3 * 2);
        if !fits(&hashes[..held], size, neighbours) {
            return Ok(true);
        }
        size *= 2;
    }
    Ok(false)
}

/// Inserts keys as Python does. Returns whether they take no more steps than allowed.
fn fits(hashes: &[isize], size: usize, neighbours: usize) -> bool {
    let mask = size - 1;
    let mut taken = vec![false; size];
    let mut left = hashes.len() * STEPS;
    for &hash in hashes {
        let mut rest = usize::from_le_bytes(hash.to_le_bytes());
        let mut at = rest & mask;
        let place = loop {
            // A set also tries the places after the first one, if the table has room for all of them.
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

/// Adds the functions of this file to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(crowded, module)?)
}
