"""Loading: a checkpoint becomes the state that was saved."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from fastckpt import _core
from fastckpt._paths import path_of
from fastckpt._state.builders import StateBuilder, Validator, torch_for
from fastckpt._state.collector import paused
from fastckpt._state.registry import Types
from fastckpt._state.select import find, named, prune
from fastckpt._state.unflatten import parse, unflatten
from fastckpt._text import suggest

from .destinations import Targets
from .into import Into
from .options import check_engine, check_framework, check_unknown
from .outcome import conclude, until_settled, warn_of_unknown
from .progress import ticker
from .reports import Loaded, LoadReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._paths import AnyPath
    from fastckpt._state.registry import Registry

    from .options import Engine, Framework, Unknown

#: How many names are compared with one that matches nothing, and how long they may be.
_KNOWN, _LONG = 5000, 500


@overload
def load(
    path: AnyPath,
    *,
    into: Any = ...,
    keys: str | Sequence[str] | None = ...,
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
def load(  # noqa: PLR0913 - what is to be loaded has many sides
    path: AnyPath,
    *,
    into: Any = None,
    keys: str | Sequence[str] | None = None,
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
        path: the checkpoint's directory.
        into: a state of the same structure. Its tensors and arrays, on whatever device, are filled in place and stand
            in the result; everything else comes from the checkpoint. A tensor need not be tied where the
            checkpoint's is. Tensors that overlap in memory without being tied are a mismatch.
        keys: a glob pattern, or several, over names: the keys on the way to a tensor or value, joined with dots
            (``"model.*"``, ``"optimizer.param_groups.0.lr"``; ``*`` matches dots, too). Only tensors that match are
            read, and the result holds only what matches, tensors and values, and the containers that lead there:
            positions in lists close up. An empty container is a value. What is made of several parts (a sparse
            tensor, a registered object) comes whole when it or one of its parts matches; types of other parts need not
            be registered. A tied tensor has a name at each of its places, and comes back at those that match.
        framework: ``auto`` gives each tensor as it was saved; ``torch`` gives arrays as tensors, too; ``numpy`` gives
            tensors as arrays, ``torch.Size`` as tuple, ``torch.dtype`` and ``torch.device`` as str, without torch.
        device: where new torch tensors go, all of them (states of CPU random generators, too): a ``torch.device`` or
            its name, as ``cuda:0``; None for the CPU. They are read through pinned staging buffers, and copied
            while more is read.
        registry: types that this call knows before those of :func:`fastckpt.register_type`.
        unknown: what a value of a type becomes that this program does not know: ``error``, or ``plain`` for what it is
            stored as (a dataclass is the dict of its fields, an enum its name, a subclass of a built-in type that type,
            without attributes; where only something hashable can be, a tuple; a time zone None), with a warning.
        mmap: map the files instead of reading them: new tensors and arrays are pages of the page cache, which all
            processes of a node share; one is copied when it is first written to, so no write reaches a file. For
            checkpoints that are hot. As long as the tensors live, nobody may change or cut the files in place, and if
            their storage fails, touching a page ends the process with SIGBUS. (To save to the same path, or to remove
            it, does no harm on a local file system; on NFS another host must not.)
        verify: compare every byte with its checksum. With ``mmap``: the pages as they are at the call; one that memory
            pressure has evicted is read again unchecked. Without ``verify`` pages are read when they are touched.
        io: ``auto``; ``uring`` or ``threads`` (direct I/O, buffered where it is refused); ``direct`` (the same, and
            OSError where direct I/O is refused); ``buffered``. ``auto`` is what the environment variable FASTCKPT_IO
            says, where it is set, else the first of these that works. It takes from the page cache what is there.
            Where LOCAL_WORLD_SIZE is more than 1, ``auto`` reads all through the page cache, so that the ranks of a
            node that load one path read the storage once, unless one of the path's last two components names
            the rank (``rank-3``, by RANK or LOCAL_RANK): for other paths that one rank alone loads, give ``uring``.
            With ``mmap`` there is only the page cache, whatever the variable says.
        threads: worker threads; by default as many as this process may use cores, within limits.
        progress: show a progress bar.
        report: return a report, too.

    Returns:
        The state, or with ``report=True`` a :class:`Loaded` of the state and a :class:`LoadReport`. New tensors are on
        the CPU, or on ``device``.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; the message says where.
        FormatVersionError: it is of a version that this release does not read.
        StructureMismatchError: ``into`` does not fit, and nothing was changed; ``differences`` lists them all.
        UnsupportedTypeError: a type that is to be loaded is not known, or a dtype is not available.
        CheckpointError: the class in this program is not the one that was saved.
        KeyError: a pattern of ``keys`` matches nothing.
        TypeError: ``keys`` or ``path`` is of another type.
        FileNotFoundError: there is nothing at ``path``.
        ImportError: the checkpoint holds torch tensors and torch cannot be imported.
        ValueError: an argument is out of range, or ``path`` is a URL.

    Warns:
        RuntimeWarning: with ``unknown="plain"``, types that are not known, once for all of them.
    """
    source = path_of("load", path)
    check_engine("load", io, threads)
    check_framework("load", framework)
    types = Types("load", registry, framework=framework)
    check_unknown("load", unknown)
    if device is not None:
        if into is not None:
            raise ValueError("load: device is for new tensors: those of into stay where they are")
        if framework == "numpy":
            raise ValueError('load: framework="numpy" makes arrays, which are on no device')
        device = torch_for("what is to go to a device").device_of(device)
    if mmap:
        if into is not None or device is not None:
            raise ValueError("load: mmap is for new tensors in host memory: give neither into nor device")
        if io not in {"auto", "buffered"}:
            raise ValueError(f'load: mmap goes through the page cache: io must be "auto" or "buffered", not {io!r}')
    loaded = until_settled(
        lambda: _load(
            source,
            into,
            keys,
            framework,
            device,
            types,
            plain=unknown == "plain",
            mmap=bool(mmap),
            verify=bool(verify),
            io=io,
            threads=threads,
            progress=progress,
        )
    )
    return loaded if report else loaded.state


def _load(
    source: str,
    into: Any,
    keys: Any,
    framework: str,
    device: Any,
    types: Types,
    *,
    plain: bool,
    mmap: bool,
    verify: bool,
    io: str,
    threads: int | None,
    progress: bool,
) -> Loaded:
    began = time.perf_counter()
    reader = _core.Reader(source)
    with paused():
        stored = reader.tensors()
    tokens = parse(reader.structure())
    # With keys= types are asked for only where something was chosen: the rest may be another program's.
    check = Validator(stored, types=types, strangers=plain or keys is not None)
    unflatten(tokens, check)
    targets = Targets(stored, framework, device)
    every, origin = tokens, None
    if keys is not None:
        tokens, origin = prune(tokens, select(named(tokens, [tensor.name for tensor in stored]), keys))
        check = Validator(stored, types=types, strangers=plain)
        unflatten(tokens, check)
    if check.unknown:
        warn_of_unknown("load", check.unknown, stacklevel=6)
    composed = None
    given = None
    if into is not None:
        given = Into(source, into, framework)
        composed = given.match(
            find(every, given.flat.places), None if origin is None else frozenset(origin), stored, targets
        )
    else:
        wanted = check.found
        numbers = sorted({token[1] for token in wanted}) if mmap else []
        if mmap:
            targets.mappings = reader.map(numbers)
        targets.make(wanted)
    try:
        with ticker("load", source, shown=progress) as tick:
            if targets.mappings is not None:
                report = reader.check(targets.mappings, numbers if verify else [], threads=threads, tick=tick)
            else:
                report = reader.read(
                    targets.requests,
                    verify=verify,
                    io=io,
                    threads=threads,
                    drain=targets.drain if targets.movers else None,
                    tick=tick,
                )
    finally:
        # Also after an error: a device must not write into memory that is somebody else's by then.
        if targets.movers:
            targets.settle()
    if given is not None:
        given.changed()
    state = unflatten(tokens, StateBuilder(framework, targets.values(), composed, types=types, plain=plain))
    return Loaded(state, conclude(LoadReport, source, began, report))


def select(names: Iterable[tuple[int, str]], keys: Any) -> set[int]:
    """The positions whose names match any of the patterns; KeyError for a pattern that matches none."""
    if not isinstance(keys, Iterable) or isinstance(keys, (bytes, bytearray)):
        raise TypeError(f"load: keys must be a pattern or a sequence of patterns, not {keys!r}")
    patterns = [keys] if isinstance(keys, str) else list(keys)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"load: keys must be a pattern or a sequence of patterns, not {pattern!r}")
    matches = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
    matched = [False] * len(patterns)
    wanted: set[int] = set()
    known: list[str] = []
    for position, name in names:
        for number, match in enumerate(matches):
            if match(name):
                matched[number] = True
                wanted.add(position)
        if len(known) < _KNOWN and len(name) <= _LONG:
            known.append(name)
    if not all(matched):
        pattern = patterns[matched.index(False)]
        raise KeyError(f"load: keys: {pattern!r} matches nothing{suggest(pattern, known)}")
    return wanted
