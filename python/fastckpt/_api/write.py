"""The order of the steps of every save, by one process or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .build_report import build_report, with_warnings
from .io import deadline_of
from .lent import lent
from .reports import SaveReport

if TYPE_CHECKING:
    from fastckpt import _core
    from fastckpt._tensors.movers import Range

    from .save_request import SaveRequest

    Fill = Callable[[Sequence[Range]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The agreement of a group: the contents of the checkpoint, and the part of this process.

    Attributes:
        prefix: the prefix of the model's tensor names; empty if all of the state is the model.
        training_prefix: a prefix of names that are never the model's; empty for none.
        frozen: for each tensor, whether it will not change; empty if that is unknown.
        files: further files for the directory.
        tensors: the tensors, in the core's form.
        structure: the structure of the state, JSON.
        metadata: the structure of the metadata, JSON.
        fill: copies the bytes of tensors without an address; None if all have one. It must not refer to the object that
            holds the core: the garbage collector could not see that cycle.
        devices: the devices of these tensors.
        pulled: the number of bytes that ``fill`` copies.
    """

    prefix: str
    training_prefix: str = ""
    frozen: Sequence[bool] = ()
    files: Sequence[tuple[str, bytes]] = ()
    tensors: Sequence[Any] = ()
    structure: str = ""
    metadata: str = ""
    fill: Fill | None = None
    devices: Sequence[Any] = ()
    pulled: int = 0


_A = TypeVar("_A", bound=Agreed)


class Group(Protocol[_A]):
    """The processes that save together: one, or the ranks of a process group."""

    def agree(self, request: SaveRequest, /) -> _A:
        """Agree on the contents of the checkpoint, equally on all ranks."""

    def write(
        self, request: SaveRequest, agreed: _A, options: _core.SaveOptions, progress: Callable[[int, int], None], /
    ) -> Mapping[str, Any]:
        """Write the checkpoint durably under its final name, and return the core's report."""


def write(
    request: SaveRequest,
    group: Group[_A],
    progress: Callable[[int, int], None],
    told: Callable[[], Mapping[str, Any]] = dict,
) -> SaveReport:
    """Save; returns the report.

    Args:
        request: the save.
        group: the processes that save.
        progress: called with bytes written and bytes to write by this process.
        told: called at the end for further fields of the report, and for ``warnings``.

    Raises:
        Exception: nothing was committed, unless the message says that the outcome is unknown.
    """
    agreed = group.agree(request)
    with lent(agreed.devices, agreed.pulled) as staging:
        core = group.write(request, agreed, core_options(request, agreed, staging.core), progress)
    more = dict(told())
    casts = () if request.tailor is None else request.tailor.warnings
    core = with_warnings(core, staging.warnings, casts, more.pop("warnings", ()))
    return build_report(SaveReport, request.path, request.began, core, step=request.step, **more)


def core_options(request: SaveRequest, agreed: Agreed, staging: _core.Memory | None = None) -> _core.SaveOptions:
    """The core's options for this agreement."""
    settings = request.settings
    return settings.core(
        files=[*settings.files.beside, *agreed.files],
        model_prefix=agreed.prefix,
        training_prefix=agreed.training_prefix,
        base=request.base,
        frozen=agreed.frozen,
        nice=request.nice,
        deadline=deadline_of(settings.io, background=request.counters is not None),
        step=request.step,
        elapsed=time.perf_counter() - request.began,
        operation=request.counters,
        staging=staging,
    )
