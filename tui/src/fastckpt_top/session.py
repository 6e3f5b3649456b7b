"""The input of a view or an output: a model and its clock. `Live` reads processes, `replay.Replay` a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    from fastckpt_top.demo import DemoSource
    from fastckpt_top.feed import ShmFeed
    from fastckpt_top.model import Model
    from fastckpt_top.prometheus import Prometheus
    from fastckpt_top.record import Recorder
    from fastckpt_top.replay import Replay

    Session: TypeAlias = "Live | Replay"
    Sink: TypeAlias = Prometheus | Recorder


class Live:
    """Reads a source and passes each state to the sinks.

    Args:
        source: The source of snapshots.
        model: The model to update.
        sinks: The outputs for each state.

    Attributes:
        model: The model as of the last tick.
        sinks: The outputs, which may be changed at any time.
    """

    live = True

    def __init__(self, source: ShmFeed | DemoSource, model: Model, sinks: list[Sink] | None = None) -> None:
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
