"""CRC-64/NVME without the compiled core, by the package anycrc; ``_core.pyi`` documents the two functions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fastckpt._tensors.memory import at

try:
    import anycrc  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "without its compiled core fastckpt needs the package anycrc for checksums: pip install anycrc"
        if sys.platform != "linux"
        else "this fastckpt has no compiled core and could only read: pip installs it if no wheel with the core fits: "
        "on free-threaded CPython (3.14t), musl (Alpine), processors other than x86-64 and aarch64. Use the usual "
        "build of CPython on a Linux with glibc; to read only, pip install anycrc"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

_model: Any = anycrc.Model("CRC64-NVME")


def crc64(address: int, nbytes: int, before: int | None = None) -> int:
    """The checksum of the bytes at ``address``."""
    sum_: int = _model.calc(at(address, nbytes), before) if nbytes else before or 0
    return sum_


def crc64_joined(first: int, parts: Sequence[tuple[int, int]]) -> int:
    """The checksum of bytes with the checksum ``first``, followed by ``parts``."""
    for sum_, length in parts:
        first = _model.combine(first, sum_, length)
    return first
