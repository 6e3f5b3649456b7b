//! What ranks find about the tensors of a base, each in its own memory, and how the findings are combined.
//!
//! Only checksums travel. A CRC is linear, apart from a constant: the CRC of an extent is the sum (xor) of the
//! contributions of its bytes, wherever these are. So each rank sums its bytes with zeros in place of all other bytes,
//! and the parts add up in any order, however a tensor is cut.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::format::checksum::{self, Pair};
use crate::format::geometry;
use crate::format::layout::TensorSpec;
use crate::format::manifest::Body;
use crate::save::compare::counterparts;

/// The findings about one tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Whether an extent that one rank has whole differs.
    pub(super) changed: bool,
    /// The number of bytes that were summed.
    pub(super) bytes: u64,
    /// The contribution of these bytes to the second checksum of the tensor.
    pub(super) xz: u64,
    /// For extents that no rank has whole, by number: the contributions of these bytes to the first checksum.
    pub(super) extents: BTreeMap<u64, u64>,
}

/// The findings of ranks, by tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sums(BTreeMap<u32, Found>);

impl Sums {
    /// The findings about a tensor.
    pub(super) fn of(&mut self, tensor: usize) -> &mut Found {
        self.0.entry(tensor as u32).or_default()
    }

    /// Adds the findings of other ranks, which are about other bytes.
    pub fn add(&mut self, others: Self) {
        for (tensor, other) in others.0 {
            let found = self.0.entry(tensor).or_default();
            found.changed |= other.changed;
            found.bytes = found.bytes.saturating_add(other.bytes);
            found.xz ^= other.xz;
            for (extent, sum) in other.extents {
                *found.extents.entry(extent).or_default() ^= sum;
            }
        }
        for found in self.0.values_mut().filter(|found| found.changed) {
            // All other findings about this tensor are irrelevant.
            *found = Found { changed: true, ..Found::default() };
        }
    }

    /// For each of `tensors`, its number in the base if all its bytes were found, and are unchanged.
    #[must_use]
    pub(super) fn unchanged(&self, tensors: &[TensorSpec], base: &Body) -> Vec<Option<usize>> {
        let mut same = vec![None; tensors.len()];
        for (tensor, index) in counterparts(tensors, base) {
            let (entry, none) = (&base.tensors[index], Found::default());
            let found = self.0.get(&(tensor as u32)).unwrap_or(&none);
            let placement = entry.placement(tensor);
            let is_right = |(&number, &sum): (&u64, &u64)| {
                let block = geometry::down(entry.offset, base.block_size) + number * base.block_size;
                let extent = geometry::extent(&placement, block, base.block_size);
                extent
                    .is_some_and(|extent| entry.extent_crc(number) == Some(sum ^ Pair::zeros(extent.len).crc))
            };
            let xz = checksum::to_hex(found.xz ^ Pair::zeros(placement.bytes).xz);
            if !found.changed
                && found.bytes == placement.bytes
                && xz == entry.crc64xz()
                && found.extents.iter().all(is_right)
            {
                same[tensor] = Some(index);
            }
        }
        same
    }

    /// The findings as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (tensor, Found { changed, bytes, xz, extents }) in &self.0 {
            all.extend(tensor.to_le_bytes());
            // A tensor that has changed has no other findings.
            all.extend(if *changed { u32::MAX } else { extents.len() as u32 }.to_le_bytes());
            if !changed {
                let numbers = extents.iter().flat_map(|(number, sum)| [*number, *sum]);
                [*bytes, *xz].into_iter().chain(numbers).for_each(|number| all.extend(number.to_le_bytes()));
            }
        }
        all
    }

    /// The inverse of [`Self::encode`].
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let mut all = Self::default();
        while !rest.is_empty() {
            let (tensor, count) =
                (u32::from_le_bytes(next(&mut rest)?), u32::from_le_bytes(next(&mut rest)?));
            let found = all.0.entry(tensor).or_default();
            if count == u32::MAX {
                found.changed = true;
                continue;
            }
            found.bytes = u64::from_le_bytes(next(&mut rest)?);
            found.xz = u64::from_le_bytes(next(&mut rest)?);
            for _ in 0..count {
                let number = u64::from_le_bytes(next(&mut rest)?);
                found.extents.insert(number, u64::from_le_bytes(next(&mut rest)?));
            }
        }
        Ok(all)
    }
}

/// The next bytes of `rest`.
pub(super) fn next<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let (bytes, after) = rest
        .split_first_chunk()
        .ok_or_else(|| Error::Invalid("a rank's sums for the base are cut off".to_owned()))?;
    *rest = after;
    Ok(*bytes)
}
