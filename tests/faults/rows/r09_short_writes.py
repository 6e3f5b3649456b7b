"""Writes that move fewer bytes than requested."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        9,
        "short writes",
        "A save completes a short write, or raises; it never mistakes a part for the whole.",
        "RLIMIT_FSIZE, full disks, and byte counts that strace shortens, with each engine",
        "the trace shows the short count",
        **row(
            (
                "tests/api/test_errors.py::test_true_short_write",
                "tests/api/test_errors.py::test_true_short_write_of_a_full_disk",
                "tests/api/test_errors.py::test_short_count_is_gone_on_from",
                "tests/api/test_errors.py::test_short_tail_is_gone_on_from",
            )
        ),
        mutants=("completion-length",),
    ),
    Row(
        11,
        "full disk",
        "A save on a full disk raises ENOSPC with its path, removes its own files, and keeps the old checkpoint.",
        "small ext4, XFS, btrfs and tmpfs, full up to the last pages",
        "the next save, with room, succeeds",
        **row(
            (
                "tests/api/test_errors.py::test_disk_full",
                "tests/api/test_errors.py::test_disk_full_at_the_last_pages",
            )
        ),
    ),
]
