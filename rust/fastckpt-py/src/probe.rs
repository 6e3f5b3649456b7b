//! The abilities of this process in a directory, as records. The stub documents them.

use std::ffi::OsString;
use std::path::PathBuf;

use fastckpt_core::{probe, telemetry};
use pyo3::prelude::*;

use crate::report;

/// The results of the `io_uring` calls: an errno, or 0.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct ProbedRing {
    refused: i32,
    setup: i32,
    enter: i32,
    register: i32,
}

/// The features of a file system: an errno, 0 if it works, None if it was not tried.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct ProbedFiles {
    direct_open: probe::Answer,
    direct_write: probe::Answer,
    direct_read: probe::Answer,
    direct_used: bool,
    direct_alignment: Option<(u32, u32)>,
    direct_bypasses: Option<bool>,
    cachestat: probe::Answer,
    uncached: probe::Answer,
    fallocate: probe::Answer,
    reflink: probe::Answer,
    rename_exchange: probe::Answer,
    lock: probe::Answer,
    lock_reach: &'static str,
}

/// The steps that a save in a directory would take; made by `fastckpt.tools.probe`.
#[pyclass(frozen, get_all, module = "fastckpt.tools")]
struct Probe {
    engine: &'static str,
    fallback: Option<String>,
    threads: usize,
    cores: usize,
    huge_pages: i32,
    populate: i32,
    staging: u64,
    counters: usize,
    counters_at: Vec<(OsString, Option<String>)>,
    ring: Py<ProbedRing>,
    files: Option<Py<ProbedFiles>>,
    trouble: Option<(&'static str, i32)>,
}

/// Tries the steps of a save in `directory`.
#[pyfunction]
#[pyo3(name = "probe", signature = (directory, *, io))]
fn run(py: Python<'_>, directory: PathBuf, io: &str) -> PyResult<Probe> {
    let options = report::options(py, io, (None, None))?;
    let found = py.detach(|| probe::run(&directory, &options));
    let (files, trouble) = match found.files {
        Ok(files) => (Some(Py::new(py, record_of(&files))?), None),
        Err(trouble) => (None, Some((trouble.operation, trouble.errno))),
    };
    let places = telemetry::places(&options.environment).into_iter();
    let counters_at = places.map(|(path, place)| (path.into_os_string(), place.err())).collect();
    let ring = ProbedRing {
        refused: found.ring.refused.map_or(0, |refused| refused.errno),
        setup: found.ring.setup,
        enter: found.ring.enter,
        register: found.ring.register,
    };
    Ok(Probe {
        engine: found.choice.engine.name(),
        fallback: found.choice.fallback.map(|fallback| fallback.reason),
        threads: found.choice.threads,
        cores: found.cores,
        huge_pages: found.huge_pages,
        populate: found.populate,
        staging: found.staging,
        counters: found.counters,
        counters_at,
        ring: Py::new(py, ring)?,
        files,
        trouble,
    })
}

fn record_of(files: &probe::Files) -> ProbedFiles {
    ProbedFiles {
        direct_open: files.direct_open,
        direct_write: files.direct_write,
        direct_read: files.direct_read,
        direct_used: files.direct_used,
        direct_alignment: files.direct_alignment,
        direct_bypasses: files.direct_bypasses,
        cachestat: files.cachestat,
        uncached: files.uncached,
        fallocate: files.fallocate,
        reflink: files.reflink,
        rename_exchange: files.rename_exchange,
        lock: files.lock,
        lock_reach: files.lock_reach.word(),
    }
}

/// Adds the functions of this file to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ProbedRing>()?;
    module.add_class::<ProbedFiles>()?;
    module.add_class::<Probe>()?;
    module.add_function(wrap_pyfunction!(run, module)?)
}
