//! `_core.Reader`.

use std::path::PathBuf;
use std::sync::Arc;

use fastckpt_core::engine::content::{Content, Fill, Pull, Pulled};
use fastckpt_core::format::layout::TensorSpec;
use fastckpt_core::format::manifest::{ShardEntry, TensorEntry};
use fastckpt_core::read::boxes::{self, Along};
use fastckpt_core::read::{Checkpoint, Maps, Request};
use fastckpt_core::save as core_save;
use fastckpt_core::{Damage, Options};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyInt, PyString, PyTuple};

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::report::{options, tick, to_dict};
use crate::save::SaveOptions;
use crate::snapshot::Memory;
use crate::store::StoredFiles;

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct Reader {
    pub(crate) checkpoint: Arc<Checkpoint>,
}

/// See `_core.pyi`. Its attributes are already Python objects: a load of many small tensors reads each of them several
/// times.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct StoredTensor {
    name: Py<PyString>,
    dtype: Py<PyString>,
    shape: Py<PyTuple>,
    shard: Py<PyInt>,
    offset: Py<PyInt>,
    nbytes: Py<PyInt>,
    logical: Py<PyAny>,
}

#[pymethods]
impl StoredTensor {
    #[new]
    #[pyo3(signature = (name, dtype, shape, shard, offset, nbytes, logical=None))]
    #[expect(clippy::too_many_arguments, reason = "its attributes, one by one")]
    fn new(
        py: Python<'_>,
        name: Py<PyString>,
        dtype: Py<PyString>,
        shape: Py<PyTuple>,
        shard: Py<PyInt>,
        offset: Py<PyInt>,
        nbytes: Py<PyInt>,
        logical: Option<Py<LogicalType>>,
    ) -> Self {
        let logical = logical.map_or_else(|| py.None(), Py::into_any);
        Self { name, dtype, shape, shard, offset, nbytes, logical }
    }
}

/// See `_core.pyi`.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct LogicalType {
    dtype: Py<PyString>,
    shape: Py<PyTuple>,
}

#[pymethods]
impl LogicalType {
    #[new]
    fn new(dtype: Py<PyString>, shape: Py<PyTuple>) -> Self {
        Self { dtype, shape }
    }
}

/// See `_core.pyi`.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct StoredShard {
    file: String,
    prefix: String,
    nbytes: u64,
    crc: String,
}

/// See `_core.pyi`.
#[pyclass(frozen, get_all, module = "fastckpt._core")]
struct DamagedRange {
    file: String,
    offset: u64,
    length: u64,
    tensor: Option<String>,
    reason: String,
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct ReadRequest {
    #[pyo3(get)]
    tensor: usize,
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    capacity: u64,
    r#box: Option<Vec<Along>>,
    strides: Option<Vec<i64>>,
}

#[pymethods]
impl ReadRequest {
    #[new]
    #[pyo3(signature = (tensor, address, capacity, r#box=None, strides=None))]
    fn new(
        tensor: usize,
        address: usize,
        capacity: u64,
        r#box: Option<Vec<(u64, u64, u64)>>,
        strides: Option<Vec<i64>>,
    ) -> Self {
        let along = |(start, stop, step)| Along { start, stop, step };
        let r#box = r#box.map(|all| all.into_iter().map(along).collect());
        Self { tensor, address, capacity, r#box, strides }
    }

    #[getter]
    fn r#box(&self) -> Option<Vec<(u64, u64, u64)>> {
        self.r#box.as_ref().map(|all| all.iter().map(|along| (along.start, along.stop, along.step)).collect())
    }

    #[getter]
    fn strides(&self) -> Option<Vec<i64>> {
        self.strides.clone()
    }
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
    #[pyo3(signature = (path, *, keep=false, manifest=None, files=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        keep: bool,
        manifest: Option<PyBackedBytes>,
        files: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let checkpoint = py.detach(|| match (files, manifest.as_deref()) {
            (Some(files), known) => Checkpoint::open_stored(&path, Arc::new(StoredFiles(files)), known),
            (None, Some(manifest)) => Checkpoint::open_known(&path, manifest, keep),
            (None, None) if keep => Checkpoint::open_and_keep(&path),
            (None, None) => Checkpoint::open(&path),
        });
        Ok(Self { checkpoint: Arc::new(checkpoint.map_err(|error| to_python(&error, &Raised::default()))?) })
    }

    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let manifest = py.detach(|| self.checkpoint.manifest());
        Ok(PyBytes::new(py, &manifest.map_err(|error| to_python(&error, &Raised::default()))?))
    }

    fn tensors(&self, py: Python<'_>) -> PyResult<Vec<Py<StoredTensor>>> {
        let one = |tensor: &TensorEntry| {
            let logical = tensor.logical().map(|(dtype, shape)| {
                let shape = PyTuple::new(py, shape)?.unbind();
                Py::new(py, LogicalType { dtype: PyString::new(py, dtype).unbind(), shape })
            });
            let stored = StoredTensor {
                name: PyString::new(py, tensor.name()).unbind(),
                dtype: PyString::new(py, &tensor.dtype.to_string()).unbind(),
                shape: PyTuple::new(py, tensor.shape())?.unbind(),
                shard: number(py, tensor.shard() as u64),
                offset: number(py, tensor.offset),
                nbytes: number(py, tensor.bytes()),
                logical: logical.transpose()?.map_or_else(|| py.None(), Py::into_any),
            };
            Py::new(py, stored)
        };
        self.checkpoint.body().tensors.iter().map(one).collect()
    }

    fn checksum(&self, tensor: usize) -> PyResult<Option<u64>> {
        let body = self.checkpoint.body();
        let entry = body.tensors.get(tensor);
        let entry =
            entry.ok_or_else(|| PyIndexError::new_err(format!("checksum: there is no tensor {tensor}")))?;
        Ok(entry.whole_crc(body.block_size))
    }

    fn shards(&self) -> Vec<StoredShard> {
        let one = |shard: &ShardEntry| StoredShard {
            file: shard.file.clone(),
            prefix: shard.prefix.clone(),
            nbytes: shard.bytes,
            crc: shard.crc.clone(),
        };
        self.checkpoint.body().shards.iter().map(one).collect()
    }

    fn structure(&self) -> &str {
        self.checkpoint.body().structure.get()
    }

    fn metadata(&self) -> &str {
        self.checkpoint.body().metadata.get()
    }

    fn per_rank(&self) -> Option<&str> {
        self.checkpoint.body().per_rank.as_ref().map(|text| text.get())
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
        saved.set_item("options", body.saved.options.clone())?;
        let info = PyDict::new(py);
        info.set_item("version", fastckpt_core::format::manifest::VERSION)?;
        info.set_item("writer", writer)?;
        info.set_item("created", body.created)?;
        info.set_item("saved", saved)?;
        info.set_item("block_size", body.block_size)?;
        Ok(info)
    }

    #[pyo3(signature = (requests, *, verify, io, threads, drain, tick, staging=None, most_staging=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
    fn read<'py>(
        &self,
        py: Python<'py>,
        requests: Vec<Py<ReadRequest>>,
        verify: bool,
        io: &str,
        threads: Option<usize>,
        drain: Option<Py<PyAny>>,
        tick: Option<Py<PyAny>>,
        staging: Option<&Memory>,
        most_staging: Option<u64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let staging = Memory::lent(staging);
        let options = Options { staging, ..self.options(py, io, (threads, most_staging))? };
        let raised = Arc::new(Raised::default());
        let drain = buffers::drain(drain, &raised);
        let mut wanted = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().map(Py::get).enumerate() {
            let (tensor, memory) = (request.tensor, (request.address, request.capacity));
            let entry = self.checkpoint.body().tensors.get(tensor);
            let entry =
                entry.ok_or_else(|| PyIndexError::new_err(format!("read: there is no tensor {tensor}")))?;
            let mut asked = (entry.bytes(), None);
            if request.r#box.is_some() || request.strides.is_some() {
                let rows = boxes::rows(entry, request.r#box.as_deref(), request.strides.as_deref());
                let Some(rows) = rows.map_err(|error| to_python(&error, &raised))? else { continue };
                asked = (rows.bytes(), Some(Arc::new(rows)));
            }
            let (nbytes, rows) = asked;
            let destination = buffers::destination(index, (nbytes, rows.as_ref()), memory, drain.as_ref())?;
            wanted.push(Request { tensor, rows, destination });
        }
        let report = py.detach(|| {
            self.checkpoint.read(wanted, verify, &options, &mut self::tick(tick.as_ref(), &raised))
        });
        to_dict(py, &report.map_err(|error| to_python(&error, &raised))?)
    }

    fn save<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        tensors: Vec<(usize, String)>,
        structure: &str,
        options: &SaveOptions,
    ) -> PyResult<Bound<'py, PyDict>> {
        let raised = Arc::new(Raised::default());
        let mut specs = Vec::with_capacity(tensors.len());
        let mut contents = Vec::with_capacity(tensors.len());
        let fill: Fill = {
            let (checkpoint, raised) = (Arc::clone(&self.checkpoint), Arc::clone(&raised));
            Arc::new(move |all: &mut [Pulled<'_>]| {
                let copied = all.iter_mut().try_for_each(|one| checkpoint.copy(one.index, one.start, one.to));
                copied.map_err(|error| {
                    raised.keep(to_python(&error, &Raised::default()));
                    error.to_string()
                })
            })
        };
        for (index, name) in tensors {
            let entry = self.checkpoint.body().tensors.get(index);
            let entry =
                entry.ok_or_else(|| PyIndexError::new_err(format!("save: there is no tensor {index}")))?;
            let logical = entry.logical().map(|(dtype, shape)| (dtype.to_owned(), shape));
            specs.push(TensorSpec { name, dtype: entry.dtype, shape: entry.shape(), logical });
            contents.push(Content::Pull(Pull { fill: Arc::clone(&fill), index }));
        }
        let report = py.detach(|| {
            let request = core_save::Request {
                path: &path,
                tensors: &specs,
                groups: &options.groups,
                shard_size: options.shard_size,
                contents: core_save::Contents::Tensors(&contents),
                base: None,
                frozen: &[],
                structure,
                metadata: self.checkpoint.body().metadata.get(),
                files: &options.files(),
                overwrite: options.overwrite,
            };
            core_save::save(&request, &options.core, &mut tick(None, &raised))
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
        let options = options(py, "buffered", (threads, None))?;
        let raised = Raised::default();
        let maps = &mappings.maps;
        let report = py.detach(|| {
            self.checkpoint.check(maps, &tensors, &options, &mut self::tick(tick.as_ref(), &raised))
        });
        to_dict(py, &report.map_err(|error| to_python(&error, &raised))?)
    }

    #[pyo3(signature = (*, io, threads, tick, most_staging=None))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        io: &str,
        threads: Option<usize>,
        tick: Option<Py<PyAny>>,
        most_staging: Option<u64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = self.options(py, io, (threads, most_staging))?;
        let raised = Raised::default();
        let outcome = py.detach(|| self.checkpoint.verify(&options, &mut self::tick(tick.as_ref(), &raised)));
        let (report, damage) = outcome.map_err(|error| to_python(&error, &raised))?;
        let dict = to_dict(py, &report)?;
        let damage = damage.into_iter().map(|Damage { file, offset, len, tensor, reason }| DamagedRange {
            file,
            offset,
            length: len,
            tensor,
            reason,
        });
        dict.set_item("damage", damage.collect::<Vec<_>>())?;
        Ok(dict)
    }
}

impl Reader {
    /// The options of an operation. The environment's choice of an engine applies to disks only.
    fn options(&self, py: Python<'_>, io: &str, own: (Option<usize>, Option<u64>)) -> PyResult<Options> {
        let io = if io == "auto" && self.checkpoint.is_stored() { "buffered" } else { io };
        options(py, io, own)
    }
}

fn number(py: Python<'_>, value: u64) -> Py<PyInt> {
    let Ok(number) = value.into_pyobject(py);
    number.unbind()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<DamagedRange>()?;
    module.add_class::<LogicalType>()?;
    module.add_class::<Mappings>()?;
    module.add_class::<ReadRequest>()?;
    module.add_class::<StoredShard>()?;
    module.add_class::<StoredTensor>()?;
    module.add_class::<Reader>()
}
