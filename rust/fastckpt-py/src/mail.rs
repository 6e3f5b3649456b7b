//! `_core.Mail`.

use std::sync::Arc;

use fastckpt_core::Error;
use fastckpt_core::ranks::mail;
use pyo3::prelude::*;

use crate::error::{Raised, to_python};

/// See `_core.pyi`.
#[pyclass(frozen, module = "fastckpt._core")]
pub(crate) struct Mail {
    core: Arc<mail::Mail>,
    raised: Arc<Raised>,
}

impl Mail {
    pub(crate) fn new(core: &Arc<mail::Mail>, raised: &Arc<Raised>) -> Self {
        Self { core: Arc::clone(core), raised: Arc::clone(raised) }
    }

    /// Runs `action` without the GIL.
    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&mail::Mail) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| action(&self.core)).map_err(|error| to_python(&error, &self.raised))
    }
}

#[pymethods]
impl Mail {
    fn outgoing(&self) -> Vec<(u32, u64)> {
        self.core.outgoing().map(travelling).collect()
    }

    fn incoming(&self) -> Vec<(u32, u64)> {
        self.core.incoming().map(travelling).collect()
    }

    fn travelling(&self) -> [Vec<(usize, u32, u64)>; 2] {
        let each = |(message, envelope)| {
            let (peer, bytes) = travelling(envelope);
            (message, peer, bytes)
        };
        self.core.travelling().map(|all| all.into_iter().map(each).collect())
    }

    fn pack(&self, py: Python<'_>, message: usize) -> PyResult<usize> {
        self.detached(py, |mail| mail.pack(message))
    }

    fn sent(&self, py: Python<'_>, message: usize) -> PyResult<()> {
        self.detached(py, |mail| mail.sent(message))
    }

    fn admit(&self, py: Python<'_>, message: usize) -> PyResult<usize> {
        self.detached(py, |mail| mail.admit(message))
    }

    fn arrived(&self, py: Python<'_>, message: usize) -> PyResult<()> {
        self.detached(py, |mail| mail.arrived(message))
    }

    fn altered(&self) -> Option<(u32, String)> {
        self.core.altered()
    }

    fn lost(&self) -> Option<(u32, String)> {
        self.core.lost()
    }

    fn stop(&self, py: Python<'_>, why: &str) {
        py.detach(|| self.core.stop(why));
    }
}

/// The other rank of a message, and the bytes that travel.
const fn travelling((peer, bytes): mail::Envelope) -> (u32, u64) {
    (peer, mail::on_the_way(bytes))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Mail>()
}
