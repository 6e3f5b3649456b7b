"""Records the monitor's input, as JSON lines, for `--replay`."""

from __future__ import annotations

import gzip
import io
import os
from typing import TYPE_CHECKING, Final, TextIO

from fastckpt_top.jsonout import Ticks, dumps, header_line

if TYPE_CHECKING:
    from fastckpt_top.model import Model
    from fastckpt_top.session import Sink

IDLE_S: Final = 10.0
"""While no operation runs, one tick in so many seconds is enough."""
_FLUSH_S: Final = 5.0


class Recording:
    """A recording that the user starts and stops.

    Attributes:
        path: The file being written; empty while there is none.
    """

    def __init__(self) -> None:
        self.path = ""
        self._recorder: Recorder | None = None
        self._sinks: list[Sink] = []

    def toggle(self, sinks: list[Sink], path: str) -> str:
        """Start or stop it.

        Args:
            sinks: Of the session.
            path: File for a new one.

        Returns:
            A message for the user.
        """
        recorder = self._recorder
        if recorder is not None:
            return self.stop() or f"recorded {recorder.ticks} ticks to {recorder.path}"
        try:
            self._recorder = Recorder(path)
        except OSError as error:
            return f"cannot record to {path}: {error.strerror}"
        sinks.append(self._recorder)
        self.path, self._sinks = path, sinks
        return f"recording to {path}"

    def stop(self) -> str:
        """Stop it if it runs.

        Returns:
            Why the file could not be finished; empty if it is whole.
        """
        recorder, self._recorder, self.path = self._recorder, None, ""
        if recorder is None:
            return ""
        self._sinks.remove(recorder)
        try:
            recorder.close()
        except OSError as error:
            return f"cannot write {recorder.path}: {error.strerror or error}"
        return ""


class Recorder:
    """Writes a recording. Only ticks with a running operation or an event, and one in `IDLE_S` seconds without.

    Args:
        path: The file, mode 0600; compressed if it ends in `.gz`. An existing file is overwritten.

    Attributes:
        path: The file.
        ticks: Ticks written.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.ticks = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        raw = os.fdopen(descriptor, "wb")
        self._raw = raw
        packed = gzip.GzipFile(fileobj=raw, mode="wb", filename="") if path.endswith(".gz") else None
        self._packed = packed
        self._out: TextIO = io.TextIOWrapper(packed or raw, "ascii", write_through=True)
        self._builder = Ticks()
        self._pending: tuple[str, object] | None = None
        self._written = float("-inf")
        self._flushed = float("-inf")
        self._events = 0
        self._header = False

    def write(self, model: Model) -> None:
        """Take in the current state of the model.

        Raises:
            OSError: The file cannot be written.
        """
        if not self._header:
            self._header = True
            self._out.write(dumps(header_line(model)))
        busy = model.node.active or model.event_count != self._events
        self._events = model.event_count
        if not busy and model.mono - self._written < IDLE_S:
            tick, sent = self._builder.build(model)
            self._pending = (dumps(tick), sent)
            return
        if busy and self._pending is not None:  # rates after a pause need the moment before
            line, sent_then = self._pending
            self._out.write(line)
            self._builder.commit(sent_then)  # type: ignore[arg-type]
            self.ticks += 1
        self._pending = None
        self._out.write(dumps(self._builder.next(model)))
        self.ticks += 1
        self._written = model.mono
        if self._packed is None or model.mono - self._flushed >= _FLUSH_S:
            self._flushed = model.mono
            self._out.flush()
            self._raw.flush()

    def close(self) -> None:
        """Finish the file."""
        self._out.close()
        if self._packed is not None:
            self._packed.close()
        self._raw.close()
