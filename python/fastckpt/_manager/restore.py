"""The newest checkpoint of a run that can be loaded, on the branch that saved last."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._api.checkpoint import Checkpoint
from fastckpt._api.reports import LoadReport
from fastckpt._api.verify import verify
from fastckpt.exceptions import CorruptCheckpointError, NotACheckpointError, RankFailure, RanksError

from . import lineage
from .candidates import Candidates
from .fetch import fetch
from .lineage import Lineage
from .ranks import is_told

if TYPE_CHECKING:
    from .calls import Calls
    from .directory import Directory
    from .prefix import Place
    from .ranks import Ranks
    from .tier import Tier


logger = logging.getLogger("fastckpt")

_NOWHERE = Lineage(0)

#: How often the directory is looked at again because a checkpoint was removed while it was read.
_LOOKS = 20
#: What storage answers where a file is damaged, and an older checkpoint may not be.
_DAMAGE = {
    getattr(errno, name)
    for name in ("EIO", "ENODATA", "EUCLEAN", "EBADMSG", "ESTALE", "EILSEQ")
    if hasattr(errno, name)
}


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What :meth:`fastckpt.Manager.restore` found.

    Attributes:
        step: its training step.
        state: as :func:`fastckpt.load` returns it.
        metrics: the metrics that were saved with it.
        metadata: what else was given to ``save(metadata=...)``.
        path: its directory.
        skipped: newer checkpoints that could not be loaded: step and reason, the newest first.
        report: what the load did.
        per_rank: what this rank gave to ``save(per_rank=...)``; None where it gave nothing, or where another number of
            ranks has saved (:func:`fastckpt.distributed.load_per_rank` gives each).
        lineage: its place in the run, as docs/manager.md tells.
    """

    step: int
    state: Any
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    path: str
    skipped: tuple[tuple[int, str], ...]
    report: LoadReport
    per_rank: Any = None
    lineage: Lineage = _NOWHERE


class Loader:
    """Loads checkpoints of a run on all ranks.

    Args:
        local: the local tier.
        remote: the remote one, if there is one.
        ranks: the ranks.
        calls: what loads.
        read_only: whether nothing may be written.

    Attributes:
        candidates: what there is to load.
    """

    def __init__(
        self, local: Tier[Directory], remote: Tier[Place] | None, ranks: Ranks, calls: Calls, *, read_only: bool
    ) -> None:
        self._directory = local.place
        self._remote = None if remote is None else remote.place
        self._read_only = read_only
        self._ranks = ranks
        self._calls = calls
        self.candidates = Candidates(local, remote)

    def at(self, step: int, how: Mapping[str, Any], *, stacklevel: int) -> Restored:
        """Load the checkpoint of a step, on all ranks or on none.

        Args:
            step: its number.
            how: arguments for the load.
            stacklevel: as for ``warnings.warn``.

        Raises:
            FileNotFoundError: there is none.
        """
        self._ranks.first("restore: step", lambda: None)
        found, error = self._try(step, (), how, far=False)
        failures = self._failures(error)
        if found is not None and not failures:
            return found
        if self._remote is not None and all(failure.skips for failure in failures):
            if not failures[0].gone:
                self._warn(step, failures[0], stacklevel + 1, last=False)
            found, late = self._try(step, (), how, far=True)
            further = self._failures(late, far=True)
            if found is not None and not further:
                return found
            if not all(failure.gone for failure in further):
                raise late or _of_others(self._remote.path, further)
        raise error or _of_others(self._directory.path_of(step), failures)

    def newest(self, how: Mapping[str, Any], *, fresh: bool, stacklevel: int) -> Restored | None:
        """Load the newest checkpoint that can be loaded, and warn of each before it; None where there is none at all.

        Args:
            how: arguments for the load.
            fresh: None also where a run was, and nothing of it is a checkpoint.
            stacklevel: as for ``warnings.warn``.

        Raises:
            CheckpointError: there is none, and a run was here.
            CorruptCheckpointError: none can be.
            OSError: there is none in the directory, and the remote tier does not answer.
        """
        skipped: dict[int, str] = {}
        kinds: set[str] = set()
        look = partial(self._ranks.first, "restore", lambda: self.candidates.look(stacklevel + 3))
        tries, looks = look(), 1
        if not tries:
            self._ranks.first("restore: earlier run", lambda: None if fresh else self.candidates.refuse_new_beginning())
            return None
        while tries:
            step, far, alone = tries.pop(0)
            path = self._directory.path_of(step)
            found, error = self._try(step, tuple(skipped.items()), how, far=far, alone=alone, first=True)
            failures = self._failures(error, far=far)
            if found is not None and not failures:
                return found
            # Where another writes and removes, the first rank's view counts.
            if looks < _LOOKS and self._ranks.first("restore: look", partial(self.candidates.is_gone, step, far=far)):
                # It was removed for one that became durable after the look.
                tries, looks = [one for one in look() if one[0] not in skipped], looks + 1
                continue
            if not all(failure.skips for failure in failures):
                raise error or _of_others(path, failures)
            # What the remote tier has of it comes next.
            is_last = not any(other == step for other, _, _ in tries)
            if is_last:
                skipped[step] = failures[0].why
                kinds.update(failure.kind for failure in failures)
            self._warn(step, failures[0], stacklevel + 1, last=is_last)
        newest = f"the newest: {next(iter(skipped.values()))}" if skipped else "all were removed meanwhile"
        if kinds == {NotACheckpointError.__name__}:
            if fresh:
                return None
            raise NotACheckpointError(
                f"restore: {self._directory.path}: none of {len(skipped)} directories with the name of a step is a "
                f"checkpoint; {newest} (to start anew beside them, restore(fresh=True))"
            )
        raise CorruptCheckpointError(
            f"restore: {self._directory.path}: none of {len(skipped)} checkpoints can be loaded; {newest} "
            "(to start anew, move them away, or give the manager another directory)"
        )

    def _load(self, path: str, step: int, skipped: tuple[tuple[int, str], ...], how: Mapping[str, Any]) -> Restored:
        loaded = self._calls.load(path, how)
        with Checkpoint(path) as checkpoint:
            about, ranks = checkpoint.metadata, checkpoint.ranks
        per_rank = self._calls.load_own(path, ranks)
        if ranks not in {0, self._ranks.size} and self._ranks.leads:
            logger.warning(
                "%s: %d ranks saved states of their own, and there are %d now: "
                "fastckpt.distributed.load_per_rank(path, rank=...) gives them",
                *(path, ranks, self._ranks.size),
            )
        about = dict(about) if type(about) is dict else {"metadata": about} if about is not None else {}
        metrics = about.pop("metrics", None)
        place = lineage.of(about, 0.0)
        for name in ("step", lineage.KEY):
            about.pop(name, None)
        metrics = dict(metrics) if type(metrics) is dict else {}
        return Restored(step, loaded.state, metrics, about, path, skipped, loaded.report, per_rank, place)

    def _warn(self, step: int, failure: _Failure, stacklevel: int, *, last: bool) -> None:
        """Say on the first rank why the checkpoint of a step is not loaded as it is."""
        if self._ranks.leads:
            what = "is gone" if failure.gone else "cannot be loaded"
            then = "skipped" if last or self._remote is None else f"fetched from {self._remote.path}"
            text = f"fastckpt: restore: {self._directory.path_of(step)} {what} and is {then}: {failure.why}"
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)

    def _try(
        self,
        step: int,
        skipped: tuple[tuple[int, str], ...],
        how: Mapping[str, Any],
        *,
        far: bool,
        alone: bool = False,
        first: bool = False,
    ) -> tuple[Restored | None, Exception | None]:
        """Load the checkpoint of a step, or say why it cannot be loaded.

        Args:
            step: which.
            skipped: those before it.
            how: arguments for the load.
            far: that of the remote tier.
            alone: nothing of the local tier belongs to that.
            first: others may be tried after it.
        """
        try:
            path, remote = self._directory.path_of(step), self._remote
            if far and remote:
                path = self._ranks.first("restore: fetch", lambda: self._fetch(remote, step, alone=alone))
            if first and how.get("into") is not None and not how.get("strict", True):
                # What an older one lacks would keep what a damaged one has left in `into`.
                self._ranks.first("restore: verify", lambda: verified(path))
            return self._load(path, step, skipped, how), None
        except RanksError as error:
            if not is_told(error):
                raise
            return None, error
        except Exception as error:  # noqa: BLE001 - the ranks decide what it means
            return None, error

    def _fetch(self, remote: Place, step: int, *, alone: bool) -> str:
        return remote.path_of(step) if self._read_only else fetch(self._directory, remote, step, alone=alone)

    def _failures(self, error: Exception | None, *, far: bool = False) -> list[_Failure]:
        """Why ranks could not load it, by rank; a rank that has only heard of another's failure does not count.

        Whatever keeps one from reaching the remote tier, an older checkpoint may be loaded instead.
        """
        own = None
        if error is not None:
            gone = isinstance(error, FileNotFoundError)
            damaged = isinstance(error, (CorruptCheckpointError, NotACheckpointError))
            skips = damaged or (isinstance(error, OSError) and (far or gone or error.errno in _DAMAGE))
            own = [self._ranks.host, type(error).__name__, str(error), skips, gone]
        said = self._ranks.each(own)
        failures = [_Failure(rank, *of) for rank, of in enumerate(said) if of is not None]
        return [one for one in failures if one.kind != RanksError.__name__] or failures


class _Failure(NamedTuple):
    """Why a rank could not load a checkpoint.

    Attributes:
        rank: which.
        host: where it runs.
        kind: the name of the exception.
        why: its text.
        skips: whether an older checkpoint may be loaded instead.
        gone: whether there is nothing any more.
    """

    rank: int
    host: str
    kind: str
    why: str
    skips: bool
    gone: bool


def _of_others(path: str, failures: list[_Failure]) -> RanksError:
    """The error of a rank that has not failed itself."""
    listed = tuple(RankFailure(one.rank, one.host, f"failed: {one.kind}: {one.why}") for one in failures)
    return RanksError(f"restore: {path}: {'; '.join(map(str, listed))}: nothing was restored", listed)


def verified(path: str) -> None:
    """Verify the checkpoint at ``path``.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    report = verify(path)
    if not report.ok:
        raise CorruptCheckpointError(f"restore: {path}: {report.damage[0]}")
