"""The remote tier of a run: a second place for its checkpoints, what they say of themselves there, and what goes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.urls import place_of
from fastckpt.keep import Policy

from .arguments import have_text
from .catalogue import Catalogue
from .directory import Directory, Names
from .prefix import Prefix
from .retention import Retention

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


class Tier:
    """The remote tier.

    Nothing is asked of it before somebody needs to know: it may be far away.

    Args:
        place: where it lies.
        policies: what is to stay there; without one all stays.
    """

    def __init__(self, place: Place, policies: Sequence[Policy]) -> None:
        self.place = place
        self.policies = policies
        self._lock = threading.Lock()
        self._retention: Retention | None = None

    @property
    def retention(self) -> Retention:
        """What removes older ones."""
        with self._lock:
            if self._retention is None:
                texts = [str(policy) for policy in self.policies] if have_text(self.policies) else None
                self._retention = Retention(self.place, Catalogue(self.place, texts), self.policies)
            return self._retention
