"""Files from somebody else."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        15,
        "hostile files",
        "A hostile file is an error: no crash, no hang, no memory beyond its size.",
        "manifests and headers with every member missing, of a wrong type, out of range, huge, doubled or mutated",
        "the file loads before it is made hostile",
        **row(
            (
                "tests/core/test_hostile.py",
                "tests/core/test_hostile_growth.py",
                "tests/core/test_hostile_types.py",
            )
        ),
    ),
    Row(
        16,
        "paths that lead out",
        "Nothing outside of the checkpoint is opened, and no open waits.",
        "names with dots, links, FIFOs and devices in the place of files",
        "the trace of the opens",
        **row(
            (
                "tests/core/test_hostile.py::test_shard_names",
                "tests/core/test_hostile.py::test_shard_that_is_no_regular_file",
                "tests/core/test_hostile.py::test_manifest_that_is_no_regular_file",
                "tests/core/test_hostile.py::test_nothing_outside_is_opened",
            )
        ),
    ),
    Row(
        17,
        "no code",
        "No load runs code of a file.",
        "pickles in the place of shards and beside them",
        "the pickle would write a file",
        **row(("tests/core/test_hostile.py::test_pickle_in_place_of_shards_and_beside_them",)),
    ),
]
