"""The jobs of children in the tests of copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fastckpt
from harness import limits

if TYPE_CHECKING:
    from harness.zygote import Channel


def copy_held(channel: Channel, *, source: str, target: str) -> int:
    """Report, wait for the command, then copy, so that a tracer sees only the copy.

    One thread copies one file after another, so that the order of system calls is fixed.
    """
    limits.put("threads of a copy", 1)
    channel.send({"report": "ready"})
    channel.receive()
    return fastckpt.copy(source, target, overwrite=True).bytes
