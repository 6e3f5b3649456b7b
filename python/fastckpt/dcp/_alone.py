"""A save of one process, which has all of its tensors whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fastckpt._api import in_flight
from fastckpt._api.single_process import SingleProcess
from fastckpt._files import TORCH_METADATA

from ._agreed import Boxes, Known, combine_told, decide_told
from ._metadata import torch_metadata
from ._structure import finish

if TYPE_CHECKING:
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._api.write import Agreed

    from ._brought import Brought


class Alone(SingleProcess):
    """The only process of a save, with its plan.

    Args:
        brought: the state to save, without boxes.
    """

    def __init__(self, brought: Brought) -> None:
        self._brought = brought

    def agree(self, request: SaveRequest) -> Agreed:
        """Resolve the plan.

        Raises:
            RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
            UnsupportedTypeError: something cannot be stored; the message names it.
            ValueError: two entries conflict, or ``model_key`` leads to no mapping.
        """
        values: dict[str, str] = {}
        known = Known(
            decide_told(combine_told([self._brought.told(compared=False)]), request.settings.files.model_key, values)
        )
        self._brought.fill(request, known, Boxes([[], []]))
        in_flight.wait_for_paths(request.path)
        agreed = super().agree(request)
        structure, entries = finish(agreed.structure, values, agreed.tensors)
        return replace(agreed, structure=structure, files=[(TORCH_METADATA, torch_metadata(entries))])
