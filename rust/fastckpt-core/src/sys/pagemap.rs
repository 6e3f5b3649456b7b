//! Finds out which memory of this process is in huge pages. The kernel hands a device far longer stretches of such
//! memory.

use std::fs::File;
use std::os::fd::AsRawFd;

use super::page;

/// `PAGEMAP_SCAN` of linux/fs.h, since 6.7: `_IOWR('f', 16, struct pm_scan_arg)`.
const SCAN: libc::c_ulong = 0xC060_6610;
/// The category of pages that are mapped as huge pages.
const HUGE: u64 = 1 << 6;
/// Stretches that one call returns. Memory split into more of them is not memory in huge pages.
const STRETCHES: usize = 16;
/// Memory counts as huge when at least this percentage of it is. Its edges rarely are.
const MOSTLY: u64 = 75;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Stretch {
    start: u64,
    end: u64,
    _categories: u64,
}

/// The page map of the process that opened it.
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens it; `None` where /proc is not available.
    #[must_use]
    pub fn open() -> Option<Self> {
        File::open("/proc/self/pagemap").ok().map(Self)
    }

    /// Whether most of the `len` bytes at `address` are in huge pages; `None` if the kernel does not report it.
    #[must_use]
    pub fn is_huge(&self, address: usize, len: usize) -> Option<bool> {
        let pages = page::around(address..address + len, page::size());
        let (start, end) = (pages.start as u64, pages.end as u64);
        let mut stretches = [Stretch::default(); STRETCHES];
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start,
            end,
            walk_end: 0,
            vec: stretches.as_mut_ptr().expose_provenance() as u64,
            vec_len: STRETCHES as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: HUGE,
            category_anyof_mask: 0,
            return_mask: HUGE,
        };
        // SAFETY: the kernel reads and writes one `ScanArgument` and at most `STRETCHES` stretches. Both live through
        // the call and have the layout that it expects (a size that it does not know is an error). It only looks at the
        // memory that `start` and `end` name.
        let found = unsafe { libc::ioctl(self.0.as_raw_fd(), SCAN, &raw mut argument) };
        let found = stretches.get(..usize::try_from(found).ok()?)?;
        let huge: u64 = found.iter().map(|stretch| stretch.end - stretch.start).sum();
        Some(huge * 100 >= (end - start) * MOSTLY)
    }
}

/// Whether most of the `len` bytes at `address` are in huge pages; false if that is unknown.
#[must_use]
pub fn is_huge(map: Option<&PageMap>, address: usize, len: usize) -> bool {
    map.and_then(|map| map.is_huge(address, len)) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::super::mapping::Mapping;
    use super::*;

    #[test]
    fn slabs_are_huge_and_memory_that_nobody_touched_is_not() {
        let Some(map) = PageMap::open() else { return };
        let slab = Mapping::populated(8 << 20).unwrap();
        let Some(huge) = map.is_huge(slab.as_ptr().addr(), slab.len()) else { return };
        let setting =
            std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !setting.contains("[never]") && !setting.is_empty() {
            assert!(huge, "{setting}");
        }
        // Memory that nothing has touched is in no page at all.
        let untouched = Vec::<u8>::with_capacity(8 << 20);
        assert_eq!(map.is_huge(untouched.as_ptr().addr(), untouched.capacity()), Some(false));
    }
}
