//! The first step of a save: writes shards of a plan into a workspace and makes them durable.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::job::WriteJob;
use super::part::{Part, Unsynced};
use super::whole::Whole;
use crate::commit::Workspace;
use crate::engine::choice::Choice;
use crate::engine::job::{Progress, TICK};
use crate::engine::options::Options;
use crate::engine::report::Ran;
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::layout::Shard;
use crate::format::manifest::{ShardEntry, TensorEntry};
use crate::sys::file::DataFile;
use crate::telemetry::{Operation, Phase};

/// Shards that have been written.
#[derive(Debug)]
pub struct Written {
    /// The shards' entries in the manifest.
    pub shards: Vec<ShardEntry>,
    /// The entries of the shards' tensors.
    pub tensors: Vec<TensorEntry>,
    /// A single shard of one block that is not durable yet, which [`super::seal`] makes durable. `None` in a process
    /// that joined.
    pub unsynced: Option<Unsynced>,
    /// How the workers moved the blocks.
    pub ran: Ran,
    /// Seconds spent allocating the files, writing them, and then syncing them.
    pub seconds: [f64; 3],
}

/// Allocates the shards of `part` in `workspace`, then writes them and makes them durable in parallel. No other process
/// may write them.
pub fn write_shards(
    workspace: &Workspace,
    part: &Part<'_>,
    options: &Options,
    operation: &Operation,
    progress: Progress<'_>,
) -> Result<Written> {
    part.check()?;
    let begin = Instant::now();
    let choice = Choice::new(options, part.total());
    allocate(part.shards(), workspace, &mut *progress)?;
    let allocated = begin.elapsed().as_secs_f64();
    let work = Whole::new(part);
    let mut job = WriteJob::new(&work, workspace, &choice, options, begin);
    if workspace.is_own() {
        // A process that joined writes no manifest.
        job = job.leaving_a_sync();
    }
    let ran = run(&job, &choice, options, part.plan.block_size, operation, progress)?;
    operation.phase(Phase::Fsync);
    let synced = begin.elapsed().as_secs_f64();
    let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(allocated, synced);
    let (shards, tensors) = work.entries();
    let unsynced = job.unsynced();
    let seconds = [allocated, written - allocated, synced - written];
    Ok(Written { shards, tensors, unsynced, ran, seconds })
}

/// Creates `shards` with their final sizes.
pub(crate) fn allocate<'a>(
    shards: impl Iterator<Item = &'a Shard> + Clone,
    workspace: &Workspace,
    progress: Progress<'_>,
) -> Result<()> {
    let total = shards.clone().map(|shard| shard.bytes).sum();
    let mut last = Instant::now();
    let mut go_on = || {
        let late = last.elapsed() >= TICK;
        last = if late { Instant::now() } else { last };
        !late || progress(0, total)
    };
    for shard in shards {
        DataFile::create(workspace.directory(), &shard.file, shard.bytes, &mut go_on).map_err(|error| {
            match error.kind() {
                ErrorKind::Interrupted => Error::Interrupted,
                _ => Error::io("allocate", &workspace.path_of(&shard.file))(error),
            }
        })?;
    }
    Ok(())
}
