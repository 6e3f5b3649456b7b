"""Storage that lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastckpt.exceptions import CheckpointError
from faults.crash import disks
from faults.crash.scenes import ENGINES, SCENES, GivenFiles, Overwrites, Shards, SingleFiles
from faults.played import Played, play
from faults.row import Row, Run
from faults.trouble import trials
from faults.trouble.mount import LIES
from harness.in_memory import READ, WRITE

if TYPE_CHECKING:
    import random

    from faults.crash.scenes import Scene
    from faults.served import Mount

#: The scenes whose bytes have checksums that a load compares: files beside the tensors have none.
SUMMED = tuple(each for each in SCENES if each not in (GivenFiles, SingleFiles))


def _after_lies(scene: Scene, point: Path, came: Played) -> str:
    """Return the fault of the checkpoints, or an empty string: errors are allowed, and wrong values are not."""
    if came.ended or not {"OSError", "CheckpointError"} & set(came.failure.get("kinds", ["OSError"])):
        return f"{came.ended}{came.failure.get('trace', '')}"
    try:
        return scene.wrong(point, came.begun, came.acknowledged)
    except (OSError, CheckpointError, RuntimeWarning):
        return ""
    except Exception as error:  # noqa: BLE001 - a mixture, or a crash
        return f"{type(error).__name__}: {error}"


def _loaded(scene: Scene, point: Path) -> str:
    """Return how a load ends: ``right``, ``failed``, or its fault."""
    try:
        number = scene.found(scene.path(point, 1))
    except (OSError, CheckpointError):
        return "failed"
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "right" if number == scene.count else f"{number} is there"


def _writes(run: Run, mount: Mount, draw: random.Random) -> None:
    scene, point = trials.drawn(draw, SUMMED), Path(mount.point)
    mount.ask(reset=True, arm=[])
    trials.undisturbed(scene, point)
    count = mount.ask(heal=True)["counts"][str(WRITE)]
    for _ in range(min(trials.EACH, run.trials - run.made)):
        lie, at = draw.choice(LIES), draw.randint(1, count)
        mount.ask(reset=True, arm=[WRITE], at=at, once=True, lie=lie, seed=draw.random())
        came = play(scene, point)
        run.count("writes that lied", mount.ask(heal=True)["came"])
        wrong = _after_lies(scene, point, came)
        run.done(wrong and f"{trials.about(run, scene)}, write {at} of {count}, {lie}: {wrong}")


def _reads(run: Run, mount: Mount, draw: random.Random) -> None:
    scene, point = trials.drawn(draw, (Overwrites, Shards)), Path(mount.point)
    scene.reader = draw.choice(ENGINES)
    mount.ask(reset=True)
    trials.undisturbed(scene, point)
    mount.ask(arm=[])
    if (found := _loaded(scene, point)) != "right":
        raise AssertionError(f"without a lie: {found}")
    count = mount.ask(heal=True)["counts"][str(READ)]
    for _ in range(min(trials.EACH, run.trials - run.made)):
        lie, at = draw.choice(LIES), draw.randint(1, count)
        mount.ask(arm=[READ], at=at, once=True, lie=lie, seed=draw.random())
        found = _loaded(scene, point)
        run.count("reads that lied", mount.ask(heal=True)["came"])
        run.count(f"loads that were {found}" if found in {"right", "failed"} else "other values")
        again = _loaded(scene, point)
        wrong = found if found not in {"right", "failed"} else "" if again == "right" else f"then: {again}"
        run.done(wrong and f"{trials.about(run, scene)} and {scene.reader}, read {at} of {count}, {lie}: {wrong}")


def _lies(run: Run) -> None:
    draw = run.draw
    disks.alone()
    with trials.served(run.place) as mount:
        while run.made < run.trials:
            draw.choice((_writes, _reads))(run, mount, draw)


ROWS = [
    Row(
        13,
        "lies of a mount",
        "Data that storage silently lost, moved, cut or altered is not accepted.",
        "a write or read of a FUSE mount that succeeds with a flipped bit, a part, a wrong place, or nothing",
        "each scene is played without a lie first, and the load after one succeeds",
        run=_lies,
        fast=24,
        nightly=600,
        part=100,
        mutants=("checksum",),
        tried=100,
        root=True,
    ),
]
