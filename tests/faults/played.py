"""Plays a scene in a separate process, which may fail, and returns its reports and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faults.crash.scenes import sweeps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faults.crash.scenes import Scene

MESSAGE = struct.Struct("=cq")
#: A process that runs longer than these seconds counts as hung. If a server reports everything as stale, each read of a
#: checkpoint waits for 30 s.
LONGEST = 300.0


@dataclass
class Played:
    """The outcome.

    Attributes:
        begun: the newest save that began.
        acknowledged: the newest acknowledged save.
        failure: the program's exception as ``kinds``, ``errno``, ``filename``, ``text``, ``trace``; empty without one.
        ended: a description of another bad end, or an empty string.
        struck: whether ``strike`` was called before the end.
    """

    begun: int = 0
    acknowledged: int = 0
    failure: dict[str, Any] = field(default_factory=dict)
    ended: str = ""
    struck: bool = False


def _fail(error: BaseException, to: int) -> None:
    said = {
        "kinds": [each.__name__ for each in type(error).__mro__],
        "errno": getattr(error, "errno", None),
        "filename": os.fsdecode(getattr(error, "filename", None) or ""),
        "text": str(error)[:1500],
        "trace": "".join(traceback.format_exception(error))[-3000:],
    }
    with os.fdopen(to, "w") as file:
        json.dump(said, file)


def _child(scene: Scene, point: Path, before: Callable[[], None], told: int, going: int, failed: int) -> int:
    def say(kind: bytes, number: int) -> None:
        os.write(told, MESSAGE.pack(kind, number))
        if not os.read(going, 1):
            os._exit(1)

    try:
        before()
        scene.play(point, lambda number: say(b"b", number), lambda number: say(b"a", number))
    except BaseException as error:  # noqa: BLE001 - it ends here whatever it is
        _fail(error, failed)
        return 1
    return 0


def play(
    scene: Scene,
    point: Path,
    heard: Callable[[str], None] = lambda _: None,
    *,
    before: Callable[[], None] = lambda: None,
    strike: Callable[[], None] | None = None,
    after: float = 0.0,
) -> Played:
    """Have a child play the scene. After each report, the child waits until ``heard`` has returned.

    Args:
        scene: the scene.
        point: the directory of the scene.
        heard: called with ``begun N`` and ``acknowledged N``.
        before: called in the child, before the scene.
        strike: called once in this process, unless the child has ended by then.
        after: seconds from the start until ``strike`` is called.
    """
    (told, telling), (going, go_on), (why, failing) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        # The child closes these ends, so that it ends with its parent.
        for each in (told, go_on, why):
            os.close(each)
        status = _child(scene, point, before, telling, going, failing)
        sys.stderr.flush()
        os._exit(status)
    for each in (telling, going, failing):
        os.close(each)
    found, began = Played(), time.monotonic()
    while True:
        left = LONGEST if strike is None else after
        if not select.select([told], [], [], max(0.0, began + left - time.monotonic()))[0]:
            if strike is None:
                found.ended = f"it hangs after {LONGEST} s"
                os.kill(pid, signal.SIGKILL)
                break
            strike()
            strike, found.struck = None, True
            continue
        if len(message := os.read(told, MESSAGE.size)) < MESSAGE.size:
            break
        kind, number = MESSAGE.unpack(message)
        if kind == b"b":
            found.begun = number
        else:
            found.acknowledged = number
        heard(f"{'begun' if kind == b'b' else 'acknowledged'} {number}")
        os.write(go_on, b".")
    with os.fdopen(why) as file:
        found.failure = json.loads(file.read() or "{}")
    for each in (told, go_on):
        os.close(each)
    status = os.waitpid(pid, 0)[1]
    if status != 0 and not found.failure:
        found.ended = found.ended or f"it ended with {status}"
    return found


def there(scene: Scene, point: Path, begun: int, acknowledged: int, *, swept: bool) -> str:
    """Return the fault of the checkpoints, or an empty string; ``swept``: also make the next save."""
    try:
        return scene.wrong(point, begun, acknowledged) or (sweeps(point) if swept else "")
    except Exception as error:  # noqa: BLE001 - whatever is raised was not promised
        # Keep only the text: the traceback refers to open files of the mount.
        return f"{type(error).__name__}: {error}"
