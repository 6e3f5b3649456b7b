"""Programs before a power cut, and the states that are allowed afterwards."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fastckpt
from harness.states import numbered, same, which

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINES = ("uring", "threads", "buffered")
CONSTANT = np.arange(30_000)


class Scene:
    """Saves with numbers that begin at 1.

    Attributes:
        nbytes: bytes of a state.
        engine: the engine of the saves.
    """

    #: The number of saves.
    count = 3
    #: The engine of the load.
    reader = "buffered"

    def __init__(self, nbytes: int, engine: str) -> None:
        self.nbytes, self.engine = nbytes, engine

    def play(self, point: Path, begin: Callable[[int], None], end: Callable[[int], None]) -> None:
        """Make all saves in a separate process; call ``begin`` before each, and ``end`` as its acknowledgement."""
        for number in range(1, self.count + 1):
            begin(number)
            self.save(point, number)
            end(number)

    def save(self, point: Path, number: int) -> None:
        """Make the save with this number."""
        fastckpt.save(self.state(number), self.path(point, number), io=self.engine)

    def state(self, number: int) -> dict[str, object]:
        """Return the state to save."""
        return numbered(number, self.nbytes)

    def path(self, point: Path, number: int) -> Path:  # noqa: ARG002 - some have a path each
        """Return the path of a save: here, the same path for all saves."""
        return point / "step"

    def found(self, path: Path) -> int:
        """Return the number of the checkpoint at ``path``, 0 if there is none.

        Raises:
            Exception: the checkpoint is damaged or mixed.
        """
        try:
            state = fastckpt.load(path, io=self.reader)
        except FileNotFoundError:
            return 0
        return which(state, self.nbytes)

    def wrong(self, point: Path, begun: int, acknowledged: int) -> str:
        """Return the fault after a cut, given the last begun and acknowledged saves, or an empty string."""
        found = self.found(self.path(point, 1))
        return "" if acknowledged <= found <= begun else f"{acknowledged} was acknowledged, and {found} is there"


class Overwrites(Scene):
    """Saves to one path, repeatedly."""

    count = 4


class FirstSaves(Scene):
    """Each save has a different path, below directories that the first save makes."""

    def path(self, point: Path, number: int) -> Path:
        return point / "runs" / "mine" / f"step-{number}"

    def wrong(self, point: Path, begun: int, acknowledged: int) -> str:
        for number in range(1, self.count + 1):
            found = self.found(self.path(point, number))
            if found not in ({number} if number <= acknowledged else {0, number} if number <= begun else {0}):
                return f"step {number} of {acknowledged} acknowledged ones is {found}"
        return ""


class Shards(Overwrites):
    """Saves many shards, in two directories."""

    def state(self, number: int) -> dict[str, object]:
        return super().state(number) | {"constant": CONSTANT}

    def save(self, point: Path, number: int) -> None:
        files = fastckpt.Files(shard_size=self.nbytes // 5)
        fastckpt.save(self.state(number), self.path(point, number), io=self.engine, files=files)

    def found(self, path: Path) -> int:
        try:
            state = fastckpt.load(path, io=self.reader)
        except FileNotFoundError:
            return 0
        if not same(state.pop("constant"), CONSTANT):
            raise AssertionError("a constant has changed")
        return which(state, self.nbytes)


class Asynchronous(FirstSaves):
    """Saves in the background."""

    def save(self, point: Path, number: int) -> None:
        fastckpt.save_async(self.state(number), self.path(point, number), io=self.engine).result(120)


class Bases(Shards, FirstSaves):
    """Each save links unchanged files from the previous checkpoint, which is removed at the end."""

    def save(self, point: Path, number: int) -> None:
        base = self.path(point, number - 1) if number > 1 else None
        fastckpt.save(self.state(number), self.path(point, number), io=self.engine, base=base)

    wrong = FirstSaves.wrong
    path = FirstSaves.path
    count = 3


class GivenFiles(Overwrites):
    """Saves files beside the tensors, which a save carries over from the previous checkpoint."""

    @staticmethod
    def _files(number: int) -> dict[str, bytes]:
        return {"config.json": f"{number}".encode() * 9000, f"note-{number % 2}": f"{number}".encode()}

    def save(self, point: Path, number: int) -> None:
        fastckpt.save(self.state(number), self.path(point, number), io=self.engine, files=self._files(number))

    def wrong(self, point: Path, begun: int, acknowledged: int) -> str:
        path = self.path(point, 1)
        if said := super().wrong(point, begun, acknowledged):
            return said
        number = self.found(path)
        expected = (self._files(number - 1) if number > 1 else {}) | (self._files(number) if number else {})
        there = {name: (path / name).read_bytes() for name in expected if (path / name).exists()}
        return "" if there == expected else f"files of save {number}: {[(n, b[:2]) for n, b in there.items()]}"


class SingleFiles(Overwrites):
    """Writes a single file with ``open_write``."""

    def save(self, point: Path, number: int) -> None:
        with fastckpt.open_write(self.path(point, number), io=self.engine) as file:
            file.write(bytes([number]) * self.nbytes)

    def found(self, path: Path) -> int:
        if not path.exists():
            return 0
        data = path.read_bytes()
        if data != data[:1] * self.nbytes:
            raise AssertionError("the file is not of one save")
        return data[0]


class Copies(Overwrites):
    """Copies checkpoints from another disk."""

    def save(self, point: Path, number: int) -> None:
        source = Path("/dev/shm") / f"fastckpt-source-{point.parent.name}"
        try:
            fastckpt.save(self.state(number), source)
            fastckpt.copy(source, self.path(point, number), overwrite=True)
        finally:
            shutil.rmtree(source, ignore_errors=True)


class Removals(Scene):
    """Makes two saves and a removal."""

    def save(self, point: Path, number: int) -> None:
        if number == self.count:
            fastckpt.remove(self.path(point, number))
        else:
            super().save(point, number)

    def wrong(self, point: Path, begun: int, acknowledged: int) -> str:
        found = self.found(self.path(point, 1))
        allowed = {0} if acknowledged == self.count else {*range(acknowledged, begun + 1)}
        allowed = {0 if number == self.count else number for number in allowed}
        return "" if found in allowed else f"{found} is there, and {sorted(allowed)} may be"


class Managed(Scene):
    """A Manager that keeps one or two checkpoints, saves in the background, and sets ``latest``."""

    count = 5

    def play(self, point: Path, begin: Callable[[int], None], end: Callable[[int], None]) -> None:
        options = {"io": self.engine, "files": fastckpt.Files(shard_size=self.nbytes // 2)}
        run = fastckpt.Manager(point / "run", keep=1 + self.nbytes % 2, save_options=options)
        for number in range(1, self.count + 1):
            begin(number)
            run.save(number, self.state(number))
            if number % 2:
                run.wait()
                end(number)

    def wrong(self, point: Path, begun: int, acknowledged: int) -> str:
        if not (point / "run").exists():
            return "the run is gone" if acknowledged else ""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restored = fastckpt.Manager(point / "run", read_only=True).restore(fresh=acknowledged == 0)
        found = 0 if restored is None else which(restored.state, self.nbytes)
        return "" if acknowledged <= found <= begun else f"{acknowledged} was acknowledged, and {found} is restored"


class OfRanks(Scene):
    """Ranks save together, each time over the previous checkpoint."""

    size = 2

    def play_in_ranks(self, point: Path, tell: Callable[[str], None]) -> None:
        """Make all saves in the processes of a group of torch."""
        from faults import groups_that_go_on  # torch takes seconds
        from harness import groups

        program = groups_that_go_on.save_over
        with groups.forge() as forge, forge.group(self.size) as group:
            for number in range(1, self.count + 1):
                tell(f"begun {number}")
                group.run(program, str(point), number)
                tell(f"acknowledged {number}")

    def wrong(self, point: Path, begun: int, acknowledged: int) -> str:
        from faults import groups_that_go_on

        path = self.path(point, 1)
        if not path.exists():
            return f"{acknowledged} was acknowledged, and nothing is there" if acknowledged else ""
        why = [groups_that_go_on.not_of(path, number) for number in range(max(1, acknowledged), begun + 1)]
        return "" if "" in why else "; ".join(why)


class OfFourRanks(OfRanks):
    """Four ranks save together, so that more than one rank sends to rank 0."""

    size = 4


SCENES = (
    Overwrites,
    Managed,
    FirstSaves,
    Shards,
    Asynchronous,
    Bases,
    GivenFiles,
    SingleFiles,
    Copies,
    Removals,
)


def sweeps(point: Path) -> str:
    """Save once more to the same place; return the fault of that save or of leftovers, or an empty string."""
    for folder in (point, point / "runs" / "mine"):
        if folder.exists():
            fastckpt.save(numbered(99, 4096), folder / "after")
            if which(fastckpt.load(folder / "after", io="buffered"), 4096) != 99:
                return "the next save is not there"
            # Unfinished copies stay, so that the next copy can continue them.
            names = [one.name for one in fastckpt.clean(folder) if one.state == "dead"]
            if left := [name for name in names if ".copy-" not in name]:
                return f"the next save has left {left}"
    return ""
