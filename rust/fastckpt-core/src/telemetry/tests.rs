use std::sync::atomic::Ordering::Relaxed;

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use super::codes::FAILED;
use super::layout::{self, BUCKETS, Segment};
use super::operation::{bucket_of, quantile};
use super::*;
use crate::environment::Environment;
use crate::sys::shm;

/// Publishes the test's own segment in a directory where no monitor looks.
fn publish(directory: &Path, name: &str) -> std::io::Result<shm::Shared<Segment>> {
    shm::publish(directory, name, layout::empty(), |segment| {
        segment.header.magic.store(layout::MAGIC, Relaxed);
    })
}

#[test]
fn latencies_fall_into_their_buckets() {
    let operation = Operation::begin(
        Kind::Save,
        Path::new("/nowhere/latencies"),
        Call::default(),
        &Environment::default(),
    );
    let mut lane = Lane::new(&operation);
    for (latency, bucket) in [(0, 0), (63_999, 0), (64_000, 1), (127_999, 1), (128_000, 2), (1 << 40, 15)] {
        let before = lane.histogram[bucket];
        lane.histogram[bucket_of(latency)] += 1;
        assert_eq!(lane.histogram[bucket], before + 1, "{latency} ns");
    }
}

#[test]
fn quantiles_are_the_upper_ends_of_buckets() {
    let mut histogram = [0; BUCKETS];
    assert_eq!(quantile(&histogram, 50, 0), 0);
    histogram[0] = 98;
    histogram[3] = 2;
    assert_eq!((quantile(&histogram, 50, 400_000), quantile(&histogram, 99, 400_000)), (64, 512));
    histogram[BUCKETS - 1] = 100;
    assert_eq!(quantile(&histogram, 99, 7_000_000_000), 7_000_000, "the last bucket has no end");
}

#[test]
fn text_is_cut_between_characters() {
    let text: layout::Text<1> = layout::Text::default();
    text.set("sieben\u{e4}\u{e4}");
    assert_eq!(text.get(), "sieben\u{e4}");
    text.set_tail("\u{e4}\u{e4}sieben");
    assert_eq!(text.get(), "\u{e4}sieben");
    text.set("kurz");
    assert_eq!(text.get(), "kurz");
}

#[test]
fn an_operation_is_counted_from_begin_to_end() {
    let path = Path::new("/nowhere/counted");
    let operation =
        Operation::begin(Kind::Save, path, Call { step: Some(7), at: None }, &Environment::default());
    let slot = operation.slot;
    assert_eq!((slot.label.get().as_str(), slot.step.load(Relaxed)), ("counted", 7));
    let planned = Planned { bytes: 100, files: 2, block_size: 4096, threads: 1, queue_depth: 8 };
    operation.start(&planned, Phase::Write);
    operation.ran(&Ran { engine: 2, direct: true, mixed: false, errno: Some(1), fell: 1 << 7 });
    assert_eq!(
        (slot.engine.load(Relaxed), slot.flags.load(Relaxed), slot.fallback_errno.load(Relaxed)),
        (2, 3 | 1 << 7, 1)
    );
    let mut lane = Lane::new(&operation);
    let submitted = lane.submitted(60);
    assert_eq!(lane.slot.in_flight.load(Relaxed), 1);
    lane.completed(submitted);
    lane.moved(60);
    let (requests, thread) = (lane.slot.requests.load(Relaxed), lane.slot);
    assert!(requests >= 1 && thread.in_flight.load(Relaxed) == 0);
    assert_eq!((thread.bytes_op.load(Relaxed), thread.op_id.load(Relaxed)), (60, operation.id));
    assert_eq!((lane.bytes(), operation.done()), (60, 60));
    drop(lane);
    operation.phase(Phase::Fsync);
    operation.phase(Phase::Write);
    assert_eq!(slot.phase.load(Relaxed), Phase::Fsync as u32, "a phase never goes back");
    operation.tick();
    let totals = &operation.segment.process;
    let failed = totals.saves_failed.load(Relaxed);
    operation.end(Err(Some(28)));
    operation.end(Ok(()));
    assert_eq!((slot.phase.load(Relaxed), slot.error.load(Relaxed)), (7, 28), "the first end counts");
    assert!(slot.seq.load(Relaxed).is_multiple_of(2) && slot.t_end_mono_ns.load(Relaxed) > 0);
    assert!(totals.saves_failed.load(Relaxed) > failed);
}

#[test]
fn a_record_has_the_longest_latency_where_a_bucket_has_no_end() {
    let path = Path::new("/nowhere/slow");
    let operation = Operation::begin(Kind::Verify, path, Call::default(), &Environment::default());
    let (segment, id) = (operation.segment, operation.id);
    let mut lane = Lane::new(&operation);
    let submitted = lane.submitted(1);
    lane.completed(submitted - 7_000_000_000);
    drop(lane);
    operation.end(Ok(()));
    let record = segment.history.iter().find(|record| record.op_id.load(Relaxed) == id).unwrap();
    assert!(record.p99_us.load(Relaxed) >= 7_000_000);
}

#[test]
fn an_abandoned_operation_has_failed() {
    let operation = Operation::begin(
        Kind::Load,
        Path::new("/nowhere/abandoned"),
        Call::default(),
        &Environment::default(),
    );
    let slot = operation.slot;
    drop(operation);
    assert_eq!(slot.phase.load(Relaxed), FAILED);
}

#[test]
fn a_url_is_shown_as_it_is() {
    let url = "s3://bucket/run/step-7";
    let operation = Operation::begin(Kind::Load, Path::new(url), Call::default(), &Environment::default());
    assert_eq!((operation.slot.path.get().as_str(), operation.slot.label.get().as_str()), (url, "step-7"));
}

/// A save of 100 bytes whose program called a second ago, and its slot.
fn begun(path: &str) -> (Begun, &'static layout::OperationSlot) {
    let call = Call { step: None, at: std::time::Instant::now().checked_sub(Duration::from_secs(1)) };
    let begun = Begun::stage(Path::new(path), 100, call, &Environment::default());
    let operation = begun.take().unwrap();
    let slot = operation.slot;
    (Begun::of(operation), slot)
}

#[test]
fn a_save_is_shown_while_its_state_is_copied() {
    let (begun, slot) = begun("/nowhere/staged");
    let phase = || slot.phase.load(Relaxed);
    let age = clock::now() - slot.t_start_mono_ns.load(Relaxed);
    assert!(age >= 1_000_000_000, "it began with the call, {age} ns ago");
    begun.staged(60);
    assert_eq!((phase(), slot.bytes_staged.load(Relaxed), slot.bytes_to_stage.load(Relaxed)), (2, 60, 100));
    begun.plan();
    assert_eq!(phase(), Phase::Plan as u32);
    let operation = begun.take().unwrap();
    // The operation now belongs to the core.
    begun.staged(70);
    begun.fail(Some(5));
    assert_eq!((phase(), slot.bytes_staged.load(Relaxed)), (1, 60));
    operation.phase(Phase::Stage);
    assert_eq!(phase(), Phase::Plan as u32, "a phase never goes back");
    operation.phase(Phase::Write);
    assert_eq!(phase(), Phase::Write as u32);
    operation.end(Ok(()));
    let lasted = slot.t_end_mono_ns.load(Relaxed) - slot.t_start_mono_ns.load(Relaxed);
    assert!(phase() == codes::DONE && lasted >= age);
}

#[test]
fn a_copy_that_fails_or_is_given_up_ends_its_operation() {
    let (failed, slot) = begun("/nowhere/failed");
    failed.fail(Some(5));
    assert_eq!((slot.phase.load(Relaxed), slot.error.load(Relaxed)), (FAILED, 5));
    let (dropped, slot) = begun("/nowhere/dropped");
    drop(dropped);
    assert_eq!((slot.phase.load(Relaxed), slot.error.load(Relaxed)), (FAILED, 0));
}

#[test]
fn waits_are_told_apart_and_small_ones_add_up() {
    let path = Path::new("/nowhere/waits");
    let operation = Operation::begin(Kind::Save, path, Call::default(), &Environment::default());
    let lane = Lane::new(&operation);
    let slot = lane.slot;
    let counters = [&slot.limit_wait_ms, &slot.fsync_wait_ms, &slot.peer_wait_ms];
    let values = || counters.map(|counter| counter.load(Relaxed));
    let kinds = [State::Limit, State::Fsync, State::Peers];
    for (number, state) in kinds.into_iter().enumerate() {
        let before = values();
        // Adds only the time inside the closure: a busy machine may delay this thread between the calls.
        let mut waited = 0;
        while waited < 2_000_000 {
            // Each wait is shorter than a millisecond, the unit of the counters.
            lane.during(state, || {
                let begin = clock::now();
                assert_eq!(slot.state.load(Relaxed), state as u32);
                std::thread::sleep(Duration::from_micros(100));
                waited += clock::now() - begin;
            });
        }
        for (other, (then, now)) in before.into_iter().zip(values()).enumerate() {
            assert_eq!(now > then, other == number, "{state:?}: {before:?} {:?}", values());
        }
    }
}

#[test]
fn only_a_directory_of_ours_is_published_into() {
    use std::os::unix::fs::PermissionsExt as _;
    let parent = tempfile::tempdir().unwrap();
    let mine = parent.path().join("mine");
    publish(&mine, "1-1.seg").unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&mine), mode(&mine.join("1-1.seg"))), (0o700, 0o600));
    assert_eq!(std::fs::metadata(mine.join("1-1.seg")).unwrap().len(), 0x9000);
    let open = parent.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    assert!(publish(&open, "1-1.seg").is_err());
    let link = parent.path().join("link");
    std::os::unix::fs::symlink(&mine, &link).unwrap();
    assert!(publish(&link, "1-2.seg").is_err());
    assert!(publish(&parent.path().join("no/parent"), "1-1.seg").is_err());
}

#[test]
fn a_living_segment_keeps_its_name_and_old_dead_ones_go() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("d");
    publish(&directory, "1-1.seg").unwrap();
    assert!(publish(&directory, "1-1.seg").is_err());
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
    for (name, old) in [("2-2.seg", true), ("3-3.seg", false), (".4-4.seg", true), ("notes.txt", true)] {
        let file = std::fs::File::create(directory.join(name)).unwrap();
        if old {
            file.set_modified(long_ago).unwrap();
        }
    }
    std::fs::File::open(directory.join("1-1.seg")).unwrap().set_modified(long_ago).unwrap();
    publish(&directory, "3-3.seg").unwrap();
    let mut left: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["1-1.seg", "3-3.seg", "notes.txt"]);
}

#[test]
fn a_slot_is_closed_after_its_record_and_while_nobody_can_take_it() {
    let operation =
        Operation::begin(Kind::Save, Path::new("/nowhere/closed"), Call::default(), &Environment::default());
    let (filled, closed) = (Cell::new(false), Cell::new(false));
    let fill = |_: &layout::Record| {
        assert!(!closed.get(), "the record is filled from the slot before the slot is closed");
        filled.set(true);
    };
    let close = || {
        assert!(process::is_locked(), "another operation may take the slot as soon as it is closed");
        closed.set(true);
    };
    process::finish(operation.segment, (operation.number, operation.id), Kind::Save, true, 0, fill, close);
    assert!(closed.get());
    assert_eq!(filled.get(), operation.number != layout::NO_SLOT);
}

#[test]
fn the_ranks_of_a_machine_are_known_from_the_launcher_or_where_all_meet_on_it() {
    let ranks = |set: &'static [(&'static str, &'static str)]| {
        let value = move |name: &str| Some(set.iter().find(|(known, _)| *known == name)?.1.into());
        process::local_world(&Environment::of(value))
    };
    assert_eq!(ranks(&[]), -1);
    assert_eq!(ranks(&[("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8"), ("MASTER_ADDR", "127.0.0.1")]), 8);
    assert_eq!(ranks(&[("WORLD_SIZE", "4")]), 4, "the ranks meet in a file");
    assert_eq!(ranks(&[("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1")]), 4);
    assert_eq!(ranks(&[("WORLD_SIZE", "4"), ("MASTER_ADDR", "node-7")]), -1);
    assert_eq!(ranks(&[("WORLD_SIZE", "4"), ("SLURM_STEP_NUM_NODES", "2")]), -1);
}

#[test]
fn a_copy_is_counted_apart_and_its_bytes_never_go_back() {
    let environment = Environment::default();
    for (kind, phase) in [(Kind::Copy, 9), (Kind::Drain, 10), (Kind::Fetch, 11)] {
        let copy = Begun::copy(kind, Path::new("s3://bucket/step-7"), Some(7), &environment);
        let operation = copy.take().unwrap();
        let (slot, totals) = (operation.slot, &operation.segment.process);
        let before = [&totals.copies_ok, &totals.bytes_copied].map(|total| total.load(Relaxed));
        let copy = Begun::of(operation);
        let seen = || [&slot.bytes_total, &slot.bytes_durable].map(|field| field.load(Relaxed));
        assert_eq!((slot.phase.load(Relaxed), slot.target.load(Relaxed), seen()), (1, 0, [0, 0]));
        for (bytes, shown) in [(40, 40), (30, 40), (100, 100)] {
            copy.copied(bytes, 100);
            assert_eq!((slot.phase.load(Relaxed), seen()), (phase, [100, shown]));
        }
        copy.end_copy(true);
        copy.fail(None);
        assert_eq!((slot.phase.load(Relaxed), slot.flags.load(Relaxed)), (6, 1 << 11));
        let after = [&totals.copies_ok, &totals.bytes_copied].map(|total| total.load(Relaxed));
        assert_eq!(after, [before[0] + 1, before[1] + 100]);
    }
}

#[test]
fn a_job_is_its_launcher() {
    let step = |number: &'static str| {
        Environment::of(move |name| match name {
            "SLURM_JOB_ID" => Some("7".into()),
            "SLURM_STEP_ID" => Some(number.into()),
            _ => None,
        })
    };
    let launch = process::launch;
    assert_eq!(launch(&step("0"), 8, 1), launch(&step("0"), 9, 2), "two processes of a step");
    assert_ne!(launch(&step("0"), 8, 1), launch(&step("1"), 8, 1));
    let none = Environment::default();
    assert_ne!(launch(&none, 8, 1), launch(&step("0"), 8, 1));
    assert_eq!(launch(&none, 8, 1), launch(&none, 8, 2), "two children of a launcher");
    assert_ne!(launch(&none, 8, 1), launch(&none, 9, 1));
    assert_ne!(launch(&none, 1, 1), launch(&none, 1, 2), "no launcher started them");
    let pod = |address: &'static str, rank: &'static str| {
        Environment::of(move |name| match name {
            "RANK" => Some(rank.into()),
            "MASTER_ADDR" => Some(address.into()),
            "MASTER_PORT" => Some("23456".into()),
            _ => None,
        })
    };
    assert_eq!(
        launch(&pod("a-master-0", "0"), 0, 1),
        launch(&pod("a-master-0", "1"), 0, 2),
        "the first processes of two pods"
    );
    assert_ne!(launch(&pod("a-master-0", "0"), 0, 1), launch(&pod("b-master-0", "0"), 0, 1));
    assert_eq!(
        launch(&pod("a-master-0", "0"), 8, 1),
        launch(&none, 8, 1),
        "a restarted attempt may meet at another address"
    );
}
