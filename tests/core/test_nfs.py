"""The commit protocol between two clients of a real NFSv4.2 server (docs/format.md, 6): :mod:`harness.two_machines`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import nfs

GUEST = Path(nfs.__file__).with_name("nfs_guest.py")
# Scenarios by boot. A name before a colon is the host name of both machines; without one, their host names differ.
BOOTS = {
    "rivals": [
        "trainer:different_names",
        "different_names",
        "trainer:one_name",
        "one_name",
        "aside_meanwhile",
        "emptied_meanwhile",
        "rival_meanwhile",
        "directory_meanwhile",
        "moved_meanwhile",
        "swept_before_its_lock",
        "trainer:swept_in_the_middle",
        "failing_commit",
    ],
    "deaths": [
        "killed",
        "trainer:stopped_but_alive",
        "stopped_but_alive",
        "removed_by_its_owner",
        "stopped_between_two_renames",
    ],
    "readers": ["readers_beside_a_saver", "loader_overtaken"],
}


@pytest.mark.slow
@pytest.mark.timeout(1000)  # the kernel is an ordinary process, which takes ten times as long on a busy machine
@pytest.mark.parametrize("boot", BOOTS)
def test_two_clients(boot):
    outcomes = nfs.boot(GUEST, "harness.two_machines", *BOOTS[boot], seconds=900)
    for outcome in outcomes:
        print(outcome["scenario"], outcome["seconds"], "s", outcome["failed"] or "as it should be")
    assert [outcome["scenario"] for outcome in outcomes] == BOOTS[boot]
    failed = {
        outcome["scenario"]: outcome["failed"].strip().splitlines()[-1] for outcome in outcomes if outcome["failed"]
    }
    assert not failed, failed
