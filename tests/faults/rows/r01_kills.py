"""SIGKILL at random moments."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

from faults import killed_runs
from faults.row import Row, Run
from harness import groups

#: The folder of the programs that train.
TRAININGS = Path(__file__).parents[2] / "integrations"
COMMON = {"control": "all phases are met equally often, and a run without an acknowledged step fails"}


def _drains(run: Run) -> None:
    killed_runs.campaign(run, str(run.place / "remote"))


def _uploads(run: Run) -> None:
    killed_runs.campaign(run, killed_runs.store())


def _ranks(run: Run) -> None:
    killed_runs.campaign(run, str(run.place / "remote"), size=3)


def _trainings(run: Run, *, ranks: int = 1, tunes: bool = False) -> None:
    sys.path.append(str(TRAININGS))
    import fine_tuning
    import trainer_kills  # it imports transformers
    import trainers

    program, arguments = trainers.train, trainer_kills.FSDP2 if ranks > 1 else {}
    if tunes:
        fine_tuning.write_material(run.place)
        program, arguments = fine_tuning.tune, {"material": str(run.place)}
    with groups.frameworks(*([trainer_kills.TRL] if tunes else [])) as libraries:
        for kills in trainer_kills.campaign(libraries, program, run.place, run.seed, ranks, **arguments):
            run.done(trials=kills)
            for folder in run.place.glob("[0-9]*"):
                shutil.rmtree(folder)
            if run.made >= run.trials:
                return


ROWS = [
    Row(
        1,
        "kills",
        "A killed run restores the newest acknowledged step, or a later one, bit for bit.",
        "SIGKILL or SIGTERM in saves, removals, restores, rollbacks; with overwriting, keep=1 or 4, save_async",
        run=killed_runs.campaign,
        fast=40,
        nightly=10_000,
        part=100,
        mutants=("retention-goes-first",),
        tried=40,
        **COMMON,
    ),
    Row(
        1,
        "kills of drains",
        "The same for a run with a remote tier that sometimes loses its local tier.",
        "the same, and SIGKILL in drains and fetches",
        run=_drains,
        fast=20,
        nightly=1000,
        part=50,
        **COMMON,
    ),
    Row(
        1,
        "kills of uploads",
        "The same for a run whose remote tier is an object store.",
        "the same, and SIGKILL in uploads and downloads",
        run=_uploads,
        fast=20,
        nightly=500,
        part=50,
        **COMMON,
    ),
    Row(
        1,
        "kills of ranks",
        "The same for three ranks that save together.",
        "SIGKILL of all ranks, at once or one after the other",
        run=_ranks,
        fast=5,
        nightly=300,
        part=50,
        **COMMON,
    ),
    Row(
        1,
        "kills of trainings",
        "A killed and restarted training with transformers' Trainer gives the result of an undisturbed one.",
        "SIGKILL at random moments; each training continues to its end",
        "what an undisturbed training leaves is what each is compared with",
        run=_trainings,
        fast=0,
        nightly=100,
    ),
    Row(
        1,
        "kills of trainings on two ranks",
        "The same on two ranks with FSDP2.",
        "SIGKILL of both at random moments; each training continues to its end",
        "what an undisturbed training leaves is what each is compared with",
        run=partial(_trainings, ranks=2),
        fast=0,
        nightly=100,
    ),
    Row(
        1,
        "kills of trl sft",
        "The same for the command `trl sft`, which has no code for fastckpt.",
        "SIGKILL at random moments; each training continues to its end",
        "what an undisturbed training leaves is what each is compared with",
        run=partial(_trainings, tunes=True),
        fast=0,
        nightly=100,
    ),
]
