"""Signals, forks, and saves in the background."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        23,
        "preemption",
        "A preempted run saves within its grace period, or abandons the save cleanly, and passes the signal on.",
        "SIGTERM and other signals in saves, evaluations and waits",
        "without a signal, the run continues",
        **row(("tests/manager/test_preemption.py",)),
    ),
    Row(
        24,
        "failures in the background",
        "The failure of a save in the background is raised by the next call, or printed at exit.",
        "storage errors in the background",
        "the same save succeeds when repeated",
        **row(
            (
                "tests/background/test_async.py::test_a_failure_comes_out_of_result_and_the_save_can_be_repeated",
                "tests/background/test_async.py::test_an_unseen_failure_is_raised_by_the_next_save",
                "tests/background/test_async.py::test_each_failure_is_raised_once_and_no_save_is_lost",
                "tests/background/test_programs.py::test_an_unseen_failure_is_printed_at_exit",
                "tests/background/test_programs.py::test_a_failure_is_told_when_it_happens_and_at_the_end",
            )
        ),
    ),
    Row(
        25,
        "snapshots",
        "A save in the background saves the values at the call.",
        "every tensor is changed right after the call",
        "the changed values differ",
        **row(
            (
                "tests/background/test_async.py::test_what_was_there_at_the_call_is_saved",
                "tests/background/test_async.py::test_torch_states_come_back_whole",
            )
        ),
    ),
    Row(
        28,
        "forks",
        "A forked child disturbs no other process, and can save by itself.",
        "forks before, during and after saves",
        "the child saves and loads",
        **row(
            (
                "tests/core/test_commit.py::test_fork_after_use",
                "tests/core/test_pressure.py::test_a_child_forked_during_a_save_keeps_none_of_its_descriptors",
                "tests/background/test_programs.py::test_a_forked_child_has_no_saves_in_flight",
            )
        ),
    ),
]
