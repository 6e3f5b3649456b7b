//! The first step of a save: shards of a plan are written into a workspace, and made durable.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::job::WriteJob;
use crate::commit::Workspace;
use crate::engine::choice::Choice;
use crate::engine::content::Content;
use crate::engine::io::files::OpenFile;
use crate::engine::job::{TICK, Tick};
use crate::engine::options::Options;
use crate::engine::report::Ran;
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::layout::{Plan, Shard, TensorSpec};
use crate::format::manifest::{ShardEntry, TensorEntry};
use crate::sys::file::DataFile;
use crate::sys::mapping::Stretch;
use crate::telemetry::{Operation, Phase};

/// The bytes of the shards of a plan.
#[derive(Debug, Clone, Copy)]
pub enum Bytes<'a> {
    /// Where each tensor lies; of those in shards that are not written it does not matter.
    Tensors(&'a [Content]),
    /// The shards as they will be on the disk. Nobody can change them.
    Images(&'a [Stretch]),
}

/// Some shards of a plan, and what goes into them.
#[derive(Debug)]
pub struct Part<'a> {
    /// The layout of the whole checkpoint.
    pub plan: &'a Plan,
    /// All its tensors.
    pub tensors: &'a [TensorSpec],
    /// Their bytes.
    pub bytes: Bytes<'a>,
    /// Which shards to write: their places in the plan, ascending.
    pub shards: &'a [usize],
}

impl<'a> Part<'a> {
    /// Whether the plan's shard number `index` belongs to it.
    pub(super) fn has(&self, index: usize) -> bool {
        self.shards.binary_search(&index).is_ok()
    }

    /// The shards.
    pub(super) fn shards(&self) -> impl Iterator<Item = &'a Shard> {
        self.shards.iter().map(|&index| &self.plan.shards[index])
    }

    /// Bytes of their tensors.
    pub(super) fn total(&self) -> u64 {
        self.shards().map(|shard| shard.bytes - shard.header.len() as u64).sum()
    }

    fn check(&self) -> Result<()> {
        let complete = match self.bytes {
            Bytes::Tensors(contents) => contents.len() == self.tensors.len(),
            Bytes::Images(images) => images.len() == self.plan.shards.len(),
        };
        if !complete || self.plan.places.len() != self.tensors.len() {
            return Err(Error::Invalid("each tensor needs its place and its content".to_owned()));
        }
        let known = self.shards.last().is_none_or(|&last| last < self.plan.shards.len());
        if !known || !self.shards.is_sorted_by(|one, other| one < other) {
            return Err(Error::Invalid("shards must be places in the plan, in ascending order".to_owned()));
        }
        Ok(())
    }
}

/// Shards that are written.
#[derive(Debug)]
pub struct Written {
    /// What the manifest says of them.
    pub shards: Vec<ShardEntry>,
    /// And of their tensors.
    pub tensors: Vec<TensorEntry>,
    /// A shard of one block alone is not durable yet: [`super::seal`] sees to that, or [`Unsynced::sync`] where another
    /// process seals.
    pub unsynced: Option<Unsynced>,
    /// What ran.
    pub ran: Ran,
    /// Seconds that it took to allocate the files, to write them, and to sync them after that.
    pub seconds: [f64; 3],
}

/// A shard that is written and not durable yet.
#[derive(Debug)]
#[must_use = "it is not durable yet"]
pub struct Unsynced {
    pub(super) file: Arc<OpenFile>,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

impl Unsynced {
    /// Makes it durable, and closes it.
    pub fn sync(self, operation: &Operation) -> Result<()> {
        self.file.sync().map_err(Error::io("sync", &self.path))?;
        operation.durable(self.bytes);
        Ok(())
    }
}

/// Allocates the shards of `part` in `workspace`, writes them and makes them durable, all in parallel. No other process
/// may write them.
pub fn write_shards(
    workspace: &Workspace,
    part: &Part<'_>,
    options: &Options,
    operation: &Operation,
    tick: Tick<'_>,
) -> Result<Written> {
    part.check()?;
    let begin = Instant::now();
    let choice = Choice::new(options, part.total());
    let job = WriteJob::new(part, workspace, &choice, options, begin);
    allocate(part, workspace, &mut *tick)?;
    let allocated = begin.elapsed().as_secs_f64();
    let ran = run(&job, &choice, options, part.plan.block_size, operation, tick)?;
    operation.phase(Phase::Fsync);
    let synced = begin.elapsed().as_secs_f64();
    let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(allocated, synced);
    let (shards, tensors) = job.entries();
    let unsynced = job.unsynced();
    let seconds = [allocated, written - allocated, synced - written];
    Ok(Written { shards, tensors, unsynced, ran, seconds })
}

/// Creates the shards with their final sizes.
fn allocate(part: &Part<'_>, workspace: &Workspace, tick: Tick<'_>) -> Result<()> {
    let mut last = Instant::now();
    let mut go_on = || {
        let late = last.elapsed() >= TICK;
        last = if late { Instant::now() } else { last };
        !late || tick(0, part.shards().map(|shard| shard.bytes).sum())
    };
    for shard in part.shards() {
        DataFile::create(workspace.directory(), &shard.file, shard.bytes, &mut go_on).map_err(|error| {
            match error.kind() {
                ErrorKind::Interrupted => Error::Interrupted,
                _ => Error::io("allocate", &workspace.path_of(&shard.file))(error),
            }
        })?;
    }
    Ok(())
}
