//! The duties of all ranks of small jobs, carried out byte by byte and compared with the spreads.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;
use crate::format::geometry::{self, PAGE};

/// By rank and part, the byte of the tensor that each byte of the part holds: the meaning of spreads, byte by byte.
type Parts = BTreeMap<(u32, u32), Vec<u64>>;

fn chunk(all: &[u64], count: u64, index: u64) -> Vec<u64> {
    let len = all.len().div_ceil(count as usize).max(1);
    all.chunks(len).nth(index as usize).unwrap_or_default().to_vec()
}

/// The indices along each dimension that each rank has, part by part.
fn indices(spread: &Spread, shape: &[u64], ranks: u32) -> Vec<(u32, Vec<Vec<u64>>)> {
    let whole = || shape.iter().map(|&size| (0..size).collect()).collect::<Vec<Vec<u64>>>();
    match spread {
        Spread::All => (0..ranks).map(|rank| (rank, whole())).collect(),
        Spread::Ranks(some) => some.iter().map(|&rank| (rank, whole())).collect(),
        Spread::Boxes(boxes) => {
            let along = |bounds: &Bounds| bounds.iter().map(|range| range.clone().collect()).collect();
            boxes.iter().map(|(rank, bounds)| (*rank, along(bounds))).collect()
        }
        Spread::Mesh { ranks, mesh, placements } => {
            let of = |(flat, &rank): (usize, &u32)| {
                let mut dims = whole();
                let mut below: u64 = mesh.iter().product();
                for (placement, &count) in placements.iter().zip(mesh) {
                    below /= count;
                    let at = flat as u64 / below % count;
                    match *placement {
                        Placement::Replicate => {}
                        Placement::Shard(dim) => dims[dim] = chunk(&dims[dim], count, at),
                        Placement::Strided { dim, factor } => {
                            let outer = (0..factor).map(|index| chunk(&dims[dim], factor, index));
                            dims[dim] = outer.flat_map(|outer| chunk(&outer, count, at)).collect();
                        }
                    }
                }
                (rank, dims)
            };
            ranks.iter().enumerate().map(of).collect()
        }
    }
}

/// The parts of all ranks of a tensor, element by element.
fn parts(tensor: &Tensor, spreads: &[Spread], ranks: u32) -> Parts {
    let mut found = Parts::new();
    let mut count: HashMap<u32, u32> = HashMap::new();
    let bits = (tensor.stored * 8).checked_div(tensor.shape.iter().product()).unwrap_or(0);
    for &spread in &tensor.spreads {
        for (rank, dims) in indices(&spreads[spread as usize], &tensor.shape, ranks) {
            let mut elements = vec![0];
            for (along, &size) in dims.iter().zip(&tensor.shape) {
                let deeper = |&at: &u64| along.iter().map(move |index| at * size + index);
                elements = elements.iter().flat_map(deeper).collect();
            }
            let bytes: Vec<u64> = if bits.is_multiple_of(8) {
                elements.iter().flat_map(|at| at * bits / 8..(at + 1) * bits / 8).collect()
            } else {
                // Two elements to a byte.
                elements.iter().filter(|at| at.is_multiple_of(2)).map(|at| at / 2).collect()
            };
            let part = count.entry(rank).or_default();
            found.insert((rank, *part), bytes);
            *part += 1;
        }
    }
    found
}

/// A job and what its spreads mean.
#[derive(Debug)]
struct Job {
    share: Share,
    parts: Vec<Parts>,
}

const NOBODY: u32 = u32::MAX;

impl Job {
    fn new(header: u64, block_size: u64, tensors: Vec<Tensor>, spreads: Vec<Spread>, ranks: u32) -> Self {
        let parts = tensors.iter().map(|tensor| parts(tensor, &spreads, ranks)).collect();
        Self { parts, ..Self::large(header, block_size, tensors, spreads, ranks) }
    }

    /// A job of tensors with too many bytes to list.
    fn large(
        header: u64,
        block_size: u64,
        mut tensors: Vec<Tensor>,
        spreads: Vec<Spread>,
        ranks: u32,
    ) -> Self {
        let mut files =
            vec![(header, header); tensors.iter().map(|tensor| tensor.shard + 1).max().unwrap_or(1)];
        for (index, tensor) in tensors.iter_mut().enumerate() {
            tensor.name = format!("t{index}");
            tensor.offset = files[tensor.shard].1;
            files[tensor.shard].1 += tensor.stored;
        }
        Self { share: Share::new(files, block_size, tensors, spreads, ranks).unwrap(), parts: Vec::new() }
    }

    /// For each byte of a tensor, how many parts have it.
    fn holders(&self, tensor: usize) -> Vec<u32> {
        let mut holders = vec![0; self.share.tensors()[tensor].stored as usize];
        self.parts[tensor].values().flatten().for_each(|&byte| holders[byte as usize] += 1);
        holders
    }

    fn duties(&self, purpose: Purpose) -> crate::Result<Vec<Duties>> {
        let all: Vec<_> = (0..self.share.ranks()).map(|rank| self.share.duties(rank, purpose)).collect();
        let refused = all.iter().filter(|duties| duties.is_err()).count();
        assert!(refused == 0 || refused == all.len(), "some ranks are refused, and others are not");
        all.into_iter().collect()
    }

    /// For each byte of an item, its place in the tensor and in the memory of the part. Checks that the part has it.
    fn bytes(&self, rank: u32, item: &Item) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        for line in item.rows.lines(item.bytes.clone()) {
            for (at, to) in line.rows() {
                found.extend((0..line.len).map(|byte| (at + byte, (item.base + to).cast_unsigned() + byte)));
            }
        }
        assert_eq!(found.len() as u64, item.len);
        assert!(
            item.len > 0 && found.is_sorted_by(|a, b| a.0 < b.0),
            "an item is in the order of the tensor"
        );
        let part = &self.parts[item.tensor][&(rank, item.part)];
        for &(byte, at) in &found {
            assert_eq!(part[at as usize], byte, "{item:?} of rank {rank}");
        }
        found
    }

    /// Like [`Self::bytes`] for an item of duties. Checks that it lies in one block.
    fn in_block(&self, rank: u32, item: &Item) -> Vec<(u64, u64)> {
        let offset = self.share.tensors()[item.tensor].offset;
        let block = |byte: u64| (offset + byte) / self.share.block_size();
        assert_eq!(block(item.bytes.start), block(item.bytes.end - 1), "an item lies in one block");
        self.bytes(rank, item)
    }

    /// Compares both sides of each message. Calls `each` with the rank that reads or writes an item, and the rank that
    /// has or wants it, with or without a relay.
    fn messages(&self, all: &[Duties], purpose: Purpose, mut each: impl FnMut(u32, u32, &Item)) {
        let mut sides: [BTreeMap<(u32, u32), Vec<&Message>>; 2] = Default::default();
        for (rank, duties) in (0..).zip(all) {
            let (sent, received) = duties.lanes(purpose);
            for message in sent {
                sides[0].entry((rank, message.peer)).or_default().push(message);
            }
            for message in received {
                sides[1].entry((message.peer, rank)).or_default().push(message);
            }
        }
        in_one_order(all, purpose);
        let content = |side: &BTreeMap<(u32, u32), Vec<&Message>>| {
            let items = |messages: &Vec<&Message>| {
                messages.iter().map(|message| (message.bytes, plain(message))).collect::<Vec<_>>()
            };
            side.iter().map(|(pair, messages)| (*pair, items(messages))).collect::<Vec<_>>()
        };
        assert_eq!(content(&sides[0]), content(&sides[1]));
        for ((from, to), messages) in &sides[0] {
            assert_ne!(from, to);
            for message in messages {
                assert_eq!(message.bytes, message.items.iter().map(|item| item.len).sum::<u64>());
                assert!(message.items.is_sorted_by_key(|item| self.place(item)));
            }
        }
        for (rank, duties) in (0..).zip(all) {
            let mut passed = Vec::new();
            for message in self.of_owners(all, rank, purpose) {
                for (item, plain) in message.items.iter().zip(plain(message)) {
                    assert!(item.own || !item.relayed.is_empty(), "every item is used");
                    if item.own {
                        each(message.peer, rank, &plain);
                    }
                    for &place in &item.relayed {
                        passed.push((place, item.len));
                        let (hop, mut at) = (&duties.relays[place.0], 0);
                        let there = hop.items.iter().find(|item| {
                            at += item.len;
                            at > place.1
                        });
                        let there = there.unwrap();
                        // Each rank has its own parts.
                        let same = Item { part: there.part, ..plain.clone() };
                        assert_eq!((there, at), (&same, place.1 + item.len), "relays pass on what they get");
                        each(message.peer, hop.peer, there);
                    }
                }
            }
            passed.sort_unstable();
            let mut relayed = Vec::new();
            for (number, hop) in duties.relays.iter().enumerate() {
                let mut at = 0;
                for item in &hop.items {
                    relayed.push(((number, at), item.len));
                    at += item.len;
                }
            }
            assert_eq!(passed, relayed, "a relay passes on all that comes, once");
        }
    }

    /// The messages of a rank with readers or writers, without relays.
    fn of_owners<'a>(&self, all: &'a [Duties], rank: u32, purpose: Purpose) -> Vec<&'a Message> {
        let mut found = Vec::new();
        for peer in 0..self.share.ranks() {
            let to = |messages: &'a [Message], peer: u32| {
                messages.iter().filter(move |message| message.peer == peer)
            };
            // Messages of relays are first in a save, and last in each window of a load.
            let last = u64::from(purpose == Purpose::Save);
            let own = to(&all[rank as usize].boxes, peer).filter(|message| message.phase % 2 == last);
            let first = found.len();
            found.extend(own);
            assert_eq!(found.len() - first, to(&all[peer as usize].io, rank).count());
        }
        found
    }

    fn place(&self, item: &Item) -> (usize, u64) {
        let tensor = &self.share.tensors()[item.tensor];
        (tensor.shard, tensor.offset + item.bytes.start)
    }

    /// The rank that has each byte of each file in its ranges.
    fn owners(&self, all: &[Duties]) -> Vec<Vec<u32>> {
        let mut owners: Vec<_> =
            self.share.files().iter().map(|file| vec![NOBODY; file.1 as usize]).collect();
        for (rank, duties) in (0..).zip(all) {
            assert!(duties.ranges.iter().all(|range| range.start < range.end));
            let apart =
                |a: &FileRange, b: &FileRange| (a.shard, a.end) < (b.shard, b.start) || a.shard < b.shard;
            assert!(duties.ranges.is_sorted_by(apart), "{:?}", duties.ranges);
            for range in &duties.ranges {
                for owner in &mut owners[range.shard][range.start as usize..range.end as usize] {
                    assert_eq!(std::mem::replace(owner, rank), NOBODY, "two ranks have {range:?}");
                }
            }
        }
        owners
    }

    fn check_save(&self) {
        let held = |tensor| self.holders(tensor).iter().all(|&count| count > 0);
        if !(0..self.parts.len()).all(held) {
            let error = self.duties(Purpose::Save).unwrap_err().to_string();
            assert!(error.contains("no rank has all of its bytes"), "{error}");
            return;
        }
        let all = self.duties(Purpose::Save).unwrap();
        let owners = self.owners(&all);
        for owners in &owners {
            assert!(!owners.contains(&NOBODY));
            for grain in owners.chunks(self.share.grain as usize) {
                assert!(grain.iter().all(|&rank| rank == grain[0]), "a grain has one writer");
            }
        }
        let mut given: Vec<Vec<u32>> = owners.iter().map(|owners| vec![NOBODY; owners.len()]).collect();
        let mut give = |io: u32, boxes: u32, item: &Item| {
            let tensor = &self.share.tensors()[item.tensor];
            for (byte, _) in self.in_block(boxes, item) {
                let at = (tensor.offset + byte) as usize;
                assert_eq!(owners[tensor.shard][at], io);
                assert_eq!(std::mem::replace(&mut given[tensor.shard][at], boxes), NOBODY, "given twice");
            }
        };
        for (rank, duties) in (0..).zip(&all) {
            duties.local.iter().for_each(|item| give(rank, rank, item));
        }
        self.messages(&all, Purpose::Save, give);
        for (given, &(data, _)) in given.iter().zip(self.share.files()) {
            assert!(!given[data as usize..].contains(&NOBODY), "every byte reaches its writer");
        }
        for index in 0..self.parts.len() {
            self.check_copies(index, &given);
        }
    }

    fn check_first(&self) {
        let held = |tensor| self.holders(tensor).iter().all(|&count| count > 0);
        if !(0..self.parts.len()).all(held) {
            return;
        }
        let share = self.first();
        let first = (0..share.ranks()).map(|rank| share.duties(rank, Purpose::Save));
        let first = first.collect::<crate::Result<Vec<_>>>().unwrap();
        let holders: Vec<_> = (0..self.parts.len()).map(|tensor| self.ranks(tensor)).collect();
        let lowest = |_: u32, boxes: u32, item: &Item| {
            for (byte, _) in self.in_block(boxes, item) {
                let holders = &holders[item.tensor][byte as usize];
                // Among several spreads, the one with the whole tensor comes first.
                let one = self.share.tensors()[item.tensor].spreads.len() == 1;
                let right = if one { holders.first() == Some(&boxes) } else { holders.contains(&boxes) };
                assert!(right, "the byte comes from the lowest rank");
            }
        };
        for (rank, duties) in (0..).zip(&first) {
            duties.local.iter().for_each(|item| lowest(rank, rank, item));
        }
        self.messages(&first, Purpose::Save, lowest);
    }

    /// The same job, with all tensors taken from their lowest ranks.
    fn first(&self) -> Share {
        let files = self.share.files().to_vec();
        let spreads = self.share.spreads.iter().map(|groups| groups.spread().clone()).collect();
        let tensors = self.share.tensors().to_vec();
        Share::new(files, self.share.block_size(), tensors, spreads, self.share.ranks())
            .unwrap()
            .first(|_| true)
    }

    /// The ranks that have each byte of a tensor, ascending.
    fn ranks(&self, tensor: usize) -> Vec<Vec<u32>> {
        let mut ranks = vec![Vec::new(); self.share.tensors()[tensor].stored as usize];
        for ((rank, _), bytes) in &self.parts[tensor] {
            for &byte in bytes {
                let ranks: &mut Vec<u32> = &mut ranks[byte as usize];
                if ranks.last() != Some(rank) {
                    ranks.push(*rank);
                }
            }
        }
        ranks
    }

    /// A tensor of few bytes comes from one copy, except for pages in which a part begins.
    fn check_copies(&self, index: usize, given: &[Vec<u32>]) {
        let tensor = &self.share.tensors()[index];
        let ranks = self.ranks(index);
        if tensor.spreads.len() > 1 || ranks.iter().any(|some| some.len() != ranks[0].len()) {
            return;
        }
        let mut copies = Vec::new();
        let mut begun = u64::MAX;
        for (byte, some) in ranks.iter().enumerate() {
            let at = tensor.offset + byte as u64;
            if byte == 0 || *some != ranks[byte - 1] {
                begun = at / self.share.page;
            }
            if at / self.share.page != begun {
                let from = given[tensor.shard][at as usize];
                copies.push(some.iter().position(|&rank| rank == from));
            }
        }
        copies.dedup();
        assert!(copies.len() < 2 && !copies.contains(&None), "{copies:?}");
    }

    /// All ranks that hold a cell choose the same bytes of it, and each byte that several hold is in one cell.
    fn check_copied(&self) {
        let all = (0..self.share.ranks()).map(|rank| self.share.copied(rank, Depth::All).unwrap());
        let all: Vec<_> = all.collect();
        for depth in [Depth::All, Depth::Samples(7), Depth::Overlaps] {
            let mut cells = HashMap::new();
            let mut compared = HashMap::new();
            for rank in 0..self.share.ranks() {
                let (found, holders) = self.share.copied(rank, depth).unwrap();
                assert!(depth == Depth::Overlaps || found.len() == all[rank as usize].0.len());
                for copied in found {
                    let bytes: Vec<u64> =
                        copied.items.iter().flat_map(|item| self.bytes(rank, item)).map(|at| at.0).collect();
                    let ranks = holders[copied.holders].clone();
                    assert!(ranks.contains(&rank) && ranks.len() > 1 && ranks.is_sorted());
                    let key = (copied.tensor, copied.start, copied.cell);
                    let (first, count) = cells.entry(key).or_insert((bytes.clone(), 0));
                    *count += 1;
                    assert_eq!(*first, bytes, "all ranks compare the same");
                    compared.insert(key, ranks);
                }
            }
            for (key, ranks) in &compared {
                assert_eq!(cells[key].1, ranks.len(), "all holders compare");
            }
            if depth == Depth::All {
                let mut held: Vec<Vec<u32>> = self
                    .parts
                    .iter()
                    .enumerate()
                    .map(|(index, _)| vec![0; self.share.tensors()[index].stored as usize])
                    .collect();
                for (key, (bytes, _)) in &cells {
                    for &byte in bytes {
                        held[key.0][byte as usize] += 1;
                    }
                }
                for (index, held) in held.iter().enumerate() {
                    let ranks = self.ranks(index);
                    assert!(held.iter().zip(&ranks).all(|(&times, some)| times == u32::from(some.len() > 1)));
                }
            }
        }
    }

    fn check_load(&self) {
        let all = self.duties(Purpose::Load).unwrap();
        let owners = self.owners(&all);
        for (index, tensor) in self.share.tensors().iter().enumerate() {
            let holders = self.holders(index);
            let placement =
                geometry::Placement { tensor: index, offset: tensor.offset, bytes: tensor.stored };
            for (extent, range) in geometry::extents(placement, 0..tensor.stored, self.share.block_size()) {
                let owners =
                    &owners[tensor.shard][extent.offset as usize..(extent.offset + extent.len) as usize];
                assert!(owners.iter().all(|&rank| rank == owners[0]), "an extent has one reader");
                let wanted = holders[range.start as usize..range.end as usize].iter().any(|&count| count > 0);
                assert_eq!(owners[0] != NOBODY, wanted, "what is wanted is read, and nothing else");
            }
        }
        for (owners, &(data, _)) in owners.iter().zip(self.share.files()) {
            assert!(owners[..data as usize].iter().all(|&rank| rank == NOBODY));
        }
        let missing = |bytes: &Vec<u64>| vec![0u8; bytes.len()];
        let mut filled: Vec<BTreeMap<_, _>> = Vec::new();
        for parts in &self.parts {
            filled.push(parts.iter().map(|(&part, bytes)| (part, missing(bytes))).collect());
        }
        let mut fill = |io: u32, boxes: u32, item: &Item| {
            let tensor = &self.share.tensors()[item.tensor];
            for (byte, at) in self.in_block(boxes, item) {
                assert_eq!(owners[tensor.shard][(tensor.offset + byte) as usize], io);
                filled[item.tensor].get_mut(&(boxes, item.part)).unwrap()[at as usize] += 1;
            }
        };
        for (rank, duties) in (0..).zip(&all) {
            duties.local.iter().for_each(|item| fill(rank, rank, item));
        }
        self.messages(&all, Purpose::Load, fill);
        assert!(
            filled.iter().flat_map(BTreeMap::values).flatten().all(|&times| times == 1),
            "each byte comes once"
        );
    }

    fn check(&self) {
        for (index, parts) in self.parts.iter().enumerate() {
            for (&(rank, part), bytes) in parts {
                assert_eq!(self.share.part_bytes(rank, index, part).unwrap(), bytes.len() as u64);
            }
        }
        self.check_save();
        self.check_first();
        self.check_copied();
        self.check_load();
    }
}

/// The items of a message without the fields of their relay.
fn plain(message: &Message) -> Vec<Item> {
    message.items.iter().map(|item| Item { own: true, relayed: Vec::new(), ..item.clone() }).collect()
}

/// All ranks send and receive their messages in one common order, so that no ranks wait for each other in a circle. A
/// relay passes bytes on after the message that brings them.
fn in_one_order(all: &[Duties], purpose: Purpose) {
    // The sender, the receiver, and the number among their messages.
    type Key = (u32, u32, usize);
    let mut follows: HashMap<Key, Vec<Key>> = HashMap::new();
    let mut before: HashMap<Key, usize> = HashMap::new();
    let mut comes = |last: Key, this: Key| {
        follows.entry(last).or_default().push(this);
        *before.entry(this).or_default() += 1;
        before.entry(last).or_default();
    };
    for (rank, duties) in (0..).zip(all) {
        let (sent, received) = duties.lanes(purpose);
        let keys = [(sent, false), (received, true)].map(|(messages, receives)| {
            let mut counts = HashMap::<u32, usize>::new();
            let key = |message: &&Message| {
                let number = counts.entry(message.peer).or_default();
                *number += 1;
                if receives { (message.peer, rank, *number) } else { (rank, message.peer, *number) }
            };
            messages.iter().map(key).collect::<Vec<Key>>()
        });
        keys.iter().flat_map(|keys| keys.windows(2)).for_each(|pair| comes(pair[0], pair[1]));
        for (number, message) in duties.boxes.iter().enumerate() {
            for &(hop, _) in message.items.iter().flat_map(|item| &item.relayed) {
                match purpose {
                    Purpose::Save => comes(keys[1][hop], keys[0][number]),
                    Purpose::Load => comes(keys[1][number], keys[0][duties.sent()[1][hop]]),
                }
            }
        }
    }
    let mut ready: Vec<_> = before.iter().filter(|(_, count)| **count == 0).map(|(&this, _)| this).collect();
    let mut done = 0;
    while let Some(this) = ready.pop() {
        done += 1;
        for next in follows.remove(&this).unwrap_or_default() {
            let left = before.get_mut(&next).unwrap();
            *left -= 1;
            if *left == 0 {
                ready.push(next);
            }
        }
    }
    assert_eq!(done, before.len(), "messages wait for each other in a circle");
}

type Index = prop::sample::Index;

/// A placement on one dimension of a mesh, for a tensor of `rank` dimensions.
fn placement(kind: u8, dim: Index, factor: u64, rank: usize) -> Placement {
    match (kind % 5, rank) {
        (0, _) | (_, 0) => Placement::Replicate,
        (1, _) => Placement::Strided { dim: dim.index(rank), factor },
        _ => Placement::Shard(dim.index(rank)),
    }
}

/// Random numbers that make a spread, for any shape of the tensor.
type Seed = (u8, Vec<(u64, u8, Index, u64)>, Vec<u32>, Vec<(u32, Vec<[Index; 2]>)>);

fn seeds() -> impl Strategy<Value = Seed> {
    let mesh = prop::collection::vec((1u64..4, any::<u8>(), any::<Index>(), 1u64..5), 1..4);
    let boxes = prop::collection::vec((any::<u32>(), prop::collection::vec(any::<[Index; 2]>(), 4)), 0..5);
    (any::<u8>(), mesh, prop::collection::vec(any::<u32>(), 12), boxes)
}

/// A spread over `ranks` ranks of a tensor of `shape`. Elements along the last dimension stay in groups of `last`.
fn spread((kind, mesh, shuffle, boxes): &Seed, shape: &[u64], ranks: u32, last: u64) -> Spread {
    let mut order: Vec<u32> = (0..ranks).collect();
    order.sort_by_key(|&rank| shuffle[rank as usize]);
    match kind % 8 {
        0 => Spread::All,
        1 => Spread::Ranks(order.split_off(order.len() / 2)),
        2 | 3 => {
            let bounds = |ends: &[[Index; 2]]| {
                let along = |(dim, (&size, ends)): (usize, (&u64, &[Index; 2]))| {
                    let unit = if dim + 1 == shape.len() { last } else { 1 };
                    let mut ends = ends.map(|end| end.index((size / unit) as usize + 1) as u64 * unit);
                    ends.sort_unstable();
                    ends[0]..ends[1]
                };
                shape.iter().zip(ends).enumerate().map(along).collect()
            };
            Spread::Boxes(boxes.iter().map(|(rank, ends)| (rank % ranks, bounds(ends))).collect())
        }
        _ => {
            // A dimension of the mesh gets at most as many coordinates as there are ranks left.
            let (mut sizes, mut placements, mut left) = (Vec::new(), Vec::new(), u64::from(ranks));
            let dims = if last > 1 { shape.len().saturating_sub(1) } else { shape.len() };
            for &(size, kind, dim, factor) in mesh {
                let size = size.min(left);
                left /= size;
                sizes.push(size);
                placements.push(placement(kind, dim, factor, dims));
            }
            order.truncate(sizes.iter().product::<u64>() as usize);
            Spread::Mesh { ranks: order, mesh: sizes, placements }
        }
    }
}

/// Jobs with elements of one of `items` bytes (0 means half a byte) and with blocks of one of `blocks` pages of 4096
/// bytes. Ranks write pages of up to 64 KiB, in grains of up to 64 pages.
fn jobs(items: Vec<u64>, most: u64, blocks: Vec<u64>) -> impl Strategy<Value = Job> {
    let tensor = (
        prop::collection::vec(prop_oneof![8 => 1..most, 1 => Just(1), 1 => Just(0)], 0..4),
        prop::sample::select(items),
        prop::collection::vec(seeds(), 1..4),
        any::<(bool, bool)>(),
    );
    let tensors = prop::collection::vec(tensor, 1..4);
    let header = prop_oneof![Just(64u64), Just(4096), 8..9000u64];
    let teams = (0..=6u32, prop::sample::select(vec![0, 1, 1, 2, 3, 8, 64]));
    (tensors, 1u32..9, prop::sample::select(blocks), header, 0..=4u32, teams).prop_map(
        |(seeds, ranks, block, header, larger, (longer, team))| {
            let (mut tensors, mut spreads) = (Vec::new(), Vec::new());
            for (mut shape, item, of, (second, whole)) in seeds {
                if item == 0 {
                    shape.iter_mut().last().into_iter().for_each(|size| *size = size.next_multiple_of(2));
                }
                let elements: u64 = shape.iter().product();
                let halves = item == 0 && !shape.is_empty();
                let stored = if halves { elements / 2 } else { elements * item.max(1) };
                let first = spreads.len() as u32;
                spreads.extend(of.iter().map(|seed| spread(seed, &shape, ranks, 1 + u64::from(halves))));
                if whole {
                    spreads.push(Spread::Ranks(vec![ranks - 1]));
                }
                let shard = usize::from(second);
                let spreads = (first..spreads.len() as u32).collect();
                tensors.push(Tensor { name: String::new(), stored, shape, shard, offset: 0, spreads });
            }
            let Job { share, parts } = Job::new(header, block * PAGE, tensors, spreads, ranks);
            let page = PAGE << larger.min(block.trailing_zeros());
            let share = share.in_pages(page).unwrap().in_teams(page << longer, team).unwrap();
            Job { share, parts }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_is_moved_once(job in jobs(vec![0, 1, 2, 4, 5, 300], 40, vec![1, 2, 3, 4])) {
        job.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_of_long_runs_is_moved_once(job in jobs(vec![3 << 12, 9 << 12, 20_001], 5, vec![1, 3, 16, 40])) {
        job.check();
    }
}

#[test]
fn a_digest_tells_jobs_apart() {
    let of = |block_size, shape: &[u64], name: &str, spread| {
        let (name, spreads) = (name.to_owned(), vec![0]);
        let tensor = Tensor { name, stored: 8, shape: shape.to_vec(), shard: 0, offset: 0, spreads };
        Share::new(vec![(0, 8)], block_size, vec![tensor], vec![spread], 2).unwrap().digest()
    };
    let same = of(PAGE, &[4], "a", Spread::All);
    assert_eq!(same, of(PAGE, &[4], "a", Spread::All));
    assert_ne!(same, of(2 * PAGE, &[4], "a", Spread::All));
    assert_ne!(same, of(PAGE, &[2, 2], "a", Spread::All));
    assert_ne!(same, of(PAGE, &[4], "b", Spread::All));
    assert_ne!(same, of(PAGE, &[4], "a", Spread::Ranks(vec![0])));
    let in_pages = |page| {
        let share = Share::new(vec![(0, 0)], 64 << 10, Vec::new(), Vec::new(), 2).unwrap();
        share.in_pages(page).map(|share| share.digest()).ok()
    };
    assert_ne!(in_pages(PAGE), in_pages(64 << 10));
    assert!([0, 100, 3 * PAGE, 128 << 10].into_iter().all(|page| in_pages(page).is_none()));
}

/// A job with one file of tensors of two bytes an element.
fn job(shapes: &[&[u64]], spreads: Vec<Spread>, ranks: u32) -> Job {
    Job::new(PAGE, 4 << 20, tensors(shapes, &spreads), spreads, ranks)
}

/// A job with one file of large tensors of two bytes an element.
fn large_job(shapes: &[&[u64]], spreads: Vec<Spread>, ranks: u32) -> Job {
    Job::large(PAGE, 4 << 20, tensors(shapes, &spreads), spreads, ranks)
}

fn tensors(shapes: &[&[u64]], spreads: &[Spread]) -> Vec<Tensor> {
    let tensor = |shape: &&[u64]| Tensor {
        name: String::new(),
        stored: 2 * shape.iter().product::<u64>(),
        shape: shape.to_vec(),
        shard: 0,
        offset: 0,
        spreads: (0..spreads.len() as u32).collect(),
    };
    shapes.iter().map(tensor).collect()
}

fn mesh(sizes: &[u64], placements: &[Placement]) -> Spread {
    let ranks = (0..sizes.iter().product::<u64>() as u32).collect();
    Spread::Mesh { ranks, mesh: sizes.to_vec(), placements: placements.to_vec() }
}

fn size(ranges: &[FileRange]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[test]
fn replicas_share_the_work_without_messages() {
    for spread in [Spread::All, mesh(&[2, 2], &[Placement::Replicate, Placement::Shard(0)])] {
        // A single tensor is cut into runs. Of many tensors, each stays whole.
        let small = vec![&[1u64 << 10, 1 << 10][..]; 64];
        for shapes in
            [vec![&[1 << 14, 1 << 13][..]], small.clone(), [small, vec![&[1 << 13, 1 << 13][..]]].concat()]
        {
            let job = large_job(&shapes, vec![spread.clone()], 4);
            let share = job.share.files()[0].1 / 4;
            for duties in job.duties(Purpose::Save).unwrap() {
                assert!(duties.io.is_empty() && duties.boxes.is_empty());
                assert!(
                    size(&duties.ranges).abs_diff(share) <= share / 16 + (4 << 20),
                    "{:?}",
                    duties.ranges
                );
            }
        }
        let job = large_job(&[&[1 << 12, 1 << 12]], vec![spread], 4);
        for duties in job.duties(Purpose::Load).unwrap() {
            assert!(size(&duties.ranges) <= 12 << 20, "{:?}", duties.ranges);
        }
    }
}

#[test]
fn long_runs_are_written_by_those_who_have_them() {
    // Experts that are cut along the second dimension: their contiguous pieces have 64 KiB.
    let job = job(&[&[16, 64, 2048]], vec![mesh(&[4], &[Placement::Shard(1)])], 4);
    for duties in job.duties(Purpose::Save).unwrap() {
        assert!(duties.io.is_empty() && duties.boxes.is_empty());
        assert!(size(&duties.ranges).abs_diff(1 << 20) <= PAGE);
    }
}

#[test]
fn nothing_travels_but_the_edges_of_pages() {
    let received = |page| {
        let Job { share, parts } = job(&[&[8192, 4096]], vec![mesh(&[8], &[Placement::Shard(0)])], 8);
        let job = Job { share: share.in_pages(page).unwrap(), parts };
        let all = job.duties(Purpose::Save).unwrap();
        all.iter().flat_map(|duties| &duties.io).map(|message| message.bytes).sum::<u64>()
    };
    assert!(received(PAGE) <= 8 * PAGE && received(64 << 10) <= 8 * (64 << 10));
}

#[test]
fn short_runs_are_exchanged_within_their_copy_of_the_model() {
    let placements = [Placement::Replicate, Placement::Shard(1)];
    let job = job(&[&[4096, 4096]], vec![mesh(&[4, 8], &placements)], 32);
    for (rank, duties) in (0..).zip(job.duties(Purpose::Save).unwrap()) {
        assert!(duties.io.iter().all(|message| message.peer / 8 == rank / 8));
        let own = size(&duties.ranges);
        let received: u64 = duties.io.iter().map(|message| message.bytes).sum();
        assert!(received.abs_diff(own / 8 * 7) <= PAGE, "{own} {received}");
        // Messages are full: the bytes that eight ranks have in a block go to one of them.
        assert!(duties.io.iter().all(|message| message.bytes <= 4 << 20));
    }
}

#[test]
fn thin_tensors_come_from_one_rank_of_each_team() {
    // A weight in long pieces, and many norms of which each of 64 ranks has a few bytes, in teams of 8.
    let shapes = [vec![&[1 << 12, 1 << 14][..]], vec![&[1 << 12][..]; 40]].concat();
    let Job { share, parts } = large_job(&shapes, vec![mesh(&[64], &[Placement::Shard(0)])], 64);
    for (team, all) in [(8, 8 + 8 + 16), (1, 63)] {
        let share = Share::new(
            share.files().to_vec(),
            share.block_size(),
            share.tensors().to_vec(),
            vec![mesh(&[64], &[Placement::Shard(0)])],
            64,
        );
        let job = Job { share: share.unwrap().in_teams(1 << 20, team).unwrap(), parts: parts.clone() };
        for purpose in [Purpose::Save, Purpose::Load] {
            let duties = job.duties(purpose).unwrap();
            let peers = |duties: &Duties| {
                let (sent, received) = duties.lanes(purpose);
                let mut peers: Vec<u32> = sent.iter().chain(&received).map(|message| message.peer).collect();
                peers.sort_unstable();
                peers.dedup();
                peers.len()
            };
            let most = duties.iter().map(peers).max().unwrap();
            assert!(if team == 1 { most == all } else { most <= all }, "{most} peers");
            let relayed: u64 = duties.iter().flat_map(|duties| &duties.relays).map(|hop| hop.bytes).sum();
            // Of the 320 KiB of norms, relays pass on the bytes that neither the owner's team nor a relay has.
            assert!(
                if team == 1 { relayed == 0 } else { (200 << 10..280 << 10).contains(&relayed) },
                "{relayed}"
            );
        }
    }
}

#[test]
fn pieces_of_64_kib_are_relayed_and_longer_ones_are_not() {
    // Four ranks in two teams of two. A piece of the second tensor has one element more.
    let spread = mesh(&[4], &[Placement::Shard(0)]);
    let job = job(&[&[4, 32 << 10], &[4, (32 << 10) + 1]], vec![spread], 4);
    let job = Job { share: job.share.in_teams(1 << 20, 2).unwrap(), ..job };
    job.check();
    for purpose in [Purpose::Save, Purpose::Load] {
        let all = job.duties(purpose).unwrap();
        let relayed = all.iter().flat_map(|duties| &duties.relays).flat_map(|message| &message.items);
        let bytes = relayed.map(|item| (item.tensor, item.len)).collect::<Vec<_>>();
        // In the team without a writer, one member passes on the bytes of the other.
        assert_eq!(bytes, [(0, 64 << 10)], "{purpose:?}");
    }
}

#[test]
fn a_rank_relays_the_shortest_pieces_and_no_more_than_it_can_hold() {
    // Pieces of 60 KiB, of which each rank has 66 MiB, and norms.
    let shapes = [vec![&[16, 30 << 10][..]; 1125], vec![&[1 << 12][..]; 40]].concat();
    let Job { share, .. } = large_job(&shapes, vec![mesh(&[16], &[Placement::Shard(0)])], 16);
    let share = share.in_teams(1 << 20, 4).unwrap();
    let relayed = |duties: Duties| duties.relays.into_iter().flat_map(|message| message.items);
    let relays: Vec<Item> =
        (0..16).flat_map(|rank| relayed(share.duties(rank, Purpose::Save).unwrap())).collect();
    assert!(!relays.is_empty() && relays.iter().all(|item| item.tensor >= 1125));
}

#[test]
fn the_members_of_a_team_relay_alike() {
    // The norms take 32 grains, one for each rank.
    let spreads = vec![mesh(&[32], &[Placement::Shard(0)])];
    let norms = tensors(&vec![&[1 << 16][..]; 256], &spreads);
    let job = Job::large(PAGE, 1 << 20, norms, spreads, 32);
    let job = Job { share: job.share.in_teams(1 << 20, 4).unwrap(), ..job };
    for purpose in [Purpose::Save, Purpose::Load] {
        let bytes = |duties: &Duties| duties.relays.iter().map(|message| message.bytes).sum::<u64>();
        let relayed: Vec<u64> = job.duties(purpose).unwrap().iter().map(bytes).collect();
        let mean = relayed.iter().sum::<u64>() / 32;
        assert!(mean > 0 && relayed.iter().all(|&bytes| bytes <= 2 * mean), "{relayed:?}");
    }
}

#[test]
fn shares_of_a_team_end_with_files_where_these_are_near() {
    let like = [vec![20; 40], vec![21; 40], vec![20; 40], vec![21; 40]].concat();
    // For four members: the sizes of the files in MiB, and the number of files that each member writes.
    for (sizes, files) in [(vec![64, 66, 63, 65], [1; 4]), (like, [40; 4]), (vec![100, 28], [1, 1, 1, 2])] {
        let spreads = vec![mesh(&[4], &[Placement::Shard(0)])];
        let of = |(shard, &size)| Tensor { shard, ..tensors(&[&[size << 9, 1024]], &spreads).remove(0) };
        let all = sizes.iter().enumerate().map(of).collect();
        let job = Job::large(PAGE, 1 << 20, all, spreads.clone(), 4);
        let job = Job { share: job.share.in_teams(1 << 20, 4).unwrap(), ..job };
        let mean = (sizes.iter().sum::<u64>() << 20) / 4;
        for purpose in [Purpose::Save, Purpose::Load] {
            let all = job.duties(purpose).unwrap();
            let found = all.iter().map(|duties| duties.ranges.chunk_by(|a, b| a.shard == b.shard).count());
            assert_eq!(found.collect::<Vec<_>>(), files, "{purpose:?}");
            assert!(all.iter().all(|duties| size(&duties.ranges).abs_diff(mean) <= mean / 16));
        }
    }
}

#[test]
fn teams_of_many_ranks_are_larger_where_each_would_write_many_files() {
    // Each rank has a piece of 256 KiB of each file. 16 pieces make a grain.
    for (ranks, files, team) in [(1024, 216, 16), (2048, 216, 32), (2048, 100, 16), (4096, 700, 128)] {
        let tensor = |shard| Tensor { shard, ..tensors(&[&[u64::from(ranks) << 7, 1024]], &[]).remove(0) };
        let spread = mesh(&[u64::from(ranks)], &[Placement::Shard(0)]);
        let all = (0..files).map(|shard| Tensor { spreads: vec![0], ..tensor(shard) }).collect();
        let Job { share, .. } = Job::large(PAGE, 4 << 20, all, vec![spread], ranks);
        assert_eq!(
            share.in_teams(4 << 20, 0).unwrap().team_size().unwrap(),
            team,
            "{ranks} ranks, {files} files"
        );
    }
}

#[test]
fn a_piece_that_several_want_is_sent_once_and_passed_on() {
    // Four copies of many tensors of one block, each in eight pieces: 32 ranks want something of each block.
    let spread = mesh(&[4, 8], &[Placement::Replicate, Placement::Shard(0)]);
    let job = large_job(&vec![&[512, 4096][..]; 256], vec![spread], 32);
    let all = job.duties(Purpose::Load).unwrap();
    in_one_order(&all, Purpose::Load);
    let total: u64 = 256 * (4 << 20);
    let bytes = |messages: &[Message]| messages.iter().map(|message| message.bytes).sum::<u64>();
    let travels: u64 = all.iter().map(|duties| bytes(&duties.boxes)).sum();
    assert!(travels <= 4 * total - total / 8 && travels > 3 * total, "{travels}");
    for duties in &all {
        let (sent, received) = duties.lanes(Purpose::Load);
        let mut peers: Vec<u32> = sent.iter().chain(&received).map(|message| message.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        // The peers of a rank have the other pieces of its copy, or the other copies of its piece.
        assert!(peers.len() <= 7 + 3, "{} peers", peers.len());
        // A relay holds the bytes of one window after another.
        let windows = duties.relays.chunk_by(|one, next| one.phase == next.phase);
        assert!(windows.clone().count() > 1);
        assert!(windows.map(bytes).all(|relayed| relayed <= 2 * (64 << 20)));
    }
}

#[test]
fn small_tensors_are_read_by_all_ranks_alike() {
    let shapes = vec![[256, 128]; 1000];
    let shapes: Vec<&[u64]> = shapes.iter().map(|shape| &shape[..]).collect();
    let job = job(&shapes, vec![mesh(&[8], &[Placement::Shard(0)])], 8);
    let all: u64 = 1000 * 2 * 256 * 128;
    for duties in job.duties(Purpose::Load).unwrap() {
        assert!((all / 16..all / 4).contains(&size(&duties.ranges)), "{:?}", duties.ranges);
    }
}

#[test]
fn chunks_are_those_of_torch() {
    let indices = |spread: &Spread, size| {
        let found = indices(spread, &[size], 4);
        found.into_iter().map(|(_, mut dims)| dims.remove(0)).collect::<Vec<_>>()
    };
    // The examples of torch's own documentation of `_StridedShard`, and of `torch.chunk`.
    let strided = mesh(&[4], &[Placement::Strided { dim: 0, factor: 2 }]);
    assert_eq!(indices(&strided, 9), [vec![0, 1, 5], vec![2, 3, 6], vec![4, 7], vec![8]]);
    let sharded = mesh(&[4], &[Placement::Shard(0)]);
    assert_eq!(indices(&sharded, 5), [vec![0, 1], vec![2, 3], vec![4], vec![]]);
    let both = mesh(&[2, 2], &[Placement::Strided { dim: 0, factor: 2 }, Placement::Shard(0)]);
    assert_eq!(indices(&both, 8), [vec![0, 1], vec![4, 5], vec![2, 3], vec![6, 7]]);
    for (spread, size) in [(strided, 9), (sharded, 5), (both, 8)] {
        job(&[&[size]], vec![spread], 4).check();
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let of = |spread: Spread, shape: &[u64], stored: u64| {
        let tensor = Tensor {
            name: "w".to_owned(),
            stored,
            shape: shape.to_vec(),
            shard: 0,
            offset: PAGE,
            spreads: vec![0],
        };
        let share = Share::new(vec![(PAGE, PAGE + stored)], PAGE, vec![tensor], vec![spread], 4)?;
        share.duties(3, Purpose::Save)
    };
    let range = |start: u64, end: u64| std::iter::once(start..end).collect::<Bounds>();
    for (spread, shape, stored, why) in [
        (Spread::Ranks(vec![1, 2, 1]), vec![4], 4, "rank 1 is named twice"),
        (Spread::Ranks(vec![4]), vec![4], 4, "there is no rank 4"),
        (Spread::Ranks(Vec::new()), vec![4], 8, "tensor `w`: no rank has all of its bytes from 0 to 8"),
        (Spread::Boxes(vec![(1, range(0, 2))]), vec![4], 8, "no rank has all of its bytes from 4 to 8"),
        (Spread::Boxes(vec![(1, range(0, 5))]), vec![4], 8, "0..5 is not in dimension 0 of size 4"),
        (Spread::Boxes(vec![(1, Bounds::new())]), vec![4], 8, "a box has 0 dimensions, the tensor has 1"),
        (Spread::Boxes(vec![(0, range(0, 3)), (1, range(3, 6))]), vec![6], 3, "3 elements do not"),
        (Spread::Boxes(vec![(0, range(0, 3))]), vec![3], 4, "its shape does not fit its 4 bytes"),
        (
            mesh(&[3], &[Placement::Shard(1)]),
            vec![4],
            8,
            "it is sharded along dimension 1, but has 1 dimensions",
        ),
        (mesh(&[3], &[]), vec![4], 8, "with 0 placements does not fit 3 ranks"),
        (mesh(&[3], &[Placement::Strided { dim: 0, factor: 0 }]), vec![4], 8, "has no chunks"),
    ] {
        let error = of(spread, &shape, stored).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // A rank with everything has every byte, whatever the type.
    assert_eq!(of(Spread::All, &[3], 2).unwrap().ranges.len(), 0);
}
