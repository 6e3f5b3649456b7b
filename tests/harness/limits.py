"""Sizes and times inside fastckpt that suit real checkpoints. Only this file names them, for tests that set
smaller values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

_PLACES = {
    "bytes of a look": "fastckpt._tools.convert.pickled:_MEMORY",
    "cast out at a time": "fastckpt._tensors.cast_out:_PIECE",
    "characters of names": "fastckpt._state.select:_NAMES",
    "characters of names for each token": "fastckpt._state.select:_NAMES_OF_TOKEN",
    "copied at the call of a lazy save": "fastckpt._background.guard:SMALL",
    "copied on a device where it is": "fastckpt._tensors.device:SMALL",
    "gathered on a device": "fastckpt._tensors.device:GATHERED",
    "looks of a reader for a checkpoint": "fastckpt._manager.restore:_LOOKS",
    "pinned at a time": "fastckpt._tensors.pinned:PIECE",
    "ranks below a rank": "fastckpt._ranks.tree:FAN_IN",
    "read from pages at a time": "fastckpt._api.destinations:_STEP",
    "seconds before a copy is tried again": "fastckpt._manager.drain:_FIRST",
    "seconds between lines of progress": "fastckpt._api.progress:LOG_INTERVAL",
    "seconds of a look": "fastckpt._tools.convert.pickled:_SECONDS",
    "seconds of grace for a rank": "fastckpt._ranks.protocol:GRACE",
    "staging memory pinned at a time": "fastckpt._api.host_memory:_STAGING_PIECE",
    "threads of a copy": "fastckpt._copy.moves:THREADS",
    "tokens of a structure": "fastckpt._state.flatten:TOKEN_LIMIT",
}


def _place(what: str) -> tuple[Any, str]:
    module, name = _PLACES[what].split(":")
    return importlib.import_module(module), name


def of(what: str) -> Any:
    """The current value of a size or time."""
    return getattr(*_place(what))


def put(what: str, value: Any) -> None:
    """Set a size or time for the rest of this process."""
    setattr(*_place(what), value)


def lower(patch: Any, what: str, value: Any) -> None:
    """Set a size or time by ``patch``, a ``pytest.MonkeyPatch``."""
    patch.setattr(*_place(what), value)


@contextlib.contextmanager
def lowered(what: str, value: Any) -> Iterator[None]:
    """Set a size or time for the ``with`` statement."""
    before = of(what)
    put(what, value)
    try:
        yield
    finally:
        put(what, before)
