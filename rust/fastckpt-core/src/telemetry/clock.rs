//! The clocks of the live counters, in nanoseconds.

use rustix::time::{ClockId, clock_gettime};

/// The monotonic clock.
#[must_use]
pub fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// The time of day, since 1970.
pub(super) fn time_of_day() -> u64 {
    nanoseconds(ClockId::Realtime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}
