//! The boundary where addresses that Python vouches for become memory of the core, and callbacks into Python become its
//! sources and destinations.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::sync::Arc;

use fastckpt_core::engine::content::{
    Content, Destination, Drain, Fill, Outcome, Pull, Pulled, Push, Pushed,
};
use fastckpt_core::ranks::Place;
use fastckpt_core::read::boxes;
use fastckpt_core::sys::array::Array;
use fastckpt_core::sys::gather::Fetched;
use fastckpt_core::sys::memory::{Region, Source};
use fastckpt_core::sys::strided::{Rows, Strided};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{Raised, to_python};

/// The source of the `nbytes` bytes of tensor `index`: the `capacity` bytes of Python memory at `address`, or `fill` if
/// the address is 0.
pub(crate) fn content(
    index: usize,
    (address, capacity): (usize, u64),
    nbytes: u64,
    fill: Option<&Fill>,
) -> PyResult<Content> {
    if nbytes != capacity {
        return Err(misfit("save", index, nbytes, capacity));
    }
    if address != 0 || nbytes == 0 {
        // SAFETY: Python passes the address and size of a contiguous host tensor. It keeps the tensor alive until the
        // call returns, or in a rank's save until `close`. If a save with a deadline goes on after that, it holds what
        // keeps the tensor alive (`keep`) until it ends. No `Source` is read later. Other threads may write to the
        // tensor meanwhile, but not the core. A thread that resizes its storage breaks the contract (docs/design.md,
        // Memory). The core counts bytes from dtype and shape, and the count was compared with the size.
        return Ok(Content::Memory(unsafe { Source::new(address as *const u8, nbytes as usize) }));
    }
    let fill = fill.cloned().ok_or_else(no_callback)?;
    Ok(Content::Pull(Pull { fill, index }))
}

/// Memory of `nbytes` bytes at `address`, whose checksum is computed within one call.
pub(crate) fn summed(address: usize, nbytes: usize) -> Source {
    // SAFETY: the Python side passes the address and size of a contiguous buffer that it holds until the call returns.
    // The source does not outlive the call, and the core only reads it.
    unsafe { Source::new(address as *const u8, nbytes) }
}

/// Where request `index` puts the `nbytes` of a tensor, or the `rows` of a box: the `capacity` bytes of Python memory
/// at `address`, or, if the address is 0, `drain`, which takes `capacity` bytes. With `rows`, `address` is the address
/// of the lowest byte.
pub(crate) fn destination(
    index: usize,
    (nbytes, rows): (u64, Option<&Arc<Rows>>),
    (address, capacity): (usize, u64),
    drain: Option<&Drain>,
) -> PyResult<Destination> {
    let reach = rows.filter(|_| address != 0).map_or(0..i128::from(nbytes), |rows| rows.reach());
    let taken = reach.end - reach.start;
    if taken > i128::from(capacity) {
        return Err(misfit("read", index, taken, capacity));
    }
    if address == 0 && nbytes > 0 {
        return Ok(Destination::Push(pushed(index, drain)?));
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

/// The destination of part `index` of a rank, given its shape, number of bytes and strides: the `capacity` bytes of
/// Python memory at `address`, or `drain` if the address is 0. With strides, `address` is the address of the lowest
/// byte.
pub(crate) fn place(
    index: usize,
    (shape, nbytes, strides): (&[u64], u64, Option<&[i64]>),
    (address, capacity): (usize, u64),
    drain: Option<&Drain>,
    raised: &Raised,
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
        return Ok(Place::Push(pushed(index, drain)?));
    }
    if !rows.as_ref().is_none_or(Rows::is_nested) {
        return Err(overlapping(index));
    }
    let base = (address as *mut u8).wrapping_add(reach.start.unsigned_abs() as usize);
    // SAFETY: the Python side passes the address of the lowest byte of writable host memory and its real size in bytes,
    // which it takes from the tensor or array and never from a file. The array is no longer than that, and none of its
    // bytes share memory: both were just checked. Python keeps the memory alive and does not touch it until `read` or
    // `close` returns, and gives no byte to two requests. The boxes of the array that a load fills are those that the
    // share has of one part, which do not overlap.
    Ok(Place::Memory(unsafe { Array::new(base, nbytes, rows.map(Arc::new)) }))
}

/// The callback that takes the bytes of request `index`.
fn pushed(index: usize, drain: Option<&Drain>) -> PyResult<Push> {
    Ok(Push { drain: drain.cloned().ok_or_else(no_callback)?, index })
}

fn no_callback() -> PyErr {
    PyValueError::new_err("address 0 needs a callback")
}

/// A Python callable as the core's source of bytes.
pub(crate) fn fill(callable: Option<Py<PyAny>>, raised: &Arc<Raised>) -> Option<Fill> {
    let raised = Arc::clone(raised);
    callable.map(|callable| -> Fill {
        Arc::new(move |all: &mut [Pulled<'_>]| {
            let range =
                |one: &mut Pulled<'_>| (one.index, one.start, one.to.as_mut_ptr().addr(), one.to.len());
            call(&callable, &raised, all.iter_mut().map(range).collect())
        })
    })
}

/// A Python callable that takes bytes from the core.
pub(crate) fn drain(callable: Option<Py<PyAny>>, raised: &Arc<Raised>) -> Option<Drain> {
    let raised = Arc::clone(raised);
    callable.map(|callable| -> Drain {
        Arc::new(move |all: &[Pushed<'_>]| {
            let range = |one: &Pushed<'_>| (one.index, one.start, one.from.as_ptr().addr(), one.from.len());
            call(&callable, &raised, all.iter().map(range).collect())
        })
    })
}

/// Calls `callable` with ranges, each an index, a start, an address and a length. The memory belongs to the callable
/// until it returns.
fn call(callable: &Py<PyAny>, raised: &Raised, ranges: Vec<(usize, u64, usize, usize)>) -> Outcome {
    Python::attach(|py| {
        callable.call1(py, (ranges,)).map(drop).map_err(|error| {
            let text = error.to_string();
            raised.keep(error);
            text
        })
    })
}

/// Bytes that Python read: their address, their number, and the object that owns them.
pub(crate) fn fetched(found: &Bound<'_, PyAny>) -> PyResult<Box<dyn Fetched>> {
    let (address, len, owner) = found.extract()?;
    Ok(Box::new(Owned { address, len, _owner: owner }))
}

/// Memory of a Python object.
#[derive(Debug)]
struct Owned {
    address: usize,
    len: usize,
    _owner: Py<PyAny>,
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        if self.address == 0 {
            return &[];
        }
        // SAFETY: the Python side passes the address and size of an immutable buffer, and the object that holds it, which
        // lives as long as `self`; it takes both from that object, never from a file. Nothing writes to it.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }
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
