//! Saving, in three steps. They can be taken one by one, also by several processes: [`write_shards`] writes files into
//! a workspace, [`seal`] completes it with index and manifest, and [`Workspace::publish`] gives it the checkpoint's
//! name. [`save`] takes all three.

mod assemble;
pub(crate) mod base;
pub(crate) mod compare;
pub(crate) mod job;
mod part;
pub(crate) mod shards;
mod whole;
pub(crate) mod work;

use std::borrow::Cow;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::value::RawValue;

use self::base::Beside;
pub use self::base::Reuse;
pub use self::part::{Bytes, Part, Unsynced};
pub use self::shards::{Written, write_shards};
pub(crate) use self::whole::{shard_entry, tensor_entry, whole_xz};
use crate::commit::Workspace;
use crate::engine::content::Content;
use crate::engine::job::Tick;
use crate::engine::options::{BLOCK_SIZE, Options};
use crate::engine::report::Report;
use crate::error::{Error, Result};
use crate::format::geometry;
use crate::format::groups::Group;
use crate::format::index;
use crate::format::layout::{self, Plan, Shard, TensorSpec};
use crate::format::limits::MAX_BYTES;
use crate::format::manifest::{self, Body, Saved, ShardEntry, TensorEntry, Vouched, Writer};
use crate::format::tokens;
use crate::sys::mapping::Stretch;
use crate::telemetry::{self, Kind, Operation, Phase};

/// The bytes to save.
#[derive(Debug, Clone, Copy)]
pub enum Contents<'a> {
    /// Tensors, each where it lies. They are laid out over the files of these groups, of this target size in bytes.
    Tensors(&'a [Content], &'a [Group], u64),
    /// The shards of a plan as they will be on the disk. They cannot change.
    Images(&'a Plan, &'a [Stretch]),
}

/// What to save.
#[derive(Debug)]
pub struct Request<'a> {
    /// The checkpoint's directory.
    pub path: &'a Path,
    /// The tensors.
    pub tensors: &'a [TensorSpec],
    /// Their bytes.
    pub contents: Contents<'a>,
    /// What of an earlier checkpoint may become part of this one.
    pub reuse: Option<Reuse<'a>>,
    /// The structure of the state: a JSON array of tokens.
    pub structure: &'a str,
    /// The caller's metadata: also a JSON array of tokens.
    pub metadata: &'a str,
    /// Further files for the checkpoint's directory, by name and content.
    pub files: &'a [(&'a str, &'a [u8])],
    /// Whether a checkpoint of this name may be replaced.
    pub overwrite: bool,
}

/// Writes a checkpoint. When this succeeds, the checkpoint is durable and visible. When it fails, nothing of it is
/// left, and what was there before is untouched. There is one exception: if only the very last step fails, the sync of
/// the parent directory after the rename, the new checkpoint has the name but may not survive a power cut.
pub fn save(request: &Request<'_>, options: &Options, tick: Tick<'_>) -> Result<Report> {
    let operation = options.operation(Kind::Save, request.path);
    let outcome = write(request, options, &operation, tick, MAX_BYTES);
    operation.end(telemetry::outcome(&outcome));
    outcome
}

/// A save whose manifest may have at most `most` bytes.
fn write(
    request: &Request<'_>,
    options: &Options,
    operation: &Operation,
    tick: Tick<'_>,
    most: u64,
) -> Result<Report> {
    let begin = Instant::now();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let texts = [request.structure, request.metadata, ""];
    let tensors = request.tensors;
    let (plan, bytes) = match request.contents {
        Contents::Tensors(contents, groups, shard_size) => {
            let block_size = options.block_size.unwrap_or(BLOCK_SIZE);
            let plan = layout::plan(tensors, groups, shard_size, block_size)?;
            (Cow::Owned(plan), Bytes::Tensors(contents))
        }
        Contents::Images(plan, images) => (Cow::Borrowed(plan), Bytes::Images(images)),
    };
    let body = empty_body(created, plan.block_size, texts)?;
    check_size(&plan, tensors, texts, most)?;
    let mut workspace = Workspace::create(request.path, request.overwrite)?;
    let planned = begin.elapsed().as_secs_f64();
    let (mut plan, mut bytes, mut beside) = (plan, bytes, Beside::default());
    let contents;
    if let Some(reuse) = &request.reuse {
        contents = contents_of(&bytes, tensors, &plan)?;
        beside = Beside::find(&workspace, (tensors, &contents), reuse, plan.block_size, options, &mut *tick)?;
        if beside.is_apart() {
            let sizes = (reuse.shard_size, plan.block_size);
            plan = Cow::Owned(layout::plan_apart(tensors, reuse.groups, sizes, &beside.apart())?);
            bytes = Bytes::Tensors(&contents);
            check_size(&plan, tensors, texts, most)?;
        }
    }
    let plan = &*plan;
    Beside::settle(&workspace, plan)?;
    let compared = begin.elapsed().as_secs_f64() - planned;
    let shards: Vec<usize> =
        (0..plan.shards.len()).filter(|&index| plan.shards[index].taken.is_none()).collect();
    let part = Part { plan, tensors, bytes, shards: &shards };

    let written = write_shards(&workspace, &part, options, operation, &mut *tick)?;
    let Written { ran, unsynced, seconds: [allocated, wrote, synced], .. } = written;
    let moving = planned + compared + allocated + wrote + synced;

    let bytes = part.total();
    let saved = Saved {
        engine: ran.engine.name().to_owned(),
        fallback: ran.fallback.as_ref().map(|fallback| fallback.reason.clone()),
        threads: ran.threads as u64,
        seconds: moving,
        gigabytes_per_second: bytes as f64 / moving.max(1e-9) / 1e9,
        files: beside.vouched(&workspace, plan),
    };
    let (shards, entries) = united(plan, &beside, written.shards, written.tensors);
    let body = Body { saved, shards, tensors: entries, ..body };
    let rest = seal(&mut workspace, &body, request.files, unsynced, operation)?;
    let total = part.shards().map(|shard| shard.bytes).sum();
    // The rest is quick and cannot be stopped half-way.
    if !tick(total, total) {
        return Err(Error::Interrupted);
    }
    let published = workspace.publish()?;
    let linked = beside.linked();
    let seconds = begin.elapsed().as_secs_f64();
    let has_base = request.reuse.is_some_and(|reuse| reuse.base.is_some());
    let mut phases = vec![
        ("plan", planned + allocated + if has_base { 0.0 } else { compared }),
        ("write", wrote),
        ("fsync", synced + rest),
        ("commit", seconds - moving - rest),
    ];
    if has_base {
        phases.insert(1, ("compare", compared));
    }
    Ok(Report {
        bytes,
        phases,
        seconds,
        ran,
        warnings: [beside.warnings, published.warnings()].concat(),
        shards: plan.shards.len(),
        tensors: tensors.len(),
        linked,
    })
}

/// The tensors as contents: the images of a plan have them, each at its place.
fn contents_of<'a>(bytes: &Bytes<'a>, tensors: &[TensorSpec], plan: &Plan) -> Result<Cow<'a, [Content]>> {
    let images = match *bytes {
        Bytes::Tensors(contents) => return Ok(Cow::Borrowed(contents)),
        Bytes::Images(images) => images,
    };
    let places = tensors.iter().zip(&plan.places).map(|(tensor, &(shard, offset))| {
        let range = offset as usize..(offset + tensor.bytes().unwrap_or(0)) as usize;
        images.get(shard).and_then(|image| image.part(range)).map(Content::Image)
    });
    places.collect::<Option<Vec<_>>>().map(Cow::Owned).ok_or_else(Content::too_short)
}

/// The entries of all shards and tensors of a plan: those of `beside` for what was taken over, the others as they were
/// written.
pub(crate) fn united(
    plan: &Plan,
    beside: &Beside,
    shards: Vec<ShardEntry>,
    tensors: Vec<TensorEntry>,
) -> (Vec<ShardEntry>, Vec<TensorEntry>) {
    let (mut shards, mut tensors) = (shards.into_iter(), tensors.into_iter());
    let shard = |shard: &Shard| match shard.taken {
        Some(number) => Some(ShardEntry { file: shard.file.clone(), ..beside.entries[number].clone() }),
        None => shards.next(),
    };
    let tensor = |(index, &(shard, _)): (usize, &(usize, u64))| match plan.shards[shard].taken {
        Some(_) => beside.tensors[index].clone().map(|entry| TensorEntry { shard, ..entry }),
        None => tensors.next(),
    };
    let all = plan.shards.iter().filter_map(shard).collect();
    (all, plan.places.iter().enumerate().filter_map(tensor).collect())
}

/// The second step: completes `workspace` with the caller's `files`, and with the index and the manifest for `body`.
/// Makes them durable, together with the shard that the first step left `unsynced`. Returns the seconds that the sync of
/// that shard took. Refuses a body with a missing shard.
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
    // A file system that has both the shard and its manifest to write makes them durable together.
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

/// A manifest without shards and tensors. `texts` are the structure, the metadata and what each rank has for itself;
/// the last may be empty, and is left out then.
pub(crate) fn empty_body(
    created: f64,
    block_size: u64,
    [structure, metadata, per_rank]: [&str; 3],
) -> Result<Body> {
    Ok(Body {
        min_reader: 0,
        writer: Writer { name: "fastckpt".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() },
        created,
        saved: Saved::default(),
        block_size,
        shards: Vec::new(),
        tensors: Vec::new(),
        structure: tokens("structure", structure)?,
        metadata: tokens("metadata", metadata)?,
        per_rank: if per_rank.is_empty() { None } else { Some(tokens("per_rank", per_rank)?) },
    })
}

/// Refuses a state whose manifest would have more than `most` bytes. `texts` are those of [`empty_body`].
pub(crate) fn check_size(plan: &Plan, tensors: &[TensorSpec], texts: [&str; 3], most: u64) -> Result<()> {
    // A cheap bound settles it for nearly all states.
    if manifest::at_most(tensors, plan, texts) <= most {
        return Ok(());
    }
    let shards = plan.shards.iter().map(|shard| shard_entry(shard, 0));
    let tensors = tensors.iter().zip(&plan.places).map(|(tensor, &place)| {
        let extents = geometry::extent_count(place.1, tensor.bytes().unwrap_or(0), plan.block_size);
        let crc64xz = "0".repeat(16);
        TensorEntry { crc64xz, ..tensor_entry(tensor, place, "0".repeat(16 * extents as usize)) }
    });
    let mut body = empty_body(0.0, plan.block_size, texts)?;
    body.saved.files =
        vec![Vouched { modified: i64::MIN, links: u64::MAX, inode: u64::MAX }; plan.shards.len()];
    manifest::check_size(&Body { shards: shards.collect(), tensors: tensors.collect(), ..body }, most)
}

fn tokens(what: &str, json: &str) -> Result<Box<RawValue>> {
    tokens::check(what, json).map_err(Error::Invalid)?;
    RawValue::from_string(json.to_owned()).map_err(|error| Error::Invalid(format!("{what}: {error}")))
}

#[cfg(test)]
pub(crate) mod tests;
