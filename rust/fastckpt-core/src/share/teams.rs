//! Teams: ranks whose pieces of a tensor are neighbours in its file. Pure.
//!
//! What a team has, or wants, of a tensor is its **domain**. Where the pieces are short and the tensor has several
//! domains, it is **thin**: its writer, or reader, would have to hear from a great many ranks. So the members of another
//! team give theirs to one of them, the **relay**, which passes them on together.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::cover::LONG;
use super::held::Held;
use super::runs::Run;
use super::table::Share;
use crate::error::Result;

/// Bytes of thin tensors that a rank relays, about: it has them in memory all at the same time.
const RELAYED: u64 = 64 << 20;

/// The domains of the tensors of a class.
#[derive(Debug)]
struct Domains {
    /// The first interval of each domain, and the number of intervals.
    firsts: Vec<usize>,
    /// The ranks of all intervals, those of several intervals several times.
    pieces: u64,
}

/// The teams that were looked for.
#[derive(Debug)]
pub(super) struct Teams<'a> {
    share: &'a Share,
    load: bool,
    /// Ranks of a team, if there are as many.
    least: u32,
    /// By class.
    domains: HashMap<usize, Domains>,
    /// The team by class, domain and copy.
    known: HashMap<(usize, usize, u32), usize>,
    /// The ranks of each team, ascending, and the number of each.
    all: Vec<Vec<u32>>,
    numbers: HashMap<Vec<u32>, usize>,
}

impl<'a> Teams<'a> {
    /// None yet, of a save or a load.
    pub(super) fn new(share: &'a Share, load: bool) -> Result<Self> {
        Ok(Self {
            share,
            load,
            least: share.team_size()?,
            domains: HashMap::new(),
            known: HashMap::new(),
            all: Vec::new(),
            numbers: HashMap::new(),
        })
    }

    /// The ranks of a team, ascending. Only a load has a team without any.
    pub(super) fn ranks(&self, team: usize) -> &[u32] {
        &self.all[team]
    }

    /// The number of teams.
    pub(super) const fn len(&self) -> usize {
        self.all.len()
    }

    /// The team of these ranks, ascending.
    pub(super) fn of(&mut self, ranks: Vec<u32>) -> usize {
        *self.numbers.entry(ranks).or_insert_with_key(|ranks| {
            self.all.push(ranks.clone());
            self.all.len() - 1
        })
    }

    /// The domains of a tensor: neighbours with enough ranks.
    fn domains(&mut self, held: &Held<'_>) -> &Domains {
        let least = u64::from(self.least);
        self.domains.entry(self.share.class[held.tensor]).or_insert_with(|| {
            let (mut firsts, mut ranks, mut pieces) = (Vec::new(), 0, 0);
            for interval in 0..held.cover.len() {
                if ranks == 0 {
                    firsts.push(interval);
                }
                // Copies of one piece are one piece, of a load, too.
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

    /// The domain with the byte at `offset` of the file, and its team: the ranks that give the byte's copy of the domain
    /// to a save, or all that want something of it.
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

    /// The rank that relays what `rank` has or wants of the byte at `offset`, which is in `run`, if another one does: a
    /// member of its team, or of its part of a team that has several copies. The members of two teams with the same seat
    /// deal with each other, so that each hears from few ranks of other teams, and relays as much as others.
    pub(super) fn relay(&mut self, held: &Held<'_>, offset: u64, run: &Run, rank: u32) -> Option<u32> {
        let team = self.domain(held, offset).1;
        let ranks = self.ranks(team);
        let place = ranks.binary_search(&rank).ok()?;
        let near = ranks.chunks(self.least as usize).nth(place / self.least as usize)?;
        let is_foreign = near.binary_search(&run.rank).is_err();
        is_foreign.then(|| near[run.seat as usize % near.len()])
    }

    /// The classes of thin tensors: those with the shortest pieces, as long as a rank can relay them all.
    pub(super) fn thin(&mut self) -> Result<HashSet<usize>> {
        if self.least == 1 {
            return Ok(HashSet::new());
        }
        let mut of_class: HashMap<usize, (usize, u64)> = HashMap::new();
        for &tensor in self.share.order.iter().flatten() {
            of_class.entry(self.share.class[tensor]).or_insert((tensor, 0)).1 +=
                self.share.tensors[tensor].stored;
        }
        let mut found = Vec::new();
        for (class, (tensor, bytes)) in of_class {
            let held = Held::new(self.share, tensor, None)?;
            let copies = if self.load { u64::from(held.cover.copies()) } else { 1 };
            let (share, Domains { firsts, pieces }) = (self.share, self.domains(&held));
            let piece = share.tensors[tensor].stored / (*pieces).max(1);
            if firsts.len() > 2 && piece < LONG as u64 {
                found.push((piece, class, bytes * copies / (*pieces).min(u64::from(share.ranks)).max(1)));
            }
        }
        found.sort_unstable();
        let mut relayed = 0;
        let few = found.into_iter().take_while(|&(_, _, bytes)| {
            relayed += bytes;
            relayed <= RELAYED
        });
        Ok(few.map(|(_, class, _)| class).collect())
    }
}
