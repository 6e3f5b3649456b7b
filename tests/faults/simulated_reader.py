"""Puts a state of the simulated disk on a real file system, and reads it with fastckpt."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import warnings
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import fastckpt
from faults.simulated_oracle import MISSING, PIN, PINNED
from faults.simulated_programs import BESIDE, file_of, state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.simulated_disk import State
    from faults.simulated_oracle import Found, Oracle

#: The version of a save that the reader makes over a state.
NEXT = 9_000
ONE_THREAD = fastckpt.IO("buffered", threads=1)


class Reader:
    """Reads states in a separate directory below ``place``, in memory, where no inode is ever reused."""

    def __init__(self, place: Path) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="reader-", dir=place))
        self.pool = self.place / "pool"
        self.pool.mkdir()
        self.contents: dict[bytes, str] = {}
        self.used = 0
        #: By path and content: the result of a read.
        self.known: dict[tuple[str, int], Any] = {}

    def key(self, found: State) -> int:
        """Return a key that is equal for indistinguishable states."""
        return hash(frozenset((path, data) for path, data in found.tree.items()))

    def put(self, found: State) -> Path:
        """Make the directories and files of a state."""
        self.used += 1
        root = self.place / f"state-{self.used}"
        root.mkdir()
        above = str(root)
        for path, data in found.tree.items():
            if data is None:
                os.mkdir(f"{above}/{path}")  # noqa: PTH102 - thousands a second
            elif not data:
                # An empty file may be a lock file, whose lock linked files would share.
                Path(above, path).touch()
            else:
                os.link(self._content(data), f"{above}/{path}")
        return root

    def _content(self, data: bytes) -> str:
        path = self.contents.get(data)
        if path is None:
            path = f"{self.pool}/{blake2b(data, digest_size=16).hexdigest()}"
            Path(path).write_bytes(data)
            self.contents[data] = path
        return path

    def clear(self) -> None:
        """Forget the contents of a program's states."""
        self.contents.clear()
        self.known.clear()
        shutil.rmtree(self.pool)
        self.pool.mkdir()

    def look(self, found: State, program: dict[str, Any], oracle: Oracle, *, go_on: bool) -> Found:
        """Return what each path holds and each restore finds; ``go_on``: also whether runs can continue.

        The result of a read depends only on the directory and on leftovers of the same name beside it. So a read of the
        same content is not repeated.
        """
        sizes = tuple(program["sizes"])
        paths = set(oracle.places)
        for run in [*oracle.runs, "remote"]:
            paths.update(path for path, data in found.tree.items() if data is None and _is_step(path, run))
        # The restore comes first: the other reads find the checkpoint that the restore puts back.
        wanted = [(path, _below(found, path)) for path in [*oracle.runs, *sorted(paths)]]
        root = self.put(found) if go_on or any(one not in self.known for one in wanted) else None
        seen: Found = {}
        try:
            with warnings.catch_warnings(), _quiet():
                warnings.simplefilter("error")
                for path, key in wanted:
                    if (path, key) not in self.known:
                        assert root is not None
                        read = restored if path in oracle.runs else loaded
                        self.known[path, key] = read(root / path, sizes)
                    seen[path] = self.known[path, key]
                if go_on and root is not None:
                    seen |= _gone_on(root, program, oracle, seen)
        finally:
            if root is not None:
                shutil.rmtree(root)
        return seen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the log: damage must cause an error."""
    logger = logging.getLogger("fastckpt")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_step(path: str, run: str) -> bool:
    return path.startswith(f"{run}/step-") and path.count("/") == 1


def _below(found: State, path: str) -> int:
    """Return a key that is equal for states in which a read of ``path`` has the same result."""
    above, _, name = path.rpartition("/")
    starts = (f"{path}/", f"{above}/.{name}." if above else f".{name}.")
    return hash(frozenset((one, data) for one, data in found.tree.items() if one == path or one.startswith(starts)))


def _gone_on(root: Path, program: dict[str, Any], oracle: Oracle, seen: Found) -> Found:
    """Return the faults when all runs and saves continue, and the leftovers after that."""
    new: Found = {}
    sizes, remote = tuple(program["sizes"]), root / "remote" if program["kind"] == "tiers" else None
    for run in oracle.runs:
        wrong = continued(root / run, remote, sizes, seen[run], fresh=oracle.runs[run].acknowledged < 0)
        new |= {f"{run}: going on": wrong} if wrong else {}
    for path in oracle.places:
        if not path.startswith(tuple(f"{run}/" for run in (*oracle.runs, "remote"))):
            wrong = saved_again(root, path, sizes)
            new |= {f"{path}: saving again": wrong} if wrong else {}
    new["litter"] = [str(one.relative_to(root)) for one in root.rglob(".*.???-*")]
    return new


@lru_cache(64)
def _expected(version: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    return state(version, list(sizes))


def version_of(found: Any, sizes: tuple[int, ...]) -> Any:
    """Return the version of a state, or its fault."""
    version = int(found["version"])
    expected = _expected(version, sizes)
    same = found["model"].keys() == expected["model"].keys() and all(
        np.array_equal(found["model"][name], each) for name, each in expected["model"].items()
    )
    if not same or not np.array_equal(found["moment"], expected["moment"]):
        return f"other values under the version {version}"
    return version


def loaded(path: Path, sizes: tuple[int, ...]) -> Any:
    """Return the version at a path, ``MISSING``, or the fault."""
    try:
        if path.suffix == PIN:
            return PINNED if path.exists() else MISSING
        if path.suffix == ".file":
            return _file(path, sizes)
        version = version_of(fastckpt.load(path, io=ONE_THREAD), sizes)
        beside = path / BESIDE
        if beside.exists() and beside.read_bytes()[:12] != b'{"version": ':
            return f"{BESIDE} holds {beside.read_bytes()[:20]!r}"
    except FileNotFoundError as error:
        return str(error) if path.exists() else MISSING
    except Exception as error:  # noqa: BLE001 - it is what was found
        return f"{type(error).__name__}: {error}"
    return version


def _file(path: Path, sizes: tuple[int, ...]) -> Any:
    data = path.read_bytes()
    version = int.from_bytes(data[:4], "little")
    return version if data == b"".join(file_of(version, list(sizes))) else "the file holds something else"


def restored(path: Path, sizes: tuple[int, ...]) -> Any:
    """Return the step and the version of a restore, ``MISSING``, or the fault."""
    try:
        found = fastckpt.Manager(path, ranks="alone", read_only=True).restore(io=ONE_THREAD)
    except Exception as error:  # noqa: BLE001 - it is what was found
        return f"{type(error).__name__}: {error}"
    if found is None:
        return MISSING
    version = version_of(found.state, sizes)
    return version if isinstance(version, str) else (found.step, version)


def continued(path: Path, remote: Path | None, sizes: tuple[int, ...], before: Any, *, fresh: bool) -> str:
    """Return the fault when a run continues from a found state; ``fresh``: or begins, if nothing was acknowledged.

    Leftovers of a copy to the remote tier are a trace of a run, at which a restore stops until a person decides.
    """
    try:
        with fastckpt.Manager(path, ranks="alone", keep=2, async_save=False, remote=remote) as manager:
            found = manager.restore(fresh=fresh)
            step = found.step + 1 if found else 1
            if (found is None) != (before == MISSING) or (found and found.step != before[0]):
                return f"another restore finds {found}"
            manager.save(step, state(NEXT, list(sizes)))
        after = restored(path, sizes)
    except Exception as error:  # noqa: BLE001 - it is what was found
        return f"{type(error).__name__}: {error}"
    return "" if after == (step, NEXT) else f"the next save is not restored, but {after}"


def saved_again(root: Path, path: str, sizes: tuple[int, ...]) -> str:
    """Return the fault of the next save to that path."""
    place = root / path
    try:
        if place.suffix == ".file":
            with fastckpt.open_write(place) as file:
                for piece in file_of(NEXT, list(sizes)):
                    file.write(piece)
        else:
            fastckpt.save(state(NEXT, list(sizes)), place, io=ONE_THREAD)
    except Exception as error:  # noqa: BLE001 - it is what was found
        return f"{type(error).__name__}: {error}"
    after = loaded(place, sizes)
    return "" if after == NEXT else f"the next save is not loaded, but {after}"
