"""Copies a checkpoint from one or more places to another: verified on the way, complete or absent."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, NamedTuple

from fastckpt._paths import is_url
from fastckpt._text import visible
from fastckpt.exceptions import CorruptCheckpointError, ReplacedCheckpointError

from .directory import ToDirectory
from .objects import ToObjects
from .pace import Pace
from .plan import Plan
from .sources import source_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pace import Stop, Tick


#: The names of operations in the live counters.
_KINDS = {"copy": "copy", "drain": "drain", "restore": "fetch"}


class Copied(NamedTuple):
    """The result of a copy.

    Attributes:
        bytes: bytes that this process moved.
        reused_bytes: bytes that were already at the target.
        files: the files of the checkpoint, the manifest among them.
        seconds: wall-clock seconds.
        warnings: further warnings for the caller, in words.
        was_there: whether the target already held the checkpoint and nothing was copied.
    """

    bytes: int
    reused_bytes: int
    files: int
    seconds: float
    warnings: tuple[str, ...] = ()
    was_there: bool = False


def copy_checkpoint(
    sources: Sequence[str],
    target: str,
    *,
    operation: str = "copy",
    overwrite: bool = False,
    limit: float | None = None,
    stop: Stop | None = None,
    tick: Tick | None = None,
    share: tuple[int, int] = (0, 1),
    step: int | None = None,
) -> Copied:
    """Copy a checkpoint. The copy is durable and visible as a whole when this returns.

    Files that an interrupted copy sent are not sent again. A place is an absolute path or a URL, as
    :func:`fastckpt._stores.urls.place_of` returns it.

    Args:
        sources: places of the checkpoint, the nearest first. Each file comes from the first source that has it whole.
        target: the place of the copy. If it is among the sources, with ``overwrite``, its damaged files are replaced,
            and the others stay unchanged.
        operation: the name of the operation, for messages: one of ``copy``, ``drain``, ``restore``.
        overwrite: replace another checkpoint at ``target``.
        limit: bytes per second that this process may move.
        stop: called about ten times a second, by the calling thread; once it returns true, the copy stops.
        tick: called at the same times, with the bytes done and all bytes of this process's share.
        share: ``(index, count)``, where ``count`` processes copy together. All but the first copy some of the files and
            return. The first copies its own, waits while files of the others arrive, copies missing files, and makes
            the copy visible.
        step: the training step, for the live counters.

    Returns:
        What was done.

    Raises:
        CancelledError: ``stop`` returned true, or this process must continue later: copied files stay.
        CorruptCheckpointError: a file is damaged at all sources; nothing became visible.
        ReplacedCheckpointError: the checkpoint was replaced or removed meanwhile, or the length of a file beside it has
            changed.
        FileNotFoundError: there is no checkpoint at any source.
        FileExistsError: something else is at ``target``.
        OSError: storage failed.
        ValueError: a source holds an entry that cannot be copied: a directory, a link.
    """
    began = time.perf_counter()
    plan = Plan([source_at(operation, place) for place in sources])
    pace = Pace(limit, stop, tick)
    to = (ToObjects if is_url(target) else ToDirectory)(operation, target, overwrite=overwrite)
    files = len(plan.items) + 1
    if not plan.heals(target) and to.has(plan):
        return Copied(0, plan.nbytes, files, time.perf_counter() - began, was_there=True)
    pace.look()
    try:
        with pace.shown(_KINDS[operation], target, step, whole=share[0] == 0):
            reused, warnings = to.bring(plan, pace, share)
    except (CorruptCheckpointError, FileNotFoundError) as error:
        if not plan.is_replaced():
            raise
        raise ReplacedCheckpointError(
            errno.ENOENT,
            f"`{visible(sources[0])}` was replaced, changed or removed while it was copied: copy it again",
            sources[0],
        ) from error
    return Copied(max(0, pace.done - reused), reused, files, time.perf_counter() - began, tuple(warnings))
