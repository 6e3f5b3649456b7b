//! CPU costs without a device: counters, plan, manifest, checksum. `cargo bench -p fastckpt-core`.

use std::hint::black_box;
use std::path::Path;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use crc_fast::checksum_combine;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fastckpt_core::Environment;
use fastckpt_core::engine::options::BLOCK_SIZE;
use fastckpt_core::format::checksum::{Filled, PASS, Pair};
use fastckpt_core::format::groups;
use fastckpt_core::format::layout::{Plan, Reuse, Sizes, TensorSpec, lay_out};
use fastckpt_core::format::{checksum, decode, manifest};
use fastckpt_core::telemetry::{Call, Kind, Lane, Operation};
use safetensors::Dtype;
use serde_json::value::RawValue;

fn tensors(count: u64) -> Vec<TensorSpec> {
    let tensor = |index| TensorSpec {
        name: format!("model.layers.{index}.weight"),
        dtype: Dtype::BF16,
        shape: vec![64, 1 + index % 64],
        logical: None,
    };
    (0..count).map(tensor).collect()
}

/// One completed block: all counters that a worker writes for it. The limit is 50 ns.
fn counters(c: &mut Criterion) {
    let operation =
        Operation::begin(Kind::Save, Path::new("/nowhere/bench"), Call::default(), &Environment::default());
    let mut lane = Lane::new(&operation);
    c.bench_function("counters/completion", |b| {
        b.iter(|| {
            lane.completed(black_box(1_000));
            lane.moved(black_box(4 << 20));
        });
    });
    c.bench_function("counters/submission", |b| {
        b.iter(|| {
            black_box(lane.submitted(black_box(4 << 20)));
            lane.state(fastckpt_core::telemetry::State::Transfer);
        });
    });
}

fn plan(tensors: &[TensorSpec], shard: u64) -> Plan {
    let sizes = Sizes { shard, block: BLOCK_SIZE };
    lay_out(tensors, &groups::of(""), sizes, &Reuse::default()).expect("a plan")
}

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    for count in [1_000, 100_000] {
        let tensors = tensors(count);
        group.throughput(Throughput::Elements(count));
        group.bench_function(count.to_string(), |b| {
            b.iter(|| plan(black_box(&tensors), 5_000_000_000));
        });
    }
    group.finish();
}

fn manifests(c: &mut Criterion) {
    const COUNT: u64 = 10_000;
    let specs = tensors(COUNT);
    let plan = plan(&specs, u64::MAX);
    let shard = &plan.shards[0];
    let hex = checksum::to_hex(1);
    let body = manifest::Body {
        min_reader: 0,
        writer: manifest::Writer { name: "bench".to_owned(), version: "0".to_owned() },
        created: 0.0,
        saved: manifest::Saved {
            engine: "uring".to_owned(),
            fallback: None,
            threads: 1,
            seconds: 1.0,
            gigabytes_per_second: 1.0,
            options: Vec::new(),
            files: Vec::new(),
        },
        block_size: plan.block_size,
        shards: vec![manifest::ShardEntry {
            file: shard.file.clone(),
            prefix: String::new(),
            bytes: shard.bytes,
            data_offset: shard.header.len() as u64,
            header_crc: hex.clone(),
            crc: hex.clone(),
        }],
        tensors: specs
            .into_iter()
            .zip(&plan.places)
            .map(|(spec, &(shard, offset))| {
                let bytes = spec.bytes().expect("a size");
                let extents = fastckpt_core::format::geometry::extent_count(offset, bytes, plan.block_size);
                let crc = hex.repeat(extents as usize);
                let entry = manifest::Unpacked {
                    name: spec.name.as_str().into(),
                    dtype: spec.dtype,
                    shape: spec.shape.clone(),
                    shard,
                    offset,
                    crc: crc.as_str().into(),
                    crc64xz: hex.as_str().into(),
                    logical: None,
                };
                entry.into()
            })
            .collect(),
        structure: RawValue::from_string("[null]".to_owned()).expect("JSON"),
        metadata: RawValue::from_string("[null]".to_owned()).expect("JSON"),
        per_rank: None,
    };
    let bytes = manifest::encode(&body).expect("a manifest");
    let mut group = c.benchmark_group("manifest");
    group.throughput(Throughput::Elements(COUNT));
    group.bench_function("encode", |b| b.iter(|| manifest::encode(black_box(&body))));
    group.bench_function("decode", |b| b.iter(|| decode::decode(black_box((&bytes).into()), Path::new("m"))));
    group.finish();
}

/// Copies a part of a state into a message and computes its checksum in the same pass.
fn packed(message: &mut [u8], part: &[u8]) -> u64 {
    let mut sum = Filled::default();
    for at in (0..part.len()).step_by(PASS) {
        let end = part.len().min(at + PASS);
        message[at..end].copy_from_slice(&part[at..end]);
        sum.reached(&message[..end]);
    }
    sum.all(message)
}

fn checksums(c: &mut Criterion) {
    // A state, and 16 buffers that hold its blocks in turn. Both are too large for the caches.
    let (state, mut staging) = (vec![7u8; 256 << 20], vec![0u8; 64 << 20]);
    let blocks = || state.chunks(4 << 20);
    let mut copied = |copy: &dyn Fn(&mut [u8], &[u8])| {
        let slots = (0..16).map(|slot| slot * (4 << 20)).cycle();
        blocks().zip(slots).for_each(|(block, at)| copy(&mut staging[at..at + block.len()], block));
    };
    let mut group = c.benchmark_group("checksum");
    group.throughput(Throughput::Bytes(256 << 20)).sample_size(20);
    group.bench_function("of", |b| b.iter(|| blocks().map(checksum::of).fold(0, u64::wrapping_add)));
    group.bench_function("both", |b| b.iter(|| blocks().for_each(|block| _ = black_box(Pair::of(block)))));
    group.bench_function("copy and one", |b| {
        b.iter(|| copied(&|to, from| _ = black_box(checksum::copy(to, from))));
    });
    group.bench_function("copy and both", |b| {
        b.iter(|| copied(&|to, from| _ = black_box(Pair::copy(to, from.into()))));
    });
    group.finish();

    // A rank packs messages of 1 MiB from a state. The two benchmarks differ by the cost of the checksums.
    let mut message = vec![0u8; 1 << 20];
    let mut group = c.benchmark_group("message");
    group.throughput(Throughput::Bytes(256 << 20)).sample_size(20);
    group.bench_function("copy", |b| {
        b.iter(|| state.chunks(1 << 20).for_each(|part| black_box(&mut message).copy_from_slice(part)));
    });
    group.bench_function("copy and sum", |b| {
        b.iter(|| state.chunks(1 << 20).map(|part| packed(&mut message, part)).fold(0, u64::wrapping_add));
    });
    group.finish();

    let mut group = c.benchmark_group("combine");
    for len in [4 << 20, (4 << 20) - 1] {
        group.bench_function(format!("ours/{len}"), |b| {
            b.iter(|| checksum::combine(black_box(1), black_box(2), black_box(len)));
        });
        group.bench_function(format!("crate/{len}"), |b| {
            b.iter(|| checksum_combine(Crc64Nvme, black_box(1), black_box(2), black_box(len)));
        });
    }
    group.finish();
}

criterion_group!(benches, counters, planning, manifests, checksums);
criterion_main!(benches);
