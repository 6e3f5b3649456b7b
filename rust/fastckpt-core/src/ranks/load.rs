//! The load of one rank. It reads its ranges of the shards: each extent is read whole by one rank, and verified. The
//! rank keeps its own part and sends the rest to the ranks that want it, while its [`Mail`] receives the parts that
//! other ranks read for it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use super::contents;
use super::mail::{BUDGET, Envelope, Mail};
use super::places::{self, Places, Slot};
use crate::engine::content::{self, Destination};
use crate::engine::job::{Progress, TICK};
use crate::engine::options::Options;
use crate::engine::report::Report;
use crate::error::{Error, Result};
use crate::format::checksum::Pair;
use crate::read::{Checkpoint, Stop, Sum, Wanted};
use crate::share::{Item, Message, Piece, Purpose, Share};
use crate::sys::thread::builder;
use crate::telemetry::{self, Kind, Operation};

/// The report of one rank's load.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The report about this rank's own bytes.
    pub report: Report,
    /// Bytes of tensors that the rank read, for itself or for others.
    pub storage: u64,
    /// Bytes that other ranks read for this rank.
    pub peers: u64,
    /// Bytes that the rank sent to ranks that want or relay them.
    pub sent: u64,
    /// Checksums of extents that the rank read in part ([`Share::read_apart`]), to be joined for [`compare`].
    pub pieces: Vec<Piece>,
}

/// Compares checksums with those of the manifest, for extents that several ranks read in parts.
pub fn compare(share: &Share, checkpoint: &Checkpoint, pieces: Vec<Piece>) -> Result<()> {
    let tensors = &checkpoint.body().tensors;
    // An empty tensor may begin at the same byte as a tensor with bytes.
    let mut places: Vec<(usize, u64, usize)> = tensors
        .iter()
        .enumerate()
        .filter(|(_, tensor)| tensor.bytes() > 0)
        .map(|(index, tensor)| (tensor.shard(), tensor.offset, index))
        .collect();
    places.sort_unstable();
    let sum = |piece: Piece| {
        let after = places.partition_point(|place| (place.0, place.1) <= (piece.shard as usize, piece.start));
        let tensor = after.checked_sub(1).map_or(usize::MAX, |last| places[last].2);
        Sum { tensor, offset: piece.start, len: piece.len, crc: piece.sum.crc }
    };
    let sums: Vec<Sum> = share.merge(pieces)?.into_iter().map(sum).collect();
    checkpoint.compare(&sums)
}

/// The load of one rank. See the module.
pub struct RankLoad {
    checkpoint: Arc<Checkpoint>,
    mail: Arc<Mail>,
    work: Mutex<Option<Work>>,
}

/// The remaining work.
struct Work {
    wanted: Vec<Wanted>,
    /// The items of each incoming message and their destinations. A destination is in a part, or, on a relay, in
    /// outgoing messages, from a given byte of each on.
    incoming: Vec<Vec<(Item, Option<Slot>)>>,
    /// Bytes of this rank's own boxes: those that it reads itself, and those that other ranks read for it.
    own: (u64, u64),
    /// The number of tensors of which this rank wants bytes.
    tensors: usize,
}

impl RankLoad {
    /// The load of `rank`, whose parts go to `places`. Fails if a part has no place.
    pub fn new(share: &Share, rank: u32, checkpoint: Arc<Checkpoint>, places: Places) -> Result<Self> {
        Self::with_budget(share, rank, checkpoint, places, BUDGET)
    }

    fn with_budget(
        share: &Share,
        rank: u32,
        checkpoint: Arc<Checkpoint>,
        places: Places,
        budget: u64,
    ) -> Result<Self> {
        let mut duties = share.duties(rank, Purpose::Load)?;
        let envelopes = |messages: &[&Message]| -> Vec<Envelope> {
            messages.iter().map(|message| (message.peer, message.bytes)).collect()
        };
        let (outgoing, incoming) = duties.lanes(Purpose::Load);
        let (files, tensors) = (Arc::clone(&checkpoint), Arc::clone(&checkpoint));
        let contents = contents::of(
            share,
            &incoming,
            move |shard| files.body().shards[shard].file.clone(),
            move |tensor| tensors.body().tensors[tensor].name().to_owned(),
        );
        let (outgoing, incoming) = (envelopes(&outgoing), envelopes(&incoming));
        // A relay is filled after all messages of earlier phases are sent, except those of the phase that fills it.
        let [numbers, relays] = duties.sent();
        let window = |phase: u64| {
            let before = |of: &[Message]| of.partition_point(|message| message.phase + 1 < phase);
            before(&duties.io) + before(&duties.relays)
        };
        let relays_from = relays.iter().zip(&duties.relays).map(|(&at, relay)| (at, window(relay.phase)));
        let mail = Mail::with_budget(outgoing, incoming, contents, None, budget).relaying(relays_from, 0);
        let mail = Arc::new(mail);

        let read = || duties.local.iter().chain(&duties.apart);
        let received = duties.boxes.iter().flat_map(|message| &message.items);
        let received = received.filter(|item| item.own);
        let bytes = |items: &mut dyn Iterator<Item = &Item>| items.map(|item| item.len).sum();
        let own = (bytes(&mut read()), bytes(&mut received.clone()));
        let tensors: HashSet<usize> = read().chain(received.clone()).map(|item| item.tensor).collect();
        let mut slots = places::slots(places, read().chain(received))?.into_iter();
        let whole = duties.local.len();
        let mut wanted: Vec<_> = read()
            .zip(slots.by_ref())
            .enumerate()
            .map(|(index, (item, slot))| {
                let (range, destination) = slot.destination(item.bytes.clone());
                Wanted { tensor: item.tensor, range, destination, apart: index >= whole }
            })
            .collect();
        let mut to = |mut item: Item| {
            item.relayed.iter_mut().for_each(|to| to.0 = relays[to.0]);
            let slot = if item.own { slots.next() } else { None };
            (item, slot)
        };
        let to = |message: Message| message.items.into_iter().map(&mut to).collect();
        let incoming = std::mem::take(&mut duties.boxes).into_iter().map(to).collect();
        for (number, message) in numbers.into_iter().zip(duties.io) {
            let mut at = 0;
            for item in message.items {
                let (tensor, range, first) = (item.tensor, item.bytes.clone(), at);
                at += item.len;
                let destination = post(&mail, (number, first), item);
                wanted.push(Wanted { tensor, range, destination, apart: false });
            }
        }
        let tensors = tensors.len();
        let work = Mutex::new(Some(Work { wanted, incoming, own, tensors }));
        Ok(Self { checkpoint, mail, work })
    }

    /// The messages of this rank.
    #[must_use]
    pub const fn mail(&self) -> &Arc<Mail> {
        &self.mail
    }

    /// Reads this rank's ranges and waits for the rest. On return, all parts of this rank are filled. Messages to other
    /// ranks may still be on their way. With `verify`, the rank that reads an extent compares it with its checksum. Can
    /// be called once.
    pub fn read(&self, verify: bool, options: &Options, progress: Progress<'_>) -> Result<Loaded> {
        let work = lock(&self.work).take();
        let work = work.ok_or(Error::Misused("the load of this rank has run before, or is closed"))?;
        let operation = options.operation(Kind::Load, self.checkpoint.path());
        let outcome = self.run(work, verify, options, &operation, progress);
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    /// Gives the memory back to the caller, unless [`Self::read`] is running, and stops the mail.
    pub fn close(&self) {
        self.mail.stop("the load of this rank was closed");
        lock(&self.work).take();
    }

    fn run(
        &self,
        Work { wanted, incoming, own, tensors }: Work,
        verify: bool,
        options: &Options,
        operation: &Operation,
        progress: Progress<'_>,
    ) -> Result<Loaded> {
        let begin = Instant::now();
        let bytes = |messages: &mut dyn Iterator<Item = Envelope>| messages.map(|message| message.1).sum();
        let (sent, coming): (u64, u64) = (bytes(&mut self.mail.outgoing()), bytes(&mut self.mail.incoming()));
        let (own, peers) = own;
        let (taken, caller) = (AtomicU64::new(0), thread::current());
        let stop = || self.mail.stop("this rank failed to read bytes for the others");
        let alone = sent + coming == 0;
        // This is the result until the read begins. If it never begins, another failure is the cause.
        let mut read = Err(Error::Stopped("the read did not begin".to_owned()));
        let outcome = thread::scope(|scope| {
            let unpacker = (coming > 0).then(|| {
                let body = || {
                    let outcome = self.take(incoming, &taken);
                    if let Err(error) = &outcome {
                        self.mail.stop(&error.to_string());
                    }
                    caller.unpark();
                    outcome
                };
                builder().name("fastckpt-mail".to_owned()).spawn_scoped(scope, body)
            });
            let unpacker = unpacker.transpose().map_err(|error| {
                stop();
                Error::io("start a thread to load", self.checkpoint.path())(error)
            })?;
            let mut progress =
                |done: u64, total: u64| progress(done + taken.load(Ordering::Relaxed), total + coming);
            let stop: Option<Stop<'_>> = if alone { None } else { Some(&stop) };
            read = self.checkpoint.read_ranges(wanted, verify, options, (operation, stop), &mut progress);
            if let (Err(error), false) = (&read, alone) {
                self.mail.stop(&error.to_string());
            }
            let Some(unpacker) = unpacker else { return Ok(0) };
            let storage = read.as_ref().map_or(0, |(report, _): &(Report, _)| report.bytes);
            self.watch(unpacker, &mut || progress(storage, storage))
        });
        // If both failed, one failure stopped the mail and so caused the other, which is not reported.
        let ((report, sums), copied) = match (read, outcome) {
            (Err(Error::Stopped(_)) | Ok(_), Err(error)) | (Err(error), _) => {
                return Err(error);
            }
            (Ok(read), Ok(copied)) => (read, copied),
        };
        let (storage, seconds) = (report.bytes, begin.elapsed().as_secs_f64());
        let mut report = Report { bytes: own + peers, seconds, tensors, ..report };
        report.ran.copied += copied + sent;
        let before: f64 = report.phases.iter().map(|phase| phase.1).sum();
        if !alone {
            report.phases.push(("exchange", (seconds - before).max(0.0)));
        }
        let piece = |sum: Sum| {
            let shard = self.checkpoint.body().tensors[sum.tensor].shard() as u32;
            Piece { shard, start: sum.offset, len: sum.len, sum: Pair { crc: sum.crc, xz: 0 } }
        };
        Ok(Loaded { report, storage, peers, sent, pieces: sums.into_iter().map(piece).collect() })
    }

    /// Waits for the thread that takes messages. Meanwhile, calls `go_on`, which returns whether to continue.
    fn watch(
        &self,
        unpacker: ScopedJoinHandle<'_, Result<u64>>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<u64> {
        let mut interrupted = false;
        while !unpacker.is_finished() {
            thread::park_timeout(TICK);
            if !interrupted && !go_on() {
                interrupted = true;
                self.mail.stop("interrupted");
            }
        }
        let outcome =
            unpacker.join().unwrap_or_else(|_| Err(Error::Panic("while messages were taken".to_owned())));
        if interrupted { Err(Error::Interrupted) } else { outcome }
    }

    /// Takes all messages and passes their items to their destinations. Returns the number of bytes copied.
    fn take(&self, incoming: Vec<Vec<(Item, Option<Slot>)>>, taken: &AtomicU64) -> Result<u64> {
        let mut copied = 0;
        for (number, items) in incoming.into_iter().enumerate() {
            let bytes = items.iter().map(|(item, _)| item.len).sum();
            let message = self.mail.take(number, 0..bytes)?;
            let (mut rest, mut due) = (&message[..], Vec::new());
            for (item, slot) in items {
                let (front, after) = rest.split_at(item.len as usize);
                rest = after;
                for (message, at) in item.relayed {
                    self.mail.put(message, at, item.len, |to| to.copy_from_slice(front))?;
                }
                copied += slot.map_or(0, |slot| slot.unpack(item.bytes, front, &mut due));
            }
            content::hand_over(due.iter().map(|(to, first, bytes)| (to, *first, *bytes)))?;
            taken.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(copied)
    }
}

/// The destination of an item that another rank wants: the message `number`, from byte `first` on.
fn post(mail: &Arc<Mail>, (number, first): (usize, u64), item: Item) -> Destination {
    let mail = Arc::clone(mail);
    Destination::Take(Arc::new(move |start, bytes| {
        let Item { rows, bytes: all, .. } = &item;
        let at = first + rows.bytes_in(&(all.start..start));
        let len = rows.bytes_in(&(start..start + bytes.len() as u64));
        mail.put(number, at, len, |to| rows.pack(start, bytes, to))
    }))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
