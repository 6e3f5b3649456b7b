"""CRC-64/NVME (docs/format.md, 3.3) of buffers, and its notation in the manifest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Digits of a sum in the manifest.
HEX = 16

_digits = re.compile(r"[0-9a-f]*").fullmatch


class _Sum(Protocol):
    """Computes the checksum of the bytes at an address."""

    def __call__(self, address: int, nbytes: int, before: int | None = None) -> int: ...


_sum: _Sum
_join: Callable[[int, Sequence[tuple[int, int]]], int]


def use(sum_: _Sum, join: Callable[[int, Sequence[tuple[int, int]]], int]) -> None:
    """Set the functions that compute checksums: those of ``_core``. The portable reader uses them, too."""
    global _sum, _join
    _sum, _join = sum_, join


def of(data: Any, before: int | None = None) -> int:
    """The checksum of ``data``, a contiguous buffer; with ``before``, preceded by bytes with that checksum."""
    memory = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
    return _sum(memory.__array_interface__["data"][0], memory.nbytes, before)


def joined(first: int, parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of bytes with the checksum ``first``, followed by parts, given as checksum and length in bytes."""
    return _join(first, list(parts))


def are_digits(text: str, count: int) -> bool:
    """Whether ``text`` is ``count`` checksums, one after another."""
    return len(text) == count * HEX and _digits(text) is not None


def to_hex(sum_: int) -> str:
    """The checksum in the notation of the manifest."""
    return f"{sum_:016x}"
