"""CRC-64/NVME (docs/format.md, 3.3)."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

try:
    import anycrc  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "without its compiled core fastckpt needs the package anycrc for checksums: pip install anycrc"
        if sys.platform != "linux"
        else "this fastckpt has no compiled core and could only read: pip takes it where no wheel with the core fits, "
        "which is free-threaded CPython (3.14t), musl (Alpine) and processors other than x86-64 and aarch64. Use the "
        "usual build of CPython on a Linux with glibc; to read only, pip install anycrc"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Digits of a sum in the manifest.
HEX = 16

_model: Any = anycrc.Model("CRC64-NVME")
_digits = re.compile(r"[0-9a-f]*").fullmatch


def of(data: Any, before: int | None = None) -> int:
    """The sum of ``data``, a buffer; with ``before``, of what has that sum, followed by ``data``."""
    sum_: int = _model.calc(data, before) if len(data) else before or 0
    return sum_


def joined(first: int, parts: Iterable[tuple[int, int]]) -> int:
    """The sum of what has the sum ``first``, followed by parts, each given as its sum and its length."""
    for sum_, length in parts:
        first = _model.combine(first, sum_, length)
    return first


def are_digits(text: str, count: int) -> bool:
    """Whether ``text`` is ``count`` sums, one after another."""
    return len(text) == count * HEX and _digits(text) is not None


def to_hex(sum_: int) -> str:
    """As the manifest has it."""
    return f"{sum_:016x}"
