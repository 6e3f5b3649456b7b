//! Ranks of one host: a rank reads the memory of another one directly, so no message carries those bytes.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::ops::Range;

use super::held::{Held, place};
use crate::error::Result;
use crate::share::{Item, Message};
use crate::sys::remote;

/// The address of each part that a rank gives to another rank, by tensor and number.
type Addresses = HashMap<(usize, u32), u64>;

/// The ranks whose memory this rank reads: the process of each, and the addresses of its parts.
#[derive(Debug, Default)]
pub(super) struct Near(HashMap<u32, (u32, Addresses)>);

/// The shortest row that costs less to copy through the kernel than to send.
const LEAST_ROW: u64 = 256;

/// Whether all bytes of a message are in its sender's memory, in rows that are long enough.
fn is_memory(message: &Message) -> bool {
    let lies =
        |item: &Item| item.own && item.relayed.is_empty() && item.rows.row() >= LEAST_ROW.min(item.len);
    !message.hop && message.items.iter().all(lies)
}

/// The parts that a rank gives to another one, in the same order on both sides.
fn parts(messages: &[Message], peer: u32) -> BTreeSet<(usize, u32)> {
    let between = messages.iter().filter(|message| message.peer == peer && is_memory(message));
    between.flat_map(|message| &message.items).map(|item| (item.tensor, item.part)).collect()
}

/// The number of addresses that `peer` gives for `messages`.
pub(super) fn expected(messages: &[Message], peer: u32) -> usize {
    parts(messages, peer).len()
}

/// The addresses of the parts in `messages` to `peer`, or zeros if another process cannot read one of the parts.
pub(super) fn addresses(messages: &[Message], peer: u32, held: &Held) -> Vec<u64> {
    let parts = parts(messages, peer);
    let all: Option<Vec<_>> = parts.iter().map(|part| held.address(*part)).collect();
    all.unwrap_or_else(|| vec![0; parts.len()])
}

/// The numbers of the `messages` that do not travel because `peers` read their bytes.
pub(super) fn left_out(
    messages: &[Message],
    peers: impl Fn(u32) -> bool + Clone,
) -> impl Iterator<Item = usize> + Clone {
    let left_out = move |message: &Message| peers(message.peer) && is_memory(message);
    messages.iter().enumerate().filter(move |(_, message)| left_out(message)).map(|(number, _)| number)
}

impl Near {
    /// Adds a rank: its process, and the addresses that the rank gives for `messages`.
    pub(super) fn add(&mut self, peer: u32, process: u32, messages: &[Message], addresses: &[u64]) {
        let parts = parts(messages, peer);
        if !parts.is_empty() && parts.len() == addresses.len() {
            let addresses = parts.into_iter().zip(addresses.iter().copied()).collect();
            self.0.insert(peer, (process, addresses));
        }
    }

    pub(super) fn has(&self, peer: u32) -> bool {
        self.0.contains_key(&peer)
    }

    /// Whether the bytes of a message are read directly.
    pub(super) fn brings(&self, message: &Message) -> bool {
        self.has(message.peer) && is_memory(message)
    }

    /// Reads an item from a rank's memory to its places in `to`, which begins at byte `start` of the tensor.
    pub(super) fn read(
        &self,
        peer: u32,
        item: &Item,
        (to, start): (&mut [u8], u64),
    ) -> Result<io::Result<()>> {
        let missing = || super::held::misfit("the memory of another rank", &item.bytes);
        let (process, addresses) = self.0.get(&peer).ok_or_else(missing)?;
        let base = addresses.get(&(item.tensor, item.part)).ok_or_else(missing)?;
        let (mut rows, mut rest, mut at) = (Vec::new(), to, start);
        for (row, run) in rows_of(item) {
            let skip = row.start.checked_sub(at).ok_or_else(missing)? as usize;
            let (slot, after) = rest
                .split_at_mut_checked(skip)
                .and_then(|(_, rest)| rest.split_at_mut_checked((row.end - row.start) as usize))
                .ok_or_else(missing)?;
            (rest, at) = (after, row.end);
            rows.push((base.wrapping_add(run), slot));
        }
        Ok(remote::read(*process, &mut rows))
    }
}

/// The rows of an item: where each is in the tensor, and its first byte in local memory.
fn rows_of(item: &Item) -> impl Iterator<Item = (Range<u64>, u64)> {
    item.rows
        .lines(item.bytes.clone())
        .flat_map(move |line| line.rows().map(move |(at, to)| (at..at + line.len, place(item, to))))
}
