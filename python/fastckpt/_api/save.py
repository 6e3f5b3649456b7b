"""Saving: a state becomes a durable checkpoint."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from fastckpt import _core
from fastckpt._files import Files, check_files
from fastckpt._paths import AnyPath, path_of
from fastckpt._state.flatten import Flat, flatten
from fastckpt._state.groups import split_model
from fastckpt._state.registry import Registry, Types
from fastckpt._tensors.movers import Sources
from fastckpt._tensors.ranges import range_of
from fastckpt._units import bytes_of

from . import in_flight
from .direct_io import way_of
from .lent import lent
from .options import DeviceEngine, check_bandwidth, check_engine
from .outcome import Attempt, conclude
from .progress import ticker
from .reports import SaveReport
from .reuse import check_base, check_frozen, flags_of
from .tailor import Tailor

NO_TENSORS = "metadata cannot hold tensors: put them into the state"


def save(  # noqa: PLR0913 - all by name
    state: Any,
    path: AnyPath,
    *,
    overwrite: bool = True,
    metadata: Any = None,
    files: Files | None = None,
    base: AnyPath | None = None,
    frozen: str | Sequence[str] | None = None,
    shard_size: int | str = "5GB",
    model_key: str | None = "auto",
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    default: Callable[[Any], Any] | None = None,
    registry: Registry | None = None,
    io: DeviceEngine = "auto",
    threads: int | None = None,
    bandwidth_limit: float | str | None = None,
    progress: bool = False,
) -> SaveReport:
    """Write ``state`` to the directory ``path``; it is durable and whole when this returns.

    Until then the final name holds what it held before. The state must not change meanwhile: the checkpoint would hold
    a mixture of old and new values.

    Args:
        state: any nesting of dicts, lists, tuples and sets with tensors, numpy arrays and Python values in it, named
            tuples, dataclasses, enums and the like; what has ``state_dict()`` (modules, optimizers) is stored as that.
            Tensors come back on the CPU, contiguous; those that share memory, dtype, shape and strides are stored
            once and come back tied. Attributes that a program sets on a Parameter are not stored. docs/states.md has a
            table of all kinds of values.
        path: the checkpoint's directory, not a URL. Missing directories above it are made, durably as well; a save
            that fails leaves them. An asynchronous save to it in flight is waited for.
        overwrite: replace a checkpoint that is there. Anything else is never replaced.
        metadata: a state without tensors, to be read without them: ``{"step": 1000}``.
        files: further files for the directory, by name: a str is the text of the file (UTF-8), bytes are its content,
            and an ``os.PathLike`` names a file to copy: ``{"config.json": json.dumps(config)}``. They appear together
            with the checkpoint. Later saves to ``path`` carry them over, unless they give one of the same name. They
            are read into memory.
        base: an earlier checkpoint. Files of it that hold nothing but tensors that have not changed are linked into the
            new checkpoint instead of written, and the rest is written so that unchanged tensors have files of their own
            from then on. Each directory stays whole by itself, and may be removed. May be ``path``. A base that is
            damaged, missing or of another kind is a warning in the report: then more is written. docs/unchanged.md
            has the rules.
        frozen: patterns (as ``keys`` of :func:`fastckpt.load`) of tensors that will not change in later saves: they get
            files of their own in the first save. Without it, they are found in the second one.
        shard_size: bytes per file, about: an int, or a string with a unit (``"500MB"``, ``"2GiB"``). A tensor is
            never split.
        model_key: the key of the outer dict whose mapping is the model. Its tensors go to ``model*.safetensors``
            under the names that they have inside it, everything else to files in ``training/``, so that Hugging
            Face's readers open the directory as it lies. ``auto`` takes the first of ``model``, ``module``,
            ``state_dict`` and ``model_state_dict`` that leads to a mapping with tensors in it, unless another outer key
            makes names that start like its own (``model.ema`` beside ``model``); without one, or with None, the whole
            state is written as the model.
        exclude: a glob pattern, or several, over names (the keys on the way to a tensor or value, joined with dots), as
            for :func:`fastckpt.load`: what matches is left out, as if it were not in the state, also what could not be
            saved. A pattern without ``*``, ``?`` and ``[`` also leaves out all that is below that name.
        dtype: cast floating-point tensors and arrays on the way, piece by piece, on their device: a dtype, a dict of
            patterns, as ``{"model": "bfloat16"}``, or a function, as for :func:`fastckpt.load`, where ``shard`` of the
            :class:`TensorInfo` is empty. A tensor of integers or booleans is cast where its very name is in the dict.
            ``warnings`` of the report name tensors with numbers beyond the range of their new dtype.
        default: called with what cannot be saved; returns something that can, which is stored in its place, or raises
            TypeError. (A generator, for example: ``lambda value: list(value)``.)
        registry: types that this call knows before those of :func:`fastckpt.register_type`.
        io: ``auto``; ``uring`` or ``threads`` (direct I/O, buffered where it is refused); ``direct`` (the same, and
            OSError where direct I/O is refused); ``buffered``. ``auto`` is what the environment variable FASTCKPT_IO
            says, where it is set, else the first of these that works. The report says which ran.
            ``gds`` is ``auto``, but whole blocks of contiguous tensors on CUDA devices go straight to the file
            (GPUDirect Storage), where that can be done; ``fallback`` of the report says why not.
        threads: worker threads, at most 24; by default one per core of this rank, but at most 8 with ``uring``, at
            least 12 with ``threads`` and at least 4 with ``buffered``; one below 2 MiB.
        bandwidth_limit: bytes per second that the save may write, so that others can use the same storage: a number,
            or a string with a unit (``"2GB"``); None for no limit.
        progress: show a progress bar.

    Returns:
        What was done: bytes, seconds by phase, engine.

    Raises:
        UnsupportedTypeError: the state or the metadata holds what cannot be stored, or is larger than the format
            allows, or a tensor cannot be cast; nothing was written.
        KeyError: a pattern of ``exclude``, ``dtype`` or ``frozen`` matches nothing; nothing was written.
        TypeError: a pattern is not a string.
        FileExistsError: ``path`` exists and is not a checkpoint, among it what another program wrote, or it is one and
            ``overwrite`` is false.
        NotADirectoryError: a directory above ``path`` is a file.
        OSError: the storage failed, with its ``errno``; the old checkpoint, if any, is untouched. (Only if the very
            last step fails, the sync of the parent directory, the new one has its name by then.)
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph; nothing
            was written.
        ValueError: an argument is out of range, ``path`` or ``base`` is a URL, ``model_key`` leads to no mapping,
            ``dtype`` is none of floating-point numbers, nothing is left, or a name in ``files`` is not a plain file
            name, or one of fastckpt's own.

    Warns:
        RuntimeWarning: a value is of a class that this program does not declare, so that a load would refuse it, or of
            one of ``__main__`` without another name, or an attribute beside the fields of a dataclass cannot be stored,
            once for each; or an earlier asynchronous save failed, and nobody has asked for its result.
    """
    began = time.perf_counter()
    target = path_of("save", path)
    check_engine("save", io, threads, devices=True)
    file_bytes = bytes_of("save: shard_size", shard_size)
    limit = check_bandwidth("save", bandwidth_limit)
    more = check_files("save", files)
    earlier, patterns = check_base("save", base), check_frozen("save", frozen)
    tailor = Tailor("save", exclude, dtype)
    with range_of("fastckpt.save"), Attempt("save", target):
        types = Types("save", registry)
        about = flatten(metadata, operation="save: metadata", refuse_tensors=NO_TENSORS, types=types, default=default)
        flat = flatten(state, types=types, default=default, excluded=tailor.excluded)
        try:
            tailor.fit(flat, types)
            sources = Sources("save", flat.movers)
            warn_of_types("save", flat, about)
            prefix = split_model("save", flat, model_key)
            still = flags_of(patterns, [tensor.name for tensor in flat.tensors])
            with (
                way_of("save", io, flat.movers, write=True) as way,
                lent(sources.devices, flat.pulled) as staging,
            ):
                options = _core.SaveOptions(
                    model_prefix=prefix,
                    overwrite=bool(overwrite),
                    files=more,
                    base=earlier,
                    frozen=still,
                    shard_size=file_bytes,
                    io=way.engine,
                    threads=threads,
                    bandwidth_limit=limit,
                    step=step_of(metadata),
                    elapsed=time.perf_counter() - began,
                    staging=staging.core,
                    direct=way.direct,
                )
                in_flight.wait_for_path(target)
                if earlier is not None:
                    in_flight.wait_for_path(earlier)
                with ticker("save", target, shown=progress) as tick:
                    done = _core.save(
                        target,
                        flat.tensors,
                        flat.structure(),
                        about.structure(),
                        options,
                        sources.fill if flat.movers else None,
                        tick,
                    )
                report = tailor.noted(way.noted(staging.noted(done)))
        finally:
            # An error's traceback has this frame, and with it exports of the caller's buffers.
            flat.keep.clear()
    saved = conclude(SaveReport, target, began, report, step=step_of(metadata))
    warn_of_failures()
    return saved


#: What has been said of types.
_said: set[str] = set()


def warn_of_types(operation: str, *flats: Flat, stacklevel: int = 3) -> None:
    """Warn once of each type that may not come back; called by what the user calls."""
    for remark in (remark for flat in flats for _, remark in flat.remarks):
        if remark not in _said:
            _said.add(remark)
            warnings.warn(f"fastckpt: {operation}: {remark}", RuntimeWarning, stacklevel=stacklevel)


def step_of(metadata: Any) -> int | None:
    """The training step for the live counters, if the metadata has it."""
    step = metadata.get("step") if isinstance(metadata, dict) else None
    return step if type(step) is int and 0 <= step < 2**63 else None


def warn_of_failures() -> None:
    """Warn of failures that nobody asked for, after a save is safe: the program may be about to end.

    Called by what the user calls.
    """
    for failure in in_flight.unasked():
        warnings.warn(in_flight.unasked_text(failure), RuntimeWarning, stacklevel=3)
