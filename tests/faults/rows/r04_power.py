"""Power cuts on devices with a volatile cache."""

from __future__ import annotations

from functools import partial

from faults.crash import power
from faults.crash.scenes import OfFourRanks, OfRanks
from faults.row import Row, Run


def _of_ranks(run: Run, scene: type[OfRanks]) -> None:
    # Each part has one kind of file system, because a group takes seconds to make.
    power.cut(run, ("ext4", "xfs", "btrfs")[run.seed % 3], (scene,))


def _row_of_ranks(scene: type[OfRanks], number: str, nightly: int) -> Row:
    return Row(
        4,
        f"power cuts of {number}ranks",
        f"The same for {number or 'two '}ranks that save together.",
        "the same device below ext4, XFS or btrfs",
        "the same mutants affect ranks through the same commit",
        run=partial(_of_ranks, scene=scene),
        fast=0,
        nightly=nightly,
        part=50,
        root=True,
    )


def _row(kind: str, fast: int, mutants: tuple[str, ...]) -> Row:
    return Row(
        4,
        f"power cuts on {kind}",
        "After a power cut each acknowledged save is intact, bit for bit; no other is partial; the next save works.",
        f"{kind} on a device that completes late and out of order, flushes only completed writes, and loses or tears "
        "any other write, of data or metadata; direct and buffered",
        "the mutants: a missing sync or an early report of success loses saves",
        run=partial(power.cut, kind=kind),
        fast=fast,
        nightly=2000,
        part=100,
        mutants=mutants,
        tried=100,
        root=True,
    )


ROWS = [
    _row("ext4", 60, ("parent-sync", "acknowledged-early")),
    _row("xfs", 40, ("parent-sync", "acknowledged-early")),
    _row("btrfs", 40, ("a-shards-sync", "manifest-sync", "parent-sync", "acknowledged-early")),
    _row_of_ranks(OfRanks, "", 200),
    _row_of_ranks(OfFourRanks, "four ", 100),
]
