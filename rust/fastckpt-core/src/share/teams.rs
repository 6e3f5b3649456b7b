//! Teams: ranks whose pieces of a tensor are neighbours in its file. Pure.
//!
//! The part of a tensor that a team has or wants is its **domain**. A tensor with several domains and pieces of at most
//! 64 KiB is **thin**: its writer or reader would exchange messages with very many ranks. So the members of another
//! team give their pieces to one member, the **relay**, which passes them on together. In a load, many ranks may want
//! bytes of a grain because several want the same piece. Then one of these gets it and passes it on.

use std::collections::HashMap;
use std::ops::Range;

use super::cover::LONG;
use super::held::{Held, nearest};
use super::runs::{Relays, Run};
use super::table::Share;
use crate::error::Result;

/// About the number of relayed bytes that a rank has in memory at the same time: of thin tensors in a save, or of one
/// window in a load.
const RELAYED: u64 = 64 << 20;
/// The most ranks to which a relay of a load passes bytes on: ranks of its team, or ranks that want the same piece.
const TOGETHER: u32 = 64;
/// A load sends a grain to each rank directly if at most this many want it, unless another size of teams was requested.
const FEW: u32 = 16;

/// The domains of the tensors of a class.
#[derive(Debug)]
struct Domains {
    /// The first interval of each domain, and the number of intervals.
    firsts: Vec<usize>,
    /// The number of ranks in all intervals. A rank in several intervals counts several times.
    pieces: u64,
}

/// The teams that have been found so far.
#[derive(Debug)]
pub(super) struct Teams<'a> {
    share: &'a Share,
    load: bool,
    /// The minimum number of ranks of a team, if there are as many.
    least: u32,
    /// The domains of each class.
    domains: HashMap<usize, Domains>,
    /// The team by class, domain and copy.
    known: HashMap<(usize, usize, u32), usize>,
    /// The ranks of each team, ascending; `numbers` maps them to the number of the team.
    all: Vec<Vec<u32>>,
    numbers: HashMap<Vec<u32>, usize>,
}

impl<'a> Teams<'a> {
    /// The teams of a save or a load. None is known yet.
    pub(super) fn new(share: &'a Share, load: bool) -> Result<Self> {
        Ok(Self::of_size(share, share.team_size()?, load))
    }

    /// Teams of at least `least` ranks. None is known yet.
    pub(super) fn of_size(share: &'a Share, least: u32, load: bool) -> Self {
        Self {
            share,
            load,
            least,
            domains: HashMap::new(),
            known: HashMap::new(),
            all: Vec::new(),
            numbers: HashMap::new(),
        }
    }

    /// The ranks of a team, ascending. Only a load can have a team without ranks.
    pub(super) fn ranks(&self, team: usize) -> &[u32] {
        &self.all[team]
    }

    /// The number of teams.
    pub(super) const fn len(&self) -> usize {
        self.all.len()
    }

    /// The number of the team of these ranks, ascending.
    pub(super) fn of(&mut self, ranks: Vec<u32>) -> usize {
        *self.numbers.entry(ranks).or_insert_with_key(|ranks| {
            self.all.push(ranks.clone());
            self.all.len() - 1
        })
    }

    /// The domains of a tensor: neighbouring intervals that together have enough ranks.
    fn domains(&mut self, held: &Held<'_>) -> &Domains {
        let least = u64::from(self.least);
        self.domains.entry(self.share.class[held.tensor]).or_insert_with(|| {
            let (mut firsts, mut ranks, mut pieces) = (Vec::new(), 0, 0);
            for interval in 0..held.cover.len() {
                if ranks == 0 {
                    firsts.push(interval);
                }
                // Copies of a piece count as one piece, even in a load.
                let givers = held.givers(interval, 0).len() as u64;
                (ranks, pieces) = (ranks + givers, pieces + givers);
                if ranks >= least {
                    ranks = 0;
                }
            }
            firsts.push(held.cover.len());
            Domains { firsts, pieces }
        })
    }

    /// The number of the domain of an interval, and its intervals.
    pub(super) fn around(&mut self, held: &Held<'_>, interval: usize) -> (usize, Range<usize>) {
        let firsts = &self.domains(held).firsts;
        let number = firsts.partition_point(|&first| first <= interval) - 1;
        (number, firsts[number]..firsts[number + 1])
    }

    /// The domain that contains the byte at `offset` of the file, and its team: in a save, the ranks that give the
    /// byte's copy of the domain; in a load, all ranks that want a part of it.
    pub(super) fn domain(&mut self, held: &Held<'_>, offset: u64) -> (Range<u64>, usize) {
        let (number, intervals) = self.around(held, held.at(offset));
        let (copy, dealt) = held.copy(offset);
        let bytes = held.interval(intervals.start).start.max(dealt.start)
            ..held.interval(intervals.end - 1).end.min(dealt.end);
        let key = (self.share.class[held.tensor], number, copy);
        if let Some(&team) = self.known.get(&key) {
            return (bytes, team);
        }
        let everyone = |interval| {
            if self.load { held.everyone(interval).to_vec() } else { held.givers(interval, copy) }
        };
        let mut ranks: Vec<u32> = intervals.flat_map(everyone).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let team = self.of(ranks);
        self.known.insert(key, team);
        (bytes, team)
    }

    /// The rank that relays the bytes of `rank` around the byte at `offset`, which is in `run`; `None` if they are sent
    /// directly. It is a member of the rank's team, or of its part of a team with several copies. Members of two teams
    /// with the same seat exchange messages, so each deals with few ranks of other teams, and all relay equally much.
    pub(super) fn relay(&mut self, held: &Held<'_>, offset: u64, run: &Run, rank: u32) -> Option<u32> {
        let most = if self.load { self.least.max(TOGETHER) } else { self.least };
        let team = self.domain(held, offset).1;
        let near = part_of(self.ranks(team), rank, most)?;
        let is_foreign = near.binary_search(&run.rank).is_err();
        is_foreign.then(|| near[run.seat as usize % near.len()])
    }

    /// The relays of the tensors of each class, and the number of blocks in a window. Tensors with the shortest pieces
    /// are thin, as long as a rank can relay all of them.
    pub(super) fn relays(&mut self, grain: u64) -> Result<(HashMap<usize, Relays>, u64)> {
        let few = match self.share.team {
            0 | 1 => self.least.max(FEW),
            requested => requested,
        };
        let mut of_class: HashMap<usize, (usize, u64)> = HashMap::new();
        for &tensor in self.share.order.iter().flatten() {
            of_class.entry(self.share.class[tensor]).or_insert((tensor, 0)).1 +=
                self.share.tensors[tensor].stored;
        }
        let (mut thin, mut found, mut most) = (Vec::new(), HashMap::new(), 1);
        for (class, (tensor, bytes)) in of_class {
            let held = Held::new(self.share, tensor, None)?;
            let (share, least, load) = (self.share, self.least, self.load);
            let Domains { firsts, pieces } = self.domains(&held);
            let (pieces, stored) = ((*pieces).max(1), share.tensors[tensor].stored);
            let copies = if load { u64::from(held.cover.copies()) } else { 1 };
            if least > 1 && firsts.len() > 2 && stored / pieces <= LONG as u64 {
                thin.push((stored / pieces, class, bytes / pieces.min(u64::from(share.ranks))));
            }
            let together = u128::from(grain) * u128::from(pieces) / u128::from(stored);
            if copies > 1 && together.clamp(1, pieces.into()) * u128::from(copies) > few.into() {
                found.insert(class, Relays::Copies);
                most = most.max(copies.min(TOGETHER.into()) - 1);
            }
        }
        thin.sort_unstable();
        let mut relayed = 0;
        let thin = thin.into_iter().take_while(|&(_, _, bytes)| {
            relayed += bytes;
            relayed <= RELAYED
        });
        found.extend(thin.map(|(_, class, _)| (class, Relays::Team)));
        let window = (RELAYED / (self.share.block_size * most)).max(1);
        Ok((found, if self.load { window } else { u64::MAX }))
    }
}

/// The rank that relays a piece of a load to `rank`. All of `ranks`, ascending, want the piece. `None` if its `reader`
/// sends it directly.
pub(super) fn of_copies(ranks: &[u32], reader: u32, rank: u32) -> Option<u32> {
    let near = part_of(ranks, rank, TOGETHER)?;
    if near.len() == 1 || near.binary_search(&reader).is_ok() { None } else { nearest(near, reader) }
}

/// The part of `ranks` that contains `rank`, if they are divided into parts of `most`.
fn part_of(ranks: &[u32], rank: u32, most: u32) -> Option<&[u32]> {
    ranks.chunks(most as usize).nth(ranks.binary_search(&rank).ok()? / most as usize)
}
