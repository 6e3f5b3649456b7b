//! CRC-64/NVME (`docs/format.md`, 3.3): of a slice, of a copy in the same pass, and combined.

use crc_fast::CrcAlgorithm::Crc64Nvme;
use crc_fast::Digest;

/// Bytes copied and summed at a time: small enough to stay in the second-level cache between the two.
const PASS: usize = 128 << 10;

/// The CRC of `bytes`.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// The CRC of `first` followed by `second_len` bytes whose CRC is `second`.
#[must_use]
pub fn combine(first: u64, second: u64, second_len: u64) -> u64 {
    // The crate computes a shift by a power of x: for nothing it would have nothing to shift.
    if second_len == 0 { first } else { crc_fast::checksum_combine(Crc64Nvme, first, second, second_len) }
}

/// Which side of a copy is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// What is copied: on the way out, so that a bad copy is noticed later.
    Source,
    /// What arrived: on the way in, so that a bad copy is noticed now.
    Copy,
}

/// Copies `from` to `to` and returns the CRC of one side, each part summed while it is in cache.
///
/// # Panics
/// If the lengths differ.
pub fn copy(to: &mut [u8], from: &[u8], side: Side) -> u64 {
    assert_eq!(to.len(), from.len(), "a copy has two sides of one length");
    if from.len() <= PASS {
        to.copy_from_slice(from);
        return of(if side == Side::Source { from } else { to });
    }
    let mut digest = Digest::new(Crc64Nvme);
    for (to, from) in to.chunks_mut(PASS).zip(from.chunks(PASS)) {
        to.copy_from_slice(from);
        digest.update(if side == Side::Source { from } else { to });
    }
    digest.finalize()
}

/// Sixteen lower-case hexadecimal digits.
#[must_use]
pub fn to_hex(crc: u64) -> String {
    format!("{crc:016x}")
}

/// The CRC that sixteen lower-case hexadecimal digits stand for.
#[must_use]
pub fn from_hex(digits: &[u8]) -> Option<u64> {
    let lower = digits.iter().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'));
    let text = std::str::from_utf8(digits).ok()?;
    (lower && digits.len() == 16).then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_value_of_the_catalogue() {
        assert_eq!(of(b"123456789"), 0xAE8B_1486_0A79_9888);
    }

    #[test]
    fn copying_and_combining_agree_with_one_pass() {
        let bytes: Vec<u8> = (0..1_000_003u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut copied = vec![0; bytes.len()];
        assert_eq!(copy(&mut copied, &bytes, Side::Source), of(&bytes));
        assert_eq!(copy(&mut copied, &bytes, Side::Copy), of(&bytes));
        assert_eq!(copied, bytes);
        for split in [0, 1, 4096, PASS, bytes.len() - 1, bytes.len()] {
            let (a, b) = bytes.split_at(split);
            assert_eq!(combine(of(a), of(b), b.len() as u64), of(&bytes), "split at {split}");
        }
    }

    #[test]
    fn hexadecimal_is_exact() {
        assert_eq!(from_hex(to_hex(0xAB).as_bytes()), Some(0xAB));
        for bad in ["", "ab", "00000000000000AB", "+0000000000000ab", "00000000000000ab0"] {
            assert_eq!(from_hex(bad.as_bytes()), None, "{bad}");
        }
    }
}
