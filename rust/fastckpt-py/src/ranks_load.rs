//! `_core.RankLoad`.

use std::sync::Arc;

use fastckpt_core::Options;
use fastckpt_core::ranks::{self, Places, pieces};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffers;
use crate::error::{Raised, to_python};
use crate::mail::Mail;
use crate::reader::Reader;
use crate::report::{options, tick, to_dict};
use crate::share::{Kind, Share};
use crate::snapshot::Memory;

/// Tensor, part, address, capacity and strides of a part's destination.
type Target = (usize, u32, usize, u64, Option<Vec<i64>>);

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
struct RankLoad {
    core: ranks::RankLoad,
    verify: bool,
    options: Options,
    #[pyo3(get)]
    mail: Py<Mail>,
    raised: Arc<Raised>,
}

#[pymethods]
impl RankLoad {
    #[new]
    #[pyo3(signature = (share, rank, reader, requests, drain, *, verify, io, threads, staging=None, most_staging=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python function, one by one")]
    fn new(
        py: Python<'_>,
        share: &Share,
        rank: u32,
        reader: &Reader,
        requests: Vec<Target>,
        drain: Option<Py<PyAny>>,
        verify: bool,
        io: &str,
        threads: Option<usize>,
        staging: Option<&Memory>,
        most_staging: Option<u64>,
    ) -> PyResult<Self> {
        let Kind::Load(share) = &share.0 else {
            return Err(PyValueError::new_err("a load needs a share that was made to load"));
        };
        let staging = Memory::lent(staging);
        let options = Options { staging, ..options(py, io, (threads, most_staging))? };
        let raised = Arc::new(Raised::default());
        let drain = buffers::drain(drain, &raised);
        let mut places = Places::with_capacity(requests.len());
        for (index, (tensor, part, address, capacity, strides)) in requests.into_iter().enumerate() {
            let bytes = share.part_bytes(rank, tensor, part);
            let sizes = share.part_shape(rank, tensor, part);
            let array = bytes.and_then(|bytes| Ok((sizes?.unwrap_or_default(), bytes)));
            let (sizes, bytes) = array.map_err(|error| to_python(&error, &raised))?;
            let array = (sizes.as_slice(), bytes, strides.as_deref());
            let place = buffers::place(index, array, (address, capacity), drain.as_ref(), &raised)?;
            if places.insert((tensor, part), place).is_some() {
                let twice = format!("part {part} of tensor {tensor} is requested twice: nothing was read");
                return Err(PyValueError::new_err(twice));
            }
        }
        let checkpoint = Arc::clone(&reader.checkpoint);
        let core = py.detach(|| ranks::RankLoad::new(share, rank, checkpoint, places));
        let core = core.map_err(|error| to_python(&error, &raised))?;
        // Callbacks run in `read`, which raises their errors.
        let mail = Py::new(py, Mail::new(core.mail(), &Arc::default()))?;
        Ok(Self { core, verify, options, mail, raised })
    }

    #[pyo3(signature = (tick))]
    fn read<'py>(&self, py: Python<'py>, tick: Option<Py<PyAny>>) -> PyResult<Bound<'py, PyDict>> {
        let loaded = py.detach(|| {
            self.core.read(self.verify, &self.options, &mut self::tick(tick.as_ref(), &self.raised))
        });
        let loaded = loaded.map_err(|error| to_python(&error, &self.raised))?;
        let dict = to_dict(py, &loaded.report)?;
        dict.set_item("storage", loaded.storage)?;
        dict.set_item("peers", loaded.peers)?;
        dict.set_item("sent", loaded.sent)?;
        dict.set_item("pieces", PyBytes::new(py, &pieces::encode(&loaded.pieces)))?;
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.core.close());
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RankLoad>()
}
