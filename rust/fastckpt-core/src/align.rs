//! Alignment arithmetic for direct I/O.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("fastckpt needs 64-bit Linux");

/// The alignment of address, offset and length that every file system met so far takes on its fast path:
/// ext4 reports 512 and accepts it, but then serialises the writes.
pub const PAGE: u64 = 4096;

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
}
