//! Shapes counted in whole bytes. Pure.

use std::ops::Range;

use super::spread::{Bounds, Groups};

/// The shape of a tensor that has bytes, in units of whole bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    /// The size of each dimension: at least one size, and none is zero.
    pub(super) sizes: Vec<u64>,
    /// Bytes of an element.
    pub(super) item: u64,
    /// If elements share bytes, `elements` neighbours along the last dimension...
    elements: u64,
    /// ...take `bytes` bytes, and the last dimension is counted in bytes.
    bytes: u64,
}

impl Shape {
    /// The shape of a tensor of `bytes` bytes, which must not be 0.
    pub(super) fn new(sizes: &[u64], bytes: u64) -> Result<Self, String> {
        let elements = sizes.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
        let bits = bytes.checked_mul(8).filter(|_| i64::try_from(bytes).is_ok());
        let (Some(elements), Some(bits)) = (elements.filter(|&count| count > 0), bits) else {
            return Err("its shape is out of range".to_owned());
        };
        if bits % elements != 0 {
            return Err(format!("its shape does not fit its {bytes} bytes"));
        }
        let (mut sizes, bits) = (sizes.to_vec(), bits / elements);
        if bits.is_multiple_of(8) {
            if sizes.is_empty() {
                sizes.push(1);
            }
            return Ok(Self { sizes, item: bits / 8, elements: 1, bytes: 1 });
        }
        let mut shape = Self { sizes: Vec::new(), item: 1, elements: 8, bytes: bits };
        let last = sizes.last_mut().ok_or("its only element is not a whole number of bytes")?;
        *last = shape.whole(*last)?;
        shape.sizes = sizes;
        Ok(shape)
    }

    /// The one-dimensional shape of `bytes` elements of one byte.
    pub(super) fn flat(bytes: u64) -> Self {
        Self { sizes: vec![bytes], item: 1, elements: 1, bytes: 1 }
    }

    /// The part of a tensor of the logical shape `sizes` that a group has, counted in this shape. Replaces the contents
    /// of `dims`.
    pub(super) fn ranges(
        &self,
        sizes: &[u64],
        groups: &Groups,
        group: u32,
        dims: &mut Vec<Bounds>,
    ) -> Result<(), String> {
        // A rank with full boxes has all bytes, whatever the shape.
        if groups.is_whole() {
            return groups.ranges(group, &self.sizes, dims);
        }
        groups.ranges(group, sizes, dims)?;
        match dims.last_mut() {
            None => dims.push(std::iter::once(0..1).collect()),
            Some(last) => {
                for range in last {
                    *range = self.whole(range.start)?..self.whole(range.end)?;
                }
            }
        }
        Ok(())
    }

    fn whole(&self, count: u64) -> Result<u64, String> {
        // The product is at most eight times the bytes of the tensor.
        if (count * self.bytes).is_multiple_of(self.elements) {
            return Ok(count * self.bytes / self.elements);
        }
        Err(format!(
            "its elements of {} bits share bytes, so along its last dimension each part must begin and end at a whole \
             byte, and {count} elements do not",
            self.bytes
        ))
    }

    /// Bytes from one index to the next along each dimension of a box of `sizes`, counted as this shape is.
    pub(super) fn strides(&self, sizes: &[u64]) -> Vec<u64> {
        let mut strides = vec![self.item; sizes.len()];
        for dim in (1..sizes.len()).rev() {
            strides[dim - 1] = strides[dim] * sizes[dim];
        }
        strides
    }
}

/// Number of indices.
pub(super) const fn len(range: &Range<u64>) -> u64 {
    range.end - range.start
}
