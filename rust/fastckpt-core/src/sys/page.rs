//! Memory pages: 4 KiB on most machines, 16 or 64 KiB on some aarch64 machines. `madvise` and similar calls refuse
//! ranges that are not whole pages. Files are different: their unit is [`super::file::PAGE`] everywhere.

use std::ops::Range;

/// Size in bytes of a memory page on this machine.
#[must_use]
pub fn size() -> usize {
    // SAFETY: the call only returns a number.
    let answer = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(answer).unwrap_or(4096)
}

/// The whole pages of `page` bytes inside `range`; empty if there are none.
#[must_use]
pub const fn inside(range: Range<usize>, page: usize) -> Range<usize> {
    let (start, end) = (range.start.next_multiple_of(page), range.end - range.end % page);
    if start < end { start..end } else { start..start }
}

/// The pages of `page` bytes that `range` touches.
#[must_use]
pub const fn around(range: Range<usize>, page: usize) -> Range<usize> {
    range.start - range.start % page..range.end.next_multiple_of(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_agrees_on_the_size() {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let line = smaps.lines().find(|line| line.starts_with("KernelPageSize:")).unwrap();
        let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_eq!(size(), kib << 10);
    }

    #[test]
    fn ranges_are_rounded_to_pages_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            assert_eq!(inside(page..3 * page, page), page..3 * page);
            assert_eq!(inside(64..3 * page + 64, page), page..3 * page);
            assert_eq!(inside(page - 1..2 * page - 1, page), page..page);
            assert_eq!(inside(64..page - 64, page), page..page);
            assert_eq!(around(page..3 * page, page), page..3 * page);
            assert_eq!(around(page + 64..2 * page + 1, page), page..3 * page);
            assert_eq!(around(64..65, page), 0..page);
            // File data begins at multiples of 4096, which are not page boundaries on every machine.
            let file = 4096 + 64..(5 << 20) + 64;
            let (inner, outer) = (inside(file.clone(), page), around(file.clone(), page));
            for edge in [inner.start, inner.end, outer.start, outer.end] {
                assert!(edge.is_multiple_of(page));
            }
            assert!(
                outer.start <= file.start && file.start <= inner.start && inner.start - outer.start <= page
            );
            assert!(inner.end <= file.end && file.end <= outer.end && outer.end - inner.end <= page);
        }
    }
}
