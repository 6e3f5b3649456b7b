//! The boxes that ranks have of a tensor, and their positions. Pure.

use std::collections::HashMap;
use std::ops::Range;

use super::bytes::Shape;
use super::spread::{Bounds, Groups};

/// The owners of a box: a group of ranks in one of the tensor's spreads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whose {
    /// The index of the spread among the tensor's spreads.
    pub(super) slot: u32,
    /// The group.
    pub(super) group: u32,
}

/// Boxes of a tensor, and parts of boxes. There may be very many, so they are stored in few vectors.
#[derive(Debug)]
pub(super) struct Tiles {
    shape: Shape,
    whose: Vec<Whose>,
    /// The ranges of each tile along all dimensions.
    bounds: Bounds,
    /// The number of the first box of each group, spread after spread, and then the number of boxes.
    firsts: Vec<u32>,
    /// The place of each spread in `firsts`.
    slots: Vec<u32>,
}

impl Tiles {
    /// All non-empty boxes of a tensor with the logical shape `sizes`.
    pub(super) fn new(shape: Shape, sizes: &[u64], spreads: &[&Groups]) -> Result<Self, String> {
        let rank = shape.sizes.len();
        let count = spreads.iter().map(|groups| groups.len()).sum::<usize>();
        let mut tiles = Self {
            shape,
            whose: Vec::with_capacity(count),
            bounds: Vec::with_capacity(count * rank),
            firsts: Vec::with_capacity(count + 1),
            slots: Vec::with_capacity(spreads.len()),
        };
        let mut dims = Vec::new();
        for (slot, groups) in (0..).zip(spreads) {
            tiles.slots.push(tiles.firsts.len() as u32);
            for group in 0..groups.len() as u32 {
                tiles.firsts.push(tiles.len());
                tiles.shape.ranges(sizes, groups, group, &mut dims)?;
                let count: usize = dims.iter().map(Vec::len).product();
                for box_ in 0..count {
                    tiles.whose.push(Whose { slot, group });
                    let mut inner = count;
                    for ranges in &dims {
                        inner /= ranges.len();
                        tiles.bounds.push(ranges[box_ / inner % ranges.len()].clone());
                    }
                }
            }
        }
        tiles.firsts.push(tiles.len());
        Ok(tiles)
    }

    /// The tensor's shape.
    pub(super) const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of boxes.
    pub(super) fn len(&self) -> u32 {
        self.whose.len() as u32
    }

    /// The boxes of a group.
    pub(super) fn of(&self, whose: Whose) -> Range<u32> {
        let at = (self.slots[whose.slot as usize] + whose.group) as usize;
        self.firsts[at]..self.firsts[at + 1]
    }

    /// The owner of a tile.
    pub(super) fn whose(&self, tile: u32) -> Whose {
        self.whose[tile as usize]
    }

    /// The range of a tile along each dimension.
    pub(super) fn bounds(&self, tile: u32) -> &[Range<u64>] {
        let rank = self.shape.sizes.len();
        &self.bounds[tile as usize * rank..][..rank]
    }

    /// Adds the part of a tile that is `deep` along the last dimensions, unless it exists. `known` has the parts that
    /// were added.
    pub(super) fn cut(&mut self, tile: u32, deep: &Bounds, known: &mut HashMap<(u32, Bounds), u32>) -> u32 {
        let rank = self.shape.sizes.len();
        let level = rank - deep.len();
        if self.bounds(tile)[level..] == deep[..] {
            return tile;
        }
        let fresh = self.len();
        let found = *known.entry((tile, deep.clone())).or_insert(fresh);
        if found == fresh {
            self.whose.push(self.whose(tile));
            let first = tile as usize * rank;
            self.bounds.extend_from_within(first..first + level);
            self.bounds.extend_from_slice(deep);
        }
        found
    }
}
