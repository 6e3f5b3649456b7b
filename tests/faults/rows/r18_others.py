"""Other processes and other users."""

from faults.of_tests import row
from faults.row import Row

ROWS = [
    Row(
        18,
        "modes",
        "Files have mode 0666 and directories 0777, less the umask, or the mode of what they replace.",
        "four umasks, setgid directories, checkpoints with restricted modes",
        "the modes are compared with those of a plain program",
        **row(
            (
                "tests/core/test_commit.py::test_modes_follow_the_umask",
                "tests/core/test_commit.py::test_group_of_a_setgid_directory_is_inherited",
                "tests/core/test_commit_protocol.py::test_overwrite_keeps_the_mode",
                "tests/core/test_commit_protocol.py::test_mode_is_kept_while_it_is_written",
            )
        ),
    ),
    Row(
        19,
        "two savers",
        "If several savers use one path, it holds one whole checkpoint; the other savers get a warning or an error.",
        "savers stopped before a system call while a rival commits; two at once, killed",
        "each saver succeeds alone",
        **row(
            (
                "tests/core/test_commit.py::test_two_savers_on_one_path",
                "tests/core/test_commit.py::test_who_replaces_a_rival_is_told",
                "tests/core/test_commit_protocol.py::test_file_laid_into_a_rivals_checkpoint",
                "tests/core/test_commit_protocol.py::test_directory_of_somebody_that_takes_the_name",
            )
        ),
    ),
    Row(
        22,
        "readers",
        "A load during saves and removals returns one whole checkpoint, or reports that it is gone.",
        "readers interrupted at every open by a save or removal; savers in a loop",
        "the reader sees several checkpoints",
        **row(
            (
                "tests/api/test_races.py",
                "tests/core/test_commit_protocol.py::test_reader_overtaken_at_any_open",
                "tests/core/test_commit_protocol.py::test_load_that_is_overtaken_again_and_again",
            )
        ),
    ),
    Row(
        26,
        "leftovers",
        "The next save sweeps leftovers of dead savers, and no save touches the workspace of a live one.",
        "killed or stopped savers of other containers, PID namespaces, hosts and boots",
        "a workspace exists before the sweep",
        **row(
            (
                "tests/core/test_commit.py::test_leftovers_of_the_dead_are_swept_and_nothing_else",
                "tests/core/test_commit_protocol.py::test_leftovers_of_another_container_of_this_machine",
                "tests/core/test_commit_protocol.py::test_living_saver_of_another_container_of_this_machine",
                "tests/core/test_commit_protocol.py::test_saver_of_a_container_that_has_not_locked_its_manifest",
            )
        ),
        mutants=("lock",),
    ),
    Row(
        36,
        "over the source",
        "A state that was loaded from a path can be saved over it, mapped or not.",
        "the saved tensors come from the file itself",
        "the bytes are compared",
        **row(
            (
                "tests/core/test_commit.py::test_saving_over_the_source_of_the_state",
                "tests/core/test_commit.py::test_open_reader_of_a_replaced_checkpoint",
            )
        ),
    ),
]
