//! Where a tensor's bytes come from and where they go: the interfaces for memory that is not plain host memory.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::sys::map::FileMap;
use crate::sys::memory::{Region, Source};
use crate::sys::strided::Strided;

/// Copies bytes of a tensor, from `start` on, into a staging buffer. Worker threads call it.
pub type Fill = Arc<dyn Fn(u64, &mut [u8]) -> std::result::Result<(), String> + Send + Sync>;
/// Takes bytes of a tensor, from `start` on, out of a staging buffer. Worker threads call it.
pub type Drain = Arc<dyn Fn(u64, &[u8]) -> std::result::Result<(), String> + Send + Sync>;

/// The same for another part of this crate, whose errors stay what they are.
pub type Take = Arc<dyn Fn(u64, &[u8]) -> Result<()> + Send + Sync>;

/// Where a tensor to save lies.
#[derive(Clone)]
pub enum Content {
    /// Contiguous host memory.
    Memory(Source),
    /// Elsewhere (another device, strided), requested piece by piece.
    Pull(Fill),
}

/// Where bytes that are read go.
pub enum Destination {
    /// Contiguous host memory.
    Memory(Region),
    /// Host memory with strides.
    Strided(Strided),
    /// Elsewhere, handed over piece by piece.
    Push(Drain),
    /// Handed over to another part of this crate, piece by piece.
    Take(Take),
    /// Nowhere: the bytes are read where the file is mapped.
    Mapped(Arc<FileMap>),
    /// Nowhere: only the checksum is wanted.
    Nowhere,
}

impl Content {
    /// The error for memory that ends before its tensor does.
    pub(crate) fn too_short() -> Error {
        Error::Invalid("a tensor is shorter than its shape".to_owned())
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory(_) => "Memory",
            Self::Pull(_) => "Pull",
        })
    }
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory(_) => "Memory",
            Self::Strided(_) => "Strided",
            Self::Push(_) => "Push",
            Self::Take(_) => "Take",
            Self::Mapped(_) => "Mapped",
            Self::Nowhere => "Nowhere",
        })
    }
}
