//! `_core.RankSave`.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fastckpt_core::Error;
use fastckpt_core::engine::deadline::{given_up, refuse, within};
use fastckpt_core::engine::job::Progress;
use fastckpt_core::engine::path::IoPath;
use fastckpt_core::ranks::{self, Cell, Commit, Committed, Figures, Held, Table, pieces};
use fastckpt_core::share::Depth;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::mail::Mail;
use crate::ranks_base::RankBase;
use crate::report::{tick, to_dict};
use crate::save::SaveOptions;
use crate::share::Share;
use crate::snapshot::leave;

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct RankSave {
    core: ranks::RankSave,
    overwrite: bool,
    options: Py<SaveOptions>,
    #[pyo3(get)]
    mail: Py<Mail>,
    raised: Arc<Raised>,
    /// The path that is saved to.
    target: OnceLock<PathBuf>,
    /// Whether an abandoned step still uses the save.
    is_left: AtomicBool,
    /// The Python object that keeps the memory of the parts alive.
    keep: Mutex<Option<Py<PyAny>>>,
}

/// The figures of the ranks, as in a report.
#[derive(FromPyObject)]
struct Saved {
    #[pyo3(item)]
    engine: String,
    #[pyo3(item)]
    fallback: Option<String>,
    #[pyo3(item)]
    threads: u64,
    #[pyo3(item)]
    seconds: f64,
}

/// A part of a rank as Python passes it: tensor, part, address and size in bytes.
pub(crate) type Part = (usize, u32, usize, u64);

/// The parts that a rank holds. `fill` supplies the bytes of parts without an address.
pub(crate) fn held_by(
    table: &Table,
    rank: u32,
    held: Vec<Part>,
    fill: Option<Py<PyAny>>,
    raised: &Arc<Raised>,
) -> PyResult<Held> {
    let fill = buffers::fill(fill, raised);
    let mut parts = HashMap::with_capacity(held.len());
    for (index, (tensor, part, address, capacity)) in held.into_iter().enumerate() {
        let nbytes = table.share.part_bytes(rank, tensor, part);
        let nbytes = nbytes.map_err(|error| to_python(&error, raised))?;
        let content = buffers::content(index, (address, capacity), nbytes, fill.as_ref())?;
        parts.insert((tensor, part), content);
    }
    Ok(Held::new(parts))
}

impl RankSave {
    /// Runs `action` without the GIL.
    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&ranks::RankSave) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| action(&self.core)).map_err(|error| to_python(&error, &self.raised))
    }

    /// Runs a step that accesses the storage, without the GIL and within the deadline. An abandoned step closes the
    /// save when it ends.
    fn step<T: Send + 'static>(
        slf: &Bound<'_, Self>,
        tick: Option<&Py<PyAny>>,
        action: impl FnOnce(&ranks::RankSave, Progress<'_>) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let own = slf.get();
        let outcome = Self::within(slf, &mut self::tick(tick, &own.raised), action);
        outcome.map_err(|error| to_python(&error, &own.raised))
    }

    fn within<T: Send + 'static>(
        slf: &Bound<'_, Self>,
        progress: &mut (dyn FnMut(u64, u64) -> bool + Send),
        action: impl FnOnce(&ranks::RankSave, Progress<'_>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (own, job) = (slf.get(), slf.clone().unbind());
        let job = move |progress: Progress<'_>| {
            let own = job.get();
            let outcome = action(&own.core, progress);
            if own.is_left.load(Ordering::Relaxed) {
                own.core.close(false);
                drop(own.keep.lock().unwrap_or_else(PoisonError::into_inner).take());
            }
            outcome
        };
        let (deadline, target) = (own.options.get().deadline, own.target.get());
        let target = target.cloned().unwrap_or_default();
        let outcome = slf.py().detach(|| within(deadline, &target, progress, job));
        if given_up(&outcome) {
            own.is_left.store(true, Ordering::Relaxed);
            own.keep.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(leave);
        }
        outcome
    }

    /// Records the target path. Fails if its storage does not respond.
    fn aim(&self, py: Python<'_>, path: &Path) -> PyResult<()> {
        let _ = self.target.set(path.to_owned());
        self.detached(py, |_| refuse(self.options.get().deadline, path))
    }
}

#[pymethods]
impl RankSave {
    #[new]
    #[pyo3(signature = (share, rank, held, fill, options, base=None, keep=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
    fn new(
        py: Python<'_>,
        share: &Share,
        rank: u32,
        held: Vec<Part>,
        fill: Option<Py<PyAny>>,
        options: &Bound<'_, SaveOptions>,
        base: Option<&RankBase>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let table = share.table()?;
        let raised = Arc::new(Raised::default());
        let held = held_by(table, rank, held, fill, &raised)?;
        let settings = options.get();
        let base = base.map(|base| &base.core);
        let core = py
            .detach(|| ranks::RankSave::new(Arc::clone(table), rank, held, settings.core.clone(), base))
            .map_err(|error| to_python(&error, &raised))?;
        let mail = Py::new(py, Mail::new(core.mail(), &raised))?;
        let (overwrite, options) = (settings.overwrite, options.clone().unbind());
        let (target, is_left) = (OnceLock::new(), AtomicBool::new(false));
        Ok(Self { core, overwrite, options, mail, raised, target, is_left, keep: Mutex::new(keep) })
    }

    fn addresses(&self, py: Python<'_>, mates: Vec<u32>) -> Vec<(u32, Vec<u64>, usize)> {
        py.detach(|| self.core.addresses(&mates))
    }

    #[expect(clippy::needless_pass_by_value, reason = "it comes from Python")]
    fn share(&self, py: Python<'_>, given: HashSet<u32>, taken: Vec<(u32, u32, Vec<u64>)>) -> PyResult<u64> {
        self.detached(py, |core| core.share(&given, &taken))
    }

    #[pyo3(signature = (depth, seed, sum_of, tick))]
    fn replicas(
        &self,
        py: Python<'_>,
        depth: &str,
        seed: u64,
        sum_of: Option<Py<PyAny>>,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Replicas> {
        let depth = match depth {
            "first" => Depth::Overlaps,
            "sample" => Depth::Samples(seed),
            "full" => Depth::All,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "`{depth}` is not a way to compare replicas of ranks"
                )));
            }
        };
        let raised = &self.raised;
        let mut sum_of = |tensor: usize, part: u32| {
            let ask = |callable: &Py<PyAny>| {
                let found =
                    Python::attach(|py| callable.call1(py, (tensor, part))?.extract::<Option<u64>>(py));
                found.map_err(|error| {
                    let text = error.to_string();
                    raised.keep(error);
                    Error::Callback(text)
                })
            };
            sum_of.as_ref().map_or(Ok(None), ask)
        };
        Ok(Replicas(self.detached(py, |core| {
            core.replicas(depth, &mut sum_of, &mut self::tick(tick.as_ref(), raised))
        })?))
    }

    fn compared<'py>(
        &self,
        py: Python<'py>,
        replicas: &Replicas,
        cell: (usize, u64, u32),
        most: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.detached(py, |core| core.compared(&replicas.0, cell, most))?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (structure, metadata, per_rank))]
    fn check(&self, py: Python<'_>, structure: &str, metadata: &str, per_rank: Option<&str>) -> PyResult<()> {
        self.detached(py, |core| core.check(structure, metadata, per_rank.unwrap_or_default()))
    }

    fn create(slf: &Bound<'_, Self>, path: PathBuf) -> PyResult<OsString> {
        let (own, overwrite) = (slf.get(), slf.get().overwrite);
        own.aim(slf.py(), &path)?;
        Self::step(slf, None, move |core, progress| core.create(&path, overwrite, progress))
    }

    fn join(slf: &Bound<'_, Self>, path: PathBuf, name: OsString) -> PyResult<()> {
        slf.get().aim(slf.py(), &path)?;
        Self::step(slf, None, move |core, _| core.join(&path, &name))
    }

    fn allocate(slf: &Bound<'_, Self>, tick: Option<Py<PyAny>>) -> PyResult<()> {
        Self::step(slf, tick.as_ref(), ranks::RankSave::allocate)
    }

    fn write<'py>(slf: &Bound<'py, Self>, tick: Option<Py<PyAny>>) -> PyResult<Bound<'py, PyDict>> {
        let report = Self::step(slf, tick.as_ref(), ranks::RankSave::write)?;
        let (own, py) = (slf.get(), slf.py());
        let (sent, received) = own.core.exchanged();
        let dict = to_dict(py, &report)?;
        dict.set_item("sent", sent)?;
        dict.set_item("received", received)?;
        let (peers, team, grain) = own.detached(py, ranks::RankSave::teams)?;
        dict.set_item("peers", peers)?;
        dict.set_item("team", team)?;
        dict.set_item("grain", grain)?;
        Ok(dict)
    }

    fn pieces<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.detached(py, |core| core.pieces().map(|all| pieces::encode(&all)))?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn commit<'py>(
        slf: &Bound<'py, Self>,
        pieces: PyBackedBytes,
        structure: String,
        metadata: String,
        per_rank: Option<String>,
        saved: Saved,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = slf.get().options.clone_ref(slf.py());
        let Saved { engine, fallback, threads, seconds } = saved;
        let figures =
            Figures { engine, fallback, threads, seconds, options: options.get().core.kept.clone() };
        let told = figures.clone();
        let committed = Self::step(slf, tick.as_ref(), move |core, progress| {
            let mut all = Vec::new();
            pieces::decode(&pieces, &mut all)?;
            let commit = Commit {
                pieces: all,
                structure: &structure,
                metadata: &metadata,
                per_rank: per_rank.as_deref().unwrap_or_default(),
                files: &options.get().files(),
                figures,
            };
            core.commit(commit, progress)
        })?;
        committed_dict(slf.py(), &told, &committed)
    }

    #[pyo3(signature = (*, committed=false))]
    fn close(slf: &Bound<'_, Self>, committed: bool) {
        let own = slf.get();
        slf.py().detach(|| own.core.stop());
        if !own.is_left.load(Ordering::Relaxed) {
            let close = move |core: &ranks::RankSave, _: Progress<'_>| {
                core.close(committed);
                Ok(())
            };
            // By now it is known what was written and whether the save has committed, so the outcome is ignored.
            let _ = Self::within(slf, &mut |_, _| true, close);
        }
    }
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Replicas(ranks::Replicas);

#[pymethods]
impl Replicas {
    fn digests(&self) -> Vec<(u64, usize, u64)> {
        self.0.digests().into_iter().map(|digest| (digest.holders, digest.size, digest.sum)).collect()
    }

    fn of_holders(&self, numbers: Vec<u64>) -> Vec<Cell> {
        self.0.of_holders(&numbers)
    }
}

/// The report of a commit, which moves no blocks itself.
fn committed_dict<'py>(
    py: Python<'py>,
    figures: &Figures,
    committed: &Committed,
) -> PyResult<Bound<'py, PyDict>> {
    let blocks = PyDict::new(py);
    IoPath::ALL.iter().try_for_each(|path| blocks.set_item(path.name(), 0))?;
    let phases = PyDict::new(py);
    phases.set_item("commit", committed.seconds)?;
    let dict = PyDict::new(py);
    dict.set_item("bytes", committed.bytes)?;
    dict.set_item("seconds", committed.seconds)?;
    dict.set_item("phases", phases)?;
    dict.set_item("threads", figures.threads)?;
    dict.set_item("thread_bytes", PyTuple::empty(py))?;
    dict.set_item("engine", &figures.engine)?;
    dict.set_item("fallback", figures.fallback.as_deref())?;
    dict.set_item("warnings", PyTuple::new(py, &committed.warnings)?)?;
    dict.set_item("blocks", blocks)?;
    dict.set_item("paths", PyDict::new(py))?;
    dict.set_item("copied", 0)?;
    dict.set_item("shards", committed.shards)?;
    dict.set_item("tensors", committed.tensors)?;
    dict.set_item("linked_files", committed.linked.files)?;
    dict.set_item("linked_bytes", committed.linked.bytes)?;
    Ok(dict)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Replicas>()?;
    module.add_class::<RankSave>()
}
