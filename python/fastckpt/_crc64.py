"""CRC-64/NVME (docs/format.md, 3.3) of buffers, and how the manifest writes it."""

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
    """Computes it of the bytes at an address."""

    def __call__(self, address: int, nbytes: int, before: int | None = None) -> int: ...


_sum: _Sum
_join: Callable[[int, Sequence[tuple[int, int]]], int]


def use(sum_: _Sum, join: Callable[[int, Sequence[tuple[int, int]]], int]) -> None:
    """Set the functions that compute: the core's, which the portable reader below it also uses."""
    global _sum, _join
    _sum, _join = sum_, join


def of(data: Any, before: int | None = None) -> int:
    """The sum of ``data``, a contiguous buffer; with ``before``, of the bytes with that sum, followed by ``data``."""
    memory = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
    return _sum(memory.__array_interface__["data"][0], memory.nbytes, before)


def joined(first: int, parts: Iterable[tuple[int, int]]) -> int:
    """The sum of the bytes with the sum ``first``, followed by parts, each given as its sum and its length in bytes."""
    return _join(first, list(parts))


def are_digits(text: str, count: int) -> bool:
    """Whether ``text`` is ``count`` sums, one after another."""
    return len(text) == count * HEX and _digits(text) is not None


def to_hex(sum_: int) -> str:
    """The notation of the manifest."""
    return f"{sum_:016x}"
