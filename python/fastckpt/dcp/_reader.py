"""The reader for torch.distributed.checkpoint, which reads checkpoints of fastckpt into any state by boxes."""

from __future__ import annotations

import io
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api.build_report import build_report
from fastckpt._api.destinations import Targets, read_targets
from fastckpt._api.io import IO, Engine, check_io, give_report, refuse_mmap
from fastckpt._api.outcome import Attempt, conclude, until_settled, warn_of_unknown
from fastckpt._api.progress import ticker
from fastckpt._api.reports import LoadReport
from fastckpt._paths import AnyPath, path_of
from fastckpt._ranks.load import Reading
from fastckpt._ranks.ranks import check_ranks
from fastckpt._ranks.session import session
from fastckpt._state.builders import StateBuilder, Validator
from fastckpt._state.registry import Registry, Types, check_registry
from fastckpt._state.unflatten import is_tensor, parse, unflatten
from fastckpt._tensors import torch as _tensors
from fastckpt.exceptions import CheckpointError

from . import _torch
from ._entries import Entry, Known, entries_of
from ._fill import Asked, Fill, Request
from ._label import forget, label_of, labelled
from ._metadata import whole_tensor
from ._shared import read_together

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt._ranks.attention import Attention
    from fastckpt._state.unflatten import Token


class Reader(_torch.StorageReader):
    """A StorageReader for ``torch.distributed.checkpoint.load``.

    It reads checkpoints of :class:`fastckpt.dcp.Writer`, :func:`fastckpt.distributed.save` and :func:`fastckpt.save`,
    into states of any sharding: boxes are read directly into the local tensors. Values are decoded without pickle, and
    passed to the planner in the form that its ``torch.load`` expects.

    Keys are those of torch's planners: joined with dots, each converted to a string; a tuple or a value of another type
    is one entry. Every block that is read completely is compared with its checksum.

    Dense tensors of any strides and dtype are filled. Sparse and quantised ones are filled from tensors of their kind,
    with the same scale and zero point. Tensors that share memory, like tied weights and views into one buffer, are
    filled if the checkpoint has the same values for that memory; a tensor that overlaps itself is refused.

    Args:
        path: the checkpoint's directory; may be left out if ``dcp.load`` gets a ``checkpoint_id``.
        ranks: the process group passed to ``dcp.load``, None for the default group, or a
            :class:`fastckpt.distributed.Ranks`. These ranks read each byte once from the storage and send it to the
            others; in other loads, each rank reads its own data.
        registry: as for :func:`fastckpt.load`.
        io: as for :func:`fastckpt.load`, without ``mmap``.

    Attributes:
        report: the report of the last read of this rank, or None.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: an argument is out of range, or ``path`` is a URL.

    Example:
        >>> import fastckpt.dcp, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> _ = fastckpt.save({"w": torch.ones(2)}, "step-7")
        >>> state = {"w": torch.zeros(2)}
        >>> dcp.load(state, storage_reader=fastckpt.dcp.Reader("step-7"))
        >>> state
        {'w': tensor([1., 1.])}
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        *,
        ranks: Any = None,
        registry: Registry | None = None,
        io: Engine | IO = "auto",
    ) -> None:
        super().__init__()
        self.report: LoadReport | None = None
        self._path = None if path is None else path_of("load", path)
        self._ranks = check_ranks("load", ranks)
        self._registry = check_registry("load", registry)
        self._io = check_io("load", io)
        refuse_mmap("load", self._io)
        self._load_id = str(uuid.uuid4())
        self._opened: _Opened | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint's directory, absolute."""
        return self._path

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new load, from ``checkpoint_id`` if one is given."""
        if checkpoint_id is not None:
            self._path = path_of("load", checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._opened = None

    def read_metadata(self, *_: Any, **__: Any) -> _torch.Metadata:
        """The contents of the checkpoint. Each tensor is one whole chunk, so that it fits any sharding.

        Raises:
            CheckpointError: no path was given, or the state is not a mapping.
            CorruptCheckpointError: the manifest is damaged.
            FileNotFoundError: there is nothing at the path.
            NotACheckpointError: ``path`` is not a checkpoint of fastckpt.
            UnsupportedTypeError: this program does not know the type of a value.
        """
        if self._path is None:
            raise CheckpointError("load: pass a path to the Reader, or checkpoint_id= to dcp.load")
        path = self._path
        self._opened = opened = until_settled(lambda: _Opened(path, Types("load", self._registry)))
        found = {key: opened.described(entry) for key, entry in opened.entries.items()}
        return _torch.Metadata(
            state_dict_metadata=Known(found, opened.outer, _torch.BytesStorageMetadata()),
            planner_data={key: entry.path for key, entry in opened.entries.items()},
            storage_data={},
            storage_meta=_torch.StorageMeta(checkpoint_id=path, load_id=self._load_id),
        )

    def set_up_storage_reader(self, metadata: _torch.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - torch's interface
        """Begin the load on this rank; the checkpoint stays open."""
        forget()

    def prepare_local_plan(self, plan: _torch.LoadPlan) -> _torch.LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[_torch.LoadPlan]) -> list[_torch.LoadPlan]:
        """The plans, with a label if all ranks of the process group take part, which then read together."""
        return (
            labelled(plans) if len(plans) > 1 and _torch.group_size(self._ranks.process_group) == len(plans) else plans
        )

    def read_data(self, plan: _torch.LoadPlan, planner: _torch.LoadPlanner) -> _torch.Future[None]:
        """Read the plan's requests, directly into the tensors of the planner.

        Raises:
            CorruptCheckpointError: bytes differ from those that were written; the message names the place.
            RanksError: another rank failed, or does not answer.
            ReplacedCheckpointError: another save replaced the checkpoint meanwhile.
            StructureMismatchError: a tensor of the planner cannot hold the values, or two that share memory have
                different ones in the checkpoint; the message names the keys.
            UnsupportedTypeError: this program does not know the type of a value.

        Warns:
            RuntimeWarning: with ``Registry(undeclared="plain")``, types are unknown: one warning for all of them.
        """
        opened, path = self._opened, self._path
        if opened is None or path is None:
            raise CheckpointError("load: read_data was called before read_metadata")
        began = time.perf_counter()
        with Attempt("load", path):
            label = label_of(plan)
            work = _Work(opened, plan, planner)
            targets = work.targets
            fields: Mapping[str, Any]
            with ticker("load", path, shown=self._io.progress) as tick:
                if label is not None:

                    def asked(attention: Attention) -> tuple[Reading, list[Request]]:
                        requests = work.ask()
                        return Reading(opened.reader, targets, self._io, attention, tick), requests

                    here = session("dcp.load", self._ranks.process_group)
                    with here.peers.operation("load", path, self._ranks.timeout, label) as operation:
                        fields = read_together(here, operation, path, self._ranks.timeout, asked)
                else:
                    requests = [_core.ReadRequest(*request) for request in work.ask()]
                    fields = read_targets(opened.reader, targets, requests, io=self._io, tick=tick)
            work.finish()
        if opened.unknown:
            warn_of_unknown("load", opened.unknown)
        self.report = conclude(build_report(LoadReport, path, began, fields, missing=(), unexpected=()))
        give_report(self._io, self.report)
        return _torch.done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether this names a directory: a path, not a URL."""
        try:
            path_of("load", checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_ranks": replace(self._ranks, process_group=None), "report": None}


class _Work:
    """The parts of a checkpoint that one rank reads, and their destinations."""

    def __init__(self, opened: _Opened, plan: _torch.LoadPlan, planner: _torch.LoadPlanner) -> None:
        self.opened = opened
        self.plan = plan
        self.planner = planner
        self.targets = Targets(opened.stored, "auto")
        self.fill = Fill(self.targets, opened.reader)
        self.tensors: list[tuple[_torch.ReadItem, Asked]] = []
        self.values: list[tuple[_torch.ReadItem, Entry, int, Asked | None]] = []

    def ask(self) -> list[Request]:
        """Request boxes directly into tensors, and the tensors that values need."""
        for item in self.plan.items:
            entry, asked = self.opened.find(item.storage_index.fqn), None
            tokens = self.opened.tokens[entry.start : entry.end]
            if item.type is _torch.LoadItemType.TENSOR:
                asked = self.fill.ask(tokens, _box(item), self.planner.resolve_tensor(item), item.dest_index.fqn)
                self.tensors.append((item, asked))
            if asked is None or asked.number is None:
                found = [token for token in tokens if is_tensor(token)]
                self.targets.make(found)
                self.values.append((item, entry, len(found), asked))
        self.fill.settle()
        self.targets.begin("load")
        return self.fill.requests

    def finish(self) -> None:
        """After everything has been read, give the planner its values."""
        made = iter(self.targets.values())
        for item, entry, count, asked in self.values:
            value = self.opened.value(entry, [next(made) for _ in range(count)])
            if asked is None:
                self.planner.load_bytes(item, _as_bytes(value))
            else:
                self.fill.give(asked, value)
        self.fill.finish()
        for item, asked in self.tensors:
            self.planner.commit_tensor(item, asked.given)


class _Opened:
    """A checkpoint whose manifest has been read and checked."""

    def __init__(self, path: str, types: Types) -> None:
        self.path = path
        self.types = types
        self.reader = _core.Reader(path, keep=True)
        self.stored = self.reader.tensors()
        self.tokens: list[Token] = parse(self.reader.structure())
        # Types are resolved later, only in the part that is loaded.
        unflatten(self.tokens, Validator(self.stored, types=types, strangers=True))
        self.entries, self.outer = entries_of(self.tokens, path)
        self.targets = Targets(self.stored, "auto")
        #: Names of types whose values were returned in their stored form.
        self.unknown: dict[str, None] = {}

    def find(self, key: str) -> Entry:
        found = self.entries.get(key) or self.outer.get(key)
        if found is None:
            raise CheckpointError(f"load: {self.path}: the plan asks for {key!r}, which is not in the checkpoint")
        return found

    def described(self, entry: Entry) -> Any:
        """The description of an entry for torch."""
        number = entry.number
        if number is not None:
            dtype = self.targets.tensor_dtype(number)
            sizes = self.targets.shape(number, dtype.itemsize)
            return whole_tensor(dtype, sizes, requires_grad="g" in "".join(entry.token[2:3]))
        if entry.composed:
            return self._composed(entry)
        return _torch.BytesStorageMetadata()

    def _composed(self, entry: Entry) -> Any:
        tag = entry.token[0]
        sizes = entry.token[2 if tag in {"compressed", "quantized"} else 1]
        parts = [token for token in self.tokens[entry.start : entry.end] if is_tensor(token)]
        if parts[-1][0] != "tensor":
            return _torch.BytesStorageMetadata()  # an expanded array is a value
        dtype = _tensors.DTYPES[entry.token[1]] if tag == "quantized" else self.targets.tensor_dtype(parts[-1][1])
        return whole_tensor(dtype, sizes, requires_grad=False)

    def value(self, entry: Entry, made: list[Any]) -> Any:
        """The value of an entry, with the tensors in it."""
        tokens = self.tokens[entry.start : entry.end]
        check = Validator(self.stored, types=self.types)
        unflatten(tokens, check)
        self.unknown |= check.unknown
        return unflatten(tokens, StateBuilder("auto", made, types=self.types))


def _box(item: _torch.ReadItem) -> list[tuple[int, int]]:
    """The box that an item requests of its tensor."""
    origin = item.storage_index.offset or (0,) * len(item.lengths)
    starts = [base + offset for base, offset in zip(origin, item.storage_offsets, strict=True)]
    return [(start, start + length) for start, length in zip(starts, item.lengths, strict=True)]


def _as_bytes(value: Any) -> io.BytesIO:
    """A value in the planner's form: the output of ``torch.save``."""
    made = io.BytesIO()
    _torch.torch.save(value, made)
    made.seek(0)
    return made
