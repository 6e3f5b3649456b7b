use std::sync::mpsc::channel;

use safetensors::{Dtype, SafeTensors};

use super::staging::PIECE;
use super::*;
use crate::engine::path::IoPath;
use crate::engine::report::Ran;
use crate::format::geometry::PAGE;
use crate::format::groups;
use crate::format::limits::MAX_BYTES;
use crate::read::Checkpoint;

fn byte(tensor: usize, at: usize) -> u8 {
    (at * 31 + tensor * 7 + 1) as u8
}

fn pattern(tensor: usize) -> Content {
    Content::each(move |start, to| {
        for (at, to) in to.iter_mut().enumerate() {
            *to = byte(tensor, start as usize + at);
        }
        Ok(())
    })
}

fn layout(model: &str, shard_size: u64) -> Layout {
    Layout { groups: groups::of(model), shard_size, frozen: Vec::new() }
}

/// A snapshot of tensors `m.0`, `0`, `m.1`, `1` and so on, with these sizes, and memory for it.
fn snapshot_of(sizes: &[u64], contents: Vec<Content>) -> (Snapshot, Arc<Memory>) {
    let spec = |(index, &size): (usize, &u64)| {
        let name = format!("{}{}", ["m.", ""][index % 2], index / 2);
        TensorSpec { name, dtype: Dtype::U8, shape: vec![size], logical: None }
    };
    let tensors = sizes.iter().enumerate().map(spec).collect();
    let (structure, metadata) = ("[null]".to_owned(), "[null]".to_owned());
    let state = State { tensors, contents, structure, metadata };
    let snapshot = Snapshot::new(state, layout("m.", PIECE), &Options::default()).unwrap();
    let memory = Arc::new(Memory::new(snapshot.size()).unwrap());
    (snapshot, memory)
}

fn patterned(sizes: &[u64]) -> (Snapshot, Arc<Memory>) {
    snapshot_of(sizes, (0..sizes.len()).map(pattern).collect())
}

fn options(threads: usize) -> Options {
    Options { threads: Some(threads), ..Options::default() }
}

fn stage(snapshot: &Snapshot, wanted: &[u8], last: bool) -> Result<()> {
    snapshot.stage(wanted, last, &options(2), &mut |_, _| true)
}

#[test]
fn the_images_are_the_files_of_the_checkpoint() {
    let sizes = [PIECE * 2 + 5, 3, 0, 70_000, 1 << 20];
    for (threads, wanted) in [(1, [[1; 5], [0; 5]]), (3, [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]])] {
        let (snapshot, memory) = patterned(&sizes);
        snapshot.attach(&memory).unwrap();
        let mut calls = 0;
        for (wanted, last) in wanted.iter().zip([false, true]) {
            let mut progress = |done, total| {
                calls += 1;
                done <= total
            };
            snapshot.stage(wanted, last, &options(threads), &mut progress).unwrap();
        }
        assert!(calls > 0);
        assert_eq!((snapshot.staged(), snapshot.total()), (sizes.iter().sum(), sizes.iter().sum()));
        let images = snapshot.images().unwrap();
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        for io in ["auto", "buffered"] {
            let options = Options { io: io.parse().unwrap(), ..options(2) };
            let report = snapshot.save(&path, &[], true, None, &options, &mut |_, _| true).unwrap();
            // With direct I/O, nothing is copied. Through the page cache, only the kernel copies.
            let all: u64 = images.iter().map(|(_, image)| image.len() as u64).sum();
            let Ran { blocks, copied, .. } = report.ran;
            assert_eq!(copied, if blocks.on(IoPath::ZeroCopy) > 0 { 0 } else { all }, "{blocks:?}");
            assert_eq!(blocks.on(IoPath::Staged), 0);
            for (file, image) in &images {
                assert!(**image == std::fs::read(path.join(file)).unwrap(), "{file}");
            }
            let opened = Checkpoint::open(&path).unwrap();
            assert!(opened.verify(&options, &mut |_, _| true).unwrap().1.is_empty());
        }
        let names: Vec<_> = images.iter().map(|(file, _)| file.as_str()).collect();
        let model = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        assert_eq!(names, [model[0], model[1], "training/training.safetensors"]);
        let mut seen = 0;
        for (file, image) in &images {
            // Each image starts at a page, as a mapped file does.
            assert!(image.as_ptr().addr().is_multiple_of(PAGE as usize));
            for (name, view) in SafeTensors::deserialize(image).unwrap().iter() {
                let tensor = 2 * name.parse::<usize>().unwrap() + usize::from(file.starts_with("training"));
                assert!((0..).zip(view.data()).all(|(at, &found)| found == byte(tensor, at)), "{name}");
                seen += 1;
            }
        }
        assert_eq!(seen, sizes.len());
    }
}

#[test]
fn a_manifest_that_would_be_too_large_is_refused_before_the_copy() {
    // The manifest holds 16 bytes for each block of a tensor. The tensor's bytes need not exist.
    let outcome = |blocks: u64| {
        let shape = vec![blocks * BLOCK_SIZE];
        let tensors = vec![TensorSpec { name: "t".to_owned(), dtype: Dtype::U8, shape, logical: None }];
        let (structure, metadata) = ("[null]".to_owned(), "[null]".to_owned());
        let state = State { tensors, contents: vec![pattern(0)], structure, metadata };
        Snapshot::new(state, layout("", u64::MAX), &Options::default())
    };
    let most = MAX_BYTES / 16;
    let error = outcome(most).unwrap_err();
    assert!(matches!(&error, Error::TooLarge(what) if what.contains("its manifest would take")), "{error}");
    outcome(most - 1000).unwrap();
}

#[test]
fn a_failure_a_panic_and_a_stop_end_the_copy() {
    let run = |second: Content, stop: bool| {
        let (snapshot, memory) = snapshot_of(&[1 << 20; 2], vec![pattern(0), second]);
        snapshot.attach(&memory).unwrap();
        if stop {
            snapshot.stop();
        }
        let outcome = stage(&snapshot, &[1; 2], true);
        // An incomplete copy is not usable.
        assert!(matches!(snapshot.images(), Err(Error::Misused("the snapshot is not staged"))));
        assert!(matches!(stage(&snapshot, &[1; 2], true), Err(Error::Misused(_))));
        snapshot.close().unwrap();
        memory.take().unwrap();
        (outcome, snapshot.staged())
    };
    let failing = Content::each(|_, _| Err("no".to_owned()));
    assert!(matches!(run(failing, false).0, Err(Error::Callback(text)) if text == "no"));
    let panicking = Content::each(|_, _| panic!("no"));
    assert!(matches!(run(panicking, false).0, Err(Error::Panic(_))));
    assert!(matches!(run(pattern(1), true), (Err(Error::Interrupted), 0)));
}

#[test]
fn memory_serves_one_snapshot_at_a_time() {
    let ((first, memory), (second, _)) = (patterned(&[10, 10]), patterned(&[10, 10]));
    assert!(matches!(stage(&first, &[1; 2], true), Err(Error::Misused("the snapshot has no memory"))));
    first.attach(&memory).unwrap();
    assert!(matches!(first.attach(&memory), Err(Error::Misused("the snapshot already has memory"))));
    assert!(matches!(second.attach(&memory), Err(Error::Misused(_))));
    assert!(matches!(first.images(), Err(Error::Misused("the snapshot is not staged"))));
    stage(&first, &[1; 2], true).unwrap();
    let kept = first.images().unwrap();
    first.close().unwrap();
    assert!(matches!(first.images(), Err(Error::Misused("the snapshot is closed"))));
    // As long as an image is kept, nothing writes to its memory.
    second.attach(&memory).unwrap();
    assert!(matches!(stage(&second, &[1; 2], true), Err(Error::Misused("the snapshot's memory is in use"))));
    drop(kept);
    stage(&second, &[1; 2], true).unwrap();
    second.close().unwrap();
    memory.close().unwrap();
    assert!(memory.take().is_err());
}

#[test]
fn methods_refuse_while_another_runs() {
    let ((entered, waits), (go, held)) = (channel(), channel::<()>());
    let held = Mutex::new(held);
    let fill = move |_, _: &mut [u8]| {
        entered.send(()).unwrap();
        held.lock().unwrap().recv().map_err(|error| error.to_string())
    };
    let (snapshot, memory) = snapshot_of(&[10], vec![Content::each(fill)]);
    snapshot.attach(&memory).unwrap();
    std::thread::scope(|scope| {
        let copy = || stage(&snapshot, &[1], true);
        let staging = crate::sys::thread::builder().spawn_scoped(scope, copy).unwrap();
        waits.recv().unwrap();
        let outcomes = [stage(&snapshot, &[1], true), snapshot.images().map(drop), snapshot.close()];
        go.send(()).unwrap();
        staging.join().unwrap().unwrap();
        let busy = |outcome: &_| matches!(outcome, Err(Error::Misused("the snapshot is in use")));
        assert!(outcomes.iter().all(busy), "{outcomes:?}");
    });
    assert_eq!(snapshot.images().unwrap().len(), 1);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (large, _) = patterned(&[3 << 20]);
    assert!(matches!(large.attach(&Arc::new(Memory::new(1).unwrap())), Err(Error::Invalid(_))));
    let (snapshot, memory) = patterned(&[10, 10]);
    snapshot.attach(&memory).unwrap();
    assert!(matches!(stage(&snapshot, &[1], true), Err(Error::Invalid(_))));
    assert!(Memory::new(usize::MAX).is_err());
}

#[test]
fn a_snapshot_that_is_not_whole_is_refused_and_gives_its_memory_back() {
    let (snapshot, memory) = patterned(&[8, 8]);
    snapshot.attach(&memory).unwrap();
    assert!(
        matches!(stage(&snapshot, &[1, 0], true), Err(Error::Misused(what)) if what.contains("not whole"))
    );
    assert!(snapshot.images().is_err());
    drop(snapshot);
    patterned(&[8, 8]).0.attach(&memory).unwrap();
}

#[test]
fn what_the_caller_copies_to_its_places_is_staged() {
    let sizes = [3, 70_000, 0, 1 << 20];
    let (snapshot, memory) = patterned(&sizes);
    assert!(matches!(snapshot.places(), Err(Error::Misused("the snapshot has no memory"))));
    snapshot.attach(&memory).unwrap();
    let places = snapshot.places().unwrap();
    assert_eq!(places.iter().map(|place| place.1).collect::<Vec<_>>(), sizes);
    stage(&snapshot, &[0, 1, 0, 1], false).unwrap();
    assert!(matches!(snapshot.copied(4), Err(Error::Invalid(_))), "only 3 bytes are missing");
    assert!(matches!(snapshot.copied(u64::MAX), Err(Error::Invalid(_))));
    snapshot.copied(3).unwrap();
    stage(&snapshot, &[0; 4], true).unwrap();
    assert_eq!(snapshot.staged(), sizes.iter().sum::<u64>());
    // The core copied two of the tensors to these places itself.
    let images = snapshot.images().unwrap();
    for (tensor, &(address, bytes)) in places.iter().enumerate().filter(|(_, place)| place.1 > 3) {
        let inside =
            |image: &Stretch| address.checked_sub(image.as_ptr().addr()).filter(|&at| at < image.len());
        let (image, at) = images.iter().find_map(|(_, image)| Some((image, inside(image)?))).unwrap();
        let found = &image[at..at + bytes as usize];
        assert!(found.iter().enumerate().all(|(at, &found)| found == byte(tensor, at)), "{tensor}");
    }
}

#[test]
fn parts_are_packed_and_only_those_of_devices_lie_together() {
    let parts = [(5, false), (3, true), (70_000, true), (0, true), (2, false), (64, false), (1, true)];
    let part =
        |(index, &(bytes, joins)): (usize, &(u64, bool))| Part { content: pattern(index), bytes, joins };
    let snapshot = Snapshot::of_parts(parts.iter().enumerate().map(part).collect());
    let memory = Arc::new(Memory::new(snapshot.size()).unwrap());
    snapshot.attach(&memory).unwrap();
    let places = snapshot.places().unwrap();
    let offsets: Vec<_> = places.iter().map(|place| place.0 - memory.address()).collect();
    assert_eq!(offsets, [0, 64, 67, 70_067, 70_080, 70_144, 70_208]);
    assert_eq!((snapshot.size(), snapshot.total()), (70_209, 70_075));
    stage(&snapshot, &[1, 1, 0, 1, 1, 1, 1], false).unwrap();
    stage(&snapshot, &[0, 0, 1, 0, 0, 0, 0], true).unwrap();
    assert!(matches!(snapshot.images(), Err(Error::Misused("the snapshot is of parts, not of files"))));
    snapshot.close().unwrap();
    let copy = memory.take().unwrap();
    for (part, (&offset, &(_, bytes))) in offsets.iter().zip(&places).enumerate() {
        let found = &copy[offset..][..bytes as usize];
        assert!(found.iter().enumerate().all(|(at, &found)| found == byte(part, at)), "{part}");
    }
}
