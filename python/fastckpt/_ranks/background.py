"""Asynchronous saves of all ranks: each copies its part to host memory, and the rest happens in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt import _core
from fastckpt._background.background_save import BackgroundSave
from fastckpt._background.devices import mask
from fastckpt._state.collector import paused

if TYPE_CHECKING:
    from fastckpt._api.reports import SaveReport
    from fastckpt._api.save_request import SaveRequest

    from .peers import Operation
    from .process_group import ProcessGroup


class Job(BackgroundSave):
    """A save of one rank. Its snapshot holds this rank's parts: the layout of the files follows the agreement."""

    group: ProcessGroup

    def __init__(self, request: SaveRequest, group: ProcessGroup) -> None:
        assert request.sources is not None  # noqa: S101 - it has just been built
        tensors = [tensor for flat in request.parts for tensor in flat.tensors]
        # Small device tensors that are packed without gaps share a copy.
        joins = mask(request.sources, len(tensors), on_device=True)
        snapshot = _core.Snapshot.of_parts(tensors, joins, request.sources.fill)
        ranks = group.session if group.session.group.size > 1 else None
        super().__init__(request, snapshot, ranks, group.operation)
        self.group = group

    def turn(self) -> Operation:
        """The turn among the operations of the group."""
        return self.group.operation

    def alive(self) -> None:
        """Signal to the other ranks that this one is alive."""
        self.group.operation.alive()

    def _write(self) -> SaveReport:
        with paused():
            places = iter(self.snapshot.places())
            for flat in self.request.parts:
                flat.tensors[:] = [tensor._replace(address=next(places)[0]) for tensor in flat.tensors]
        return super()._write()
