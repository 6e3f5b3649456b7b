"""The files of a copy, and the source of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt.exceptions import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .sources import Item, Source


class Plan:
    """A checkpoint in one or more places.

    The manifest is the first undamaged one among the sources. A source with another manifest is left out. A source with
    a damaged manifest may still have whole files: each is compared with its checksum.

    Args:
        sources: the places of the checkpoint, the nearest first.

    Attributes:
        manifest: the bytes of the manifest.
        items: all other files.
        nbytes: bytes of all files.

    Raises:
        CorruptCheckpointError, FileNotFoundError, another OSError or another CheckpointError: no source has an
            undamaged manifest; this is the error of the first source.
        ValueError: the contents of a source cannot be copied.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._lost: list[Exception] = []
        self._sources: list[Source] = []
        found: tuple[bytes, list[Item]] | None = None
        for source in sources:
            try:
                here = source.manifest()
            except CorruptCheckpointError as error:  # noqa: PERF203 - the loop has one or two turns
                self._lost.append(error)
                self._sources.append(source)
            except (CheckpointError, OSError) as error:
                self._lost.append(error)
            else:
                found = found or here
                if here[0] == found[0]:
                    self._sources.append(source)
        if found is None:
            raise self._lost[0]
        self.manifest, shards = found
        self._shards = shards
        self._beside = [source.beside(self.manifest, shards) for source in self._sources]
        beside: dict[str, Item] = {}
        for items in self._beside:
            for item in items:
                beside.setdefault(item.name, item)
        self.items = [*shards, *beside.values()]
        self.nbytes = len(self.manifest) + sum(item.nbytes for item in self.items)

    def heals(self, target: str) -> bool:
        """Whether the target is one of the sources, so that its damaged files are replaced."""
        return any(source.place == target for source in self._sources)

    def is_replaced(self) -> bool:
        """Whether no source still has the same manifest, and beside it the same files with the same lengths."""
        return not any(map(self._is_as_it_was, self._sources, self._beside))

    def _is_as_it_was(self, source: Source, beside: list[Item]) -> bool:
        try:
            return source.manifest()[0] == self.manifest and source.beside(self.manifest, self._shards) == beside
        except CorruptCheckpointError:
            return True
        except (CheckpointError, OSError):
            return False

    def bring(self, items: Sequence[Item], step: Callable[[Sequence[Item], Source], dict[str, Exception]]) -> None:
        """Bring each of ``items`` from the first source that has it.

        Args:
            items: the files.
            step: copies files from a source, and returns the errors of files that it could not read, by name.

        Raises:
            CorruptCheckpointError: a file is damaged or missing everywhere.
            OSError: a source that may have it could not be read.
        """
        left = list(items)
        errors: list[Exception] = []
        for source in self._sources:
            if left:
                failed = step(left, source)
                left = [item for item in left if item.name in failed]
                errors += [failed[item.name] for item in left]
        if left:
            # Damage is reported only if every source could be read.
            passing = [error for error in (*errors, *self._lost) if not isinstance(error, CorruptCheckpointError)]
            raise (passing or errors)[0]
