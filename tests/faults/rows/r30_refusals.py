"""A machine that refuses."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        30,
        "no io_uring",
        "Where the kernel refuses a ring, threads write, and the report says so once.",
        "seccomp (EPERM, ENOSYS), locked memory, ordinary users",
        "without a refusal the ring runs",
        **row(("tests/core/test_fallback.py",)),
    ),
    Row(
        31,
        "other file systems",
        "Each file system that is here takes saves, with direct I/O or without, and survives kills.",
        "ramfs, tmpfs, overlay, FUSE, ext4, XFS, btrfs",
        "the same on the disk of the machine",
        **row(
            (
                "tests/core/test_fallback.py::test_round_trip_on_every_file_system",
                "tests/core/test_commit.py::test_kills_on_other_file_systems",
            )
        ),
    ),
    Row(
        32,
        "two machines",
        "Machines of one NFS see whole checkpoints, and sweep only the dead.",
        "two clients of a real NFS server in user-mode Linux, or of one FUSE mount",
        "the rivals commit alone",
        **row(
            (
                "tests/core/test_nfs.py",
                "tests/core/test_fuse.py",
            )
        ),
    ),
]
