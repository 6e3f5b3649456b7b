//! The boxes that ranks have of a tensor: where each lies in the tensor and in memory. Pure.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::bytes::{Shape, len};
use super::spread::{Bounds, Groups};
use crate::sys::strided::{Axis, Rows};

/// Whose a box is: a group of ranks in one of the tensor's spreads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whose {
    /// Which of the tensor's spreads.
    pub(super) slot: u32,
    /// The group.
    pub(super) group: u32,
}

/// Where a tile lies.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// In the tensor, and in the memory of the part from `base` on.
    pub(super) rows: Arc<Rows>,
    /// Where its first byte lies in the memory of the part.
    pub(super) base: i64,
}

/// Boxes of a tensor, and parts of them. There may be very many, so they lie in few vectors.
#[derive(Debug)]
pub(super) struct Tiles {
    shape: Shape,
    whose: Vec<Whose>,
    /// The ranges of each.
    bounds: Bounds,
    /// Where each range starts in the part, along each dimension.
    at: Vec<u64>,
    /// The size of the part along each dimension.
    sizes: Vec<u64>,
    places: Vec<OnceLock<Place>>,
}

impl Tiles {
    /// All boxes that are not empty, of a tensor that is logically `sizes`.
    pub(super) fn new(shape: Shape, sizes: &[u64], spreads: &[&Groups]) -> Result<Self, String> {
        let (mut whose, mut bounds, mut at, mut parts) = (Vec::new(), Bounds::new(), Vec::new(), Vec::new());
        let rank = shape.sizes.len();
        for (slot, groups) in (0..).zip(spreads) {
            for group in 0..groups.len() as u32 {
                let dims = shape.ranges(sizes, groups, group)?;
                let local: Vec<u64> = dims.iter().map(|ranges| ranges.iter().map(len).sum()).collect();
                let count: usize = dims.iter().map(Vec::len).product();
                let mut index = vec![0; rank];
                for _ in 0..count {
                    whose.push(Whose { slot, group });
                    for (ranges, &index) in dims.iter().zip(&index) {
                        bounds.push(ranges[index].clone());
                        at.push(ranges[..index].iter().map(len).sum::<u64>());
                    }
                    parts.extend(&local);
                    for dim in (0..rank).rev() {
                        index[dim] = (index[dim] + 1) % dims[dim].len();
                        if index[dim] > 0 {
                            break;
                        }
                    }
                }
            }
        }
        let mut places = Vec::new();
        places.resize_with(whose.len(), OnceLock::new);
        Ok(Self { shape, whose, bounds, at, sizes: parts, places })
    }

    /// The tensor's shape.
    pub(super) const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Their number.
    pub(super) fn len(&self) -> u32 {
        self.whose.len() as u32
    }

    /// Whose a tile is.
    pub(super) fn whose(&self, tile: u32) -> Whose {
        self.whose[tile as usize]
    }

    /// The range of a tile along each dimension.
    pub(super) fn bounds(&self, tile: u32) -> &[Range<u64>] {
        &self.bounds[self.span(tile)]
    }

    /// Adds the part of a tile that lies in `deep` along the last dimensions, if it is not there. `known` has those
    /// that were added.
    pub(super) fn cut(&mut self, tile: u32, deep: &Bounds, known: &mut HashMap<(u32, Bounds), u32>) -> u32 {
        let level = self.shape.sizes.len() - deep.len();
        if self.bounds(tile)[level..] == deep[..] {
            return tile;
        }
        let fresh = self.len();
        let found = *known.entry((tile, deep.clone())).or_insert(fresh);
        if found == fresh {
            let span = self.span(tile);
            self.whose.push(self.whose(tile));
            self.bounds.extend_from_within(span.start..span.start + level);
            self.bounds.extend_from_slice(deep);
            self.at.extend_from_within(span.clone());
            self.sizes.extend_from_within(span.clone());
            for (dim, range) in (level..).zip(deep) {
                self.at[fresh as usize * (level + deep.len()) + dim] +=
                    range.start - self.bounds[span.start + dim].start;
            }
            self.places.push(OnceLock::new());
        }
        found
    }

    /// Where a tile lies in memory without gaps.
    pub(super) fn place(&self, tile: u32) -> &Place {
        self.places[tile as usize].get_or_init(|| {
            let strides = self.shape.strides(&self.sizes[self.span(tile)]);
            self.place_in(tile, &strides.into_iter().map(u64::cast_signed).collect::<Vec<_>>())
        })
    }

    /// Where a tile lies in memory, neighbours along each dimension being so many bytes apart.
    pub(super) fn place_in(&self, tile: u32, strides: &[i64]) -> Place {
        let (bounds, at) = (self.bounds(tile), &self.at[self.span(tile)]);
        let from = self.shape.strides(&self.shape.sizes);
        let first = bounds.iter().zip(&from).map(|(range, stride)| range.start * stride).sum();
        let base = at.iter().zip(strides).map(|(&at, stride)| at.cast_signed() * stride).sum();
        let axes = bounds.iter().zip(from).zip(strides);
        let axes = axes.map(|((range, from), &to)| Axis { count: len(range), from, to });
        Place { rows: Arc::new(Rows::new(first, self.shape.item, axes)), base }
    }

    fn span(&self, tile: u32) -> Range<usize> {
        let rank = self.shape.sizes.len();
        tile as usize * rank..(tile as usize + 1) * rank
    }
}
