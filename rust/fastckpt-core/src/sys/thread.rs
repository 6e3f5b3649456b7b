//! Threads.

/// A thread to be started, with the stack that std gives: std looks for another size in the environment unless it is
/// given one.
pub fn builder() -> std::thread::Builder {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    std::thread::Builder::new().stack_size(2 << 20)
}
