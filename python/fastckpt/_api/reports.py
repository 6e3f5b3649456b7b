"""Reports of operations: frozen, printable, loggable."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NoReturn

from fastckpt._text import count, size, visible


class Fixed(dict[str, Any]):
    """A dict that cannot change; a real dict, so that ``dataclasses.asdict``, json and pickle accept it."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a report cannot be changed: copy it with dict()")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


#: Names of :meth:`Report.scalars`, and the attributes of a report that they come from, if it has them.
_FIGURES: Final = {
    "seconds": "seconds",
    "stall_seconds": "stall",
    "gigabytes_per_second": "gigabytes_per_second",
    "bytes": "bytes",
    "copied_bytes": "copied",
    "staged_bytes": "staged",
    "total_bytes": "bytes_total",
    "storage_bytes": "bytes_storage",
    "peer_bytes": "bytes_peers",
    "sent_bytes": "bytes_sent",
    "received_bytes": "bytes_received",
    "threads": "threads",
    "step": "step",
    "missing": "missing",
    "unexpected": "unexpected",
    "damage": "damage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one save, load or verification.

    Attributes:
        operation: ``save``, ``load`` or ``verify``.
        path: the checkpoint's directory, absolute.
        bytes: bytes of tensor data moved; for a mapped load, bytes checked.
        seconds: wall-clock seconds of the whole call.
        phases: seconds by phase, in order: ``plan``, ``write`` or ``read``, and for a save ``fsync`` and ``commit``;
            with a base, ``compare`` before ``write``.
        threads: worker threads used.
        engine: the engine that ran: ``uring``, ``threads`` or ``buffered``.
        fallback: why the requested engine was not used, or None.
        warnings: further messages for the caller; usually empty.
        thread_bytes: bytes that each worker thread moved.
        blocks: blocks by I/O path: ``zero-copy`` (direct I/O between the tensor and the disk), ``staged`` (direct I/O
            through a staging buffer), ``buffered`` (through the page cache).
        paths: the same blocks by I/O path and reason, without zeros: ``{"staged: small tensors": 12}``.
        copied: bytes that the processor copied: through staging buffers, and between memory and the page cache.
        shards: number of shards touched.
        tensors: number of tensors.
    """

    operation: ClassVar[str]

    path: str
    bytes: int
    seconds: float
    phases: Mapping[str, float]
    threads: int
    engine: Literal["uring", "threads", "buffered"]
    fallback: str | None
    warnings: tuple[str, ...] = ()
    thread_bytes: tuple[int, ...] = ()
    blocks: Mapping[str, int]
    paths: Mapping[str, int]
    copied: int
    shards: int
    tensors: int

    def __init_subclass__(cls) -> None:
        """Add the attributes that all reports have to the docstring of each class."""
        if cls.__doc__ is not None:
            common = textwrap.dedent((Report.__doc__ or "").partition("Attributes:\n")[2].rstrip())
            # Since Python 3.13, docstrings come without their common indentation.
            cls.__doc__ = re.sub(
                r"^( *)\{attributes\}$", lambda mark: textwrap.indent(common, mark[1]), cls.__doc__, flags=re.MULTILINE
            )

    def __post_init__(self) -> None:
        for name in ("phases", "blocks", "paths"):
            object.__setattr__(self, name, Fixed(getattr(self, name)))

    @property
    def gigabytes_per_second(self) -> float:
        """Throughput in GB/s (GB is 10^9 bytes); 0.0 for an empty checkpoint."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def scalars(self, prefix: str = "checkpoint/") -> dict[str, float]:
        """The figures of the report by name, for a logger of scalars such as TensorBoard or Weights & Biases.

        Each name is ``prefix``, the operation and the figure: ``checkpoint/save_seconds``. The figures are ``seconds``
        and ``{phase}_seconds`` for each phase, ``gigabytes_per_second``, ``bytes``, ``copied_bytes``, ``threads`` and
        ``fallback`` (1.0 where there is one). A save adds ``stall_seconds``, ``staged_bytes``, ``step``,
        ``total_bytes``, ``sent_bytes`` and ``received_bytes``, a load ``storage_bytes``, ``peer_bytes``, ``sent_bytes``
        and the counts ``missing`` and ``unexpected``, a verification the count ``damage``.

        Args:
            prefix: the beginning of each name.

        Returns:
            The figures, all of type float; without ``step`` where there is none.

        Example:
            >>> import fastckpt, numpy
            >>> report = fastckpt.save({"w": numpy.ones(3)}, "step-7", metadata={"step": 7})
            >>> figures = report.scalars()
            >>> figures["checkpoint/save_step"], figures["checkpoint/save_bytes"]
            (7.0, 24.0)
        """
        before = f"{prefix}{self.operation}_"
        found = {name: getattr(self, attribute) for name, attribute in _FIGURES.items() if hasattr(self, attribute)}
        found |= {f"{phase}_seconds": seconds for phase, seconds in self.phases.items()}
        found["fallback"] = self.fallback is not None
        return {
            f"{before}{name}": float(len(value) if isinstance(value, tuple) else value)
            for name, value in found.items()
            if value is not None
        }

    def _line(self, verb: str, more: str = "") -> str:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        why = f" ({self.fallback})" if self.fallback else ""
        return (
            f"{verb} {size(self.bytes)} in {self.seconds:.3f} s "
            f"({self.gigabytes_per_second:.2f} GB/s; {phases}{more}): "
            f"{count(self.tensors, 'tensor')}, {count(self.shards, 'shard')}, {count(self.threads, 'thread')}, "
            f"engine {self.engine}{why}: "
            f"{self.path}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(Report):
    """The result of one save.

    For an asynchronous save, ``phases`` begins with ``wait`` (for earlier saves) and ``stage``. In a save of several
    ranks, ``bytes``, ``thread_bytes``, ``blocks``, ``paths`` and ``copied`` count what this rank wrote, and ``shards``,
    ``tensors``, ``linked_files`` and ``linked_bytes`` the whole checkpoint; the phase ``commit`` includes the wait for
    the other ranks.

    Attributes:
        {attributes}
        stall: seconds for which the caller was blocked: for an asynchronous save in the call itself and in waits for
            the copy (``wait_staged``, a guard); for a synchronous one the whole save.
        staging: seconds that the copy to the snapshot took; 0.0 for a synchronous save.
        staged: bytes copied to the snapshot; 0 for a synchronous save.
        step: the training step, where the metadata has it as ``{"step": ...}``, or None.
        linked_files: files that were linked from ``base`` instead of written.
        linked_bytes: bytes of tensor data in the linked files. ``bytes`` counts only what was written.
        rank: this rank in the process group.
        ranks: how many ranks saved together.
        bytes_total: bytes of tensor data that all ranks wrote.
        bytes_sent: bytes that this rank sent to ranks that wrote them.
        bytes_received: bytes that this rank received from others, and wrote.
        bytes_host: the received bytes that this rank read from the memory of ranks on its host, not over the network.
        host_fallback: why other ranks on its host sent their bytes over the network; empty if none did.
        peers: number of ranks that this rank exchanged bytes with.
        team: approximate number of ranks that merged their pieces before the write (``FASTCKPT_AGGREGATE``); 1 if each
            rank wrote its own.
        grain: the writer of a file can change only at multiples of this many bytes; 0 for a save of one process.
    """

    operation: ClassVar[str] = "save"

    stall: float = -1.0
    staging: float = 0.0
    staged: int = 0
    step: int | None = None
    linked_files: int = 0
    linked_bytes: int = 0
    rank: int = 0
    ranks: int = 1
    bytes_total: int = -1
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_host: int = 0
    host_fallback: str = ""
    peers: int = 0
    team: int = 1
    grain: int = 0

    def __post_init__(self) -> None:
        Report.__post_init__(self)
        if self.stall < 0:
            object.__setattr__(self, "stall", self.seconds)
        if self.bytes_total < 0:
            object.__setattr__(self, "bytes_total", self.bytes)

    def __str__(self) -> str:
        more = f", stall {self.stall:.3f} s" if self.staged else ""
        if self.ranks > 1:
            more += f"; {size(self.bytes_total)} together"
        line = self._line(_by_rank(self, "saved"), more)
        if self.linked_files:
            line += f" ({size(self.linked_bytes)} more in {count(self.linked_files, 'file')} linked from the base)"
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Report):
    """The result of one load.

    In a load of several ranks, ``bytes`` are the bytes that this rank requested.

    Attributes:
        {attributes}
        missing: with ``strict=False``, names of tensors and objects in ``into`` that the checkpoint lacks, and patterns
            of ``keys`` that match nothing.
        unexpected: with ``strict=False``, the names of tensors of the checkpoint for which ``into`` has no place.
        rank: this rank in the process group.
        ranks: how many ranks loaded together.
        bytes_storage: bytes that this rank read from storage, for itself or for others.
        bytes_peers: bytes that this rank received from other ranks.
        bytes_sent: bytes that this rank sent to other ranks.
    """

    operation: ClassVar[str] = "load"

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    rank: int = 0
    ranks: int = 1
    bytes_storage: int = -1
    bytes_peers: int = 0
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        Report.__post_init__(self)
        if self.bytes_storage < 0:
            object.__setattr__(self, "bytes_storage", self.bytes)

    def __str__(self) -> str:
        line = self._line(_by_rank(self, "loaded"))
        if self.ranks > 1:
            line += f": {size(self.bytes_storage)} from storage, {size(self.bytes_peers)} from other ranks"
        if self.missing or self.unexpected:
            line += f": {len(self.missing)} missing{_first(self.missing)}"
            line += f", {len(self.unexpected)} unexpected{_first(self.unexpected)}"
        return line


def _by_rank(report: SaveReport | LoadReport, verb: str) -> str:
    return verb if report.ranks == 1 else f"rank {report.rank} of {report.ranks} {verb}"


def _first(names: tuple[str, ...]) -> str:
    return f" ({', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''})" if names else ""  # noqa: PLR2004


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged range of bytes.

    Attributes:
        file: name of the file inside the checkpoint.
        offset: first byte of the range in that file.
        length: bytes in the range.
        tensor: the tensor that the range belongs to, or None (a header, a missing file).
        reason: a description of the damage.
    """

    file: str
    offset: int
    length: int
    tensor: str | None
    reason: str

    def __str__(self) -> str:
        owner = f"tensor {self.tensor!r}" if self.tensor is not None else "no tensor"
        end = self.offset + self.length
        return f"{visible(self.file)}: bytes {self.offset} to {end} ({owner}): {visible(self.reason)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(Report):
    """The result of a verification.

    Attributes:
        {attributes}
        damage: every damaged range, in file order; empty for a whole checkpoint.
    """

    operation: ClassVar[str] = "verify"

    damage: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte matches its checksum."""
        return not self.damage

    def __str__(self) -> str:
        found = "no damage" if self.ok else f"{count(len(self.damage), 'damaged range')}, first {self.damage[0]}"
        return f"{self._line('verified' if self.ok else 'DAMAGED, verified')}: {found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of one copy.

    Attributes:
        source: the place of the checkpoint: an absolute path or a URL.
        target: the place of the copy.
        bytes: bytes that were moved.
        reused_bytes: bytes that were at the target already, or that an earlier, interrupted copy had sent.
        files: the files of the checkpoint, the manifest among them.
        seconds: wall-clock seconds.
        warnings: further messages for the caller; usually empty.
        was_there: whether the target already held this checkpoint and nothing was copied.
    """

    source: str
    target: str
    bytes: int
    reused_bytes: int
    files: int
    seconds: float
    warnings: tuple[str, ...] = ()
    was_there: bool = False

    @property
    def gigabytes_per_second(self) -> float:
        """Throughput of the bytes moved, in GB/s (GB is 10^9 bytes)."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        if self.was_there:
            return f"nothing to copy: {self.target} holds the checkpoint of {self.source} already"
        reused = f", {size(self.reused_bytes)} were there" if self.reused_bytes else ""
        return (
            f"copied {size(self.bytes)} in {self.seconds:.3f} s ({self.gigabytes_per_second:.2f} GB/s{reused}): "
            f"{count(self.files, 'file')}: {self.source} -> {self.target}"
        )
