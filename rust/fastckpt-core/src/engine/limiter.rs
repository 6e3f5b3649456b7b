//! Pacing: a limit on the bytes per second that all workers of an operation move together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How much unused time is made up for. With this slack, the time in which a worker copies and writes does not add to
/// its waiting time. More slack would cause a burst after each stall.
const SLACK: Duration = Duration::from_millis(200);

/// Hands out time, block by block. A block is booked before it moves, so the last block is counted, too.
#[derive(Debug)]
pub struct Limiter {
    begin: Instant,
    bytes_per_second: u64,
    /// When the time for everything booked so far ends, in nanoseconds after `begin`.
    paid: AtomicU64,
}

impl Limiter {
    /// Limits the rate to `bytes_per_second`, at least 1.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> Self {
        Self { begin: Instant::now(), bytes_per_second: bytes_per_second.max(1), paid: AtomicU64::new(0) }
    }

    /// Books `bytes` and returns how long to wait before moving them.
    pub fn book(&self, bytes: u64) -> Duration {
        self.book_at(bytes, self.begin.elapsed())
    }

    fn book_at(&self, bytes: u64, now: Duration) -> Duration {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let cost = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let earliest = now.saturating_sub(SLACK.as_nanos() as u64);
        let until = |paid: u64| paid.max(earliest).saturating_add(cost);
        // `Relaxed` is enough: only the value is shared.
        let before = self.paid.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid| Some(until(paid)));
        Duration::from_nanos(until(before.unwrap_or_else(|paid| paid)).saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_cost_time() {
        let limiter = Limiter::new(1000);
        let at = Duration::from_millis;
        assert_eq!(limiter.book_at(500, at(0)), at(500));
        assert_eq!(limiter.book_at(1000, at(0)), at(1500));
        assert_eq!(limiter.book_at(1000, at(1000)), at(1500));
        assert_eq!(Limiter::new(0).book_at(1, at(0)), at(1000));
    }

    #[test]
    fn a_little_lost_time_is_made_up_for_and_a_stall_is_not() {
        let limiter = Limiter::new(1000);
        let at = Duration::from_millis;
        assert_eq!(limiter.book_at(100, at(0)), at(100));
        assert_eq!(limiter.book_at(100, at(150)), at(50), "the call comes 50 ms late");
        assert_eq!(limiter.book_at(1000, at(60_000)), at(800), "the call comes a minute late");
    }
}
