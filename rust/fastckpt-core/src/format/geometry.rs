//! The arithmetic of files: pages, blocks, and the extents of tensors in blocks (`docs/format.md`, 2.2). Pure.

use std::ops::Range;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("fastckpt needs 64-bit Linux");

pub use crate::sys::file::PAGE;

/// Size of a block in bytes: the unit of I/O and of checksums (`docs/format.md`, 2.2). The reason for this size is in
/// `docs/measurements.md`.
pub const BLOCK_SIZE: u64 = 4 << 20;
/// Contiguous data of fewer bytes than this is in one block, or in two neighbouring blocks.
pub const SINGLE: u64 = BLOCK_SIZE / 2;

/// Fewer bytes than this are copied rather than moved without a copy: a separate piece in an operation costs about as
/// much as copying this many bytes.
pub const STRAIGHT: u64 = 64 << 10;

/// The largest multiple of `to` that does not exceed `value`.
#[must_use]
pub const fn down(value: u64, to: u64) -> u64 {
    value - value % to
}

/// The part of `len` bytes at `offset` of a file that can move between the file and memory at `address` without a copy,
/// as file offsets. With direct I/O, these are the whole pages, and memory and file must be congruent. Through the page
/// cache, it is everything. Empty if it is less than [`STRAIGHT`].
#[must_use]
pub fn straight(offset: u64, len: u64, address: usize, direct: bool) -> Range<u64> {
    let range = if !direct {
        offset..offset + len
    } else if offset.wrapping_sub(address as u64).is_multiple_of(PAGE) {
        offset.next_multiple_of(PAGE)..down(offset + len, PAGE)
    } else {
        return offset..offset;
    };
    if range.end.saturating_sub(range.start) < STRAIGHT { offset..offset } else { range }
}

/// The place of a tensor in its shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Index of the tensor in the checkpoint.
    pub tensor: usize,
    /// First byte, counted in the file.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl Placement {
    /// The offset after the last byte.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// The part of one tensor in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Index of the tensor in the checkpoint.
    pub tensor: usize,
    /// The extent's number in the tensor.
    pub index: u64,
    /// First byte, counted in the file.
    pub offset: u64,
    /// First byte, counted in the tensor.
    pub start: u64,
    /// Number of bytes, never zero.
    pub len: u64,
}

impl Extent {
    /// The part of the extent in `range` of the file.
    #[must_use]
    pub fn clip(self, range: Range<u64>) -> Option<Self> {
        let from = self.offset.max(range.start);
        let to = (self.offset + self.len).min(range.end);
        (from < to).then(|| Self {
            offset: from,
            start: self.start + (from - self.offset),
            len: to - from,
            ..self
        })
    }
}

/// Number of blocks in a file of `bytes`.
#[must_use]
pub const fn block_count(bytes: u64, block_size: u64) -> u64 {
    bytes.div_ceil(block_size)
}

/// Length of the block that starts at `offset` of a file of `bytes`. The last block is short.
#[must_use]
pub fn block_len(offset: u64, bytes: u64, block_size: u64) -> u64 {
    bytes.saturating_sub(offset).min(block_size)
}

/// The part of `placement` in the block that starts at `block` and is `block_size` long.
#[must_use]
pub fn extent(placement: &Placement, block: u64, block_size: u64) -> Option<Extent> {
    let from = placement.offset.max(block);
    let to = placement.end().min(block + block_size);
    (from < to).then(|| Extent {
        tensor: placement.tensor,
        index: block / block_size - placement.offset / block_size,
        offset: from,
        start: from - placement.offset,
        len: to - from,
    })
}

/// Number of blocks that a range of a file touches.
#[must_use]
pub const fn extent_count(offset: u64, bytes: u64, block_size: u64) -> u64 {
    if bytes == 0 { 0 } else { (offset + bytes - 1) / block_size - offset / block_size + 1 }
}

/// The extents that `range`, counted in the tensor, touches, in order. Each comes with its part in the range.
pub fn extents(
    placement: Placement,
    range: Range<u64>,
    block_size: u64,
) -> impl Iterator<Item = (Extent, Range<u64>)> {
    let (from, to) = (placement.offset + range.start, placement.offset + range.end);
    let first = down(from, block_size);
    (0..extent_count(from, to - from, block_size)).filter_map(move |index| {
        let extent = extent(&placement, first + index * block_size, block_size)?;
        Some((extent, range.start.max(extent.start)..range.end.min(extent.start + extent.len)))
    })
}

/// The placements that touch `range`. `placements` must be sorted by offset and must not overlap.
#[must_use]
pub fn touching(placements: &[Placement], range: Range<u64>) -> &[Placement] {
    let first = placements.partition_point(|p| p.end() <= range.start);
    let last = placements.partition_point(|p| p.offset < range.end);
    placements.get(first..last).unwrap_or(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_keeps_multiples_and_moves_the_rest() {
        assert_eq!([0, 4096, 4097].map(|value| down(value, PAGE)), [0, 4096, 4096]);
    }

    #[test]
    fn the_last_block_of_a_file_is_short() {
        for (bytes, count, last) in [(1, 1, 1), (4096, 1, 4096), (4097, 2, 1), (12_000, 3, 3808)] {
            assert_eq!(block_count(bytes, PAGE), count);
            assert_eq!(block_len((count - 1) * PAGE, bytes, PAGE), last);
        }
        assert_eq!((block_count(0, PAGE), block_len(0, 0, PAGE)), (0, 0));
    }

    #[test]
    fn a_range_is_cut_at_blocks() {
        let placement = Placement { tensor: 7, offset: 4096 + 64, bytes: 10_000 };
        let cut = |range: Range<u64>| {
            let found = extents(placement, range, PAGE);
            found.map(|(extent, part)| (extent.index, part, extent.len)).collect::<Vec<_>>()
        };
        assert_eq!(cut(0..10_000), [(0, 0..4032, 4032), (1, 4032..8128, 4096), (2, 8128..10_000, 1872)]);
        assert_eq!(cut(4031..8129), [(0, 4031..4032, 4032), (1, 4032..8128, 4096), (2, 8128..8129, 1872)]);
        assert_eq!(cut(5000..5001), [(1, 5000..5001, 4096)]);
        assert_eq!(cut(4032..4032), []);
        let none = Placement { bytes: 0, ..placement };
        assert_eq!(extents(none, 0..0, PAGE).count(), 0);
    }

    #[test]
    fn an_extent_is_clipped_to_a_range_of_the_file() {
        let extent = Extent { tensor: 7, index: 2, offset: 8192, start: 4032, len: 4096 };
        let clipped = |range| extent.clip(range).map(|part| (part.offset, part.start, part.len, part.index));
        assert_eq!(clipped(0..u64::MAX), Some((8192, 4032, 4096, 2)));
        assert_eq!(clipped(8292..8293), Some((8292, 4132, 1, 2)));
        assert_eq!((clipped(0..8192), clipped(12_288..12_289), clipped(9000..9000)), (None, None, None));
    }

    #[test]
    fn whole_pages_that_lie_alike_move_straight() {
        let len = 1 << 20;
        assert_eq!(straight(4096 + 64, len, 64, true), 8192..4096 + len);
        assert_eq!(straight(8192, len, 4096, true), 8192..8192 + len);
        assert!(straight(4096 + 64, len, 16, true).is_empty());
        assert_eq!(straight(4096 + 64, len, 16, false), 4160..4160 + len);
        assert_eq!(straight(64, STRAIGHT + 4032, 64, true), 4096..4096 + STRAIGHT);
        assert!(straight(64, STRAIGHT + 4031, 64, true).is_empty());
        assert!(straight(0, STRAIGHT - 1, 0, false).is_empty());
    }
}
