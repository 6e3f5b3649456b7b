"""Each system call fails."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        3,
        "failing calls",
        "A save raises, with path and errno, or has saved; the old checkpoint stays; nothing is left behind.",
        "EIO or ENOSPC from the k-th call of each kind, for all k",
        "the trace shows that the error was injected",
        **row(
            (
                "tests/core/test_commit.py::test_every_system_call_failing_once",
                "tests/core/test_commit.py::test_parent_that_cannot_be_made_or_synced",
            )
        ),
        mutants=("failed-write", "failed-sync"),
    ),
    Row(
        10,
        "busy rings",
        "What is no failure is invisible: the save succeeds.",
        "EINTR, EAGAIN, EBUSY from io_uring_enter and others; no fallocate",
        "the trace shows that the error was injected",
        **row(("tests/core/test_commit.py::test_what_is_no_failure_is_invisible",)),
    ),
]
