//! `_core.Gathering`, `_core.check_target`, `_core.remove`, `_core.list_checkpoints`, `_core.leftovers`, `_core.remove_leftover`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use fastckpt_core::commit;
use fastckpt_core::engine::deadline::{refuse, within};
use fastckpt_core::engine::job::Progress;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::buffers::summed;
use crate::error::{Raised, to_python};
use crate::report::tick;

/// A checkpoint in a directory.
///
/// Attributes:
///     name: its name.
///     path: its path, to load it.
///     created: seconds since 1970 when its save began; None if its manifest is damaged.
///     bytes: bytes of the files that fastckpt wrote.
///     aside: whether no directory has its name, because a save moved it aside and has put nothing in its place. That
///         save was killed, or still runs. ``load`` still finds the checkpoint.
///     damage: what is wrong, as far as its manifest and the lengths of its files show; None if nothing is wrong.
#[pyclass(frozen, get_all, module = "fastckpt.types")]
struct ListedCheckpoint {
    name: OsString,
    path: OsString,
    created: Option<f64>,
    bytes: u64,
    aside: bool,
    damage: Option<String>,
}

#[pymethods]
impl ListedCheckpoint {
    fn __repr__(&self) -> String {
        let Self { name, created, bytes, aside, damage, .. } = self;
        let name = name.to_string_lossy();
        let created = created.map_or_else(|| "None".to_owned(), |created| format!("{created:.3}"));
        let aside = if *aside { "True" } else { "False" };
        let damage = damage.as_ref().map_or_else(|| "None".to_owned(), |damage| format!("{damage:?}"));
        format!(
            "ListedCheckpoint(name={name:?}, created={created}, bytes={bytes}, aside={aside}, damage={damage})"
        )
    }
}

/// A leftover of a killed save or removal under a temporary name; see `fastckpt.clean`.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct Leftover {
    name: OsString,
    checkpoint: String,
    host: String,
    state: &'static str,
    bytes: u64,
    changed: i64,
}

/// Runs `call` without the GIL and maps its error.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> fastckpt_core::error::Result<T> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(|error| to_python(&error, &Raised::default()))
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Gathering(RwLock<Option<commit::Gathering>>);

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Incoming(RwLock<Option<commit::Incoming>>);

fn ended() -> PyErr {
    PyValueError::new_err("this copy, or this file, has ended")
}

/// Runs `call` with the content of `held`.
pub(crate) fn opened<T: Send + Sync, R: Send>(
    py: Python<'_>,
    held: &RwLock<Option<T>>,
    call: impl FnOnce(&T) -> fastckpt_core::error::Result<R> + Send,
) -> PyResult<R> {
    py.detach(|| held.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(call))
        .ok_or_else(ended)?
        .map_err(|error| to_python(&error, &Raised::default()))
}

/// Takes the content of `cell`, which is empty from now on.
pub(crate) fn taken<T: Send + Sync>(py: Python<'_>, cell: &RwLock<Option<T>>) -> PyResult<T> {
    py.detach(|| cell.write().unwrap_or_else(PoisonError::into_inner).take()).ok_or_else(ended)
}

#[pymethods]
impl Gathering {
    #[new]
    fn new(py: Python<'_>, target: PathBuf, manifest: PyBackedBytes, overwrite: bool) -> PyResult<Self> {
        let gathering = detached(py, || commit::Gathering::open(&target, manifest.to_vec(), overwrite))?;
        Ok(Self(RwLock::new(Some(gathering))))
    }

    fn path(&self, py: Python<'_>) -> PyResult<OsString> {
        opened(py, &self.0, |gathering| Ok(gathering.path().into_os_string()))
    }

    fn held(&self, py: Python<'_>) -> PyResult<Vec<(String, u64)>> {
        opened(py, &self.0, commit::Gathering::held)
    }

    fn begin(&self, py: Python<'_>, nbytes: u64) -> PyResult<Incoming> {
        let incoming = opened(py, &self.0, |gathering| gathering.begin(nbytes))?;
        Ok(Incoming(RwLock::new(Some(incoming))))
    }

    fn write(
        &self,
        py: Python<'_>,
        file: &Incoming,
        offset: u64,
        address: usize,
        nbytes: usize,
    ) -> PyResult<u64> {
        let bytes = summed(address, nbytes);
        opened(py, &self.0, |gathering| {
            let file = file.0.read().unwrap_or_else(PoisonError::into_inner);
            file.as_ref().map(|file| gathering.write(file, offset, bytes)).transpose()
        })?
        .ok_or_else(ended)
    }

    fn keep(&self, py: Python<'_>, file: &Incoming, name: &str) -> PyResult<()> {
        let file = taken(py, &file.0)?;
        opened(py, &self.0, |gathering| gathering.keep(file, name))
    }

    fn drop(&self, py: Python<'_>, file: &Incoming) -> PyResult<()> {
        let file = taken(py, &file.0)?;
        opened(py, &self.0, |gathering| {
            gathering.drop_part(file);
            Ok(())
        })
    }

    fn link(&self, py: Python<'_>, source: PathBuf, name: &str, expected: (u64, u64)) -> PyResult<()> {
        opened(py, &self.0, |gathering| gathering.link(&source, name, expected))
    }

    fn publish(&self, py: Python<'_>, files: Vec<(String, u64)>) -> PyResult<Vec<String>> {
        opened(py, &self.0, |gathering| gathering.publish(files))
    }

    fn close(&self, py: Python<'_>) {
        drop(taken(py, &self.0));
    }

    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        let gathering = taken(py, &self.0)?;
        py.detach(|| gathering.give_up());
        Ok(())
    }
}

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (path, overwrite, deadline=None))]
fn check_target(py: Python<'_>, path: PathBuf, overwrite: bool, deadline: Option<Duration>) -> PyResult<()> {
    let target = path.clone();
    let check = move |_: Progress<'_>| commit::check(&path, overwrite);
    let raised = Raised::default();
    let checked = py.detach(|| {
        refuse(deadline, &target)?;
        within(deadline, &target, &mut tick(None, &raised), check)
    });
    checked.map_err(|error| to_python(&error, &raised))
}

/// See `_core.pyi`.
#[pyfunction]
fn remove(py: Python<'_>, path: PathBuf, more: Vec<String>, force: bool) -> PyResult<()> {
    detached(py, || commit::remove(&path, &more, force))
}

/// See `_core.pyi`.
#[pyfunction]
fn list_checkpoints(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<ListedCheckpoint>> {
    let found = detached(py, || commit::list(&directory))?;
    let listed = found.into_iter().map(|commit::Listed { name, path, created, bytes, aside, damage }| {
        ListedCheckpoint { name, path: path.into_os_string(), created, bytes, aside, damage }
    });
    Ok(listed.collect())
}

/// See `_core.pyi`.
#[pyfunction]
fn leftovers(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<Leftover>> {
    let found = detached(py, || commit::leftovers(&directory))?;
    let leftovers = found.into_iter().map(|commit::Leftover { name, of, host, state, bytes, changed }| {
        Leftover { name, checkpoint: of, host, state: state.word(), bytes, changed }
    });
    Ok(leftovers.collect())
}

/// See `_core.pyi`.
#[pyfunction]
fn remove_leftover(py: Python<'_>, directory: PathBuf, name: OsString, force: bool) -> PyResult<bool> {
    detached(py, || commit::remove_leftover(&directory, &name, force))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ListedCheckpoint>()?;
    module.add_class::<Leftover>()?;
    module.add_class::<Gathering>()?;
    module.add_class::<Incoming>()?;
    module.add_function(wrap_pyfunction!(check_target, module)?)?;
    module.add_function(wrap_pyfunction!(remove, module)?)?;
    module.add_function(wrap_pyfunction!(list_checkpoints, module)?)?;
    module.add_function(wrap_pyfunction!(leftovers, module)?)?;
    module.add_function(wrap_pyfunction!(remove_leftover, module)?)
}
