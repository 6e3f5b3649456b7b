"""The trials: a scene is recorded, and many states of it are mounted and looked at."""

from __future__ import annotations

import os
import struct
import sys
import traceback
from typing import TYPE_CHECKING

from . import disks, states
from .scenes import ENGINES, SCENES, OfRanks, Scene, sweeps

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from faults.row import Run

#: States of one recording.
STATES = 20
#: In one state of so many the next save is made, too.
SWEPT = 4
MESSAGE = struct.Struct("=cq")


def _in_child(scene: Scene, point: Path, tell: Callable[[str], None]) -> None:
    """Have a child play the scene. It goes on only when the log has the mark of what it has told."""
    (told, telling), (going, go_on) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # So that it ends with its parent.
            os.close(told)
            os.close(go_on)

            def say(kind: bytes, number: int) -> None:
                os.write(telling, MESSAGE.pack(kind, number))
                if not os.read(going, 1):
                    os._exit(1)

            scene.play(point, lambda number: say(b"b", number), lambda number: say(b"a", number))
            status = 0
        except BaseException:  # noqa: BLE001 - it ends here whatever it is
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    for each in (telling, going):
        os.close(each)
    while len(message := os.read(told, MESSAGE.size)) == MESSAGE.size:
        kind, number = MESSAGE.unpack(message)
        tell(f"{'begun' if kind == b'b' else 'acknowledged'} {number}")
        os.write(go_on, b".")
    for each in (told, go_on):
        os.close(each)
    if os.waitpid(pid, 0)[1] != 0:
        raise AssertionError(f"{type(scene).__name__}: the program failed")


def _newest(marks: list[str], word: str) -> int:
    return max((int(mark.partition(" ")[2]) for mark in marks if mark.startswith(word)), default=0)


def _found(scene: Scene, marks: list[str], point: Path, *, swept: bool) -> str:
    try:
        begun, acknowledged = _newest(marks, "begun"), _newest(marks, "acknowledged")
        return scene.wrong(point, begun, acknowledged) or (sweeps(point) if swept else "")
    except Exception as error:  # noqa: BLE001 - whatever is raised was not promised
        # Only its words: its traceback has what is open there.
        return f"{type(error).__name__}: {error}"


def _look(scene: Scene, state: states.State, shelf: disks.Shelf, kind: str, *, swept: bool) -> str:
    """What is wrong with a state, or nothing."""
    try:
        with shelf.mounted(kind, state.image, state.used) as point:
            return _found(scene, state.marks, point, swept=swept)
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
            _in_child(scene, point, tell)
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
