//! Threads, and how they wait.

use std::time::Duration;

/// A builder of threads with std's default stack size. Without an explicit size, std reads it from the environment.
pub fn builder() -> std::thread::Builder {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    std::thread::Builder::new().stack_size(2 << 20)
}

/// The first pause of a [`Backoff`], and the number of pauses. Each is twice as long as the one before: 2 s in total.
const PAUSES: (Duration, u32) = (Duration::from_micros(if cfg!(test) { 1 } else { 1000 }), 11);

/// Pauses between attempts at a call that the kernel refuses for the moment (`EAGAIN`).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Backoff(u32);

impl Backoff {
    /// Waits before the next attempt. Returns `false`, without a wait, if there were enough attempts.
    pub fn wait(&mut self) -> bool {
        let (first, most) = PAUSES;
        let goes_on = self.0 < most;
        if goes_on {
            std::thread::sleep(first * (1 << self.0));
            self.0 += 1;
        }
        goes_on
    }
}
