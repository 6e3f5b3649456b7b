//! The end of a save: the files get an index and a manifest, become durable, and get the checkpoint's name.

use std::time::Instant;

use super::base::LinkedShards;
use super::part::Unsynced;
use crate::commit::{Displaced, Workspace};
use crate::engine::job::Progress;
use crate::engine::report::Linked;
use crate::error::{Error, Result};
use crate::format::decode;
use crate::format::index;
use crate::format::layout::Plan;
use crate::format::manifest::{self, Body, Saved, ShardEntry, TensorEntry};
use crate::sys::calls;
use crate::telemetry::{Operation, Phase};

/// The figures of a save.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    /// The engine.
    pub engine: String,
    /// Why the engine is not the requested one.
    pub fallback: Option<String>,
    /// Worker threads.
    pub threads: u64,
    /// Seconds from the start of the save to the last byte.
    pub seconds: f64,
    /// The options of the call that the manifest records: names and texts.
    pub options: Vec<(String, String)>,
}

/// The result of a commit.
#[derive(Debug, Clone, PartialEq)]
pub struct Committed {
    /// The number of bytes of all tensors that were written.
    pub bytes: u64,
    /// Seconds that the commit took, without the seconds in which a shard became durable.
    pub seconds: f64,
    /// Seconds in which a shard became durable.
    pub synced: f64,
    /// Warnings for the caller.
    pub warnings: Vec<String>,
    /// Number of shards.
    pub shards: usize,
    /// Number of tensors.
    pub tensors: usize,
    /// The files that the checkpoint links from an earlier one.
    pub linked: Linked,
}

/// Shards in a workspace, and what makes them a checkpoint.
pub(crate) struct Finish<'a> {
    /// The manifest, without shards and tensors.
    pub(crate) body: Body,
    pub(crate) plan: &'a Plan,
    /// The linked part of the plan, which was not written.
    pub(crate) linked: &'a LinkedShards,
    /// The entries of the written shards and tensors.
    pub(crate) written: (Vec<ShardEntry>, Vec<TensorEntry>),
    /// Whether several processes wrote the shards. If so, the manifest is checked as by a load.
    pub(crate) joint: bool,
    /// Further files for the checkpoint's directory, by name and content.
    pub(crate) files: &'a [(&'a str, &'a [u8])],
    pub(crate) figures: Figures,
    /// A shard that is not durable yet.
    pub(crate) unsynced: Option<Unsynced>,
}

/// Completes `workspace` and gives it the checkpoint's name. Until then, a failure leaves the old checkpoint unchanged.
/// The replaced checkpoint is removed when the second value is dropped.
pub(crate) fn finish(
    mut workspace: Workspace,
    end: Finish<'_>,
    operation: &Operation,
    progress: Progress<'_>,
) -> Result<(Committed, Displaced)> {
    let begin = Instant::now();
    let Finish { body, plan, linked, written, joint, files, figures, unsynced } = end;
    let bytes = plan.written().map(|shard| shard.bytes - shard.header.len() as u64).sum();
    let Figures { engine, fallback, threads, seconds, options } = figures;
    let gigabytes_per_second = bytes as f64 / seconds.max(1e-9) / 1e9;
    let vouched = linked.vouched(&workspace, plan);
    let saved = Saved { engine, fallback, threads, seconds, gigabytes_per_second, options, files: vouched };
    let (shards, tensors) = linked.united(plan, written);
    let body = Body { saved, shards, tensors, ..body };
    if joint {
        decode::check(&body)
            .map_err(|what| Error::Invalid(format!("no load would accept this save: {what}")))?;
    }
    let reused = linked.linked();
    operation.linked(reused.bytes);
    let synced = seal(&mut workspace, &body, files, unsynced, operation)?;
    let total = plan.written().map(|shard| shard.bytes).sum();
    // The remaining steps are quick and cannot be stopped halfway.
    if !progress(total, total) {
        return Err(Error::Interrupted);
    }
    calls::final_calls();
    let (published, displaced) = workspace.publish_beside_old()?;
    let committed = Committed {
        bytes,
        seconds: begin.elapsed().as_secs_f64() - synced,
        synced,
        warnings: [linked.warnings.clone(), published.warnings()].concat(),
        shards: plan.shards.len(),
        tensors: plan.places.len(),
        linked: reused,
    };
    Ok((committed, displaced))
}

/// The second step of a save: completes `workspace` with the caller's `files`, and with the index and the manifest for
/// `body`. Makes them durable, together with the shard that the first step left `unsynced`. Returns the seconds that
/// the sync of that shard took. Refuses a body with a missing shard.
pub fn seal(
    workspace: &mut Workspace,
    body: &Body,
    files: &[(&str, &[u8])],
    unsynced: Option<Unsynced>,
    operation: &Operation,
) -> Result<f64> {
    if unsynced.is_none() {
        operation.phase(Phase::Commit);
    }
    let shards = body.shards.iter().map(|shard| (shard.file.clone(), shard.bytes)).collect();
    let index_file = index::encode(body)?;
    let files: Vec<_> = files.iter().copied().chain([(index::FILE, index_file.as_slice())]).collect();
    let mut rest = 0.0;
    // A file system that must write both the shard and its manifest makes them durable together.
    workspace.seal(shards, &files, &manifest::encode(body)?, || {
        let begin = Instant::now();
        // This also closes the file. If the commit failed while the file was open, NFS and FUSE would only rename it,
        // and its directory would stay.
        unsynced.map_or(Ok(()), |unsynced| unsynced.sync(operation))?;
        rest = begin.elapsed().as_secs_f64();
        operation.phase(Phase::Commit);
        Ok(())
    })?;
    Ok(rest)
}
