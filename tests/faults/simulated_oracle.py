"""Derives the allowed findings after a power cut from the marks of a program, without reading files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING = "missing"
#: The suffix of a pin file, and the number that stands for its version.
PIN, PINNED = ".pin", 1
#: For each path and run: the version that was found whole, ``MISSING``, or a description of the fault.
Found = dict[str, Any]


@dataclass
class Kept:
    """A place: the versions that were saved there, in order, and the last acknowledged version."""

    versions: list[int] = field(default_factory=list)
    acknowledged: int = -1
    #: Whether the checkpoint may have been removed since.
    gone: bool = False

    def begin(self, version: int) -> None:
        self.versions.append(version)

    def acknowledge(self, version: int) -> None:
        place = len(self.versions) - 1 - self.versions[::-1].index(version)
        if place > self.acknowledged:
            self.acknowledged, self.gone = place, False

    def removed(self) -> None:
        self.versions, self.acknowledged, self.gone = [], -1, False

    def judge(self, found: Any) -> str:
        """Return the fault, or an empty string."""
        allowed = self.versions[max(0, self.acknowledged) :]
        if found == MISSING:
            return "" if self.gone or self.acknowledged < 0 else f"version {allowed[0]} was acknowledged and is missing"
        if isinstance(found, str):
            return found
        return "" if found in allowed else f"version {found} was found, but only {allowed} may be there"


@dataclass
class Run:
    """The checkpoints of a manager, which determine the allowed results of its restore."""

    keep: int = 1
    #: Steps and versions in the order in which their saves began.
    line: list[tuple[int, int]] = field(default_factory=list)
    acknowledged: int = -1
    #: The step to which the program goes back, while it removes newer steps.
    back: int | None = None
    pinned: set[int] = field(default_factory=set)

    def begin(self, place: tuple[int, int]) -> None:
        self.line.append(place)

    def acknowledge(self, place: tuple[int, int]) -> None:
        at = len(self.line) - 1 - self.line[::-1].index(place)
        self.acknowledged = max(at, self.acknowledged)

    def judge(self, found: Any) -> str:
        """Return the fault of a restore, or an empty string."""
        allowed = self.line[max(0, self.acknowledged) :]
        if found == MISSING:
            return "" if self.acknowledged < 0 else f"nothing was restored, but {allowed[0]} was acknowledged"
        if isinstance(found, str):
            return found
        if self.back is not None and found[0] >= self.back:
            allowed = self.line
        return "" if tuple(found) in allowed else f"{found} was restored, but only {allowed} may be"


class Oracle:
    """Reads the marks of a program, and judges findings after a power cut."""

    def __init__(self) -> None:
        self.places: dict[str, Kept] = {}
        self.runs: dict[str, Run] = {}
        #: Faults that the program itself found.
        self.wrong: list[str] = []

    def place(self, path: str) -> Kept:
        """Return the record of a path."""
        return self.places.setdefault(path, Kept())

    def hear(self, said: dict[str, Any]) -> None:
        """Take a mark."""
        if "run" in said:
            self._hear_run(said, self.runs.setdefault(said["run"], Run()))
            return
        kept, event = self.place(said["path"].replace("|", "/")), said["event"]
        if event == "begin":
            kept.begin(said["version"])
        elif event == "ack":
            kept.acknowledge(said["version"])
        elif event == "remove":
            kept.gone = True
        elif event == "removed":
            kept.removed()

    def _hear_run(self, said: dict[str, Any], run: Run) -> None:
        event, step = said["event"], said["step"]
        place = self.place(path_of(said["run"], step))
        if event == "begin":
            run.keep = said["keep"]
            run.begin((step, said["version"]))
            place.begin(said["version"])
            self._may_go(said["run"], run, step)
        elif event == "ack":
            run.acknowledge((step, said["version"]))
            place.acknowledge(said["version"])
            self._may_go(said["run"], run, run.line[-1][0])
        elif event == "pinned":
            run.pinned.add(step)
            pin = self.place(path_of(said["run"], step) + PIN)
            pin.begin(PINNED)
            pin.acknowledge(PINNED)
        elif event == "restored":
            wrong = run.judge((step, said["version"]))
            self.wrong += [f"in the program: {wrong}"] if wrong else []
        elif event == "back":
            # From the next save on, an abandoned branch does not count.
            self._leave(said["run"], step)
            if said["discard"]:
                run.back = step
        elif event == "went back":
            run.begin((step, said["version"]))
            if said["discard"]:
                run.acknowledge((step, said["version"]))
                run.back = None

    def _may_go(self, name: str, run: Run, step: int) -> None:
        """Allow retention to remove all but the newest checkpoints."""
        steps = sorted({one for one, _ in run.line if one <= step}, reverse=True)
        for old in steps[run.keep :]:
            if old not in run.pinned:
                self.place(path_of(name, old)).gone = True

    def _leave(self, name: str, step: int) -> None:
        for path, kept in self.places.items():
            if path.startswith(f"{name}/") and path > path_of(name, step):
                kept.gone = True

    def judge(self, found: Found) -> list[str]:
        """Return the faults of the findings after a power cut."""
        wrong = list(self.wrong)
        for path, kept in self.places.items():
            why = kept.judge(found.get(path, MISSING))
            wrong += [f"{path}: {why}"] if why else []
        for name, run in self.runs.items():
            why = run.judge(found.get(name, MISSING))
            wrong += [f"{name}: restore: {why}"] if why else []
        # Report findings of unknown paths, and other failures.
        for path, what in found.items():
            if isinstance(what, str) and what != MISSING and path not in self.places and path not in self.runs:
                wrong.append(f"{path}: {what}")
        return wrong


def path_of(run: str, step: int) -> str:
    """Return the path of a checkpoint of a run."""
    return f"{run}/step-{step:08d}"
