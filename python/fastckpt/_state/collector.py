"""Python's garbage collector, paused while many objects are made."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def paused() -> Iterator[None]:
    """No collections inside: a walk over 100,000 tensors makes objects that stay, which each pass visits again.

    If threads overlap, the first to leave switches it on again, which only costs time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
