"""The checkpoints of a run as they lie there: found, ranked and pinned."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fastckpt import keep as keeping

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .directory import Directory


class Run:
    """What a manager knows without saving.

    Args:
        directory: the run.
        policies: what is to be kept.
        catalogue: what the checkpoints say of themselves.
        read_only: whether nothing may be written.
    """

    def __init__(
        self, directory: Directory, policies: Sequence[keeping.Policy], catalogue: Catalogue, *, read_only: bool
    ) -> None:
        self._directory = directory
        self._keep = policies
        self._catalogue = catalogue
        self._read_only = read_only
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<fastckpt.Manager {self.directory!r}{' read-only' if self._read_only else ''}>"

    @property
    def directory(self) -> str:
        """The directory, absolute."""
        return self._directory.path

    def path(self, step: int) -> str:
        """The path of the checkpoint of a step, whether there is one or not."""
        return self._directory.path_of(step)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, rising; by the names of the directories, without a look inside."""
        return self._directory.look().steps

    def latest(self) -> int | None:
        """The newest step that has a checkpoint, or None. Whether it can be loaded :meth:`restore` finds out."""
        return self._directory.newest()

    def best(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step whose checkpoint has the best metric, or None where none has it.

        Args:
            metric: its name; by default that of the first :class:`fastckpt.keep.Best` among the policies.
            mode: ``min`` or ``max``; by default that policy's, or ``min``.

        Raises:
            ValueError: no metric is given, and no policy names one.
        """
        known = next((one for one in self._keep if isinstance(one, keeping.Best)), None)
        if metric is None and known is None:
            raise ValueError("best: give the name of a metric: no policy keep.Best names one")
        if metric is None:
            metric = known.metric if known is not None else ""
        if mode is None:
            mode = known.mode if known is not None and known.metric == metric else "min"
        steps = self.steps()
        ranked = keeping.Best(1, metric, mode).ranked(self._catalogue.of(steps))
        if not self._read_only:
            with contextlib.suppress(OSError):
                self._catalogue.write(steps)
        return ranked[0].step if ranked else None

    def pinned(self) -> list[int]:
        """The steps whose checkpoints are pinned, rising."""
        return sorted(self._directory.look().pinned)

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step whatever the policies say, until :meth:`unpin`; durably.

        Raises:
            FileNotFoundError: there is none.
            RuntimeError: the manager is read-only.
        """
        self._check("pin")
        if step not in self.steps():
            raise FileNotFoundError(2, "pin: there is no such checkpoint", self.path(step))
        self._directory.pin(step)

    def unpin(self, step: int) -> None:
        """Let the policies decide on the checkpoint of a step again, after the next save.

        Raises:
            RuntimeError: the manager is read-only.
        """
        self._check("unpin")
        self._directory.unpin(step)

    def _check(self, operation: str) -> None:
        if self._read_only:
            raise RuntimeError(f"{operation}: {self.directory}: the manager is read-only")
        if os.getpid() != self._process:
            raise RuntimeError(f"{operation}: the manager belongs to the process that this one was forked from")
