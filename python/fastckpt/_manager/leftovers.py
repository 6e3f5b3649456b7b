"""Leftovers of a run whose writers may still run: reported, watched, and removed once nothing changes.

On file systems whose locks do not reach other machines, no process may remove the leftovers of another machine's save,
and each node that is lost during a save leaves a whole checkpoint. A manager relies on its own observation: a workspace
that has not changed between two checks, further apart than the longest pause of a save, has no writer. Neither the
clock of another machine nor the age of a file counts. If the writer is alive after all, only its save fails.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from fastckpt._api.manage import leftovers, remove_leftover
from fastckpt._text import count, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._api.manage import Leftover

    from .directory import Directory

logger = logging.getLogger("fastckpt")

#: Seconds after which an unchanged workspace is assumed to have no writer.
UNCHANGED = 600.0


class Leftovers:
    """The leftovers in the directory of a run that belong to its checkpoints.

    Args:
        directory: the run.
        clock: returns seconds, and never goes back.
    """

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        #: By name, each leftover as it was first seen, and the time of that.
        self._seen: dict[str, tuple[Leftover, float]] = {}
        #: Warnings for the report of the next save.
        self.warning: str | None = None

    def begin(self) -> None:
        """Begin to watch the leftovers, and report how much space they take."""
        # The directory may not exist yet, and without the compiled core nothing is saved here.
        with contextlib.suppress(OSError, NotImplementedError):
            unsure = self._look()[0]
            if unsure:
                hosts = ", ".join(sorted({one.host for one in unsure if one.host})) or "another machine"
                self.warning = (
                    f"{self._directory.path}: {count(len(unsure), 'leftover')} of killed saves on {hosts} with "
                    f"{size(sum(one.bytes for one in unsure))}; nothing proves that no process writes there: this "
                    f"manager removes them after a save if nothing has changed in them for {UNCHANGED / 60:.0f} minutes"
                )
                logger.warning("%s", self.warning)

    def clear(self) -> None:
        """Remove leftovers that have not changed since they were first seen, if there were any at the beginning."""
        if not self._seen:
            return
        try:
            unsure, kept = self._look()
            for one in unsure:
                # Files that are needed to restore an old checkpoint are removed together with it or not at all.
                if one.checkpoint in kept or self._clock() - self._seen[one.name][1] < UNCHANGED:
                    continue
                if remove_leftover(self._directory.path, one.name, force=True):
                    text = "%s: removed the leftover %s, in which nothing had changed for %.0f minutes"
                    logger.warning(text, self._directory.path, one.name, UNCHANGED / 60)
        except OSError as error:
            logger.warning("%s: leftovers are not removed: %s", self._directory.path, error)

    def _look(self) -> tuple[list[Leftover], set[str]]:
        """Leftovers whose writers may run, and the names of checkpoints whose old contents were moved aside."""
        found = leftovers(self._directory.path)
        unsure = [
            one for one in found if one.state == "unknown" and self._directory.names.step_of(one.checkpoint) is not None
        ]
        before, now = self._seen, self._clock()
        self._seen = {}
        for one in unsure:
            known, since = before.get(one.name, (one, now))
            is_same = (known.changed, known.bytes) == (one.changed, one.bytes)
            self._seen[one.name] = one, since if is_same else now
        return unsure, {one.checkpoint for one in found if one.state == "kept"}
