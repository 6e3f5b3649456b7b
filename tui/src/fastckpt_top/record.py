"""Records the monitor's input, as JSON lines, for `--replay`."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastckpt_top.jsonout import Sent, Ticks, dumps, header_line

if TYPE_CHECKING:
    from fastckpt_top.model import Model

IDLE_S: Final = 10.0
"""Seconds between ticks while no operation runs."""
LARGEST: Final = 256 << 20
"""The most bytes of a file: about two hours of a job of 64 ranks that saves all the time."""
_FLUSH_S: Final = 5.0


class Recorder:
    """Writes a recording: ticks with a running operation or an event, and otherwise one tick per `IDLE_S` seconds.

    A file that has become too large is renamed to `save.1.jsonl.gz`, replacing an earlier one, and the recording
    continues in a new file. Both files can be played.

    Args:
        path: The file, mode 0600; compressed if it ends in `.gz`. An existing file is overwritten.
        largest: The most bytes of a file.

    Attributes:
        path: The file.
        ticks: Ticks written.

    Raises:
        OSError: The recording cannot be written.
    """

    def __init__(self, path: str, largest: int = LARGEST) -> None:
        self.path = path
        self.ticks = 0
        self._largest = largest
        self._written = float("-inf")
        self._flushed = float("-inf")
        self._events = 0
        self._open()

    def _open(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._raw = os.fdopen(descriptor, "wb")
        packed = gzip.GzipFile(fileobj=self._raw, mode="wb", filename="") if self.path.endswith(".gz") else None
        self._out = io.TextIOWrapper(packed or self._raw, "ascii", write_through=True)
        self._builder = Ticks()
        self._pending: tuple[str, Sent] | None = None
        self._empty = True

    def write(self, model: Model) -> None:
        """Record the current state of the model.

        Raises:
            OSError: The file cannot be written.
        """
        if self._raw.tell() >= self._largest:
            self.close()
            name, _, kind = (path := Path(self.path)).name.partition(".")
            path.replace(path.with_name(f"{name}.1.{kind}"))
            self._open()
        if self._empty:
            self._empty = False
            self._out.write(dumps(header_line(model)))
        busy = model.node.active or model.event_count != self._events
        self._events = model.event_count
        if not busy and model.mono - self._written < IDLE_S:
            tick, sent = self._builder.build(model)
            self._pending = (dumps(tick), sent)
            return
        if busy and self._pending is not None:  # after a pause, rates need the previous tick
            line, sent = self._pending
            self._out.write(line)
            self._builder.commit(sent)
            self.ticks += 1
        self._pending = None
        self._out.write(dumps(self._builder.next(model)))
        self.ticks += 1
        self._written = model.mono
        if model.mono - self._flushed >= _FLUSH_S or not self.path.endswith(".gz"):
            self._flushed = model.mono
            self._out.flush()
            self._raw.flush()

    def close(self) -> None:
        """Finish the file."""
        self._out.close()
        self._raw.close()
