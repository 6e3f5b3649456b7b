//! The first step of a save: writes shards of a plan into a workspace and makes them durable.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::job::WriteJob;
use super::part::{Part, Unsynced};
use super::whole::Whole;
use crate::commit::Workspace;
use crate::engine::choice::Choice;
use crate::engine::direct::{self, Candidate, Moved, Stretch};
use crate::engine::job::{TICK, Tick};
use crate::engine::options::Options;
use crate::engine::report::Ran;
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::layout::Shard;
use crate::format::manifest::{ShardEntry, TensorEntry};
use crate::sys::file::DataFile;
use crate::telemetry::{Operation, Phase, Planned};

/// Shards that are written.
#[derive(Debug)]
pub struct Written {
    /// Their entries in the manifest.
    pub shards: Vec<ShardEntry>,
    /// The entries of their tensors.
    pub tensors: Vec<TensorEntry>,
    /// A single shard of one block, which is not durable yet: [`super::seal`] makes it durable. `None` in a process
    /// that joined.
    pub unsynced: Option<Unsynced>,
    /// What ran.
    pub ran: Ran,
    /// Seconds spent allocating the files, writing them, and then syncing them.
    pub seconds: [f64; 3],
}

/// Allocates the shards of `part` in `workspace`, then writes them and makes them durable in parallel. No other process
/// must write them.
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
    allocate(part.shards(), workspace, &mut *tick)?;
    let allocated = begin.elapsed().as_secs_f64();
    let mut work = Whole::new(part);
    let moved = store(&mut work, part, workspace, options, operation, &mut *tick)?;
    let mut job = WriteJob::new(&work, workspace, &choice, options, begin);
    job = job.after(moved.blocks.len() as u64 * part.plan.block_size);
    if workspace.is_own() {
        // A process that joined writes no manifest.
        job = job.leaving_a_sync();
    }
    let mut ran = run(&job, &choice, options, part.plan.block_size, operation, tick)?;
    moved.report(&mut ran, operation);
    operation.phase(Phase::Fsync);
    let synced = begin.elapsed().as_secs_f64();
    let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(allocated, synced);
    let (shards, tensors) = work.entries();
    let unsynced = job.unsynced();
    let seconds = [allocated, written - allocated, synced - written];
    Ok(Written { shards, tensors, unsynced, ran, seconds })
}

/// Has the caller's callback write the blocks that it can, before the workers write the rest. They make the files durable,
/// also what was written here: every shard has a block for them, that of its header.
fn store(
    work: &mut Whole<'_>,
    part: &Part<'_>,
    workspace: &Workspace,
    options: &Options,
    operation: &Operation,
    tick: Tick<'_>,
) -> Result<Moved> {
    let Some(direct) = &options.direct else { return Ok(Moved::default()) };
    let (plan, inside) = (part.plan, work.inside(direct));
    let candidates = inside.iter().map(|&(block, extent, shard)| Candidate {
        block,
        stretch: Stretch {
            index: work.index_of(extent.tensor),
            start: extent.start,
            path: direct::path_of(workspace.directory(), &plan.shards[shard].file),
            offset: extent.offset,
            len: extent.len,
        },
        file: shard,
    });
    let planned = Planned {
        bytes: part.shards().map(|shard| shard.bytes).sum(),
        files: part.shards.len(),
        block_size: plan.block_size,
        threads: direct::THREADS,
        queue_depth: 1,
    };
    workspace.check_open()?;
    let (sums, phase) = ((plan.block_size, true), (operation, Phase::Write, &planned));
    let moved = direct::run(&direct.mover, candidates.collect(), sums, options.bandwidth_limit, phase, tick)?;
    work.moved(&inside, &moved);
    Ok(moved)
}

/// Creates `shards` with their final sizes.
pub(crate) fn allocate<'a>(
    shards: impl Iterator<Item = &'a Shard> + Clone,
    workspace: &Workspace,
    tick: Tick<'_>,
) -> Result<()> {
    let total = shards.clone().map(|shard| shard.bytes).sum();
    let mut last = Instant::now();
    let mut go_on = || {
        let late = last.elapsed() >= TICK;
        last = if late { Instant::now() } else { last };
        !late || tick(0, total)
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
