"""Plays a recording: a model fed with recorded ticks, and a position that can be moved."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import time
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from fastckpt_top import targets
from fastckpt_top.jsonout import SCHEMA, proc_values
from fastckpt_top.model import Model
from fastckpt_top.snapshot import Proc, Snapshot
from fastckpt_top.text import clean, clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt_top.segment import Header
    from fastckpt_top.targets import Target

CHECKPOINT: Final = 128
"""Ticks between two kept copies of the model, which make it fast to go back."""
SPEEDS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
_BROKEN: Final = (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError)


class ReplayError(Exception):
    """The recording cannot be read; the message gives the reason."""


class Recording:
    """The lines of a recording, parsed one by one as they are needed.

    Args:
        path: A file of JSON lines, compressed if it ends in `.gz`.

    Attributes:
        header: The first line.
        times: Reader's clock of each tick, seconds.
        first: The first tick with a running operation; 0 without one.

    Raises:
        ReplayError: The file cannot be read, is not a recording, or is one of another major version.
    """

    def __init__(self, path: str) -> None:
        lines = _read_lines(path)
        if not lines:
            raise ReplayError(f"{path}: empty")
        self.header = self._json(lines[0], path, 1)
        schema = self.header.get("schema")
        if not isinstance(schema, str) or not schema.startswith("fastckpt-top/"):
            raise ReplayError(f"{path}: not a recording of fastckpt-top")
        if schema != SCHEMA:
            raise ReplayError(f"{path}: recorded as {clean(schema)}, but this version plays {SCHEMA}")
        if self.header.get("kind") == "header":
            lines.pop(0)
        if not lines:
            raise ReplayError(f"{path}: no ticks")
        self._lines = lines
        self._path = path
        self._headers: dict[str, Header] = {}
        self._ended: dict[str, Proc] = {}
        self.times: list[float] = []
        busy: list[int] = []
        for number, line in enumerate(lines):
            tick = self._json(line, path, number + 2)
            try:
                mono = float(tick["mono"])
                if not busy and any(op["running"] for op in tick.get("ops", ())):
                    busy.append(number)
            except _BROKEN as error:
                raise ReplayError(f"{path}: line {number + 2}: {error!r}") from None
            if self.times and not mono >= self.times[-1]:
                raise ReplayError(f"{path}: line {number + 2}: time goes back")
            self.times.append(mono)
        self.first = busy[0] if busy else 0

    def __len__(self) -> int:
        return len(self._lines)

    def snapshot(self, index: int) -> Snapshot:
        """The snapshot of a tick; ticks must first be read in order, because headers come only once.

        Raises:
            ReplayError: The line is broken.
        """
        tick = self._json(self._lines[index], self._path, index + 2)
        try:
            procs = tuple(self._proc(raw) for raw in tick["procs"])
            problems = tuple((clean(str(p["path"])), clean(str(p["reason"]))) for p in tick.get("problems", []))
            host = clean(str(tick["node"]["host"]))
            devices = {int(number): clean(str(name)) for number, name in tick.get("devices", {}).items()}
            return Snapshot(float(tick["mono"]), float(tick["t"]), host, procs, problems, (self._path,), devices)
        except _BROKEN as error:
            raise ReplayError(f"{self._path}: line {index + 2}: {error!r}") from None

    def _proc(self, raw: dict[str, Any]) -> Proc:
        if raw.get("same"):
            return self._ended[raw["key"]]
        header, process, operations, threads, history = proc_values(raw, self._headers)
        proc = Proc(
            key=str(raw["key"]),
            path=clean(str(raw["path"])),
            header=header,
            process=process,
            operations=tuple(operations),
            threads=tuple(threads),
            history=tuple(history),
            alive=bool(raw["alive"]),
            same_clock=bool(raw["same_clock"]),
            touched=float(raw["touched"]),
            state=clean(str(raw.get("state", ""))),
            user=clean(str(raw.get("user", ""))),
        )
        if not proc.alive:
            self._ended[proc.key] = proc
        return proc

    @staticmethod
    def _json(line: str, path: str, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ReplayError(f"{path}: line {number} is not JSON") from None
        if not isinstance(value, dict):
            raise ReplayError(f"{path}: line {number} is not an object")
        return value


def _open(path: str) -> TextIO:
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return Path(path).open(encoding="utf-8")


def _read_lines(path: str) -> list[str]:
    lines: list[str] = []
    try:
        # A recorder that was killed leaves an unfinished file: the part that was flushed is valid.
        with _open(path) as file, contextlib.suppress(EOFError):
            lines.extend(line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path}: {error.strerror or error if isinstance(error, OSError) else 'not text'}") from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # cut short while being written
    return lines


class Replay:
    """A recording being played, starting with its first operation.

    Args:
        path: The recording.
        target: The user's target; None for the target of the recording.
        gpus: The user's number of GPUs; None for that of the recording.
        speed: The speed at first, as a multiple of real time.
        now: Monotonic clock, seconds.
        job: Name or key of the only job that is looked at; empty for all.

    Attributes:
        model: The model at the current position.
        playing: Whether time passes.
        speed: The current speed, as a multiple of real time.

    Raises:
        ReplayError: The recording cannot be read.
    """

    live = False

    def __init__(
        self,
        path: str,
        target: Target | None = None,
        gpus: int | None = None,
        speed: float = 1.0,
        now: Callable[[], float] = time.monotonic,
        *,
        job: str = "",
    ) -> None:
        self.recording = Recording(path)
        header = self.recording.header
        try:
            if target is None and header.get("target"):
                raw = header["target"]
                target = targets.Target(
                    float(raw["save_Bps"]), float(raw["load_Bps"]), clean(str(raw["name"])), clean(str(raw["source"]))
                )
            if gpus is None and header.get("gpus") is not None:
                gpus = int(header["gpus"])
        except _BROKEN as error:
            raise ReplayError(f"{path}: header: {error!r}") from None
        self._target, self._gpus, self._job = target, gpus, job
        self._now = now
        self._then = now()
        self._copies: dict[int, Model] = {}
        self.playing = True
        self.speed = speed
        self.model = self._fresh()
        self._index = -1
        self._seek_index(self.recording.first)
        self._position = self.recording.times[self._index]

    @property
    def index(self) -> int:
        """Number of the tick that is shown."""
        return self._index

    def tick(self) -> None:
        """Let time pass, if it is playing."""
        now = self._now()
        passed, self._then = now - self._then, now
        if not self.playing:
            return
        self._position += passed * self.speed
        if self._position >= self.recording.times[-1]:
            self._position = self.recording.times[-1]
            self.playing = False
        self._seek_time()

    def toggle(self) -> None:
        """Play or pause; at the end, play from the beginning."""
        if not self.playing and self._index == len(self.recording) - 1:
            self.home()
        self.playing = not self.playing
        self._then = self._now()

    def step(self, ticks: int) -> None:
        """Move by ticks and pause."""
        self.playing = False
        self._seek_index(self._index + ticks)
        self._position = self.recording.times[self._index]

    def jump(self, seconds: float) -> None:
        """Move by seconds of the recording."""
        times = self.recording.times
        self._position = min(max(self._position + seconds, times[0]), times[-1])
        self._seek_time()

    def faster(self, by: int) -> None:
        """Change the speed by steps of two."""
        nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - self.speed))
        self.speed = SPEEDS[min(max(nearest + by, 0), len(SPEEDS) - 1)]

    def home(self) -> None:
        """Go to the beginning."""
        self._seek_index(0)
        self._position = self.recording.times[0]

    def end(self) -> None:
        """Go to the end."""
        self._seek_index(len(self.recording) - 1)
        self._position = self.recording.times[-1]
        self.playing = False

    def status(self) -> str:
        """`replay 00:12/01:30 x2`."""
        times = self.recording.times
        state = "replay" if self.playing else "paused"
        return f"{state} {clock(self._position - times[0])}/{clock(times[-1] - times[0])} x{self.speed:g}"

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _fresh(self) -> Model:
        return Model(self._target, self._gpus, self._job)

    def _seek_time(self) -> None:
        self._seek_index(bisect_right(self.recording.times, self._position) - 1)  # the last tick up to the position

    def _seek_index(self, index: int) -> None:
        index = min(max(index, 0), len(self.recording) - 1)
        if index == self._index:
            return
        chosen = self.model.target
        if index < self._index:
            base = max((at for at in self._copies if at <= index), default=-1)
            self.model = copy.deepcopy(self._copies[base]) if base >= 0 else self._fresh()
            self._index = base
        for at in range(self._index + 1, index + 1):
            self.model.update(self.recording.snapshot(at))
            if at % CHECKPOINT == 0 and at not in self._copies:
                self._copies[at] = copy.deepcopy(self.model)
        self._index = index
        if self.model.target != chosen:  # going back keeps the user's choice
            self.model.set_target(chosen)
