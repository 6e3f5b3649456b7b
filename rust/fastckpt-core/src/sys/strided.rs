//! Memory of the caller that is filled row by row: a box of a tensor, laid out with strides.

use std::ops::Range;
use std::sync::Arc;

use super::memory::Region;

/// Equal steps along one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// Number of indices.
    pub count: u64,
    /// Bytes from one index to the next in the tensor, never zero.
    pub from: u64,
    /// Bytes from one index to the next in memory.
    pub to: i64,
}

/// A non-empty box of a tensor, as rows. The bytes of a row are contiguous both in the tensor and in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    first: u64,
    row: u64,
    /// The axes, outermost first. Counting them up gives the rows in the order of the tensor.
    axes: Vec<Axis>,
}

/// Rows along the innermost axis, or one row that is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// The first byte of the first row, counted in the tensor.
    pub at: u64,
    /// The place of that byte in memory, counted from the box's first element.
    pub to: i64,
    /// Bytes per row.
    pub len: u64,
    /// Number of rows.
    pub count: u64,
    step: Axis,
}

impl Line {
    /// Returns the `at` and `to` of each row.
    pub fn rows(self) -> impl Iterator<Item = (u64, i64)> {
        (0..self.count).map(move |i| (self.at + i * self.step.from, self.to + i.cast_signed() * self.step.to))
    }
}

impl Rows {
    /// Rows of `row` bytes, the first at byte `first` of the tensor. Joins adjacent axes.
    #[must_use]
    pub fn new(first: u64, mut row: u64, axes: impl DoubleEndedIterator<Item = Axis>) -> Self {
        let mut joined: Vec<Axis> = Vec::new();
        for axis in axes.rev().filter(|axis| axis.count > 1) {
            match joined.last_mut() {
                None if axis.from == row && axis.to == row.cast_signed() => row *= axis.count,
                Some(inner)
                    if axis.from == inner.from * inner.count
                        && axis.to == inner.to * inner.count.cast_signed() =>
                {
                    inner.count *= axis.count;
                }
                _ => joined.push(axis),
            }
        }
        joined.reverse();
        Self { first, row, axes: joined }
    }

    /// Bytes per row.
    #[must_use]
    pub const fn row(&self) -> u64 {
        self.row
    }

    /// Bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.row * self.axes.iter().map(|axis| axis.count).product::<u64>()
    }

    /// The range from the first byte to the last, counted in the tensor.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        let last: u64 = self.axes.iter().map(|axis| (axis.count - 1) * axis.from).sum();
        self.first..self.first + last + self.row
    }

    /// The range from the lowest byte in memory to the highest, counted from the box's first element.
    #[must_use]
    pub fn reach(&self) -> Range<i128> {
        let steps = self.axes.iter().map(|axis| i128::from(axis.count - 1) * i128::from(axis.to));
        let (mut low, mut high) = (0, i128::from(self.row));
        steps.for_each(|step| if step < 0 { low += step } else { high += step });
        low..high
    }

    /// Whether each axis steps over all that shorter steps reach. If so, no byte of memory belongs to two rows.
    #[must_use]
    pub fn is_nested(&self) -> bool {
        let mut axes = self.axes.clone();
        axes.sort_by_key(|axis| axis.to.unsigned_abs());
        let mut reach = i128::from(self.row);
        axes.iter().all(|axis| {
            let (step, before) = (i128::from(axis.to).abs(), reach);
            reach += step * i128::from(axis.count - 1);
            step >= before
        })
    }

    /// The same box in longer rows: rows that follow each other in the tensor with at most `gap` bytes between them
    /// become one.
    #[must_use]
    pub fn joined(&self, gap: u64) -> Self {
        let (mut row, mut outer) = (self.row, self.axes.len());
        while let Some(axis) = outer.checked_sub(1).map(|at| self.axes[at]).filter(|a| a.from <= row + gap) {
            row += (axis.count - 1) * axis.from;
            outer -= 1;
        }
        Self { first: self.first, row, axes: self.axes[..outer].to_vec() }
    }

    /// The parts of the rows in `range` of the tensor, in order.
    pub fn lines(&self, range: Range<u64>) -> impl Iterator<Item = Line> {
        let mut next = Some(self.seek(range.start));
        let inner = self.axes.last().copied().unwrap_or(Axis { count: 1, from: self.row, to: 0 });
        let line = move || {
            let index = next.as_mut()?;
            let places = || index.iter().zip(&self.axes);
            let at = self.first + places().map(|(&i, axis)| i * axis.from).sum::<u64>();
            let to = places().map(|(&i, axis)| i.cast_signed() * axis.to).sum::<i64>();
            if at >= range.end {
                return None;
            }
            let skip = range.start.saturating_sub(at).min(self.row);
            let len = (range.end - at).min(self.row) - skip;
            let left = inner.count - index.last().copied().unwrap_or(0);
            let more = if len == self.row { (range.end - at - len) / inner.from } else { 0 };
            let count = left.min(more + 1);
            if !self.advance(index, count) {
                next = None;
            }
            Some(Line { at: at + skip, to: to + skip.cast_signed(), len, count, step: inner })
        };
        // A row that ends before the range has no bytes in it.
        std::iter::from_fn(line).filter(|line| line.len > 0)
    }

    /// Copies the bytes of the rows in `bytes` to `to`, one after another. `bytes` starts at byte `start` of the
    /// tensor.
    ///
    /// # Panics
    /// If `to` is not exactly as long as the copied bytes.
    pub fn pack(&self, start: u64, bytes: &[u8], mut to: &mut [u8]) {
        for line in self.lines(start..start + bytes.len() as u64) {
            for (at, _) in line.rows() {
                let at = (at - start) as usize;
                let (front, rest) = to.split_at_mut(line.len as usize);
                front.copy_from_slice(&bytes[at..at + line.len as usize]);
                to = rest;
            }
        }
        assert!(to.is_empty(), "{} bytes too few", to.len());
    }

    /// The contiguous stretches of memory with the bytes of the rows in `range` of the tensor: the first byte and the
    /// length of each, in the tensor's order. The first row of the box begins at byte `base`.
    #[must_use]
    pub fn runs(&self, base: u64, range: Range<u64>) -> Vec<(u64, usize)> {
        let mut runs: Vec<(u64, usize)> = Vec::new();
        for line in self.lines(range) {
            for (_, to) in line.rows() {
                let place = base.wrapping_add_signed(to);
                match runs.last_mut() {
                    Some((first, len)) if *first + *len as u64 == place => *len += line.len as usize,
                    _ => runs.push((place, line.len as usize)),
                }
            }
        }
        runs
    }

    /// The number of bytes of the rows in `range` of the tensor. The rows must be in the order of the tensor.
    #[must_use]
    pub fn bytes_in(&self, range: &Range<u64>) -> u64 {
        let below = |at: u64| {
            let (mut rest, mut inner) = (at.saturating_sub(self.first), self.bytes());
            let mut below = 0;
            for axis in &self.axes {
                inner /= axis.count;
                let i = rest / axis.from;
                if i >= axis.count {
                    return below + axis.count * inner;
                }
                below += i * inner;
                rest -= i * axis.from;
            }
            below + rest.min(self.row)
        };
        below(range.end) - below(range.start)
    }

    /// The axis around the innermost one, or a single index if there is no such axis.
    fn outer(&self) -> Axis {
        let outer = self.axes.len().checked_sub(2).map(|at| self.axes[at]);
        outer.unwrap_or(Axis { count: 1, from: 0, to: 0 })
    }

    /// Whether `line` belongs to a band to transpose, after the `count` lines from `first` on. In such a band,
    /// neighbouring rows of a line are further apart in memory than neighbouring lines.
    fn crosses(&self, first: &Line, count: u64, line: &Line) -> bool {
        let outer = self.outer();
        line.len.is_power_of_two()
            && line.len <= 16
            && count < CACHE_LINE as u64
            && outer.to.unsigned_abs() < line.step.to.unsigned_abs()
            && (line.len, line.count) == (first.len, first.count)
            && line.at == first.at + count * outer.from
            && line.to == first.to + count.cast_signed() * outer.to
    }

    /// The index of the last row that starts at or before byte `at` of the tensor, or of the first row.
    fn seek(&self, at: u64) -> Vec<u64> {
        let mut rest = at.saturating_sub(self.first);
        let place = |axis: &Axis| {
            let i = (rest / axis.from).min(axis.count - 1);
            rest -= i * axis.from;
            i
        };
        self.axes.iter().map(place).collect()
    }

    /// Advances by `count` rows of the innermost axis, none of them beyond its end. Returns whether more rows follow.
    fn advance(&self, index: &mut [u64], count: u64) -> bool {
        let mut step = count;
        for (i, axis) in index.iter_mut().zip(&self.axes).rev() {
            *i += step;
            if *i < axis.count {
                return true;
            }
            (*i, step) = (0, 1);
        }
        false
    }
}

/// Writable memory of the caller for a box of a tensor, or for the part of the box in a range of the tensor.
#[derive(Debug)]
pub struct Strided {
    /// The first element of the box, or of the array if `array` is set.
    base: *mut u8,
    rows: Arc<Rows>,
    /// The range of the tensor.
    range: Range<u64>,
    /// Set if the rows are in an array with its own strides: the position of the box's first element among the array's
    /// bytes in the array's order, and the places of these bytes in memory.
    array: Option<(u64, Arc<Rows>)>,
}

// SAFETY: the caller of `new` promised exclusive access from any thread.
unsafe impl Send for Strided {}
// SAFETY: nothing is read or written through a shared reference.
unsafe impl Sync for Strided {}

impl Strided {
    /// Exclusive access to the rows, the first of which starts at `base`.
    ///
    /// # Safety
    /// Until this and everything made from it are gone, each row must be memory that is writable from any thread, no
    /// byte of it may belong to two rows, and nothing else may read or write it.
    #[must_use]
    pub unsafe fn new(base: *mut u8, rows: Arc<Rows>) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::inside(base, rows, None) }
    }

    /// Exclusive access to the rows of an array.
    ///
    /// # Safety
    /// The contract of `new`, for the array's memory of the rows. All rows must be in the array.
    pub(super) unsafe fn inside(base: *mut u8, rows: Arc<Rows>, array: Option<(u64, Arc<Rows>)>) -> Self {
        let range = rows.range();
        Self { base, rows, range, array }
    }

    /// The memory as a single region, if it is one contiguous stretch with exactly the bytes in the range.
    pub fn alone(self) -> Result<Region, Self> {
        let line = self.rows.lines(self.range.clone()).next();
        let whole = |line: &Line| self.array.is_none() && line.len == self.range.end - self.range.start;
        let Some(Line { to, len, .. }) = line.filter(whole) else { return Err(self) };
        // SAFETY: the contract of `new`, and this consumes `self`.
        Ok(unsafe { Region::new(self.base.wrapping_offset(to as isize), len as usize) })
    }

    /// Fills the rows from `bytes`, which has the bytes of all rows one after another.
    ///
    /// # Panics
    /// If `bytes` has fewer or more bytes than the rows.
    pub fn unpack(&mut self, mut bytes: &[u8]) {
        for line in self.rows.lines(self.range.clone()) {
            for (_, to) in line.rows() {
                let (row, rest) = bytes.split_at(line.len as usize);
                self.put_row(to, row);
                bytes = rest;
            }
        }
        assert!(bytes.is_empty(), "{} bytes too many", bytes.len());
    }

    /// Copies one row, or the rest of one, to its place in memory.
    fn put_row(&self, to: i64, row: &[u8]) {
        let copy = |to: i64, from: &[u8]| {
            let to = self.base.wrapping_offset(to as isize);
            // SAFETY: by the contract of `new`, this has exclusive access to the row's memory.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        };
        let Some((first, array)) = &self.array else { return copy(to, row) };
        let start = first.wrapping_add_signed(to);
        for line in array.lines(start..start + row.len() as u64) {
            for (at, to) in line.rows() {
                let at = (at - start) as usize;
                copy(to, &row[at..at + line.len as usize]);
            }
        }
    }

    /// The rows.
    #[must_use]
    pub fn rows(&self) -> &Arc<Rows> {
        &self.rows
    }

    /// The range of the tensor from the first byte to the last, or a longer range.
    #[must_use]
    pub const fn range(&self) -> &Range<u64> {
        &self.range
    }

    /// Splits off the part in `range` of the tensor. `self` keeps the part after it.
    #[must_use]
    pub fn split_off(&mut self, range: Range<u64>) -> Self {
        let end = range.end.clamp(self.range.start, self.range.end);
        let range = range.start.clamp(self.range.start, end)..end;
        self.range.start = end;
        Self { base: self.base, rows: Arc::clone(&self.rows), range, array: self.array.clone() }
    }

    /// Each row, with the place in the tensor at which the row starts.
    ///
    /// # Panics
    /// If the rows are in an array.
    pub fn regions(self) -> impl Iterator<Item = (u64, Region)> {
        let Self { base, rows, range, array } = self;
        assert!(array.is_none(), "a row in an array need not be contiguous");
        let lines: Vec<Line> = rows.lines(range).collect();
        lines.into_iter().flat_map(move |line| {
            line.rows().map(move |(at, to)| {
                // SAFETY: the contract of `new`, and each row is handed out once, because this consumes `self`.
                (at, unsafe { Region::new(base.wrapping_offset(to as isize), line.len as usize) })
            })
        })
    }

    /// Copies its part of `bytes` to each row. `bytes` starts at byte `start` of the tensor. Returns the number of
    /// bytes copied.
    ///
    /// # Panics
    /// If `bytes` starts after the wanted range or ends before it does.
    pub fn fill(&mut self, start: u64, bytes: &[u8]) -> u64 {
        let (end, range) = (start + bytes.len() as u64, self.range.clone());
        let inside = start <= range.start && range.end <= end;
        assert!(inside || range.is_empty(), "{start}..{end} of {range:?}");
        let mut copied = 0;
        if self.array.is_some() {
            for line in self.rows.lines(range) {
                for (at, to) in line.rows() {
                    let at = (at - start) as usize;
                    self.put_row(to, &bytes[at..at + line.len as usize]);
                }
                copied += line.count * line.len;
            }
            return copied;
        }
        let mut band: Option<(Line, u64)> = None;
        for line in self.rows.lines(range) {
            copied += line.count * line.len;
            band = match band {
                Some((first, count)) if self.rows.crosses(&first, count, &line) => Some((first, count + 1)),
                other => {
                    other.inspect(|band| self.put(start, bytes, band));
                    Some((line, 1))
                }
            };
        }
        band.inspect(|band| self.put(start, bytes, band));
        copied
    }

    /// Copies the lines of a band from `bytes`.
    fn put(&self, start: u64, bytes: &[u8], (first, count): &(Line, u64)) {
        let from = bytes[(first.at - start) as usize..].as_ptr();
        let to = self.base.wrapping_offset(first.to as isize);
        let outer = Axis { count: *count, ..self.rows.outer() };
        let copy = match first.len {
            1 => copy::<1>,
            2 => copy::<2>,
            4 => copy::<4>,
            8 => copy::<8>,
            16 => copy::<16>,
            _ => copy_long,
        };
        // SAFETY: the lines lie in `range`, and so in `bytes`. By the contract of `new`, this has exclusive access to
        // the memory.
        unsafe { copy(first, outer, from, to) };
    }
}

/// Size in bytes of a line of the processor's cache.
const CACHE_LINE: usize = 64;

/// Copies rows of `N` bytes. Their length is known, so a row takes one or two moves. Several lines form a band, which
/// is transposed tile by tile: each cache line is read once and written once, whatever the steps between lines.
///
/// # Safety
/// The first line must start at `from` in readable memory and at `to` in writable memory, which must not overlap.
/// Further lines are `outer` apart.
unsafe fn copy<const N: usize>(line: &Line, outer: Axis, from: *const u8, to: *mut u8) {
    let inner = line.step;
    let at = |i: u64, j: u64| from.wrapping_add((i * outer.from + j * inner.from) as usize);
    let place = |i: u64, j: u64| {
        to.wrapping_offset((i.cast_signed() * outer.to + j.cast_signed() * inner.to) as isize)
    };
    if outer.count == 1 {
        for j in 0..line.count {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(at(0, j), place(0, j), N) };
        }
        return;
    }
    let side = (CACHE_LINE / N) as u64;
    let mut tile = [[0; N]; CACHE_LINE * CACHE_LINE];
    let tiles =
        |count: u64| (0..count).step_by(side as usize).map(move |first| first..count.min(first + side));
    for (columns, rows) in
        tiles(line.count).flat_map(|columns| tiles(outer.count).map(move |rows| (columns.clone(), rows)))
    {
        for (i, row) in rows.clone().zip(0..) {
            for (j, column) in columns.clone().zip(0..) {
                let element: &mut [u8; N] = &mut tile[column * side as usize + row];
                // SAFETY: the caller's promise; the element is N bytes long.
                unsafe { std::ptr::copy_nonoverlapping(at(i, j), element.as_mut_ptr(), N) };
            }
        }
        for (j, column) in columns.zip(0..) {
            for (i, row) in rows.clone().zip(0..) {
                let element = &tile[column * side as usize + row];
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(element.as_ptr(), place(i, j), N) };
            }
        }
    }
}

/// Copies rows of any length.
///
/// # Safety
/// The contract of `copy`, with only one line.
unsafe fn copy_long(line: &Line, _: Axis, from: *const u8, to: *mut u8) {
    for (at, place) in line.rows() {
        let (from, to) =
            (from.wrapping_add((at - line.at) as usize), to.wrapping_offset((place - line.to) as isize));
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, line.len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of three elements of `row` bytes, laid out column by column and backwards.
    fn rows(row: u64) -> Arc<Rows> {
        let axes = [(2, 4 * row, row.cast_signed()), (3, row, -2 * row.cast_signed())];
        Arc::new(Rows::new(row, row, axes.into_iter().map(|(count, from, to)| Axis { count, from, to })))
    }

    #[test]
    fn rows_are_filled_in_pieces_of_any_length() {
        for row in [1u64, 2, 3, 4, 8, 16, 24] {
            let size = row as usize;
            let bytes: Vec<u8> = (0..8 * size).map(|byte| byte as u8 + 1).collect();
            let element = |at: usize| &bytes[at * size..(at + 1) * size];
            let expected = [3, 7, 2, 6, 1, 5].map(element).concat();
            for piece in 1..=8 * row {
                let mut memory = vec![0; 6 * size];
                let base = memory[4 * size..].as_mut_ptr();
                // SAFETY: `memory` has the six elements, and is not touched before all is dropped.
                let mut all = unsafe { Strided::new(base, rows(row)) };
                let mut copied = 0;
                for start in (0..8 * row).step_by(piece as usize) {
                    let end = (start + piece).min(8 * row);
                    copied += all.split_off(start..end).fill(start, &bytes[start as usize..end as usize]);
                }
                assert_eq!((copied, &memory), (6 * row, &expected), "rows of {row} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn each_row_is_a_region() {
        let mut memory = [0u8; 24];
        // SAFETY: as above.
        let strided = unsafe { Strided::new(memory[16..].as_mut_ptr(), rows(4)) };
        let starts: Vec<u64> = strided
            .regions()
            .map(|(start, mut region)| {
                region.fill(start as u8);
                start
            })
            .collect();
        assert_eq!(starts, [4, 8, 12, 20, 24, 28]);
        assert_eq!(memory.iter().step_by(4).copied().collect::<Vec<_>>(), [12, 28, 8, 24, 4, 20]);
    }

    #[test]
    #[should_panic(expected = "1..5 of 4..32")]
    fn bytes_that_are_too_few_fill_nothing() {
        let mut memory = [0u8; 24];
        // SAFETY: as above.
        let mut strided = unsafe { Strided::new(memory[16..].as_mut_ptr(), rows(4)) };
        strided.fill(1, &[0; 4]);
    }
}
