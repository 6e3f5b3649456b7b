//! Saves that end even if the storage never responds.
//!
//! A call that the storage does not complete cannot be ended: its thread stays in the kernel, which may still read the
//! memory and write to the file. So the whole save runs in a separate thread that owns all it needs: memory, files,
//! locks. The caller waits for it, and abandons it once its calls hang (see [`crate::sys::calls`]). If the storage
//! responds later, the save finds at its next sign of life that no caller waits for it, and removes its files.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::job::{Progress, TICK};
use crate::error::{Error, Given, Result, panic_text};
use crate::sys::calls::{Calls, Hanging};
use crate::sys::thread::builder;
use crate::telemetry;

/// The abandoned saves: the directory of each checkpoint, the process, and the save's calls, which exist as long as one
/// of its threads exists.
static GIVEN_UP: Mutex<Vec<(PathBuf, u32, Weak<Calls>)>> = Mutex::new(Vec::new());

/// The monitor reports a call once no call has ended for this long. Storage that is only busy responds earlier.
const NOTABLE: Duration = Duration::from_secs(10);

/// What a job sends to its caller.
enum Word<T> {
    /// The progress of the job. The caller must answer it.
    Done(u64, u64),
    /// The end of the job.
    End(Result<T>),
}

/// Runs `job`, a step of a save to `path`. With a `deadline`, it fails once a call to the storage has lasted that long
/// and no other has ended meanwhile. Then the job is abandoned, so it must own all it uses. See also [`refuse`].
pub fn within<T: Send + 'static>(
    deadline: Option<Duration>,
    path: &Path,
    progress: Progress<'_>,
    job: impl FnOnce(Progress<'_>) -> Result<T> + Send + 'static,
) -> Result<T> {
    let Some(deadline) = deadline else { return job(progress) };
    let calls = Arc::new(Calls::default());
    let (words, heard) = channel();
    let (answers, answered) = channel();
    // If no thread can start, the caller still has the job.
    let job = Arc::new(Mutex::new(Some(job)));
    let body = {
        let (job, calls) = (Arc::clone(&job), Arc::clone(&calls));
        move || {
            Calls::enter(Some(calls));
            let job = lock(&job).take();
            if let Some(job) = job {
                let mut tell = |done, total| {
                    words.send(Word::Done(done, total)).is_ok() && answered.recv().unwrap_or(false)
                };
                let outcome = catch_unwind(AssertUnwindSafe(|| job(&mut tell)));
                let outcome = outcome.unwrap_or_else(|panic| Err(Error::Panic(panic_text(&*panic))));
                let _ = words.send(Word::End(outcome));
            }
        }
    };
    if builder().name("fastckpt-save".to_owned()).spawn(body).is_err() {
        let job = lock(&job).take();
        return job.map_or(Err(Error::Interrupted), |job| job(progress));
    }
    drop(job);
    let ended = wait((&heard, &answers), &calls, (deadline, NOTABLE), progress, &mut telemetry::warn);
    ended.unwrap_or_else(|hanging| {
        let directory = path.parent().unwrap_or(path);
        lock(&GIVEN_UP).push((directory.to_owned(), std::process::id(), Arc::downgrade(&calls)));
        telemetry::warn(&format!("given up: {}", text(&hanging)));
        let Hanging { operation, path: file, since, .. } = hanging;
        let end = if calls.in_final_calls() { Given::UpAtTheEnd } else { Given::Up };
        Err(Error::Hangs { operation, path: file, seconds: since.as_secs_f64(), end })
    })
}

/// Waits for a job, and returns its outcome or the call that hangs. Reports a call that lasts a `notable` time.
fn wait<T>(
    (heard, answers): (&Receiver<Word<T>>, &Sender<bool>),
    calls: &Calls,
    (deadline, notable): (Duration, Duration),
    progress: Progress<'_>,
    say: &mut dyn FnMut(&str),
) -> std::result::Result<Result<T>, Hanging> {
    let (mut last, mut go_on, mut told) = ((0, 0), true, false);
    loop {
        match heard.recv_timeout(TICK) {
            Ok(Word::End(outcome)) => return Ok(outcome),
            Ok(Word::Done(done, total)) => {
                last = (done, total);
                go_on = go_on && progress(done, total);
                let _ = answers.send(go_on);
            }
            Err(RecvTimeoutError::Timeout) => go_on = go_on && progress(last.0, last.1),
            Err(RecvTimeoutError::Disconnected) => return Ok(Err(Error::Interrupted)),
        }
        let hanging = calls.hanging(deadline.min(notable));
        // Data that is written may take longer to become durable.
        let most = hanging.as_ref().map(|hanging| notable * if hanging.operation == "sync" { 6 } else { 1 });
        if told != hanging.as_ref().zip(most).is_some_and(|(hanging, most)| hanging.quiet >= most) {
            say(&hanging.as_ref().map_or("the storage answers again".to_owned(), text));
            told = !told;
        }
        if let Some(hanging) = hanging.filter(|hanging| hanging.quiet >= deadline) {
            return Err(hanging);
        }
    }
}

/// The text that the monitor shows (`docs/telemetry.md`, 5.2).
fn text(Hanging { operation, path, since, .. }: &Hanging) -> String {
    let began = SystemTime::now() - *since;
    let day = began.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() % 86_400);
    let (hour, minute, second) = (day / 3600, day / 60 % 60, day % 60);
    let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    format!("has hung since {hour:02}:{minute:02}:{second:02}Z in {operation}: {file}")
}

/// Whether a save has ended because it was abandoned.
pub fn given_up<T>(outcome: &Result<T>) -> bool {
    matches!(outcome, Err(Error::Hangs { end: Given::Up | Given::UpAtTheEnd, .. }))
}

/// Checks whether a save to `path` may begin. With a deadline, it fails at once if an abandoned save to the same
/// directory has calls that still hang.
pub fn refuse(deadline: Option<Duration>, path: &Path) -> Result<()> {
    // Another thread may have held the lock when this process was forked.
    let Ok(mut all) = GIVEN_UP.try_lock() else { return Ok(()) };
    all.retain(|(_, process, calls)| *process == std::process::id() && calls.strong_count() > 0);
    let mut here = all.iter().filter(|(at, ..)| deadline.is_some() && Some(&**at) == path.parent());
    let hanging = here.find_map(|(.., calls)| calls.upgrade()?.hanging(Duration::ZERO));
    hanging.map_or(Ok(()), |Hanging { operation, path, since, .. }| {
        Err(Error::Hangs { operation, path, seconds: since.as_secs_f64(), end: Given::NotBegun })
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::sys::calls;

    const SHORT: Option<Duration> = Some(Duration::from_millis(1));

    #[test]
    fn a_job_that_answers_ends_as_without_a_deadline() {
        for deadline in [None, SHORT] {
            let mut asked = Vec::new();
            let mut progress = |done, total| {
                asked.push((done, total));
                done < 2
            };
            let job = |progress: Progress<'_>| Ok((1..4).map(|done| progress(done, 3)).collect::<Vec<_>>());
            // None of this is a call to the storage, however long it takes.
            assert_eq!(
                within(deadline, Path::new("/c/d"), &mut progress, job).unwrap(),
                [true, false, false]
            );
            assert_eq!(asked[..2], [(1, 3), (2, 3)]);
        }
        let job = |_: Progress<'_>| -> Result<()> { panic!("told") };
        let error = within(SHORT, Path::new("/c/d"), &mut |_, _| true, job).unwrap_err();
        assert!(matches!(&error, Error::Panic(text) if text == "told"), "{error}");
    }

    #[test]
    fn who_watches_hears_of_a_call_that_lasts_and_when_it_has_ended() {
        let calls = Arc::new(Calls::default());
        Calls::enter(Some(Arc::clone(&calls)));
        let ((words, heard), (answers, _answered)) = (channel(), channel());
        let (mut call, mut ticks) = (Some(calls::at("rename", None, || "/c/file".into())), 0);
        let mut said = Vec::new();
        let mut progress = |_, _| {
            ticks += 1;
            match ticks {
                2 => drop(call.take()),
                3 => words.send(Word::End(Ok(7))).unwrap(),
                _ => {}
            }
            true
        };
        let times = (Duration::MAX, Duration::from_millis(1));
        let say = &mut |text: &str| said.push(text.to_owned());
        let outcome = wait((&heard, &answers), &calls, times, &mut progress, say);
        assert_eq!(outcome.unwrap().unwrap(), 7);
        assert_eq!(said.len(), 2, "{said:?}");
        let (since, place) = said[0].split_at("has hung since 12:34:56Z".len());
        assert!(since.starts_with("has hung since ") && since.ends_with('Z'), "{since}");
        assert_eq!((place, &*said[1]), (" in rename: file", "the storage answers again"));
        Calls::enter(None);
    }

    #[test]
    fn a_job_whose_calls_hang_is_left_and_hears_of_it() {
        let (path, elsewhere) = (Path::new("/hangs/d"), Path::new("/other/d"));
        let (release, held) = channel::<()>();
        let went_on = Arc::new(AtomicBool::new(true));
        let job = {
            let went_on = Arc::clone(&went_on);
            move |progress: Progress<'_>| {
                let call = calls::at("rename", None, || "/hangs/file".into());
                let _ = held.recv();
                drop(call);
                went_on.store(progress(1, 1), Ordering::Relaxed);
                Ok(())
            }
        };
        let error = within(SHORT, path, &mut |_, _| true, job).unwrap_err();
        assert!(
            error.to_string().starts_with("cannot rename `/hangs/file`: the storage has not answered for")
        );
        assert_eq!(error.errno(), Some(libc::ETIMEDOUT));
        let error = refuse(SHORT, path).unwrap_err();
        assert!(matches!(error, Error::Hangs { end: Given::NotBegun, .. }), "{error}");
        refuse(SHORT, elsewhere).unwrap();
        refuse(None, path).unwrap();
        drop(release);
        while refuse(SHORT, path).is_err() || Arc::strong_count(&went_on) > 1 {
            std::thread::yield_now();
        }
        assert!(!went_on.load(Ordering::Relaxed));
    }
}
