"""A disk or a network alters bytes."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        12,
        "damage",
        "No load and no verify accepts altered bytes.",
        "flipped bits, truncated files, swapped blocks and shards of other steps, in every region",
        "the checkpoint loads before, and again once the bit is flipped back",
        **row(
            (
                "tests/api/test_errors.py::test_flipped_bits_in_data_are_all_found",
                "tests/api/test_errors.py::test_much_damage_is_listed_whole",
                "tests/api/test_errors.py::test_load_checks_unless_told_not_to",
                "tests/api/test_errors.py::test_flipped_bit_in_a_header",
                "tests/api/test_errors.py::test_flipped_bit_anywhere_in_the_manifest",
                "tests/api/test_errors.py::test_truncated_manifest",
                "tests/api/test_errors.py::test_truncated_shard",
                "tests/api/test_errors.py::test_missing_shard",
                "tests/api/test_errors.py::test_extra_bytes",
                "tests/api/test_errors.py::test_swapped_shards_and_blocks",
                "tests/api/test_errors.py::test_shard_of_another_step",
            )
        ),
        mutants=("checksum",),
    ),
    Row(
        12,
        "altered messages",
        "A bit that flips between two ranks is an error on both, and nothing is committed.",
        "one flipped bit of a message or of a value in the store, in saves and loads of ranks",
        "the number of the altered message is reported",
        **row(("tests/ranks/test_altered.py",)),
        mutants=(
            "message-sum",
            "word-sum",
        ),
    ),
    Row(
        12,
        "replicas",
        "A tensor whose copies differ between ranks is refused by name before anything is committed.",
        "one rank has different values",
        "equal copies are saved",
        **row(("tests/ranks/test_replicas.py",)),
        mutants=("replicas",),
    ),
    Row(
        14,
        "fallback",
        "A run continues from the newest whole checkpoint, with a warning; retention does not count damaged ones.",
        "the newest checkpoint of a run is damaged",
        "the run continues from the newest checkpoint if that is whole",
        **row(
            (
                "tests/manager/test_manager.py::test_retention_counts_neither_damaged_ones_nor_those_of_a_later_step",
                "tests/manager/test_manager.py::test_a_damaged_step_that_is_saved_again_counts_again",
                "tests/manager/test_manager.py::test_what_a_damaged_one_has_more_than_an_older_one_leaves_no_trace",
            )
        ),
    ),
]
