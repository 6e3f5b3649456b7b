"""The file system goes."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        5,
        "shutdown",
        "A save on a file system that has gone is no success.",
        "GOINGDOWN of ext4 and XFS between the rename and the last sync; btrfs cut between two shards",
        "the saver stands still where it is to be",
        **row(
            (
                "tests/core/test_commit_protocol.py::test_file_system_that_shuts_down_before_the_parent_is_synced",
                "tests/core/test_commit_protocol.py::test_power_cut_between_two_shards_on_btrfs",
            )
        ),
    ),
]
