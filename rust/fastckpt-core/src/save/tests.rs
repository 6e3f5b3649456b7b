use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use safetensors::Dtype;

use super::*;
use crate::engine::choice::Choice;
use crate::engine::job::Job as _;
use crate::format::geometry::PAGE;
use crate::format::groups;
use crate::format::manifest::{ShardEntry, TensorEntry};
use crate::read::Checkpoint;

/// Tensors of several extents, with names that need escapes and with a dtype that must be named. Also counts the reads.
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
        Content::each(move |_, to: &mut [u8]| {
            read.fetch_add(1, Ordering::Relaxed);
            to.fill(1);
            Ok(())
        })
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
        groups: &groups::of(""),
        shard_size: 8 << 20,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: r#"[["list",1],"0123456789"]"#,
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    let save = |most| {
        let options = Options { block_size: Some(PAGE), ..Options::default() };
        let operation = options.operation(Kind::Save, &path);
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
    for part in [&(len - 1).to_string(), "25 for values other than tensors", "3 tensors"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(read.load(Ordering::Relaxed), 0);
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    // A state that fits is not refused.
    save(len + 2 * 4096).unwrap();

    let plan = lay_out(&tensors, 8 << 20, PAGE).unwrap();
    let check = |per_rank: &str| check_size(&plan, &tensors, ["[]", "[]", per_rank], len + 2 * 4096);
    check("").unwrap();
    let text = check(&format!("[\"{}\"]", "x".repeat(1 << 20))).unwrap_err().to_string();
    assert!(text.contains("2 for the metadata, 1048580 for `per_rank`"), "{text}");
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
            groups: &groups::of(""),
            shard_size,
            contents: Contents::Tensors(contents),
            base: None,
            frozen: &[],
            structure,
            metadata,
            files: &[],
            overwrite: true,
        };
        let options = Options { block_size: Some(block_size), threads: Some(1), ..Options::default() };
        save(&request, &options, &mut |_, _| true).unwrap();
        let plan = lay_out(tensors, shard_size, block_size).unwrap();
        let bound = manifest::at_most(tensors, &plan, [structure, metadata, ""]);
        assert!(std::fs::metadata(path.join(manifest::FILE)).unwrap().len() <= bound);
    }
}

fn lay_out(tensors: &[TensorSpec], shard: u64, block: u64) -> Result<Plan> {
    layout::lay_out(tensors, &groups::of(""), Sizes { shard, block }, &layout::Reuse::default())
}

/// Two tensors of a little more than 3 pages, in one shard each, with their contents and their plan.
struct Small {
    tensors: Vec<TensorSpec>,
    contents: Vec<Content>,
    plan: Plan,
}

fn small(fills: [u8; 2]) -> Small {
    let spec = |name: &str| TensorSpec {
        name: name.to_owned(),
        dtype: Dtype::U8,
        shape: vec![3 * PAGE + 5],
        logical: None,
    };
    let tensors = vec![spec("a"), spec("b")];
    let content = |fill: u8| {
        Content::each(move |_, to: &mut [u8]| {
            to.fill(fill);
            Ok(())
        })
    };
    let plan = lay_out(&tensors, PAGE, PAGE).unwrap();
    Small { tensors, contents: fills.map(content).into(), plan }
}

impl Small {
    fn write(&self, workspace: &Workspace, shards: &[usize]) -> Result<Written> {
        let Self { tensors, contents, plan } = self;
        let part = Part { plan, tensors, bytes: Bytes::Tensors(contents), shards };
        let operation = operation(&workspace.path_of(""));
        write_shards(workspace, &part, &Options::default(), &operation, &mut |_, _| true)
    }

    /// The body with these entries, which are in the order of the plan.
    fn body(&self, shards: Vec<ShardEntry>, tensors: Vec<TensorEntry>) -> Body {
        Body { shards, tensors, ..empty_body(1.5, self.plan.block_size, ["[]", "[]", ""]).unwrap() }
    }
}

fn operation(path: &Path) -> Operation {
    Options::default().operation(Kind::Save, path)
}

fn seal_here(workspace: &mut Workspace, body: &Body, unsynced: Option<Unsynced>) -> Result<()> {
    let operation = operation(&workspace.path_of(""));
    seal(workspace, body, &[], unsynced, &operation).map(drop)
}

/// Saves two tensors filled with `fills` to `path`.
pub(crate) fn saved(path: &Path, fills: [u8; 2]) -> PathBuf {
    let Small { tensors, contents, .. } = small(fills);
    let request = Request {
        path,
        tensors: &tensors,
        groups: &groups::of(""),
        shard_size: PAGE,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: "[]",
        metadata: "[]",
        files: &[],
        overwrite: true,
    };
    let options = Options { block_size: Some(PAGE), ..Options::default() };
    save(&request, &options, &mut |_, _| true).unwrap();
    path.to_owned()
}

fn is_sound(path: &Path) -> bool {
    let damage = Checkpoint::open(path).unwrap().verify(&Options::default(), &mut |_, _| true).unwrap().1;
    damage.is_empty()
}

fn entries_of(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn written_shards_are_a_checkpoint_only_once_they_are_sealed_and_published() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    let state = small([1, 2]);
    let workspace = Workspace::create(&path, true).unwrap();
    let written = state.write(&workspace, &[0, 1]).unwrap();
    assert!(written.unsynced.is_none());
    assert!(Checkpoint::open(&path).is_err() && Checkpoint::open(&workspace.path_of("")).is_err());
    let error = workspace.publish().unwrap_err();
    assert!(error.to_string().contains("it is not sealed"), "{error}");
    assert_eq!(entries_of(parent.path()), 0);

    let mut workspace = Workspace::create(&path, true).unwrap();
    let written = state.write(&workspace, &[0, 1]).unwrap();
    let body = state.body(written.shards, written.tensors);
    seal_here(&mut workspace, &body, None).unwrap();
    assert!(seal_here(&mut workspace, &body, None).unwrap_err().to_string().contains("it is sealed"));
    assert!(!path.exists());
    workspace.publish().unwrap();
    assert!(is_sound(&path));
}

#[test]
fn a_body_whose_shards_are_not_there_is_not_sealed() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    let state = small([1, 2]);
    for short in [false, true] {
        let mut workspace = Workspace::create(&path, true).unwrap();
        let written = state.write(&workspace, &[0, 1]).unwrap();
        let body = state.body(written.shards, written.tensors);
        let file = workspace.path_of(&body.shards[1].file);
        if short {
            std::fs::File::options().write(true).open(&file).unwrap().set_len(PAGE).unwrap();
        } else {
            std::fs::remove_file(&file).unwrap();
        }
        let error = seal_here(&mut workspace, &body, None).unwrap_err();
        assert!(error.to_string().contains(&body.shards[1].file), "{error}");
        assert!(workspace.publish().is_err() && !path.exists());
    }
    assert_eq!(entries_of(parent.path()), 0);
}

#[test]
fn others_join_a_workspace_and_write_their_part() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    let state = small([1, 2]);
    let mut workspace = Workspace::create(&path, true).unwrap();
    let joined = Workspace::join(&path, workspace.temporary()).unwrap();
    let theirs = state.write(&joined, &[1]).unwrap();
    let ours = state.write(&workspace, &[0]).unwrap();
    assert_eq!((theirs.tensors.len(), theirs.tensors[0].shard(), ours.tensors[0].shard()), (1, 1, 0));
    let body = state.body([ours.shards, theirs.shards].concat(), [ours.tensors, theirs.tensors].concat());
    // A process that joined cannot end the workspace, however it leaves.
    let mut again = Workspace::join(&path, workspace.temporary()).unwrap();
    assert!(seal_here(&mut again, &body, None).unwrap_err().to_string().contains("another process"));
    assert!(again.publish().unwrap_err().to_string().contains("another process"));
    drop(joined);
    assert_eq!(entries_of(&workspace.path_of("")), 3);
    seal_here(&mut workspace, &body, None).unwrap();
    assert!(Workspace::join(&path, workspace.temporary()).unwrap_err().to_string().contains("it is sealed"));
    workspace.publish().unwrap();
    assert!(is_sound(&path));
    let whole = saved(&parent.path().join("whole"), [1, 2]);
    for shard in &body.shards {
        assert_eq!(
            std::fs::read(path.join(&shard.file)).unwrap(),
            std::fs::read(whole.join(&shard.file)).unwrap()
        );
    }
}

#[test]
fn a_part_is_some_shards_of_the_plan_in_order() {
    let parent = tempfile::tempdir().unwrap();
    let state = small([1, 2]);
    let workspace = Workspace::create(&parent.path().join("c"), true).unwrap();
    for shards in [&[2][..], &[1, 0], &[0, 0]] {
        assert!(matches!(state.write(&workspace, shards), Err(Error::Invalid(_))));
    }
    let Small { tensors, contents, plan } = &state;
    let part = Part { plan, tensors, bytes: Bytes::Tensors(contents), shards: &[1] };
    let (options, begin) = (Options::default(), Instant::now());
    let work = whole::Whole::new(&part);
    let job = job::WriteJob::new(&work, &workspace, &Choice::new(&options, part.total()), &options, begin);
    assert_eq!((job.files(), job.blocks(), job.file(0)), (1, 5, 1));
    let none = state.write(&workspace, &[]).unwrap();
    assert!(none.shards.is_empty() && none.tensors.is_empty() && none.unsynced.is_none());
    assert_eq!(entries_of(&workspace.path_of("")), 1);
}

#[test]
fn a_part_of_one_block_is_left_to_be_synced() {
    let parent = tempfile::tempdir().unwrap();
    let mut state = small([1, 2]);
    state.plan = lay_out(&state.tensors, PAGE, BLOCK_SIZE).unwrap();
    let path = parent.path().join("c");
    let mut workspace = Workspace::create(&path, true).unwrap();
    let first = state.write(&workspace, &[0]).unwrap();
    let unsynced = first.unsynced.as_ref().unwrap();
    assert_eq!(unsynced.path, workspace.path_of(&first.shards[0].file));
    // In a process that joined, no later step could sync the file.
    let joined = Workspace::join(&path, workspace.temporary()).unwrap();
    let second = state.write(&joined, &[1]).unwrap();
    assert!(second.unsynced.is_none());
    let body = state.body([first.shards, second.shards].concat(), [first.tensors, second.tensors].concat());
    seal_here(&mut workspace, &body, first.unsynced).unwrap();
    workspace.publish().unwrap();
    assert!(is_sound(&path));
}
