"""Several processes copy one checkpoint: each copies its share, then the first copies the rest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .pace import INTERVAL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .pace import Pace
    from .sources import Item

#: If no file arrives for this long, the first process copies the missing files: seconds, and a multiple of the time for
#: the largest missing file at the speed of the first process.
PATIENCE, TIMES = 10.0, 4
#: Bytes per second to assume if the first process has copied nothing itself.
RATE = 50e6


def share_of(items: Sequence[Item], share: tuple[int, int]) -> list[Item]:
    """The files that a process copies. The first, which publishes, also copies those that have no checksum."""
    index, count = share
    shards = [item for item in items if item.is_shard][index::count]
    return shards if index else shards + [item for item in items if not item.is_shard]


def bring_share(
    items: Sequence[Item],
    share: tuple[int, int],
    pace: Pace,
    missing: Callable[[], Sequence[Item]],
    bring: Callable[[Sequence[Item]], None],
    every: float = INTERVAL,
) -> int:
    """Bring a share of ``items``.

    Args:
        items: all files.
        share: ``(index, count)``.
        pace: counts the bytes.
        missing: the files that are not whole at the target.
        bring: copies files to the target.
        every: seconds between two calls of ``missing``.

    Returns:
        Bytes of the share that were at the target already.
    """
    own = share_of(items, share)
    there = {item.name for item in items if item.is_shard} - {item.name for item in missing()}
    left = [item for item in own if item.name not in there]
    pace.total = sum(item.nbytes for item in own)
    reused = pace.reused = pace.total - sum(item.nbytes for item in left)
    pace.moved(reused)
    began = time.monotonic()
    bring(left)
    if share[0] == 0 and share[1] > 1:
        seconds = time.monotonic() - began
        rate = sum(item.nbytes for item in left) / seconds if left and seconds > 0 else RATE
        _wait(pace, missing, bring, rate or RATE, every)
    return reused


def _wait(
    pace: Pace,
    missing: Callable[[], Sequence[Item]],
    bring: Callable[[Sequence[Item]], None],
    rate: float,
    every: float,
) -> None:
    """Wait while files of other processes arrive; then copy the missing ones."""
    before: Sequence[Item] | None = None
    deadline = 0.0
    while left := missing():
        now = time.monotonic()
        if left != before:
            before = left
            deadline = now + PATIENCE + TIMES * max(item.nbytes for item in left) / rate
        if now >= deadline:
            bring(left)
            return
        again = now + every
        while time.monotonic() < again:
            pace.look()
            time.sleep(INTERVAL)
