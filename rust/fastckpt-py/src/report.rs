//! Reports as dictionaries, and the tick callback that all operations share.

use fastckpt_core::engine::path::IoPath;
use fastckpt_core::{Environment, Io, Options, Report};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::Raised;

/// The options that every operation takes, some of them from the environment. The environment is read under the GIL,
/// which `py` represents, because Python writes to it under the GIL.
pub(crate) fn options(
    py: Python<'_>,
    io: &str,
    (threads, most_staging): (Option<usize>, Option<u64>),
) -> PyResult<Options> {
    let environment = environment(py);
    let io = io.parse().and_then(|io: Io| io.or_environment(&environment));
    let own = |io| Options { io, threads, most_staging, environment, ..Options::default() };
    let options = io.and_then(|io| own(io).or_environment());
    options.map_err(|error| crate::error::to_python(&error, &Raised::default()))
}

/// The current environment variables: the GIL keeps other threads from changing them.
pub(crate) fn environment(_py: Python<'_>) -> Environment {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    Environment::of(|name| std::env::var_os(name))
}

/// The callback that the core calls about ten times per second on the calling thread. It lets signal handlers run and
/// reports progress to the caller.
pub(crate) fn tick<'a>(
    callback: Option<&'a Py<PyAny>>,
    raised: &'a Raised,
) -> impl FnMut(u64, u64) -> bool + Send + 'a {
    move |done, total| {
        let outcome = Python::attach(|py| {
            py.check_signals()?;
            callback.map_or(Ok(()), |callback| callback.call1(py, (done, total)).map(drop))
        });
        outcome.map_err(|error| raised.keep(error)).is_ok()
    }
}

/// Converts a report to the form for the Python side.
pub(crate) fn to_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let ran = &report.ran;
    let phases = PyDict::new(py);
    for (name, seconds) in &report.phases {
        phases.set_item(name, seconds)?;
    }
    let blocks = PyDict::new(py);
    for path in IoPath::ALL {
        blocks.set_item(path.name(), ran.blocks.on(path))?;
    }
    let paths = PyDict::new(py);
    for (name, count) in ran.blocks.by_reason() {
        paths.set_item(name, count)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("seconds", report.seconds)?;
    dict.set_item("phases", phases)?;
    dict.set_item("threads", ran.threads)?;
    dict.set_item("thread_bytes", PyTuple::new(py, &ran.thread_bytes)?)?;
    dict.set_item("engine", ran.engine.name())?;
    dict.set_item("fallback", ran.fallback.as_ref().map(|fallback| &fallback.reason))?;
    dict.set_item("warnings", PyTuple::new(py, &report.warnings)?)?;
    dict.set_item("blocks", blocks)?;
    dict.set_item("paths", paths)?;
    dict.set_item("copied", ran.copied)?;
    dict.set_item("shards", report.shards)?;
    dict.set_item("tensors", report.tensors)?;
    Ok(dict)
}
