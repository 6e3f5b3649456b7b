"""A shard of a checkpoint that another library reads: its tensors are compared with the checksums in the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt._stores.reader import open_reader

from ._directory import is_ours

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fastckpt import _core


class Shard:
    """A file that a manifest lists, mapped.

    Args:
        reader: the checkpoint.
        tensors: by the names in the file's header, the number of each; of an empty one that of ``other``.
        other: the number of the tensor with the fewest bytes, but for empty ones, if there is one. Where any is
            compared, the header is, too.
    """

    def __init__(self, reader: _core.Reader, tensors: dict[str, list[int]], other: list[int]) -> None:
        self._reader = reader
        self._tensors = tensors
        self._other = other
        self._mappings = reader.map([at for numbers in tensors.values() for at in numbers])
        self._sound: set[int] = set()

    @classmethod
    def at(cls, path: Path) -> Shard | None:
        """The shard at ``path``, which goes through no symbolic link; None if no manifest lists the file."""
        for root in filter(is_ours, path.parents[:2]):
            reader = open_reader("safe_open", str(root))
            file = path.relative_to(root).as_posix()
            for number, shard in enumerate(reader.shards()):
                if shard.file == file:
                    stored = [(one, [at]) for at, one in enumerate(reader.tensors()) if one.shard == number]
                    other = min(((one.nbytes, at) for one, at in stored if one.nbytes), default=(0, []))[1]
                    names = {one.name.removeprefix(shard.prefix): at if one.nbytes else other for one, at in stored}
                    return cls(reader, names, other)
        return None

    def check(self, names: Iterable[str], threads: int | None = None) -> None:
        """Compare these tensors and the header, unless they were compared before.

        Raises:
            CorruptCheckpointError: one is damaged.
            ReplacedCheckpointError: another checkpoint has taken the path of this one.
        """
        # A name that the manifest lacks is wrong, or the header is.
        numbers = {at for name in names for at in self._tensors.get(name, self._other)} - self._sound
        if numbers:
            self._reader.check(self._mappings, sorted(numbers), threads=threads, tick=None)
            self._sound |= numbers
