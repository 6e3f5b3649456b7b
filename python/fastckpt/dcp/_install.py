"""Puts fastckpt's writer and reader in the place of torch's, for programs that name torch's classes.

torch's classes stay the same objects, by whatever name they were imported; but a call of one makes another object.
Derived classes are not affected.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from fastckpt._files import TORCH_METADATA
from fastckpt._installed import Installation, Installed
from fastckpt._ranks.ranks import check_ranks

from . import _torch
from ._reader import Reader
from ._torch import FileSystemReader, FileSystemWriter
from ._writer import Writer

_MANIFEST = "fastckpt.json"
#: Arguments of torch's writer about how its files are written, which have no effect here.
_IRRELEVANT = ("single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict")

_installed = Installed()
_prepared = False


class InstalledWriter(Writer):
    """The result of ``FileSystemWriter(path, ...)`` while fastckpt is installed."""


class InstalledReader(Reader):
    """The result of ``FileSystemReader(path)`` during an installation: torch reads torch's own checkpoints."""

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self._torchs: Any = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new load; see :meth:`fastckpt.dcp.Reader.reset`."""
        super().reset(checkpoint_id)
        self._torchs = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The contents of the checkpoint, by torch's reader if torch wrote it."""
        path = self.checkpoint_id
        self._torchs = None
        if path is not None and not _has(path, _MANIFEST) and (_has(path, TORCH_METADATA) or "rank" in kwargs):
            self._torchs = _made(FileSystemReader, path)
            return self._torchs.read_metadata(*args, **kwargs)
        return super().read_metadata(*args)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's interface
        """Call torch's reader if torch wrote the checkpoint."""
        if self._torchs is not None:
            self._torchs.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        else:
            super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Call torch's reader if torch wrote the checkpoint."""
        return plan if self._torchs is None else self._torchs.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        """Call torch's reader if torch wrote the checkpoint."""
        return super().prepare_global_plan(plans) if self._torchs is None else self._torchs.prepare_global_plan(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Call torch's reader if torch wrote the checkpoint."""
        if self._torchs is not None:
            return self._torchs.read_data(plan, planner)
        return super().read_data(plan, planner)


def install(**options: Any) -> Installation:
    """Make programs that name torch's ``FileSystemWriter`` and ``FileSystemReader`` use fastckpt.

    It is for accelerate, Lightning and others, and for ``dcp.save(state, checkpoint_id=path)`` without a writer. From
    now on a call of these classes makes a :class:`fastckpt.dcp.Writer` or :class:`fastckpt.dcp.Reader`, wherever and by
    whatever name they were imported. torch still reads directories that it wrote. Classes derived from torch's, and
    writers with extensions or of another serialization format, stay as they are.

    The arguments of torch's writer about how its files are written have no effect; ``overwrite`` has.

    torch pickles values of unknown types; fastckpt never does. So a save refuses some values that torch's writer
    accepts, and names their keys: functions, classes, generators, and objects without ``state_dict`` whose class is not
    a named tuple, dataclass, enum or subclass of a built-in type, unless it is registered with
    :func:`fastckpt.register_type` (docs/states.md); shards that are not plain dense tensors; bytes from a planner that
    ``torch.load(weights_only=True)`` refuses; and ``use_collectives=False``. A load refuses values of undeclared
    classes, except with ``registry=Registry(undeclared="plain")``.

    Args:
        **options: arguments for the writers, except the path; those of :class:`fastckpt.dcp.Reader` (``ranks``,
            ``registry``, ``io``) are also for the readers.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Raises:
        TypeError: the writer has no such argument.
        ValueError: an argument is out of range.

    Example:
        >>> import fastckpt.dcp, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> with fastckpt.dcp.install():
        ...     _ = dcp.save({"w": torch.ones(2)}, checkpoint_id="step-7")
        >>> fastckpt.load("step-7")
        {'w': tensor([1., 1.])}
    """
    if "path" in options:
        raise TypeError("install: leave out path=: each call of the program gives its own")
    # Both classes raise errors for wrong options.
    Writer(None, **options)
    Reader(None, **_for_readers(options))
    _prepare()
    return _installed.begin(options)


def _prepare() -> None:
    """Make calls of torch's classes check whether fastckpt is installed.

    The check is permanent: a class whose ``__new__`` was deleted no longer accepts arguments.
    """
    global _prepared  # noqa: PLW0603 - once a process
    if _prepared:
        return
    executors = _torch.async_executors()
    _prepared = True
    for torchs, make, ours in (
        (FileSystemWriter, _writer, InstalledWriter),
        (FileSystemReader, _reader, InstalledReader),
    ):
        _answer(torchs, make)
        torchs.register(ours)  # isinstance() is true for the result of a call
    for executor in executors:
        _make_writers_here(executor)


def _answer(torchs: Any, make: Any) -> None:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        options = _installed.options if cls is torchs else None
        made = None if options is None else make(options, *args, **kwargs)
        return object.__new__(cls) if made is None else made

    torchs.__new__ = new


def _make_writers_here(executor: Any) -> None:
    """For an asynchronous save with only a path, make the writer when the save begins, not where it is used.

    It is used in another process, where nothing is installed, or in a thread, when the installation may have ended.
    """

    def execute_save(options: dict[str, Any], torchs: Any, *args: Any, **kwargs: Any) -> Any:
        path = kwargs.get("checkpoint_id")
        if kwargs.get("storage_writer") is None and FileSystemWriter.validate_checkpoint_id(path or ""):
            ranks = check_ranks("install", options.get("ranks"))
            if ranks.process_group is None:
                ranks = replace(ranks, process_group=kwargs.get("process_group"))
            kwargs["storage_writer"] = _writer({**options, "ranks": ranks}, path)
        return torchs(*args, **kwargs)

    _installed.replace(executor, "execute_save", execute_save)


def _writer(options: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """A writer for the arguments of torch's writer, or None to use torch's."""
    # In the order of torch 2.6 and later.
    names = (*_IRRELEVANT[:5], "overwrite", "_extensions", "serialization_format")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("_extensions") or getattr(given.get("serialization_format"), "value", "torch_save") != "torch_save":
        return None
    own = {"overwrite": given["overwrite"]} if "overwrite" in given else {}
    return InstalledWriter(path, **{**own, **options})


def _reader(options: dict[str, Any], path: Any, _extension_registry: Any = None) -> Any:
    """A reader for the arguments of torch's reader, or None to use torch's."""
    if _extension_registry is not None:
        return None
    return InstalledReader(path, **_for_readers(options))


def _for_readers(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("ranks", "registry", "io") if name in options}


def _made(kind: Any, *args: Any) -> Any:
    """An object of torch's class, even while fastckpt is installed."""
    made = object.__new__(kind)
    made.__init__(*args)
    return made


def _has(path: str, name: str) -> bool:
    return os.path.lexists(os.path.join(path, name))  # noqa: PTH118
