"""A copy to an object store: its manifest comes last, and without a manifest there is no checkpoint."""

from __future__ import annotations

import errno
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

from fastckpt import _crc64
from fastckpt._portable.limits import MANIFEST, MAX_MANIFEST
from fastckpt._portable.manifest import corrupt
from fastckpt._stores.objects import WHOLE, Objects
from fastckpt._text import visible

from .moves import UnreadableError, ahead, readable, sum_of, watched
from .shares import bring_share
from .sources import is_ours, where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .pace import Pace
    from .plan import Plan
    from .sources import Bytes, Item, Opened, Source

#: Requests at the same time that look at objects.
_LOOKS = 32
#: Files that are sent at the same time: those that go in parts, which keep the network busy but for their beginning and
#: end, and those that do not.
_LARGE, _SMALL = 4, 8
#: Seconds between two looks at what others have brought.
_EVERY = 1.0


class ToObjects:
    """The target of a copy that is a URL."""

    def __init__(self, operation: str, target: str, *, overwrite: bool) -> None:
        self._operation = operation
        self._target = target
        self._overwrite = overwrite
        self._objects = Objects.at(operation, target)

    def has(self, plan: Plan) -> bool:
        """Whether the checkpoint is there: the manifest, all files with their lengths, the shards with their sums."""
        return self._manifest() == plan.manifest and not self._missing(plan)

    def bring(self, plan: Plan, pace: Pace, share: tuple[int, int]) -> tuple[int, list[str]]:
        """Bring a share of the files; the first process brings what is missing then, and the manifest at last.

        Returns:
            Bytes that this process needed not move, and warnings.
        """
        before = self._manifest()
        is_other = before is not None and before != plan.manifest
        self._refuse(plan, is_checkpoint=before is not None, is_other=is_other)
        if share[0] and is_other:
            # The first one has not yet taken its manifest away: what is brought now would be seen as damage.
            return 0, []
        if not share[0]:
            if is_other:
                # What is there goes before the new one is whole, so it has to be known that it can be.
                plan.bring(plan.items, lambda items, source: self._read_each(items, source, pace))
            self._make_way(plan, is_other=is_other)

        def bring(items: Sequence[Item]) -> None:
            plan.bring(items, lambda items, source: self._send_each(items, source, pace))

        reused = bring_share(plan.items, share, pace, lambda: self._missing(plan), bring, _EVERY)
        if share[0]:
            return reused, []
        # There are no locks: only one copy to a URL may run at a time.
        busy = self._error(errno.EBUSY, "another copy to it runs: copy again when it has ended")
        if self._missing(plan):
            raise busy
        if is_other or before is None:
            crc = _crc64.to_hex(_crc64.of(plan.manifest))
            self._objects.write(MANIFEST, [plan.manifest], len(plan.manifest), crc)
            # The other one may have begun since the look.
            if self._missing(plan):
                if self._manifest() == plan.manifest:
                    self._objects.remove([MANIFEST])
                raise busy
        return reused, []

    def _manifest(self) -> bytes | None:
        try:
            return self._objects.read_all(MANIFEST, MAX_MANIFEST)
        except FileNotFoundError:
            return None

    def _missing(self, plan: Plan) -> list[Item]:
        """The files that are not there with their lengths, and the shards that have another sum."""
        sizes = self._objects.children()[1]

        def is_there(item: Item) -> bool:
            if sizes.get(item.name) != item.nbytes:
                return False
            return not item.is_shard or self._sum_of(item.name) == item.crc

        with ThreadPoolExecutor(_LOOKS, "fastckpt") as pool:
            there = list(pool.map(is_there, plan.items))
        return [item for item, is_there_ in zip(plan.items, there, strict=True) if not is_there_]

    def _sum_of(self, name: str) -> str | None:
        try:
            return self._objects.sum_of(name)
        except FileNotFoundError:
            return None

    def _refuse(self, plan: Plan, *, is_checkpoint: bool, is_other: bool) -> None:
        """Raise FileExistsError for what must not be replaced."""
        prefixes, objects = self._objects.children()
        if prefixes:
            raise self._error(errno.EEXIST, f"it holds `{prefixes[0]}/`: choose another name")
        if is_other and not self._overwrite:
            raise self._error(errno.EEXIST, "another checkpoint is there, and overwrite=False")
        if is_checkpoint:
            return
        # What an earlier copy brought has its sum.
        brought = {item.name for item in plan.items}
        names = [name for name in objects if not self._overwrite or is_ours(name) or name in brought]
        with ThreadPoolExecutor(_LOOKS, "fastckpt") as pool:
            for name, crc in zip(names, pool.map(self._sum_of, names), strict=True):
                if crc is None:
                    raise self._error(
                        errno.EEXIST, f"it holds `{name}` and is not a checkpoint of fastckpt: choose another name"
                    )

    def _make_way(self, plan: Plan, *, is_other: bool) -> None:
        """Remove what is another checkpoint's: its manifest first."""
        if is_other:
            self._objects.remove([MANIFEST])
        keep = {MANIFEST, *(item.name for item in plan.items)}
        self._objects.remove([name for name in self._objects.children()[1] if is_ours(name) and name not in keep])

    def _send_each(self, items: Sequence[Item], source: Source, pace: Pace) -> dict[str, Exception]:
        """Send files; return why which could not be read."""
        failed: dict[str, Exception] = {}
        for in_parts, at_once in ((True, _LARGE), (False, _SMALL)):
            left = deque(item for item in items if (item.nbytes > WHOLE) == in_parts)

            def send(left: deque[Item] = left) -> None:
                while left:
                    try:
                        item = left.popleft()
                    except IndexError:
                        return
                    error = self._send(item, source, pace)
                    if error is not None:
                        failed[item.name] = error

            watched([send] * min(at_once, len(left)), pace)
        return failed

    def _read_each(self, items: Iterable[Item], source: Source, pace: Pace) -> dict[str, Exception]:
        """Read files and compare their sums."""
        failed: dict[str, Exception] = {}

        def read() -> None:
            for item in items:
                try:
                    with closing(readable(lambda: source.open(item))) as opened:  # noqa: B023 - called at once
                        found = sum_of(item, source, opened, pace)
                except UnreadableError as error:
                    failed[item.name] = error.error
                    continue
                if item.crc is not None and found != item.crc:
                    place = where(source.place, item.name)
                    failed[item.name] = corrupt(place, f"checksum is {found}, written was {item.crc}")

        watched([read], pace)
        return failed

    def _send(self, item: Item, source: Source, pace: Pace) -> Exception | None:
        """Send a file; return why it could not be read."""
        moved = 0

        def blocks(item: Item, opened: Opened) -> Iterator[Bytes]:
            nonlocal moved
            for data in ahead(item, source, opened, pace):
                yield data
                pace.moved(len(data))
                moved += len(data)

        try:
            with closing(readable(lambda: source.open(item))) as opened:
                crc = item.crc or sum_of(item, source, opened, pace)
                item = item._replace(crc=crc)
                self._objects.write(item.name, blocks(item, opened), item.nbytes, crc)
        except BaseException as error:
            pace.moved(-moved)
            if isinstance(error, UnreadableError):
                return error.error
            raise
        return None

    def _error(self, number: int, why: str) -> OSError:
        return OSError(number, f"cannot {self._operation} to `{visible(self._target)}`: {why}", self._target)
