"""Files from an attacker."""

import re
import subprocess

from faults.campaign import ROOT
from faults.of_tests import row
from faults.row import Row, Run


def fuzz(run: Run) -> None:
    """Give each target of libFuzzer an equal share of the executions; it continues with its saved inputs."""
    command = ["scripts/fuzz", "--runs", str(run.trials), "--seed", str(run.seed)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    executed = [int(each) for each in re.findall(r"stat::number_of_executed_units: *(\d+)", done.stderr)]
    run.done("" if done.returncode == 0 else done.stderr[-2000:], sum(executed))
    run.count("targets", len(executed))


ROWS = [
    Row(
        15,
        "fuzzed core",
        "The core accepts valid headers, manifests, tokens, plans and messages; all others are errors.",
        "libFuzzer, with AddressSanitizer, on headers, manifests, tokens, plans and messages of ranks",
        "each target has inputs that are accepted",
        fuzz,
        fast=0,
        nightly=2_000_000,
        part=200_000,
    ),
    Row(
        15,
        "two readers",
        "The core and the portable reader give the same result for each manifest.",
        "manifests with values, brackets and names replaced at random, and a correct checksum",
        "some are accepted",
        **row(("tests/portable/test_reader.py::test_mutated_manifests_have_the_verdict_of_the_core",)),
        drawn=True,
    ),
    Row(
        15,
        "hostile files",
        "A hostile file is an error: no crash, no hang, no memory beyond its size.",
        "manifests and headers, each member missing, of a wrong type, out of range, huge, duplicate or mutated",
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
        "Nothing outside the checkpoint is opened, and opening never waits.",
        "names with dots, and links, FIFOs and devices in place of files",
        "the system calls that open files are traced",
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
        "No load runs code from a file.",
        "pickles in place of shards and beside them",
        "the pickle would write a file",
        **row(("tests/core/test_hostile.py::test_pickle_in_place_of_shards_and_beside_them",)),
    ),
]
