"""Loading: a checkpoint becomes the state that was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from fastckpt._paths import AnyPath, is_url
from fastckpt._state.registry import Registry
from fastckpt._stores.reader import open_reader
from fastckpt._stores.urls import place_of
from fastckpt._tensors.ranges import range_of

from . import in_flight
from .build_report import build_report
from .destinations import read_targets
from .options import Engine, Framework, Unknown  # noqa: TC001 - the public signature names them
from .outcome import Attempt, conclude, until_settled
from .prepare import Wishes, prepare, wishes_of
from .progress import ticker
from .reports import Loaded, LoadReport

if TYPE_CHECKING:
    from fastckpt import _core

    from .destinations import Targets


@overload
def load(
    path: AnyPath,
    *,
    into: Any = ...,
    keys: str | Sequence[str] | None = ...,
    exclude: str | Sequence[str] | None = ...,
    strict: bool = ...,
    dtype: Any = ...,
    rename: Mapping[str, str] | Callable[[str], str] | None = ...,
    strip_prefix: str | Sequence[str] | None = ...,
    framework: Framework = ...,
    device: Any = ...,
    registry: Registry | None = ...,
    unknown: Unknown = ...,
    mmap: bool = ...,
    verify: bool = ...,
    io: Engine = ...,
    threads: int | None = ...,
    progress: bool = ...,
    report: Literal[False] = ...,
) -> Any: ...
@overload
def load(
    path: AnyPath,
    *,
    into: Any = ...,
    keys: str | Sequence[str] | None = ...,
    exclude: str | Sequence[str] | None = ...,
    strict: bool = ...,
    dtype: Any = ...,
    rename: Mapping[str, str] | Callable[[str], str] | None = ...,
    strip_prefix: str | Sequence[str] | None = ...,
    framework: Framework = ...,
    device: Any = ...,
    registry: Registry | None = ...,
    unknown: Unknown = ...,
    mmap: bool = ...,
    verify: bool = ...,
    io: Engine = ...,
    threads: int | None = ...,
    progress: bool = ...,
    report: Literal[True],
) -> Loaded: ...
def load(  # noqa: PLR0913 - all by name
    path: AnyPath,
    *,
    into: Any = None,
    keys: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = True,
    dtype: Any = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    strip_prefix: str | Sequence[str] | None = None,
    framework: Framework = "auto",
    device: Any = None,
    registry: Registry | None = None,
    unknown: Unknown = "error",
    mmap: bool = False,
    verify: bool = True,
    io: Engine = "auto",
    threads: int | None = None,
    progress: bool = False,
    report: bool = False,
) -> Any:
    """Read the state that was saved to ``path``.

    Args:
        path: the checkpoint's directory, or its URL in an object store: ``s3://``, ``gs://``, ``az://``, ``memory://``
            (docs/stores.md), read in parallel ranges. An asynchronous save of this process to it that is in flight is
            waited for.
        into: a state of the same structure, which is updated in place and returned. Its tensors and arrays, on whatever
            device, are filled. Its dicts, lists, dataclasses and namespaces stay the same objects and get the values of
            the checkpoint; immutable values (a number, a tuple, a frozen dataclass) are replaced in their containers,
            and so is a container for which the checkpoint has another type. A list keeps its length, so that numbers at
            its end which only ``into`` has are no mismatch. Values that only the checkpoint has are added. It may
            contain objects, too: the Parameters and buffers of a module are filled in place, and ``load_state_dict``
            gets the state if it does more than copy them (hooks, overrides, an extra state); an optimizer, also one
            that has not stepped, and any other object with ``load_state_dict`` is given the state that was read.
            Everything is compared before anything is changed. A tie that only one side has is not a mismatch; nor is a
            tie in ``into`` of tensors that are stored separately and are equal. Tensors that overlap in memory without
            being tied are a mismatch, and so are different values in the places of one container.
        keys: a glob pattern, or several, over names: the keys on the way to a tensor or value, joined with dots
            (``"model.*"``, ``"optimizer.param_groups.0.lr"``; ``*`` matches dots, too). A pattern without ``*``, ``?``
            and ``[`` also chooses everything below that name (``"model"``). Only matching tensors are read, and the
            result holds only matching tensors and values, and the containers that lead there: positions in lists close
            up. With ``into``, everything else there stays unchanged, and items chosen from a list keep their positions.
            An empty container is a value. A value made of several parts (a sparse tensor, a registered object) comes
            whole when it or one of its parts matches; types of other parts need not be registered. A tied tensor has a
            name at each of its places, and comes back at those that match.
        exclude: patterns of values to leave out, even if they match ``keys``. A value made of several parts stays out
            whole when it or one of its parts matches.
        strict: False allows differences, as ``load_state_dict`` does: tensors that only the checkpoint has are not read
            and are not in the result; tensors, values and ends of lists that only ``into`` has stay unchanged; a
            pattern that matches nothing is no error. The report lists them (``missing``, ``unexpected``). Shapes and
            dtypes must fit all the same.
        dtype: cast floating-point tensors and arrays while they are read, in pieces: a dtype or its name
            (``"bfloat16"``); a dict of patterns over names, such as ``{"*.norm.*": "float32", "*": "bfloat16"}``, where
            the first match decides; a function of the :class:`TensorInfo`. None, also in a dict or from a function, is
            the dtype that was saved. A single dtype leaves the ``step`` of optimizers unchanged; patterns and functions
            are obeyed to the letter. Integers, complex numbers, quantised tensors and wrapper subclasses stay
            unchanged. With ``into``, the dtype is that of the tensor in it.
        rename: other keys: a dict of new keys by old ones, or a function of the key. It changes every dict key that is
            a string, after the names in the file have been chosen from, and before the comparison with ``into``.
        strip_prefix: a prefix, or several, to remove from such keys first (``["module.", "_orig_mod."]``).
        framework: ``auto`` returns each tensor as it was saved; ``torch`` returns arrays as tensors, too; ``numpy``
            returns tensors as arrays, ``torch.Size`` as tuple, ``torch.dtype`` and ``torch.device`` as str, without
            torch.
        device: where new torch tensors go; None for the CPU. A ``torch.device`` or its name, such as ``cuda:0``: all go
            there except tensors that were saved from the CPU and have to be there, the states of random generators and
            the ``step`` of optimizers. ``"saved"``: each goes to the device that it was saved from. A dict of patterns
            over names, such as ``{"model.*": "cuda:0"}``: the first match decides, and a tensor without a match goes to
            the CPU; or a function of the :class:`TensorInfo`: these are obeyed to the letter. Tensors are read into
            pinned staging memory and copied from there while more is read; the copies have ended when this returns, for
            any stream.
        registry: types that this call knows before those of :func:`fastckpt.register_type`.
        unknown: how to load values of types that this program does not know: ``error``, or ``plain`` for their stored
            form (a dataclass is the dict of its fields, an enum its name, a subclass of a built-in type that type,
            without attributes; where only something hashable can be, a tuple; a time zone None), with a warning.
        mmap: map the files instead of reading them: new tensors and arrays are pages of the page cache, which all
            processes of a node share; one is copied when it is first written to, so no write reaches a file. For
            checkpoints that are hot. As long as the tensors are in use, nobody may change or truncate the files in
            place, and if their storage fails, touching a page ends the process with SIGBUS. (To save to the same path,
            or to remove it, does no harm on a local file system; on NFS another host must not.) With ``device``, new
            tensors there are copied from the pages, and so are tensors and arrays of ``into``: once all pages have been
            checked, so that a damaged checkpoint changes nothing. Not with ``dtype``, and not of a URL.
        verify: compare every byte with its checksum. With ``mmap``: the pages as they are at the call; one that memory
            pressure has evicted is read again unchecked. Without ``verify`` pages are read when they are touched.
        io: ``auto``; ``uring`` or ``threads`` (direct I/O, buffered where it is refused); ``direct`` (the same, and
            OSError where direct I/O is refused); ``buffered``. ``auto`` follows the environment variable FASTCKPT_IO if
            it is set, else takes the first of these that works. It reads cached files from the page cache. Where
            LOCAL_WORLD_SIZE is more than 1, ``auto`` reads through the page cache, so that the ranks of a node that
            load one path read the storage once, unless one of the path's last two components names the rank
            (``rank-3``, by RANK or LOCAL_RANK): for other paths that one rank alone loads, pass ``uring``. ``mmap``
            always uses the page cache, whatever the variable is. They do not change how a URL is read; ``direct`` is an
            OSError there.
        threads: worker threads, at most 24; by default one per core of this rank, but at most 8 with ``uring``, at
            least 12 with ``threads`` and at least 4 with ``buffered``; one below 2 MiB. For a URL 16 by default, each
            with a request of up to 8 MiB.
        progress: show a progress bar.
        report: return a report, too.

    Returns:
        The state, which is ``into`` where that is given and can be changed; with ``report=True`` a :class:`Loaded` of
        the state and a :class:`LoadReport`.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; the message names the place.
        FormatVersionError: this release does not read its format version.
        StructureMismatchError: ``into`` does not fit; nothing was changed, and ``differences`` lists every difference.
        CheckpointError: an object in ``into`` refused its state: tensors and the objects before it are already
            filled, plain values are unchanged. Or a class in this program is not the one that was saved.
        MemoryError: new tensors would take more memory than the control group of this process has left.
        UnsupportedTypeError: the type of a value is not known, or a dtype is not available.
        KeyError: a pattern, or a key of ``rename``, matches nothing.
        TypeError: a pattern, ``rename``, ``strip_prefix`` or ``path`` has the wrong type.
        FileNotFoundError: there is nothing at ``path``.
        ImportError: the checkpoint holds torch tensors and torch cannot be imported; or ``path`` is a URL, and the
            package obstore cannot.
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph; nothing
            was changed.
        OSError: the storage failed, or the store did not answer or refused.
        ValueError: an argument is out of range, ``path`` is a URL of an unknown store, a device does not exist here,
            or two keys become one.

    Warns:
        RuntimeWarning: with ``unknown="plain"``, types that are not known, once for all of them.
    """
    source = place_of("load", path)
    if mmap and is_url(source):
        raise ValueError(
            f"load: {source}: mmap=True maps local files only: load without it, or copy the checkpoint to a local disk "
            "first (fastckpt.copy)"
        )
    wishes = wishes_of(
        "load",
        into=into,
        keys=keys,
        exclude=exclude,
        strict=strict,
        dtype=dtype,
        rename=rename,
        strip_prefix=strip_prefix,
        framework=framework,
        device=device,
        registry=registry,
        unknown=unknown,
        mmap=mmap,
        verify=verify,
        io=io,
        threads=threads,
        progress=progress,
    )
    with range_of("fastckpt.load"), Attempt("load", source):
        in_flight.wait_for_paths(source)
        loaded = until_settled(lambda: _load(source, wishes))
    return loaded if report else loaded.state


def _load(source: str, wishes: Wishes) -> Loaded:
    began = time.perf_counter()
    reader = open_reader("load", source)
    prepared = prepare(reader, source, wishes)
    prepared.targets.begin("load")
    report = _read(source, reader, prepared.targets, prepared.numbers, wishes)
    state = prepared.build()
    made = build_report(LoadReport, source, began, report, missing=prepared.missing, unexpected=prepared.unexpected)
    return Loaded(state, conclude(made))


def _read(source: str, reader: _core.Reader, targets: Targets, numbers: list[int], wishes: Wishes) -> Mapping[str, Any]:
    """Read the bytes: the requested ones, or with ``mmap`` the pages of the tensors ``numbers``."""
    with ticker("load", source, shown=wishes.progress) as tick:
        if targets.mappings is not None:
            checked = numbers if wishes.verify else []
            report = reader.check(targets.mappings, checked, threads=wishes.threads, tick=tick)
            return targets.copy_mapped(report, wishes.threads)
        return read_targets(reader, targets, verify=wishes.verify, io=wishes.io, threads=wishes.threads, tick=tick)
