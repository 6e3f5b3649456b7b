//! Saving: plan, write, sync, commit.

mod job;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::value::RawValue;

use self::job::WriteJob;
use crate::commit::{Index, Workspace};
use crate::crew::Crew;
use crate::error::{Error, Result};
use crate::manifest::{self, Saved};
use crate::options::{BLOCK_SIZE, Options};
use crate::plan::{self, TensorSpec};
use crate::report::Report;
use crate::source::Content;
use crate::sys::file::DataFile;
use crate::telemetry::{self, Kind, Operation, Phase};
use crate::worker::{self, Job as _, Tick};

/// What is to be saved, beside the tensors' content.
#[derive(Debug)]
pub struct Request<'a> {
    /// The checkpoint's directory.
    pub path: &'a Path,
    /// The tensors.
    pub tensors: &'a [TensorSpec],
    /// Where each lies.
    pub contents: &'a [Content],
    /// The state's structure: an array of tokens, JSON.
    pub structure: &'a str,
    /// The caller's metadata: likewise.
    pub metadata: &'a str,
    /// Whether a checkpoint of this name may be replaced.
    pub overwrite: bool,
    /// Target size of a shard in bytes.
    pub shard_size: u64,
}

/// Writes a checkpoint. When this returns it is durable and visible; when it fails nothing of it is left, and what was
/// there before is untouched. The one exception: if only the very last step fails, the sync of the parent directory after the rename,
/// the new checkpoint has the name, but may not survive a power cut.
pub fn save(request: &Request<'_>, options: &Options, tick: Tick<'_>) -> Result<Report> {
    let operation = Operation::begin(Kind::Save, request.path, options);
    let outcome = write(request, options, &operation, tick);
    operation.end(telemetry::outcome(&outcome));
    outcome
}

fn write(request: &Request<'_>, options: &Options, operation: &Operation, tick: Tick<'_>) -> Result<Report> {
    let begin = Instant::now();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let structure = tokens("structure", request.structure)?;
    let metadata = tokens("metadata", request.metadata)?;
    if request.contents.len() != request.tensors.len() {
        return Err(Error::Invalid("each tensor needs its content".to_owned()));
    }
    let total =
        request.tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.bytes().unwrap_or(0)));
    let mut crew = Crew::choose(options, total);
    let block_size = options.block_size.unwrap_or(BLOCK_SIZE);
    let plan = plan::plan(request.tensors, request.shard_size, crew.threads, block_size)?;
    let workspace = Workspace::create(request.path, request.overwrite)?;
    for shard in &plan.shards {
        DataFile::create(workspace.directory(), &shard.file, shard.bytes)
            .map_err(Error::io("allocate", &workspace.path_of(&shard.file)))?;
    }
    let planned = begin.elapsed().as_secs_f64();

    let job = WriteJob::new(&plan, request, &workspace, &crew, options, begin);
    let moved = worker::run(&job, &mut crew, options, plan.block_size, operation, &mut *tick)?;
    operation.phase(Phase::Fsync);
    let moving = begin.elapsed().as_secs_f64();
    let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(planned, moving);

    let bytes = plan.shards.iter().map(|shard| shard.bytes - shard.header.len() as u64).sum();
    let saved = Saved {
        engine: crew.engine.name().to_owned(),
        fallback: crew.fallback.as_ref().map(|fallback| fallback.reason.clone()),
        threads: crew.threads as u64,
        seconds: moving,
        gigabytes_per_second: bytes as f64 / moving.max(1e-9) / 1e9,
    };
    let body = job.body(created, saved, structure, metadata);
    if !job.leaves_a_sync() {
        operation.phase(Phase::Commit);
    }
    let index = match body.shards.len() {
        0 | 1 => None,
        _ => Some(workspace.write_index(&manifest::encode_index(&body)?)?),
    };
    workspace.write_manifest(&manifest::encode(&body)?)?;
    let rest = Instant::now();
    job.sync(operation)?;
    let rest = rest.elapsed().as_secs_f64();
    operation.phase(Phase::Commit);
    index.map_or(Ok(()), Index::sync)?;
    workspace.sync_manifest()?;
    let total = job.total();
    // The shards are closed: should the commit fail, NFS and FUSE would only rename what is open, and its directory stays.
    drop(job);
    // From here on it is quick, and cannot be stopped half-way.
    if !tick(total, total) {
        return Err(Error::Interrupted);
    }
    let shards = plan.shards.iter().map(|shard| (shard.file.as_str(), shard.bytes));
    let committed = workspace.commit(shards)?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok(Report {
        bytes,
        phases: vec![
            ("plan", planned),
            ("write", written - planned),
            ("fsync", moving - written + rest),
            ("commit", seconds - moving - rest),
        ],
        seconds,
        threads: crew.threads,
        engine: crew.engine,
        fallback: crew.fallback,
        warnings: committed.warnings(),
        blocks: moved.blocks,
        copied: moved.copied,
        shards: plan.shards.len(),
        tensors: request.tensors.len(),
    })
}

fn tokens(what: &str, json: &str) -> Result<Box<RawValue>> {
    manifest::check_tokens(what, json).map_err(Error::Invalid)?;
    RawValue::from_string(json.to_owned()).map_err(|error| Error::Invalid(format!("{what}: {error}")))
}
