"""Where the checkpoints of a run lie: a directory, or a prefix of a store."""

from __future__ import annotations

from typing import TypeAlias

from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.urls import place_of

from .directory import Directory, Names
from .prefix import Prefix

#: Where the checkpoints of a run lie.
Place: TypeAlias = Directory | Prefix


def place_at(operation: str, path: AnyPath, names: Names) -> Place:
    """The run at a path or below a URL.

    Raises:
        ImportError: it is a URL, and the package for those is not there.
        ValueError: it is neither.
    """
    where = place_of(operation, path)
    if not is_url(where):
        return Directory(where, names)
    from fastckpt._stores.objects import Objects  # noqa: PLC0415 - needs a package that not everybody has

    return Prefix(Objects.at(operation, where), names)
