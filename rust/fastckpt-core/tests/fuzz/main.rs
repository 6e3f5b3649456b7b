//! Runs the targets of the fuzzer in the gate: on kept inputs and on mutations of them, which are the same each time.
//! `scripts/fuzz` continues with libFuzzer.

mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};

use targets::{Draw, TARGETS};

const MUTATIONS: usize = 10_000;

/// Texts that trigger errors which a number or a bracket would not.
const WORDS: [&[u8]; 12] = [
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b"\"",
    b"null",
    b"18446744073709551615",
    b"-0",
    b"1e400",
    b"[[[[",
    b"\xf0\x9f\x98\x80",
];

/// Changes some bytes of `data`, or mixes it with `other`.
fn mutated(mut data: Vec<u8>, other: &[u8], draw: &mut Draw) -> Vec<u8> {
    for _ in 0..=draw.below(4) {
        let at = draw.below(data.len() + 1);
        match draw.below(7) {
            0 => data.splice(at..at, WORDS[draw.below(WORDS.len())].iter().copied()).for_each(drop),
            1 => drop(data.drain(at..(at + 1 + draw.below(16)).min(data.len()))),
            2 => data.extend_from_within(at..),
            3 => data.splice(at.., other[draw.below(other.len() + 1)..].iter().copied()).for_each(drop),
            4 => data.truncate(at),
            5 => data.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << draw.below(8)),
            _ => data.iter_mut().skip(at).take(1 + draw.below(8)).for_each(|byte| *byte = draw.next() as u8),
        }
    }
    data.truncate(1 << 14);
    data
}

fn play(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target");
    let (seeds, mut draw) = (target.seeds(), Draw(1));
    let first = seeds.iter().cloned();
    for number in 0..MUTATIONS + seeds.len() {
        let data = first.clone().nth(number).unwrap_or_else(|| {
            let other = seeds[draw.below(seeds.len())].clone();
            mutated(seeds[draw.below(seeds.len())].clone(), &other, &mut draw)
        });
        if catch_unwind(AssertUnwindSafe(|| (target.run)(&data))).is_err() {
            let hex = data.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
            panic!("keep this line in found.txt: {name} {hex}");
        }
    }
}

#[test]
fn headers() {
    play("header");
}

#[test]
fn manifests() {
    play("manifest");
}

#[test]
fn messages() {
    play("messages");
}

#[test]
fn plans() {
    play("plan");
}

#[test]
fn tokens() {
    play("tokens");
}
