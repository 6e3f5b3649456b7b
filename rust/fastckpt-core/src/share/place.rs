//! Where tiles lie in the memory of ranks. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::bytes::len;
use super::owners::Held;
use super::spread::Bounds;
use crate::sys::strided::{Axis, Rows};

/// Bytes between neighbours in memory along each dimension, by tensor and part.
pub type Strides = HashMap<(usize, u32), Vec<i64>>;

/// Where a tile lies.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// In the tensor, and in the memory of the part from `base` on.
    pub(super) rows: Arc<Rows>,
    /// Where its first byte lies in the memory of the part.
    pub(super) base: i64,
}

impl Place {
    /// Where a tile lies if neighbours along each dimension of its part are `strides` bytes apart. Without strides,
    /// there are no gaps.
    pub(super) fn new(held: &Held<'_>, tile: u32, strides: Option<&[i64]>) -> Self {
        let (tiles, mut part) = (&held.cover.tiles, Vec::new());
        let (whose, shape) = (tiles.whose(tile), tiles.shape());
        let groups = held.spreads[whose.slot as usize];
        // The cover was made of the same ranges.
        let ranges = shape.ranges(held.sizes, groups, whose.group, &mut part);
        debug_assert!(ranges.is_ok());
        let bounds = tiles.bounds(tile);
        let packed: Vec<i64>;
        let strides = if let Some(strides) = strides {
            strides
        } else {
            let sizes: Vec<u64> = part.iter().map(|ranges| ranges.iter().map(len).sum()).collect();
            packed = shape.strides(&sizes).into_iter().map(u64::cast_signed).collect();
            &packed
        };
        let before = |(ranges, start): (&Bounds, u64)| {
            let lens = ranges.iter().map(|range| start.clamp(range.start, range.end) - range.start);
            lens.sum::<u64>().cast_signed()
        };
        let at = part.iter().zip(bounds.iter().map(|range| range.start)).map(before);
        let base = at.zip(strides).map(|(at, stride)| at * stride).sum();
        let from = shape.strides(&shape.sizes);
        let first = bounds.iter().zip(&from).map(|(range, stride)| range.start * stride).sum();
        let axes = bounds.iter().zip(from).zip(strides);
        let axes = axes.map(|((range, from), &to)| Axis { count: len(range), from, to });
        Self { rows: Arc::new(Rows::new(first, shape.item, axes)), base }
    }
}

/// The places of tiles, as they are found.
#[derive(Debug)]
pub(super) struct Places {
    strides: Strides,
    /// Without gaps, by class and tile.
    packed: HashMap<(usize, u32), Place>,
    /// Those with strides, by tensor, part and tile.
    strided: HashMap<(usize, u32, u32), Place>,
}

impl Places {
    /// Places in memory of this rank, whose parts have `strides` or no gaps, and in memory of others.
    pub(super) fn new(strides: Strides) -> Self {
        Self { strides, packed: HashMap::new(), strided: HashMap::new() }
    }

    /// The place of a tile of a tensor of `class`, which belongs to part `part` of this rank if it is its own.
    pub(super) fn of(
        &mut self,
        class: usize,
        held: &Held<'_>,
        tile: u32,
        (own, part): (bool, u32),
    ) -> &Place {
        // A tensor without dimensions has one element, and nothing lies beside it.
        let strides = self.strides.get(&(held.tensor, part)).filter(|strides| own && !strides.is_empty());
        match strides {
            Some(strides) => self
                .strided
                .entry((held.tensor, part, tile))
                .or_insert_with(|| Place::new(held, tile, Some(strides))),
            None => self.packed.entry((class, tile)).or_insert_with(|| Place::new(held, tile, None)),
        }
    }
}
