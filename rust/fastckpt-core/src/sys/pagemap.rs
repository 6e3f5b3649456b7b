//! Finds out which memory of this process is in huge pages. The kernel gives a device far longer stretches of such
//! memory.

use std::fs::{File, read_to_string};
use std::ops::Range;
use std::os::fd::AsRawFd;

use super::page;

/// `PAGEMAP_SCAN` of linux/fs.h, since 6.7: `_IOWR('f', 16, struct pm_scan_arg)`.
const SCAN: libc::c_ulong = 0xC060_6610;
/// The category of pages that are mapped as huge pages.
const HUGE: u64 = 1 << 6;
/// The most stretches that one call returns. Memory in more stretches does not count as memory in huge pages.
const STRETCHES: usize = 16;
/// Memory counts as huge if at least this percentage of it is in huge pages. The edges rarely are.
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

/// Pages of this size are large enough: a request to a device has room for 254 pages, about a block.
const LARGE: usize = 16 << 10;

/// What is known about the memory of the calling process.
#[derive(Debug)]
pub enum PageMap {
    /// All pages are large, so no query is needed.
    Large,
    /// The kernel is queried for each range.
    Scanned(File),
    /// The memory that was in large pages or advised to be in large pages when the kernel listed it.
    Listed(Vec<Range<usize>>),
}

impl PageMap {
    /// Opens the kernel's map. Linux before 6.7 has no query for a range, so this reads the list of all memory once,
    /// which takes 0.02 s of processor time for each GB in small pages. Memory that a load is about to fill is in no
    /// page at that time, but `load` requests huge pages for its tensors, as the core does for snapshots.
    #[must_use]
    pub fn open() -> Self {
        if page::size() >= LARGE {
            return Self::Large;
        }
        let map = File::open("/proc/self/pagemap").ok();
        let map = map.filter(|map| scan(map, &(0..page::size())).is_some());
        map.map_or_else(|| Self::Listed(listed()), Self::Scanned)
    }

    /// Whether most of the `len` bytes at `address` are in huge pages; false if that is unknown.
    #[must_use]
    pub fn is_huge(&self, address: usize, len: usize) -> bool {
        let pages = page::around(address..address + len, page::size());
        let huge = match self {
            Self::Large => return true,
            Self::Scanned(map) => scan(map, &pages).unwrap_or(0),
            Self::Listed(all) => {
                let shared =
                    |one: &Range<usize>| one.end.min(pages.end).saturating_sub(one.start.max(pages.start));
                all.iter().map(|one| shared(one) as u64).sum()
            }
        };
        huge * 100 >= (pages.end - pages.start) as u64 * MOSTLY
    }
}

/// Memory in large pages, according to the kernel's list.
fn listed() -> Vec<Range<usize>> {
    let setting = read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let granted = setting.is_ok_and(|setting| !setting.contains("[never]"));
    read_to_string("/proc/self/smaps").map_or_else(|_| Vec::new(), |smaps| large(&smaps, granted))
}

/// Memory in large pages, from a text in the format of `/proc/self/smaps`. `granted` is whether the kernel gives huge
/// pages on request.
fn large(smaps: &str, granted: bool) -> Vec<Range<usize>> {
    let (mut all, mut range, mut present) = (Vec::new(), 0..0, 0);
    for (word, rest) in smaps.lines().filter_map(|line| line.split_once(' ')) {
        let kib = || rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
        let is_large = match word {
            "Rss:" => {
                present = kib();
                false
            }
            "KernelPageSize:" => kib() << 10 >= LARGE as u64,
            "AnonHugePages:" => present > 0 && kib() * 100 >= present * MOSTLY,
            "VmFlags:" => granted && rest.split(' ').any(|flag| flag == "hg"),
            _ => {
                if let Some((start, end)) = word.split_once('-') {
                    let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap_or(0));
                    range = start..end;
                }
                false
            }
        };
        if is_large && all.last() != Some(&range) {
            all.push(range.clone());
        }
    }
    all
}

/// How many bytes of these pages are in huge pages; `None` if the kernel does not report it.
fn scan(map: &File, pages: &Range<usize>) -> Option<u64> {
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
    // SAFETY: the kernel reads and writes one `ScanArgument` and at most `STRETCHES` stretches. Both live through the
    // call and have the layout that it expects (it refuses an unknown size). It only inspects the memory between
    // `start` and `end`.
    let found = unsafe { libc::ioctl(map.as_raw_fd(), SCAN, &raw mut argument) };
    let found = stretches.get(..usize::try_from(found).ok()?)?;
    let huge: u64 = found.iter().map(|stretch| stretch.end - stretch.start).sum();
    Some(huge)
}

#[cfg(test)]
mod tests {
    use super::super::mapping::Mapping;
    use super::*;

    #[test]
    fn slabs_are_huge_and_memory_that_nobody_touched_is_not() {
        let setting = read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        let slab = Mapping::populated(8 << 20).unwrap();
        // Memory that was never touched is in no page at all.
        let untouched = Vec::<u8>::with_capacity(8 << 20);
        for map in [PageMap::open(), PageMap::Listed(listed())] {
            if !setting.contains("[never]") && !setting.is_empty() {
                assert!(map.is_huge(slab.as_ptr().addr(), slab.len()), "{setting}");
            }
            let large = matches!(map, PageMap::Large) || setting.contains("[always]");
            assert!(large || !map.is_huge(untouched.as_ptr().addr(), untouched.capacity()));
        }
    }

    const SMAPS: &str = "\
10000-20000 rw-p 00000000 00:00 0
Rss:                  64 kB
KernelPageSize:        4 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac hg
20000-30000 rw-p 00000000 00:00 0    [heap]
Rss:                  64 kB
KernelPageSize:        4 kB
AnonHugePages:        48 kB
VmFlags: rd wr mr mw me ac
30000-40000 rw-p 00000000 00:00 0
Rss:                   0 kB
KernelPageSize:        4 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
40000-60000 rw-s 00000000 00:0f 7    /anon_hugepage (deleted)
Rss:                   0 kB
KernelPageSize:     2048 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac ht
";

    #[test]
    fn before_linux_6_7_memory_is_large_that_is_or_was_asked_to_be() {
        assert_eq!(large(SMAPS, true), [0x10000..0x20000, 0x20000..0x30000, 0x40000..0x60000]);
        assert_eq!(large(SMAPS, false), [0x20000..0x30000, 0x40000..0x60000]);
        let map = PageMap::Listed(large(SMAPS, false));
        assert!(map.is_huge(0x20000, 0x10000) && !map.is_huge(0x18000, 0x10000), "only half of it is huge");
        assert!(map.is_huge(0x1e000, 0x12000) && !map.is_huge(0x30000, 0x10000), "its edge");
        assert!(PageMap::Large.is_huge(0x30000, 1));
    }
}
