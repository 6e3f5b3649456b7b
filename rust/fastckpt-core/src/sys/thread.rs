//! Threads.

/// A builder of threads with std's usual stack size. Without an explicit size, std looks for one in the environment.
pub fn builder() -> std::thread::Builder {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    std::thread::Builder::new().stack_size(2 << 20)
}
