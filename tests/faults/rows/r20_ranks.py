"""Ranks that are killed, stopped, late or missing."""

from functools import partial

from faults import of_tests
from faults.of_tests import row
from faults.row import Row, Run


def _groups(run: Run) -> None:
    from faults import groups_that_go_on  # torch takes seconds

    groups_that_go_on.campaign(run)


ROWS = [
    Row(
        20,
        "struck ranks",
        "If a rank is killed or stopped, the others get an error in time; the path holds the old or the new checkpoint;"
        " the next save works.",
        "SIGKILL and SIGSTOP of a rank at each named step of a save or load",
        "the rank reports that it was hit",
        **row(("tests/ranks/test_faults.py",)),
    ),
    Row(
        20,
        "simulated ranks",
        "All ranks get the same verdict, in time; errors name the failure; the next operation works.",
        "random delays, deaths, stops, losses, late ranks and pauses of the store, on a virtual clock",
        "if a rule of the protocol is switched off, some run breaks a promise",
        run=partial(of_tests.run, ("tests/ranks/test_simulated.py",), ("-n", "2", "--dist", "worksteal")),
        fast=0,
        nightly=1,
    ),
    Row(
        20,
        "groups",
        "After a fault, the next calls of the group succeed on all ranks.",
        "a rank misses a call, fails, leaves or stops, or the store stops; at random entry points",
        "the calls before the fault succeed; each save that was reported exists",
        run=_groups,
        fast=0,
        nightly=120,
        part=60,
    ),
]
