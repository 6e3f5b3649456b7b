"""The common part of the rows of failing storage: draws and plays a scene, and judges its outcome."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from faults.crash.scenes import ENGINES, SCENES, Scene
from faults.played import Played, play, there
from faults.served import Mount

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from faults.row import Run

#: The number of trials of one scene, which is first played without a fault to count its calls.
EACH = 8
SIZES = (5_000, 60_000, 300_001)


def drawn(draw: random.Random, scenes: tuple[type[Scene], ...] = SCENES) -> Scene:
    """Draw one of the scenes."""
    return draw.choice(scenes)(draw.choice(SIZES), draw.choice(ENGINES))


def about(run: Run, scene: Scene) -> str:
    """Return a description of the trial."""
    return f"seed {run.seed}, {type(scene).__name__} of {scene.nbytes} by {scene.engine}"


def badly(came: Played, point: Path, errors: Collection[int]) -> str:
    """Return the fault of a program's end, or an empty string: it may raise these system errors, with a path."""
    failure = came.failure
    if came.ended or not failure:
        return came.ended
    if not {"OSError", "CheckpointError"} & set(failure["kinds"]):
        return f"it raised {failure['trace']}"
    if failure["errno"] is not None and failure["errno"] not in errors:
        return f"it raised errno {failure['errno']}: {failure['trace']}"
    named = failure["filename"] or failure["text"]
    return "" if str(point) in named else f"it names no path: {failure['trace']}"


def looked_at(scene: Scene, came: Played, point: Path, errors: Collection[int], *, swept: bool = True) -> str:
    """Return the fault of the program's end, or of the checkpoints once nothing fails, or an empty string."""
    return badly(came, point, errors) or there(scene, point, came.begun, came.acknowledged, swept=swept)


def undisturbed(scene: Scene, point: Path) -> float:
    """Play the scene where nothing fails, as a control. Return how long it takes, in seconds.

    Raises:
        AssertionError: the scene fails.
    """
    began = time.monotonic()
    came = play(scene, point)
    took = time.monotonic() - began
    if came.failure or (wrong := looked_at(scene, came, point, (), swept=False)):
        raise AssertionError(f"{type(scene).__name__} without a fault: {came.failure or wrong}")
    return took


@contextlib.contextmanager
def served(place: Path) -> Iterator[Mount]:
    """Yield the mount that fails."""
    point = place / "troubled"
    point.mkdir()
    mount = Mount(str(point), "faults.trouble.mount")
    try:
        yield mount
    finally:
        mount.close()
