//! CRC-64/NVME (`docs/format.md`, 3.3): of a slice, of a copy in the same pass, and combined.

use crc_fast::CrcAlgorithm::Crc64Nvme;
use crc_fast::Digest;

/// Bytes copied and summed at a time: few enough to stay in the second-level cache between the two.
const PASS: usize = 128 << 10;

/// The CRC of `bytes`.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// The polynomial of CRC-64/NVME. As in a CRC, the highest bit is the coefficient of x^0.
const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;

/// The factors by which 1, 2, 4, 8, ... following bytes multiply a CRC: x to the power of 8, 16, 32, 64, ...
const FOLLOWING: [u64; 64] = {
    let mut all = [1 << (63 - 8); 64];
    let mut index = 1;
    while index < all.len() {
        all[index] = multiply(all[index - 1], all[index - 1]);
        index += 1;
    }
    all
};

/// The product of two polynomials over GF(2), modulo `POLYNOMIAL`.
const fn multiply(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    let mut power = 0;
    while power < 64 {
        product ^= b & (a >> (63 - power) & 1).wrapping_neg();
        b = b >> 1 ^ POLYNOMIAL & (b & 1).wrapping_neg(); // times x
        power += 1;
    }
    product
}

/// The CRC of `first` followed by `second_len` bytes whose CRC is `second`.
///
/// The crate that computes CRCs can do this too, by squaring matrices, in tens of microseconds per call. With several
/// calls per block, that was a fifth of a save's processor time (`cargo bench -p fastckpt-core combine`).
#[must_use]
pub fn combine(first: u64, second: u64, second_len: u64) -> u64 {
    let bits = (0..64).filter(|bit| second_len >> bit & 1 == 1);
    bits.fold(first, |crc, bit| multiply(crc, FOLLOWING[bit])) ^ second
}

/// The CRC of data with the CRC `first`, followed by `second`.
#[must_use]
pub fn append(first: u64, second: &[u8]) -> u64 {
    combine(first, of(second), second.len() as u64)
}

/// Copies `from` to `to` and returns the CRC of the copy.
///
/// # Panics
/// If the lengths differ.
pub fn copy(to: &mut [u8], from: &[u8]) -> u64 {
    assert_eq!(to.len(), from.len(), "a copy has two sides of one length");
    fill(to, |part, at| part.copy_from_slice(&from[at..at + part.len()]))
}

/// Lets `pull` fill `to` part by part, given the start of each part. Returns the CRC of `to`. Each part is summed while
/// it is in cache.
///
/// The source is read once. If it changes meanwhile, that decides which bytes are written, but not whether their sum is
/// right.
fn fill(to: &mut [u8], mut pull: impl FnMut(&mut [u8], usize)) -> u64 {
    if to.len() <= PASS {
        pull(to, 0);
        return of(to);
    }
    let mut digest = Digest::new(Crc64Nvme);
    for (index, part) in to.chunks_mut(PASS).enumerate() {
        pull(part, index * PASS);
        digest.update(part);
    }
    digest.finalize()
}

/// The finding that bytes with the CRC `found` should have the CRC `wanted`.
pub(crate) fn differs(found: u64, wanted: u64) -> String {
    format!("checksum is {}, written was {}", to_hex(found), to_hex(wanted))
}

/// Digits of a CRC in the manifest.
pub const HEX: usize = 16;

/// Formats a CRC as sixteen lower-case hexadecimal digits.
#[must_use]
pub fn to_hex(crc: u64) -> String {
    format!("{crc:016x}")
}

/// The CRC given by sixteen lower-case hexadecimal digits.
#[must_use]
pub fn from_hex(digits: &[u8]) -> Option<u64> {
    let lower = digits.iter().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'));
    let text = std::str::from_utf8(digits).ok()?;
    (lower && digits.len() == HEX).then(|| u64::from_str_radix(text, 16).ok()).flatten()
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
        assert_eq!(copy(&mut copied, &bytes), of(&bytes));
        assert_eq!(copied, bytes);
        for split in [0, 1, 4096, PASS, bytes.len() - 1, bytes.len()] {
            let (a, b) = bytes.split_at(split);
            assert_eq!(combine(of(a), of(b), b.len() as u64), of(&bytes), "split at {split}");
        }
    }

    #[test]
    fn the_sum_is_that_of_the_copy_whatever_becomes_of_the_source() {
        for len in [1, PASS, PASS + 1, 3 * PASS + 7] {
            let (mut source, mut to) = (vec![1u8; len], vec![0; len]);
            let sum = fill(&mut to, |part, at| {
                part.copy_from_slice(&source[at..at + part.len()]);
                source.fill(2 + (at / PASS) as u8); // as another thread may, once it is copied
            });
            assert_eq!(sum, of(&to));
            assert_ne!(sum, of(&source));
            assert_eq!((to[0], to[len - 1]), (1, len.div_ceil(PASS) as u8));
        }
    }

    #[test]
    fn lengths_beyond_memory_combine_as_the_crate_says() {
        for len in [1, 4 << 20, (1 << 40) + 12_345, u64::MAX / 8] {
            let (first, second) = (of(b"first"), of(&len.to_le_bytes()));
            assert_eq!(
                combine(first, second, len),
                crc_fast::checksum_combine(Crc64Nvme, first, second, len)
            );
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
