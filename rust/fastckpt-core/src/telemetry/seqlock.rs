//! Fields that belong together, for readers that copy them twice (`docs/telemetry.md`, 6). They have one writer.

use crate::sys::sync::Ordering::{Relaxed, Release};
use crate::sys::sync::{AtomicU64, fence};

/// Makes the fields invalid until the next [`write`]. Returns their number, which is odd.
pub(super) fn open(number: &AtomicU64) -> u64 {
    let odd = number.load(Relaxed) | 1;
    number.store(odd, Relaxed);
    fence(Release); // the odd number is stored before the fields
    odd
}

/// Changes the fields, which may be open. Copies with the same even number come from one write.
pub(super) fn write(number: &AtomicU64, change: impl FnOnce()) {
    let odd = open(number);
    change();
    number.store(odd.wrapping_add(1), Release); // the even number is stored after them
}

/// Changes the fields, which belong to `mark` afterwards. Copies with the same nonzero mark come from one write.
pub(super) fn hand_over(mark: &AtomicU64, to: u64, change: impl FnOnce()) {
    mark.store(0, Release);
    fence(Release);
    change();
    mark.store(to, Release);
}
