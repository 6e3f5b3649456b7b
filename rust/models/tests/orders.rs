//! Tests the mail and the pool under orders of threads that shuttle draws. shuttle reports a thread that is never woken
//! as a deadlock, with its order. It has no clock, so a wait that only a timeout ends is a deadlock, too.

use std::sync::Arc;

use fastckpt_models::engine;
use fastckpt_models::error::{Error, Result};
use fastckpt_models::ranks::mail;
use fastckpt_models::ranks::mail::{Envelope, Mail};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::sync::mpsc::{Receiver, Sender, channel};
use shuttle::thread;

/// Runs a scene in many orders; `FASTCKPT_ORDERS` sets how many.
fn drawn(scene: impl Fn() + Send + Sync + 'static) {
    let orders = std::env::var("FASTCKPT_ORDERS").ok().and_then(|text| text.parse().ok());
    shuttle::check_random(scene, orders.unwrap_or(2_000));
}

/// The sending thread: packs each message in order, and notifies its receiver.
fn send(mail: &Mail, doors: &[Sender<usize>]) -> Result<()> {
    for (message, (peer, _)) in mail.outgoing().enumerate() {
        mail.pack(message)?;
        doors[peer as usize].send(message).map_err(|_| Error::Misused("it has gone"))?;
        mail.sent(message)?;
    }
    Ok(())
}

/// The receiving thread: waits for the next message of each sender, in order.
fn receive(mail: &Mail, doors: &[Receiver<usize>]) -> Result<()> {
    for (message, (peer, _)) in mail.incoming().enumerate() {
        mail.admit(message)?;
        doors[peer as usize].recv().map_err(|_| Error::Misused("it has gone"))?;
        mail.arrived(message)?;
    }
    Ok(())
}

/// The work of a rank: the messages that it sends and receives, and what each worker does with them.
#[derive(Clone)]
struct Duties {
    outgoing: Vec<Envelope>,
    incoming: Vec<Envelope>,
    /// For each worker: whether it fills (`true`) or takes a message, in two halves, and the message's number.
    work: Vec<Vec<(bool, usize)>>,
}

fn work(mail: &Arc<Mail>, duties: &[(bool, usize)]) -> Result<()> {
    for &(put, message) in duties {
        if put {
            let bytes = mail.outgoing().nth(message).map_or(0, |envelope| envelope.1);
            mail.put(message, 0, bytes / 2, |to| to.fill(0))?;
            mail.put(message, bytes / 2, bytes - bytes / 2, |to| to.fill(0))?;
        } else {
            let bytes = mail.incoming().nth(message).map_or(0, |envelope| envelope.1);
            let first = mail.take(message, 0..bytes / 2)?;
            drop(mail.take(message, bytes / 2..bytes)?);
            drop(first);
        }
    }
    Ok(())
}

/// Runs all ranks to their ends. `stop`: the rank whose mail is stopped meanwhile.
fn job(ranks: Vec<Duties>, budget: u64, stop: Option<usize>) {
    let mut ins: Vec<Vec<Sender<usize>>> = vec![Vec::new(); ranks.len()];
    let mut outs = Vec::new();
    for _ in 0..ranks.len() {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks.len()).map(|_| channel()).unzip();
        ins.iter_mut().zip(senders).for_each(|(doors, door)| doors.push(door));
        outs.push(receivers);
    }
    let mut all = Vec::new();
    let mut mails = Vec::new();
    for ((duties, doors), out) in ranks.into_iter().zip(ins).zip(outs) {
        let mail = Arc::new(mail(duties.outgoing, duties.incoming, None, budget));
        mails.push(Arc::clone(&mail));
        let own = Arc::clone(&mail);
        // A thread that fails ends the mail of its rank, like the threads of the product.
        let ends = |mail: &Mail, outcome: Result<()>| outcome.inspect_err(|_| mail.stop("it has failed"));
        all.push(thread::spawn(move || ends(&own, send(&own, &doors))));
        let own = Arc::clone(&mail);
        all.push(thread::spawn(move || ends(&own, receive(&own, &out))));
        for part in duties.work {
            let own = Arc::clone(&mail);
            all.push(thread::spawn(move || ends(&own, work(&own, &part))));
        }
    }
    if let Some(rank) = stop {
        mails[rank].stop("the test stops it");
    }
    let outcomes: Vec<_> = all.into_iter().map(|one| one.join().unwrap()).collect();
    if stop.is_none() {
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        for mail in &mails {
            let bytes = |all: &mut dyn Iterator<Item = Envelope>| all.map(|one| one.1).sum::<u64>();
            let moved = (bytes(&mut mail.outgoing()), bytes(&mut mail.incoming()));
            assert_eq!(mail.moved(), moved);
        }
    }
}

/// Two ranks that send each other three messages, of which the budget holds one, and take them in another order.
fn crossing() -> Vec<Duties> {
    (0..2)
        .map(|rank: u32| Duties {
            outgoing: vec![(1 - rank, 8), (1 - rank, 0), (1 - rank, 8)],
            incoming: vec![(1 - rank, 8), (1 - rank, 0), (1 - rank, 8)],
            work: vec![vec![(true, 0), (false, 2)], vec![(true, 2), (false, 0)]],
        })
        .collect()
}

#[test]
fn messages_of_two_ranks_all_arrive() {
    drawn(|| job(crossing(), 8, None));
}

/// Only the worker that fills a message can wake its sender.
#[test]
fn a_message_that_is_complete_is_sent() {
    let none = || Duties { outgoing: vec![], incoming: vec![], work: vec![] };
    drawn(move || {
        let giver = Duties { outgoing: vec![(1, 8)], work: vec![vec![(true, 0)]], ..none() };
        let taker = Duties { incoming: vec![(0, 8)], work: vec![vec![(false, 0)]], ..none() };
        job(vec![giver, taker], 8, None);
    });
}

/// The last message is filled first: it may get memory even if the budget is used up.
#[test]
fn a_message_that_is_put_together_too_early_stops_nobody() {
    let one = |peer, work: Vec<Vec<(bool, usize)>>| Duties {
        outgoing: vec![(peer, 8), (peer, 8)],
        incoming: vec![(peer, 8), (peer, 8)],
        work,
    };
    drawn(move || {
        let order = vec![vec![(true, 1), (true, 0), (false, 1), (false, 0)]];
        job(vec![one(1, order.clone()), one(0, order)], 8, None);
    });
}

#[test]
fn a_mail_that_is_stopped_lets_everybody_go() {
    drawn(|| job(crossing(), 8, Some(0)));
}

/// No function that fills messages runs after the mail has ended.
#[test]
fn the_end_comes_after_the_last_filling() {
    drawn(|| {
        let ended = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&ended);
        let fill = Box::new(move |_: &Mail, _, to: &mut [u8]| {
            assert_eq!(seen.load(Ordering::SeqCst), 0, "its memory is gone");
            thread::yield_now();
            assert_eq!(seen.load(Ordering::SeqCst), 0, "its memory is gone");
            to.fill(0);
            Ok(0)
        });
        let mail = Arc::new(mail(vec![(0, 8)], vec![], Some(fill), 8));
        let own = Arc::clone(&mail);
        let sender = thread::spawn(move || {
            // The message is never sent: its receiver is gone.
            own.pack(0)
        });
        mail.end("enough");
        ended.store(1, Ordering::SeqCst);
        let _ = sender.join().unwrap();
    });
}

/// Each number is worked on once, by whichever thread is first.
#[test]
fn a_pool_works_on_each_number_once() {
    drawn(|| {
        let seen: Vec<_> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        let work = |number: usize| {
            seen[number].fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        engine::run(3, seen.len(), &mut || true, &work).unwrap();
        assert!(seen.iter().all(|seen| seen.load(Ordering::SeqCst) == 1));
    });
}

/// The first failure is reported, and ends the work of the others.
#[test]
fn a_pool_tells_the_first_failure() {
    drawn(|| {
        let (first, begun) = (AtomicUsize::new(usize::MAX), AtomicUsize::new(0));
        let work = |number: usize| {
            begun.fetch_add(1, Ordering::SeqCst);
            if number == 1 {
                let _ = first.compare_exchange(usize::MAX, number, Ordering::SeqCst, Ordering::SeqCst);
                return Err(Error::Misused("first"));
            }
            Ok(())
        };
        let outcome = engine::run(2, 5, &mut || true, &work);
        assert!(matches!(outcome, Err(Error::Misused("first"))), "{outcome:?}");
        assert!(begun.load(Ordering::SeqCst) <= 5);
    });
}
