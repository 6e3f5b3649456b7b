"""Groups of real processes continue after an event: a few trials of the campaign, one for each kind of event."""

from __future__ import annotations

import pytest

from faults import groups_that_go_on
from faults.groups_that_go_on import SHORT, Trial

LONGER = 1.5 * SHORT


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "trial",
    [
        Trial(2, "load", "missed", 1, 1, meets=True, store="apart", after=0.0, still=0.0),
        Trial(3, "restore", "missed", 1, 1, meets=True, store="apart", after=0.0, still=0.0),
        Trial(3, "restore", "store stands still", 0, 0, meets=True, store="rank0", after=0.0, still=LONGER),
        Trial(3, "save_over", "missed", 0, 1, meets=False, store="apart", after=0.0, still=0.0),
        Trial(3, "manager", "missed", 2, 1, meets=True, store="apart", after=0.0, still=0.0),
        Trial(3, "manager", "between", 1, 1, meets=False, store="apart", after=0.0, still=0.0),
        Trial(2, "manager", "leaves", 1, 2, meets=True, store="apart", after=0.0, still=0.0),
        Trial(3, "manager", "store stands still", 0, 1, meets=True, store="apart", after=0.0, still=LONGER),
        Trial(2, "dcp_save", "rank stands still", 1, 1, meets=True, store="rank0", after=0.0, still=LONGER),
    ],
    ids=lambda trial: f"{trial.entry}-{trial.event.replace(' ', '-')}",
)
def test_a_group_goes_on(forge, tmp_path, trial):
    assert groups_that_go_on.wrong_of(forge, trial, tmp_path / "trial") == ""
