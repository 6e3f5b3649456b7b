//! Tests the fields that readers copy twice. loom tries every order in which a thread is interrupted at most three
//! times, with every delay of a store in C's memory model.

mod sys {
    pub(crate) mod sync {
        pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
    }
}

#[path = "../../fastckpt-core/src/telemetry"]
mod telemetry {
    mod seqlock;

    // The functions as the core calls them.
    pub(crate) fn open(number: &super::AtomicU64) {
        seqlock::open(number);
    }

    pub(crate) fn write(number: &super::AtomicU64, change: impl FnOnce()) {
        seqlock::write(number, change);
    }

    pub(crate) fn hand_over(mark: &super::AtomicU64, to: u64, change: impl FnOnce()) {
        seqlock::hand_over(mark, to, change);
    }
}

use std::sync::Arc;

use loom::thread;
use sys::sync::Ordering::{Relaxed, SeqCst};
use sys::sync::{AtomicU64, fence};

/// A sequence number or a mark, and the two fields that it protects.
type Slot = [AtomicU64; 3];

fn set(slot: &Slot, value: u64) {
    slot[1].store(value, Relaxed);
    slot[2].store(value, Relaxed);
}

/// Reads as the monitor does: two copies, with the barriers of a `pread` in between. `None` if the copies differ.
fn copied(slot: &Slot) -> Option<[u64; 3]> {
    let copy = || [slot[2].load(Relaxed), slot[1].load(Relaxed), slot[0].load(Relaxed)];
    let first = copy();
    fence(SeqCst);
    (first == copy()).then_some(first)
}

fn tried(writer: fn(&Slot), sound: fn([u64; 3])) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let slot = Arc::new([0, 0, 0].map(AtomicU64::new));
        let shared = Arc::clone(&slot);
        let thread = thread::spawn(move || writer(&shared));
        if let Some(copy) = copied(&slot) {
            sound(copy);
        }
        thread.join().unwrap();
        sound(copied(&slot).unwrap());
    });
}

#[test]
fn fields_of_one_write_are_seen_together() {
    let writer = |slot: &Slot| {
        telemetry::write(&slot[0], || set(slot, 1));
        telemetry::write(&slot[0], || set(slot, 2));
    };
    tried(writer, |[second, first, number]| {
        assert!(number % 2 == 1 || (first == second && number == 2 * first), "{first} {second} {number}");
    });
}

#[test]
fn fields_that_are_open_are_nobodys() {
    let writer = |slot: &Slot| {
        telemetry::open(&slot[0]);
        slot[1].store(7, Relaxed);
        telemetry::write(&slot[0], || set(slot, 1));
    };
    tried(writer, |[second, first, number]| {
        assert!(number % 2 == 1 || first == second, "{first} {second} {number}");
    });
}

#[test]
fn fields_that_are_handed_over_belong_to_their_mark() {
    let writer = |slot: &Slot| {
        telemetry::hand_over(&slot[0], 1, || set(slot, 1));
        telemetry::hand_over(&slot[0], 2, || set(slot, 2));
    };
    tried(writer, |[second, first, mark]| {
        assert!(mark == 0 || (first == mark && second == mark), "{first} {second} {mark}");
    });
}
