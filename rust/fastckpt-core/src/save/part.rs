//! The part of a checkpoint that one process writes: some shards of its plan.

use std::path::PathBuf;
use std::sync::Arc;

use crate::engine::content::Content;
use crate::engine::io::files::OpenFile;
use crate::error::{Error, Result};
use crate::format::layout::{Plan, Shard, TensorSpec};
use crate::sys::file::DataFile;
use crate::sys::mapping::Stretch;
use crate::telemetry::Operation;

/// The bytes of the shards of a plan.
#[derive(Debug, Clone, Copy)]
pub enum Bytes<'a> {
    /// The contents of each tensor. Contents of tensors in shards that are not written are ignored.
    Tensors(&'a [Content]),
    /// The shards as they will be on the disk, in memory that cannot change.
    Images(&'a [Stretch]),
}

/// Some shards of a plan, and their contents.
#[derive(Debug)]
pub struct Part<'a> {
    /// The layout of the whole checkpoint.
    pub plan: &'a Plan,
    /// All tensors of the checkpoint.
    pub tensors: &'a [TensorSpec],
    /// The bytes of the shards.
    pub bytes: Bytes<'a>,
    /// The shards to write: their indices in the plan, ascending.
    pub shards: &'a [usize],
}

impl<'a> Part<'a> {
    /// Whether shard `index` of the plan belongs to this part.
    pub(super) fn has(&self, index: usize) -> bool {
        self.shards.binary_search(&index).is_ok()
    }

    /// The shards of this part.
    pub(super) fn shards(&self) -> impl Iterator<Item = &'a Shard> + Clone {
        self.shards.iter().map(|&index| &self.plan.shards[index])
    }

    /// The number of bytes of the tensors in these shards.
    pub(super) fn total(&self) -> u64 {
        self.shards().map(|shard| shard.bytes - shard.header.len() as u64).sum()
    }

    pub(super) fn check(&self) -> Result<()> {
        let complete = match self.bytes {
            Bytes::Tensors(contents) => contents.len() == self.tensors.len(),
            Bytes::Images(images) => images.len() == self.plan.shards.len(),
        };
        if !complete || self.plan.places.len() != self.tensors.len() {
            return Err(Error::Invalid("each tensor needs its place and its content".to_owned()));
        }
        let known = self.shards.last().is_none_or(|&last| last < self.plan.shards.len());
        if !known || !self.shards.is_sorted_by(|one, other| one < other) {
            return Err(Error::Invalid("shards must be indices of the plan, in ascending order".to_owned()));
        }
        Ok(())
    }
}

/// A shard that is written but not durable yet.
#[derive(Debug)]
#[must_use = "it is not durable yet"]
pub struct Unsynced {
    pub(super) file: Arc<OpenFile>,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

impl Unsynced {
    /// Makes the shard durable and closes it.
    pub fn sync(self, operation: &Operation) -> Result<()> {
        self.file.local().and_then(DataFile::sync).map_err(Error::io("sync", &self.path))?;
        operation.durable(self.bytes);
        Ok(())
    }
}
