//! Where a tensor's bytes come from and where they go, including memory that is not plain host memory.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::sys::map::FileMap;
use crate::sys::mapping::Stretch;
use crate::sys::memory::{Bytes, Region, Source};
use crate::sys::strided::{Rows, Strided};

/// The number of bytes that a callback copies in one call, if a worker's staging memory has room for two calls: one
/// half is filled while the other half moves. Python's GIL is taken once for each call.
pub const BATCH: usize = 16 << 20;

/// A request for bytes of the tensor with the number `index`, beginning at `start`.
#[derive(Debug)]
pub struct Pulled<'a> {
    /// The number of the [`Pull`].
    pub index: usize,
    /// The first byte.
    pub start: u64,
    /// Where the bytes go.
    pub to: &'a mut [u8],
}

/// Bytes to hand over to the destination with the number `index`, beginning at `start`.
#[derive(Debug, Clone, Copy)]
pub struct Pushed<'a> {
    /// The number of the [`Push`].
    pub index: usize,
    /// The first byte.
    pub start: u64,
    /// The bytes.
    pub from: &'a [u8],
}

/// The outcome of a callback. A failure has a message.
pub type Outcome = std::result::Result<(), String>;
/// Copies bytes to the given memory. Worker threads call it. It may use the memory until it returns.
pub type Fill = Arc<dyn Fn(&mut [Pulled<'_>]) -> Outcome + Send + Sync>;
/// Takes bytes. Worker threads call it. It may use the memory until it returns.
pub type Drain = Arc<dyn Fn(&[Pushed<'_>]) -> Outcome + Send + Sync>;

/// A tensor whose bytes a callback supplies. The callback identifies the tensor by `index`.
#[derive(Clone)]
pub struct Pull {
    /// The callback. One call serves all tensors that share it.
    pub fill: Fill,
    /// The number.
    pub index: usize,
}

/// A destination whose bytes a callback takes. The callback identifies the destination by `index`.
#[derive(Clone)]
pub struct Push {
    /// The callback. One call serves all destinations that share it.
    pub drain: Drain,
    /// The number.
    pub index: usize,
}

/// Fetches bytes of several tensors, each from its offset on. Calls each callback once for all its bytes.
pub(crate) fn fetch<'a>(wanted: impl IntoIterator<Item = (&'a Pull, u64, &'a mut [u8])>) -> Result<()> {
    let mut calls: Vec<(&Fill, Vec<Pulled<'_>>)> = Vec::new();
    for (Pull { fill, index }, start, to) in wanted {
        let one = Pulled { index: *index, start, to };
        match calls.last_mut().filter(|(last, _)| Arc::ptr_eq(last, fill)) {
            Some((_, ranges)) => ranges.push(one),
            None => calls.push((fill, vec![one])),
        }
    }
    calls.iter_mut().try_for_each(|(fill, ranges)| fill(ranges)).map_err(Error::Callback)
}

/// Hands bytes to several destinations, each from its offset on. Calls each callback once for all its bytes.
pub(crate) fn hand_over<'a>(all: impl IntoIterator<Item = (&'a Push, u64, &'a [u8])>) -> Result<()> {
    let mut calls: Vec<(&Drain, Vec<Pushed<'_>>)> = Vec::new();
    for (Push { drain, index }, start, from) in all {
        let one = Pushed { index: *index, start, from };
        match calls.last_mut().filter(|(last, _)| Arc::ptr_eq(last, drain)) {
            Some((_, ranges)) => ranges.push(one),
            None => calls.push((drain, vec![one])),
        }
    }
    calls.iter().try_for_each(|(drain, ranges)| drain(ranges)).map_err(Error::Callback)
}

impl Push {
    /// A destination with a separate callback, which takes bytes and the position of the first one.
    pub fn each(take: impl Fn(u64, &[u8]) -> Outcome + Send + Sync + 'static) -> Self {
        let drain = move |all: &[Pushed<'_>]| all.iter().try_for_each(|one| take(one.start, one.from));
        Self { drain: Arc::new(drain), index: 0 }
    }
}

/// A callback in another part of this crate. It takes bytes and their position, and its errors are passed on unchanged.
pub type Take = Arc<dyn Fn(u64, &[u8]) -> Result<()> + Send + Sync>;

/// Where the bytes of a tensor to save are.
#[derive(Clone)]
pub enum Content {
    /// Contiguous host memory.
    Memory(Source),
    /// Memory of this crate that does not change.
    Image(Stretch),
    /// Elsewhere (on a device, or strided): fetched piece by piece.
    Pull(Pull),
}

/// Where bytes that are read go.
pub enum Destination {
    /// Contiguous host memory.
    Memory(Region),
    /// Host memory with strides.
    Strided(Strided),
    /// Elsewhere: handed over piece by piece.
    Push(Push),
    /// Bytes of a larger array elsewhere, handed over piece by piece. The rows give the places in the array, and the
    /// number is the byte of the array at which the first row begins.
    Rows(Push, Arc<Rows>, u64),
    /// Handed over to another part of this crate, piece by piece.
    Take(Take),
    /// Nowhere: the bytes are used where the file is mapped.
    Mapped(Arc<FileMap>),
    /// Nowhere: only the checksum is needed.
    Nowhere,
}

impl Content {
    /// A tensor with a separate callback, which copies bytes, given the position of the first one.
    pub fn each(copy: impl Fn(u64, &mut [u8]) -> Outcome + Send + Sync + 'static) -> Self {
        let fill = move |all: &mut [Pulled<'_>]| all.iter_mut().try_for_each(|one| copy(one.start, one.to));
        Self::Pull(Pull { fill: Arc::new(fill), index: 0 })
    }

    /// The `len` bytes from `start` on, if they lie in host memory.
    pub(crate) fn host(&self, start: u64, len: usize) -> Result<Option<Bytes<'_>>> {
        let bytes = match self {
            Self::Memory(source) => *source,
            Self::Image(stretch) => Bytes::from(&**stretch),
            Self::Pull(_) => return Ok(None),
        };
        bytes.part(start as usize, len).map(Some).ok_or_else(Self::too_short)
    }

    /// The error for memory that ends before its tensor does.
    pub(crate) fn too_short() -> Error {
        Error::Invalid("a tensor is shorter than its shape".to_owned())
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory(_) => "Memory",
            Self::Image(_) => "Image",
            Self::Pull(_) => "Pull",
        })
    }
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory(_) => "Memory",
            Self::Strided(_) => "Strided",
            Self::Push(_) | Self::Rows(..) => "Push",
            Self::Take(_) => "Take",
            Self::Mapped(_) => "Mapped",
            Self::Nowhere => "Nowhere",
        })
    }
}
