//! Runs libFuzzer on one target of `rust/fastckpt-core/tests/fuzz`. `FASTCKPT_FUZZ` names the target, and
//! `FASTCKPT_FUZZ_SEEDS` the directory for the first inputs.
#![no_main]

#[path = "../../fastckpt-core/tests/fuzz/targets.rs"]
#[allow(dead_code)] // libFuzzer draws the mutations itself
mod targets;

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use targets::{TARGETS, Target};

static TARGET: OnceLock<&Target> = OnceLock::new();

/// Finds the target, and writes its seeds.
fn begin() {
    let name = std::env::var("FASTCKPT_FUZZ").expect("FASTCKPT_FUZZ");
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of this name");
    let seeds = PathBuf::from(std::env::var_os("FASTCKPT_FUZZ_SEEDS").expect("FASTCKPT_FUZZ_SEEDS"));
    for (number, seed) in target.seeds().iter().enumerate() {
        std::fs::write(seeds.join(format!("seed-{number:03}")), seed).expect("a seed");
    }
    TARGET.get_or_init(|| target);
}

fuzz_target!(init: begin(), |data: &[u8]| (TARGET.get().expect("it has begun").run)(data));
