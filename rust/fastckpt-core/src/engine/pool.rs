//! Threads that share work: how they start and end, and how much work one of them takes at a time.

use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::Instant;

use super::job::TICK;
use super::options::{BLOCK_SIZE, Options};
use crate::error::{Error, Result, panic_text};
use crate::format::geometry::SINGLE;
use crate::sys::calls::Calls;
use crate::sys::nice;
use crate::sys::sync::{AtomicUsize, Mutex, Ordering, current, park_timeout, scope};
use crate::sys::thread::builder;

/// More threads than this were never faster, because they share the memory bandwidth.
pub(crate) const MOST_THREADS: usize = 8;
/// Bytes that one call fetches from elsewhere to compute checksums. All threads together need less memory than the
/// staging buffers of a save, of which none is in use yet.
const FETCHED: u64 = 8 << 20;

/// The threads of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pool {
    /// The name of the threads, before their numbers.
    name: &'static str,
    /// The number of threads. If it is 0, the calling thread does the work.
    threads: usize,
    niceness: Option<u8>,
}

impl Pool {
    /// A pool for work on `bytes` of memory. If this is little memory, the calling thread does the work.
    pub(crate) fn new(name: &'static str, bytes: u64, options: &Options) -> Self {
        let threads = options.threads.unwrap_or_else(|| options.cores()).min(MOST_THREADS);
        Self { name, threads: if bytes < SINGLE { 0 } else { threads }, niceness: options.nice }
    }

    /// A pool of `threads` threads.
    pub(crate) const fn of(name: &'static str, threads: usize) -> Self {
        Self { name, threads, niceness: None }
    }

    /// The same pool, but its threads keep the niceness of the calling thread.
    pub(crate) const fn as_nice_as_the_caller(self) -> Self {
        Self { niceness: None, ..self }
    }

    /// Calls `work` with each number below `count`. The first failure, a panic included, ends the work and is returned.
    /// `progress` is called on the calling thread about ten times a second, and returns whether to go on.
    pub(crate) fn run(
        self,
        count: usize,
        progress: &mut dyn FnMut() -> bool,
        work: &(dyn Fn(usize) -> Result<()> + Sync),
    ) -> Result<()> {
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        let fail = |error: Error| {
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            next.store(count, Ordering::Relaxed);
        };
        let one = || {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return false;
            }
            match catch_unwind(AssertUnwindSafe(|| work(number))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => fail(error),
                Err(panic) => fail(Error::Panic(panic_text(&*panic))),
            }
            true
        };
        let mut go_on = || {
            if !progress() {
                fail(Error::Interrupted);
            }
        };
        let all = |_| {
            let _ = nice::apply(self.niceness); // the caller has checked that the kernel allows it
            while one() {}
        };
        let (started, _) = in_threads(self.name, self.threads.min(count), &all, &mut go_on);
        let mut last = Instant::now();
        while started == 0 && one() {
            if last.elapsed() >= TICK {
                last = Instant::now();
                go_on();
            }
        }
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// Calls `work` in `threads` threads, with the number of each, and waits for them. Meanwhile it calls `progress` about
/// ten times a second. If only some threads start, they suffice. Returns how many started, and an error if not all did.
pub(super) fn in_threads(
    name: &str,
    threads: usize,
    work: &(dyn Fn(usize) + Sync),
    progress: &mut dyn FnMut(),
) -> (usize, Option<io::Error>) {
    let running = AtomicUsize::new(threads);
    let (caller, calls) = (current(), Calls::current());
    let (mut started, mut refused) = (0, None);
    scope(|scope| {
        for number in 0..threads {
            let (running, caller, calls) = (&running, &caller, calls.clone());
            let body = move || {
                Calls::enter(calls);
                work(number);
                running.fetch_sub(1, Ordering::AcqRel);
                caller.unpark();
            };
            if let Err(error) = builder().name(format!("{name}-{number}")).spawn_scoped(scope, body) {
                running.fetch_sub(1, Ordering::AcqRel);
                refused = Some(error);
            } else {
                started += 1;
            }
        }
        while running.load(Ordering::Acquire) > 0 {
            park_timeout(TICK);
            progress();
        }
    });
    (started, refused)
}

/// Divides `parts`, whose checksums are computed, into batches: ranges of numbers. A thread takes one batch at a time.
/// A part is given by its bytes and by whether callbacks supply them. Also returns the number of bytes of all parts.
pub(crate) fn batches(parts: impl IntoIterator<Item = (u64, bool)>) -> (Vec<Range<usize>>, u64) {
    let (mut all, mut total) = (Vec::new(), 0);
    // The current batch: its first part, its bytes, and whether callbacks supply them.
    let (mut begin, mut bytes, mut pulled, mut end) = (0, 0, false, 0);
    for (len, pulls) in parts {
        let most = if pulls { FETCHED } else { BLOCK_SIZE };
        if bytes > 0 && (pulls != pulled || bytes + len > most) {
            all.push(begin..end);
            (begin, bytes) = (end, 0);
        }
        (pulled, bytes, total, end) = (pulls, bytes + len, total + len, end + 1);
    }
    if begin < end {
        all.push(begin..end);
    }
    (all, total)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new("test", SINGLE, &Options { threads: Some(threads), ..Options::default() })
    }

    #[test]
    fn each_number_is_worked_on_once() {
        for threads in [0, 1, 3] {
            let seen: Vec<_> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            let work = |number: usize| {
                seen[number].fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            pool(threads).run(seen.len(), &mut || true, &work).unwrap();
            assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn the_first_failure_ends_the_work() {
        for threads in [0, 2] {
            let begun = AtomicUsize::new(0);
            let work = |number: usize| {
                begun.fetch_add(1, Ordering::Relaxed);
                if number == 0 { Err(Error::Misused("first")) } else { panic!("later") }
            };
            let error = pool(threads).run(1000, &mut || true, &work).unwrap_err();
            assert!(matches!(error, Error::Misused("first") | Error::Panic(_)), "{error}");
            assert!(begun.into_inner() <= threads.max(1) * 2);
        }
        let slow = |_| {
            thread::sleep(TICK);
            Ok(())
        };
        for threads in [0, 2] {
            let stopped = pool(threads).run(1000, &mut || false, &slow);
            assert!(matches!(stopped, Err(Error::Interrupted)));
        }
    }

    #[test]
    fn batches_end_at_their_size_and_where_callbacks_begin() {
        let parts =
            [(1, false), (BLOCK_SIZE - 1, false), (0, false), (5, false), (5, true), (FETCHED - 5, true)];
        assert_eq!(batches(parts), (vec![0..3, 3..4, 4..6], BLOCK_SIZE + 5 + FETCHED));
        // A part larger than a batch is one batch.
        assert_eq!(batches([(2 * FETCHED, true), (1, true)]), (vec![0..1, 1..2], 2 * FETCHED + 1));
        assert_eq!(batches([]), (Vec::new(), 0));
    }
}
