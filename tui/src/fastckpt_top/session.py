"""The input of a view or an output: a model and its clock.

`Live` reads processes, `replay.Replay` a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastckpt_top.model import Model
    from fastckpt_top.snapshot import Source


class Sink(Protocol):
    """Something that writes the model down at each tick."""

    def write(self, model: Model) -> None:
        """Take in the current state of the model.

        Raises:
            OSError: It cannot be written.
        """

    def close(self) -> None:
        """Finish."""


class Session(Protocol):
    """A model that is updated."""

    live: bool

    @property
    def model(self) -> Model:
        """As of the last tick."""

    def tick(self) -> None:
        """Go on to the present."""

    def status(self) -> str:
        """A word on its position."""

    def close(self) -> None:
        """Close everything that is open."""


class Live:
    """Reads a source and hands each state to the sinks.

    Args:
        source: Where snapshots come from.
        model: The model that is fed.
        sinks: The outputs for each state.

    Attributes:
        model: As of the last tick.
        sinks: May be changed at any time.
    """

    live = True

    def __init__(self, source: Source, model: Model, sinks: list[Sink] | None = None) -> None:
        self.source = source
        self.model = model
        self.sinks: list[Sink] = sinks if sinks is not None else []

    def tick(self) -> None:
        """Look once.

        Raises:
            OSError: A sink cannot be written.
        """
        self.model.update(self.source.poll())
        for sink in self.sinks:
            sink.write(self.model)

    def status(self) -> str:
        """Always live."""
        return "live"

    def close(self) -> None:
        """Close source and sinks."""
        self.source.close()
        for sink in self.sinks:
            sink.close()
