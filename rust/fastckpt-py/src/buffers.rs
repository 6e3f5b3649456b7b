//! The boundary where addresses that Python vouches for become memory of the core, and callbacks into Python become its
//! sources and destinations.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::sync::Arc;

use fastckpt_core::engine::content::{Content, Destination, Drain, Fill};
use fastckpt_core::ranks::Place;
use fastckpt_core::read::boxes;
use fastckpt_core::sys::array::Array;
use fastckpt_core::sys::memory::{Region, Source};
use fastckpt_core::sys::strided::{Rows, Strided};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{Raised, to_python};

/// Where to read tensor `index` of `nbytes` bytes from: `address`, where Python knows of `capacity` bytes, or `fill` if
/// the address is 0.
pub(crate) fn content(
    index: usize,
    (address, capacity): (usize, u64),
    nbytes: u64,
    fill: Option<&Arc<Py<PyAny>>>,
    raised: &Arc<Raised>,
) -> PyResult<Content> {
    if nbytes != capacity {
        return Err(misfit("save", index, nbytes, capacity));
    }
    if address != 0 || nbytes == 0 {
        // SAFETY: the Python side passes the address and size of a contiguous host tensor. Python keeps the tensor
        // alive, and tells its owner not to change it, until the call returns, or for a rank's save its `close`. No
        // `Source` is read after that. The core counts the bytes from dtype and shape. That count was compared with the
        // size, so it cannot make the memory longer.
        return Ok(Content::Memory(unsafe { Source::new(address as *const u8, nbytes as usize) }));
    }
    let callback = Callback::new(index, fill, raised)?;
    let fill: Fill = Arc::new(move |start, to| callback.call(start, to.as_mut_ptr().addr(), to.len()));
    Ok(Content::Pull(fill))
}

/// Where request `index` puts the `nbytes` of a tensor, or the `rows` of a box: at `address`, where Python knows of
/// `capacity` bytes, or, if the address is 0, into `drain`, which takes `capacity` bytes. With `rows`, `address` is the
/// address of the lowest byte.
pub(crate) fn destination(
    index: usize,
    (nbytes, rows): (u64, Option<&Arc<Rows>>),
    (address, capacity): (usize, u64),
    drain: Option<&Arc<Py<PyAny>>>,
    raised: &Arc<Raised>,
) -> PyResult<Destination> {
    let reach = rows.filter(|_| address != 0).map_or(0..i128::from(nbytes), |rows| rows.reach());
    let taken = reach.end - reach.start;
    if taken > i128::from(capacity) {
        return Err(misfit("read", index, taken, capacity));
    }
    if address == 0 && nbytes > 0 {
        return Ok(Destination::Push(pushed(index, drain, raised)?));
    }
    let Some(rows) = rows else {
        // SAFETY: the Python side passes the address of contiguous writable host memory and its real size in bytes,
        // which it takes from the tensor or array and never from a file. The region is no longer than that. Python
        // keeps the memory alive and does not touch it until the call returns, and gives no byte to two requests. No
        // `Region` outlives the call.
        return Ok(Destination::Memory(unsafe { Region::new(address as *mut u8, nbytes as usize) }));
    };
    if !rows.is_nested() {
        return Err(overlapping(index));
    }
    let base = (address as *mut u8).wrapping_add(reach.start.unsigned_abs() as usize);
    // SAFETY: as above. The memory reaches from the lowest byte of the rows, at `address`, to the highest byte. That
    // length was compared with the capacity. No byte belongs to two rows: this was just checked.
    Ok(Destination::Strided(unsafe { Strided::new(base, Arc::clone(rows)) }))
}

/// Where part `index` of a rank goes, an array of a shape, a number of bytes and strides: to `address`, where Python knows
/// of `capacity` bytes, or, if the address is 0, into `drain`. With strides, `address` is the address of the lowest byte.
pub(crate) fn place(
    index: usize,
    (shape, nbytes, strides): (&[u64], u64, Option<&[i64]>),
    (address, capacity): (usize, u64),
    drain: Option<&Arc<Py<PyAny>>>,
    raised: &Arc<Raised>,
) -> PyResult<Place> {
    let strides = strides.filter(|_| address != 0);
    let rows = strides.map_or(Ok(None), |strides| boxes::array(shape, nbytes, strides));
    let rows = rows.map_err(|error| to_python(&error, raised))?;
    let reach = rows.as_ref().map_or(0..i128::from(nbytes), Rows::reach);
    let taken = reach.end - reach.start;
    if taken > i128::from(capacity) {
        return Err(misfit("read", index, taken, capacity));
    }
    if address == 0 && nbytes > 0 {
        return Ok(Place::Push(pushed(index, drain, raised)?));
    }
    if !rows.as_ref().is_none_or(Rows::is_nested) {
        return Err(overlapping(index));
    }
    let base = (address as *mut u8).wrapping_add(reach.start.unsigned_abs() as usize);
    // SAFETY: the Python side passes the address of the lowest byte of writable host memory and its real size in bytes,
    // which it takes from the tensor or array and never from a file. The array is no longer than that, and none of its
    // bytes share memory: both were just checked. Python keeps the memory alive and does not touch it until `read` or
    // `close` returns, and gives no byte to two requests. The boxes that a load takes of it are those that the share has
    // of one part, which do not overlap.
    Ok(Place::Memory(unsafe { Array::new(base, nbytes, rows.map(Arc::new)) }))
}

/// What takes the bytes of request `index`.
fn pushed(index: usize, drain: Option<&Arc<Py<PyAny>>>, raised: &Arc<Raised>) -> PyResult<Drain> {
    let callback = Callback::new(index, drain, raised)?;
    Ok(Arc::new(move |start, from| callback.call(start, from.as_ptr().addr(), from.len())))
}

fn overlapping(index: usize) -> PyErr {
    PyValueError::new_err(format!(
        "read: request {index} has strides along which rows would overlap or interleave: nothing was moved"
    ))
}

fn misfit(operation: &str, index: usize, nbytes: impl Display, capacity: u64) -> PyErr {
    PyValueError::new_err(format!(
        "{operation}: request {index} is for {nbytes} bytes, and its memory has {capacity}: nothing was moved"
    ))
}

/// A Python callable for one tensor, callable from worker threads.
struct Callback {
    index: usize,
    callable: Arc<Py<PyAny>>,
    raised: Arc<Raised>,
}

impl Callback {
    fn new(index: usize, callable: Option<&Arc<Py<PyAny>>>, raised: &Arc<Raised>) -> PyResult<Self> {
        let callable = callable.ok_or_else(|| PyValueError::new_err("address 0 needs a callback"))?;
        Ok(Self { index, callable: Arc::clone(callable), raised: Arc::clone(raised) })
    }

    /// Calls `callable(index, start, address, nbytes)`. The memory at `address` belongs to the callable until it
    /// returns.
    fn call(&self, start: u64, address: usize, nbytes: usize) -> Result<(), String> {
        Python::attach(|py| {
            self.callable.call1(py, (self.index, start, address, nbytes)).map(drop).map_err(|error| {
                let text = error.to_string();
                self.raised.keep(error);
                text
            })
        })
    }
}
