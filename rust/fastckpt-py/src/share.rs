//! `_core.Spread` and `_core.Share`.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use fastckpt_core::Error;
use fastckpt_core::engine::options::BLOCK_SIZE;
use fastckpt_core::format::geometry::PAGE;
use fastckpt_core::format::layout::{self, Sizes, TensorSpec};
use fastckpt_core::ranks::{self, Aggregation, Table, pieces};
use fastckpt_core::share::{self, Bounds, Message, Placement, Purpose};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyDict};

use crate::error::{Raised, to_python};
use crate::reader::Reader;
use crate::report::environment;
use crate::save::SaveOptions;

/// Maps the outcome of a call that runs no Python code.
fn mapped<T>(outcome: Result<T, Error>) -> PyResult<T> {
    outcome.map_err(|error| to_python(&error, &Raised::default()))
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct Spread(share::Spread);

#[pymethods]
impl Spread {
    #[staticmethod]
    fn all() -> Self {
        Self(share::Spread::All)
    }

    #[staticmethod]
    fn ranks(ranks: Vec<u32>) -> Self {
        Self(share::Spread::Ranks(ranks))
    }

    #[staticmethod]
    fn mesh(ranks: Vec<u32>, mesh: Vec<u64>, placements: Vec<(PyBackedStr, usize, u64)>) -> PyResult<Self> {
        let placement = |(kind, dim, factor): (PyBackedStr, usize, u64)| match &*kind {
            "replicate" => Ok(Placement::Replicate),
            "shard" => Ok(Placement::Shard(dim)),
            "strided" => Ok(Placement::Strided { dim, factor }),
            _ => Err(PyValueError::new_err(format!("there is no placement `{kind}`"))),
        };
        let placements = placements.into_iter().map(placement).collect::<PyResult<_>>()?;
        Ok(Self(share::Spread::Mesh { ranks, mesh, placements }))
    }

    #[staticmethod]
    fn boxes(boxes: Vec<(u32, Vec<(u64, u64)>)>) -> Self {
        let bounds =
            |dims: Vec<(u64, u64)>| -> Bounds { dims.into_iter().map(|(from, to)| from..to).collect() };
        Self(share::Spread::Boxes(boxes.into_iter().map(|(rank, dims)| (rank, bounds(dims))).collect()))
    }
}

/// A tensor in the arguments of a save: name, stored dtype and shape, logical dtype and shape, and its spreads.
#[derive(FromPyObject)]
struct Spec(String, PyBackedStr, Vec<u64>, Option<(String, Vec<u64>)>, Vec<u32>);

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct Share(pub(crate) Kind);

/// The purpose of a share.
pub(crate) enum Kind {
    Save(Arc<Table>),
    Load(Arc<share::Share>),
}

impl Share {
    /// The table, if the share was made for a save.
    pub(crate) fn table(&self) -> PyResult<&Arc<Table>> {
        match &self.0 {
            Kind::Save(table) => Ok(table),
            Kind::Load(_) => Err(PyValueError::new_err("a save needs a share that was made to save")),
        }
    }

    fn core(&self) -> &share::Share {
        match &self.0 {
            Kind::Save(table) => &table.share,
            Kind::Load(share) => share,
        }
    }
}

fn spreads(spreads: &[Py<Spread>]) -> Vec<share::Spread> {
    spreads.iter().map(|spread| spread.get().0.clone()).collect()
}

#[pymethods]
impl Share {
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "they are Python's")]
    #[pyo3(signature = (tensors, spreads, ranks, options, page=PAGE, grain=0, team=1))]
    fn to_save(
        py: Python<'_>,
        tensors: Vec<Spec>,
        spreads: Vec<Py<Spread>>,
        ranks: u32,
        options: &SaveOptions,
        page: u64,
        grain: u64,
        team: u32,
    ) -> PyResult<Self> {
        let (mut specs, mut spread) = (Vec::with_capacity(tensors.len()), Vec::with_capacity(tensors.len()));
        for Spec(name, dtype, shape, logical, own) in tensors {
            let dtype = layout::dtype(&dtype)
                .ok_or_else(|| PyValueError::new_err(format!("safetensors has no dtype `{dtype}`")))?;
            specs.push(TensorSpec { name, dtype, shape, logical });
            spread.push(own);
        }
        let spreads = self::spreads(&spreads);
        let sizes = Sizes { shard: options.shard_size, block: options.core.block_size.unwrap_or(BLOCK_SIZE) };
        let layout = (&*options.groups, sizes, &*options.frozen);
        let table = py.detach(|| {
            let mut table = Table::new(specs, spread, spreads, ranks, layout)?;
            table.share = table.share.in_pages(page)?.in_teams(grain.max(page), team)?.read_apart();
            Ok(table)
        });
        Ok(Self(Kind::Save(Arc::new(mapped(table)?))))
    }

    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "they are Python's")]
    #[pyo3(signature = (reader, wanted, spreads, ranks, *, apart=false, grain=0, team=1))]
    fn to_load(
        py: Python<'_>,
        reader: &Reader,
        wanted: Vec<(usize, Vec<u32>)>,
        spreads: Vec<Py<Spread>>,
        ranks: u32,
        apart: bool,
        grain: u64,
        team: u32,
    ) -> PyResult<Self> {
        let body = reader.checkpoint.body();
        let tensor = |entry: &fastckpt_core::format::manifest::TensorEntry| share::Tensor {
            name: entry.name().to_owned(),
            stored: entry.bytes(),
            shape: entry.logical_shape(),
            shard: entry.shard(),
            offset: entry.offset,
            spreads: Vec::new(),
        };
        let mut tensors: Vec<_> = body.tensors.iter().map(tensor).collect();
        for (number, own) in wanted {
            let tensor = tensors.get_mut(number);
            let missing = || PyIndexError::new_err(format!("to_load: there is no tensor {number}"));
            tensor.ok_or_else(missing)?.spreads.extend(own);
        }
        let files = body.shards.iter().map(|shard| (shard.data_offset, shard.bytes)).collect();
        let spreads = self::spreads(&spreads);
        let share = py.detach(|| {
            share::Share::new(files, body.block_size, tensors, spreads, ranks)?
                .in_teams(grain.max(PAGE), team)
        });
        let share = mapped(share)?;
        Ok(Self(Kind::Load(Arc::new(if apart { share.read_apart() } else { share }))))
    }

    fn compare(&self, py: Python<'_>, reader: &Reader, pieces: &[u8]) -> PyResult<()> {
        mapped(py.detach(|| {
            let mut all = Vec::new();
            pieces::decode(pieces, &mut all)?;
            ranks::compare(self.core(), &reader.checkpoint, all)
        }))
    }

    fn first(&self, py: Python<'_>, tensors: Option<Vec<usize>>) -> PyResult<Self> {
        let chosen = tensors.map(|tensors| tensors.into_iter().collect::<HashSet<_>>());
        let is_first = |tensor| chosen.as_ref().is_none_or(|chosen| chosen.contains(&tensor));
        let table = self.table()?;
        Ok(Self(Kind::Save(Arc::new(mapped(py.detach(|| table.first(is_first)))?))))
    }

    fn replicated(&self, py: Python<'_>) -> PyResult<usize> {
        mapped(py.detach(|| self.core().replicated()))
    }

    fn about(&self, tensor: usize) -> PyResult<(String, u64, Vec<Vec<u32>>)> {
        let missing = || PyIndexError::new_err(format!("there is no tensor {tensor}"));
        let one = self.core().tensors().get(tensor).ok_or_else(missing)?;
        let elements = one.shape.iter().product::<u64>().max(1);
        Ok((one.name.clone(), (one.stored / elements).max(1), self.core().groups(tensor)))
    }

    fn digest(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.core().digest())
    }

    fn merge<'py>(&self, py: Python<'py>, pieces: Vec<PyBackedBytes>) -> PyResult<Bound<'py, PyBytes>> {
        let merged = py.detach(|| {
            let mut all = Vec::new();
            pieces.iter().try_for_each(|some| pieces::decode(some, &mut all))?;
            Ok(pieces::encode(&self.core().merge(all)?))
        });
        Ok(PyBytes::new(py, &mapped(merged)?))
    }

    fn ranges(&self, py: Python<'_>, rank: u32) -> PyResult<Vec<(usize, u64, u64)>> {
        let duties = mapped(py.detach(|| self.core().duties(rank, Purpose::Save)))?;
        Ok(duties.ranges.iter().map(|range| (range.shard, range.start, range.end)).collect())
    }

    #[pyo3(signature = (rank, *, load))]
    fn figures<'py>(&self, py: Python<'py>, rank: u32, load: bool) -> PyResult<Bound<'py, PyDict>> {
        let purpose = if load { Purpose::Load } else { Purpose::Save };
        let duties = mapped(py.detach(|| self.core().duties(rank, purpose)))?;
        let (sent, received) = duties.lanes(purpose);
        let bytes = |messages: &[&Message]| messages.iter().map(|message| message.bytes).sum::<u64>();
        let count = |all: &mut dyn Iterator<Item = u64>| {
            let mut all: Vec<u64> = all.collect();
            all.sort_unstable();
            all.dedup();
            all.len()
        };
        let peers = || sent.iter().chain(&received).map(|message| u64::from(message.peer));
        let dict = PyDict::new(py);
        dict.set_item("ranges", duties.ranges.len())?;
        dict.set_item("files", count(&mut duties.ranges.iter().map(|range| range.shard as u64)))?;
        dict.set_item("bytes", duties.ranges.iter().map(|range| range.end - range.start).sum::<u64>())?;
        dict.set_item("messages_sent", sent.len())?;
        dict.set_item("bytes_sent", bytes(&sent))?;
        dict.set_item("messages_received", received.len())?;
        dict.set_item("bytes_received", bytes(&received))?;
        dict.set_item("peers", count(&mut peers()))?;
        dict.set_item("team", mapped(self.core().team_size())?)?;
        Ok(dict)
    }
}

/// See `_core.pyi`.
#[pyfunction]
fn aggregation(py: Python<'_>, path: PathBuf, page: u64) -> PyResult<(u64, u32)> {
    let environment = environment(py);
    let found = mapped(py.detach(|| Aggregation::of(&path, page, &environment)))?;
    Ok((found.grain, found.team))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Spread>()?;
    module.add_class::<Share>()?;
    module.add_function(wrap_pyfunction!(aggregation, module)?)
}
