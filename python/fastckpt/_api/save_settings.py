"""The options of saves. A new one is added here twice: to the record, and to the TypedDict that type checkers see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from fastckpt import _core
from fastckpt._files import Files, check_files
from fastckpt._paths import AnyPath
from fastckpt._state.registry import Registry
from fastckpt._units import bytes_of

from .options import Engine, check_bandwidth, check_io, check_threads
from .reuse import check_base
from .selection import texts_of
from .settings import Settings, as_bool, as_given, callable_of, option

if TYPE_CHECKING:
    from typing_extensions import Self


class WriteOptions(TypedDict, total=False):
    """The options of every save, including that of torch.distributed.checkpoint."""

    overwrite: bool
    files: Files | None
    shard_size: int | str
    model_key: str | None
    registry: Registry | None
    io: Engine
    threads: int | None
    bandwidth_limit: float | str | None


class SaveOptions(WriteOptions, total=False):
    """The options of every save of a state."""

    base: AnyPath | None
    frozen: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    dtype: Any
    encode: Callable[[Any], Any] | None
    progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings(Settings):
    """How a checkpoint is written; checked."""

    given = WriteOptions

    overwrite: bool = option(
        True, as_bool, "replace a checkpoint that is there. Anything else is never replaced.", alike=True
    )
    shard_size: int = option(
        "5GB",
        lambda operation, value: bytes_of(f"{operation}: shard_size", value),
        'bytes per file, about: an int, or a string with a unit (``"500MB"``, ``"2GiB"``). A tensor is never split.',
        alike=True,
    )
    model_key: str | None = option(
        "auto",
        as_given,
        "the key of the outer dict whose mapping is the model. Its tensors go to ``model*.safetensors`` under the "
        "names that they have inside it, everything else to files in ``training/``, so that Hugging Face's readers "
        "open the directory directly. ``auto`` takes the first of ``model``, ``module``, ``state_dict`` and "
        "``model_state_dict`` that leads to a mapping with tensors in it, unless another outer key makes names that "
        "start like its own (``model.ema`` beside ``model``); without one, or with None, the whole state is written as "
        "the model.",
        alike=True,
    )
    registry: Registry | None = option(
        None, as_given, "types that this call knows before those of :func:`fastckpt.register_type`."
    )
    io: str = option(
        "auto",
        check_io,
        "``auto``; ``uring`` or ``threads`` (direct I/O, buffered where it is refused); ``direct`` (the same, and "
        "OSError where direct I/O is refused); ``buffered``. ``auto`` follows the environment variable FASTCKPT_IO "
        "if it is set, else takes the first of these that works. The report names the one that ran.",
    )
    threads: int | None = option(
        None,
        check_threads,
        "worker threads of this process, at most 24; by default one per core of this rank, but at most 8 with "
        "``uring``, at least 12 with ``threads`` and at least 4 with ``buffered``; one below 2 MiB.",
    )
    bandwidth_limit: int | None = option(
        None,
        check_bandwidth,
        "bytes per second that this process may write, so that others can use the same storage: a number, or a string "
        'with a unit (``"2GB"``); None for no limit.',
    )

    # Last, because it reads files.
    files: list[tuple[str, bytes]] = option(
        None,
        check_files,
        "further files for the directory, by name: a str is the text of the file (UTF-8), bytes are its content, and "
        'an ``os.PathLike`` names a file to copy: ``{"config.json": json.dumps(config)}``. They appear together with '
        "the checkpoint. Later saves to ``path`` carry them over, unless they give one of the same name. They are read "
        "into memory at the call. Of several ranks, those of the first.",
    )

    def core(self, **more: Any) -> _core.SaveOptions:
        """The core's options: these, and those that a save adds."""
        own = {
            "overwrite": self.overwrite,
            "files": self.files,
            "shard_size": self.shard_size,
            "io": self.io,
            "threads": self.threads,
            "bandwidth_limit": self.bandwidth_limit,
            "kept": self.kept(),
        }
        return _core.SaveOptions(**{**own, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings(WriteSettings):
    """How a state is saved; checked. Patterns are kept as texts: objects that count matches are made for each save."""

    given = SaveOptions

    base: str | None = option(
        None,
        check_base,
        "an earlier checkpoint. Files of it that hold nothing but tensors that have not changed are linked into the "
        "new checkpoint instead of written, and the rest is written so that unchanged tensors have files of their own "
        "from then on. Each directory stays whole by itself, and may be removed. May be ``path``. A base that is "
        "damaged, missing or of another kind is a warning in the report: then more is written. docs/unchanged.md has "
        "the rules.",
        alike=True,
    )
    frozen: tuple[str, ...] | None = option(
        None,
        texts_of("frozen"),
        "patterns (as ``keys`` of :func:`fastckpt.load`) of tensors that will not change in later saves: they get "
        "files of their own in the first save. Without it, they are found in the second one.",
        alike=True,
        kept=", ".join,
    )
    exclude: tuple[str, ...] | None = option(
        None,
        texts_of("exclude"),
        "a glob pattern, or several, over names (the keys on the way to a tensor or value, joined with dots), as for "
        ":func:`fastckpt.load`: what matches is left out, as if it were not in the state, also what could not be "
        "saved. A pattern without ``*``, ``?`` and ``[`` also leaves out all that is below that name. "
        "``fastckpt info`` shows the patterns, of several ranks those of the first.",
        kept=", ".join,
    )
    dtype: Any = option(
        None,
        as_given,
        "cast floating-point tensors and arrays on the way, piece by piece, on their device: a dtype, a dict of "
        'patterns, as ``{"model": "bfloat16"}``, or a function, as for :func:`fastckpt.load`, where ``shard`` of the '
        ":class:`TensorInfo` is empty. A tensor of integers or booleans is cast where its very name is in the dict. "
        "``warnings`` of the report name tensors with numbers beyond the range of their new dtype.",
    )
    encode: Callable[[Any], Any] | None = option(
        None,
        callable_of("encode"),
        "called with what cannot be saved; returns something that can, which is stored in its place, or raises "
        "TypeError. (A generator, for example: ``lambda value: list(value)``.)",
    )
    progress: bool = option(False, as_bool, "show a progress bar of what this process writes.")

    def for_writing(self) -> Self:
        """Without the options that only the walk over the state needs, which may hold much of the program's memory."""
        return replace(self, encode=None, registry=None, dtype=None)
