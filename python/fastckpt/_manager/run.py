"""The checkpoints of a run as they lie there: found, ranked and pinned."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fastckpt import keep as keeping

if TYPE_CHECKING:
    from .directory import Directory
    from .drain import Drain
    from .place import Place
    from .ranks import Ranks
    from .tier import Tier


class Run:
    """What a manager knows without saving.

    Args:
        local: the local tier.
        policies: what is to be kept; None where the caller does not say.
        ranks: the ranks for which it acts.
        remote: the remote tier, if there is one.
        read_only: whether nothing may be written.
    """

    def __init__(
        self,
        local: Tier[Directory],
        policies: Sequence[keeping.Policy] | None,
        ranks: Ranks,
        remote: Tier[Place] | None,
        *,
        read_only: bool,
    ) -> None:
        self._local = local
        self._directory, self._catalogue, self._retention = local.place, local.catalogue, local.retention
        self._ranks = ranks
        self._keep = policies
        self._remote = remote
        #: What copies checkpoints to the remote tier.
        self._drain: Drain | None = None
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

    def remote_steps(self) -> list[int]:
        """The steps that have a whole checkpoint at the remote tier, rising.

        Raises:
            OSError: the remote tier does not answer.
            ValueError: the manager has none.
        """
        if self._remote is None:
            raise ValueError(f"remote_steps: {self.directory}: the manager has no remote=")
        return self._remote.place.look().steps

    def latest(self) -> int | None:
        """The newest step of the branch that saved last, or None. :meth:`restore` finds out whether it loads."""
        return self._catalogue.newest(self._catalogue.entries(self.steps()))

    @property
    def policies(self) -> list[keeping.Policy]:
        """What is kept: the policies of ``keep=``. A read-only manager without any has those of the run's own manager.

        Raises:
            ValueError: a later release has written them, and this one does not know them.
        """
        if self._keep is not None or not self._read_only:
            return [*(self._keep or ())]
        return [keeping.parse(text) for text in self._catalogue.keep or ()]

    def saved(self) -> list[keeping.Saved]:
        """Step, time and metrics of each checkpoint, by rising step; those that cannot be opened are left out."""
        return self._catalogue.of(self.steps())

    def kept(self) -> dict[int, list[str]]:
        """Why each checkpoint of :meth:`saved` stays, by step; one without a reason goes after the next save.

        Raises:
            ValueError: as for :attr:`policies`.
        """
        return self._retention.kept(self.policies)

    def best(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step of the branch that saved last whose checkpoint has the best metric, or None where none has it.

        Args:
            metric: its name; by default that of the first :class:`fastckpt.keep.Best` among the policies.
            mode: ``min`` or ``max``; by default that policy's, or ``min``.

        Raises:
            ValueError: no metric is given, and no policy names one.
        """
        known = next((one for one in self.policies if isinstance(one, keeping.Best)), None)
        if metric is None and known is None:
            raise ValueError("best: give the name of a metric: no policy keep.Best names one")
        if metric is None:
            metric = known.metric if known is not None else ""
        if mode is None:
            mode = known.mode if known is not None and known.metric == metric else "min"
        steps = self.steps()
        own = self._catalogue.branch(steps)
        ranked = keeping.Best(1, metric, mode).ranked(self._catalogue.of(sorted(own)))
        if self._ranks.leads and not self._read_only:
            with contextlib.suppress(OSError):
                self._catalogue.write(steps)
        return ranked[0].step if ranked else None

    def pinned(self) -> list[int]:
        """The steps whose checkpoints are pinned, rising."""
        return sorted(self._directory.look().pinned)

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step whatever the policies say, until :meth:`unpin`; durably, on each tier.

        What only the local tier has is copied to the remote one, and pinned there then.

        Raises:
            FileNotFoundError: there is none.
            OSError: the remote tier does not answer; what is on the local one is pinned.
            RuntimeError: the manager is read-only.
        """
        self._check("pin")
        there = self._retention.pin(step)
        if self._remote is not None:
            there = self._remote.retention.pin(step) or there
        if self._drain is not None and self._directory.is_pinned(step):
            # The remote may have let it go, or not have wanted it.
            self._drain.again(step)
        if not there:
            raise FileNotFoundError(2, "pin: there is no such checkpoint", self.path(step))

    def unpin(self, step: int) -> None:
        """Let the policies decide on the checkpoint of a step again, after the next save.

        Raises:
            OSError: the remote tier does not answer; on the local one the pin is off.
            RuntimeError: the manager is read-only.
        """
        self._check("unpin")
        self._directory.unpin(step)
        if self._remote is not None:
            self._remote.place.unpin(step)

    def _check(self, operation: str) -> None:
        if self._read_only:
            raise RuntimeError(f"{operation}: {self.directory}: the manager is read-only")
        if os.getpid() != self._process:
            raise RuntimeError(f"{operation}: the manager belongs to the process that this one was forked from")
        self._ranks.check(operation)
