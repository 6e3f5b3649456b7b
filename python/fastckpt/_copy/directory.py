"""A copy to a directory: collects its files beside it, then publishes all at once (docs/format.md, 6.4)."""

from __future__ import annotations

import errno
import stat
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fastckpt import _core, _crc64
from fastckpt._durable import sync
from fastckpt._portable.limits import MANIFEST
from fastckpt.exceptions import CorruptCheckpointError

from .moves import memory_of, move
from .pace import BLOCK
from .shares import bring_share
from .sources import Summed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._core import Gathering, Incoming

    from .pace import Pace
    from .plan import Plan
    from .sources import Bytes, Item, Opened, Source


class ToDirectory:
    """The target of a copy that is a directory."""

    def __init__(self, operation: str, target: str, *, overwrite: bool) -> None:
        self._operation = operation
        self._target = target
        self._overwrite = overwrite
        self._linked: list[int] = []

    def has(self, plan: Plan) -> bool:
        """Whether the checkpoint is there durably, judged by the manifest and the lengths of the files.

        Raises:
            OSError: its name cannot be made durable.
        """
        try:
            about = Path(self._path(MANIFEST)).lstat()
            if about.st_size != len(plan.manifest) or Path(self._path(MANIFEST)).read_bytes() != plan.manifest:
                return False
            lengths = [Path(self._path(item.name)).lstat() for item in plan.items]
        except OSError:
            return False
        if not all(
            stat.S_ISREG(about.st_mode) and about.st_size == item.nbytes
            for about, item in zip(lengths, plan.items, strict=True)
        ):
            return False
        # The copy that named the checkpoint may have been killed, or may have failed, before it synced that name.
        sync(Path(self._target).parent)
        return True

    def bring(self, plan: Plan, pace: Pace, share: tuple[int, int]) -> tuple[int, list[str]]:
        """Copy a share of the files; the first process then copies missing files, and publishes the checkpoint.

        Returns:
            Bytes that this process did not need to move, and warnings.
        """
        try:
            gathering = _core.Gathering(self._target, plan.manifest, self._overwrite)
        except FileExistsError as error:
            # The core's message names a save.
            why = str(error.strerror).replace("cannot save", f"cannot {self._operation}", 1)
            raise FileExistsError(error.errno, why, error.filename) from None
        leave = gathering.close
        try:
            if not plan.heals(self._target) and self.has(plan):
                # Another process published the checkpoint a moment ago.
                leave = gathering.give_up
                return plan.nbytes, []
            reused = self._bring_share(plan, gathering, pace, share)
            if share[0]:
                return reused, []
            warnings = gathering.publish([(item.name, item.nbytes) for item in plan.items])
            leave = gathering.give_up
            return reused, warnings  # noqa: TRY300 - `leave` selects the clean-up
        except BaseException as error:
            if not share[0] and _is_of_no_use(error):
                leave = gathering.give_up
            gone = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ESTALE, errno.EEXIST)
            if gone and not plan.heals(self._target) and self.has(plan):
                # Another copy of the same checkpoint was faster, and removed the collected files.
                leave = gathering.give_up
                return plan.nbytes, []
            raise
        finally:
            leave()

    def _path(self, name: str) -> str:
        return str(Path(self._target, name))

    def _bring_share(self, plan: Plan, gathering: Gathering, pace: Pace, share: tuple[int, int]) -> int:
        def missing() -> list[Item]:
            held = dict(gathering.held())
            return [item for item in plan.items if held.get(item.name) != item.nbytes]

        def make(source: Source, item: Item) -> _Copied:
            return (
                _Linked(gathering, source, item, self._linked)
                if source.place == self._target
                else _Copied(gathering, item)
            )

        def bring(items: Sequence[Item]) -> None:
            plan.bring(items, lambda items, source: move(items, source, lambda item: make(source, item), pace))

        return bring_share(plan.items, share, pace, missing, bring) + sum(self._linked)


def _is_of_no_use(error: BaseException) -> bool:
    """Whether no later copy could continue with the collected files, or they do not fit on the disk."""
    if isinstance(error, (CancelledError, KeyboardInterrupt, TimeoutError)):
        return False
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EEXIST)
    return full or isinstance(error, CorruptCheckpointError)


class _Copied:
    """A file that is written."""

    def __init__(self, gathering: Gathering, item: Item) -> None:
        self._gathering = gathering
        self._name = item.name
        self._file: Incoming | None = gathering.begin(item.nbytes)

    def put(self, start: int, data: Bytes) -> int:
        """See :class:`Sink`."""
        assert self._file is not None  # noqa: S101 - no block comes after the end
        return self._gathering.write(self._file, start, data.ctypes.data, len(data))

    def end(self, opened: Opened) -> None:
        """See :class:`Sink`."""
        del opened
        assert self._file is not None  # noqa: S101
        file, self._file = self._file, None
        self._gathering.keep(file, self._name)

    def drop(self) -> None:
        """See :class:`Sink`."""
        if self._file is not None:
            with suppress(OSError):
                self._gathering.drop(self._file)


class _Linked(_Copied):
    """A file that stays unchanged at the target: it is read and compared, and linked."""

    def __init__(self, gathering: Gathering, source: Source, item: Item, linked: list[int]) -> None:
        self._gathering = gathering
        self._source = source
        self._item = item
        self._name = item.name
        self._file = None
        self._linked = linked

    def put(self, start: int, data: Bytes) -> int:
        """See :class:`Sink`."""
        del start
        return _crc64.of(data)

    def end(self, opened: Opened) -> None:
        """See :class:`Sink`."""
        assert opened.identity is not None  # noqa: S101 - a target with links is a directory
        try:
            self._gathering.link(self._source.place, self._name, opened.identity)
        except OSError:
            # The file has too many links or another owner, or the file system has no hard links.
            self._copy(opened)
        else:
            self._linked.append(self._item.nbytes)

    def _copy(self, opened: Opened) -> None:
        summed = Summed(self._source.path_of(self._name), self._item, BLOCK)
        memory = memory_of(min(BLOCK, self._item.nbytes))
        self._file = self._gathering.begin(self._item.nbytes)
        for number, (start, nbytes) in enumerate(summed.blocks):
            data = memory[:nbytes]
            opened.read_into(start, data)
            summed.put(number, _Copied.put(self, start, data))
        summed.compare()
        _Copied.end(self, opened)
