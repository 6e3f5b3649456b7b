//! The bytes that one rank reads, and the bytes that it receives from other readers. Pure.

use std::ops::Range;

use super::duties::{At, Own, Work, inside};
use super::held::Held;
use super::messages::Item;
use super::runs::{Owners, Relays, Run};
use crate::error::Result;

impl Work<'_> {
    /// Adds the ranges of a file that this rank reads, and the items that it receives of the rest. A member of a team
    /// also reads for the other members, or even only for them.
    pub(super) fn extents(&mut self, shard: usize, owners: &Owners) -> Result<()> {
        let held = self.held(shard)?;
        let apart = self.share.apart && self.share.team_size()? == 1;
        let is_apart = |tensor: &Held<'_>, at| apart && tensor.is_apart(&tensor.extent(at));
        for tensor in &held {
            let (own, relays) = (self.own(tensor), self.relays_of(tensor, owners));
            for interval in self.near(tensor, &own, relays) {
                for (run, range) in owners.within(shard, tensor.interval(interval)) {
                    for stretch in tensor.cut(interval, range, false) {
                        if is_apart(tensor, stretch.start) {
                            self.read_apart(tensor, interval, &own, &stretch);
                        } else if run.rank != self.rank {
                            let at = At { held: tensor, stretch: &stretch, run, relays };
                            self.receive(&at, interval, &own);
                        }
                    }
                }
            }
        }
        let rank = self.rank;
        for run in owners.of(shard).iter().filter(|run| run.rank == rank) {
            for (tensor, Range { start: mut at, end }) in inside(&held, run) {
                let relays = self.relays_of(tensor, owners);
                while at < end {
                    let extent = tensor.extent(at);
                    at = extent.end;
                    if !is_apart(tensor, extent.start) {
                        self.read(tensor, &extent, run, relays);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds this rank's part of an extent that several ranks read in parts.
    fn read_apart(&mut self, held: &Held<'_>, interval: usize, own: &Own, stretch: &Range<u64>) {
        for &(_, tile, _) in &own.tiles[&held.cover.section(interval)] {
            if let Some(item) = self.item(held, stretch, tile, self.rank) {
                self.range(held.shard, stretch.start, stretch.end);
                self.apart.push(item);
            }
        }
    }

    /// Adds the parts of a stretch that this rank wants or relays, and that another rank reads.
    fn receive(&mut self, at: &At<'_, '_>, interval: usize, own: &Own) {
        let section = at.held.cover.section(interval);
        let of_team = at.relays == Some(Relays::Team) && self.relay(at, self.rank, 0) == Some(self.rank);
        if of_team {
            at.held.cover.cells(section).flatten().for_each(|&tile| self.relayed(at, tile));
            return;
        }
        for &(_, tile, _) in own.tiles.get(&section).into_iter().flatten() {
            let relay = self.relay(at, self.rank, tile);
            if relay == Some(self.rank) {
                self.relayed(at, tile);
            } else if let Some(item) = self.item(at.held, at.stretch, tile, self.rank) {
                self.hand(at, relay, item);
            }
        }
    }

    /// Adds the bytes of a tile that this rank receives for the ranks to which it relays them, and perhaps for itself.
    fn relayed(&mut self, at: &At<'_, '_>, tile: u32) {
        let (mut first, mut own, mut relayed) = (None, false, Vec::new());
        for &peer in at.held.ranks(tile) {
            if self.relay(at, peer, tile) != Some(self.rank) {
                continue;
            }
            first.get_or_insert(peer);
            own |= peer == self.rank;
            if peer != self.rank
                && let Some(item) = self.item(at.held, at.stretch, tile, peer)
            {
                relayed.push(self.pass(at, peer, item));
            }
        }
        let Some(first) = first else { return };
        if let Some(item) = self.item(at.held, at.stretch, tile, if own { self.rank } else { first }) {
            self.hand(at, None, Item { own, relayed, ..item });
        }
    }

    /// Adds an extent that this rank reads as part of a run, unless no rank wants any byte of it.
    fn read(&mut self, held: &Held<'_>, extent: &Range<u64>, run: &Run, relays: Option<Relays>) {
        let mut wanted = false;
        for interval in held.at(extent.start)..=held.at(extent.end - 1) {
            let lines = held.interval(interval);
            let stretch = extent.start.max(lines.start)..extent.end.min(lines.end);
            let at = At { held, stretch: &stretch, run, relays };
            for &tile in held.cover.cells(held.cover.section(interval)).flatten() {
                wanted |= self.serve(&at, tile);
            }
        }
        if wanted {
            self.range(held.shard, extent.start, extent.end);
        }
    }

    /// Adds the bytes of a tile that ranks want of a stretch that this rank reads: once for all ranks of one relay.
    fn serve(&mut self, at: &At<'_, '_>, tile: u32) -> bool {
        let (ranks, mut served) = (at.held.ranks(tile), Vec::new());
        let mut wanted = false;
        for &peer in ranks {
            let relay = self.relay(at, peer, tile);
            if relay.is_some_and(|relay| served.contains(&relay)) {
                continue;
            }
            served.extend(relay);
            // The relay's own part, if the relay wants the tile.
            let whose = relay.filter(|relay| ranks.binary_search(relay).is_ok()).unwrap_or(peer);
            let Some(item) = self.item(at.held, at.stretch, tile, whose) else { continue };
            wanted = true;
            if peer == self.rank {
                self.keep(at.stretch.start, item);
            } else {
                self.deal(at, relay.unwrap_or(peer), item);
            }
        }
        wanted
    }
}
