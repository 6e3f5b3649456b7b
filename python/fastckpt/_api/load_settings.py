"""The options of loads. A new one is added here twice: to the record, and to the TypedDict that type checkers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from fastckpt._state.registry import Registry, Types, check_registry
from fastckpt._state.rename import Renaming, check_rename

from .options import Engine, Framework, Undeclared, check_framework, check_io, check_threads, check_undeclared
from .selection import Selection, texts_of
from .settings import Settings, as_bool, as_given, callable_of, option


class LoadOptions(TypedDict, total=False):
    """The options of every load."""

    keys: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    strict: bool
    dtype: Any
    rename: Mapping[str, str] | Callable[[str], str] | None
    framework: Framework
    device: Any
    registry: Registry | None
    undeclared: Undeclared
    verify: bool
    io: Engine
    threads: int | None
    progress: bool
    on_report: Callable[[Any], object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(Settings):
    """How a checkpoint is loaded, checked. What counts what it matches is made for each load."""

    given = LoadOptions

    keys: tuple[str, ...] | None = option(
        None,
        texts_of("keys"),
        "a glob pattern, or several, over names: the keys on the way to a tensor or value, joined with dots "
        '(``"model.*"``, ``"optimizer.param_groups.0.lr"``; ``*`` matches dots, too). A pattern without ``*``, ``?`` '
        'and ``[`` also chooses everything below that name (``"model"``). Only matching tensors are read, and the '
        "result holds only matching tensors and values, and the containers that lead there: positions in lists close "
        "up. With ``into``, everything else there stays unchanged, and items chosen from a list keep their positions. "
        "An empty container is a value. A value made of several parts (a sparse tensor, a registered object) comes "
        "whole when it or one of its parts matches; types of other parts need not be registered. A tied tensor has a "
        "name at each of its places, and comes back at those that match.",
    )
    exclude: tuple[str, ...] | None = option(
        None,
        texts_of("exclude"),
        "patterns of values to leave out, even if they match ``keys``. A value made of several parts stays out whole "
        "when it or one of its parts matches.",
    )
    strict: bool = option(
        True,
        as_bool,
        "False allows differences, as ``load_state_dict`` does: tensors that only the checkpoint has are not read and "
        "are not in the result; tensors, values and ends of lists that only ``into`` has stay unchanged; a pattern "
        "that matches nothing is no error. The report lists them (``missing``, ``unexpected``). Shapes and dtypes "
        "must fit all the same.",
    )
    dtype: Any = option(
        None,
        as_given,
        'cast floating-point tensors and arrays while they are read, in pieces: a dtype or its name (``"bfloat16"``); '
        'a dict of patterns over names, such as ``{"*.norm.*": "float32", "*": "bfloat16"}``, where the first match '
        "decides; a function of the :class:`TensorInfo`. None, also in a dict or from a function, is the dtype that "
        "was saved. A single dtype leaves the ``step`` of optimizers unchanged; patterns and functions are obeyed to "
        "the letter. Integers, complex numbers, quantised tensors and wrapper subclasses stay unchanged. With "
        "``into``, the dtype is that of the tensor in it.",
    )
    rename: Mapping[str, str] | Callable[[str], str] | None = option(
        None,
        check_rename,
        "other keys: a dict of new keys by old ones, or a function of the key, such as "
        '``fastckpt.strip_prefix("module.")``. It changes every dict key that is a string, after the names in the file '
        "have been chosen from, and before the comparison with ``into``.",
    )
    framework: str = option(
        "auto",
        check_framework,
        "``auto`` returns each tensor as it was saved; ``torch`` returns arrays as tensors, too; ``numpy`` returns "
        "tensors as arrays, ``torch.Size`` as tuple, ``torch.dtype`` and ``torch.device`` as str, without torch.",
    )
    device: Any = option(
        None,
        as_given,
        "where new torch tensors go; None for the CPU. A ``torch.device`` or its name, such as ``cuda:0``: all go "
        "there except tensors that were saved from the CPU and have to be there, the states of random generators and "
        'the ``step`` of optimizers. ``"saved"``: each goes to the device that it was saved from. A dict of patterns '
        'over names, such as ``{"model.*": "cuda:0"}``: the first match decides, and a tensor without a match goes to '
        "the CPU; or a function of the :class:`TensorInfo`: these are obeyed to the letter. Tensors are read into "
        "pinned staging memory and copied from there while more is read; the copies have ended when this returns, for "
        "any stream.",
    )
    registry: Registry | None = option(
        None, check_registry, "types that this call knows before those of :func:`fastckpt.register_type`."
    )
    undeclared: str = option(
        "error",
        check_undeclared,
        "how to load values of types that this program does not know: ``error``, or ``plain`` for their stored form "
        "(a dataclass is the dict of its fields, an enum its name, a subclass of a built-in type that type, without "
        "attributes; where only something hashable can be, a tuple; a time zone None), with a warning.",
    )
    verify: bool = option(
        True,
        as_bool,
        "compare every byte with its checksum. With ``mmap``: the pages as they are at the call; one that memory "
        "pressure has evicted is read again unchecked. Without ``verify`` pages are read when they are touched.",
    )
    io: str = option(
        "auto",
        check_io,
        "``auto``; ``uring`` or ``threads`` (direct I/O, buffered where it is refused); ``direct`` (the same, and "
        "OSError where direct I/O is refused); ``buffered``. ``auto`` follows the environment variable FASTCKPT_IO if "
        "it is set, else takes the first of these that works. It reads cached files from the page cache. Where "
        "LOCAL_WORLD_SIZE is more than 1, ``auto`` reads through the page cache, so that the ranks of a node that "
        "load one path read the storage once, unless one of the path's last two components names the rank "
        "(``rank-3``, by RANK or LOCAL_RANK): for other paths that one rank alone loads, pass ``uring``. ``mmap`` "
        "always uses the page cache, whatever the variable is. They do not change how a URL is read; ``direct`` is an "
        "OSError there.",
    )
    threads: int | None = option(
        None,
        check_threads,
        "worker threads, at most 24; by default one per core of this rank, but at most 8 with ``uring``, at least 12 "
        "with ``threads`` and at least 4 with ``buffered``; one below 2 MiB. For a URL 16 by default, each with a "
        "request of up to 8 MiB.",
    )
    progress: bool = option(False, as_bool, "show a progress bar of what this process reads.")
    on_report: Callable[[Any], object] | None = option(
        None, callable_of("on_report"), "called with the :class:`LoadReport` once the state has been loaded."
    )

    def __post_init__(self) -> None:
        if self.device is not None and self.framework == "numpy":
            raise ValueError('load: framework="numpy" loads NumPy arrays, which have no device: leave out device=')

    def selection(self) -> Selection:
        """What ``keys`` and ``exclude`` choose."""
        return Selection(self.keys, self.exclude)

    def renaming(self) -> Renaming:
        """What ``rename`` makes of keys."""
        return Renaming(self.rename)

    def types(self) -> Types:
        """The types that a load knows."""
        return Types("load", self.registry, framework=self.framework, plain=self.undeclared == "plain")
