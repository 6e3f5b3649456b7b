//! Items, and the messages that carry them between two ranks. Pure.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::sys::strided::Rows;

/// A message with this many bytes takes no more items, in a job of few ranks.
const FULL: u64 = 1 << 20;
/// The lower limit of the size of a full message, in a job of any number of ranks.
const LEAST: u64 = 64 << 10;
/// Approximate bytes of one message from each rank of a job: a block may need one from every rank at the same time.
const OF_ALL: u64 = 64 << 20;
/// A message takes no item that begins this many bytes or more after its first item in the file. So it does not hold
/// memory for long on the side that reads or writes the file.
const SPAN: u64 = 256 << 20;

/// Bytes of one part of one rank, inside one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The tensor.
    pub tensor: usize,
    /// A range of the tensor. The item is the bytes of the box in this range, in the order of the tensor.
    pub bytes: Range<u64>,
    /// The part of the rank on the box side.
    pub part: u32,
    /// The box, or a part of it: its position in the tensor, and in the memory of the part, counted from `base`.
    pub rows: Arc<Rows>,
    /// The position of the first byte of `rows` in the memory of the part.
    pub base: i64,
    /// The number of bytes, never zero.
    pub len: u64,
    /// Whether the rank on the box side of the message has or wants the item itself.
    pub own: bool,
    /// If this rank relays the item: the messages of [`super::Duties::relays`] that supply or receive its bytes, each
    /// with the position of the first byte there.
    pub relayed: Vec<(usize, u64)>,
}

/// Bytes that travel together from one rank to another: the bytes of its items, one item after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The other rank.
    pub peer: u32,
    /// The number of bytes.
    pub bytes: u64,
    /// Messages of a lower phase come first.
    pub phase: u64,
    /// Whether one of the two ranks relays the message for the other.
    pub hop: bool,
    /// The items, at least one, in the order of files and offsets.
    pub items: Vec<Item>,
}

/// Where an item belongs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) shard: usize,
    /// The first byte of the item in the file.
    pub(super) offset: u64,
    pub(super) turn: Turn,
    /// Whether the item travels between a relay and a member of its team.
    pub(super) hop: bool,
}

/// The place of an item in the order of all ranks: the number of its block at the rank that reads or writes it, then
/// the distance between the two ranks.
///
/// Every rank sends and receives in this order, so that no ranks wait in a circle. In each block, a rank serves its
/// neighbour first, then the next rank. In the order of files, all ranks would serve one rank after another.
///
/// In a save, messages between relays and the ranks that they relay for come before all other messages. In a load, they
/// come last in each window of blocks, and no message has bytes of two windows. So bytes that a relay passes on never
/// wait for a message that waits for these bytes, and a relay holds the bytes of one window at a time.
pub(super) type Turn = (u64, u32);

/// The messages of one rank in one direction, while items are added.
#[derive(Debug)]
pub(super) struct Mailbox {
    /// A message with this many bytes takes no more items.
    full: u64,
    /// The number of blocks in a window.
    window: u64,
    /// The spot of the first item of each message, and the turn of its last one.
    messages: Vec<(Spot, Turn, Message)>,
    /// The last message of each peer: one that a relay passes on, and one that is sent directly.
    last: HashMap<(u32, bool), usize>,
}

impl Mailbox {
    /// An empty mailbox for a job of this many ranks, with windows of this many blocks.
    pub(super) fn new(ranks: u32, window: u64) -> Self {
        let full = (OF_ALL / u64::from(ranks.max(1))).clamp(LEAST, FULL);
        Self { full, window, messages: Vec::new(), last: HashMap::new() }
    }

    /// Adds an item at `spot`. Items come in the order of files and offsets, and on both sides of a pair of ranks in
    /// the same order. Returns the number of its message, in the order of creation, and its place there.
    pub(super) fn add(&mut self, peer: u32, spot: Spot, item: Item) -> (usize, u64) {
        let key = (peer, spot.hop);
        if let Some(&last) = self.last.get(&key) {
            let (first, turn, message) = &mut self.messages[last];
            let near = first.shard == spot.shard && spot.offset - first.offset < SPAN;
            let with = first.turn.0 / self.window == spot.turn.0 / self.window;
            // A relay holds all of its messages of a window at the same time.
            if message.bytes < self.full && with && (near || spot.hop) {
                let at = message.bytes;
                message.bytes += item.len;
                message.items.push(item);
                *turn = spot.turn;
                return (last, at);
            }
        }
        self.last.insert(key, self.messages.len());
        let message = Message { peer, bytes: item.len, phase: 0, hop: spot.hop, items: vec![item] };
        self.messages.push((spot, spot.turn, message));
        (self.messages.len() - 1, 0)
    }

    /// The messages in the order in which they are needed: by their first items. A load sends a message once all of it
    /// is read, so a load orders messages by their last items. Also returns the place of each message in this order.
    pub(super) fn finish(self, load: bool) -> (Vec<Message>, Vec<usize>) {
        let mut order: Vec<_> = self.messages.into_iter().enumerate().collect();
        for (_, (first, _, message)) in &mut order {
            message.phase = 2 * (first.turn.0 / self.window) + u64::from(first.hop == load);
        }
        order.sort_by_key(|(_, (first, last, message))| {
            (message.phase, if load { *last } else { first.turn })
        });
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, (number, _))| places[*number] = place);
        (order.into_iter().map(|(_, (_, _, message))| message).collect(), places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_full_at_a_mebibyte_and_stays_near_its_first_item() {
        let rows = Arc::new(Rows::new(0, 1 << 30, std::iter::empty()));
        let mut mailbox = Mailbox::new(64, u64::MAX);
        let mut add = |peer, shard, offset: u64, len| {
            let (bytes, rows) = (offset..offset + len, Arc::clone(&rows));
            let spot = Spot { shard, offset, turn: (0, 0), hop: false };
            mailbox.add(
                peer,
                spot,
                Item { tensor: 0, bytes, part: 0, rows, base: 0, len, own: true, relayed: Vec::new() },
            );
        };
        add(1, 0, 0, FULL - 1);
        add(2, 0, FULL, 1);
        add(1, 0, 2 * FULL, FULL);
        add(1, 0, 3 * FULL, 1);
        add(1, 0, 3 * FULL + SPAN - 1, 1);
        add(2, 0, FULL + SPAN, 1);
        add(1, 0, 3 * FULL + SPAN, 1);
        add(1, 1, 3 * FULL + SPAN + 1, 1);
        let messages = mailbox.finish(false).0;
        let found: Vec<_> =
            messages.iter().map(|m| (m.peer, m.items[0].bytes.start, m.bytes, m.items.len())).collect();
        let expected = [
            (1, 0, 2 * FULL - 1, 2),
            (2, FULL, 1, 1),
            (1, 3 * FULL, 2, 2),
            (2, FULL + SPAN, 1, 1),
            (1, 3 * FULL + SPAN, 1, 1),
            (1, 3 * FULL + SPAN + 1, 1, 1),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_block_with_bytes_of_all_ranks_needs_little_memory() {
        let rows = Arc::new(Rows::new(0, 1 << 30, std::iter::empty()));
        for (ranks, most) in [(1, FULL), (64, FULL), (256, OF_ALL / 256), (1024, LEAST), (100_000, LEAST)] {
            let mut mailbox = Mailbox::new(ranks, u64::MAX);
            for at in (0..4 * FULL).step_by(4096) {
                let (bytes, rows) = (at..at + 4096, Arc::clone(&rows));
                let spot = Spot { shard: 0, offset: at, turn: (0, 0), hop: false };
                mailbox.add(
                    0,
                    spot,
                    Item {
                        tensor: 0,
                        bytes,
                        part: 0,
                        rows,
                        base: 0,
                        len: 4096,
                        own: true,
                        relayed: Vec::new(),
                    },
                );
            }
            let messages = mailbox.finish(false).0;
            assert!(messages.iter().all(|message| message.bytes == most), "{ranks} ranks");
        }
    }
}
