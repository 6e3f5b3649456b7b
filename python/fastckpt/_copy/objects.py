"""A copy to an object store: its manifest comes last, and without a manifest it is not a checkpoint."""

from __future__ import annotations

import errno
import logging
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING

from fastckpt import _crc64
from fastckpt._files import TORCH_METADATA
from fastckpt._foreign import writer_of
from fastckpt._portable.limits import MANIFEST, MAX_MANIFEST
from fastckpt._portable.listing import is_ours
from fastckpt._stores.layout import Layout, file_of, folder_of, leftovers, sums_of
from fastckpt._stores.objects import WHOLE, Objects
from fastckpt._text import visible

from .moves import UnreadableError, ahead, readable, sum_of, watched
from .shares import bring_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fastckpt._stores.objects import Version

    from .pace import Pace
    from .plan import Plan
    from .sources import Bytes, Item, Opened, Source

logger = logging.getLogger("fastckpt")

#: Files that are sent at the same time: files in parts, which keep the network busy except at their beginning and end,
#: and whole files.
_LARGE, _SMALL = 4, 8
#: Seconds between two checks for files sent by other processes.
_EVERY = 1.0
#: How often files that another copy removes are sent again.
_TURNS = 5


class ToObjects:
    """The target of a copy that is a URL."""

    def __init__(self, operation: str, target: str, *, overwrite: bool) -> None:
        self._operation = operation
        self._target = target
        self._overwrite = overwrite
        self._objects = Objects.at(operation, target)

    def has(self, plan: Plan) -> bool:
        """Whether the checkpoint is there: the manifest, all files with their lengths, the shards with their checksums.

        If so, objects of an earlier copy that was killed after its manifest are removed.
        """
        before = self._manifest()
        if before is None or before.content != plan.manifest:
            return False
        sizes = self._objects.sizes()
        if self._missing(plan, sizes):
            return False
        self._clear(self._old(plan, before, sizes))
        return True

    def bring(self, plan: Plan, pace: Pace, share: tuple[int, int]) -> tuple[int, list[str]]:
        """Send a share of the files; the first process then sends missing files, and finally the manifest.

        Returns:
            Bytes that this process did not need to move, and warnings.
        """
        before = self._manifest()
        self._refuse(plan, before)

        def bring(items: Sequence[Item]) -> None:
            plan.bring(items, lambda items, source: self._send_each(items, source, plan, pace))

        reused = bring_share(plan.items, share, pace, lambda: self._missing(plan, self._objects.sizes()), bring, _EVERY)
        if share[0]:
            return reused, []
        self._settle(plan, bring)
        # A copy that begins after this listing adds objects that are not in it.
        old = self._old(plan, before, self._objects.sizes())
        if before is None or before.content != plan.manifest:
            self._commit(plan, before)
            self._settle(plan, bring)
        self._clear(old)
        return reused, []

    def _commit(self, plan: Plan, before: Version | None) -> None:
        """Replace the old manifest; only one of several simultaneous copies can do that."""
        try:
            self._objects.replace(MANIFEST, plan.manifest, _crc64.to_hex(_crc64.of(plan.manifest)), before)
        except FileExistsError:
            # The answer to a repeated request may be about the first request.
            now = self._manifest()
            if now is None or now.content != plan.manifest:
                raise self._busy() from None

    def _settle(self, plan: Plan, bring: Callable[[Sequence[Item]], None]) -> None:
        """Send the files again that another copy has removed meanwhile as leftovers of an earlier copy."""
        for _ in range(_TURNS):
            left = self._missing(plan, self._objects.sizes())
            if not left:
                return
            bring(left)
        raise self._busy()

    def _manifest(self) -> Version | None:
        try:
            return self._objects.read_version(MANIFEST, MAX_MANIFEST)
        except FileNotFoundError:
            return None

    def _missing(self, plan: Plan, sizes: Mapping[str, int]) -> list[Item]:
        """The files that are missing or have another length, and the shards that have another checksum."""
        files = Layout(plan.manifest, sizes).files
        there = [item for item in plan.items if item.name in files and files[item.name].nbytes == item.nbytes]
        sums = sums_of(self._objects, [files[item.name].name for item in there if item.is_shard])
        whole = {item.name for item in there if not item.is_shard or sums[files[item.name].name] == item.crc}
        return [item for item in plan.items if item.name not in whole]

    def _refuse(self, plan: Plan, before: Version | None) -> None:
        """Raise FileExistsError for objects that must not be replaced."""
        names = list(self._objects.sizes())
        for name in names:
            # A copy keeps its files in a separate folder.
            own = "/" in name or (is_ours(name) and name != TORCH_METADATA)
            who = None if own else writer_of(name)
            if who is not None and (before is None or name.endswith(".distcp")):
                raise self._error(errno.EEXIST, f"it holds `{name}`, which {who} wrote: choose another name")
        for name in names:
            if "/" in file_of(name) and not is_ours(file_of(name)):
                raise self._error(errno.EEXIST, f"it holds `{name.partition('/')[0]}/`: choose another name")
        if before is not None and before.content != plan.manifest and not self._overwrite:
            raise self._error(errno.EEXIST, "another checkpoint is there, and overwrite=False")
        if before is not None:
            return
        # Objects of an earlier copy have a checksum.
        doubtful = [name for name in names if not self._overwrite or is_ours(file_of(name))]
        for name, noted in sums_of(self._objects, doubtful).items():
            if noted is None:
                raise self._error(
                    errno.EEXIST, f"it holds `{name}` and is not a checkpoint of fastckpt: choose another name"
                )

    def _old(self, plan: Plan, before: Version | None, sizes: Mapping[str, int]) -> list[str]:
        """The objects of other saves, and of interrupted copies."""
        files = Layout(plan.manifest, sizes).files
        used = {MANIFEST, *(files[item.name].name for item in plan.items if item.name in files)}
        # Another tool may have uploaded the checkpoint to be replaced, without checksums.
        bare = [name for name in sizes if before is not None and is_ours(name) and name not in used]
        return [*leftovers(self._objects, sizes, plan.manifest), *bare]

    def _clear(self, names: Sequence[str]) -> None:
        """Remove these objects. The copy is whole, whether they are removed now or later."""
        try:
            self._objects.remove(names)
        except OSError as error:
            logger.warning("%s: leftovers of an earlier copy are not removed: %s", self._target, error)

    def _send_each(self, items: Sequence[Item], source: Source, plan: Plan, pace: Pace) -> dict[str, Exception]:
        """Send files; return the errors of unreadable files, by name."""
        failed: dict[str, Exception] = {}
        folder = folder_of(plan.manifest)
        for in_parts, at_once in ((True, _LARGE), (False, _SMALL)):
            left = deque(item for item in items if (item.nbytes > WHOLE) == in_parts)

            def send(left: deque[Item] = left) -> None:
                while left:
                    try:
                        item = left.popleft()
                    except IndexError:
                        return
                    error = self._send(item, source, folder, pace)
                    if error is not None:
                        failed[item.name] = error

            watched([send] * min(at_once, len(left)), pace)
        return failed

    def _send(self, item: Item, source: Source, folder: str, pace: Pace) -> Exception | None:
        """Send a file; return an error if it could not be read."""
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
                self._objects.write(f"{folder}/{item.name}", blocks(item, opened), item.nbytes, crc)
        except BaseException as error:
            pace.moved(-moved)
            if isinstance(error, UnreadableError):
                return error.error
            raise
        return None

    def _busy(self) -> OSError:
        return self._error(errno.EBUSY, "another copy to it is running: copy again when it has ended")

    def _error(self, number: int, why: str) -> OSError:
        return OSError(number, f"cannot {self._operation} to `{visible(self._target)}`: {why}", self._target)
