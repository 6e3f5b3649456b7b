//! Which rank writes or reads which range of a file. Pure.
//!
//! The ranks whose pieces of a tensor are neighbours in its file are a team ([`super::teams`]). Files are cut into **grains**, and each grain has one owner: a member of the team in whose domain
//! the grain's deciding byte is. The ranges that a team owns in all files are dealt to its members in order, to each
//! about as many bytes. So a member writes whole domains in a few files, instead of its own short piece of each tensor,
//! and the others send it their parts. A team of one writes its bytes in place.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::held::Held;
use super::runs::{Owners, Purpose, Run};
use super::table::{Deal, Share};
use super::teams::Teams;
use crate::error::Result;
use crate::format::geometry::down;

/// The maximum number of ranks in a team, unless the caller sets its size: each of them sends messages to all others.
const MOST: u32 = 128;
/// In a job of `MANY` ranks or more, no rank should write more files: every writer of a file opens it.
const FILES: u64 = 10;
const MANY: u32 = 2048;
/// A member's share may end earlier or later by this fraction of a rank's mean bytes, so that it ends with a file.
const SPARE: u64 = 32;

/// The runs of teams, while they are found.
struct Finder<'a> {
    share: &'a Share,
    /// The deals of a save, by tensor.
    deals: &'a [Deal],
    load: bool,
    grain: u64,
    teams: Teams<'a>,
    /// For each file, its ranges and the team that owns each range.
    runs: Vec<Vec<(Range<u64>, usize)>>,
}

impl<'a> Finder<'a> {
    /// The byte that decides which rank owns the grain at `start`, or its part in `region` of a file. In a grain of one
    /// page it is the first byte, so that the rank with the start of a part need not send it. In longer grains its
    /// place varies, or else the same ranks would own all of them. The header belongs to the grain after it.
    fn deciding(&self, shard: usize, region: &Range<u64>, start: u64) -> u64 {
        let data = self.share.files[shard].0;
        let range = start.max(region.start)..region.end.min(down(start, self.grain) + self.grain);
        if self.grain == self.share.page {
            return range.start.max(data);
        }
        // The fractional parts of multiples of the golden ratio are spread evenly.
        let fraction = (start / self.grain + shard as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let chosen = (u128::from(fraction) * u128::from(range.end - range.start)) >> 64;
        data.max(range.start + chosen as u64)
    }

    fn held(&self, tensor: usize) -> Result<Held<'a>> {
        Held::new(self.share, tensor, self.deals.get(tensor))
    }

    /// Finds the runs of a file. A load, which often takes some tensors only, cuts it where no rank wants some bytes.
    fn file(&mut self, shard: usize) -> Result<()> {
        let (order, mut runs) = (&self.share.order[shard], Vec::new());
        if self.load {
            let held: Vec<_> = order.iter().map(|&tensor| self.held(tensor)).collect::<Result<_>>()?;
            let whole = |one: &Held<'_>, next: &Held<'_>| {
                one.range.end == next.range.start && one.cover.gap.is_none() && next.cover.gap.is_none()
            };
            for together in held.chunk_by(whole) {
                let region = together[0].range.start..together[together.len() - 1].range.end;
                self.region(shard, region, together[0].clone(), &mut runs)?;
            }
        } else if let Some(&first) = order.first() {
            self.region(shard, 0..self.share.files[shard].1, self.held(first)?, &mut runs)?;
        } else if self.share.files[shard].1 > 0 {
            // The file has only a header.
            runs.push((0..self.share.files[shard].1, self.teams.of(vec![0])));
        }
        self.runs.push(runs);
        Ok(())
    }

    /// Finds the runs of a region of a file, whose first tensor is `held`.
    fn region(
        &mut self,
        shard: usize,
        region: Range<u64>,
        mut held: Held<'a>,
        runs: &mut Vec<(Range<u64>, usize)>,
    ) -> Result<()> {
        let grain = self.grain;
        let mut at = region.start;
        while at < region.end {
            let byte = self.deciding(shard, &region, at);
            if byte >= held.range.end {
                let end =
                    |&tensor: &usize| self.share.in_file(tensor, &(0..self.share.tensors[tensor].stored)).end;
                let order = &self.share.order[shard];
                // A tensor ends after this byte: no bytes follow the last tensor of a file.
                held = self.held(order[order.partition_point(|tensor| end(tensor) <= byte)])?;
            }
            let (domain, team) = self.teams.domain(&held, byte);
            let next = down(at, grain) + grain;
            if self.teams.ranks(team).is_empty() {
                // In a load, another team may want another part of the extent.
                let end = next.min(region.end);
                runs.extend(self.wanted(&held, at..end).map(|team| (at..end, team)));
                at = next;
                continue;
            }
            // The domain ends in the last grain, whose deciding byte may be outside. Those of earlier ones are inside.
            let last = down(domain.end, grain);
            let end = if last < next {
                next
            } else if last < region.end && self.deciding(shard, &region, last) < domain.end {
                last + grain
            } else {
                last
            };
            runs.push((at..end.min(region.end), team));
            at = end;
        }
        Ok(())
    }

    /// The first team that wants bytes of an extent of a tensor.
    fn wanted(&mut self, held: &Held<'_>, mut extent: Range<u64>) -> Option<usize> {
        while extent.start < extent.end {
            let (domain, team) = self.teams.domain(held, extent.start);
            if !self.teams.ranks(team).is_empty() {
                return Some(team);
            }
            extent.start = domain.end;
        }
        None
    }

    /// Where each member's share ends in the ranges that the team owns of all files. Shares have about the same number
    /// of bytes. They are whole files, the same number for each member, if their sizes are within [`SPARE`] of that.
    fn shares(&self) -> Vec<Vec<u64>> {
        let mut totals = vec![0; self.teams.len()];
        // For each team, its total at the end of each file of which it owns a range.
        let mut files = vec![Vec::<u64>::new(); totals.len()];
        for runs in &self.runs {
            for (range, team) in runs {
                totals[*team] += range.end - range.start;
            }
            for (_, team) in runs {
                if files[*team].last() != Some(&totals[*team]) {
                    files[*team].push(totals[*team]);
                }
            }
        }
        let mean = totals.iter().sum::<u64>() / u64::from(self.share.ranks);
        let of = |(team, total): (usize, u64)| {
            let (members, files) = (self.teams.ranks(team).len(), &files[team]);
            let share = total.div_ceil(members.max(1) as u64);
            let room = (mean / SPARE).min(share / 2);
            let end = |member| {
                let end = total.min(share * member as u64);
                let first = files.partition_point(|file| file + room < end);
                let after = files.partition_point(|&file| file <= end + room);
                let even: usize = (files.len() * member + members / 2) / members;
                if first < after { files[even.clamp(first + 1, after) - 1] } else { end }
            };
            (1..=members).map(end).collect()
        };
        totals.iter().copied().enumerate().map(of).collect()
    }

    /// Deals the runs of each team to its members.
    fn deal(&self) -> Vec<Vec<Run>> {
        let (block_size, shares) = (self.share.block_size, self.shares());
        // For each team, the bytes dealt so far, and the member whose turn it is.
        let mut dealt = vec![(0, 0); shares.len()];
        let mut units: HashMap<u32, u64> = HashMap::new();
        let files = self.runs.iter().map(|runs| {
            let mut file: Vec<Run> = Vec::with_capacity(runs.len());
            for (range, team) in runs {
                let (dealt, member) = &mut dealt[*team];
                let mut start = range.start;
                while start < range.end {
                    let full = start + shares[*team][*member].saturating_sub(*dealt);
                    // Within a range, the boundary between grains that is nearest to the end of the share.
                    let border = down(full + self.grain / 2, self.grain).clamp(start, range.end);
                    let end = if full < range.end { border } else { range.end };
                    let (rank, seat) = (self.teams.ranks(*team)[*member], *member as u32);
                    match file.last_mut() {
                        _ if end == start => {}
                        Some(before) if before.rank == rank && before.end == start => before.end = end,
                        _ => file.push(Run { start, end, rank, seat, unit: 0 }),
                    }
                    *dealt += end - start;
                    *member += usize::from(end < range.end);
                    start = end;
                }
            }
            for run in &mut file {
                let next = units.entry(run.rank).or_insert(0);
                run.unit = *next;
                *next += (run.end - 1) / block_size - run.start / block_size + 1;
            }
            file
        });
        files.collect()
    }
}

impl Share {
    /// The owner of each range of the files.
    pub(super) fn owners(&self, purpose: Purpose) -> Result<&Owners> {
        let made = &self.owners[purpose as usize];
        if let Some(made) = made.get() {
            return Ok(made);
        }
        let (load, least) = (purpose == Purpose::Load, self.team_size()?);
        let grain = match purpose {
            Purpose::Save => self.grain,
            // One rank reads an extent, and a team reads as many extents as a grain has.
            Purpose::Load if least == 1 => self.block_size,
            Purpose::Load => self.grain.next_multiple_of(self.block_size),
        };
        let mut finder = Finder {
            share: self,
            deals: if load { &[] } else { self.deals()? },
            load,
            grain,
            teams: Teams::new(self, load)?,
            runs: Vec::with_capacity(self.files.len()),
        };
        (0..self.files.len()).try_for_each(|shard| finder.file(shard))?;
        let (relays, window) = finder.teams.relays(grain)?;
        Ok(made.get_or_init(|| Owners::new(finder.deal(), relays, window)))
    }

    /// The number of ranks of a team, if a tensor has that many: the requested number, or the lowest power of two whose
    /// pieces of a typical tensor make up a grain. A tensor is typical if half of the bytes are in longer pieces. A job
    /// of many ranks has larger teams if each rank would write too many files otherwise.
    pub fn team_size(&self) -> Result<u32> {
        if let Some(&size) = self.team_size.get() {
            return Ok(size);
        }
        let mut wanted = if self.team > 0 { self.team } else { self.typical()? };
        while self.team == 0 && self.ranks >= MANY && wanted < MOST && self.files_of_rank(wanted)? > FILES {
            wanted *= 2;
        }
        Ok(*self.team_size.get_or_init(|| wanted.min(self.ranks)))
    }

    /// About how many files a rank writes on average in teams of this size. A rank is in several teams if tensors are
    /// cut in different ways. Each team deals its files to its members, one run after another.
    fn files_of_rank(&self, team: u32) -> Result<u64> {
        let mut files: HashMap<usize, HashSet<usize>> = HashMap::new();
        for (shard, order) in self.order.iter().enumerate() {
            for &tensor in order {
                files.entry(self.class[tensor]).or_default().insert(shard);
            }
        }
        let mut teams = Teams::of_size(self, team, false);
        let mut of_team: HashMap<usize, (HashSet<usize>, usize)> = HashMap::new();
        for tensor in self.with_bytes() {
            let Some(files) = files.remove(&self.class[tensor]) else { continue };
            let held = Held::new(self, tensor, None)?;
            let copies = held.cover.copies().max(1) as usize;
            let mut at = held.range.start;
            while at < held.range.end {
                let (domain, team) = teams.domain(&held, at);
                let of = of_team.entry(team).or_insert_with(|| (HashSet::new(), copies));
                of.0.extend(&files);
                of.1 = of.1.min(copies);
                at = domain.end;
            }
        }
        let (mut opens, mut ranks) = (0, HashSet::<u32>::new());
        for (team, (files, copies)) in of_team {
            opens += files.len() / copies + teams.ranks(team).len();
            ranks.extend(teams.ranks(team));
        }
        Ok((opens / ranks.len().max(1)) as u64)
    }

    fn typical(&self) -> Result<u32> {
        let mut tensors: HashMap<usize, (usize, u64)> = HashMap::new();
        for tensor in self.order.iter().flatten() {
            tensors.entry(self.class[*tensor]).or_insert((*tensor, 0)).1 += 1;
        }
        let mut pieces = Vec::new();
        for (tensor, count) in tensors.into_values() {
            let held = Held::new(self, tensor, None)?;
            for interval in 0..held.cover.len() {
                let (lines, ranks) = (held.cover.bytes(interval), held.givers(interval, 0).len() as u64);
                let bytes = lines.end - lines.start;
                // Bytes of a load that no rank wants do not count as a piece.
                pieces.extend(bytes.checked_div(ranks).map(|piece| (piece, bytes * count)));
            }
        }
        pieces.sort_unstable();
        let half = pieces.iter().map(|piece| piece.1).sum::<u64>() / 2;
        let mut below = 0;
        let typical = pieces.iter().find(|piece| {
            below += piece.1;
            below >= half
        });
        let ranks = typical.map_or(1, |&(piece, _)| self.grain.div_ceil(piece.max(1)));
        Ok((ranks.next_power_of_two().min(u64::from(MOST))) as u32)
    }
}
