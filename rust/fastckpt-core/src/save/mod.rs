//! Saving: plan, write, sync, commit.

mod job;

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::value::RawValue;

use self::job::WriteJob;
use crate::commit::{Index, Workspace};
use crate::engine::choice::Choice;
use crate::engine::content::Content;
use crate::engine::job::{Job as _, TICK, Tick};
use crate::engine::options::{BLOCK_SIZE, Options};
use crate::engine::report::Report;
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::groups::Group;
use crate::format::index;
use crate::format::layout::{self, Plan, TensorSpec};
use crate::format::limits::MAX_BYTES;
use crate::format::manifest::{self, Saved};
use crate::format::tokens;
use crate::sys::file::DataFile;
use crate::sys::mapping::Stretch;
use crate::telemetry::{self, Kind, Operation, Phase};

/// The bytes to be saved.
#[derive(Debug, Clone, Copy)]
pub enum Contents<'a> {
    /// Tensors, each where it lies. They are laid out over the files of these groups, of this target size in bytes.
    Tensors(&'a [Content], &'a [Group], u64),
    /// The shards of a plan as they will be on the disk. Nobody can change them.
    Images(&'a Plan, &'a [Stretch]),
}

/// What is to be saved.
#[derive(Debug)]
pub struct Request<'a> {
    /// The checkpoint's directory.
    pub path: &'a Path,
    /// The tensors.
    pub tensors: &'a [TensorSpec],
    /// Their bytes.
    pub contents: Contents<'a>,
    /// The state's structure: an array of tokens, JSON.
    pub structure: &'a str,
    /// The caller's metadata: likewise.
    pub metadata: &'a str,
    /// Whether a checkpoint of this name may be replaced.
    pub overwrite: bool,
}

/// Writes a checkpoint. When this returns it is durable and visible; when it fails nothing of it is left, and what was
/// there before is untouched. The one exception: if only the very last step fails, the sync of the parent directory after the rename,
/// the new checkpoint has the name, but may not survive a power cut.
pub fn save(request: &Request<'_>, options: &Options, tick: Tick<'_>) -> Result<Report> {
    let operation = Operation::begin(Kind::Save, request.path, options.step, &options.environment);
    let outcome = write(request, options, &operation, tick, MAX_BYTES);
    operation.end(telemetry::outcome(&outcome));
    outcome
}

/// A save whose manifest may have `most` bytes.
fn write(
    request: &Request<'_>,
    options: &Options,
    operation: &Operation,
    tick: Tick<'_>,
    most: u64,
) -> Result<Report> {
    let begin = Instant::now();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let structure = tokens("structure", request.structure)?;
    let metadata = tokens("metadata", request.metadata)?;
    let total =
        request.tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.bytes().unwrap_or(0)));
    let choice = Choice::new(options, total);
    let block_size = options.block_size.unwrap_or(BLOCK_SIZE);
    let plan = match request.contents {
        Contents::Tensors(contents, ..) if contents.len() != request.tensors.len() => {
            return Err(Error::Invalid("each tensor needs its content".to_owned()));
        }
        Contents::Tensors(_, groups, shard_size) => {
            Cow::Owned(layout::plan(request.tensors, groups, shard_size, block_size)?)
        }
        Contents::Images(plan, _) => Cow::Borrowed(plan),
    };
    let workspace = Workspace::create(request.path, request.overwrite)?;
    let job = WriteJob::new(&plan, request, &workspace, &choice, options, begin);
    let at_most = manifest::at_most(request.tensors, &plan, request.structure, request.metadata);
    manifest::check_size(at_most, most, || {
        job.body(created, Saved::default(), structure.clone(), metadata.clone())
    })?;
    allocate(&plan, &workspace, begin, &mut *tick)?;
    let planned = begin.elapsed().as_secs_f64();

    let ran = run(&job, &choice, options, plan.block_size, operation, &mut *tick)?;
    operation.phase(Phase::Fsync);
    let moving = begin.elapsed().as_secs_f64();
    let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(planned, moving);

    let bytes = plan.shards.iter().map(|shard| shard.bytes - shard.header.len() as u64).sum();
    let saved = Saved {
        engine: ran.engine.name().to_owned(),
        fallback: ran.fallback.as_ref().map(|fallback| fallback.reason.clone()),
        threads: ran.threads as u64,
        seconds: moving,
        gigabytes_per_second: bytes as f64 / moving.max(1e-9) / 1e9,
    };
    let body = job.body(created, saved, structure, metadata);
    if !job.leaves_a_sync() {
        operation.phase(Phase::Commit);
    }
    let index = match body.shards.len() {
        0 | 1 => None,
        _ => Some(workspace.write_index(&index::encode(&body)?)?),
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
        ran,
        warnings: committed.warnings(),
        shards: plan.shards.len(),
        tensors: request.tensors.len(),
    })
}

/// Creates the shards with their final sizes.
fn allocate(plan: &Plan, workspace: &Workspace, begin: Instant, tick: Tick<'_>) -> Result<()> {
    let mut last = begin;
    let mut go_on = || {
        let late = last.elapsed() >= TICK;
        last = if late { Instant::now() } else { last };
        !late || tick(0, plan.shards.iter().map(|shard| shard.bytes).sum())
    };
    for shard in &plan.shards {
        DataFile::create(workspace.directory(), &shard.file, shard.bytes, &mut go_on).map_err(|error| {
            match error.kind() {
                ErrorKind::Interrupted => Error::Interrupted,
                _ => Error::io("allocate", &workspace.path_of(&shard.file))(error),
            }
        })?;
    }
    Ok(())
}

fn tokens(what: &str, json: &str) -> Result<Box<RawValue>> {
    tokens::check(what, json).map_err(Error::Invalid)?;
    RawValue::from_string(json.to_owned()).map_err(|error| Error::Invalid(format!("{what}: {error}")))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use safetensors::Dtype;

    use super::*;
    use crate::format::geometry::PAGE;
    use crate::format::groups;

    /// Tensors whose names need escapes, of several extents, and of a type that has to be told; and how often one was read.
    fn state() -> (Vec<TensorSpec>, Vec<Content>, Arc<AtomicUsize>) {
        let spec = |name: &str, bytes: u64| TensorSpec {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![bytes, 1, 1],
            logical: Some(("torch.\"complex128\"".to_owned(), vec![1; 64])),
        };
        let specs = vec![spec("\u{1}\u{2}\u{3}\n\"\\", 9 << 20), spec("empty", 0), spec(&"x".repeat(500), 3)];
        let read = Arc::new(AtomicUsize::new(0));
        let fill = |read: &Arc<AtomicUsize>| {
            let read = Arc::clone(read);
            Content::Pull(Arc::new(move |_, to: &mut [u8]| {
                read.fetch_add(1, Ordering::Relaxed);
                to.fill(1);
                Ok(())
            }))
        };
        let contents = specs.iter().map(|_| fill(&read)).collect();
        (specs, contents, read)
    }

    #[test]
    fn a_manifest_that_would_be_too_large_is_refused_before_the_first_byte() {
        let parent = tempfile::tempdir().unwrap();
        let (tensors, contents, read) = state();
        let path = parent.path().join("c");
        let request = Request {
            path: &path,
            tensors: &tensors,
            contents: Contents::Tensors(&contents, &groups::of(""), 8 << 20),
            structure: r#"[["list",1],"0123456789"]"#,
            metadata: "[null]",
            overwrite: true,
        };
        let save = |most| {
            let options = Options { block_size: Some(PAGE), ..Options::default() };
            let operation = Operation::begin(Kind::Save, &path, None, &options.environment);
            let outcome = write(&request, &options, &operation, &mut |_, _| true, most);
            operation.end(telemetry::outcome(&outcome));
            outcome
        };
        save(MAX_BYTES).unwrap();
        let len = std::fs::metadata(path.join(manifest::FILE)).unwrap().len();
        std::fs::remove_dir_all(&path).unwrap();
        read.store(0, Ordering::Relaxed);

        let error = save(len - 1).unwrap_err();
        assert!(matches!(&error, Error::TooLarge(_)), "{error}");
        let text = error.to_string();
        for part in [&(len - 1).to_string(), "25 for what is no tensor", "3 tensors"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(read.load(Ordering::Relaxed), 0);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
        // Nothing is refused that fits.
        save(len + 2 * 4096).unwrap();
    }

    #[test]
    fn the_bound_that_costs_little_is_never_too_low() {
        let parent = tempfile::tempdir().unwrap();
        let (tensors, contents, _) = state();
        for (count, block_size) in [(3, PAGE), (2, BLOCK_SIZE), (0, BLOCK_SIZE)] {
            let (tensors, contents) = (&tensors[..count], &contents[..count]);
            let path = parent.path().join("c");
            let (structure, metadata) = (r#"["text"]"#, r#"["more text"]"#);
            let shard_size = 8 << 20;
            let request = Request {
                path: &path,
                tensors,
                contents: Contents::Tensors(contents, &groups::of(""), shard_size),
                structure,
                metadata,
                overwrite: true,
            };
            let options = Options { block_size: Some(block_size), threads: Some(1), ..Options::default() };
            save(&request, &options, &mut |_, _| true).unwrap();
            let plan = layout::plan(tensors, &groups::of(""), shard_size, block_size).unwrap();
            let bound = manifest::at_most(tensors, &plan, structure, metadata);
            assert!(std::fs::metadata(path.join(manifest::FILE)).unwrap().len() <= bound);
        }
    }
}
