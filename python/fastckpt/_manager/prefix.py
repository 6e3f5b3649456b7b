"""The run below a URL of an object store: the same questions as to a :class:`.directory.Directory`.

An object store has no directories, and nothing in it gets a name last: the names of a checkpoint's objects begin with
that of the checkpoint, and it is one as soon as its manifest is there, which is written last and removed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fastckpt import _crc64

from .directory import LATEST, MANIFEST, PIN, Listing, Names

if TYPE_CHECKING:
    from fastckpt._stores.objects import Objects

    from .directory import Identity

#: How many manifests are asked for at a time: each costs a journey to the store and back.
_AT_A_TIME = 32
#: How often it is looked again while checkpoints come and go.
_LOOKS = 20
#: The most bytes of a small object of the run: a few hundred for each checkpoint.
_SMALL = 256 << 20


class Prefix:
    """The run below a URL.

    Args:
        objects: what lies there.
        names: the names of its checkpoints.
    """

    def __init__(self, objects: Objects, names: Names) -> None:
        self._objects = objects
        self.path = objects.url
        self.names = names
        #: What the last look found, by name, until somebody has asked for it: one journey less for each.
        self._looked: dict[str, Identity] = {}

    def path_of(self, step: int) -> str:
        """The URL of the checkpoint of a step."""
        return f"{self.path}/{self.names.name_of(step)}"

    def look(self) -> Listing:
        """Which checkpoints there are: those that have a manifest.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        step_of = self.names.step_of
        before: list[int] | None = None
        for _ in range(_LOOKS):
            prefixes, objects = self._objects.children()
            begun = sorted(step for step in map(step_of, prefixes) if step is not None)
            steps = self._whole(begun)
            # What has lost its manifest since it was listed may have gone for a newer one, which was not there then.
            missing = sorted({*begun} - {*steps})
            if not missing or missing == before:
                break
            before = missing
        pins = (step_of(name.removesuffix(PIN)) for name in objects if name.endswith(PIN))
        return Listing(steps, {step for step in pins if step is not None}.intersection(steps))

    def newest(self) -> int | None:
        """The newest step that has a manifest."""
        return max(self.look().steps, default=None)

    def pin(self, step: int) -> None:
        """Pin the checkpoint of a step."""
        self._objects.write(self._pin(step), [], 0, None)

    def is_pinned(self, step: int) -> bool:
        """Whether there is a pin, as of now."""
        return self._has(self._pin(step))

    def unpin(self, step: int) -> None:
        """Take the pin off."""
        if self.is_pinned(step):
            self._objects.remove([self._pin(step)])

    def write_latest(self, step: int) -> None:
        """Have ``latest`` name the checkpoint of a step."""
        self.replace(LATEST, f"{self.names.name_of(step)}\n".encode(), durable=True)

    def read(self, name: str) -> bytes:
        """The content of a small object of the run.

        Raises:
            OSError: it cannot be read; FileNotFoundError where there is none.
        """
        return self._objects.read_all(name, _SMALL)

    def replace(self, name: str, content: bytes, *, durable: bool) -> None:  # noqa: ARG002 - a store knows no other way
        """Give an object of the run a new content in one step."""
        self._objects.write(name, [content], len(content), None)

    def identity(self, name: str) -> Identity | None:
        """What another checkpoint under the same name would not have; None where there is none."""
        return self._looked.pop(name, None) or self._identity(name)

    def _identity(self, name: str) -> Identity | None:
        manifest = f"{name}/{MANIFEST}"
        try:
            noted = self._objects.sum_of(manifest)
            if noted is not None and _crc64.are_digits(noted, 1):
                return 0, int(noted, 16), 0
            # Another program has brought it.
            return self._objects.size(manifest), 0, 0
        except FileNotFoundError:
            return None

    def sweep_copies(self, is_over: Callable[[int], bool]) -> None:
        """A store does not tell whether somebody still writes to a name: nothing is removed by a look around."""

    def forget(self, step: int) -> None:
        """Remove what killed copies left of a step with which nobody goes on.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        name = self.names.name_of(step)
        if not self._has(f"{name}/{MANIFEST}"):
            below = self._objects.below(name)
            below.remove(below.sizes())

    def _whole(self, steps: Iterable[int]) -> list[int]:
        """Those of these steps that have a manifest, in the same order."""
        names = {step: self.names.name_of(step) for step in steps}
        with ThreadPoolExecutor(_AT_A_TIME, "fastckpt-look") as threads:
            found = dict(zip(names, threads.map(self._identity, names.values()), strict=True))
        self._looked = {names[step]: identity for step, identity in found.items() if identity is not None}
        return [step for step, identity in found.items() if identity is not None]

    def _has(self, name: str) -> bool:
        try:
            self._objects.size(name)
        except FileNotFoundError:
            return False
        return True

    def _pin(self, step: int) -> str:
        return self.names.name_of(step) + PIN
