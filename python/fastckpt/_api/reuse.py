"""Reuse of an earlier checkpoint by a save: ``base=``, and frozen tensors."""

from __future__ import annotations

from collections.abc import Sequence

from fastckpt._paths import AnyPath, path_of

from .selection import Patterns


def check_base(operation: str, base: AnyPath | None) -> str | None:
    """``base=`` as an absolute path."""
    return None if base is None else path_of(f"{operation}: base", base)


def flags_of(operation: str, frozen: Sequence[str], names: Sequence[str]) -> list[bool]:
    """For each name, whether a pattern matches it; empty if there are no patterns.

    Raises:
        KeyError: a pattern matches none of them.
    """
    if not frozen:
        return []
    patterns = Patterns("frozen", frozen, operation)
    flags = [patterns.first(name) is not None for name in names]
    patterns.check()
    return flags
