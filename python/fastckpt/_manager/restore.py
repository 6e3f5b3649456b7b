"""Finds and loads the newest checkpoint of a run that can be loaded, on the branch that saved last."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastckpt._api.checkpoint import metadata_of
from fastckpt._api.io import without_report
from fastckpt._api.load import load_alone
from fastckpt._api.load_settings import LoadSettings
from fastckpt._api.per_rank import read_state, states_of
from fastckpt._api.reports import LoadReport
from fastckpt._api.verify import verify
from fastckpt._ranks import words
from fastckpt._ranks.calls import marked
from fastckpt._ranks.load import load_on_ranks
from fastckpt._stores.reader import open_reader
from fastckpt._warn import warn
from fastckpt.exceptions import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    RankFailure,
    RanksError,
)

from . import lineage
from .candidates import Candidate
from .crew import is_reported
from .lineage import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable

    from .candidates import Candidates
    from .crew import Crew

_T = TypeVar("_T")

logger = logging.getLogger("fastckpt")

_NOWHERE = Lineage(0)

#: How often the directory is listed again because a checkpoint was removed while it was read; and how many checkpoints
#: are tried with ``strict=False``.
_LOOKS = 20
#: Errors of storage that concern one damaged file: an older checkpoint may be intact.
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
        metadata: the other members of ``save(metadata=...)``.
        path: its directory.
        skipped: newer checkpoints that could not be loaded: step and reason, the newest first.
        report: the report of the load.
        per_rank: the value that this rank passed to ``save(per_rank=...)``; None if it passed none, or if the number
            of ranks differs (:func:`fastckpt.distributed.load_per_rank` returns each).
        lineage: its place in the run (docs/manager.md).
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


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Loads checkpoints of a run on all ranks."""

    candidates: Candidates
    ranks: Crew

    def at(self, step: int, how: Mapping[str, Any], *, needed: bool) -> Restored:
        """Load the checkpoint of a step, on all ranks or on none; ``how`` has arguments for the load.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            OSError: the remote tier does not answer, and is ``needed``, or the directory has no checkpoint.
        """
        listed = self.ranks.first("restore: step", partial(self.candidates.candidates_of, step, needed=needed))
        one, *others = (Candidate(*one) for one in listed)
        found = self._try(one, (), how)
        if isinstance(found, Lost) and others and found.failures.skips:
            if not found.failures.listed[0].gone:
                self._warn(step, found.failures.listed[0], last=False)
            late = self._try(others[0], (), how)
            found = found if isinstance(late, Lost) and late.failures.gone else late
        if isinstance(found, Lost):
            raise found.error
        return found

    def newest(self, how: Mapping[str, Any], *, fresh: bool) -> Restored | None:
        """Load the newest checkpoint that can be loaded, and warn of each newer one; None if there is none at all.

        With ``fresh``, the result is also None if a run was here, but nothing of it is a checkpoint.

        Raises:
            CheckpointError: there is no checkpoint, but a run was here.
            CorruptCheckpointError: no checkpoint can be loaded.
            OSError: the directory has no checkpoint, and the remote tier does not answer.
        """
        skipped: dict[int, str] = {}
        kinds: set[str] = set()

        def look() -> list[Candidate]:
            listed = self.ranks.first("restore", self.candidates.look)
            found = [Candidate(*one) for one in listed if one[0] not in skipped]
            # With `strict=False`, each checkpoint is compared with all older ones.
            return found if how.get("strict", True) else found[:_LOOKS]

        tries, looks = look(), 1
        if not tries:
            self.ranks.first("restore: earlier run", lambda: None if fresh else self.candidates.refuse_new_beginning())
            return None
        while tries:
            one = tries.pop(0)
            found = self._try(one, tuple(skipped.items()), how, tries)
            if not isinstance(found, Lost):
                return found
            failures = found.failures
            # If another process saves and removes checkpoints, the coordinator's view counts.
            if looks < _LOOKS and self.ranks.first("restore: look", partial(self.candidates.is_gone, one)):
                # It was removed in favour of a checkpoint that became durable after the listing.
                tries, looks = look(), looks + 1
                continue
            if not failures.skips:
                raise found.error
            # If this is not the last try of the step, its copy on the remote tier comes next.
            is_last = not any(other.step == one.step for other in tries)
            if is_last:
                skipped[one.step] = failures.listed[0].why
                kinds.update(failures.kinds)
            self._warn(one.step, failures.listed[0], last=is_last)
        path = self.candidates.local.place.path
        newest = f"the newest: {next(iter(skipped.values()))}" if skipped else "all were removed meanwhile"
        if kinds == {NotACheckpointError.__name__}:
            if fresh:
                return None
            raise NotACheckpointError(
                f"restore: {path}: none of {len(skipped)} directories with the name of a step is a checkpoint; "
                f"{newest} (to start anew beside them, call restore(fresh=True))"
            )
        raise CorruptCheckpointError(
            f"restore: {path}: none of {len(skipped)} checkpoints can be loaded; {newest} "
            "(to start anew, move them all away, or give the manager another directory)"
        )

    def _try(
        self,
        one: Candidate,
        skipped: tuple[tuple[int, str], ...],
        how: Mapping[str, Any],
        older: Sequence[Candidate] = (),
    ) -> Restored | Lost:
        """Load a checkpoint on all ranks or on none, after others were ``skipped``; ``older`` ones may follow.

        If it cannot be fetched from the remote tier, whatever the reason, an older checkpoint may be loaded instead.
        """
        what = f"restore: {self.candidates.local.place.path_of(one.step)}"
        return attempt(self.ranks, what, partial(self._load, one, skipped, how, older), OSError if one.far else ())

    def _load(
        self, one: Candidate, skipped: tuple[tuple[int, str], ...], how: Mapping[str, Any], older: Sequence[Candidate]
    ) -> Restored:
        path, remote = self.candidates.local.place.path_of(one.step), self.candidates.remote
        if one.far and remote is not None:
            path = self.ranks.first(
                "restore: fetch",
                lambda: remote.fetch(one.step, differs=one.differs, share=self.ranks.share or (0, 1)),
                lambda share: remote.fetch_share(one.step, differs=one.differs, share=share),
            )
        if older and how.get("into") is not None and not how.get("strict", True):
            self.ranks.first("restore: verify", lambda: self._verify_what_older_lack(path, older))
        into, options = how["into"], {name: value for name, value in how.items() if name != "into"}
        options["io"] = without_report(how.get("io", "auto"))  # the manager reports after all ranks have loaded
        settings = partial(LoadSettings.of, "load", options)
        if self.ranks.grouped:
            with marked(self.ranks.answered):
                loaded = load_on_ranks(path, into, self.ranks.arguments["ranks"], settings)
        else:
            loaded = load_alone(path, into=into, settings=settings())
        # The manifest may be large, and the ranks many, so no rank reads it again.
        about, states = metadata_of(loaded.reader.metadata()), states_of("restore", loaded.reader)
        ranks, per_rank = len(states), None
        if ranks == self.ranks.size:  # else none of the states belongs to this rank
            per_rank = read_state(loaded.reader, path, states[self.ranks.rank], how.get("registry"))
        if ranks not in {0, self.ranks.size} and self.ranks.leads:
            logger.warning(
                "%s: %d ranks saved states with per_rank=, and there are %d now: "
                "fastckpt.distributed.load_per_rank(path, rank=...) gives them",
                *(path, ranks, self.ranks.size),
            )
        about = dict(about) if type(about) is dict else {"metadata": about} if about is not None else {}
        metrics = about.pop("metrics", None)
        place = lineage.of(about, 0.0)
        for name in ("step", lineage.KEY):
            about.pop(name, None)
        metrics = dict(metrics) if type(metrics) is dict else {}
        return Restored(one.step, loaded.state, metrics, about, path, skipped, loaded.report, per_rank, place)

    def _verify_what_older_lack(self, path: str, older: Sequence[Candidate]) -> None:
        """Verify a checkpoint that has a value that older ones lack, before it fills ``into``: damage would stay there.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged.
        """
        names, remote = _names_of(path), self.candidates.remote
        for one in older:
            place = remote.place if one.far and remote is not None else self.candidates.local.place
            try:
                lacks = not names <= _names_of(place.path_of(one.step))
            except (CheckpointError, FileNotFoundError):
                continue  # nothing of this checkpoint will be loaded
            except OSError:
                lacks = True  # unknown, so verify to be safe
            if lacks:
                report = verify(path)
                if not report.ok:
                    raise CorruptCheckpointError(f"restore: {path}: {report.damage[0]}")
                return

    def _warn(self, step: int, failure: _Failure, *, last: bool) -> None:
        """Warn on the coordinator why the checkpoint of a step is not loaded directly."""
        local, remote = self.candidates.local.place, self.candidates.remote
        if self.ranks.leads:
            what = "is gone" if failure.gone else "cannot be loaded"
            then = "skipped" if last or remote is None else f"fetched from {remote.place.path}"
            text = f"fastckpt: restore: {local.path_of(step)} {what} and is {then}: {failure.why}"
            warn(text)


def attempt(ranks: Crew, what: str, call: Callable[[], _T], skips: Any = ()) -> _T | Lost:
    """The result of ``call`` if it succeeds on all ranks, which call it together; ``what`` names it in errors.

    Exceptions in ``skips`` count like damage: an older checkpoint may be loaded instead.
    """
    error: Exception | None = None
    try:
        result = call()
    except Exception as failed:
        if isinstance(failed, RanksError) and not is_reported(failed):
            raise
        error = failed
    failures = failures_of(ranks, error, skips)
    return result if failures is None else Lost(failures, error or _of_others(what, failures))


def failures_of(ranks: Crew, error: Exception | None, skips: Any = ()) -> _Failures | None:
    """Why ranks have failed; ranks that only learned of another's failure count only if no other has failed."""
    #: Ranks that failed themselves, and ranks that learned of it.
    said: list[_Failures | None] = [None, None]
    if error is not None:
        gone, kind = isinstance(error, FileNotFoundError), type(error).__name__
        own = _Failure(ranks.rank, ranks.host, kind, str(error)[: words.LONGEST], gone)
        is_skipped = _is_damage(error) or isinstance(error, skips)
        said[kind == RanksError.__name__] = _Failures([own], 0, [kind], is_skipped, gone)
    found = ranks.outcome(said, _combine, lambda both: both[0] or both[1])
    return None if found is None else _Failures.of(found)


def _combine(values: list[list[Any]]) -> list[_Failures | None]:
    """The contributions of several ranks, combined by kind."""
    return [_Failures.joined([_Failures.of(one) for one in each if one]) for each in zip(*values, strict=True)]


def _is_damage(error: Exception) -> bool:
    """Whether an older checkpoint may be intact although this one cannot be loaded."""
    damaged = isinstance(error, (CorruptCheckpointError, NotACheckpointError, FileNotFoundError))
    return damaged or (isinstance(error, OSError) and error.errno in _DAMAGE)


class _Failure(NamedTuple):
    """Why a rank has failed: the name and the text of the exception.

    The checkpoint is ``gone`` if nothing of it is left.
    """

    rank: int
    host: str
    kind: str
    why: str
    gone: bool


class _Failures(NamedTuple):
    """Why ranks have failed: the first failure, the number of others, and the names of all exceptions.

    An older checkpoint may be loaded if each failed rank ``skips`` this one, which is ``gone`` if each reports so.
    """

    listed: list[_Failure]
    more: int
    kinds: list[str]
    skips: bool
    gone: bool

    @classmethod
    def of(cls, said: Any) -> _Failures:
        """Decode a message."""
        listed, *others = said
        return cls([_Failure(*one) for one in listed], *others)

    @classmethod
    def joined(cls, some: list[_Failures]) -> _Failures | None:
        """All failures combined; None if there are none."""
        if not some:
            return None
        listed = sorted(failure for each in some for failure in each.listed)
        more = sum(each.more for each in some) + len(listed[words.LISTED :])
        kinds = sorted({kind for each in some for kind in each.kinds})
        skips, gone = (all(flags) for flags in zip(*(each[-2:] for each in some), strict=True))
        return cls(listed[: words.LISTED], more, kinds, skips, gone)


class Lost(NamedTuple):
    """A call that counts as failed on all ranks: why, and the error that this rank may raise."""

    failures: _Failures
    error: Exception


def _of_others(what: str, failures: _Failures) -> RanksError:
    """The error on a rank that has not failed itself."""
    listed = tuple(RankFailure(one.rank, one.host, f"failed: {one.kind}: {one.why}") for one in failures.listed)
    more = f"; and {failures.more:,} more" if failures.more else ""
    return RanksError(f"{what}: {'; '.join(map(str, listed))}{more}: so the call has failed on all ranks", listed)


def _names_of(path: str) -> set[str]:
    """The names of all tensors of a checkpoint."""
    return {tensor.name for tensor in open_reader("restore", path).tensors()}
