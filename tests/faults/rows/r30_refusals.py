"""A machine that refuses system calls, memory or files."""

import sys
from functools import partial

from faults import of_tests
from faults.of_tests import row
from faults.row import Row

#: Tests that depend on the backend, the user or the home directory, except tests that are in this row, run on several
#: ranks, or need a file system of their own.
SUITE = (
    *(f"tests/core/test_{name}.py" for name in ("border", "commit_protocol", "from_device", "layers", "rank_engines")),
    "tests/api",
    "tests/stores/test_stored_checkpoints.py",
    *(f"tests/background/test_{name}.py" for name in ("async", "background_unit", "lazy", "programs")),
    *(
        f"tests/manager/test_{name}.py"
        for name in (
            "branches",
            "checkpoints",
            "discard_newer",
            "links",
            "manager",
            "manager_unit",
            "policies",
            "preemption",
        )
    ),
)


def suite(kind: str, fault: str) -> Row:
    """Return the row of the tests on a restricted machine. Tests that need what it refuses are skipped, and counted."""
    under = (sys.executable, "-m", "harness.refused", kind, "--")
    options = ("-n", "2", "--dist", "worksteal")
    return Row(
        30,
        f"the tests: {kind}",
        "The tests of saves, loads, managers and saves in the background pass despite the restriction.",
        fault,
        "the same tests pass where nothing is refused",
        run=partial(of_tests.run, SUITE, options, under=under),
        fast=0,
        nightly=1,
    )


ROWS = [
    suite("EPERM", "io_uring_setup returns EPERM, by seccomp"),
    suite("ENOSYS", "io_uring_setup returns ENOSYS, by seccomp"),
    suite("user", "an ordinary user without capabilities, RLIMIT_MEMLOCK 0, a read-only home"),
    Row(
        30,
        "no io_uring",
        "If the kernel refuses io_uring, threads write, and the report says so once.",
        "seccomp (EPERM, ENOSYS), locked memory, ordinary users",
        "without a refusal, io_uring is used",
        **row(("tests/core/test_fallback.py",)),
    ),
    Row(
        31,
        "other file systems",
        "Saves work on each of these file systems, with direct I/O or without, and survive kills.",
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
        "Machines that share an NFS server see whole checkpoints, and sweep only leftovers of dead savers.",
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
