"""Each system call fails in turn."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        3,
        "failing calls",
        "A save succeeds, or raises with path and errno and keeps the old checkpoint; it leaves nothing behind.",
        "EIO or ENOSPC from the k-th system call of each kind, for all k",
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
        "A save succeeds despite errors that are not failures.",
        "EINTR, EAGAIN, EBUSY from io_uring_enter and other calls; no fallocate",
        "the trace shows that the error was injected",
        **row(("tests/core/test_commit.py::test_what_is_no_failure_is_invisible",)),
    ),
]
