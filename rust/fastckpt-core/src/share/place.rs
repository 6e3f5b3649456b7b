//! The positions of tiles in the memory of ranks. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::bytes::len;
use super::held::Held;
use super::spread::Bounds;
use crate::sys::strided::{Axis, Rows};

/// The position of a tile.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// The tile in the tensor, and in the memory of the part from `base` on.
    pub(super) rows: Arc<Rows>,
    /// The position of the tile's first byte in the memory of the part.
    pub(super) base: i64,
}

impl Place {
    fn new(held: &Held<'_>, tile: u32) -> Self {
        let (tiles, mut part) = (&held.cover.tiles, Vec::new());
        let (whose, shape) = (tiles.whose(tile), tiles.shape());
        let groups = held.spreads[whose.slot as usize];
        // This cannot fail: the cover was made from the same ranges.
        let ranges = shape.ranges(held.sizes, groups, whose.group, &mut part);
        debug_assert!(ranges.is_ok());
        let bounds = tiles.bounds(tile);
        let sizes: Vec<u64> = part.iter().map(|ranges| ranges.iter().map(len).sum()).collect();
        let strides: Vec<i64> = shape.strides(&sizes).into_iter().map(u64::cast_signed).collect();
        let before = |(ranges, start): (&Bounds, u64)| {
            let lens = ranges.iter().map(|range| start.clamp(range.start, range.end) - range.start);
            lens.sum::<u64>().cast_signed()
        };
        let at = part.iter().zip(bounds.iter().map(|range| range.start)).map(before);
        let base = at.zip(&strides).map(|(at, stride)| at * stride).sum();
        let from = shape.strides(&shape.sizes);
        let first = bounds.iter().zip(&from).map(|(range, stride)| range.start * stride).sum();
        let axes = bounds.iter().zip(from).zip(strides);
        let axes = axes.map(|((range, from), to)| Axis { count: len(range), from, to });
        Self { rows: Arc::new(Rows::new(first, shape.item, axes)), base }
    }
}

/// The places of tiles, by class and tile. Each is computed when it is first needed.
#[derive(Debug, Default)]
pub(super) struct Places(HashMap<(usize, u32), Place>);

impl Places {
    /// The place of a tile of a tensor of `class`.
    pub(super) fn of(&mut self, class: usize, held: &Held<'_>, tile: u32) -> &Place {
        self.0.entry((class, tile)).or_insert_with(|| Place::new(held, tile))
    }
}
