//! Callbacks that supply and take bytes: how often they are called, with which ranges, and whose memory they get.
#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use fastckpt_core::engine::content::BATCH;
use fastckpt_core::engine::content::{Content, Destination, Drain, Fill, Pull, Pulled, Push, Pushed};
use fastckpt_core::engine::io::fault::{Fault, FaultPlan};
use fastckpt_core::engine::memory::Memory;
use fastckpt_core::engine::path::IoPath;
use fastckpt_core::format::groups;
use fastckpt_core::format::layout::TensorSpec;
use fastckpt_core::read::boxes::{self, Along};
use fastckpt_core::read::{Checkpoint, Request as Read};
use fastckpt_core::save::{Contents, Request, save};
use fastckpt_core::sys::thread::builder;
use fastckpt_core::{Error, Io, Options, Report, Result};
use safetensors::Dtype;

const ENGINES: [Io; 3] = [Io::Auto, Io::Threads, Io::Buffered];
const MIB: usize = 1 << 20;
/// The maximum number of calls for a gigabyte.
const MOST: f64 = 70.0;

/// A range of one call: number, first byte, address and length.
type Asked = (usize, u64, usize, usize);
/// The ranges of each call.
type Calls = Arc<Mutex<Vec<Vec<Asked>>>>;

fn byte(tensor: usize, at: u64) -> u8 {
    (at as usize * 31 + (at >> 11) as usize + tensor * 7 + 1) as u8
}

fn filler(calls: &Calls) -> Fill {
    let calls = Arc::clone(calls);
    Arc::new(move |all: &mut [Pulled<'_>]| {
        let mut asked = Vec::new();
        for Pulled { index, start, to } in all {
            asked.push((*index, *start, to.as_ptr().addr(), to.len()));
            for (at, to) in (*start..).zip(to.iter_mut()) {
                *to = byte(*index, at);
            }
        }
        calls.lock().unwrap().push(asked);
        Ok(())
    })
}

/// Takes all bytes and compares them. Each byte must come once.
fn drainer(calls: &Calls, sizes: &[u64]) -> (Drain, Arc<Mutex<Vec<Vec<bool>>>>) {
    let seen: Vec<_> = sizes.iter().map(|&size| vec![false; size as usize]).collect();
    let (calls, seen) = (Arc::clone(calls), Arc::new(Mutex::new(seen)));
    let noted = Arc::clone(&seen);
    let drain = move |all: &[Pushed<'_>]| {
        let mut noted = noted.lock().unwrap();
        let mut asked = Vec::new();
        for &Pushed { index, start, from } in all {
            asked.push((index, start, from.as_ptr().addr(), from.len()));
            for (at, &found) in (start..).zip(from) {
                assert_eq!(found, byte(index, at), "byte {at} of {index}");
                assert!(
                    !std::mem::replace(&mut noted[index][at as usize], true),
                    "byte {at} of {index} twice"
                );
            }
        }
        calls.lock().unwrap().push(asked);
        Ok(())
    };
    (Arc::new(drain), seen)
}

fn specs(sizes: &[u64]) -> Vec<TensorSpec> {
    let spec = |(index, &size): (usize, &u64)| TensorSpec {
        name: format!("t.{index}"),
        dtype: Dtype::U8,
        shape: vec![size],
        logical: None,
    };
    sizes.iter().enumerate().map(spec).collect()
}

fn write(path: &Path, sizes: &[u64], contents: &[Content], shard: u64, options: &Options) -> Result<Report> {
    let request = Request {
        path,
        tensors: &specs(sizes),
        groups: &groups::of(""),
        shard_size: shard,
        contents: Contents::Tensors(contents),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    save(&request, options, &mut |_, _| true)
}

fn pulled(sizes: &[u64], fill: &Fill) -> Vec<Content> {
    let one = |index| Content::Pull(Pull { fill: Arc::clone(fill), index });
    (0..sizes.len()).map(one).collect()
}

fn read(path: &Path, count: usize, drain: &Drain, options: &Options) -> Result<Report> {
    let request = |tensor| {
        let destination = Destination::Push(Push { drain: Arc::clone(drain), index: tensor });
        Read { tensor, rows: None, destination }
    };
    Checkpoint::open(path)?.read((0..count).map(request).collect(), true, options, &mut |_, _| true)
}

fn lent(bytes: usize) -> Arc<Memory> {
    Arc::new(Memory::new(bytes).unwrap())
}

fn options(io: Io, threads: usize, staging: &Arc<Memory>) -> Options {
    Options { io, threads: Some(threads), staging: Some(Arc::clone(staging)), ..Options::default() }
}

fn inside(memory: &Memory) -> Range<usize> {
    memory.address()..memory.address() + memory.size()
}

fn taken(calls: &Calls) -> Vec<Vec<Asked>> {
    std::mem::take(&mut *calls.lock().unwrap())
}

#[test]
fn a_call_is_for_up_to_16_mebibytes_and_their_memory_is_that_which_was_lent() {
    let large = vec![63 * MIB as u64];
    let small = vec![1100; 60_000];
    for io in ENGINES {
        for (sizes, threads) in [(&large, 2), (&small, 2), (&large, 24)] {
            let parent = tempfile::tempdir().unwrap();
            let (path, memory, calls) = (parent.path().join("c"), lent(64 * MIB), Calls::default());
            let total: u64 = sizes.iter().sum();
            let fill = filler(&calls);
            let options = options(io, threads, &memory);
            let saved = write(&path, sizes, &pulled(sizes, &fill), u64::MAX, &options).unwrap();
            let filled = taken(&calls);
            let (drain, seen) = drainer(&calls, sizes);
            let loaded = read(&path, sizes.len(), &drain, &options).unwrap();
            let drained = taken(&calls);
            assert!(seen.lock().unwrap().iter().flatten().all(|&seen| seen));
            for (report, calls) in [(saved, &filled), (loaded, &drained)] {
                // Each of the two workers may end with a smaller batch.
                let figure = (calls.len() - 1) as f64 / total as f64 * 1e9;
                assert!(figure <= MOST, "{io:?}: {figure} calls per gigabyte");
                for call in calls {
                    assert!(call.iter().map(|range| range.3).sum::<usize>() <= BATCH);
                    let within = |range: &Asked| {
                        let lent = inside(&memory);
                        range.2 >= lent.start && range.2 + range.3 <= lent.end
                    };
                    assert!(call.iter().all(within), "{io:?}: the memory is not the lent staging memory");
                }
                let direct = report.ran.blocks.on(IoPath::Staged) > 0;
                assert!(report.ran.blocks.on(IoPath::ZeroCopy) == 0);
                if direct && report.ran.blocks.on(IoPath::Buffered) == 0 {
                    assert_eq!(report.ran.copied, 0, "{io:?}: {report:?}");
                }
                assert_eq!(report.ran.threads, 2, "there are batches for two threads only");
            }
            if sizes.len() == 1 {
                assert!(filled.iter().all(|call| call.len() == 1), "a tensor is asked for in one piece");
            }
            memory.close().unwrap();
        }
    }
}

#[test]
fn tensors_from_memory_and_callbacks_share_blocks_and_shards() {
    let sizes = [5, 3 * MIB as u64 + 7, 0, 70_000, 9 * MIB as u64, 1, 4 * MIB as u64, 900_000, 13];
    let host: Vec<Vec<u8>> = sizes
        .iter()
        .enumerate()
        .map(|(index, &size)| (0..size).map(|at| byte(index, at)).collect())
        .collect();
    for io in ENGINES {
        for (threads, shard, staging) in
            [(1, u64::MAX, 64), (3, 2 * MIB as u64, 64), (2, u64::MAX, 10), (2, 1, 2)]
        {
            let parent = tempfile::tempdir().unwrap();
            let (path, memory, calls) = (parent.path().join("c"), lent(staging * MIB), Calls::default());
            let fill = filler(&calls);
            let mut contents = pulled(&sizes, &fill);
            for index in [1, 3, 7, 8] {
                // These tensors are copied into staging buffers through a separate callback.
                let bytes = host[index].clone();
                contents[index] = Content::each(move |start, to| {
                    to.copy_from_slice(&bytes[start as usize..start as usize + to.len()]);
                    Ok(())
                });
            }
            let mut options = options(io, threads, &memory);
            options.faults = Some(FaultPlan::new(2, Fault::Short(5000), true));
            options.bandwidth_limit = Some(1 << 32);
            write(&path, &sizes, &contents, shard, &options).unwrap();
            let (drain, seen) = drainer(&calls, &sizes);
            read(&path, sizes.len(), &drain, &Options { bandwidth_limit: None, ..options }).unwrap();
            assert!(seen.lock().unwrap().iter().flatten().all(|&seen| seen));
            memory.close().unwrap();
        }
    }
}

#[test]
fn a_call_that_fills_is_for_one_file() {
    // Otherwise, a block behind one that waits for a file to be closed could keep that file open.
    let parent = tempfile::tempdir().unwrap();
    let (path, memory, calls) = (parent.path().join("c"), lent(64 * MIB), Calls::default());
    let sizes = [MIB as u64; 6];
    let fill = filler(&calls);
    write(&path, &sizes, &pulled(&sizes, &fill), 2 * MIB as u64, &options(Io::Auto, 2, &memory)).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let tensors = &checkpoint.body().tensors;
    let shard = |range: &Asked| {
        tensors.iter().find(|entry| entry.name() == format!("t.{}", range.0)).unwrap().shard()
    };
    let calls = taken(&calls);
    assert!(calls.len() >= 3, "{calls:?}");
    assert!(calls.iter().all(|call| call.iter().all(|range| shard(range) == shard(&call[0]))), "{calls:?}");
}

#[test]
fn boxes_are_handed_over_in_their_own_order() {
    let parent = tempfile::tempdir().unwrap();
    let (path, memory, calls) = (parent.path().join("c"), lent(32 * MIB), Calls::default());
    let sizes = [20 * MIB as u64];
    write(&path, &sizes, &pulled(&sizes, &filler(&calls)), u64::MAX, &Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let along = Along { start: 3, stop: sizes[0] - 1000, step: 5 };
    let rows = boxes::rows(&checkpoint.body().tensors[0], Some(&[along]), None).unwrap().unwrap();
    let found = Arc::new(Mutex::new(vec![0; rows.bytes() as usize]));
    let to = Arc::clone(&found);
    let push = Push::each(move |start, from| {
        to.lock().unwrap()[start as usize..start as usize + from.len()].copy_from_slice(from);
        Ok(())
    });
    let request = Read { tensor: 0, rows: Some(Arc::new(rows)), destination: Destination::Push(push) };
    checkpoint.read(vec![request], true, &options(Io::Auto, 2, &memory), &mut |_, _| true).unwrap();
    let wanted = (3..sizes[0] - 1000).step_by(5).map(|at| byte(0, at));
    assert!(found.lock().unwrap().iter().copied().eq(wanted));
}

#[test]
fn a_callback_that_fails_ends_the_operation_and_gives_the_memory_back() {
    let parent = tempfile::tempdir().unwrap();
    let (path, memory) = (parent.path().join("c"), lent(64 * MIB));
    let sizes = [40 * MIB as u64];
    for io in ENGINES {
        let options = options(io, 2, &memory);
        for panics in [false, true] {
            let fill: Fill = Arc::new(move |all: &mut [Pulled<'_>]| {
                assert!(!panics || all[0].start == 0, "it panics");
                if all[0].start > 0 { Err("no".to_owned()) } else { Ok(()) }
            });
            let error = write(&path, &sizes, &pulled(&sizes, &fill), u64::MAX, &options).unwrap_err();
            assert_eq!(matches!(error, Error::Callback(_)), !panics, "{error}");
            assert!(!path.exists());
        }
        let calls = Calls::default();
        write(&path, &sizes, &pulled(&sizes, &filler(&calls)), u64::MAX, &options).unwrap();
        let drain: Drain = Arc::new(|_: &[Pushed<'_>]| Err("no".to_owned()));
        let error = read(&path, 1, &drain, &options).unwrap_err();
        assert!(matches!(error, Error::Callback(_)), "{error}");
        let (drain, seen) = drainer(&calls, &sizes);
        read(&path, 1, &drain, &options).unwrap();
        assert!(seen.lock().unwrap().iter().flatten().all(|&seen| seen));
        std::fs::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn lent_memory_serves_one_operation_at_a_time_and_stays_for_it() {
    let parent = tempfile::tempdir().unwrap();
    let (path, memory, sizes) = (parent.path().join("c"), lent(32 * MIB), [20 * MIB as u64]);
    let ((entered, waits), (go, held)) = (mpsc::channel(), mpsc::channel::<()>());
    let (held, first, calls) = (Mutex::new(held), AtomicBool::new(true), Calls::default());
    let inner = filler(&calls);
    let fill: Fill = Arc::new(move |all: &mut [Pulled<'_>]| {
        if first.swap(false, Ordering::Relaxed) {
            entered.send(()).unwrap();
            held.lock().unwrap().recv().unwrap();
        }
        inner(all)
    });
    let options = options(Io::Auto, 1, &memory);
    std::thread::scope(|scope| {
        let body = || write(&path, &sizes, &pulled(&sizes, &fill), u64::MAX, &options);
        let saving = builder().spawn_scoped(scope, body).unwrap();
        waits.recv().unwrap();
        let other = write(&parent.path().join("d"), &sizes, &pulled(&sizes, &fill), u64::MAX, &options);
        memory.close().unwrap();
        go.send(()).unwrap();
        saving.join().unwrap().unwrap();
        assert!(matches!(other, Err(Error::Misused(_))), "{other:?}");
    });
    let (drain, seen) = drainer(&calls, &sizes);
    read(&path, 1, &drain, &options).unwrap();
    assert!(seen.lock().unwrap().iter().flatten().all(|&seen| seen));
    memory.close().unwrap();
    assert!(matches!(read(&path, 1, &drain, &options), Err(Error::Misused(_))), "the memory is closed");
}
