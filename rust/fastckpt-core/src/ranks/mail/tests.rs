mod busy;

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use super::*;
use crate::sys::thread::builder;

pub(in crate::ranks) fn spawn<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    body: impl FnOnce() -> T + Send + 's,
) -> ScopedJoinHandle<'s, T> {
    builder().spawn_scoped(scope, body).unwrap()
}

/// A mail whose errors name messages by their numbers.
fn new(outgoing: Vec<Envelope>, incoming: Vec<Envelope>, fill: Option<Fill>, budget: u64) -> Mail {
    let contents = Box::new(|message| format!("message {message}"));
    Mail::with_budget(outgoing, incoming, contents, fill, budget)
}

/// Fills a whole message with `byte`.
fn put(mail: &Mail, message: usize, byte: u8) -> Result<()> {
    mail.put(message, 0, mail.outgoing[message].envelope.1, |to| to.fill(byte))
}

/// Acts as the two threads of the caller: moves a packed message to the mail that admitted it.
pub(in crate::ranks) fn carry(from: &Mail, message: usize, to: &Mail, there: usize) {
    let buffer = lock(&from.outgoing[message].buffer);
    let mut state = lock(&to.state);
    let In::Admitted(place) = &mut state.incoming[there] else { panic!("not admitted") };
    place.copy_from_slice(&buffer);
}

/// Copies a message of 8 bytes, as its sender packs it, to its admitted memory.
fn bring(mail: &Mail, message: usize) {
    let giver = new(vec![(1, 8)], vec![], None, BUDGET);
    put(&giver, 0, 0).unwrap();
    giver.pack(0).unwrap();
    carry(&giver, 0, mail, message);
    mail.arrived(message).unwrap();
}

/// Sends all messages of a rank. `doors` lead to all other ranks. If a door closes, no more messages will come.
fn send(mail: &Mail, doors: &[Sender<usize>]) -> Result<()> {
    for (message, (peer, _)) in mail.outgoing().enumerate() {
        mail.pack(message)?;
        let _ = doors[peer as usize].send(message);
    }
    Ok(())
}

/// Receives all messages of a rank.
fn receive(mails: &[&Mail], rank: usize, doors: &[Receiver<usize>]) -> Result<()> {
    for (there, (peer, _)) in mails[rank].incoming().enumerate() {
        mails[rank].admit(there)?;
        let message = doors[peer as usize].recv();
        let message = message.map_err(|_| Error::Stopped(format!("rank {peer} has failed")))?;
        carry(mails[peer as usize], message, mails[rank], there);
        mails[peer as usize].sent(message)?;
        mails[rank].arrived(there)?;
    }
    Ok(())
}

/// Breaks the connections of a rank whose messages no longer move, as the end of its process group does. Otherwise, the
/// senders of its messages would wait forever.
fn moved(mails: &[&Mail], rank: usize, outcome: Result<()>) -> Result<()> {
    outcome.inspect_err(|_| mails.iter().for_each(|mail| mail.stop(&format!("rank {rank} has failed"))))
}

/// Runs `work` for each rank, while its mail moves.
pub(in crate::ranks) fn with_mail<T: Send>(
    mails: &[&Mail],
    work: impl Fn(usize) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let (mut ins, mut outs) = (vec![Vec::new(); mails.len()], Vec::new());
    for _ in mails {
        let (senders, receivers): (Vec<_>, Vec<_>) = mails.iter().map(|_| channel()).unzip();
        ins.iter_mut().zip(senders).for_each(|(doors, door)| doors.push(door));
        outs.push(receivers);
    }
    thread::scope(|scope| {
        let mut carriers = Vec::new();
        for ((rank, doors), out) in ins.into_iter().enumerate().zip(outs) {
            carriers.push(spawn(scope, move || moved(mails, rank, send(mails[rank], &doors))));
            carriers.push(spawn(scope, move || moved(mails, rank, receive(mails, rank, &out))));
        }
        let work = &work;
        let workers: Vec<_> = (0..mails.len()).map(|rank| spawn(scope, move || work(rank))).collect();
        let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        let moved: Result<Vec<()>> = carriers.into_iter().map(|carrier| carrier.join().unwrap()).collect();
        assert!(moved.is_ok() || outcomes.iter().any(Result::is_err), "{moved:?}");
        outcomes
    })
}

pub(in crate::ranks) fn held(mail: &Mail) -> (u64, u64) {
    let state = lock(&mail.state);
    (state.outgoing_held, state.incoming_held)
}

fn misused<T>(outcome: Result<T>) {
    assert!(matches!(outcome.err(), Some(Error::Misused(_))));
}

#[test]
fn a_message_is_complete_once_all_its_pieces_are_in() {
    let out = new(vec![(1, 6), (2, 0)], vec![], None, BUDGET);
    let into = Arc::new(new(vec![], vec![(0, 6)], None, BUDGET));
    assert_eq!(out.outgoing().collect::<Vec<_>>(), [(1, 6), (2, 0)]);
    assert_eq!(into.incoming().collect::<Vec<_>>(), [(0, 6)]);
    out.put(0, 4, 2, |to| to.copy_from_slice(b"ge")).unwrap();
    out.put(0, 0, 0, |_| unreachable!()).unwrap();
    out.put(0, 1, 3, |to| to.copy_from_slice(b"ess")).unwrap();
    misused(out.sent(0));
    misused(out.put(0, 5, 2, |_| unreachable!()));
    thread::scope(|scope| {
        // This thread waits for the last piece, or comes after it.
        let packed = spawn(scope, || out.pack(0));
        out.put(0, 0, 1, |to| to.copy_from_slice(b"m")).unwrap();
        assert_eq!(packed.join().unwrap().unwrap(), lock(&out.outgoing[0].buffer).as_ptr().addr());
    });
    misused(out.put(0, 0, 1, |_| unreachable!()));
    let place = into.admit(0).unwrap();
    carry(&out, 0, &into, 0);
    out.sent(0).unwrap();
    misused(out.sent(0));
    misused(out.pack(0));
    into.arrived(0).unwrap();
    misused(into.arrived(0));
    misused(into.admit(0));
    let (one, two) = (into.take(0, 0..4).unwrap(), into.take(0, 4..6).unwrap());
    assert_eq!((&*one, &*two, one.as_ptr().addr()), (&b"mess"[..], &b"ge"[..], place));
    drop(two);
    assert_eq!(held(&into), (0, 6));
    drop(one);
    assert_eq!((held(&into), held(&out), into.moved(), out.moved()), ((0, 0), (0, 0), (0, 6), (6, 0)));
    misused(into.take(0, 0..4));
    // A message without bytes needs no wait.
    out.pack(1).unwrap();
    out.sent(1).unwrap();
    for wrong in [0..0, 5..7] {
        misused(into.take(0, wrong));
    }
}

#[test]
fn an_altered_message_is_given_to_nobody() {
    for (byte, bit) in [(0, 0), (5, 7), (6, 0), (13, 7)] {
        let out = new(vec![(1, 6)], vec![], None, BUDGET);
        let into = Arc::new(new(vec![], vec![(0, 6)], None, BUDGET));
        put(&out, 0, 7).unwrap();
        out.pack(0).unwrap();
        into.admit(0).unwrap();
        lock(&out.outgoing[0].buffer)[byte] ^= 1 << bit;
        carry(&out, 0, &into, 0);
        into.arrived(0).unwrap();
        misused(into.arrived(0));
        assert_eq!(into.altered(), None);
        let Err(Error::Altered(text)) = into.take(0, 2..4) else { panic!("an altered message was taken") };
        assert!(text.starts_with("message 0: checksum is "), "{text}");
        assert_eq!(into.altered(), Some((0, text)));
        // A thread that waits for another message gets an error, too.
        assert!(matches!(into.take(0, 0..6), Err(Error::Stopped(_))));
    }
}

#[test]
fn a_function_fills_a_message_when_it_is_packed() {
    let fill: Fill = Box::new(|_, message, to| {
        to.fill(message as u8);
        if message == 1 { Err(Error::Callback("no".to_owned())) } else { Ok(checksum::of(to)) }
    });
    let out = new(vec![(1, 3), (1, 3), (1, 3)], vec![], Some(fill), BUDGET);
    for message in [2, 0] {
        out.pack(message).unwrap();
        assert_eq!(lock(&out.outgoing[message].buffer)[..3], [message as u8; 3]);
        misused(out.pack(message));
        out.sent(message).unwrap();
    }
    assert!(matches!(out.pack(1), Err(Error::Callback(_))));
    misused(put(&out, 1, 0));
}

#[test]
fn it_ends_when_nothing_is_being_filled() {
    let (inside, entered) = channel();
    let done = Arc::new(AtomicBool::new(false));
    let out = Arc::new_cyclic(|mail: &Weak<Mail>| {
        let (mail, done) = (Weak::clone(mail), Arc::clone(&done));
        let fill: Fill = Box::new(move |_, _, _| {
            inside.send(()).unwrap();
            // The function runs on for a while after the mail was stopped.
            let mail = mail.upgrade().unwrap();
            while mail.are_here([]).is_ok() {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(50));
            done.store(true, Ordering::Relaxed);
            Ok(0)
        });
        new(vec![(1, 3), (1, 3)], vec![], Some(fill), BUDGET)
    });
    thread::scope(|scope| {
        spawn(scope, || out.pack(0));
        entered.recv().unwrap();
        out.end("the end");
        assert!(done.load(Ordering::Relaxed));
    });
    assert!(matches!(out.pack(1), Err(Error::Stopped(_))));
}

#[test]
fn what_a_relay_passes_on_waits_for_its_window_alone() {
    // Two messages of one window, the second of which is relayed, and two of the next window.
    let mail = new(vec![(1, 8); 4], vec![], None, 8).relaying([(1, 0), (3, 2)].into_iter(), 0);
    let mail = Arc::new(mail);
    let may_put = |message| mail.may_put(&lock(&mail.state), message);
    put(&mail, 0, 0).unwrap();
    assert!(may_put(1), "a relayed message does not count in the budget");
    assert!(!may_put(3), "it waits for the messages of the first window");
    mail.sent(0).unwrap();
    put(&mail, 2, 0).unwrap();
    assert!(!may_put(3));
    put(&mail, 1, 0).unwrap();
    mail.sent(1).unwrap();
    assert!(may_put(3));
    mail.sent(2).unwrap();

    // This rank has no bytes that could complete the next message, so the budget holds.
    let mail = Arc::new(new(vec![(1, 8); 3], vec![], None, 8).relaying([(0, 0)].into_iter(), 0));
    put(&mail, 1, 0).unwrap();
    assert!(!mail.may_put(&lock(&mail.state), 2));
}

#[test]
fn the_budget_holds_unless_all_would_wait_for_each_other() {
    let mail = Arc::new(new(vec![(1, 8); 4], vec![(1, 8); 4], None, 16));
    let may_put = |message| mail.may_put(&lock(&mail.state), message);
    let may_admit = |message| lock(&mail.state).may_admit(message, 8, 16);
    for message in [1, 2] {
        put(&mail, message, 0).unwrap();
    }
    assert!(may_put(0) && may_put(3), "the next message is not complete, so nothing will be sent");
    put(&mail, 0, 0).unwrap();
    assert!(!may_put(3), "the next message can be sent");
    mail.sent(0).unwrap();
    assert!(!may_put(3));
    mail.sent(1).unwrap();
    assert!(may_put(3));

    for message in [0, 1] {
        mail.admit(message).unwrap();
    }
    assert!(!may_admit(2));
    thread::scope(|scope| {
        let taken = spawn(scope, || mail.take(2, 0..8).map(|bytes| bytes.len()));
        mail.admit(2).unwrap(); // because a thread waits for it
        assert!(!may_admit(3));
        bring(&mail, 2);
        assert_eq!(taken.join().unwrap().unwrap(), 8);
    });
    assert!(!may_admit(3));
    bring(&mail, 0);
    drop(mail.take(0, 0..8).unwrap());
    assert!(may_admit(3));
    // A message that is larger than the budget is alone in it.
    let large = new(vec![(1, 99)], vec![(1, 99)], None, 16);
    put(&large, 0, 0).unwrap();
    large.admit(0).unwrap();
}

#[test]
fn stopping_ends_every_wait_with_the_first_reason() {
    let fill: Fill = Box::new(|_, _, _| Ok(0));
    let [pieces, filled] =
        [None, Some(fill)].map(|fill| Arc::new(new(vec![(1, 8); 3], vec![(1, 8); 3], fill, 8)));
    put(&pieces, 0, 0).unwrap();
    filled.pack(0).unwrap();
    pieces.admit(0).unwrap();
    thread::scope(|scope| {
        let waits = [
            spawn(scope, || pieces.pack(1).map(drop)),
            spawn(scope, || put(&pieces, 2, 0)),
            spawn(scope, || pieces.admit(1).map(drop)),
            spawn(scope, || pieces.take(0, 0..8).map(drop)),
            spawn(scope, || filled.pack(1).map(drop)),
        ];
        for mail in [&pieces, &filled] {
            mail.stop("rank 3 failed");
            mail.stop("and so did rank 4");
        }
        for wait in waits {
            let error = wait.join().unwrap().unwrap_err();
            assert!(matches!(&error, Error::Stopped(why) if why == "rank 3 failed"), "{error}");
        }
    });
    assert!(matches!(put(&pieces, 0, 0), Err(Error::Stopped(_))));
    // Messages in flight may still end.
    bring(&pieces, 0);
    pieces.sent(0).unwrap();
}

/// A number that looks random and is determined by two others.
fn drawn(seed: u64, number: u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x ^= x >> 31;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ x >> 29
}

const RANKS: usize = 3;
const SMALL: u64 = 100;

/// The messages of three ranks in one order for all: sender, receiver, bytes, and their number in both lists.
struct Traffic {
    messages: Vec<(usize, usize, u64, usize, usize)>,
    mails: Vec<Arc<Mail>>,
}

impl Traffic {
    fn new(seed: u64, fill: impl Fn() -> Option<Fill>) -> Self {
        let (mut out, mut into) = (vec![Vec::new(); RANKS], vec![Vec::new(); RANKS]);
        let mut messages = Vec::new();
        for number in 0..400 {
            let from = drawn(seed, 3 * number) as usize % RANKS;
            let to = (from + 1 + drawn(seed, 3 * number + 1) as usize % (RANKS - 1)) % RANKS;
            let bytes = 1 + drawn(seed, 3 * number + 2) % 40;
            messages.push((from, to, bytes, out[from].len(), into[to].len()));
            out[from].push((to as u32, bytes));
            into[to].push((from as u32, bytes));
        }
        let mails = out.into_iter().zip(into);
        let mails = mails.map(|(out, into)| Arc::new(new(out, into, fill(), SMALL)));
        Self { messages, mails: mails.collect() }
    }

    /// Moves the messages that leave `rank`, in order, each once the receiving thread is at the same message.
    fn send(&self, rank: usize, places: &[AtomicUsize], arrived: &(Mutex<()>, Condvar)) -> Result<()> {
        let (lock_, changed) = arrived;
        for (number, &(from, to, _, message, there)) in self.messages.iter().enumerate() {
            if from != rank {
                continue;
            }
            self.mails[rank].pack(message)?;
            let mut guard = lock(lock_);
            while places[to].load(Ordering::SeqCst) != number {
                if lock(&self.mails[rank].state).stopped.is_some() {
                    return Err(Error::Stopped(String::new()));
                }
                guard = changed.wait(guard).unwrap();
            }
            carry(&self.mails[rank], message, &self.mails[to], there);
            places[to].store(usize::MAX, Ordering::SeqCst);
            changed.notify_all();
            drop(guard);
            self.mails[rank].sent(message)?;
        }
        Ok(())
    }

    /// Admits the messages to `rank`, in order, and waits for each.
    fn receive(&self, rank: usize, places: &[AtomicUsize], arrived: &(Mutex<()>, Condvar)) -> Result<()> {
        let (lock_, changed) = arrived;
        for (number, &(_, to, _, _, there)) in self.messages.iter().enumerate() {
            if to != rank {
                continue;
            }
            let mail = &self.mails[rank];
            mail.admit(there)?;
            {
                let state = lock(&mail.state);
                assert!(state.incoming_held <= SMALL || there < state.demanded, "{}", state.incoming_held);
            }
            let mut guard = lock(lock_);
            places[rank].store(number, Ordering::SeqCst);
            changed.notify_all();
            while places[rank].load(Ordering::SeqCst) == number {
                if lock(&mail.state).stopped.is_some() {
                    return Err(Error::Stopped(String::new()));
                }
                guard = changed.wait(guard).unwrap();
            }
            drop(guard);
            mail.arrived(there)?;
        }
        Ok(())
    }

    /// Puts all messages of `rank` in, each in two pieces. Several threads do so at once, and take messages in order.
    fn fill(&self, rank: usize, next: &AtomicUsize) -> Result<()> {
        let mail = &self.mails[rank];
        while let message = next.fetch_add(1, Ordering::Relaxed)
            && message < mail.outgoing.len()
        {
            let bytes = mail.outgoing[message].envelope.1;
            let half = bytes / 2;
            mail.put(message, half, bytes - half, |to| to.fill(message as u8))?;
            mail.put(message, 0, half, |to| to.fill(message as u8))?;
        }
        Ok(())
    }

    /// Takes all messages to `rank`, each in two pieces. Several threads do so at once.
    fn empty(&self, rank: usize, next: &AtomicUsize, taken: &AtomicU64) -> Result<()> {
        let to_here: Vec<_> = self.messages.iter().filter(|message| message.1 == rank).collect();
        while let Some(&&(.., bytes, message, there)) = to_here.get(next.fetch_add(1, Ordering::Relaxed)) {
            let half = bytes / 2;
            for range in [half..bytes, 0..half] {
                if !range.is_empty() {
                    let bytes = self.mails[rank].take(there, range)?;
                    assert!(bytes.iter().all(|&byte| byte == message as u8));
                    taken.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Runs all threads. `stop`: the number of taken bytes after which the mail is stopped.
    fn run(&self, pieces: bool, stop: Option<u64>) -> (u64, Vec<Result<()>>) {
        let places: Vec<_> = (0..RANKS).map(|_| AtomicUsize::new(usize::MAX)).collect();
        let counters: Vec<_> = (0..2 * RANKS).map(|_| AtomicUsize::new(0)).collect();
        let (taken, arrived) = (AtomicU64::new(0), (Mutex::new(()), Condvar::new()));
        let outcomes = thread::scope(|scope| {
            let mut threads = Vec::new();
            for rank in 0..RANKS {
                let (places, counters, taken, arrived) = (&places, &counters, &taken, &arrived);
                threads.push(spawn(scope, move || self.send(rank, places, arrived)));
                threads.push(spawn(scope, move || self.receive(rank, places, arrived)));
                for _ in 0..3 {
                    if pieces {
                        threads.push(spawn(scope, move || self.fill(rank, &counters[rank])));
                    }
                    threads.push(spawn(scope, move || self.empty(rank, &counters[RANKS + rank], taken)));
                }
            }
            if let Some(enough) = stop {
                while taken.load(Ordering::Relaxed) < enough {
                    thread::yield_now();
                }
                self.mails.iter().for_each(|mail| mail.stop("enough"));
                let _guard = lock(&arrived.0);
                arrived.1.notify_all();
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (taken.into_inner(), outcomes)
    }
}

#[test]
fn three_ranks_move_everything_in_little_memory() {
    for seed in 0..12 {
        let pieces = seed % 2 == 0;
        let fill = || -> Option<Fill> {
            (!pieces).then(|| {
                Box::new(|_: &Mail, message: usize, to: &mut [u8]| {
                    to.fill(message as u8);
                    Ok(checksum::of(to))
                }) as Fill
            })
        };
        let traffic = Traffic::new(seed, fill);
        let (taken, outcomes) = traffic.run(pieces, None);
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        assert_eq!(taken, traffic.messages.iter().map(|message| message.2).sum::<u64>());
        for mail in &traffic.mails {
            assert_eq!(held(mail), (0, 0));
        }
    }
}

#[test]
fn all_threads_end_when_the_mail_is_stopped_in_the_middle() {
    for seed in 0..12 {
        let traffic = Traffic::new(seed, || None);
        let (_, outcomes) = traffic.run(true, Some(seed * 200));
        let stopped = |outcome: &Result<()>| matches!(outcome, Ok(()) | Err(Error::Stopped(_)));
        assert!(outcomes.iter().all(stopped), "{outcomes:?}");
    }
}
