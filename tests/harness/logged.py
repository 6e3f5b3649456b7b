"""The log of fastckpt, also in processes that a test has started."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def warnings() -> Iterator[list[str]]:
    """A context that yields a list of the warnings and errors logged inside; it is complete at the end."""
    texts: list[str] = []
    heard = BufferingHandler(1 << 20)
    heard.setLevel(logging.WARNING)
    log = logging.getLogger("fastckpt")
    log.addHandler(heard)
    try:
        yield texts
    finally:
        log.removeHandler(heard)
        texts += [record.getMessage() for record in heard.buffer]
