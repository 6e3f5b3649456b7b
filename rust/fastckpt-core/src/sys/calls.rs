//! The calls to storage that are under way in a job's threads, for its waiting caller: storage may never respond.
//!
//! A thread joins a job with [`Calls::enter`]. From then on, it records each call for as long as the call lasts. In
//! other threads, this costs almost nothing.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Calls>>> = const { RefCell::new(None) };
}

/// The calls of one job.
#[derive(Debug)]
pub struct Calls {
    state: Mutex<State>,
    /// Whether the job has reached the calls that cannot be undone.
    final_calls: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// The calls under way, in the order in which they began.
    under_way: BTreeMap<u64, Call>,
    begun: u64,
    /// When a call last ended.
    ended: Instant,
}

#[derive(Debug)]
struct Call {
    operation: &'static str,
    /// An open file or directory. The name is inside it, or empty for the file or directory itself.
    at: Option<RawFd>,
    name: PathBuf,
    since: Instant,
}

/// A call that has not ended for a while.
#[derive(Debug)]
pub struct Hanging {
    /// The operation, as a verb.
    pub operation: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// How long the call has lasted.
    pub since: Duration,
    /// The time since a call last ended, but no longer than `since`.
    pub quiet: Duration,
}

impl Default for Calls {
    fn default() -> Self {
        let state = State { under_way: BTreeMap::new(), begun: 0, ended: Instant::now() };
        Self { state: Mutex::new(state), final_calls: AtomicBool::new(false) }
    }
}

impl Calls {
    /// The calls of the job for which the calling thread works.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Makes the calling thread work for a job, until the thread ends.
    pub fn enter(calls: Option<Arc<Self>>) {
        CURRENT.set(calls);
    }

    /// The call that has lasted longest, if no call has ended for at least `patience`.
    pub fn hanging(&self, patience: Duration) -> Option<Hanging> {
        let state = self.state();
        let (_, &Call { operation, at, ref name, since }) = state.under_way.first_key_value()?;
        let quiet = since.max(state.ended).elapsed();
        if quiet < patience {
            return None;
        }
        // The descriptor stays open during the call, which cannot end without the lock.
        let at = at.map(path_of).unwrap_or_default();
        let path = if name == Path::new("") { at } else { at.join(name) };
        Some(Hanging { operation, path, since: since.elapsed(), quiet })
    }

    /// Whether the job has reached the calls that cannot be undone.
    pub fn in_final_calls(&self) -> bool {
        self.final_calls.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From here on, calls of the calling thread's job cannot be undone.
pub fn final_calls() {
    if let Some(calls) = Calls::current() {
        calls.final_calls.store(true, Ordering::Relaxed);
    }
}

/// A call that is under way until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Noted(Option<(Arc<Calls>, u64)>);

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some((calls, number)) = &self.0 {
            let mut state = calls.state();
            state.under_way.remove(number);
            state.ended = Instant::now();
        }
    }
}

/// Records a call on the file `fd` that the calling thread is about to make.
pub fn on(operation: &'static str, fd: impl AsFd) -> Noted {
    noted(operation, || (Some(fd.as_fd().as_raw_fd()), PathBuf::new()))
}

/// Records a call on `name` in the directory `fd`; without `fd`, on a path.
pub fn at(operation: &'static str, fd: Option<BorrowedFd<'_>>, name: impl FnOnce() -> PathBuf) -> Noted {
    noted(operation, || (fd.map(|fd| fd.as_raw_fd()).filter(|&fd| fd != libc::AT_FDCWD), name()))
}

fn noted(operation: &'static str, place: impl FnOnce() -> (Option<RawFd>, PathBuf)) -> Noted {
    let Some(calls) = Calls::current() else { return Noted(None) };
    let (at, name) = place();
    let mut state = calls.state();
    state.begun += 1;
    let number = state.begun;
    state.under_way.insert(number, Call { operation, at, name, since: Instant::now() });
    drop(state);
    Noted(Some((calls, number)))
}

/// The path of an open file.
fn path_of(fd: RawFd) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default()
}

/// A file whose close is recorded: the close may wait for a daemon or for the server of a network file system.
#[derive(Debug)]
pub struct Closing<T: AsFd>(ManuallyDrop<T>);

impl<T: AsFd> From<T> for Closing<T> {
    fn from(file: T) -> Self {
        Self(ManuallyDrop::new(file))
    }
}

impl<T: AsFd> Deref for Closing<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsFd> DerefMut for Closing<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: AsFd> AsFd for Closing<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<T: AsFd> Drop for Closing<T> {
    fn drop(&mut self) {
        // The descriptor's number is free as soon as the close begins.
        let fd = self.0.as_fd().as_raw_fd();
        let _call = at("close", None, || path_of(fd));
        // SAFETY: nothing uses the file after this.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_that_lasts_longest_hangs_once_no_call_ends() {
        let calls = Arc::new(Calls::default());
        drop(on("read", std::io::stdin()));
        assert!(
            Calls::current().is_none() && calls.hanging(Duration::ZERO).is_none(),
            "no thread works for this job"
        );
        Calls::enter(Some(Arc::clone(&calls)));
        let directory = tempfile::tempdir().unwrap();
        let file = Closing::from(std::fs::File::create(directory.path().join("a")).unwrap());
        let first = on("write", &*file);
        let second = at("rename", None, || "/c/d".into());
        let found = calls.hanging(Duration::ZERO).unwrap();
        assert_eq!((found.operation, found.path), ("write", directory.path().join("a")));
        assert!(calls.hanging(Duration::from_secs(9)).is_none());
        drop((first, file));
        let found = calls.hanging(Duration::ZERO).unwrap();
        assert_eq!((found.operation, found.path), ("rename", PathBuf::from("/c/d")));
        drop(second);
        assert!(calls.hanging(Duration::ZERO).is_none());
        Calls::enter(None);
    }
}
