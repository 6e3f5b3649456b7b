"""CRC-64/NVME (docs/format.md, 3.3) of buffers: by the compiled core, and where there is none by the package anycrc."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Digits of a sum in the manifest.
HEX = 16

_digits = re.compile(r"[0-9a-f]*").fullmatch

# The package imports its core first. What stands in for the compiled one imports this file, and has no sums by then.
_core: Any = sys.modules.get("fastckpt._core")
if hasattr(_core, "crc64"):

    def of(data: Any, before: int | None = None) -> int:
        """The sum of ``data``, a contiguous buffer; with ``before``, of what has that sum, followed by ``data``."""
        memory = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
        sum_: int = _core.crc64(memory.__array_interface__["data"][0], memory.nbytes, before)
        return sum_

    def joined(first: int, parts: Iterable[tuple[int, int]]) -> int:
        """The sum of what has the sum ``first``, followed by parts, each given as its sum and its length in bytes."""
        sum_: int = _core.crc64_joined(first, list(parts))
        return sum_

else:
    try:
        import anycrc  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "without its compiled core fastckpt needs the package anycrc for checksums: pip install anycrc"
            if sys.platform != "linux"
            else "this fastckpt has no compiled core and could only read: pip takes it where no wheel with the core "
            "fits, which is free-threaded CPython (3.14t), musl (Alpine) and processors other than x86-64 and aarch64. "
            "Use the usual build of CPython on a Linux with glibc; to read only, pip install anycrc"
        ) from error

    _model: Any = anycrc.Model("CRC64-NVME")

    def of(data: Any, before: int | None = None) -> int:
        """The sum of ``data``, a contiguous buffer; with ``before``, of what has that sum, followed by ``data``."""
        sum_: int = _model.calc(data, before) if len(data) else before or 0
        return sum_

    def joined(first: int, parts: Iterable[tuple[int, int]]) -> int:
        """The sum of what has the sum ``first``, followed by parts, each given as its sum and its length in bytes."""
        for sum_, length in parts:
            first = _model.combine(first, sum_, length)
        return first


def are_digits(text: str, count: int) -> bool:
    """Whether ``text`` is ``count`` sums, one after another."""
    return len(text) == count * HEX and _digits(text) is not None


def to_hex(sum_: int) -> str:
    """As the manifest has it."""
    return f"{sum_:016x}"
