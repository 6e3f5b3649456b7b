"""The options of saves. A new option is added here twice: to the record, and to the TypedDict for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from fastckpt import _core
from fastckpt._files import Contents
from fastckpt._paths import AnyPath
from fastckpt._state.registry import Registry, check_registry

from .files import Files, Taken, take_files
from .io import IO, Engine, bytes_per_second, check_io, most_staging
from .reuse import check_base
from .selection import texts_of
from .settings import Settings, as_bool, as_given, in_short, option, record_of

if TYPE_CHECKING:
    from typing_extensions import Self


record_of("registry", "fastckpt.Registry")(Registry)


class WriteOptions(TypedDict, total=False):
    """The options of every save, including saves through torch.distributed.checkpoint."""

    overwrite: bool
    registry: Registry | None
    io: Engine | IO
    files: Contents | Files | None


class SaveOptions(WriteOptions, total=False):
    """The options of every save of a state."""

    base: AnyPath | None
    exclude: str | Sequence[str] | None
    dtype: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings(Settings):
    """How a checkpoint is written: checked options."""

    given = WriteOptions

    overwrite: bool = option(
        True, as_bool, "replace an existing checkpoint. Nothing else is ever replaced.", alike=True
    )
    registry: Registry | None = option(
        None,
        check_registry,
        "types that this call knows before those of :func:`fastckpt.register_type`, and how others are treated: a "
        ":class:`Registry`.",
    )
    io: IO = option(
        "auto",
        check_io,
        "how bytes move: an engine (``auto``, ``uring``, ``threads``, ``direct``, ``buffered``) or an :class:`IO`, "
        "with threads, a limit of the bandwidth, a progress bar; of saves in the background also ``lazy``, "
        "``max_in_flight``, ``nice`` and ``pin``.",
    )
    files: Taken = option(
        None,
        take_files,
        'further files for the directory, by name: ``{"config.json": text}``; or a :class:`Files`, with those, the '
        "size of shards, the key of the model, patterns of frozen tensors.",
        late=True,  # it reads files
    )

    def alike(self) -> dict[str, Any]:
        """The options that must be equal on all ranks of a job, by their names in errors."""
        files = self.files
        own = {"shard_size=": files.shard_size, "model_key=": files.model_key, "frozen=": files.frozen}
        return Settings.alike(self) | own

    def kept(self) -> list[tuple[str, str]]:
        """The options that a checkpoint records, in words, by name."""
        frozen = self.files.frozen
        return [*Settings.kept(self), *([("frozen", in_short(", ".join(frozen)))] if frozen else [])]

    def core(self, **more: Any) -> _core.SaveOptions:
        """The core's options, made from these settings and the further options ``more``."""
        own = {
            "overwrite": self.overwrite,
            "files": self.files.beside,
            "shard_size": self.files.shard_size,
            "io": self.io.engine,
            "threads": self.io.threads,
            "most_staging": most_staging(self.io),
            "bandwidth_limit": bytes_per_second(self.io),
            "kept": self.kept(),
        }
        return _core.SaveOptions(**{**own, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings(WriteSettings):
    """How a state is saved: checked options. Patterns are texts: objects that count matches are made for each save."""

    given = SaveOptions

    base: str | None = option(
        None,
        check_base,
        "an earlier checkpoint. Its files that hold only unchanged tensors are linked into the new checkpoint instead "
        "of written, and the rest is written so that unchanged tensors have files of their own from then on. Each "
        "directory stays whole by itself, and may be removed. The base may be ``path``. If it is damaged, missing or "
        "of another kind, the report warns, and more is written. docs/unchanged.md has the rules.",
        alike=True,
    )
    exclude: tuple[str, ...] | None = option(
        None,
        texts_of("exclude"),
        "a glob pattern, or several, over names (the keys on the way to a tensor or value, joined with dots), as for "
        ":func:`fastckpt.load`: matches are left out, as if they were not in the state, even if they could not be "
        "saved. A pattern without ``*``, ``?`` and ``[`` also leaves out all that is below that name. "
        "``fastckpt info`` shows the patterns; for several ranks, those of rank 0.",
        kept=", ".join,
    )
    dtype: Any = option(
        None,
        as_given,
        "cast floating-point tensors and arrays on the way, piece by piece, on their device: a dtype, a dict of "
        'patterns, as ``{"model": "bfloat16"}``, or a function, as for :func:`fastckpt.load`, where ``shard`` of the '
        ":class:`TensorInfo` is empty. A tensor of integers or booleans is cast if its exact name is in the dict. "
        "``warnings`` of the report name tensors with numbers beyond the range of their new dtype.",
    )

    def for_writing(self) -> Self:
        """A copy without the options that only flattening needs, which may hold much of the program's memory."""
        return replace(self, registry=None, dtype=None)
