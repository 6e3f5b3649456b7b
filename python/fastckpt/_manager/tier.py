"""A tier of a run, the local one or the remote one: where it lies, what its checkpoints say, and what is removed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.urls import place_of
from fastckpt.keep import Policy

from .arguments import have_text, keep_of
from .catalogue import Catalogue
from .directory import Directory
from .prefix import Place, Prefix
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
        self._read_only = read_only
        self._lock = threading.Lock()
        self._retention: Retention | None = None

    @property
    def retention(self) -> Retention:
        """What removes older ones."""
        # A signal handler may ask again, but not before the local tier has it.
        if self._retention is None:
            with self._lock:
                if self._retention is None:
                    known = not self._read_only and have_text(self.policies)
                    texts = [str(policy) for policy in self.policies] if known else None
                    self._retention = Retention(self.place, Catalogue(self.place, texts), self.policies)
        return self._retention

    @property
    def catalogue(self) -> Catalogue:
        """What its checkpoints say of themselves."""
        return self.retention.catalogue


def remote_tier(remote: AnyPath | None, keep: Any, local: Directory) -> Tier[Place] | None:
    """The tier of ``remote=`` and ``remote_keep=``; None without the former.

    Raises:
        ImportError: it is a URL, and the package for those is not there.
        TypeError: one of these is of another type.
        ValueError: it is no place for checkpoints, or that of ``local``.
    """
    policies = [] if keep is None else keep_of(keep, "remote_keep")
    if remote is None:
        if policies:
            raise ValueError("Manager: remote_keep: give remote=, too")
        return None
    where = place_of("Manager", remote)
    place: Place = Directory(where, local.names)
    if is_url(where):
        from fastckpt._stores.objects import Objects  # noqa: PLC0415 - needs a package that not everybody has

        place = Prefix(Objects.at("Manager", where), local.names)
    if os.path.realpath(place.path) == os.path.realpath(local.path):
        raise ValueError(f"Manager: remote: {place.path} is the manager's directory: give another place")
    return Tier(place, policies)
