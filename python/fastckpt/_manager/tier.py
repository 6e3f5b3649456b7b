"""The remote tier of a run: a second place for its checkpoints, and what is removed there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastckpt.keep import Policy

from .arguments import have_text
from .catalogue import Catalogue
from .retention import Retention

if TYPE_CHECKING:
    from .place import Place


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
