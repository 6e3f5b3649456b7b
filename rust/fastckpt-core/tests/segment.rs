//! Tests of the golden segment and the layout, which the monitor's tests read (`docs/telemetry.md`, 9).
//!
//! `FASTCKPT_WRITE_GOLDEN=1 cargo test --test segment` writes them again. Do this only for a new layout version.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use fastckpt_core::sys::shm;
use fastckpt_core::telemetry::layout::{self, Segment};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(name)
}

/// Compares `bytes` with the file in tests/data, or writes the file.
fn golden(name: &str, bytes: &[u8]) {
    let path = data(name);
    #[expect(clippy::disallowed_methods, reason = "a test has no other thread that writes to it")]
    if std::env::var_os("FASTCKPT_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, bytes).expect("a file in tests/data");
    }
    let golden = std::fs::read(&path).expect("a golden file in tests/data");
    assert!(golden == bytes, "{} differs: a released layout never changes", path.display());
}

/// A process in the middle of its second operation.
#[expect(clippy::too_many_lines, reason = "one line a field")]
fn fill(segment: &Segment) {
    let header = &segment.header;
    header.magic.store(layout::MAGIC, Relaxed);
    header.major.store(layout::MAJOR, Relaxed);
    header.minor.store(layout::MINOR, Relaxed);
    for (field, value) in [
        (&header.header_size, 256),
        (&header.total_size, 0x9000),
        (&header.endian_tag, 0x0102_0304),
        (&header.op_off, 0x200),
        (&header.op_stride, 512),
        (&header.op_count, 7),
        (&header.thr_off, 0x1000),
        (&header.thr_stride, 256),
        (&header.thr_count, 64),
        (&header.hist_off, 0x5000),
        (&header.hist_stride, 256),
        (&header.hist_count, 64),
        (&header.pid, 4242),
        (&header.uid, 1000),
        (&header.generation, 1),
    ] {
        field.store(value, Relaxed);
    }
    for (field, value) in [
        (&header.features, 1),
        (&header.start_ticks, 123_456),
        (&header.pid_ns, 4_026_531_836),
        (&header.mono0_ns, 1_000_000_000),
        (&header.real0_ns, 1_790_000_000_000_000_000),
        (&header.time_ns, 4_026_531_834),
        (&header.boot_id[0], 0x0706_0504_0302_0100),
        (&header.boot_id[1], 0x0F0E_0D0C_0B0A_0908),
    ] {
        field.store(value, Relaxed);
    }
    for (field, value) in [
        (&header.rank, 3),
        (&header.local_rank, 1),
        (&header.world, 16),
        (&header.local_world, 8),
        (&header.gpu, 1),
        (&header.numa, -1),
    ] {
        field.store(value, Relaxed);
    }
    header.version.set("0.1.0");
    header.job.set("train_gpt.py");

    let process = &segment.process;
    for (field, value) in [
        (&process.heartbeat, 77),
        (&process.state, 1),
        (&process.bytes_written, 5_000_000_000),
        (&process.bytes_read, 250),
        (&process.saves_ok, 2),
        (&process.saves_failed, 1),
        (&process.loads_ok, 4),
        (&process.loads_failed, 5),
        (&process.hist_head, 1),
        (&process.threads_used, 2),
        (&process.verifies_ok, 6),
        (&process.verifies_failed, 7),
        (&process.target_save, 3_000_000_000),
        (&process.target_load, 4_000_000_000),
        (&process.ops_unslotted, 8),
        (&process.group, 9),
        (&process.waits_for, 12),
        (&process.changed, (1 << 32) + 250_001),
        (&process.bytes_copied, 6_000_000_000),
        (&process.copies_ok, 14),
        (&process.copies_failed, 15),
    ] {
        field.store(value, Relaxed);
    }
    process.group_rank.store(10, Relaxed);
    process.group_size.store(16, Relaxed);
    process.changed_step.store(13, Relaxed);
    process.warned.store(2, Relaxed);
    process.warning.set("ranks differ in w");

    let operation = &segment.operations[1];
    for (field, value) in [
        (&operation.kind, 1),
        (&operation.phase, 3),
        (&operation.engine, 2),
        (&operation.flags, 3 | 1 << 7),
        (&operation.fallback_errno, 1),
        (&operation.threads, 2),
        (&operation.files_total, 4),
        (&operation.files_done, 1),
        (&operation.block_size, 4 << 20),
        (&operation.queue_depth, 8),
    ] {
        field.store(value, Relaxed);
    }
    for (field, value) in [
        (&operation.seq, 6),
        (&operation.op_id, 9),
        (&operation.bytes_total, 10_000_000_000),
        (&operation.bytes_durable, 2_500_000_000),
        (&operation.t_start_mono_ns, 2_000_000_000),
        (&operation.t_phase_mono_ns, 2_100_000_000),
        (&operation.st_dev, 65_024),
        (&operation.target, 1_500_000_000),
        (&operation.bytes_linked, 250_000_000),
        (&operation.bytes_staged, 9_900_000_000),
        (&operation.bytes_to_stage, 9_999_999_000),
    ] {
        field.store(value, Relaxed);
    }
    operation.step.store(1000, Relaxed);
    operation.label.set("step-1000");
    operation.path.set_tail("/mnt/checkpoints/step-1000");

    for (number, thread) in segment.threads.iter().take(2).enumerate() {
        let n = number as u64;
        for (field, value) in [
            (&thread.bytes_ever, 7_000_000_000 + n),
            (&thread.requests, 1700 + n),
            (&thread.bytes_submitted, 7_100_000_000 + n),
            (&thread.busy_ns, 3_000_000_000 + n),
            (&thread.source_wait_ns, 200_000_000 + n),
            (&thread.last_progress_mono_ns, 2_500_000_000 + n),
            (&thread.latency_sum_ns, 9_000_000_000 + n),
            (&thread.latency_max_ns, 12_000_000 + n),
            (&thread.op_id, 9),
            (&thread.bytes_op, 1_500_000_000 + n),
            (&thread.latency_hist[0], 10 + n),
            (&thread.latency_hist[15], 20 + n),
        ] {
            field.store(value, Relaxed);
        }
        let n = number as u32;
        for (field, value) in [
            (&thread.in_flight, 8 - n),
            (&thread.state, 2),
            (&thread.op_slot, 1),
            (&thread.errors, 3 + n),
            (&thread.retries, 1 + n),
            (&thread.shorts, 2 + n),
            (&thread.fsync_wait_ms, 40 + n),
            (&thread.peer_wait_ms, 50 + n),
            (&thread.tid, 4300 + n),
            (&thread.cpu, n),
            (&thread.file, 1 + n),
            (&thread.limit_wait_ms, 4 + n),
        ] {
            field.store(value, Relaxed);
        }
    }

    let record = &segment.history[0];
    for (field, value) in [
        (&record.kind, 2),
        (&record.result, 2),
        (&record.engine, 1),
        (&record.threads, 2),
        (&record.p50_us, 512),
        (&record.p99_us, 4096),
        (&record.flags, 65),
        (&record.fallback_errno, 22),
    ] {
        field.store(value, Relaxed);
    }
    for (field, value) in [
        (&record.op_id, 8),
        (&record.bytes, 123_456_789),
        (&record.t_start_real_ns, 1_790_000_000_500_000_000),
        (&record.dur_ns, 1_250_000_000),
        (&record.sync_ns, 50_000_000),
        (&record.peak_bps, 2_200_000_000),
        (&record.error, 5),
    ] {
        field.store(value, Relaxed);
    }
    record.step.store(-1, Relaxed);
    record.label.set("step-900");
    record.path.set_tail("/mnt/checkpoints/step-900");
}

#[test]
fn the_segment_is_what_it_was() {
    let directory = tempfile::tempdir().expect("a directory");
    shm::publish(&directory.path().join("top"), "4242-123456.seg", layout::empty(), fill).expect("a segment");
    let bytes = std::fs::read(directory.path().join("top/4242-123456.seg")).expect("its bytes");
    golden("segment-1.0.seg", &bytes);
}

#[test]
fn the_layout_is_what_it_was() {
    let structures: serde_json::Map<String, serde_json::Value> = layout::offsets()
        .into_iter()
        .map(|(name, fields)| {
            let fields: serde_json::Map<_, _> =
                fields.into_iter().map(|(name, offset)| (name.to_owned(), offset.into())).collect();
            (name.to_owned(), fields.into())
        })
        .collect();
    let text = serde_json::to_string_pretty(&structures).expect("JSON");
    golden("segment-1.0.json", format!("{text}\n").as_bytes());
}
