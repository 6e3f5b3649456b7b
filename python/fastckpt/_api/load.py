"""Loading: a checkpoint becomes the state that was saved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.reader import open_reader
from fastckpt._stores.urls import place_of
from fastckpt._tensors.ranges import range_of
from fastckpt._warn import warn

from . import in_flight
from .build_report import build_report
from .destinations import read_targets
from .io import give_report
from .load_settings import LoadOptions, LoadSettings
from .outcome import Attempt, conclude, until_settled
from .prepare import prepare
from .progress import ticker
from .reports import LoadReport
from .settings import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastckpt import _core

    from .destinations import Targets


class Loaded(NamedTuple):
    """The result of a load for callers that need more than the state.

    Attributes:
        state: the state.
        report: the report.
        reader: the open checkpoint, so that its manifest need not be read again.
    """

    state: Any
    report: LoadReport
    reader: _core.Reader


@takes(LoadSettings)
def load(path: AnyPath, into: Any = None, **options: Unpack[LoadOptions]) -> Any:
    """Read the state that was saved to ``path``.

    Args:
        path: the checkpoint's directory, or its URL in an object store: ``s3://``, ``gs://``, ``az://``, ``memory://``
            (docs/stores.md), read in parallel ranges. The load waits for an asynchronous save of this process in
            flight to it.
        into: a state of the same structure, which is updated in place and returned. Its tensors and arrays, on whatever
            device, are filled. Its dicts, lists, dataclasses and namespaces stay the same objects and get the values of
            the checkpoint; immutable values (a number, a tuple, a frozen dataclass) are replaced in their containers,
            and so is a container for which the checkpoint has another type. A list keeps its length: numbers at its end
            that only ``into`` has are not a mismatch. Values that only the checkpoint has are added. ``into`` may hold
            objects, too: the Parameters and buffers of a module are filled in place, and ``load_state_dict`` gets the
            state if it does more than copy them (hooks, overrides, an extra state); an optimizer, even one that has not
            stepped, and any other object with ``load_state_dict`` gets the state; a state of another class of optimizer
            or scheduler is a mismatch. All comparisons precede the first change. A tie that only one side has is not a
            mismatch; nor is a tie in ``into`` of tensors that are stored separately with equal values. Tensors that
            overlap in memory without being tied are a mismatch, and so are different values in the places of one
            container.
        {options}

    Returns:
        The state. It is ``into``, if that was passed and can be changed.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; the message names the place.
        FormatVersionError: this release does not read its format version.
        StructureMismatchError: ``into`` does not fit; nothing was changed, and ``differences`` lists every difference.
        CheckpointError: an object in ``into`` refused its state: tensors and the objects before it are already filled,
            and plain values are unchanged. Or a class in this program differs from the saved one.
        MemoryError: new tensors would take more memory than the control group of this process has left.
        UnsupportedTypeError: the type of a value is unknown, or a dtype is not available.
        KeyError: a pattern, or a key of ``rename``, matches nothing.
        TypeError: a pattern, ``rename``, ``registry``, ``io`` or ``path`` has the wrong type.
        FileNotFoundError: there is nothing at ``path``.
        ImportError: the checkpoint holds torch tensors and torch cannot be imported; or ``path`` is a URL, and the
            package obstore cannot be imported.
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph; nothing
            was changed.
        OSError: the storage failed, or the store did not answer or refused.
        ValueError: an argument is out of range, ``path`` is a URL of an unknown store, a device does not exist here,
            or two keys become one.

    Warns:
        RuntimeWarning: with ``strict=False``, no tensor of the checkpoint has a place in ``into``; with
            ``Registry(undeclared="plain")``, unknown types, once for all of them.

    Example:
        >>> import fastckpt, torch
        >>> _ = fastckpt.save({"w": torch.ones(2), "step": 7}, "step-7")
        >>> fastckpt.load("step-7")
        {'w': tensor([1., 1.]), 'step': 7}
        >>> state = {"w": torch.zeros(2), "step": 0}
        >>> fastckpt.load("step-7", into=state) is state
        True
    """
    return load_alone(path, into, LoadSettings.of("load", options, load)).state


def load_alone(path: AnyPath, into: Any, settings: LoadSettings) -> Loaded:
    """:func:`load`, by one process."""
    source = place_of("load", path)
    if settings.io.mmap:
        _check_mapped(source, settings)
    with range_of("fastckpt.load"), Attempt("load", source):
        in_flight.wait_for_paths(source)
        loaded = until_settled(lambda: _load(source, settings, into))
    give_report(settings.io, loaded.report)
    return loaded


def _check_mapped(source: str, settings: LoadSettings) -> None:
    """Refuse what ``IO(mmap=True)`` cannot be combined with."""
    if is_url(source):
        raise ValueError(
            f"load: {source}: IO(mmap=True) maps local files only: load without it, or copy the checkpoint to a local "
            "disk first (fastckpt.copy)"
        )
    if settings.dtype is not None:
        raise ValueError("load: IO(mmap=True) maps the stored bytes unchanged and cannot be combined with dtype=")
    engine = settings.io.engine
    if engine not in {"auto", "buffered"}:
        raise ValueError(
            f'load: IO(mmap=True) reads through the page cache: its engine must be "auto" or "buffered", not {engine!r}'
        )


def _load(source: str, settings: LoadSettings, into: Any) -> Loaded:
    began = time.perf_counter()
    reader = open_reader("load", source)
    prepared = prepare(reader, source, settings, into)
    prepared.targets.begin("load")
    report = _read(source, reader, prepared.targets, prepared.numbers, settings)
    state = prepared.build()
    made = build_report(LoadReport, source, began, report, missing=prepared.missing, unexpected=prepared.unexpected)
    if prepared.unexpected and prepared.missing and not made.tensors:
        warn(
            f"fastckpt: load: {source}: no tensor of the checkpoint has a place in into=, which stays unchanged: "
            'pass a state with the same keys, as in into={"model": model} with keys="model"'
        )
    return Loaded(state, conclude(made), reader)


def _read(
    source: str, reader: _core.Reader, targets: Targets, numbers: list[int], settings: LoadSettings
) -> Mapping[str, Any]:
    """Read the bytes: the requested ones, or with ``mmap`` the pages of the tensors ``numbers``."""
    io = settings.io
    with ticker("load", source, shown=io.progress) as tick:
        if targets.mappings is not None:
            checked = numbers if io.verify else []
            report = reader.check(targets.mappings, checked, threads=io.threads, tick=tick)
            return targets.copy_mapped(report, io.threads)
        return read_targets(reader, targets, io=io, tick=tick)
