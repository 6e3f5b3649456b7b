"""The order of writes, syncs and renames."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        4,
        "order of syncs",
        "Shards, manifest, directory, name, parent become durable in this order; then the old checkpoint is removed.",
        "none: the system calls of each engine are traced",
        "at least two shards; each sync is found by the path of its file",
        **row(
            (
                "tests/core/test_commit.py::test_order_of_a_first_save_and_of_an_overwrite",
                "tests/core/test_commit.py::test_parents_that_a_save_makes_are_durable_with_it",
            )
        ),
        mutants=(
            "a-shards-sync",
            "manifest-sync",
            "directory-sync",
            "parent-sync",
            "made-parents-sync",
            "empty-directory-sync",
            "acknowledged-early",
            "replaced-goes-first",
        ),
    ),
]
