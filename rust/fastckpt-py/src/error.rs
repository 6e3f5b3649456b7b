//! Maps errors of the core to Python exceptions, built-in ones where Python has one.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use fastckpt_core::Error;
use pyo3::exceptions::{PyException, PyKeyboardInterrupt, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pyo3::import_exception!(fastckpt.exceptions, CheckpointError);
pyo3::import_exception!(fastckpt.exceptions, CorruptCheckpointError);
pyo3::import_exception!(fastckpt.exceptions, DeadlineError);
pyo3::import_exception!(fastckpt.exceptions, FormatVersionError);
pyo3::import_exception!(fastckpt.exceptions, ReplacedCheckpointError);
pyo3::import_exception!(fastckpt.exceptions, UnsupportedTypeError);

/// Maps `error`. An exception that the caller's code raised meanwhile is the true cause, and is returned unchanged; so
/// is one that a store raised. If the storage hangs, the save goes on despite an exception, so only Ctrl-C and the
/// like, which concern the program, take precedence.
pub(crate) fn to_python(error: &Error, raised: &Raised) -> PyErr {
    let hangs = matches!(error, Error::Hangs { .. });
    if let Some(own) = raised.take()
        && !(hangs && Python::attach(|py| own.is_instance_of::<PyException>(py)))
    {
        return own;
    }
    if let Error::Io { source, .. } = error
        && let Some(own) = source.get_ref().and_then(|inner| inner.downcast_ref::<PyErr>())
    {
        return Python::attach(|py| own.clone_ref(py));
    }
    let text = error.to_string();
    match error {
        // Python derives FileNotFoundError, FileExistsError and similar ones from the errno.
        Error::Io { path, .. } | Error::Exists { path, .. } | Error::Stays { path, .. } => {
            match error.errno() {
                Some(errno) => PyOSError::new_err((errno, text, path.clone().into_os_string())),
                None => PyOSError::new_err(text),
            }
        }
        Error::Corrupt { .. } => CorruptCheckpointError::new_err(text),
        Error::Foreign { path, .. } => foreign(path).unwrap_or_else(|error| error),
        Error::Replaced { path } => {
            ReplacedCheckpointError::new_err((error.errno(), text, path.clone().into_os_string()))
        }
        Error::Hangs { path, .. } => {
            DeadlineError::new_err((error.errno(), text, path.clone().into_os_string()))
        }
        Error::Version { .. } => FormatVersionError::new_err(text),
        Error::TooLarge(_) => UnsupportedTypeError::new_err(text),
        Error::Altered(_) => CheckpointError::new_err(text),
        Error::Invalid(_) => PyValueError::new_err(text),
        Error::Interrupted => PyKeyboardInterrupt::new_err(text),
        Error::Misused(_) | Error::Callback(_) | Error::Stopped(_) | Error::Panic(_) => {
            PyRuntimeError::new_err(text)
        }
    }
}

/// The exception that names the format found at `path`.
fn foreign(path: &Path) -> PyResult<PyErr> {
    Python::attach(|py| {
        let error = py.import("fastckpt._foreign")?.call_method1("not_a_checkpoint", (path,))?;
        Ok(PyErr::from_value(error))
    })
}

/// The exception that a callback or a signal handler raised while the core ran.
#[derive(Default)]
pub(crate) struct Raised(Mutex<Option<PyErr>>);

impl Raised {
    /// Keeps the first exception.
    pub(crate) fn keep(&self, error: PyErr) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let surplus = if kept.is_none() { kept.replace(error) } else { Some(error) };
        // Dropping an exception may run Python code, which may wait for a thread that waits for this lock.
        drop(kept);
        drop(surplus);
    }

    fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
