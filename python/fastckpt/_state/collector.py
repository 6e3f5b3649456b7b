"""Python's garbage collector, paused while many objects are made."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def paused() -> Iterator[None]:
    """A context without collections: a walk over 100,000 tensors makes objects that stay, and each pass revisits them.

    If threads overlap, the first to leave switches the collector on again, which only costs time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
