//! `_core.Reader`.

use std::path::PathBuf;
use std::sync::Arc;

use fastckpt_core::read::{Checkpoint, Maps, Request};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::report::{damage_to_list, options, tick, to_dict};

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Reader {
    checkpoint: Checkpoint,
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct Mappings {
    maps: Maps,
}

#[pymethods]
impl Mappings {
    fn address(&self, shard: usize, offset: usize, nbytes: usize) -> PyResult<usize> {
        let map = self.maps.get(shard).and_then(Option::as_ref);
        let map = map.ok_or_else(|| PyIndexError::new_err("this shard is not mapped"))?;
        let inside = offset.checked_add(nbytes).is_some_and(|end| end <= map.len());
        inside
            .then(|| map.address() + offset)
            .ok_or_else(|| PyIndexError::new_err("these bytes lie beyond the mapped shard"))
    }
}

#[pymethods]
impl Reader {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let checkpoint = py.detach(|| Checkpoint::open(&path));
        Ok(Self { checkpoint: checkpoint.map_err(|error| to_python(&error, &Raised::default()))? })
    }

    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for tensor in &self.checkpoint.body().tensors {
            let shape = PyTuple::new(py, &tensor.shape)?;
            let logical = match &tensor.logical {
                Some(t) => Some((t.dtype.as_str(), PyTuple::new(py, &t.shape)?)),
                None => None,
            };
            let dtype = tensor.dtype.to_string();
            list.append((&tensor.name, dtype, shape, tensor.shard, tensor.offset, tensor.bytes(), logical))?;
        }
        Ok(list)
    }

    fn shards(&self) -> Vec<(String, u64)> {
        self.checkpoint.body().shards.iter().map(|shard| (shard.file.clone(), shard.bytes)).collect()
    }

    fn structure(&self) -> &str {
        self.checkpoint.body().structure.get()
    }

    fn metadata(&self) -> &str {
        self.checkpoint.body().metadata.get()
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let body = self.checkpoint.body();
        let writer = PyDict::new(py);
        writer.set_item("name", &body.writer.name)?;
        writer.set_item("version", &body.writer.version)?;
        let saved = PyDict::new(py);
        saved.set_item("engine", &body.saved.engine)?;
        saved.set_item("fallback", body.saved.fallback.as_deref())?;
        saved.set_item("threads", body.saved.threads)?;
        saved.set_item("seconds", body.saved.seconds)?;
        saved.set_item("gigabytes_per_second", body.saved.gigabytes_per_second)?;
        let info = PyDict::new(py);
        info.set_item("version", fastckpt_core::format::manifest::VERSION)?;
        info.set_item("writer", writer)?;
        info.set_item("created", body.created)?;
        info.set_item("saved", saved)?;
        info.set_item("block_size", body.block_size)?;
        Ok(info)
    }

    #[pyo3(signature = (requests, *, verify, io, threads, drain, tick))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
    fn read<'py>(
        &self,
        py: Python<'py>,
        requests: Vec<(usize, u64, u64, usize, u64)>,
        verify: bool,
        io: &str,
        threads: Option<usize>,
        drain: Option<Py<PyAny>>,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = options(py, io, threads)?;
        let raised = Arc::new(Raised::default());
        let drain = drain.map(Arc::new);
        let mut wanted = Vec::with_capacity(requests.len());
        for (index, (tensor, start, end, address, capacity)) in requests.into_iter().enumerate() {
            let (range, memory) = ((start, end), (address, capacity));
            let destination = buffers::destination(index, range, memory, drain.as_ref(), &raised)?;
            wanted.push(Request { tensor, start, end, destination });
        }
        let report = py.detach(|| {
            self.checkpoint.read(wanted, verify, &options, &mut self::tick(tick.as_ref(), &raised))
        });
        to_dict(py, &report.map_err(|error| to_python(&error, &raised))?)
    }

    fn map(&self, py: Python<'_>, tensors: Vec<usize>) -> PyResult<Mappings> {
        let maps = py.detach(|| self.checkpoint.map(&tensors));
        Ok(Mappings { maps: maps.map_err(|error| to_python(&error, &Raised::default()))? })
    }

    #[pyo3(signature = (mappings, tensors, *, threads, tick))]
    fn check<'py>(
        &self,
        py: Python<'py>,
        mappings: &Mappings,
        tensors: Vec<usize>,
        threads: Option<usize>,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = options(py, "buffered", threads)?;
        let raised = Raised::default();
        let maps = &mappings.maps;
        let report = py.detach(|| {
            self.checkpoint.check(maps, &tensors, &options, &mut self::tick(tick.as_ref(), &raised))
        });
        to_dict(py, &report.map_err(|error| to_python(&error, &raised))?)
    }

    #[pyo3(signature = (*, io, threads, tick))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        io: &str,
        threads: Option<usize>,
        tick: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = options(py, io, threads)?;
        let raised = Raised::default();
        let outcome = py.detach(|| self.checkpoint.verify(&options, &mut self::tick(tick.as_ref(), &raised)));
        let (report, damage) = outcome.map_err(|error| to_python(&error, &raised))?;
        let dict = to_dict(py, &report)?;
        dict.set_item("damage", damage_to_list(py, &damage)?)?;
        Ok(dict)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Mappings>()?;
    module.add_class::<Reader>()
}
