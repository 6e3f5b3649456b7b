//! Niceness: how far worker threads yield to others. Each thread sets its own.

use std::io;

use super::thread::builder;

/// Sets the niceness of the calling thread, 0 to 19. `None` keeps the niceness of the process.
pub fn apply(nice: Option<u8>) -> io::Result<()> {
    let Some(nice) = nice else { return Ok(()) };
    // SAFETY: a plain system call without pointers. On Linux, "process 0" is the calling thread.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, libc::c_int::from(nice)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether threads of this process may set this niceness. Tries it in a thread that ends at once.
pub fn probe(nice: u8) -> io::Result<()> {
    builder().spawn(move || apply(Some(nice)))?.join().unwrap_or(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn niceness() -> i32 {
        // SAFETY: a plain system call without pointers.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    #[test]
    fn only_the_calling_thread_stands_back() {
        let before = niceness();
        let thread = builder().spawn(move || {
            apply(None).unwrap();
            assert_eq!(niceness(), before);
            apply(Some(7)).unwrap();
            assert_eq!(niceness(), 7);
        });
        thread.unwrap().join().unwrap();
        probe(7).unwrap();
        assert_eq!(niceness(), before);
    }
}
