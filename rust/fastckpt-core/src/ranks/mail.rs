//! The mail of one rank: its messages to and from other ranks while they travel.
//!
//! Two threads of the caller move the messages, and the mail holds the buffers. The sending thread calls [`Mail::pack`]
//! and then [`Mail::sent`] for each outgoing message, in order. The receiving thread calls [`Mail::admit`] and then
//! [`Mail::arrived`] for each incoming one. Other code supplies and uses the bytes: a function or [`Mail::put`] fills
//! an outgoing message, and [`Mail::take`] reads an incoming one.
//!
//! Each direction has a budget of memory. A message may exceed it only if all ranks would otherwise wait for each
//! other:
//! - An incoming message is admitted if a worker waits for it or for a later one in the list.
//! - [`Mail::put`] begins a message if the next one to be sent is not complete. Until that one is, no memory is freed.
//!
//! A message is followed by its checksum: the checksums of the network are short, and end at each device on the way.
//! Both sides sum a message while its bytes are in the processor's cache, at a quarter of the cost of a separate pass.
//! The sender does so when the last byte is in, the receiver when the first byte is about to be taken out.
//!
//! Messages of a relay do not count in the budget. In a save, all messages that it will pass on arrive before it sends
//! any. In a load, messages that it passes on wait until the other messages of their window are sent
//! ([`crate::share`]), and those of the next window wait until these are sent, too. So they hold few bytes.
//!
//! No wait is longer than its cause: every change wakes all waiting threads, and [`Mail::stop`] ends every wait.

use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::format::checksum;
use crate::sys::sync::{Condvar, Mutex, MutexGuard};

/// The number of bytes of the checksum after a message.
const SUM: usize = 8;
/// The number of bytes of buffers in each direction.
pub const BUDGET: u64 = 64 << 20;
/// Bytes of free buffers that are kept for the next messages. The first touch of memory costs as much as sending it.
const KEPT: usize = 16 << 20;

/// Fills the buffer of an outgoing message, given by number, and returns its checksum. The sending thread calls this
/// function with the mail, from which it may copy bytes that have arrived ([`Mail::copy`]).
pub type Fill = Box<dyn Fn(&Mail, usize, &mut [u8]) -> Result<u64> + Send + Sync>;

/// A message in the list of its direction: the other rank, and the number of bytes without their checksum.
pub type Envelope = (u32, u64);

/// Describes the bytes of an incoming message, given by number, for errors.
pub type Contents = Box<dyn Fn(usize) -> String + Send + Sync>;

/// The number of bytes that travel for a message of `bytes`.
#[must_use]
pub const fn on_the_way(bytes: u64) -> u64 {
    bytes + SUM as u64
}

/// The messages of one rank and their buffers. See the module.
pub struct Mail {
    outgoing: Vec<Outgoing>,
    incoming: Vec<Envelope>,
    contents: Contents,
    /// `None` if [`Mail::put`] fills the outgoing messages.
    fill: Option<Fill>,
    budget: u64,
    /// Incoming messages before this one do not count in the budget.
    beyond: usize,
    state: Mutex<State>,
    changed: Condvar,
    free: Mutex<Vec<Vec<u8>>>,
}

struct Outgoing {
    envelope: Envelope,
    /// Set for a message of a relay, which is outside of the budget. It begins after this many others were sent.
    after: Option<usize>,
    /// Locked while one piece is copied. A thread that holds the lock of the state must not lock it.
    buffer: Mutex<Vec<u8>>,
}

struct State {
    stopped: Option<String>,
    /// The sender of the first altered message, and what is wrong with it.
    altered: Option<(u32, String)>,
    /// The rank whose memory could not be read, and why.
    lost: Option<(u32, String)>,
    outgoing: Vec<Out>,
    incoming: Vec<In>,
    /// The first outgoing message that has not been sent.
    next: usize,
    /// The incoming messages before this one are admitted regardless of the budget.
    demanded: usize,
    /// Bytes of buffers.
    outgoing_held: u64,
    incoming_held: u64,
    /// The number of running calls of the function that fills messages.
    filling: usize,
    /// Bytes that were sent and received.
    sent: u64,
    received: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Out {
    Away,
    /// The message has memory, and this many of its bytes are in it.
    Filling(u64),
    Full,
    Sent,
}

enum In {
    Away,
    Admitted(Vec<u8>),
    /// The message has arrived, and this many of its bytes have not been taken.
    Here(Arc<Arrived>, u64),
    Taken,
}

/// A message that has arrived.
#[derive(Debug)]
struct Arrived {
    bytes: Vec<u8>,
    /// The checksum that followed the bytes.
    sum: [u8; SUM],
    /// The checksum of the received bytes, once it has been computed.
    found: OnceLock<u64>,
}

/// Bytes of an incoming message. The message's buffer is freed once all its bytes were taken and dropped.
#[derive(Debug)]
pub struct Received {
    mail: Arc<Mail>,
    message: usize,
    /// `None` only while this is dropped.
    buffer: Option<Arc<Arrived>>,
    range: Range<usize>,
}

impl Mail {
    /// The messages of a rank, in the order in which they are sent and received. `contents` describes the incoming
    /// ones. `fill` fills the outgoing ones; without it, [`Mail::put`] does.
    #[must_use]
    pub fn new(
        outgoing: Vec<Envelope>,
        incoming: Vec<Envelope>,
        contents: Contents,
        fill: Option<Fill>,
    ) -> Self {
        Self::with_budget(outgoing, incoming, contents, fill, BUDGET)
    }

    /// Like [`Self::new`], with another budget.
    #[must_use]
    pub(super) fn with_budget(
        outgoing: Vec<Envelope>,
        incoming: Vec<Envelope>,
        contents: Contents,
        fill: Option<Fill>,
        budget: u64,
    ) -> Self {
        // A message without bytes is complete from the start.
        let out = |&(_, bytes): &Envelope| if bytes == 0 { Out::Full } else { Out::Away };
        let state = State {
            stopped: None,
            altered: None,
            lost: None,
            outgoing: outgoing.iter().map(out).collect(),
            incoming: incoming.iter().map(|_| In::Away).collect(),
            next: 0,
            demanded: 0,
            outgoing_held: 0,
            incoming_held: 0,
            filling: 0,
            sent: 0,
            received: 0,
        };
        let outgoing =
            outgoing.into_iter().map(|envelope| Outgoing { envelope, after: None, buffer: Mutex::default() });
        Self {
            beyond: 0,
            outgoing: outgoing.collect(),
            incoming,
            contents,
            fill,
            budget,
            state: Mutex::new(state),
            changed: Condvar::new(),
            free: Mutex::default(),
        }
    }

    /// The mail of a rank that relays messages. `outgoing` are the messages that it passes on, each with the number of
    /// messages that are sent before it begins. The incoming messages before number `first` are to be passed on.
    #[must_use]
    pub(super) fn relaying(mut self, outgoing: impl Iterator<Item = (usize, usize)>, first: usize) -> Self {
        for (message, after) in outgoing {
            self.outgoing[message].after = Some(after);
        }
        Self { beyond: first, ..self }
    }

    /// The bytes of an outgoing message that count in the budget.
    fn going(&self, message: usize) -> u64 {
        let Outgoing { envelope, after, .. } = &self.outgoing[message];
        if after.is_none() { envelope.1 } else { 0 }
    }

    /// Whether bytes can be put into an outgoing message.
    fn may_put(&self, state: &State, message: usize) -> bool {
        let Outgoing { envelope, after, .. } = &self.outgoing[message];
        if let Some(after) = *after {
            return state.next >= after;
        }
        // Later calls may supply the bytes of the next message to be sent. For a message of a relay, other ranks do.
        let next = self.outgoing.get(state.next).is_none_or(|next| next.after.is_none());
        state.outgoing[message] != Out::Away
            || fits(state.outgoing_held, envelope.1, self.budget)
            || (next && state.outgoing.get(state.next) != Some(&Out::Full))
    }

    /// The bytes of an incoming message that count in the budget.
    fn coming(&self, message: usize) -> u64 {
        if message < self.beyond { 0 } else { self.incoming[message].1 }
    }

    /// The outgoing messages, in the order in which to send them.
    pub fn outgoing(&self) -> impl ExactSizeIterator<Item = Envelope> {
        self.outgoing.iter().map(|message| message.envelope)
    }

    /// The incoming messages, in the order in which to receive them.
    pub fn incoming(&self) -> impl ExactSizeIterator<Item = Envelope> {
        self.incoming.iter().copied()
    }

    /// Leaves out messages whose receivers read the bytes elsewhere. Call it before any message is packed or admitted.
    pub(super) fn leave_out(
        &self,
        outgoing: impl Iterator<Item = usize>,
        incoming: impl Iterator<Item = usize>,
    ) {
        let mut state = lock(&self.state);
        outgoing.for_each(|message| state.outgoing[message] = Out::Sent);
        incoming.for_each(|message| state.incoming[message] = In::Taken);
        state.pass();
    }

    /// The numbers and envelopes of the messages that travel: outgoing and incoming.
    #[must_use]
    pub fn travelling(&self) -> [Vec<(usize, Envelope)>; 2] {
        let state = lock(&self.state);
        let sent = |&(message, _): &(usize, Envelope)| state.outgoing[message] != Out::Sent;
        let received = |&(message, _): &(usize, Envelope)| !matches!(state.incoming[message], In::Taken);
        [
            self.outgoing().enumerate().filter(sent).collect(),
            self.incoming().enumerate().filter(received).collect(),
        ]
    }

    /// The bytes of messages that were sent, and of messages that arrived.
    #[must_use]
    pub fn moved(&self) -> (u64, u64) {
        let state = lock(&self.state);
        (state.sent, state.received)
    }

    /// Ends every wait, now and later, with an error that names the reason. The first reason is kept. Buffers whose
    /// addresses were handed out stay until the mail is dropped.
    pub fn stop(&self, why: &str) {
        lock(&self.state).stopped.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }

    /// The rank whose message was altered on its way, and what is wrong with the message; `None` if there is none.
    #[must_use]
    pub fn altered(&self) -> Option<(u32, String)> {
        lock(&self.state).altered.clone()
    }

    /// Stops the mail because memory of a rank cannot be read. Returns the error for the reader of that memory.
    pub(super) fn lose(&self, peer: u32, why: &str) -> Error {
        lock(&self.state).lost.get_or_insert_with(|| (peer, why.to_owned()));
        self.stop(why);
        Error::Stopped(why.to_owned())
    }

    /// The rank whose memory could not be read, and why; `None` if there is none.
    #[must_use]
    pub fn lost(&self) -> Option<(u32, String)> {
        lock(&self.state).lost.clone()
    }

    /// Stops the mail and waits until the function that fills messages returns. It is not called again. So the memory
    /// that the function reads is free when this returns.
    pub fn end(&self, why: &str) {
        self.stop(why);
        let mut state = lock(&self.state);
        while state.filling > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until all bytes of an outgoing message are in it. Returns the address of the first byte. The bytes, and
    /// the checksum after them, stay there until [`Mail::sent`].
    pub fn pack(&self, message: usize) -> Result<usize> {
        let outgoing = self.outgoing.get(message).ok_or(Error::Misused(NO_SUCH))?;
        let bytes = outgoing.envelope.1;
        let Some(fill) = self.fill.as_ref().filter(|_| bytes > 0) else {
            let state = self.wait(|state| state.outgoing[message].is_complete())?;
            state.outgoing[message].unsent()?;
            drop(state);
            let mut buffer = lock(&outgoing.buffer);
            if buffer.is_empty() {
                sealed(&mut buffer, checksum::of(&[]));
            }
            return Ok(buffer.as_mut_ptr().addr());
        };
        let held = self.going(message);
        let mut state = self.wait(|state| fits(state.outgoing_held, held, self.budget))?;
        if state.outgoing[message] != Out::Away {
            return Err(Error::Misused("this message was packed before"));
        }
        state.outgoing[message] = Out::Filling(0);
        state.outgoing_held += held;
        state.filling += 1;
        drop(state);
        let _filling = Filling(self);
        let mut buffer = lock(&outgoing.buffer);
        *buffer = self.buffer(bytes);
        let sum = fill(self, message, &mut buffer)?;
        let address = sealed(&mut buffer, sum);
        drop(buffer);
        lock(&self.state).outgoing[message] = Out::Full;
        Ok(address)
    }

    /// Puts `len` bytes into an outgoing message, at byte `start`: calls `copy` with their place. Waits until the
    /// budget allows it. No byte may be put in twice.
    pub fn put(&self, message: usize, start: u64, len: u64, copy: impl FnOnce(&mut [u8])) -> Result<()> {
        let outgoing = self.outgoing.get(message).ok_or(Error::Misused(NO_SUCH))?;
        let (bytes, end) = (outgoing.envelope.1, start.saturating_add(len));
        if end > bytes || self.fill.is_some() {
            return Err(Error::Misused("these bytes do not belong to this message"));
        }
        if len == 0 {
            return Ok(());
        }
        let held = self.going(message);
        let mut state = self.wait(|state| self.may_put(state, message))?;
        match state.outgoing[message] {
            Out::Away => {
                state.outgoing[message] = Out::Filling(0);
                state.outgoing_held += held;
            }
            Out::Filling(_) => {}
            Out::Full | Out::Sent => return Err(Error::Misused(TWICE)),
        }
        drop(state);
        {
            let mut buffer = lock(&outgoing.buffer);
            if buffer.is_empty() {
                *buffer = self.buffer(bytes);
            }
            copy(&mut buffer[start as usize..end as usize]);
        }
        let mut state = lock(&self.state);
        let complete = match &mut state.outgoing[message] {
            Out::Filling(filled) if *filled + len <= bytes => {
                *filled += len;
                *filled == bytes
            }
            _ => return Err(Error::Misused(TWICE)),
        };
        drop(state);
        if complete {
            let mut buffer = lock(&outgoing.buffer);
            let sum = checksum::of(&buffer);
            sealed(&mut buffer, sum);
            drop(buffer);
            lock(&self.state).outgoing[message] = Out::Full;
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Records that an outgoing message was sent, and frees its buffer.
    pub fn sent(&self, message: usize) -> Result<()> {
        let outgoing = self.outgoing.get(message).ok_or(Error::Misused(NO_SUCH))?;
        let bytes = outgoing.envelope.1;
        let mut state = lock(&self.state);
        state.outgoing[message].unsent()?;
        state.outgoing[message] = Out::Sent;
        drop(state);
        let buffer = std::mem::take(&mut *lock(&outgoing.buffer));
        self.give(buffer);
        let mut state = lock(&self.state);
        state.outgoing_held -= self.going(message);
        state.sent += bytes;
        state.pass();
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until the budget allows an incoming message, or until a worker waits for it or a later one. Returns the
    /// address of the memory for its bytes.
    pub fn admit(&self, message: usize) -> Result<usize> {
        let &(_, bytes) = self.incoming.get(message).ok_or(Error::Misused(NO_SUCH))?;
        let held = self.coming(message);
        let mut state = self.wait(|state| held == 0 || state.may_admit(message, held, self.budget))?;
        if !matches!(state.incoming[message], In::Away) {
            return Err(Error::Misused("this message was admitted before"));
        }
        let mut buffer = self.buffer(bytes);
        buffer.resize(bytes as usize + SUM, 0);
        let address = buffer.as_mut_ptr().addr();
        state.incoming[message] = In::Admitted(buffer);
        state.incoming_held += held;
        Ok(address)
    }

    /// Records that the bytes of an incoming message have arrived.
    pub fn arrived(&self, message: usize) -> Result<()> {
        let &(_, bytes) = self.incoming.get(message).ok_or(Error::Misused(NO_SUCH))?;
        let mut buffer = match &mut lock(&self.state).incoming[message] {
            // The buffer is not empty until it is taken here.
            In::Admitted(buffer) if !buffer.is_empty() => std::mem::take(buffer),
            _ => return Err(Error::Misused("this message was not admitted, or is here already")),
        };
        let mut sum = [0; SUM];
        sum.copy_from_slice(&buffer[bytes as usize..]);
        buffer.truncate(bytes as usize);
        let arrived = Arrived { bytes: buffer, sum, found: OnceLock::new() };
        if bytes == 0 {
            // The message has no bytes to take, so it is compared now.
            self.compare(message, &arrived)?;
        }
        let mut state = lock(&self.state);
        state.incoming[message] = if bytes == 0 { In::Taken } else { In::Here(Arc::new(arrived), bytes) };
        state.received += bytes;
        self.changed.notify_all();
        Ok(())
    }

    /// Whether all of these incoming messages have arrived. If not, they and all earlier ones are admitted from now on.
    pub fn are_here(&self, messages: impl IntoIterator<Item = usize>) -> Result<bool> {
        let mut state = lock(&self.state);
        if let Some(why) = &state.stopped {
            return Err(Error::Stopped(why.clone()));
        }
        let mut here = true;
        for message in messages {
            if !state.incoming.get(message).ok_or(Error::Misused(NO_SUCH))?.is_here() {
                here = false;
                if state.demanded <= message {
                    state.demanded = message + 1;
                    self.changed.notify_all();
                }
            }
        }
        Ok(here)
    }

    /// Compares a message with its checksum, once. If it was altered, the mail is stopped.
    fn compare(&self, message: usize, arrived: &Arrived) -> Result<()> {
        let found = *arrived.found.get_or_init(|| checksum::of(&arrived.bytes));
        if found.to_le_bytes() == arrived.sum {
            return Ok(());
        }
        let sent = arrived.sum.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
        let (found, sent) = (checksum::to_hex(found), checksum::to_hex(sent));
        let why = format!("{}: checksum is {found}, expected {sent}", (self.contents)(message));
        lock(&self.state).altered.get_or_insert_with(|| (self.incoming[message].0, why.clone()));
        self.stop(&why);
        Err(Error::Altered(why))
    }

    /// Waits for bytes of an incoming message, and compares the message with its checksum. Meanwhile, the message and
    /// all earlier ones are admitted. Each byte must be taken exactly once.
    pub fn take(self: &Arc<Self>, message: usize, range: Range<u64>) -> Result<Received> {
        let buffer = Some(self.here(message, &range)?);
        let range = range.start as usize..range.end as usize;
        Ok(Received { mail: Arc::clone(self), message, buffer, range })
    }

    /// Copies the bytes at `start` of an incoming message to `to`, and counts them as taken, like [`Self::take`].
    pub fn copy(&self, message: usize, start: u64, to: &mut [u8]) -> Result<()> {
        let arrived = self.here(message, &(start..start + to.len() as u64))?;
        to.copy_from_slice(&arrived.bytes[start as usize..][..to.len()]);
        drop(arrived);
        self.took(message, to.len() as u64);
        Ok(())
    }

    /// Waits for bytes of an incoming message.
    fn here(&self, message: usize, range: &Range<u64>) -> Result<Arc<Arrived>> {
        let &(_, bytes) = self.incoming.get(message).ok_or(Error::Misused(NO_SUCH))?;
        if range.start >= range.end || range.end > bytes {
            return Err(Error::Misused("these bytes do not belong to this message"));
        }
        {
            let mut state = lock(&self.state);
            if state.demanded <= message && !state.incoming[message].is_here() {
                state.demanded = message + 1;
                self.changed.notify_all();
            }
        }
        let state = self.wait(|state| state.incoming[message].is_here())?;
        let In::Here(buffer, _) = &state.incoming[message] else {
            return Err(Error::Misused("all bytes of this message were taken before"));
        };
        let arrived = Arc::clone(buffer);
        drop(state);
        self.compare(message, &arrived)?;
        Ok(arrived)
    }

    /// Records that bytes of an incoming message were taken. They are not read again.
    fn took(&self, message: usize, bytes: u64) {
        let mut state = lock(&self.state);
        let slot = &mut state.incoming[message];
        let In::Here(_, left) = slot else { return };
        *left = left.saturating_sub(bytes);
        if *left > 0 {
            return;
        }
        let taken = std::mem::replace(slot, In::Taken);
        state.incoming_held -= self.coming(message);
        self.changed.notify_all();
        drop(state);
        if let In::Here(buffer, _) = taken
            && let Some(arrived) = Arc::into_inner(buffer)
        {
            self.give(arrived.bytes);
        }
    }

    /// Waits until `ready`, or until the mail is stopped.
    fn wait(&self, ready: impl Fn(&State) -> bool) -> Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(why) = &state.stopped {
                return Err(Error::Stopped(why.clone()));
            }
            if ready(&state) {
                return Ok(state);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A buffer of `bytes`, with room for their checksum, reused if one is free.
    fn buffer(&self, bytes: u64) -> Vec<u8> {
        let len = bytes as usize;
        let mut free = lock(&self.free);
        let fits = free.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= len + SUM);
        let at = fits.min_by_key(|(_, buffer)| buffer.capacity()).map(|(at, _)| at);
        let reused = at.map(|at| free.swap_remove(at));
        drop(free);
        // Zeros of a new buffer cost nothing until they are written to.
        let mut buffer = reused.unwrap_or_else(|| vec![0; len + SUM]);
        buffer.resize(len, 0);
        buffer
    }

    /// Keeps a buffer for reuse.
    fn give(&self, buffer: Vec<u8>) {
        let mut free = lock(&self.free);
        let kept: usize = free.iter().map(Vec::capacity).sum();
        if buffer.capacity() > 0 && kept + buffer.capacity() <= KEPT {
            free.push(buffer);
        }
    }
}

const NO_SUCH: &str = "there is no message of this number";
const TWICE: &str = "bytes were put into this message twice";

/// Whether `bytes` more bytes fit in the budget. A single message always fits.
fn fits(held: u64, bytes: u64, budget: u64) -> bool {
    held == 0 || held + bytes <= budget
}

/// Puts the checksum of a message behind its bytes. Returns the address of the first byte.
fn sealed(buffer: &mut Vec<u8>, sum: u64) -> usize {
    buffer.extend(sum.to_le_bytes());
    buffer.as_mut_ptr().addr()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Advances to the first outgoing message that has not been sent.
    fn pass(&mut self) {
        while self.outgoing.get(self.next) == Some(&Out::Sent) {
            self.next += 1;
        }
    }

    /// Whether an incoming message of `bytes` may have memory.
    fn may_admit(&self, message: usize, bytes: u64, budget: u64) -> bool {
        fits(self.incoming_held, bytes, budget) || message < self.demanded
    }
}

impl Out {
    /// Fails unless the message is complete and has not been sent.
    fn unsent(self) -> Result<()> {
        if self == Self::Full {
            Ok(())
        } else {
            Err(Error::Misused("this message is not complete, or was sent"))
        }
    }

    /// Whether all bytes are, or were, in the message.
    fn is_complete(self) -> bool {
        matches!(self, Self::Full | Self::Sent)
    }
}

impl In {
    /// Whether the message has arrived.
    fn is_here(&self) -> bool {
        matches!(self, Self::Here(..) | Self::Taken)
    }
}

/// A call of the function that fills messages.
struct Filling<'a>(&'a Mail);

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).filling -= 1;
        self.0.changed.notify_all();
    }
}

impl Deref for Received {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().and_then(|arrived| arrived.bytes.get(self.range.clone())).unwrap_or_default()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // The buffer goes first: the last owner to be counted as done must be the last one with a reference to it.
        self.buffer = None;
        self.mail.took(self.message, self.range.len() as u64);
    }
}

impl std::fmt::Debug for Mail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mail({} out, {} in)", self.outgoing.len(), self.incoming.len())
    }
}

#[cfg(test)]
pub(super) mod tests;
