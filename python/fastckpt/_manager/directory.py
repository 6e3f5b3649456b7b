"""The directory of a run: which names are checkpoints, which are pinned, and the file ``latest``.

Only the directories count. A directory with the name of a step is a whole checkpoint, because a save gives it that name
last; the file ``latest`` only repeats one of the names, for people and scripts, and no code here reads it.

A pin is an empty file beside the checkpoint, ``step-00001000.pin``: it is set and removed in one step of the file
system, several programs can set pins at once, it outlives a save that replaces the checkpoint, and ``touch`` sets one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import string
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, TypeAlias

from fastckpt._api.manage import leftovers, remove, remove_leftover, strange_in
from fastckpt._durable import sync

LATEST = "latest"
#: A temporary file that will be renamed to a file of the run.
_NEW = re.compile(r"\.(?:latest|fastckpt-run\.json)\.[0-9a-f]{16}\.new")
#: How often a writer whose temporary file was removed writes it again.
_TURNS = 100
PIN = ".pin"
MANIFEST = "fastckpt.json"
#: The suffix of the directory for other files from a removed checkpoint.
FOREIGN = ".foreign"

#: The facts that distinguish a checkpoint from another of the same name.
Identity: TypeAlias = tuple[int, int, int]


class Names:
    """The names of checkpoints, from a format such as ``step-{step:08d}``."""

    def __init__(self, form: str) -> None:
        problem = f'Manager: name must be a format such as "step-{{step:08d}}", not {form!r}'
        try:
            parts = list(string.Formatter().parse(form))
        except (TypeError, ValueError):
            raise ValueError(problem) from None
        fields = [part for part in parts if part[1] is not None]
        texts = "".join(part[0] for part in parts)
        if len(fields) != 1 or fields[0][1] != "step" or fields[0][3]:
            raise ValueError(f"{problem}: it must contain {{step}} exactly once")
        if "/" in texts or "\0" in texts or os.sep in texts or form.startswith(".") or form.endswith(PIN):
            raise ValueError(f"{problem}: it must give a plain name, without a dot at the start or {PIN} at the end")
        self._form = form
        first = parts.index(fields[0])
        before = "".join(part[0] for part in parts[: first + 1])
        after = "".join(part[0] for part in parts[first + 1 :])
        # A digit beside the number would be read as part of it.
        if before[-1:].isdigit() or after[:1].isdigit():
            raise ValueError(f"{problem}: a digit beside {{step}} would be read as part of the number")
        self._pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
        try:
            whole = [self.step_of(form.format(step=step)) == step for step in (0, 7, 10**12)]
        except (LookupError, TypeError, ValueError):
            whole = [False]
        if not all(whole):
            raise ValueError(f"{problem}: the step must come out as decimal digits")

    def name_of(self, step: int) -> str:
        """The name of the checkpoint of a step."""
        return self._form.format(step=step)

    def step_of(self, name: str) -> int | None:
        """The step whose checkpoint has this name; None if it is not the name of a checkpoint."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        step = int(found[1])
        # Without this check, two names could have the same step.
        return step if self._form.format(step=step) == name else None


class Listing(NamedTuple):
    """The steps that have a checkpoint, ascending, and which of them are pinned."""

    steps: list[int]
    pinned: set[int]


class Directory:
    """The directory of a run, by its absolute path, and the names of its checkpoints."""

    def __init__(self, path: str, names: Names) -> None:
        self.path, self.names = path, names

    def path_of(self, step: int) -> str:
        """The path of the checkpoint of a step."""
        return f"{self.path}{os.sep}{self.names.name_of(step)}"

    def look(self) -> Listing:
        """The checkpoints in a directory, by their names only."""
        steps, pins = [], set()
        step_of = self.names.step_of
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    name = entry.name
                    step = step_of(name)
                    if step is not None:
                        if entry.is_dir(follow_symlinks=False):
                            steps.append(step)
                    elif name.endswith(PIN) and (step := step_of(name[: -len(PIN)])) is not None:
                        pins.add(step)
        except FileNotFoundError:
            return Listing([], set())
        steps.sort()
        return Listing(steps, pins.intersection(steps))

    def pin(self, step: int) -> None:
        """Pin the checkpoint of a step, durably."""
        with Path(self.path_of(step) + PIN).open("ab") as file:
            os.fsync(file.fileno())
        sync(self.path)

    def is_pinned(self, step: int) -> bool:
        """Whether the checkpoint is pinned now."""
        return os.path.lexists(self.path_of(step) + PIN)

    def unpin(self, step: int) -> None:
        """Remove the pin."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.path_of(step) + PIN).unlink()
        sync(self.path)

    def remove(self, step: int, files: Collection[str]) -> str:
        """Remove the checkpoint of a step; other files in it are first moved into a directory beside it.

        ``files`` are the names of the files given with ``files=``.

        Returns:
            The moved files and their new place, in words; empty if none were moved.

        Raises:
            NotACheckpointError: the path holds no checkpoint.
            OSError: it cannot be removed, or a file was added at this moment; FileNotFoundError if it is gone.
        """
        path = self.path_of(step)
        strange = strange_in(path, files)
        aside = path + FOREIGN
        if strange:
            # The pin of an earlier checkpoint of this step may still exist.
            while os.path.lexists(aside):
                aside += "+"
            Path(aside).mkdir()
            for name in strange:
                Path(aside, name).parent.mkdir(exist_ok=True)
                Path(path, name).rename(Path(aside, name))
            for inside in {str(Path(aside, name).parent) for name in strange} | {aside}:
                sync(inside)
            sync(self.path)
        # If the checkpoint is pinned at this moment, the pin stays.
        remove(path, files=files)
        return f"now in {aside}: {', '.join(strange)}" if strange else ""

    def read(self, name: str) -> bytes:
        """The content of a small file of the run.

        Raises:
            OSError: the file cannot be read; FileNotFoundError if it does not exist.
        """
        return Path(self.path, name).read_bytes()

    def replace(self, name: str, content: bytes, *, durable: bool) -> None:
        """Replace the content of a file of the run in one step; a reader finds the old content or the new one.

        Without ``durable`` a power cut may leave the file empty.
        """
        for turn in range(_TURNS):
            new = Path(self.path, f".{name.removeprefix('.')}.{secrets.token_hex(8)}.new")
            try:
                with new.open("xb") as file:
                    file.write(content)
                    if durable:
                        file.flush()
                        os.fsync(file.fileno())
                new.replace(Path(self.path, name))
            except BaseException as error:
                with contextlib.suppress(OSError):
                    new.unlink()
                # Another manager may have removed the temporary file in a sweep.
                if isinstance(error, FileNotFoundError) and turn < _TURNS - 1:
                    continue
                raise
            return

    def settle(self) -> None:
        """Make the last :meth:`replace` durable."""
        sync(self.path)

    def identity(self, name: str) -> Identity | None:
        """A value that distinguishes a checkpoint from others of the same name; None if there is no checkpoint.

        It holds the modification times of directory and manifest, and the manifest's inode.
        """
        path = f"{self.path}{os.sep}{name}"
        try:
            # Paths are strings here, because this runs for each of thousands of checkpoints.
            changed = os.stat(path, follow_symlinks=False).st_mtime_ns  # noqa: PTH116
            manifest = os.stat(f"{path}{os.sep}{MANIFEST}", follow_symlinks=False)  # noqa: PTH116
        except OSError:
            return None
        return changed, manifest.st_ino, manifest.st_mtime_ns

    def sweep(self) -> None:
        """Remove files left by a process that was killed within :meth:`replace`.

        No proof is needed that the writer is dead: a live one writes the file again.
        """
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if _NEW.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()

    def sweep_copies(self, is_over: Callable[[int], bool]) -> None:
        """Sweep, and remove leftovers of killed copies of each step that no process continues, as ``is_over`` reports.

        Raises:
            OSError: the directory cannot be read.
        """
        self.sweep()
        for one in leftovers(self.path):
            step = self.names.step_of(one.checkpoint)
            # The leftover of a copy names no host.
            if not one.host and one.state == "dead" and step is not None and is_over(step):
                with contextlib.suppress(FileNotFoundError):  # another manager has removed it
                    remove_leftover(self.path, one.name)

    def forget(self, step: int) -> None:
        """Do nothing: :meth:`sweep_copies` finds the leftovers of a copy that no process continues."""
