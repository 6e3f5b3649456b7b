"""A save of several ranks: they exchange their differences, then agree as in any save."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastckpt._api import in_flight
from fastckpt._api.build_report import with_warnings
from fastckpt._files import TORCH_METADATA
from fastckpt._ranks.agreement import core_spread
from fastckpt._ranks.process_group import AgreedByRanks, ProcessGroup

from ._agreed import Boxes, Known, combine_cuts, combine_told, decide_cuts, decide_told
from ._brought import BOXES
from ._metadata import torch_metadata
from ._structure import finish
from ._united import warnings_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt import _core
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._ranks.agreement import JobState, TensorOf
    from fastckpt._ranks.peers import Operation
    from fastckpt._ranks.ranks import Ranks
    from fastckpt._ranks.session import Session

    from ._brought import Brought


class Together(ProcessGroup):
    """The ranks of a process group, each with a plan.

    Args:
        session: the process group.
        operation: the common operation of its ranks, which has been entered.
        ranks: the ranks, and how they save together.
        brought: the contribution of this rank.
    """

    def __init__(self, session: Session, operation: Operation, ranks: Ranks, brought: Brought) -> None:
        super().__init__(session, operation, ranks)
        self._brought = brought
        self._boxes = Boxes([[], []])
        self._warnings: list[str] = []

    def agree(self, request: SaveRequest) -> AgreedByRanks:
        """Agree on the state of the job: the rounds ``values`` and, if there are any, ``boxes`` come first.

        Raises:
            RanksError: another rank failed, or does not answer.
            UnsupportedTypeError: something cannot be stored; the message names it.
            ValueError: the plans do not fit together, or ``model_key`` leads to no mapping.
        """
        brought, operation, settings = self._brought, self.operation, request.settings
        in_flight.wait_for_paths(request.path)
        values: dict[str, str] = {}
        known = Known(
            operation.round(
                "values",
                brought.told(compared=self.ranks.replicas != "first"),
                combine=combine_told,
                decide=lambda told: [
                    *decide_told(told, settings.files.model_key, values),
                    *warnings_of(request.path, told[1], told[2], self.ranks),
                ],
            )
        )
        self._warnings = known.warnings
        if known.strange:
            self._boxes = Boxes(
                operation.round(
                    "boxes",
                    brought.cuts(known),
                    combine=combine_cuts,
                    decide=lambda told: decide_cuts(told, operation.alive),
                )
            )
        # The options of the coordinator apply.
        request.settings = replace(settings, files=settings.files._replace(model_key=known.model_key))
        brought.fill(request, known, self._boxes)
        agreed = super().agree(request)
        if brought.rank:
            return replace(agreed, files=[(TORCH_METADATA, b"")])
        structure, entries = finish(agreed.structure, values, agreed.tensors)
        return replace(agreed, structure=structure, files=[(TORCH_METADATA, torch_metadata(entries))])

    def write(self, *args: Any) -> Mapping[str, Any]:
        """Write a checkpoint together; the report has the warnings about values."""
        return with_warnings(super().write(*args), self._warnings)

    def _spread(self, job: JobState) -> tuple[list[TensorOf], list[_core.Spread]]:
        """The tensors and spreads of a job, in which a cut becomes one spread for each mesh that has boxes of it."""
        spreads: list[_core.Spread] = []
        numbers = []
        for spread in job.spreads:
            (kind, cut, _) = spread.placements[0] if spread.placements else ("", 0, 0)
            made = self._boxes.core(cut) if kind == BOXES else [core_spread(spread)]
            numbers.append(range(len(spreads), len(spreads) + len(made)))
            spreads += made
        tensors = [
            tensor._replace(spreads=tuple(number for spread in tensor.spreads for number in numbers[spread]))
            for tensor in job.tensors
        ]
        return tensors, spreads

    def _terms(self, request: SaveRequest) -> list[list[list[Any]]]:
        """The options without the step, because the metadata of ranks other than the coordinator do not count."""
        return [super()._terms(request)[0], []]
