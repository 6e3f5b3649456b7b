"""The run below a URL of an object store, with the interface of :class:`.directory.Directory`.

An object store has no directories and no rename: the names of a checkpoint's objects begin with its name, and it exists
once its manifest does, which is written last. A step that is saved again keeps its old checkpoint until the new
manifest replaces the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from fastckpt import _crc64
from fastckpt._stores.checkpoints import remove_leftovers

from .directory import LATEST, MANIFEST, PIN, Directory, Listing, Names

if TYPE_CHECKING:
    from fastckpt._stores.objects import Objects

    from .directory import Identity

logger = logging.getLogger("fastckpt")

#: The most manifests that are requested at the same time: each costs a round trip to the store.
_AT_A_TIME = 32
#: How often the listing is repeated while checkpoints change.
_LOOKS = 20
#: The most bytes of a small object of the run: a few hundred for each checkpoint.
_SMALL = 256 << 20
#: Seconds for which uploaded objects are not removed: their copy may still be running.
_UNDER_WAY = timedelta(days=1)


class Prefix:
    """The objects of a run, and the names of its checkpoints."""

    def __init__(self, objects: Objects, names: Names) -> None:
        self._objects = objects
        self.path = objects.url
        self.names = names
        #: The steps for which the last listing found objects but no manifest.
        self.unfinished: set[int] = set()
        #: The steps for which the last listing found objects.
        self._begun: set[int] = set()
        #: The result of the last listing, by name, until it is used: this saves a round trip for each.
        self._looked: dict[str, Identity] = {}

    def path_of(self, step: int) -> str:
        """The URL of the checkpoint of a step."""
        return f"{self.path}/{self.names.name_of(step)}"

    def look(self) -> Listing:
        """The checkpoints that exist: those that have a manifest.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        step_of = self.names.step_of
        before: list[int] | None = None
        for _ in range(_LOOKS):
            prefixes, objects = self._objects.children()
            begun = sorted(step for step in map(step_of, prefixes) if step is not None)
            whole = self.whole(map(self.names.name_of, begun))
            steps = [step for step in map(step_of, whole) if step is not None]
            # From here on, other threads may remove items from `whole`.
            self._looked = whole
            # A checkpoint whose manifest is gone since the listing may have been removed for a newer one that did not
            # exist then.
            missing = sorted({*begun} - {*steps})
            if not missing or missing == before:
                break
            before = missing
        self.unfinished, self._begun = {*missing}, {*begun}
        pins = (step_of(name.removesuffix(PIN)) for name in objects if name.endswith(PIN))
        return Listing(steps, {step for step in pins if step is not None}.intersection(steps))

    def names_below(self) -> tuple[list[str], list[str]]:
        """The names that have objects below them, and the objects at this level.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        names, objects = self._objects.children()
        return names, sorted(objects)

    def pin(self, step: int) -> None:
        """Pin the checkpoint of a step."""
        self._objects.write(self._pin(step), [], 0, None)

    def is_pinned(self, step: int) -> bool:
        """Whether the checkpoint is pinned now."""
        try:
            self._objects.size(self._pin(step))
        except FileNotFoundError:
            return False
        return True

    def unpin(self, step: int) -> None:
        """Remove the pin."""
        if self.is_pinned(step):
            self._objects.remove([self._pin(step)])

    def remove(self, step: int, files: Collection[str]) -> str:
        """Remove the checkpoint of a step; other files stay.

        ``files`` are the names of the files given with ``files=``.

        Returns:
            The files that stay, in words; empty if there are none.

        Raises:
            OSError: the store does not answer, or refuses; FileNotFoundError if there is no checkpoint.
        """
        from fastckpt._stores.checkpoints import remove  # noqa: PLC0415 - for a URL alone

        strange = remove(self.path_of(step), force=False, files=files, leave=True)
        return f"still in {self.path_of(step)}: {', '.join(strange)}" if strange else ""

    def read(self, name: str) -> bytes:
        """The content of a small object of the run.

        Raises:
            OSError: the object cannot be read; FileNotFoundError if it does not exist.
        """
        return self._objects.read_all(name, _SMALL)

    def replace(self, name: str, content: bytes, *, durable: bool) -> None:  # noqa: ARG002 - a store knows no other way
        """Replace the content of an object of the run in one step."""
        self._objects.write(name, [content], len(content), None)

    def settle(self) -> None:
        """Do nothing: an object that a store has accepted is durable."""

    def identity(self, name: str) -> Identity | None:
        """A value that distinguishes a checkpoint from others of the same name; None if there is no checkpoint."""
        return self._looked.pop(name, None) or self._identity(name)

    def _identity(self, name: str) -> Identity | None:
        manifest = f"{name}/{MANIFEST}"
        try:
            noted = self._objects.sum_of(manifest)
            if noted is not None and _crc64.are_digits(noted, 1):
                return 0, int(noted, 16), 0
            # Another program has uploaded the manifest.
            return self._objects.size(manifest), 0, 0
        except FileNotFoundError:
            return None

    def sweep_copies(self, is_over: Callable[[int], bool]) -> None:
        """Remove leftovers of killed copies, from this host or another, of steps for which ``is_over`` returns True.

        A store cannot show whether an object is still being written: objects younger than a day stay.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        over = sorted(step for step in self.unfinished if is_over(step))
        if not over:
            return
        now = self._objects.modified(LATEST)
        for step in over:
            below = self._objects.below(self.names.name_of(step))
            if all(now - below.modified(name) > _UNDER_WAY for name in below.sizes()):
                self.forget(step)
                self.unfinished.discard(step)

    def forget(self, step: int) -> None:
        """Remove leftovers of killed copies of a step that no process continues, if the last listing found any.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        if step not in self._begun:
            # If saves are fast, most steps are never copied, and a request for each would take longer than its save.
            return
        below = self._objects.below(self.names.name_of(step))
        count = remove_leftovers(below)
        if count:
            logger.info("%s: removed %d objects left by an interrupted copy", below.url, count)

    def whole(self, names: Iterable[str]) -> dict[str, Identity]:
        """The given names that have a manifest, in the same order, each with the identity of its checkpoint.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        names = [*names]
        with ThreadPoolExecutor(_AT_A_TIME, "fastckpt-look") as threads:
            found = zip(names, threads.map(self._identity, names), strict=True)
            return {name: identity for name, identity in found if identity is not None}

    def _pin(self, step: int) -> str:
        return self.names.name_of(step) + PIN


#: The part of the URL above the checkpoints of a run.
Place: TypeAlias = Directory | Prefix
