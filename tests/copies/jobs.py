"""What the children of the tests of copies do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt._copy import moves
from fastckpt._copy.copy import copy_checkpoint

if TYPE_CHECKING:
    from harness.zygote import Channel


def copy_held(channel: Channel, *, source: str, target: str) -> int:
    """Say that it is ready, wait for the word, then copy: so that a tracer sees the copy alone.

    One thread brings one file after another, so that each call has its number.
    """
    moves.THREADS = 1
    channel.send({"report": "ready"})
    channel.receive()
    return copy_checkpoint([source], target, overwrite=True).bytes
