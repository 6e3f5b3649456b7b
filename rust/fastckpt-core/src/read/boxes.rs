//! Boxes of tensors as rows of bytes: the arithmetic of shapes, steps and strides. Pure.

use crate::error::{Error, Result};
use crate::format::manifest::TensorEntry;
use crate::sys::strided::{Axis, Rows};

/// The indices of a box along one dimension: from `start` to below `stop`, in steps of `step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Along {
    /// The first index.
    pub start: u64,
    /// The index after the last index.
    pub stop: u64,
    /// The distance from one index to the next, at least 1.
    pub step: u64,
}

impl Along {
    fn count(self) -> u64 {
        (self.stop - self.start).div_ceil(self.step)
    }
}

/// The rows of a box of `tensor`, or `None` if the box is empty.
///
/// `wanted` has one member for each dimension of the logical shape, or is `None` for the whole tensor. `strides` has
/// the distances in bytes between neighbours in memory along each dimension. Without it, elements are in row-major
/// order without gaps.
///
/// If several elements share a byte, the box must begin and end at whole bytes.
pub fn rows(tensor: &TensorEntry, wanted: Option<&[Along]>, strides: Option<&[i64]>) -> Result<Option<Rows>> {
    rows_of(&tensor.logical_shape(), tensor.bytes(), wanted, strides)
        .map_err(|why| Error::Invalid(format!("a box of tensor `{}`: {why}", tensor.name())))
}

/// The bytes of an array of `shape` in row-major order, as rows in memory, where neighbours along each dimension are
/// `strides` bytes apart. `None` if the array is empty.
pub fn array(shape: &[u64], bytes: u64, strides: &[i64]) -> Result<Option<Rows>> {
    if bytes == 0 {
        return Ok(None);
    }
    rows_of(shape, bytes, None, Some(strides)).map_err(|why| Error::Invalid(format!("an array: {why}")))
}

type Why = std::result::Result<Option<Rows>, String>;

fn rows_of(shape: &[u64], bytes: u64, wanted: Option<&[Along]>, strides: Option<&[i64]>) -> Why {
    let whole: Vec<_> = shape.iter().map(|&size| Along { start: 0, stop: size, step: 1 }).collect();
    let wanted = wanted.unwrap_or(&whole);
    for found in [wanted.len(), strides.map_or(shape.len(), <[i64]>::len)] {
        if found != shape.len() {
            return Err(format!("it has {found} dimensions, but the tensor has {}", shape.len()));
        }
    }
    for (dimension, (along, &size)) in wanted.iter().zip(shape).enumerate() {
        if along.start > along.stop || along.stop > size || along.step == 0 {
            let Along { start, stop, step } = along;
            return Err(format!(
                "{start}..{stop} in steps of {step} is not in dimension {dimension} of size {size}"
            ));
        }
    }
    if wanted.iter().any(|along| along.count() == 0) {
        return Ok(None);
    }
    let (shape, wanted, itemsize) = in_bytes(shape, bytes, wanted)?;
    let axes = axes(&shape, &wanted, itemsize, strides).ok_or("its strides are out of range")?;
    let first = axes.iter().zip(&wanted).map(|(&(_, stride), along)| stride * along.start).sum();
    let rows = Rows::new(first, itemsize, axes.into_iter().map(|(axis, _)| axis));
    let reach = rows.reach();
    if reach.end - reach.start > i128::from(i64::MAX) {
        return Err("its strides are out of range".to_owned());
    }
    Ok(Some(rows))
}

/// The shape and the box in units of whole bytes, and the number of these units in an element. Elements that share
/// bytes are counted in bytes along the last dimension.
fn in_bytes(
    shape: &[u64],
    bytes: u64,
    wanted: &[Along],
) -> std::result::Result<(Vec<u64>, Vec<Along>, u64), String> {
    let elements = shape.iter().try_fold(1, |product: u64, &size| product.checked_mul(size));
    let bits = bytes.checked_mul(8).filter(|_| i64::try_from(bytes).is_ok());
    let (Some(elements), Some(bits)) = (elements.filter(|&count| count > 0), bits) else {
        return Err("the tensor's shape is out of range".to_owned());
    };
    if bits % elements != 0 {
        return Err(format!("the tensor's shape does not fit its {bytes} bytes"));
    }
    let (mut shape, mut wanted, bits) = (shape.to_vec(), wanted.to_vec(), bits / elements);
    if bits % 8 == 0 {
        return Ok((shape, wanted, bits / 8));
    }
    let (Some(size), Some(last)) = (shape.last_mut(), wanted.last_mut()) else {
        return Err("the tensor's only element is not a whole number of bytes".to_owned());
    };
    let whole = |count: u64| (count * bits).is_multiple_of(8);
    if last.step != 1 || ![*size, last.start, last.stop].into_iter().all(whole) {
        return Err(format!(
            "elements of {bits} bits share bytes: the range along the last dimension must begin and end at a \
             whole byte, in steps of 1"
        ));
    }
    *size = *size * bits / 8;
    *last = Along { start: last.start * bits / 8, stop: last.stop * bits / 8, step: 1 };
    Ok((shape, wanted, 1))
}

/// For each dimension, an axis and the distance in bytes between neighbours along it in the tensor. `None` if a number
/// overflows.
fn axes(shape: &[u64], wanted: &[Along], itemsize: u64, strides: Option<&[i64]>) -> Option<Vec<(Axis, u64)>> {
    let (mut stride, mut packed) = (itemsize, i64::try_from(itemsize).ok()?);
    let mut axes = Vec::with_capacity(shape.len());
    for (dimension, (&size, along)) in shape.iter().zip(wanted).enumerate().rev() {
        let count = along.count();
        let from = if count > 1 { stride.checked_mul(along.step)? } else { stride };
        let to = strides.map_or(packed, |strides| strides[dimension]);
        // Joining axes multiplies these numbers.
        i64::try_from(from.checked_mul(count)?).ok()?;
        to.checked_mul(i64::try_from(count).ok()?)?;
        axes.push((Axis { count, from, to }, stride));
        stride = stride.checked_mul(size)?;
        packed = packed.checked_mul(i64::try_from(count).ok()?)?;
    }
    axes.reverse();
    Some(axes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A tensor's shape, a box in it, and strides in memory along each dimension: in any order of dimensions and with
    /// gaps, some backwards.
    fn cases() -> impl Strategy<Value = (Vec<u64>, u64, Vec<Along>, Option<Vec<i64>>)> {
        let dimension =
            (1u64..7, any::<[prop::sample::Index; 2]>(), 1u64..4, 0i64..3, any::<bool>(), any::<u8>());
        (prop::collection::vec(dimension, 0..5), 1u64..5, any::<bool>()).prop_map(
            |(dimensions, itemsize, packed)| {
                let along =
                    |&(size, ends, step, ..): &(u64, [prop::sample::Index; 2], u64, i64, bool, u8)| {
                        let mut ends = ends.map(|end| end.index(size as usize + 1) as u64);
                        ends.sort_unstable();
                        Along { start: ends[0], stop: ends[1], step }
                    };
                let wanted: Vec<_> = dimensions.iter().map(along).collect();
                let mut order: Vec<_> = (0..dimensions.len()).collect();
                order.sort_by_key(|&at| dimensions[at].5);
                let (mut strides, mut reach) = (vec![0; order.len()], itemsize.cast_signed());
                for at in order {
                    let step = reach + dimensions[at].3;
                    strides[at] = if dimensions[at].4 { -step } else { step };
                    reach += step * (wanted[at].count().cast_signed() - 1).max(0);
                }
                let shape = dimensions.iter().map(|dimension| dimension.0).collect();
                (shape, itemsize, wanted, (!packed).then_some(strides))
            },
        )
    }

    /// The place of each byte of a box in the tensor and in memory, element by element.
    fn places(shape: &[u64], itemsize: u64, wanted: &[Along], strides: Option<&[i64]>) -> Vec<(u64, i64)> {
        let mut elements = vec![(0, 0)];
        for (dimension, along) in wanted.iter().enumerate() {
            let inner: u64 = shape[dimension + 1..].iter().product();
            let packed: u64 = wanted[dimension + 1..].iter().map(|along| along.count()).product();
            let step = strides.map_or((packed * itemsize).cast_signed(), |strides| strides[dimension]);
            let indices = (along.start..along.stop).step_by(along.step as usize).enumerate();
            let move_on = |(at, to)| {
                indices.clone().map(move |(i, index)| {
                    (at + index * inner * itemsize, to + i.cast_signed() as i64 * step)
                })
            };
            elements = elements.into_iter().flat_map(move_on).collect();
        }
        let bytes = |(at, to)| (0..itemsize).map(move |byte| (at + byte, to + byte.cast_signed()));
        elements.into_iter().flat_map(bytes).collect()
    }

    fn found(rows: &Rows, range: std::ops::Range<u64>) -> Vec<(u64, i64)> {
        let row = |len: u64| move |(at, to)| (0..len).map(move |byte| (at + byte, to + byte.cast_signed()));
        rows.lines(range).flat_map(|line| line.rows().flat_map(row(line.len))).collect()
    }

    proptest! {
        #[test]
        fn every_byte_of_a_box_is_found_once_in_order(
            (shape, itemsize, wanted, strides) in cases(),
            cut in any::<[u8; 2]>(),
            gap in 0u64..40,
        ) {
            let bytes = itemsize * shape.iter().product::<u64>();
            let expected = places(&shape, itemsize, &wanted, strides.as_deref());
            let Some(rows) = rows_of(&shape, bytes, Some(&wanted), strides.as_deref()).unwrap() else {
                prop_assert!(expected.is_empty());
                return Ok(());
            };
            prop_assert_eq!(rows.bytes(), expected.len() as u64);
            prop_assert_eq!(&found(&rows, 0..bytes), &expected);
            let (first, last) = (expected[0].0, expected[expected.len() - 1].0);
            prop_assert_eq!(rows.range(), first..last + 1);
            let low = expected.iter().map(|place| i128::from(place.1)).min().unwrap();
            let high = expected.iter().map(|place| i128::from(place.1)).max().unwrap();
            prop_assert_eq!(rows.reach(), low..high + 1);
            prop_assert!(rows.is_nested());

            let (mut from, mut to) = (u64::from(cut[0]) % (bytes + 1), u64::from(cut[1]) % (bytes + 1));
            if from > to {
                (from, to) = (to, from);
            }
            let inside: Vec<_> = expected.iter().copied().filter(|place| (from..to).contains(&place.0)).collect();
            prop_assert_eq!(found(&rows, from..to), inside);

            // The bytes to read for the box: all wanted bytes, and no unwanted stretch longer than the gap.
            let read: Vec<u64> = found(&rows.joined(gap), 0..bytes).into_iter().map(|place| place.0).collect();
            prop_assert!(read.is_sorted_by(|a, b| a < b));
            let offsets: std::collections::HashSet<u64> = expected.iter().map(|place| place.0).collect();
            prop_assert!(offsets.iter().all(|at| read.binary_search(at).is_ok()));
            let mut unwanted = 0;
            for at in read {
                unwanted = if offsets.contains(&at) { 0 } else { unwanted + 1 };
                prop_assert!(unwanted <= gap, "{} bytes up to {} are not wanted", unwanted, at);
            }
        }
    }

    #[test]
    fn what_lies_together_is_one_row() {
        let along = |start, stop| Along { start, stop, step: 1 };
        let rows = |wanted: &[Along], strides: Option<&[i64]>| {
            let rows = rows_of(&[10, 20, 30], 4 * 6000, Some(wanted), strides).unwrap().unwrap();
            (rows.row(), rows.lines(rows.range()).map(|line| line.count).sum::<u64>())
        };
        assert_eq!(rows(&[along(0, 10), along(0, 20), along(0, 30)], None), (24_000, 1));
        assert_eq!(rows(&[along(3, 5), along(0, 20), along(0, 30)], None), (4800, 1));
        assert_eq!(rows(&[along(3, 4), along(2, 5), along(0, 30)], None), (360, 1));
        assert_eq!(rows(&[along(3, 5), along(2, 5), along(0, 30)], None), (360, 2));
        assert_eq!(rows(&[along(0, 10), along(0, 20), along(7, 8)], None), (4, 200));
        assert_eq!(rows(&[along(0, 10), along(0, 20), along(0, 30)], Some(&[2400, 4, 80])), (4, 6000));
    }

    #[test]
    fn elements_that_share_a_byte_are_read_in_whole_bytes() {
        let last = |start, stop, step| [Along { start: 0, stop: 2, step: 1 }, Along { start, stop, step }];
        let rows = |wanted: [Along; 2]| rows_of(&[2, 6], 6, Some(&wanted), None);
        let whole = rows(last(2, 6, 1)).unwrap().unwrap();
        assert_eq!(found(&whole, 0..6), [(1, 0), (2, 1), (4, 2), (5, 3)]);
        for wrong in [last(1, 6, 1), last(2, 5, 1), last(0, 6, 2)] {
            assert!(rows(wrong).unwrap_err().contains("4 bits share bytes"));
        }
        // Rows that do not end at a whole byte can only be read all at once.
        assert!(rows_of(&[2, 3], 3, None, None).unwrap_err().contains("4 bits share bytes"));
    }

    #[test]
    fn what_is_no_box_of_the_tensor_is_refused() {
        let one = |start, stop, step| rows_of(&[4], 8, Some(&[Along { start, stop, step }]), None);
        for (start, stop, step) in [(0, 5, 1), (3, 2, 1), (0, 4, 0), (u64::MAX, u64::MAX, 1)] {
            assert!(one(start, stop, step).unwrap_err().contains("is not in dimension 0 of size 4"));
        }
        assert_eq!(one(2, 2, 1), Ok(None));
        assert_eq!(one(1, 4, u64::MAX).unwrap().unwrap().bytes(), 2);
        assert!(rows_of(&[4], 8, Some(&[]), None).unwrap_err().contains("it has 0 dimensions"));
        assert!(rows_of(&[4], 8, None, Some(&[1, 1])).unwrap_err().contains("it has 2 dimensions"));
        assert!(rows_of(&[7], 9, None, None).unwrap_err().contains("does not fit its 9 bytes"));
        for stride in [i64::MAX, i64::MIN, i64::MAX / 3] {
            assert!(rows_of(&[4], 8, None, Some(&[stride])).unwrap_err().contains("out of range"));
        }
        let overlap =
            |strides: &[i64]| !rows_of(&[3, 2], 6, None, Some(strides)).unwrap().unwrap().is_nested();
        assert!(
            overlap(&[1, 1])
                && overlap(&[0, 1])
                && overlap(&[2, 3])
                && !overlap(&[2, -1])
                && !overlap(&[1, 3])
        );
    }
}
