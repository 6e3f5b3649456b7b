"""Power cuts on a simulated disk."""

from __future__ import annotations

from itertools import count

from faults import simulated
from faults.row import DISTINCT, Row, Run
from faults.simulated_reader import Reader

NAME = "power cuts on a simulated disk"
#: Power cuts of one program.
EACH = {"fast": 200, "nightly": 600}


def _cut(run: Run) -> None:
    with simulated.stage(ranks=True) as stage:
        reader = Reader(stage.place)
        for number in count():
            seed = f"{run.seed}-{number}"
            program, _, found = simulated.attempt(stage, reader, seed, min(EACH[run.tier], run.trials - run.made))
            for at, mode, why in found.wrong:
                run.done(f"program {seed} ({program['kind']}), after operation {at}, {mode}: {why}", trials=0)
            run.done(trials=found.drawn)
            run.count(DISTINCT, found.states)
            run.count("states that were saved over", found.over)
            if run.made >= run.trials:
                return


ROWS = [
    Row(
        4,
        NAME,
        "After a power cut all acknowledged data is intact, bit for bit; nothing partial counts as whole; the run "
        "can continue.",
        "a disk that promises only POSIX: each page and name that is not synced is independently lost or kept",
        "each sync that is deleted from a record or moved is detected (tests/faults/simulated_mutants.py)",
        run=_cut,
        fast=800,
        nightly=200_000,
        part=20_000,
        root=True,
    ),
]
