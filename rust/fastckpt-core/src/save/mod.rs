//! Saving, in three steps. One or several processes can take them one by one: [`write_shards`] writes files into a
//! workspace, [`seal`] completes it with index and manifest, and [`Workspace::publish`] gives it the checkpoint's name.
//! [`save`] takes all three.

mod assemble;
pub(crate) mod base;
pub(crate) mod compare;
mod finish;
pub(crate) mod job;
mod part;
pub(crate) mod shards;
mod whole;
pub(crate) mod work;

use std::borrow::Cow;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::value::RawValue;

use self::base::{LinkedShards, State};
pub use self::finish::{Committed, Figures, seal};
pub(crate) use self::finish::{Finish, finish};
pub use self::part::{Bytes, Part, Unsynced};
pub use self::shards::{Written, write_shards};
pub(crate) use self::whole::{shard_entry, tensor_entry, whole_xz};
use crate::commit::Workspace;
use crate::engine::content::Content;
use crate::engine::job::Progress;
use crate::engine::options::{BLOCK_SIZE, Options};
use crate::engine::report::Report;
use crate::error::{Error, Result};
use crate::format::geometry;
use crate::format::groups::Group;
use crate::format::layout::{self, Plan, Sizes, TensorSpec};
use crate::format::limits::MAX_BYTES;
use crate::format::manifest::{self, Body, Saved, Vouched, Writer};
use crate::format::tokens;
use crate::sys::mapping::Stretch;
use crate::telemetry::{self, Kind, Operation};

/// The bytes to save.
#[derive(Debug, Clone, Copy)]
pub enum Contents<'a> {
    /// Tensors, each with its own contents.
    Tensors(&'a [Content]),
    /// The shards of a plan as they will be on the disk, in memory that cannot change. The plan must match the request.
    Images(&'a Plan, &'a [Stretch]),
}

/// A request for a save.
#[derive(Debug)]
pub struct Request<'a> {
    /// The checkpoint's directory.
    pub path: &'a Path,
    /// The tensors.
    pub tensors: &'a [TensorSpec],
    /// The groups of files over which the tensors are laid out.
    pub groups: &'a [Group],
    /// The size of a shard in bytes.
    pub shard_size: u64,
    /// The bytes of the tensors.
    pub contents: Contents<'a>,
    /// An earlier checkpoint, whose unchanged files this checkpoint links.
    pub base: Option<&'a Path>,
    /// For each tensor, whether it is declared to stay unchanged in later saves. Empty if nothing is declared.
    pub frozen: &'a [bool],
    /// The structure of the state: a JSON array of tokens.
    pub structure: &'a str,
    /// The caller's metadata, also a JSON array of tokens.
    pub metadata: &'a str,
    /// Further files for the checkpoint's directory, by name and content.
    pub files: &'a [(&'a str, &'a [u8])],
    /// Whether a checkpoint of this name may be replaced.
    pub overwrite: bool,
}

/// Writes a checkpoint. If this succeeds, the checkpoint is durable and visible. If it fails, no trace of it is left,
/// and the old checkpoint is unchanged, with one exception: if only the final sync of the parent directory fails, the
/// new checkpoint already has the name, but may not survive a power cut.
pub fn save(request: &Request<'_>, options: &Options, progress: Progress<'_>) -> Result<Report> {
    let operation = options.operation(Kind::Save, request.path);
    let outcome = write(request, options, &operation, progress, MAX_BYTES);
    operation.end(telemetry::outcome(&outcome));
    outcome
}

/// Saves like [`save`], with a manifest of at most `most` bytes.
fn write(
    request: &Request<'_>,
    options: &Options,
    operation: &Operation,
    progress: Progress<'_>,
    most: u64,
) -> Result<Report> {
    let begin = Instant::now();
    let (tensors, texts) = (request.tensors, [request.structure, request.metadata, ""]);
    let (first, given) = request.lay_out(options)?;
    let body = empty_body(since_1970(), first.block_size, texts)?;
    check_size(&first, tensors, texts, most)?;
    let workspace = Workspace::create(request.path, request.overwrite)?;
    let planned = begin.elapsed().as_secs_f64();

    let (contents, linked, second) = request.compare(&workspace, (&first, given), options, &mut *progress)?;
    if let Some(second) = &second {
        check_size(second, tensors, texts, most)?;
        LinkedShards::name_linked_shards(&workspace, second)?;
    }
    let (plan, bytes) = second.as_ref().map_or((&*first, given), |plan| (plan, Bytes::Tensors(&contents)));
    let compared = begin.elapsed().as_secs_f64() - planned;

    let shards: Vec<usize> =
        (0..plan.shards.len()).filter(|&index| plan.shards[index].linked.is_none()).collect();
    let part = Part { plan, tensors, bytes, shards: &shards };
    let written = write_shards(&workspace, &part, options, operation, &mut *progress)?;
    let Written { shards, tensors, ran, unsynced, seconds: [allocated, wrote, synced] } = written;

    let figures = Figures {
        engine: ran.engine.name().to_owned(),
        fallback: ran.fallback.as_ref().map(|fallback| fallback.reason.clone()),
        threads: ran.threads as u64,
        seconds: planned + compared + allocated + wrote + synced,
        options: options.kept.clone(),
    };
    let moving = figures.seconds;
    let (linked, written) = (&linked, (shards, tensors));
    let end = Finish { body, plan, linked, written, joint: false, files: request.files, figures, unsynced };
    let (committed, displaced) = finish(workspace, end, operation, progress)?;
    // The old checkpoint is removed before the save ends.
    drop(displaced);
    let seconds = begin.elapsed().as_secs_f64();
    let mut phases = vec![
        ("plan", planned + allocated + if request.base.is_some() { 0.0 } else { compared }),
        ("write", wrote),
        ("fsync", synced + committed.synced),
        ("commit", seconds - moving - committed.synced),
    ];
    if request.base.is_some() {
        phases.insert(1, ("compare", compared));
    }
    let Committed { bytes, warnings, shards, tensors, linked, .. } = committed;
    Ok(Report { bytes, phases, seconds, ran, warnings, shards, tensors, linked })
}

/// Seconds since 1970.
pub(crate) fn since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl<'a> Request<'a> {
    /// The layout of a save that links nothing, and the bytes of its shards.
    fn lay_out(&self, options: &Options) -> Result<(Cow<'a, Plan>, Bytes<'a>)> {
        Ok(match self.contents {
            Contents::Tensors(contents) => {
                let block = options.block_size.unwrap_or(BLOCK_SIZE);
                let sizes = Sizes { shard: self.shard_size, block };
                let reuse = layout::Reuse { unchanged: self.frozen, linked: &[] };
                let plan = layout::lay_out(self.tensors, self.groups, sizes, &reuse)?;
                (Cow::Owned(plan), Bytes::Tensors(contents))
            }
            Contents::Images(plan, images) => (Cow::Borrowed(plan), Bytes::Images(images)),
        })
    }

    /// Links the unchanged files of a base. Returns the tensors' contents, the linked files, and the new layout if it
    /// differs from `first`.
    fn compare(
        &self,
        workspace: &Workspace,
        (first, given): (&Plan, Bytes<'a>),
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<(Cow<'a, [Content]>, LinkedShards, Option<Plan>)> {
        let Some(base) = self.base else { return Ok((Cow::default(), LinkedShards::default(), None)) };
        let &Self { tensors, groups, shard_size, frozen, .. } = self;
        let (state, block) = (State { tensors, groups, shard_size, frozen }, first.block_size);
        let contents = contents_of(&given, tensors, first)?;
        let linked = LinkedShards::find(workspace, (&state, &contents), base, block, options, progress)?;
        let lay_out =
            || layout::lay_out(tensors, groups, Sizes { shard: shard_size, block }, &linked.reuse());
        let second = linked.changes_layout(&state).then(lay_out).transpose()?;
        Ok((contents, linked, second))
    }
}

/// The tensors as contents. If the shards are images, each tensor is at its place in an image.
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

/// A manifest without shards and tensors. `texts` are the structure, the metadata and the states that ranks saved for
/// themselves. If the last text is empty, it is left out.
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

/// Refuses a state whose manifest would have more than `most` bytes. `texts` are the arguments of [`empty_body`].
pub(crate) fn check_size(plan: &Plan, tensors: &[TensorSpec], texts: [&str; 3], most: u64) -> Result<()> {
    // A cheap bound is enough for nearly all states.
    if manifest::at_most(tensors, plan, texts) <= most {
        return Ok(());
    }
    let shards = plan.shards.iter().map(|shard| shard_entry(shard, 0));
    let tensors = tensors.iter().zip(&plan.places).map(|(tensor, &place)| {
        let extents = geometry::extent_count(place.1, tensor.bytes().unwrap_or(0), plan.block_size);
        tensor_entry(tensor, place, (&"0".repeat(16 * extents as usize), &"0".repeat(16)))
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
