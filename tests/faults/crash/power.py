"""The trials: record a scene, and mount and check many of its states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults import played

from . import disks, states
from .scenes import ENGINES, SCENES, OfRanks, Scene

if TYPE_CHECKING:
    import random

    from faults.row import Run

#: The number of states of one recording.
STATES = 20
#: In one state out of this many, the trial also makes the next save.
SWEPT = 4


def _newest(marks: list[str], word: str) -> int:
    return max((int(mark.partition(" ")[2]) for mark in marks if mark.startswith(word)), default=0)


def _look(scene: Scene, state: states.State, shelf: disks.Shelf, kind: str, *, swept: bool) -> str:
    """Return the fault of a state, or an empty string."""
    try:
        shelf.put(state.image, state.used)
        begun, acknowledged = _newest(state.marks, "begun"), _newest(state.marks, "acknowledged")
        with shelf.mounted(kind) as point:
            return played.there(scene, point, begun, acknowledged, swept=swept)
    except OSError as error:
        return f"it cannot be mounted: {error}"


def _one(run: Run, kind: str, made: type[Scene], shelf: disks.Shelf, draw: random.Random) -> None:
    scene = made(draw.choice((5_000, 60_000, 300_001)), draw.choice(ENGINES))
    name, seed, folder = made.__name__, draw.randrange(1 << 30), run.place / f"{run.made}"
    folder.mkdir()
    with disks.recorded(kind, seed, folder) as (point, tell, log):
        if isinstance(scene, OfRanks):
            scene.play_in_ranks(point, tell)
        else:
            came = played.play(scene, point, tell)
            if came.failure or came.ended:
                raise AssertionError(f"{name}: the program failed: {came.ended}{came.failure.get('trace', '')}")
    run.count("recordings")
    run.count("writes", sum(entry[0] == "write" for entry in log))
    places = states.cuts(log, min(STATES, run.trials - run.made), draw)
    for state in states.after(disks.formatted(kind), log, places, draw):
        wrong = _look(scene, state, shelf, kind, swept=draw.randrange(SWEPT) == 0)
        run.count(name)
        run.done(wrong and f"seed {run.seed}, {kind}, {name} of {scene.nbytes} by {scene.engine}, {state.how}: {wrong}")


def cut(run: Run, kind: str, scenes: tuple[type[Scene], ...] = SCENES) -> None:
    """Make the trials of a run on one kind of file system, with each scene in turn."""
    draw = run.draw
    at = draw.randrange(len(scenes))
    disks.alone()
    with disks.shelf(kind, run.place) as shelf:
        while run.made < run.trials:
            _one(run, kind, scenes[at % len(scenes)], shelf, draw)
            at += 1
