"""The niceness of the threads that write a save in the background."""

from __future__ import annotations

import errno

from fastckpt import _core
from fastckpt._api.outcome import logger

#: By niceness, whether the kernel grants it.
_tried: dict[int, bool] = {}


def granted(nice: int | None) -> int | None:
    """The niceness, if the kernel grants it, else None; a refusal is logged once."""
    if nice is None:
        return None
    if nice not in _tried:
        try:
            _core.try_nice(nice)
            _tried[nice] = True
        except OSError as error:
            # If no thread could be started for the attempt, the result remains unknown.
            if error.errno != errno.EAGAIN:
                _tried[nice] = False
            logger.warning("save_async: nice=%s: the kernel refuses: %s", nice, error)
    return nice if _tried.get(nice) else None
