//! Checksums (`docs/format.md`, 3.3): of a slice, of a copy in the same pass, and of combined parts. CRC-64/NVME
//! detects damage. Together with CRC-64/XZ it decides whether a tensor has changed.

use std::ops::BitXor;

use crc_fast::CrcAlgorithm::{self, Crc64Nvme, Crc64Xz};
use crc_fast::Digest;

use crate::sys::fold::{Fold, Keys, STEP};
use crate::sys::memory::Bytes;

/// Bytes copied and summed at a time: few enough to stay in the second-level cache between the copy and the sum.
pub const PASS: usize = 128 << 10;

/// For fewer bytes, two separate sums are faster than folds.
const FEW: usize = 16 << 10;

/// The CRC of `bytes`.
#[must_use]
pub fn of(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// The CRC of memory in place.
#[must_use]
pub fn of_memory(memory: Bytes<'_>) -> u64 {
    let mut digest = Digest::new(Crc64Nvme);
    memory.sum(&mut digest);
    digest.finalize()
}

/// A CRC with a polynomial of degree 64, and the factors by which 1, 2, 4, 8, ... further bytes multiply it: x to the
/// power of 8, 16, 32, 64, ... As usual for a CRC, the highest bit is the coefficient of x^0.
struct Field {
    algorithm: CrcAlgorithm,
    polynomial: u64,
    following: [u64; 64],
    keys: Keys,
}

impl Field {
    const fn new(algorithm: CrcAlgorithm, polynomial: u64) -> Self {
        let mut following = [1 << (63 - 8); 64];
        let mut index = 1;
        while index < following.len() {
            following[index] = multiply(polynomial, following[index - 1], following[index - 1]);
            index += 1;
        }
        let distance = 8 * STEP as u32;
        let keys = [power(polynomial, distance + 63), power(polynomial, distance - 1)];
        Self { algorithm, polynomial, following, keys }
    }

    /// The CRC of `first` followed by `second_len` bytes whose CRC is `second`.
    fn combine(&self, first: u64, second: u64, second_len: u64) -> u64 {
        let bits = (0..64).filter(|bit| second_len >> bit & 1 == 1);
        bits.fold(first, |crc, bit| multiply(self.polynomial, crc, self.following[bit])) ^ second
    }
}

/// The product of two polynomials over GF(2), modulo `polynomial`.
const fn multiply(polynomial: u64, a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    let mut power = 0;
    while power < 64 {
        product ^= b & (a >> (63 - power) & 1).wrapping_neg();
        b = times_x(polynomial, b);
        power += 1;
    }
    product
}

const fn times_x(polynomial: u64, a: u64) -> u64 {
    a >> 1 ^ polynomial & (a & 1).wrapping_neg()
}

/// x to the power of `exponent`, modulo `polynomial`.
const fn power(polynomial: u64, exponent: u32) -> u64 {
    let (mut power, mut at) = (1 << 63, 0);
    while at < exponent {
        power = times_x(polynomial, power);
        at += 1;
    }
    power
}

static NVME: Field = Field::new(Crc64Nvme, 0x9A6C_9329_AC4B_C9B5);
static XZ: Field = Field::new(Crc64Xz, 0xC96C_5795_D787_0F42);

/// The CRC of `first` followed by `second_len` bytes whose CRC is `second`.
///
/// The crate that computes CRCs can do this, too, by squaring matrices, in tens of microseconds per call. With several
/// calls per block, that was a fifth of a save's processor time (`cargo bench -p fastckpt-core combine`).
#[must_use]
pub fn combine(first: u64, second: u64, second_len: u64) -> u64 {
    NVME.combine(first, second, second_len)
}

/// The CRC-64/XZ of data with the CRC-64/XZ `first`, followed by `second_len` bytes with the CRC-64/XZ `second`.
#[must_use]
pub fn combine_xz(first: u64, second: u64, second_len: u64) -> u64 {
    XZ.combine(first, second, second_len)
}

/// The CRC of data with the CRC `first`, followed by `second`.
#[must_use]
pub fn append(first: u64, second: &[u8]) -> u64 {
    combine(first, of(second), second.len() as u64)
}

/// CRC-64/NVME and CRC-64/XZ of the same bytes. Their polynomials have no common factor, so both together are a CRC of
/// 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// CRC-64/NVME.
    pub crc: u64,
    /// CRC-64/XZ.
    pub xz: u64,
}

impl Pair {
    /// The two checksums of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        if bytes.len() < FEW {
            return Self { crc: of(bytes), xz: crc_fast::checksum(Crc64Xz, bytes) };
        }
        Self::of_memory(bytes.into())
    }

    /// The two sums of memory in place.
    #[must_use]
    pub fn of_memory(memory: Bytes<'_>) -> Self {
        Self::from(take(Fold::new(), memory, None, [&NVME, &XZ]))
    }

    /// Copies `from` to `to` and returns the sums of the bytes that were written.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(to: &mut [u8], from: Bytes<'_>) -> Self {
        if to.len() < FEW {
            from.copy(to);
            return Self::of(to);
        }
        Self::from(take(Fold::new(), from, Some(to), [&NVME, &XZ]))
    }

    /// The sums of bytes with these sums, followed by `len` bytes with the sums `next`.
    #[must_use]
    pub fn then(self, next: Self, len: u64) -> Self {
        Self { crc: combine(self.crc, next.crc, len), xz: combine_xz(self.xz, next.xz, len) }
    }

    /// The sums of `len` zeros.
    #[must_use]
    pub fn zeros(len: u64) -> Self {
        // Both CRCs begin with a remainder of ones, and end by inverting the remainder.
        Self { crc: u64::MAX, xz: u64::MAX }.then(Self { crc: u64::MAX, xz: u64::MAX }, len)
    }
}

impl From<[u64; 2]> for Pair {
    fn from([crc, xz]: [u64; 2]) -> Self {
        Self { crc, xz }
    }
}

/// For two ranges of the same length: the xor of their checksums. It is the checksum of the xor of their bytes once the
/// checksum of zeros is xored in, too.
impl BitXor for Pair {
    type Output = Self;

    fn bitxor(self, other: Self) -> Self {
        Self { crc: self.crc ^ other.crc, xz: self.xz ^ other.xz }
    }
}

/// Parts of memory, one after another, each small enough to stay in cache while its checksum is computed.
pub(crate) fn passes(memory: Bytes<'_>) -> impl Iterator<Item = Bytes<'_>> {
    let part = move |at| memory.part(at, PASS.min(memory.len() - at));
    (0..memory.len()).step_by(PASS).filter_map(part)
}

/// The CRCs `of` these fields of `from`, which is copied to `to` if that is given: in one pass over the registers if
/// the processor can `fold`, else in passes over parts that are in cache.
fn take<const N: usize>(
    fold: Option<Fold>,
    from: Bytes<'_>,
    mut to: Option<&mut [u8]>,
    of: [&Field; N],
) -> [u64; N] {
    assert!(to.as_ref().is_none_or(|to| to.len() == from.len()), "a copy has two sides of one length");
    let mut digests = of.map(|field| Digest::new(field.algorithm));
    let folded = if fold.is_some() { from.len() / STEP * STEP } else { 0 };
    if let Some((fold, steps)) = fold.zip(from.part(0, folded)).filter(|_| folded > 0) {
        let sums =
            fold.steps(steps, to.as_deref_mut().map(|to| &mut to[..folded]), of.map(|field| field.keys));
        for ((digest, sum), field) in digests.iter_mut().zip(&sums).zip(of) {
            *digest = Digest::new_with_init_state(field.algorithm, 0);
            digest.update(sum);
        }
    }
    let mut parts = passes(from.part(folded, from.len() - folded).unwrap_or_default());
    match to {
        Some(to) => {
            let pull = |to: &mut [u8], _| parts.next().unwrap_or_default().copy(to);
            fill(&mut to[folded..], pull, |part| digests.iter_mut().for_each(|digest| digest.update(part)));
        }
        None => parts.for_each(|part| digests.iter_mut().for_each(|digest| part.sum(digest))),
    }
    digests.map(|digest| digest.finalize())
}

/// The CRC of a buffer that is filled in order. Filled parts are summed while they are in cache.
pub struct Filled {
    digest: Digest,
    summed: usize,
}

impl Default for Filled {
    fn default() -> Self {
        Self { digest: Digest::new(Crc64Nvme), summed: 0 }
    }
}

impl Filled {
    /// Records that the buffer is filled up to the end of `bytes`, its first bytes, which must not change any more.
    pub fn reached(&mut self, bytes: &[u8]) {
        if bytes.len() - self.summed >= PASS {
            self.sum(bytes);
        }
    }

    /// The CRC of the whole buffer.
    #[must_use]
    pub fn all(mut self, bytes: &[u8]) -> u64 {
        self.sum(bytes);
        self.digest.finalize()
    }

    fn sum(&mut self, bytes: &[u8]) {
        self.digest.update(&bytes[self.summed..]);
        self.summed = bytes.len();
    }
}

/// Copies `from` to `to` and returns the CRC of the bytes that were written.
///
/// # Panics
/// If the lengths differ.
pub fn copy(to: &mut [u8], from: &[u8]) -> u64 {
    if to.len() < FEW {
        to.copy_from_slice(from);
        return of(to);
    }
    let [crc] = take(Fold::new(), from.into(), Some(to), [&NVME]);
    crc
}

/// Calls `pull` to fill `to` part by part, given the start of each part, and `sum` on each part while it is in cache.
///
/// The source is read once. If it changes meanwhile, this affects which bytes are written, but their checksum is right.
fn fill(to: &mut [u8], mut pull: impl FnMut(&mut [u8], usize), mut sum: impl FnMut(&[u8])) {
    for (index, part) in to.chunks_mut(PASS).enumerate() {
        pull(part, index * PASS);
        sum(part);
    }
}

/// The message that bytes have the CRC `found` instead of `wanted`.
pub(crate) fn differs(found: u64, wanted: u64) -> String {
    format!("checksum is {}, expected {}", to_hex(found), to_hex(wanted))
}

/// The number of digits of a CRC in the manifest.
pub const HEX: usize = 16;

/// Formats a CRC as sixteen lower-case hexadecimal digits.
#[must_use]
pub fn to_hex(crc: u64) -> String {
    format!("{crc:016x}")
}

/// Parses sixteen lower-case hexadecimal digits as a CRC.
#[must_use]
pub fn from_hex(digits: &[u8]) -> Option<u64> {
    let lower = digits.iter().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'));
    let text = std::str::from_utf8(digits).ok()?;
    (lower && digits.len() == HEX).then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    #[test]
    fn check_values_of_the_catalogue() {
        assert_eq!(of(b"123456789"), 0xAE8B_1486_0A79_9888);
        assert_eq!(Pair::of(b"123456789"), Pair { crc: 0xAE8B_1486_0A79_9888, xz: 0x995D_C9BB_DF19_39FA });
    }

    #[test]
    fn the_two_polynomials_have_no_common_factor() {
        // The highest bit of a field's polynomial is x^0. The term x^64 is not in it.
        let whole = |field: &Field| 1 << 64 | u128::from(field.polynomial.reverse_bits());
        let (mut a, mut b) = (whole(&NVME), whole(&XZ));
        while b != 0 {
            while a != 0 && a.ilog2() >= b.ilog2() {
                a ^= b << (a.ilog2() - b.ilog2());
            }
            (a, b) = (b, a);
        }
        assert_eq!(a, 1);
    }

    #[test]
    fn copying_and_combining_agree_with_one_pass() {
        let bytes: Vec<u8> = (0..1_000_003u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut copied = vec![0; bytes.len()];
        assert_eq!(copy(&mut copied, &bytes), of(&bytes));
        assert_eq!(copied, bytes);
        copied.fill(0);
        assert_eq!(Pair::copy(&mut copied, (&bytes[..]).into()), Pair::of(&bytes));
        assert_eq!(copied, bytes);
        let memory = Bytes::from(&bytes[..]);
        assert_eq!((of_memory(memory), Pair::of_memory(memory)), (of(&bytes), Pair::of(&bytes)));
        for split in [0, 1, 4096, PASS, bytes.len() - 1, bytes.len()] {
            let (a, b) = bytes.split_at(split);
            assert_eq!(combine(of(a), of(b), b.len() as u64), of(&bytes), "split at {split}");
            let pair = Pair::of(a).then(Pair::of(b), b.len() as u64);
            assert_eq!(pair, Pair::of(&bytes), "split at {split}");
            let xz = crc_fast::checksum(Crc64Xz, &bytes);
            assert_eq!((pair.crc, pair.xz), (of(&bytes), xz));
            let mut filled = Filled::default();
            (0..=split).step_by(4099).for_each(|end| filled.reached(&bytes[..end]));
            assert_eq!(filled.all(&bytes), of(&bytes), "reported up to {split}");
        }
    }

    /// Bytes that look random.
    fn drawn(len: usize) -> Vec<u8> {
        (0..len as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 19) as u8).collect()
    }

    /// A CRC, bit by bit.
    fn slow(field: &Field, bytes: &[u8]) -> u64 {
        let step =
            |crc, &byte: &u8| (0..8).fold(crc ^ u64::from(byte), |crc, _| times_x(field.polynomial, crc));
        !bytes.iter().fold(u64::MAX, step)
    }

    /// The two ways of computing: without folding, and with it if the processor supports it.
    fn ways() -> impl Iterator<Item = Option<Fold>> {
        [None, Fold::new()].into_iter()
    }

    #[test]
    fn both_ways_take_the_sums_that_are_defined_of_each_length() {
        let (bytes, mut to) = (drawn(2048), vec![0; 2048]);
        for len in 0..=bytes.len() {
            let (from, to) = (&bytes[..len], &mut to[..len]);
            let wanted = [slow(&NVME, from), slow(&XZ, from)];
            for fold in ways() {
                to.fill(0);
                assert_eq!(take(fold, from.into(), Some(to), [&NVME, &XZ]), wanted, "{len} bytes, {fold:?}");
                assert_eq!(to, from, "{len} bytes, {fold:?}");
                assert_eq!(
                    take(fold, from.into(), None, [&NVME, &XZ]),
                    wanted,
                    "{len} bytes in place, {fold:?}"
                );
                assert_eq!(
                    take(fold, from.into(), Some(to), [&XZ]),
                    wanted[1..],
                    "{len} bytes, one sum, {fold:?}"
                );
            }
        }
    }

    #[test]
    fn both_ways_copy_between_any_two_addresses_and_write_nothing_beside() {
        let bytes = drawn(64 + 2 * STEP + 17);
        let places = (0..64).flat_map(|from| (0..64).map(move |to| (from, to)));
        for ((start, end), len) in places.flat_map(|place| [STEP, 2 * STEP + 17].map(|len| (place, len))) {
            let from = &bytes[start..start + len];
            let wanted = [of(from), crc_fast::checksum(Crc64Xz, from)];
            for fold in ways() {
                let mut all = vec![0xA5; end + len + 64];
                assert_eq!(take(fold, from.into(), Some(&mut all[end..end + len]), [&NVME, &XZ]), wanted);
                assert_eq!(&all[end..end + len], from, "from {start} to {end}, {fold:?}");
                assert!(
                    all[..end].iter().chain(&all[end + len..]).all(|&byte| byte == 0xA5),
                    "{start} {end}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn parts_taken_either_way_have_the_sums_of_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..5000),
            mut splits in proptest::collection::vec((any::<Index>(), any::<bool>()), 0..4),
        ) {
            splits.sort_unstable_by_key(|(at, _)| at.index(bytes.len() + 1));
            let (mut all, mut at, mut to) = (Pair::of(&[]), 0, vec![0; bytes.len()]);
            let ends = splits.iter().map(|(at, fold)| (at.index(bytes.len() + 1), *fold));
            for (end, fold) in ends.chain([(bytes.len(), true)]) {
                let fold = Fold::new().filter(|_| fold);
                let part = Pair::from(take(fold, bytes[at..end].into(), Some(&mut to[at..end]), [&NVME, &XZ]));
                all = all.then(part, (end - at) as u64);
                at = end;
            }
            prop_assert_eq!([all.crc, all.xz], [slow(&NVME, &bytes), slow(&XZ, &bytes)]);
            prop_assert_eq!(to, bytes);
        }
    }

    #[test]
    fn parts_add_up() {
        for len in [0, 1, 8, 4097, PASS + 3] {
            assert_eq!(Pair::zeros(len as u64), Pair::of(&vec![0; len]), "{len} zeros");
            let bytes: Vec<u8> = (0..len).map(|at| (at * at + 1) as u8).collect();
            let zeros = Pair::zeros(len as u64);
            let mut all = zeros;
            for rank in 0..3 {
                let has = |(at, &byte): (usize, &u8)| if at % 7 % 3 == rank { byte } else { 0 };
                all = all ^ zeros ^ Pair::of(&bytes.iter().enumerate().map(has).collect::<Vec<_>>());
            }
            assert_eq!(all, Pair::of(&bytes), "{len} bytes");
        }
    }

    #[test]
    fn the_sum_is_that_of_the_copy_whatever_becomes_of_the_source() {
        for len in [1, PASS, PASS + 1, 3 * PASS + 7] {
            let (mut source, mut to) = (vec![1u8; len], vec![0; len]);
            let mut digest = Digest::new(Crc64Nvme);
            let pull = |part: &mut [u8], at: usize| {
                part.copy_from_slice(&source[at..at + part.len()]);
                source.fill(2 + (at / PASS) as u8); // as another thread may do after the part is copied
            };
            fill(&mut to, pull, |part| digest.update(part));
            assert_eq!(digest.finalize(), of(&to));
            assert_ne!(digest.finalize(), of(&source));
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
