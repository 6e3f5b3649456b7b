//! Tests whether the members of a team write at the same time. Their messages are simulated with a clock, the budgets
//! of [`Mail`], and a network as fast as the storage. Nothing is measured.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::super::*;
use crate::format::geometry::PAGE;
use crate::share::{Duties, Item, Message, Placement, Purpose, Share, Spread, Tensor};

const MEMBERS: u32 = 16;
const BLOCK: u64 = 4 << 20;
/// The number of bytes that a rank sends, and writes, in one tick.
const TICK: u64 = 1 << 20;

/// A team with short pieces: a block needs some bytes of each member. What four members send to one fills its budget.
fn team() -> Share {
    let mut files = [(PAGE, PAGE); 4];
    let tensor = |number: usize| {
        let file = &mut files[number % 4];
        let offset = file.1;
        file.1 += BLOCK;
        let shape = vec![BLOCK / 128, 64];
        Tensor { name: String::new(), stored: BLOCK, shape, shard: number % 4, offset, spreads: vec![0] }
    };
    let tensors: Vec<_> = (0..1024).map(tensor).collect();
    let (mesh, placements) = (vec![u64::from(MEMBERS)], vec![Placement::Shard(0)]);
    let rows = Spread::Mesh { ranks: (0..MEMBERS).collect(), mesh, placements };
    let share = Share::new(files.to_vec(), BLOCK, tensors, vec![rows], MEMBERS).unwrap();
    share.in_teams(BLOCK, MEMBERS).unwrap()
}

/// A place of a message in an order.
type Key = fn(&Share, &Message) -> (usize, u64);

/// A message, and its number among the messages from the same sender to the same receiver.
type Numbered = (Message, usize);

/// A member of the team.
struct Member {
    outgoing: Vec<Numbered>,
    incoming: Vec<Numbered>,
    /// The number of packed outgoing messages. Messages before `sent`, and all in `away`, have left.
    packed: usize,
    sent: usize,
    away: HashSet<usize>,
    /// The place in `incoming` of each message, by peer and number.
    places: HashMap<(u32, usize), usize>,
    here: HashSet<usize>,
    /// Incoming messages before `next` were admitted. Those before `demanded` are admitted whatever the budget.
    next: usize,
    demanded: usize,
    /// Bytes of buffers.
    outgoing_held: u64,
    incoming_held: u64,
    /// The member's blocks in order, with the messages that each needs, and how many blocks use each message.
    blocks: Vec<HashSet<usize>>,
    uses: Vec<usize>,
    written: usize,
    /// The bytes left to write of the current block, and the ticks in which the member wrote.
    left: u64,
    busy: u64,
}

impl Member {
    /// The member with these duties. Its messages are in the order of `key`, or in their own order without a key.
    fn new(share: &Share, duties: &Duties, key: Option<Key>) -> Self {
        let numbered = |messages: &[Message]| {
            let mut counts = HashMap::<u32, usize>::new();
            let number = |message: &Message| {
                let count = counts.entry(message.peer).or_default();
                *count += 1;
                (message.clone(), *count)
            };
            let mut numbered: Vec<Numbered> = messages.iter().map(number).collect();
            if let Some(key) = key {
                numbered.sort_by_key(|(message, _)| key(share, message));
            }
            numbered
        };
        let (outgoing, incoming) = (numbered(&duties.boxes), numbered(&duties.io));
        let mut blocks = BTreeMap::<_, HashSet<usize>>::new();
        for range in &duties.ranges {
            for block in range.start / BLOCK..range.end.div_ceil(BLOCK) {
                blocks.entry((range.shard, block)).or_default();
            }
        }
        let mut places = HashMap::new();
        for (at, (message, number)) in incoming.iter().enumerate() {
            places.insert((message.peer, *number), at);
            for item in &message.items {
                let (file, offset) = place(share, item);
                blocks.get_mut(&(file, offset / BLOCK)).unwrap().insert(at);
            }
        }
        let blocks: Vec<_> = blocks.into_values().collect();
        let mut uses = vec![0; incoming.len()];
        blocks.iter().flatten().for_each(|&message| uses[message] += 1);
        Self {
            outgoing,
            incoming,
            packed: 0,
            sent: 0,
            away: HashSet::new(),
            places,
            here: HashSet::new(),
            next: 0,
            demanded: 0,
            outgoing_held: 0,
            incoming_held: 0,
            blocks,
            uses,
            written: 0,
            left: 0,
            busy: 0,
        }
    }

    /// Admits and packs as many messages as the budget allows.
    fn prepare(&mut self) {
        while let Some((message, _)) = self.incoming.get(self.next)
            && (fits(self.incoming_held, message.bytes, BUDGET) || self.next < self.demanded)
        {
            self.incoming_held += message.bytes;
            self.next += 1;
        }
        while let Some((message, _)) = self.outgoing.get(self.packed)
            && fits(self.outgoing_held, message.bytes, BUDGET)
        {
            self.outgoing_held += message.bytes;
            self.packed += 1;
        }
    }

    /// Records that a message has left. Buffers are freed in order.
    fn leaves(&mut self, message: usize) {
        self.away.insert(message);
        while self.away.remove(&self.sent) {
            self.outgoing_held -= self.outgoing[self.sent].0.bytes;
            self.sent += 1;
        }
    }

    /// Writes for a tick, if all messages that the next block needs are here.
    fn write(&mut self) {
        let Some(block) = self.blocks.get(self.written) else { return };
        if !block.is_subset(&self.here) {
            self.demanded = self.demanded.max(block.iter().max().unwrap() + 1);
            return;
        }
        self.busy += 1;
        self.left = if self.left == 0 { BLOCK } else { self.left } - TICK;
        if self.left == 0 {
            self.written += 1;
            for &message in block {
                self.uses[message] -= 1;
                if self.uses[message] == 0 {
                    self.incoming_held -= self.incoming[message].0.bytes;
                }
            }
        }
    }
}

/// The place of an item in the files.
fn place(share: &Share, item: &Item) -> (usize, u64) {
    let tensor = &share.tensors()[item.tensor];
    (tensor.shard, tensor.offset + item.bytes.start)
}

/// Simulates a save of the team. Returns the mean share of its members that write at the same time.
fn busy(share: &Share, duties: &[Duties], key: Option<Key>) -> f64 {
    let mut team: Vec<_> = duties.iter().map(|duties| Member::new(share, duties, key)).collect();
    let mut ticks = 0;
    while team.iter().any(|member| member.written < member.blocks.len()) {
        ticks += 1;
        assert!(ticks < 100_000, "members wait for each other in a circle");
        team.iter_mut().for_each(Member::prepare);
        for rank in 0..MEMBERS {
            // The first packed message for which the receiver has memory.
            let sender = &team[rank as usize];
            let ready = (sender.sent..sender.packed).filter(|message| !sender.away.contains(message));
            let goes = ready.map(|message| {
                let (Message { peer, .. }, number) = &sender.outgoing[message];
                (message, *peer as usize, team[*peer as usize].places[&(rank, *number)])
            });
            let first = goes.into_iter().find(|&(_, peer, place)| place < team[peer].next);
            if let Some((message, peer, place)) = first {
                team[peer].here.insert(place);
                team[rank as usize].leaves(message);
            }
        }
        team.iter_mut().for_each(Member::write);
    }
    let busy: u64 = team.iter().map(|member| member.busy).sum();
    busy as f64 / (ticks * u64::from(MEMBERS)) as f64
}

#[test]
fn the_members_of_a_team_write_at_the_same_time() {
    let share = team();
    let duties = (0..MEMBERS).map(|rank| share.duties(rank, Purpose::Save).unwrap());
    let duties: Vec<_> = duties.collect();
    let found = busy(&share, &duties, None);
    assert!(found >= 0.9, "{found:.2} of the members write at a time");
    // In the order of files, which is a common order, too, all would serve one member after another.
    let found = busy(&share, &duties, Some(|share, message| place(share, &message.items[0])));
    assert!(found < 0.5, "{found:.2} of the members write at a time in the order of files");
}
