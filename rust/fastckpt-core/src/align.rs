//! Alignment arithmetic for direct I/O.

use std::ops::Range;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("fastckpt needs 64-bit Linux");

/// The alignment of address, offset and length that every file system met so far takes on its fast path:
/// ext4 reports 512 and accepts it, but then serialises the writes.
pub const PAGE: u64 = 4096;

/// Less than this is copied rather than moved straight: a stretch of its own in an operation costs about as much as copying
/// so many bytes.
pub const STRAIGHT: u64 = 64 << 10;

/// The largest multiple of `to` that is not above `value`.
#[must_use]
pub const fn down(value: u64, to: u64) -> u64 {
    value - value % to
}

/// The smallest multiple of `to` that is not below `value`.
#[must_use]
pub const fn up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

/// Whether `value` is a multiple of `to`.
#[must_use]
pub const fn is(value: u64, to: u64) -> bool {
    value.is_multiple_of(to)
}

/// The part of `len` bytes at `offset` of a file that can move straight between there and memory at `address`, as file offsets.
/// Past the page cache that is the whole pages of both, which must lie alike; through it, everything.
#[must_use]
pub fn straight(offset: u64, len: u64, address: usize, direct: bool) -> Range<u64> {
    let range = if !direct {
        offset..offset + len
    } else if is(offset.wrapping_sub(address as u64), PAGE) {
        up(offset, PAGE)..down(offset + len, PAGE)
    } else {
        return offset..offset;
    };
    if range.end.saturating_sub(range.start) < STRAIGHT { offset..offset } else { range }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_keeps_multiples_and_moves_the_rest() {
        assert_eq!((down(0, PAGE), up(0, PAGE)), (0, 0));
        assert_eq!((down(4096, PAGE), up(4096, PAGE)), (4096, 4096));
        assert_eq!((down(4097, PAGE), up(4097, PAGE)), (4096, 8192));
        assert!(is(8192, PAGE) && !is(8191, PAGE));
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
