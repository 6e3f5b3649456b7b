"""The fast tier of the rows with their own trials: rows that are tests run separately."""

from __future__ import annotations

import pytest

from faults import mutants
from faults.campaign import part_of
from faults.rows import rows
from harness import needs

OWN = [row for row in rows().values() if row.fast and not row.tests]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.root] * row.root, id=row.name.replace(" ", "-")) for row in OWN]
)
def test_a_row(row):
    if row.root:
        needs.root()
    found = part_of(row, tier="fast", seed=10_000, trials=row.fast)
    assert found["violations"] == []
    assert found["trials"] == row.fast


def test_each_mutant_is_named_by_a_row_and_its_line_is_there():
    """Mutants can be made. Only the campaign checks that rows catch mutants, because a build takes a minute."""
    assert {name for row in rows().values() for name in row.mutants} == mutants.MUTANTS.keys()
    mutants.patched()
