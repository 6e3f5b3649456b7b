//! Whole saves and loads over every engine, and over engines that fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastckpt_core::engine::content::{Content, Destination, Push};
use fastckpt_core::engine::io::fault::{Fault, FaultPlan};
use fastckpt_core::engine::path::IoPath;
use fastckpt_core::format::groups;
use fastckpt_core::format::layout::TensorSpec;
use fastckpt_core::format::manifest::TensorEntry;
use fastckpt_core::read::{Checkpoint, Request as Read};
use fastckpt_core::save::{Contents, Request, save};
use fastckpt_core::{Error, Io, Options, Report, Result};
use safetensors::Dtype;

const ENGINES: [Io; 3] = [Io::Uring, Io::Threads, Io::Buffered];

/// A directory on a real disk: /tmp may be a tmpfs, which has no real direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory")
}

/// Tensors of many sizes: empty, odd, whole pages, more than a block.
fn tensors(seed: u8) -> Vec<(TensorSpec, Vec<u8>)> {
    let sizes = [0usize, 1, 3, 4096, 4097, 1 << 20, (9 << 20) + 5, 12 << 20, 8, 4096 * 3];
    let make = |(index, &size): (usize, &usize)| {
        let shape = vec![size as u64];
        let name = format!("layer.{index}");
        let byte = |i: usize| (i.wrapping_mul(31) ^ (i >> 9) ^ index) as u8 ^ seed;
        (TensorSpec { name, dtype: Dtype::U8, shape, logical: None }, (0..size).map(byte).collect())
    };
    sizes.iter().enumerate().map(make).collect()
}

/// Saves through the interface for memory that is not plain host memory. The tests of the binding cover host memory.
fn save_all(path: &Path, tensors: &[(TensorSpec, Vec<u8>)], options: &Options) -> Result<Report> {
    let specs: Vec<_> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let contents: Vec<_> = tensors
        .iter()
        .map(|(_, bytes)| {
            let bytes = Arc::new(bytes.clone());
            Content::each(move |start: u64, to: &mut [u8]| {
                to.copy_from_slice(&bytes[start as usize..start as usize + to.len()]);
                Ok(())
            })
        })
        .collect();
    let request = Request {
        path,
        tensors: &specs,
        groups: &groups::of(""),
        shard_size: 10 << 20,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    save(&request, options, &mut |_, _| true)
}

fn load_all(path: &Path, options: &Options) -> Result<Vec<Vec<u8>>> {
    let checkpoint = Checkpoint::open(path)?;
    let sizes: Vec<u64> = checkpoint.body().tensors.iter().map(TensorEntry::bytes).collect();
    let all: Vec<_> =
        sizes.iter().map(|&size| Arc::new(std::sync::Mutex::new(vec![0; size as usize]))).collect();
    let requests = (0..sizes.len()).map(|tensor| {
        let to = Arc::clone(&all[tensor]);
        let drain = move |start: u64, from: &[u8]| {
            let mut to = to.lock().map_err(|error| error.to_string())?;
            to[start as usize..start as usize + from.len()].copy_from_slice(from);
            Ok(())
        };
        Read { tensor, rows: None, destination: Destination::Push(Push::each(drain)) }
    });
    checkpoint.read(requests.collect(), true, options, &mut |_, _| true)?;
    Ok(all.into_iter().map(|bytes| bytes.lock().expect("no panic").clone()).collect())
}

fn names(path: &Path) -> Vec<PathBuf> {
    fs::read_dir(path).expect("a directory").map(|entry| entry.expect("an entry").path()).collect()
}

fn options(io: Io) -> Options {
    Options { io, ..Options::default() }
}

#[test]
fn what_is_saved_is_loaded_by_every_engine() {
    let parent = directory();
    let tensors = tensors(7);
    for writer in ENGINES {
        let path = parent.path().join("checkpoint");
        let report = save_all(&path, &tensors, &options(writer)).unwrap();
        let written: u64 = tensors.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        assert!(report.shards > 1 && report.bytes == written);
        for reader in ENGINES {
            let loaded = load_all(&path, &options(reader)).unwrap();
            assert!(loaded.iter().zip(&tensors).all(|(found, (_, written))| found == written));
        }
        let (_, damage) =
            Checkpoint::open(&path).unwrap().verify(&Options::default(), &mut |_, _| true).unwrap();
        assert_eq!(damage, []);
    }
}

#[test]
fn the_engine_asked_for_is_the_one_that_runs() {
    let parent = directory();
    for (io, name) in ENGINES.into_iter().zip(["uring", "threads", "buffered"]) {
        let report = save_all(&parent.path().join("c"), &tensors(1), &options(io)).unwrap();
        assert!(report.ran.engine.name() == name || report.ran.fallback.is_some(), "{report:?}");
    }
}

#[test]
fn shards_are_valid_safetensors_files() {
    let parent = directory();
    let path = parent.path().join("c");
    let tensors = tensors(3);
    save_all(&path, &tensors, &Options::default()).unwrap();
    let mut found = 0;
    for file in names(&path).iter().filter(|file| file.extension().is_some_and(|e| e == "safetensors")) {
        let bytes = fs::read(file).unwrap();
        for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let (_, written) = tensors.iter().find(|(spec, _)| spec.name == name).unwrap();
            assert_eq!(view.data(), written);
            found += 1;
        }
    }
    assert_eq!(found, tensors.len());
}

#[test]
fn the_checksum_of_a_shard_is_that_of_its_file() {
    let parent = directory();
    let path = parent.path().join("c");
    save_all(&path, &tensors(3), &Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for shard in &checkpoint.body().shards {
        let bytes = fs::read(path.join(&shard.file)).unwrap();
        let of = |bytes: &[u8]| {
            fastckpt_core::format::checksum::to_hex(fastckpt_core::format::checksum::of(bytes))
        };
        assert_eq!(of(&bytes), shard.crc);
        assert_eq!(of(&bytes[..shard.data_offset as usize]), shard.header_crc);
    }
}

#[test]
fn a_passing_fault_is_not_noticed() {
    let parent = directory();
    let tensors = tensors(5);
    for io in ENGINES {
        for fault in
            [Fault::Short(4096), Fault::Short(512), Fault::Errno(libc::EINTR), Fault::Errno(libc::EAGAIN)]
        {
            for before in 0..4 {
                let path = parent.path().join("c");
                let plan = FaultPlan::new(before, fault, false);
                save_all(&path, &tensors, &Options { faults: Some(plan.clone()), ..options(io) }).unwrap();
                assert!(plan.struck());
                let plan = FaultPlan::new(before, fault, false);
                let loaded = load_all(&path, &Options { faults: Some(plan.clone()), ..options(io) }).unwrap();
                assert!(plan.struck());
                assert!(loaded.iter().zip(&tensors).all(|(found, (_, written))| found == written));
            }
        }
    }
}

#[test]
fn a_lasting_fault_is_raised_and_the_old_checkpoint_stays() {
    let parent = directory();
    let path = parent.path().join("c");
    let old = tensors(1);
    save_all(&path, &old, &Options::default()).unwrap();
    for io in ENGINES {
        for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT] {
            for before in [0, 1, 5] {
                let plan = FaultPlan::new(before, Fault::Errno(errno), false);
                let outcome = save_all(&path, &tensors(2), &Options { faults: Some(plan), ..options(io) });
                let error = outcome.unwrap_err();
                assert_eq!(error.errno(), Some(errno), "{error}");
                assert!(error.to_string().contains(".safetensors"), "{error}");
                assert_eq!(names(parent.path()), std::slice::from_ref(&path));
                assert_eq!(load_all(&path, &Options::default()).unwrap()[5], old[5].1);
            }
        }
        let plan = FaultPlan::new(2, Fault::Errno(libc::EIO), false);
        let error = load_all(&path, &Options { faults: Some(plan), ..options(io) }).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EIO));
    }
}

#[test]
fn direct_operations_that_are_refused_go_through_the_page_cache() {
    let parent = directory();
    let path = parent.path().join("c");
    let tensors = tensors(9);
    for io in [Io::Uring, Io::Threads] {
        // The second operation of a worker is direct: the first writes a tail.
        let plan = FaultPlan::new(1, Fault::Errno(libc::EINVAL), false);
        let options = Options { faults: Some(plan), threads: Some(1), ..options(io) };
        let report = save_all(&path, &tensors, &options).unwrap();
        if report.ran.engine.name() != "buffered" {
            assert!(
                report.ran.blocks.on(IoPath::Buffered) > 0 && report.ran.blocks.on(IoPath::Staged) > 0,
                "{report:?}"
            );
        }
        let loaded = load_all(&path, &Options { faults: None, ..options }).unwrap();
        assert!(loaded.iter().zip(&tensors).all(|(found, (_, written))| found == written));
    }
}

#[test]
fn a_panic_is_an_error_and_leaves_nothing() {
    let parent = directory();
    for io in ENGINES {
        let plan = FaultPlan::new(3, Fault::Panic, false);
        let options = Options { faults: Some(plan), ..options(io) };
        let error = save_all(&parent.path().join("c"), &tensors(1), &options).unwrap_err();
        assert!(matches!(&error, Error::Panic(text) if text == "injected"), "{error}");
        assert_eq!(names(parent.path()), [] as [PathBuf; 0]);
    }
}

#[test]
fn an_interrupt_stops_the_save_and_leaves_nothing() {
    let parent = directory();
    let path = parent.path().join("c");
    // Blocks the save until the progress function is called, so that it cannot end before.
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    let slow = Content::each(move |_, _| {
        while !seen.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Ok(())
    });
    let spec = TensorSpec { name: "t".to_owned(), dtype: Dtype::U8, shape: vec![64 << 20], logical: None };
    let request = Request {
        path: &path,
        tensors: &[spec],
        groups: &groups::of(""),
        shard_size: u64::MAX,
        contents: Contents::Tensors(&[slow]),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    let outcome = save(&request, &options(Io::Threads), &mut |_, _| {
        asked.store(true, Ordering::Relaxed);
        false
    });
    assert!(matches!(outcome, Err(Error::Interrupted)));
    assert_eq!(names(parent.path()), [] as [PathBuf; 0]);
}

#[test]
fn every_damaged_range_is_reported() {
    let parent = directory();
    let path = parent.path().join("c");
    save_all(&path, &tensors(4), &Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let tensor = checkpoint.body().tensors.iter().find(|tensor| tensor.name() == "layer.7").unwrap();
    let file = path.join(&checkpoint.body().shards[tensor.shard()].file);
    let mut bytes = fs::read(&file).unwrap();
    for at in [tensor.offset + 10, tensor.offset + (11 << 20)] {
        bytes[at as usize] ^= 1;
    }
    bytes[20] ^= 1;
    fs::write(&file, bytes).unwrap();
    let (_, damage) = checkpoint.verify(&Options::default(), &mut |_, _| true).unwrap();
    let found: Vec<_> = damage.iter().map(|d| d.tensor.as_deref()).collect();
    assert_eq!(found, [None, Some("layer.7"), Some("layer.7")], "{damage:?}");
    assert!(matches!(load_all(&path, &Options::default()), Err(Error::Corrupt { .. })));
}

#[test]
fn more_shards_than_open_files() {
    // The limit also holds for the other tests of this process, which need few files.
    let limit = rustix::process::Rlimit { current: Some(512), maximum: Some(512) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let parent = directory();
    let path = parent.path().join("c");
    let tensors: Vec<_> = (0..1500u64)
        .map(|index| {
            let name = format!("t{index}");
            (TensorSpec { name, dtype: Dtype::U8, shape: vec![64], logical: None }, vec![index as u8; 64])
        })
        .collect();
    let specs: Vec<_> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let contents: Vec<_> = tensors
        .iter()
        .map(|(_, bytes)| {
            let byte = bytes[0];
            Content::each(move |_, to: &mut [u8]| {
                to.fill(byte);
                Ok(())
            })
        })
        .collect();
    let request = Request {
        path: &path,
        tensors: &specs,
        groups: &groups::of(""),
        shard_size: 64,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    let report = save(&request, &Options::default(), &mut |_, _| true).unwrap();
    assert_eq!(report.shards, 1500);
    let loaded = load_all(&path, &Options::default()).unwrap();
    assert!(loaded.iter().zip(&tensors).all(|(found, (_, written))| found == written));
}
