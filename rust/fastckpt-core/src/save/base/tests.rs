use std::collections::HashSet;
use std::fs::{File, read, write};
use std::os::unix::fs::MetadataExt as _;

use safetensors::Dtype;

use super::*;
use crate::engine::report::Report;
use crate::format::groups;
use crate::save::{Contents, Request, save};

const SIZE: usize = 5000;

/// Saves a state whose tensors are called `m.a`, `m.b`, ... and are each filled with one of these numbers.
fn written(path: &Path, base: Option<&Path>, fills: &[u8], frozen: &[bool]) -> Report {
    let spec = |index: usize| TensorSpec {
        name: format!("m.{}", char::from(b'a' + index as u8)),
        dtype: Dtype::U8,
        shape: vec![SIZE as u64],
        logical: None,
    };
    let tensors: Vec<_> = (0..fills.len()).map(spec).collect();
    let content = |&fill: &u8| {
        Content::each(move |_, to: &mut [u8]| {
            to.fill(fill);
            Ok(())
        })
    };
    let contents: Vec<_> = fills.iter().map(content).collect();
    let groups = groups::of("m.");
    let request = Request {
        path,
        tensors: &tensors,
        groups: &groups,
        shard_size: 1 << 20,
        contents: Contents::Tensors(&contents),
        base,
        frozen,
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    save(&request, &Options::default(), &mut |_, _| true).unwrap()
}

/// Like [`written`], and reads the state again.
fn saved(path: &Path, base: Option<&Path>, fills: &[u8], frozen: &[bool]) -> Report {
    let report = written(path, base, fills, frozen);
    let found = Checkpoint::open(path).unwrap();
    assert_eq!(found.verify(&Options::default(), &mut |_, _| true).unwrap().1, []);
    for (tensor, fill) in found.body().tensors.iter().zip(fills) {
        let shard = read(path.join(&found.body().shards[tensor.shard()].file)).unwrap();
        assert_eq!(shard[tensor.offset as usize..][..SIZE], vec![*fill; SIZE]);
    }
    report
}

fn body(path: &Path) -> Body {
    Checkpoint::open(path).unwrap().body().clone()
}

/// Changes a byte of a file, but keeps the file's time.
fn damage(path: &Path, at: usize) {
    let time = std::fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = read(path).unwrap();
    bytes[at] ^= 1;
    write(path, bytes).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn what_does_not_change_is_linked_from_the_third_save_on() {
    let parent = tempfile::tempdir().unwrap();
    let path = |number: usize| parent.path().join(number.to_string());
    let mut linked = Vec::new();
    for number in 0..4usize {
        let base = number.checked_sub(1).map(path);
        let report = saved(&path(number), base.as_deref(), &[1, 2, 3, number as u8 + 9], &[]);
        assert_eq!(report.warnings, [""; 0]);
        linked.push((report.linked.files, report.linked.bytes, report.bytes));
    }
    let (all, rest) = (4 * SIZE as u64, SIZE as u64);
    assert_eq!(linked, [(0, 0, all), (0, 0, all), (1, all - rest, rest), (1, all - rest, rest)]);
    let first = path(3).join("model-00001-of-00002.safetensors");
    assert_eq!(std::fs::metadata(&first).unwrap().nlink(), 3);
    let files = body(&path(3)).saved.files;
    assert_eq!(files.iter().map(|file| file.links).collect::<Vec<_>>(), [2, 0]);
    // Each directory is complete without the others.
    for number in 0..3 {
        crate::commit::remove(&path(number), &[], false).unwrap();
    }
    saved(&path(3), Some(&path(3)), &[1, 2, 3, 12], &[]);
    assert_eq!(std::fs::metadata(&first).unwrap().nlink(), 1);
}

#[test]
fn what_is_said_to_be_frozen_is_linked_from_the_second_save_on() {
    let parent = tempfile::tempdir().unwrap();
    let (one, two) = (parent.path().join("1"), parent.path().join("2"));
    saved(&one, None, &[1, 2, 3], &[true, false, true]);
    let report = saved(&two, Some(&one), &[1, 7, 3], &[true, false, true]);
    assert_eq!((report.linked.files, report.bytes), (1, SIZE as u64));
    // A frozen tensor that changes nevertheless is written, and so are the other tensors of its shard.
    let report = saved(&one, Some(&two), &[9, 7, 3], &[true, false, true]);
    assert_eq!((report.linked.files, report.bytes), (1, 2 * SIZE as u64));
    let shards = body(&one).shards;
    assert_eq!(shards.len(), 2);
}

#[test]
fn damage_of_a_base_is_not_inherited() {
    let parent = tempfile::tempdir().unwrap();
    let path = |name: &str| parent.path().join(name);
    saved(&path("base"), None, &[1, 2], &[]);
    let shard = &body(&path("base")).shards[0];
    let file = path("base").join(&shard.file);
    // A program wrote to the file, so its time has changed.
    let bytes = read(&file).unwrap();
    let mut other = bytes.clone();
    other[shard.bytes as usize - 1] ^= 1;
    write(&file, &other).unwrap();
    let report = saved(&path("new"), Some(&path("base")), &[1, 2], &[]);
    assert_eq!(report.linked.files, 0);
    assert!(report.warnings[0].contains("checksum is"), "{:?}", report.warnings);
    // A changed time alone is not damage: the file is read, and linked.
    write(&file, &bytes).unwrap();
    let report = saved(&path("new"), Some(&path("base")), &[1, 2], &[]);
    assert_eq!((report.linked.files, report.warnings.len()), (1, 0));
    // The file is too short.
    write(&file, &bytes[1..]).unwrap();
    let report = saved(&path("short"), Some(&path("base")), &[1, 2], &[]);
    assert!(report.warnings[0].contains("bytes, expected"), "{:?}", report.warnings);
}

#[test]
fn a_copy_is_read_although_it_has_the_time_of_the_file() {
    let parent = tempfile::tempdir().unwrap();
    let path = |name: &str| parent.path().join(name);
    saved(&path("base"), None, &[1, 2], &[]);
    let shard = body(&path("base")).shards.remove(0);
    let (file, copy) = (path("base").join(&shard.file), path("base").join("copy"));
    std::fs::copy(&file, &copy).unwrap();
    let time = std::fs::metadata(&file).unwrap().modified().unwrap();
    File::options().write(true).open(&copy).unwrap().set_modified(time).unwrap();
    std::fs::rename(&copy, &file).unwrap();
    damage(&file, shard.bytes as usize - 1);
    let report = saved(&path("new"), Some(&path("base")), &[1, 2], &[]);
    assert_eq!(report.linked.files, 0);
    assert!(report.warnings[0].contains("checksum is"), "{:?}", report.warnings);
}

#[test]
fn damage_that_leaves_the_time_as_it_was_is_noticed_within_sixteen_saves() {
    let parent = tempfile::tempdir().unwrap();
    let path = |number: usize| parent.path().join(number.to_string());
    saved(&path(0), None, &[1, 2], &[]);
    let entry = body(&path(0)).shards.remove(0);
    damage(&path(0).join(&entry.file), entry.bytes as usize - 1);
    let noticed = (1..17)
        .filter(|&number| !written(&path(number), Some(&path(number - 1)), &[1, 2], &[]).warnings.is_empty());
    assert_eq!(noticed.count(), 1);
    saved(&path(17), Some(&path(16)), &[1, 2], &[]);
    let turns = |crc: &str| {
        (0..16).filter(|&links| is_due(&ShardEntry { crc: crc.to_owned(), ..entry.clone() }, links)).count()
    };
    assert_eq!(["0000000000000000", "000000000000000f", "80000000000000a5"].map(turns), [1; 3]);
}

#[test]
fn what_is_no_base_is_a_warning() {
    let parent = tempfile::tempdir().unwrap();
    let path = |name: &str| parent.path().join(name);
    let check = |base: &str, why: &str| {
        let report = saved(&path("new"), Some(&path(base)), &[1, 2], &[]);
        assert_eq!(report.linked.files, 0);
        assert!(report.warnings[0].contains(why), "{:?}", report.warnings);
    };
    check("missing", "No such file");
    std::fs::create_dir(path("empty")).unwrap();
    check("empty", "is not a checkpoint");
    saved(&path("damaged"), None, &[1, 2], &[]);
    damage(&path("damaged").join("fastckpt.json"), 60);
    check("damaged", "corrupt checkpoint");
    saved(&path("lost"), None, &[1, 2], &[]);
    std::fs::remove_file(path("lost").join("model.safetensors")).unwrap();
    check("lost", "No such file");
}

#[test]
fn a_file_that_was_exchanged_while_it_was_looked_at_is_not_linked() {
    let parent = tempfile::tempdir().unwrap();
    let base = parent.path().join("base");
    saved(&base, None, &[1, 2], &[]);
    let file = "model.safetensors";
    let workspace = Workspace::create(&parent.path().join("new"), true).unwrap();
    let from = Checkpoint::open(&base).unwrap();
    let (open, _) = open_regular(from.directory().unwrap(), file).unwrap();
    std::fs::copy(base.join(file), base.join("copy")).unwrap();
    std::fs::rename(base.join("copy"), base.join(file)).unwrap();
    let link = || workspace.link((from.directory().unwrap(), &base), (file, open.as_fd()), &provisional(0));
    let error = link().unwrap_err();
    assert!(error.to_string().contains("cannot link"), "{error}");
    assert!(!workspace.path_of(&provisional(0)).exists());
    // An existing file is not replaced.
    write(workspace.path_of(&provisional(0)), "text").unwrap();
    assert!(link().is_err());
    assert_eq!(read(workspace.path_of(&provisional(0))).unwrap(), b"text");
    let error = workspace.settle(&provisional(0), "../model.safetensors").unwrap_err();
    assert!(error.to_string().contains("not the name of a shard"), "{error}");
}

#[test]
fn linked_shards_grow_by_doubling() {
    // In each save, one more tensor of one byte stops changing. Computes the number of shards after all saves.
    let taken = |bytes: u64| LinkedShard { group: 0, placements: Vec::new(), bytes };
    let mut shards: Vec<u64> = Vec::new();
    let mut most = 0;
    let mut rewritten = 0;
    for _ in 0..1000 {
        let whole = shards.iter().enumerate().map(|(index, &bytes)| (index, taken(bytes))).collect();
        let kept: HashSet<usize> =
            worth_linking(whole, vec![1], 1 << 20).into_iter().map(|(index, _)| index).collect();
        let apart: u64 =
            (0..shards.len()).filter(|index| !kept.contains(index)).map(|index| shards[index]).sum();
        shards = (0..shards.len()).filter(|index| kept.contains(index)).map(|index| shards[index]).collect();
        shards.push(apart + 1);
        rewritten += apart;
        most = most.max(shards.len());
    }
    assert_eq!(shards.iter().sum::<u64>(), 1000);
    assert!(most <= 11 && rewritten <= 1000 * 11, "{most} shards, {rewritten} bytes written again");
    // Full shards stay as they are.
    let whole = vec![(0, taken(600)), (1, taken(100))];
    let kept = worth_linking(whole, vec![700], 1000);
    assert_eq!(kept.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0]);
}

#[test]
fn a_few_constants_get_no_file_of_their_own() {
    let parent = tempfile::tempdir().unwrap();
    let (one, two) = (parent.path().join("1"), parent.path().join("2"));
    let fills: Vec<u8> = (0..20).collect();
    saved(&one, None, &fills, &[]);
    let mut others: Vec<u8> = (100..120).collect();
    others[3] = fills[3];
    saved(&two, Some(&one), &others, &[]);
    assert_eq!(body(&two).shards.len(), 1);
    others[4..].fill(7);
    saved(&one, Some(&two), &others, &[]);
    assert_eq!(body(&one).shards.len(), 2);
}

#[test]
fn what_is_brought_to_be_compared_stays_within_the_memory_of_a_save() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use crate::engine::content::{Pull, Pulled};
    use crate::engine::pool::MOST_THREADS;

    const LEN: usize = 3 << 20;
    let parent = tempfile::tempdir().unwrap();
    let most = Arc::new(AtomicU64::new(0));
    let noted = Arc::clone(&most);
    let fill = Arc::new(move |all: &mut [Pulled<'_>]| {
        noted.fetch_max(all.iter().map(|one| one.to.len() as u64).sum(), Ordering::Relaxed);
        for one in all {
            one.to.fill(1);
        }
        Ok(())
    });
    let spec = |index| TensorSpec {
        name: format!("m.{index}"),
        dtype: Dtype::U8,
        shape: vec![LEN as u64],
        logical: None,
    };
    let tensors: Vec<_> = (0..12).map(spec).collect();
    let content = |index| Content::Pull(Pull { fill: Arc::<_>::clone(&fill) as _, index });
    let contents: Vec<_> = (0..tensors.len()).map(content).collect();
    let groups = groups::of("m.");
    let path = parent.path().join("a");
    let request = Request {
        path: &path,
        tensors: &tensors,
        groups: &groups,
        shard_size: 1 << 30,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    save(&request, &Options::default(), &mut |_, _| true).unwrap();
    most.store(0, Ordering::Relaxed);
    let same = unchanged(&tensors, &contents, &body(&path), &Options::default(), &mut |_, _| true).unwrap();
    assert!(same.iter().all(Option::is_some));
    // The bound in docs/design.md, Memory.
    let bytes = most.load(Ordering::Relaxed) * MOST_THREADS as u64;
    assert!(bytes > 0 && bytes <= 96 << 20, "{bytes}");
}
