"""The writer for torch.distributed.checkpoint: all ranks write one checkpoint of fastckpt."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api.io import give_report
from fastckpt._api.outcome import Attempt, conclude
from fastckpt._api.progress import ticker
from fastckpt._api.reports import SaveReport
from fastckpt._api.save_request import SaveRequest, warn_of_types
from fastckpt._api.save_settings import WriteOptions, WriteSettings
from fastckpt._api.settings import takes
from fastckpt._api.write import write
from fastckpt._paths import AnyPath, path_of
from fastckpt._ranks.ranks import check_ranks
from fastckpt._ranks.session import Session, session
from fastckpt._ranks.torch_distributed import this_process
from fastckpt._state.registry import Types
from fastckpt.exceptions import CheckpointError

from . import _torch
from ._alone import Alone
from ._brought import Brought
from ._label import forget, label_of, labelled
from ._stager import Stager
from ._together import Together

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastckpt._api.write import Group


class _Now(threading.local):
    """The save of the current thread: while one runs for ``async_save``, the next one begins in another thread."""

    path: str | None = None
    coordinates = True
    alone = False
    written = False
    local: _torch.SavePlan | None = None


@takes(WriteSettings, like={WriteSettings: "fastckpt.save"}, ranks=True)
class Writer(_torch.StorageWriter):
    """A StorageWriter for ``torch.distributed.checkpoint.save`` and ``async_save``.

    The checkpoint equals that of :func:`fastckpt.distributed.save` of the same state: whole tensors under their dotted
    names, the same bytes for any number of ranks. It is durable and has its name when ``dcp.save`` returns; a save that
    fails on any rank leaves the old checkpoint unchanged. The writer is also an ``AsyncStager``
    (:class:`fastckpt.dcp.Stager`), so ``async_save`` copies the state into memory that is kept for the next save.

    Beside the manifest it writes a file ``.metadata``, with keys, sizes and dtypes in torch's form, for other tools.
    torch's own reader does not find the bytes, and its FileNotFoundError names :class:`fastckpt.dcp.Reader`. fastckpt
    never reads this file.

    What torch changes before a writer sees the state remains: keys are strings, empty mappings are left out, mappings
    are plain dicts, and a value that is not a tensor is that of the lowest rank that has it, even if torch's plan
    assigns it to another rank. The numbers of parameters in a plain ``optimizer.state_dict()`` return as numbers; if
    they refer to different parameters on different ranks, the save is refused: pass the result of
    ``get_optimizer_state_dict``.

    Values that several ranks have under one key are compared, except with ``Ranks(replicas="first")``. If tensors or
    arrays in them differ in any byte, ``Ranks(on_difference=)`` decides. If numbers, strings or bytes differ, that is a
    warning. ``warnings`` of the report names the keys and the ranks: a value of one rank needs a separate key.

    Args:
        path: the checkpoint's directory; may be left out if ``dcp.save`` gets a ``checkpoint_id``.
        ranks: the process group passed to ``dcp.save``, None for the default group, or a
            :class:`fastckpt.distributed.Ranks`. The process of ``async_save`` with ``AsyncCheckpointerType.PROCESS``
            has the group as its default group.
        metadata: a state without tensors, which can be read separately; the coordinator's is written.
        {options}

    ``files`` are read when the writer is made. The copies to compare are the tensors that several ranks passed to
    ``dcp.save``.

    Attributes:
        report: the report of the last save of this rank, or None.

    Raises:
        TypeError: ``path`` is not a path, or an argument is unknown.
        ValueError: an argument is out of range, or ``path`` is a URL.

    Example:
        >>> import fastckpt.dcp, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> writer = fastckpt.dcp.Writer("step-7")
        >>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        >>> writer.report.bytes
        8
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        *,
        ranks: Any = None,
        metadata: Any = None,
        **options: Unpack[WriteOptions],
    ) -> None:
        super().__init__()
        self.report: SaveReport | None = None
        self._path = None if path is None else path_of("dcp.save", path)
        self._ranks = check_ranks("dcp.save", ranks)
        self._metadata = metadata
        self._settings = WriteSettings.of("dcp.save", options, Writer)
        self._now = _Now()
        self._stager: Stager | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint's directory, absolute."""
        return self._now.path or self._path

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new save, to ``checkpoint_id`` if one is given."""
        if checkpoint_id is not None:
            self._path = self._now.path = path_of("dcp.save", checkpoint_id)

    def storage_meta(self) -> _torch.StorageMeta | None:
        """The path, for torch's log."""
        return _torch.StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - torch's interface
        """Begin the save on this rank.

        Raises:
            CheckpointError: no path was given.
            FileExistsError: the target must not be replaced.
            ValueError: ``use_collectives=False`` was given to ``dcp.save``.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "dcp.save: use_collectives=False lets each rank finish before the others are done, and one checkpoint "
                "of all ranks cannot be committed like that: leave it out, or save on each rank to a separate path "
                "with fastckpt.save"
            )
        path = self._now.path = self.checkpoint_id
        if path is None:
            raise CheckpointError("dcp.save: pass a path to the Writer, or checkpoint_id= to dcp.save")
        forget()
        self._now.coordinates = bool(is_coordinator)
        self._now.alone = self._now.written = False
        self.report = None
        if is_coordinator:
            try:
                _core.check_target(path, self._settings.overwrite)
            except FileExistsError as error:
                if "overwrite=False" not in str(error):
                    raise
                # Programs search this message for torch's words.
                raise FileExistsError(
                    f"dcp.save: {path}: Checkpoint already exists and self.overwrite=False: choose another path, or "
                    "make the Writer with overwrite=True"
                ) from error

    def prepare_local_plan(self, plan: _torch.SavePlan) -> _torch.SavePlan:
        """The plan, unchanged: planners keep plans for later saves, so a plan must not hold data of one save."""
        # torch assigns a tensor that several ranks have to one of them. Here all of them write, and their copies are
        # compared.
        self._now.local = plan
        return plan

    def prepare_global_plan(self, plans: list[_torch.SavePlan]) -> list[_torch.SavePlan]:
        """The plans, with the label of this save if several ranks save.

        Raises:
            ValueError: the process group of this writer has another size.
        """
        size = 1 if len(plans) == 1 else _torch.group_size(self._ranks.process_group)
        if size != len(plans):
            raise ValueError(
                f"dcp.save: {len(plans)} ranks save, and the process group of the Writer has {size}: pass the "
                "process group of dcp.save to Writer(ranks=)"
            )
        self._now.alone = len(plans) == 1
        return plans if self._now.alone else labelled(plans)

    def write_data(self, plan: _torch.SavePlan, planner: _torch.SavePlanner) -> _torch.Future[list[_torch.WriteResult]]:
        """Write this rank's part, and commit the checkpoint once all ranks have written theirs.

        Raises:
            CheckpointError: a tensor is incomplete, or the plan has not come from the coordinator of a save.
            OSError: the storage failed; the old checkpoint is unchanged.
            RanksError: another rank failed, or does not answer.
            UnsupportedTypeError: something cannot be stored; the message names it.
            ValueError: the plans do not fit together.
        """
        path = self._now.path
        assert path is not None  # noqa: S101 - set_up_storage_writer has checked
        began = time.perf_counter()
        with Attempt("save", path):
            types = Types("dcp.save", self._settings.registry)
            if self._now.coordinates and self._now.alone:
                here, label, local = Session(this_process()), None, None
            else:
                here, label, local = session("dcp.save", self._ranks.process_group), label_of(plan), self._now.local
                if label is None:
                    raise CheckpointError(
                        "dcp.save: write_data was called, but prepare_global_plan was not, on the coordinator"
                    )
            with here.peers.operation("save", path, self._ranks.timeout, label) as operation:
                brought = Brought(plan, planner, types, here.group.ranks, here.group.rank, local)
                if here.group.size == 1 and not brought.strange:
                    report = self._save(path, began, types, Alone(brought))
                else:
                    group = Together(here, operation, self._ranks, brought)
                    report = self._save(path, began, types, group)
        self.report = conclude(report)
        give_report(self._settings.io, report)
        self._now.written = True
        return _torch.done([_result(item) for item in plan.items])

    def _save(self, path: str, began: float, types: Types, group: Group[Any]) -> SaveReport:
        request = SaveRequest.of("dcp.save", path, self._metadata, self._settings, types, began=began)
        warn_of_types("dcp.save", request.metadata)
        with closing(request), ticker("dcp.save", path, shown=self._settings.io.progress) as progress:
            return write(request, group, progress)

    def finish(self, metadata: _torch.Metadata, results: list[list[_torch.WriteResult]]) -> None:  # noqa: ARG002 - torch's interface
        """Finish on the coordinator, after all ranks have written: the checkpoint exists.

        Raises:
            CheckpointError: no checkpoint was written by this writer.
        """
        if not self._now.written:
            raise CheckpointError("dcp.save: finish was called before write_data wrote a checkpoint")
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether this names a directory: a path, not a URL."""
        try:
            path_of("dcp.save", checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    # The writer is also an AsyncStager: dcp.async_save then uses the writer to stage.

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: the state has been copied when :meth:`stage` returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state into memory that is kept for the next save; see :meth:`fastckpt.dcp.Stager.stage`."""
        if self._stager is None:
            self._stager = Stager()
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy was complete when :meth:`stage` returned."""

    def close(self) -> None:
        """Close the stager; memory that it has kept is freed by :func:`fastckpt.background.release_buffers`."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def __getstate__(self) -> dict[str, Any]:
        # The process of async_save has the process group as its default group.
        kept = {name: value for name, value in self.__dict__.items() if name != "_now"}
        ranks = replace(self._ranks, process_group=None)
        # A call of ``on_report`` in that process would have no effect in this one.
        settings = replace(self._settings, io=replace(self._settings.io, on_report=None))
        return {
            **kept,
            "_path": self.checkpoint_id,
            "_ranks": ranks,
            "_settings": settings,
            "_stager": None,
            "report": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _now=_Now())


def _result(item: _torch.WriteItem) -> _torch.WriteResult:
    return _torch.WriteResult(index=item.index, size_in_bytes=item.tensor_storage_size() or 0, storage_data=None)
