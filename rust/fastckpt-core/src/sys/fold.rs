//! Checksums of memory, and a copy of it, in one pass over the registers of a processor that has AVX-512 and
//! `VPCLMULQDQ`.
//!
//! A CRC is a remainder: the bytes are a polynomial over GF(2), divided by the polynomial of the CRC. Bytes followed by
//! others may be multiplied by the power of x for their distance, modulo that polynomial, and added to the later bytes:
//! the remainder stays the same. In the end, the bytes of one step are left, with the remainder of all. See Gopal et
//! al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512i, _mm_set_epi64x, _mm_sfence, _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_stream_si512, _mm512_ternarylogic_epi64,
    _mm512_xor_si512, _mm512_zextsi128_si512,
};

use super::memory::Bytes;

const LANE: usize = 64;
const LANES: usize = 4;

/// Bytes that are folded at a time: enough to hide the latency of a multiplication.
pub const STEP: usize = LANES * LANE;

/// A copy of at least this many bytes bypasses the caches. It is usually for a device or for later use. Without the
/// bypass, the processor would read each target line before writing it, which would cost a third of the pass.
#[cfg(target_arch = "x86_64")]
const PAST: usize = if cfg!(test) { STEP } else { 64 << 10 };

/// The factors of the first and the last 8 of 16 bytes, whose products are added to the bytes a step behind: x to the
/// power of `8 * STEP + 63` and of `8 * STEP - 1`, modulo the polynomial. The highest bit is the coefficient of x^0.
///
/// With the bits in this order, a product of two numbers of 64 bits lies one bit too low among 128: it is the product
/// times x. So the powers are less by one than the distances.
pub type Keys = [u64; 2];

/// Proof that this processor can fold.
#[derive(Debug, Clone, Copy)]
pub struct Fold(());

impl Fold {
    /// `None` if this processor cannot fold.
    #[must_use]
    pub fn new() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let can = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
        #[cfg(not(target_arch = "x86_64"))]
        let can = false;
        can.then_some(Self(()))
    }

    /// For each polynomial with `keys`, the bytes of one step that leave the same remainder as all of `from`, if the
    /// register was all ones before `from` and is zero before them. Copies `from` to `to`, if `to` is given.
    ///
    /// Each byte is read once, and the copy and the sums get it from the same register. If the source changes
    /// meanwhile, this affects which bytes are written, but their sums are right.
    ///
    /// # Panics
    /// If `from` is not one or several whole steps, or `to` is longer or shorter.
    #[must_use]
    pub fn steps<const N: usize>(
        self,
        from: Bytes<'_>,
        to: Option<&mut [u8]>,
        keys: [Keys; N],
    ) -> [[u8; STEP]; N] {
        let len = from.len();
        assert!(len > 0 && len.is_multiple_of(STEP), "{len} bytes are not whole steps");
        assert!(to.as_ref().is_none_or(|to| to.len() == len), "a copy has two sides of one length");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `self` proves that the processor has the features for which `fold` is compiled. By the contract of
        // `Bytes`, `len` bytes are readable, and no `&mut` covers one of them, so `to` does not. If `to` is given, it
        // has the same number of bytes, and it is borrowed for this call alone.
        return unsafe { fold(from.pointer(), len, to.map(<[u8]>::as_mut_ptr), keys) };
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("`new` makes none for {keys:?}");
    }
}

/// See `Fold::steps`.
///
/// # Safety
/// `len` must be a multiple of `STEP`. As many bytes must be readable at `from`, and writable by nobody else at `to`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,vpclmulqdq")]
unsafe fn fold<const N: usize>(
    from: *const u8,
    len: usize,
    to: Option<*mut u8>,
    keys: [Keys; N],
) -> [[u8; STEP]; N] {
    let wide = |low: u64, high: u64| _mm_set_epi64x(high.cast_signed(), low.cast_signed());
    let keys = keys.map(|[first, last]| _mm512_broadcast_i32x4(wide(first, last)));
    let past = len >= PAST && to.is_some_and(|to| to.addr().is_multiple_of(LANE));
    let mut sums = [[_mm512_setzero_si512(); LANES]; N];
    for at in (0..len).step_by(STEP) {
        // SAFETY: `len` is a multiple of `STEP`, so the step that begins at `at` ends at or before `len`.
        let step = unsafe { read(from.wrapping_add(at)) };
        if let Some(to) = to {
            // SAFETY: likewise, and nothing else writes there, by the contract of this function. `past` is only true if
            // `to`, and therefore each later step, is at a multiple of `LANE`. The fence is below.
            unsafe { write(to.wrapping_add(at), step, past) };
        }
        for (sums, &keys) in sums.iter_mut().zip(&keys) {
            for (sum, &lane) in sums.iter_mut().zip(&step) {
                let first = _mm512_clmulepi64_epi128::<0x00>(*sum, keys);
                let last = _mm512_clmulepi64_epi128::<0x11>(*sum, keys);
                *sum = _mm512_ternarylogic_epi64::<0x96>(first, last, lane); // the xor of all three
            }
            if at == 0 {
                // A register of ones is the same as one of zeros if the first 8 bytes are inverted.
                sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(wide(u64::MAX, 0)));
            }
        }
    }
    _mm_sfence(); // stores past the caches become visible before later stores of this thread
    sums.map(|sums| {
        let mut bytes = [0; STEP];
        // SAFETY: `bytes` has room for one step.
        unsafe { write(bytes.as_mut_ptr(), sums, false) };
        bytes
    })
}

/// The step of bytes at `from`, at any address. Each byte is read once: the compiler does not see the read, so it
/// cannot repeat the read where the bytes are used.
///
/// # Safety
/// `STEP` bytes must be readable. They may change.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn read(from: *const u8) -> [__m512i; LANES] {
    let (a, b, c, d);
    // SAFETY: the instructions read `STEP` bytes, which are readable and need no alignment, and change nothing but the
    // named registers. The language does not count them as accesses, so other threads may write at the same time.
    unsafe {
        asm!(
            "vmovdqu64 {a}, [{from}]",
            "vmovdqu64 {b}, [{from} + 64]",
            "vmovdqu64 {c}, [{from} + 128]",
            "vmovdqu64 {d}, [{from} + 192]",
            from = in(reg) from,
            a = out(zmm_reg) a,
            b = out(zmm_reg) b,
            c = out(zmm_reg) c,
            d = out(zmm_reg) d,
            options(readonly, nostack, preserves_flags),
        );
    }
    [a, b, c, d]
}

/// Writes a step of bytes to `to`: through the caches at any address, or past the caches at a multiple of `LANE`.
///
/// # Safety
/// `STEP` bytes must be writable by this call only. If they go past the caches, `_mm_sfence` must come before any other
/// access to them, and before other threads or the kernel learn of them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn write(to: *mut u8, step: [__m512i; LANES], past: bool) {
    for (index, lane) in step.into_iter().enumerate() {
        let to = to.wrapping_add(index * LANE).cast();
        if past {
            // SAFETY: the lanes are `STEP` bytes together, and each is as aligned as `to`.
            unsafe { _mm512_stream_si512(to, lane) };
        } else {
            // SAFETY: the lanes are `STEP` bytes together, and this store needs no alignment.
            unsafe { _mm512_storeu_si512(to, lane) };
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

    use super::*;
    use crate::sys::page;

    /// `pages` pages of memory between two inaccessible pages. They are never unmapped.
    fn fenced(pages: usize) -> &'static mut [u8] {
        let len = pages * page::size();
        let whole = len + 2 * page::size();
        // SAFETY: a private anonymous mapping at an address the kernel chooses overlaps nothing.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), MapFlags::PRIVATE).unwrap()
        };
        let inside = start.wrapping_byte_add(page::size());
        // SAFETY: the pages between the first and the last of the mapping just made, which nothing else knows of.
        unsafe { mprotect(inside, len, MprotectFlags::READ | MprotectFlags::WRITE) }.unwrap();
        // SAFETY: `len` bytes, zeroed, mapped for as long as the process lives, and lent once.
        unsafe { std::slice::from_raw_parts_mut(inside.cast(), len) }
    }

    #[test]
    fn a_processor_that_says_it_can_is_used() {
        let about = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = about.lines().find(|line| line.starts_with("flags")).unwrap();
        let has = |flag: &str| flags.split_whitespace().any(|each| each == flag);
        assert_eq!(Fold::new().is_some(), has("avx512f") && has("vpclmulqdq"));
    }

    #[test]
    fn no_byte_before_or_behind_is_touched() {
        let Some(fold) = Fold::new() else { return };
        let (from, to) = (fenced(2), fenced(2));
        from.iter_mut().zip(1..).for_each(|(byte, at): (_, u32)| *byte = (at * at / 8) as u8);
        let whole = from.len();
        for len in [STEP, 2 * STEP, whole] {
            for (begin, into) in [(0, 0), (whole - len, whole - len), (0, whole - len), (whole - len, 0)] {
                let (from, to) = (&from[begin..][..len], &mut to[into..][..len]);
                to.fill(0);
                let of_both = fold.steps(from.into(), Some(to), [[3, 5]]);
                assert_eq!(of_both, fold.steps(from.into(), None, [[3, 5]]));
                assert_eq!(from, to);
            }
        }
    }
}
