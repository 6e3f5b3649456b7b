//! The caller's memory for the part of a tensor that one rank wants, filled box by box.

use std::sync::Arc;

use super::strided::{Rows, Strided};

/// Writable memory of the caller that holds an array.
#[derive(Debug)]
pub struct Array {
    /// The array's first element.
    base: *mut u8,
    bytes: u64,
    /// The places of the array's bytes in memory, in the order of the array; `None` if it is contiguous.
    rows: Option<Arc<Rows>>,
}

// SAFETY: the caller of `new` promised exclusive access from any thread.
unsafe impl Send for Array {}
// SAFETY: nothing is read or written through a shared reference.
unsafe impl Sync for Array {}

impl Array {
    /// Exclusive access to an array of `bytes` bytes, whose first element is at `base`. Without `rows`, the array is
    /// contiguous.
    ///
    /// # Safety
    /// Until this and everything made from it are gone, the memory of all bytes must be writable from any thread, no
    /// byte of memory may belong to two bytes of the array, and nothing else may read or write it. The boxes taken
    /// from it must not overlap.
    #[must_use]
    pub const unsafe fn new(base: *mut u8, bytes: u64, rows: Option<Arc<Rows>>) -> Self {
        Self { base, bytes, rows }
    }

    /// Exclusive access to the box of a tensor whose `rows` are among the array's bytes, in the array's order,
    /// beginning at byte `first`. `None` if they are not inside the array.
    #[must_use]
    pub fn take(&mut self, rows: &Arc<Rows>, first: i64) -> Option<Strided> {
        let reach = rows.reach();
        let (low, high) = (i128::from(first) + reach.start, i128::from(first) + reach.end);
        if low < 0 || high > i128::from(self.bytes) {
            return None;
        }
        let rows = Arc::clone(rows);
        Some(match &self.rows {
            // SAFETY: the rows lie in the array, which is exclusive by the contract of `new`, as are its boxes.
            None => unsafe { Strided::new(self.base.wrapping_offset(first as isize), rows) },
            // SAFETY: as above.
            Some(array) => unsafe {
                Strided::inside(self.base, rows, Some((first.cast_unsigned(), Arc::clone(array))))
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::strided::Axis;
    use super::*;

    /// Columns 1 and 2 of a tensor of 3 x 4 elements of two bytes, as columns of an array of 3 x 3.
    fn columns() -> Arc<Rows> {
        let axes = [(3, 8, 6), (2, 2, 2)];
        Arc::new(Rows::new(2, 2, axes.into_iter().map(|(count, from, to)| Axis { count, from, to })))
    }

    #[test]
    fn a_box_lies_in_the_array_wherever_the_array_lies() {
        let tensor: Vec<u8> = (0..24).collect();
        let packed: Vec<u8> = [2..6, 10..14, 18..22].into_iter().flatten().collect();
        let mut gathered = vec![0; 12];
        columns().pack(0, &tensor, &mut gathered);
        assert_eq!(gathered, packed);
        // Two layouts: row by row, and column by column, starting with the last column.
        let backwards = [(3, 6, 2), (3, 2, -6)].map(|(count, from, to)| Axis { count, from, to });
        for (layout, start, expected) in [
            (None, 0, [0, 0, 2, 3, 4, 5, 0, 0, 10, 11, 12, 13, 0, 0, 18, 19, 20, 21]),
            (
                Some(Arc::new(Rows::new(0, 2, backwards.into_iter()))),
                12,
                [4, 5, 12, 13, 20, 21, 2, 3, 10, 11, 18, 19, 0, 0, 0, 0, 0, 0],
            ),
        ] {
            for cut in 0..=24 {
                for pack in [false, true] {
                    let mut memory = [0u8; 18];
                    // SAFETY: the memory has the nine elements, and is not touched before all is dropped.
                    let mut array = unsafe { Array::new(memory[start..].as_mut_ptr(), 18, layout.clone()) };
                    let mut rows = array.take(&columns(), 2).unwrap();
                    for range in [0..cut, cut..24] {
                        let mut part = rows.split_off(range.clone());
                        let bytes = &tensor[range.start as usize..range.end as usize];
                        if pack {
                            let mut packed = vec![0; columns().bytes_in(&range) as usize];
                            columns().pack(range.start, bytes, &mut packed);
                            part.unpack(&packed);
                        } else {
                            let copied = part.fill(range.start, bytes);
                            assert_eq!(copied, columns().bytes_in(&range));
                        }
                    }
                    assert_eq!(memory, expected, "cut at {cut}");
                }
            }
        }
    }

    #[test]
    fn a_box_that_is_not_in_the_array_is_refused() {
        let mut memory = [0u8; 18];
        // SAFETY: as above.
        let mut array = unsafe { Array::new(memory.as_mut_ptr(), 18, None) };
        assert!(array.take(&columns(), -1).is_none());
        assert!(array.take(&columns(), 3).is_none());
        assert!(array.take(&columns(), 2).is_some());
    }

    #[test]
    fn a_row_alone_is_a_stretch_of_memory() {
        let mut memory = [0u8; 18];
        // SAFETY: as above.
        let mut array = unsafe { Array::new(memory.as_mut_ptr(), 18, None) };
        let mut rows = array.take(&columns(), 2).unwrap();
        let row = rows.split_off(3..6).alone().unwrap();
        assert_eq!((row.address(), row.len()), (memory.as_ptr().addr() + 3, 3));
        assert!(rows.split_off(6..11).alone().is_err(), "some of these rows are not in the box");
        assert!(rows.alone().is_err(), "several rows");
    }
}
