"""SIGKILL at every system call."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        2,
        "kills at system calls",
        "A named checkpoint is whole, old or new, and the next save removes all leftovers.",
        "SIGKILL at the k-th system call of each kind, for all k: saves, removals, base=, files=, copies",
        "the count ends when a save survives its k; the calls that it must include are listed",
        **row(
            (
                "tests/core/test_commit.py::test_kill_during_a_first_save",
                "tests/core/test_commit.py::test_kill_during_an_overwrite",
                "tests/core/test_commit.py::test_kill_at_every_system_call",
                "tests/core/test_commit.py::test_kill_during_a_removal_at_every_system_call",
                "tests/core/test_commit.py::test_kill_with_a_base_at_every_system_call",
                "tests/core/test_commit.py::test_kill_with_files_at_every_system_call",
                "tests/copies/test_copy_kills.py",
            )
        ),
    ),
]
