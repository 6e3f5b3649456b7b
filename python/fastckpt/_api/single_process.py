"""A save of one process. It has no state, so a signal handler may save during a save, and so may a forked child."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._state.groups import split_model
from fastckpt._tensors.ranges import range_of

from .write import Agreed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .save_request import SaveRequest


class SingleProcess:
    """This process by itself."""

    def agree(self, request: SaveRequest) -> Agreed:
        """Find the model.

        Raises:
            KeyError: a pattern of ``frozen`` matches nothing.
            ValueError: ``model_key`` leads to no mapping.
        """
        flat, sources = request.flat, request.sources
        prefix = split_model(request.operation, flat, request.settings.files.model_key)
        return Agreed(
            prefix=prefix,
            frozen=request.flags(tensor.name for tensor in flat.tensors),
            tensors=flat.tensors,
            structure=flat.structure(),
            metadata=request.metadata.structure(),
            fill=sources.fill if sources is not None and flat.movers else None,
            devices=() if sources is None else sources.devices,
            pulled=flat.pulled,
        )

    def write(
        self, request: SaveRequest, agreed: Agreed, options: _core.SaveOptions, progress: Callable[[int, int], None]
    ) -> Mapping[str, Any]:
        """Write the checkpoint."""
        about = (agreed.tensors, agreed.structure, agreed.metadata)
        return _core.save(request.path, *about, options, agreed.fill, progress, request.owners())


class FromSnapshot(SingleProcess):
    """This process by itself, with a snapshot of the state and an earlier agreement.

    Args:
        agreed: the earlier agreement.
        snapshot: the copy.
    """

    def __init__(self, agreed: Agreed, snapshot: _core.Snapshot) -> None:
        self._agreed = agreed
        self._snapshot = snapshot

    def agree(self, _: SaveRequest) -> Agreed:
        """The earlier agreement; the program's memory is no longer needed."""
        return self._agreed

    def write(
        self, request: SaveRequest, _: Agreed, options: _core.SaveOptions, progress: Callable[[int, int], None]
    ) -> Mapping[str, Any]:
        """Write the copy."""
        with range_of("fastckpt.write"):
            return self._snapshot.save(request.path, options, progress)
