"""A tier of a run, the local one or the remote one: where it lies, what its checkpoints say, and what is removed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from fastckpt.keep import Policy

from .arguments import have_text
from .catalogue import Catalogue
from .prefix import Place
from .retention import Retention

_P = TypeVar("_P", bound=Place)


class Tier(Generic[_P]):
    """One tier. Nothing is asked of it before somebody needs to know: it may be far away.

    Args:
        place: where it lies.
        policies: what is to stay there; without one all stays.
        read_only: whether nothing may be written.
    """

    def __init__(self, place: _P, policies: Sequence[Policy], *, read_only: bool = False) -> None:
        self.place = place
        self.policies = policies
        self.read_only = read_only
        self._lock = threading.Lock()
        self._retention: Retention | None = None

    @property
    def retention(self) -> Retention:
        """What removes older ones."""
        # A signal handler may ask again, but not before the local tier has it.
        if self._retention is None:
            with self._lock:
                if self._retention is None:
                    known = not self.read_only and have_text(self.policies)
                    texts = [str(policy) for policy in self.policies] if known else None
                    self._retention = Retention(self.place, Catalogue(self.place, texts), self.policies)
        return self._retention

    @property
    def catalogue(self) -> Catalogue:
        """What its checkpoints say of themselves."""
        return self.retention.catalogue
