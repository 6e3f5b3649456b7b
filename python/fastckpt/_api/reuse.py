"""What a save may take over from an earlier checkpoint: ``base=`` and ``frozen=``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastckpt._paths import AnyPath, path_of

from .selection import Patterns


def check_base(operation: str, base: AnyPath | None) -> str | None:
    """``base=`` as an absolute path."""
    return None if base is None else path_of(f"{operation}: base", base)


def check_frozen(operation: str, frozen: Any) -> Patterns | None:
    """``frozen=`` as patterns.

    Raises:
        TypeError: it is neither a pattern nor a sequence of patterns.
    """
    if frozen is None:
        return None
    if not isinstance(frozen, Iterable) or isinstance(frozen, (bytes, bytearray)):
        raise TypeError(f"{operation}: frozen must be a pattern or a sequence of patterns, not {frozen!r}")
    return Patterns("frozen", [frozen] if isinstance(frozen, str) else frozen, operation)


def flags_of(patterns: Patterns | None, names: Sequence[str]) -> list[bool]:
    """For each name, whether a pattern matches it; nothing where there are no patterns.

    Raises:
        KeyError: a pattern matches none of them.
    """
    if patterns is None:
        return []
    flags = [patterns.first(name) is not None for name in names]
    patterns.check()
    return flags
