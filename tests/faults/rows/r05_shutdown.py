"""The file system shuts down."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from faults.crash import disks
from faults.of_tests import row
from faults.played import play
from faults.row import Row, Run
from faults.trouble import trials

if TYPE_CHECKING:
    from pathlib import Path

#: The request to shut down, and its modes: with and without writing the log first.
GOING_DOWN, WITH_LOG, WITHOUT_LOG = 0x8004587D, 1, 2
ERRORS = (errno.EIO, errno.EROFS, errno.EUCLEAN)


def _shut(point: Path, how: int) -> None:
    directory = os.open(point, os.O_RDONLY)
    fcntl.ioctl(directory, GOING_DOWN, struct.pack("<I", how))
    os.close(directory)


def _shutdowns(run: Run) -> None:
    draw = run.draw
    disks.alone()
    kind = draw.choice(("ext4", "xfs"))
    pages = np.frombuffer(disks.formatted(kind), np.uint8).reshape(-1, disks.PAGE)
    used = pages.any(axis=1)
    with disks.shelf(kind, run.place) as shelf:
        while run.made < run.trials:
            scene = trials.drawn(draw)
            shelf.put(pages, used)
            with shelf.mounted(kind) as point:
                longest = trials.undisturbed(scene, point)
            for _ in range(min(trials.EACH, run.trials - run.made)):
                how, after = draw.choice((WITH_LOG, WITHOUT_LOG)), draw.uniform(0, longest)
                shelf.put(pages, used)
                with shelf.mounted(kind) as point:
                    came = play(scene, point, strike=partial(_shut, point, how), after=after)
                    ended = trials.badly(came, point, ERRORS)
                run.count("failed" if came.failure else "went on" if came.struck else "had ended")
                with shelf.mounted(kind) as point:
                    wrong = ended or trials.looked_at(scene, came, point, ERRORS)
                said = f"{trials.about(run, scene)}, {kind} gone after {after:.4f} s ({how}): {wrong}"
                run.done(wrong and said, int(came.struck))


ROWS = [
    Row(
        5,
        "shutdown",
        "A save on a file system that has shut down is not reported as a success.",
        "ext4 and XFS shut down between the rename and the last sync, btrfs cut between two shards",
        "the saver is stopped exactly at the intended point",
        **row(
            (
                "tests/core/test_commit_protocol.py::test_file_system_that_shuts_down_before_the_parent_is_synced",
                "tests/core/test_commit_protocol.py::test_power_cut_between_two_shards_on_btrfs",
            )
        ),
    ),
    Row(
        5,
        "shutdowns at any moment",
        "Saves acknowledged before a file system shut down exist after it is remounted; the next save works.",
        "ext4 or XFS shut down at a random moment, with or without writing its log",
        "each scene is played without a fault first; the mutants",
        run=_shutdowns,
        fast=8,
        nightly=300,
        part=100,
        mutants=("parent-sync", "acknowledged-early"),
        tried=200,
        root=True,
    ),
]
