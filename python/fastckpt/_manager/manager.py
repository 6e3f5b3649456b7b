"""``fastckpt.Manager``: the checkpoints of one run, saved, kept, found and restored."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

from fastckpt import keep as keeping
from fastckpt import save_when as saving
from fastckpt._api.options import check_bandwidth
from fastckpt._api.reports import SaveReport
from fastckpt._background.pending import PendingSave
from fastckpt._paths import AnyPath, path_of
from fastckpt._ranks.calls import timeout_of

from .aftermath import left_until
from .agreement import agreement, failed_of
from .arguments import keep_of, metadata_of, step_of, told, when_of
from .calls import Calls
from .directory import Directory, Names
from .drain import Drain
from .fetch import Fetch
from .preemption import APART, Preemption
from .restore import Restored, Source
from .tier import Tier, place_at
from .when import When

logger = logging.getLogger("fastckpt")

#: Seconds for which a rank may make no progress.
TIMEOUT = 600.0

#: Mean time to failure of one accelerator, as ``fastckpt.plan`` assumes it.
_MTTF_HOURS = 50_000.0


class Manager(Preemption):
    """The checkpoints of one run, in one directory.

    with fastckpt.Manager("runs/gpt", keep=3, save_when=1000) as manager:
        manager.save_on_signal(signal.SIGTERM, grace="25s")
        found = manager.restore(into=state)
        for step in range(found.step + 1 if found else 1, 100_001):
            train()
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss})

    Each checkpoint is a directory of its own, ``step-00001000``, which :func:`fastckpt.load` reads without a manager.
    The directories are the truth. The file ``latest`` names the checkpoint that became durable last, and is a hint for
    people and scripts.

    Several managers, of several processes, may use one directory: each removes only checkpoints that are older than one
    that it has made durable itself, so the newest stays whatever they do. What one of them wants to keep, the others do
    not know; give all the same policies, or all but one ``read_only=True``. docs/manager.md tells more.

    Args:
        directory: where the checkpoints lie. The first save makes it.
        keep: policies of :mod:`fastckpt.keep`, one or a list: a checkpoint stays that one of them wants. A number is
            short for ``keep.Last(number)``; None keeps all. The newest and the pinned ones stay anyway.
        save_when: policies of :mod:`fastckpt.save_when`, one or a list: a step is saved that one of them wants. A
            number is short for ``save_when.Every(steps=number)``; ``"auto"`` for the interval that loses the least
            time, by ``mttf`` and ``overhead`` (:class:`fastckpt.save_when.Auto`). None saves each step for which
            ``save`` is called.
        async_save: save in the background (:func:`fastckpt.save_async`), or else at once (:func:`fastckpt.save`).
        mttf: for ``"auto"``: the mean time to failure of the job: hours, or a string with a unit (``"90min"``). None
            for 50,000 h per process.
        overhead: for ``"auto"``: the share of the time that saves may cost.
        name: the format of the names.
        read_only: write and remove nothing: for programs that evaluate what another one trains. Without ``keep`` it
            knows the policies of the one that does.
        remote: a second place for the checkpoints, a path or the URL of an object store: each is copied there in the
            background after it is durable here (docs/tiers.md).
        remote_keep: as ``keep``, for the remote.
        remote_bandwidth_limit: bytes per second for each process that copies, or a string such as ``"500MB/s"``; None
            for no limit.
        save_options: further arguments for the saves: ``{"lazy": True, "threads": 1}``. Each save has the checkpoint
            before it as its ``base``, unless that is given here; ``{"base": None}`` for none.

    Raises:
        ImportError: ``remote`` is a URL, and the package for those is not there.
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, or ``directory`` is a URL.
    """

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        directory: AnyPath,
        *,
        process_group: Any = None,
        alone: bool = False,
        timeout: float = TIMEOUT,
        keep: int | keeping.Policy | Iterable[keeping.Policy] | None = None,
        save_when: int | str | saving.Policy | Iterable[int | str | saving.Policy] | None = None,
        async_save: bool = True,
        mttf: float | str | None = None,
        overhead: float | str = 0.05,
        name: str = "step-{step:08d}",
        read_only: bool = False,
        remote: AnyPath | None = None,
        remote_keep: int | keeping.Policy | Iterable[keeping.Policy] | None = None,
        remote_bandwidth_limit: float | str | None = None,
        save_options: Mapping[str, Any] | None = None,
    ) -> None:
        path = path_of("Manager", directory)
        limit = timeout_of("Manager", timeout)
        agree = agreement("Manager", process_group, path, limit, alone=bool(alone))
        policies = None if keep is None else keep_of(keep)
        when = when_of(save_when, saving.Auto(_MTTF_HOURS / agree.size if mttf is None else mttf, overhead))
        ranks = None if alone else {"process_group": process_group, "timeout": limit}
        calls = Calls(save_options, ranks, agree.rank, agree.size)
        super().__init__(Directory(path, Names(name)), policies, agree, calls, read_only=bool(read_only))
        self._tier = _tier(self._directory, remote, remote_keep)
        bandwidth = check_bandwidth("Manager", remote_bandwidth_limit, "remote_bandwidth_limit")
        fetch = None if self._tier is None else Fetch(self._directory, self._tier, read_only=self._read_only)
        self._source = Source(self._directory, agree, calls, fetch)
        self._when = When(when)
        self._async = bool(async_save)
        self._looked = False
        #: The step that all ranks have agreed to save next.
        self._wanted: int | None = None
        agree.begin(
            {
                "keep": told(policies or ()),
                "save_when": told(when),
                "async_save": str(self._async),
                "name": name,
                "read_only": str(self._read_only),
                "remote": "None" if self._tier is None else self._tier.place.path,
                "remote_keep": told(() if self._tier is None else self._tier.policies),
            }
        )
        if agree.leads and not self._read_only:
            self._directory.sweep()
        if not self._read_only and self._tier is not None and agree.share is not None:
            self._begin_drain(self._tier, bandwidth, agree.share)

    # Saving.

    def should_save(self, step: int) -> bool:
        """Whether ``step`` is to be saved; call it at the end of each step, where the state is whole.

        It may be asked again about one step, also during an evaluation. When a signal of :meth:`save_on_signal` has
        come, it is true, whatever the policies say; where that step is saved already, the signal is answered here.

        Args:
            step: the number of the training step.

        Raises:
            SystemExit: a signal has come, the step is durable, and the signal's default is to end the process.
        """
        step = step_of("should_save", step)
        if self._read_only:
            return False
        self._check("should_save")
        return self._is_wanted(step, force=False)

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        metadata: Mapping[str, Any] | None = None,
        per_rank: Any = None,
    ) -> bool:
        """Save ``state`` as the checkpoint of ``step``, if :meth:`should_save` says so.

        In the background it returns when the state may change, as :func:`fastckpt.save_async` does. When the checkpoint
        is durable, the file ``latest`` names it, and what no policy keeps is removed, in the background. For a signal
        that has come, it is saved at once instead, within the grace period, and the signal is passed on after that.

        Args:
            step: the number of the training step.
            state: as for :func:`fastckpt.save`.
            metrics: numbers by name, such as ``{"loss": 1.5}``: they lie in the checkpoint's metadata.
            force: save whatever the policies say, also a step that is saved already.
            metadata: more for the checkpoint's metadata, without tensors.
            per_rank: a state that is this rank's own, as for :func:`fastckpt.distributed.save`.

        Returns:
            Whether the save was begun.

        Raises:
            RuntimeError: the manager is read-only, or belongs to the process that this one was forked from.
            SystemExit: a signal has come, the step is durable, and the signal's default is to end the process.
            Exception: what :func:`fastckpt.save` or :func:`fastckpt.save_async` raises, among it the failure of the
                last save in the background; that of this call then goes on.
        """
        self._check("save")
        about = metadata_of(step_of("save", step), metrics, metadata)
        # Ranks ask each other once about a step that is to be saved; one process looks again.
        if (self._agree.size == 1 or step != self._wanted) and not self._is_wanted(step, force=force):
            return False
        self._wanted = None
        if self._signals.called:
            return self._answer(step, state, about, per_rank)
        if self._agree.leads:
            self._warn_of_later(step)
        how = self._how(about, self._base)
        path = self.path(step)
        began = self._cadence.begin()
        try:
            if not self._async:
                report = self._calls.save(state, path, per_rank, how)
                self._pending, self._report, self._saved = None, report, step
                self._aftermath.after(about, began, report)
                return True
            try:
                pending = self._calls.save_async(state, path, per_rank, how)
            except BaseException as error:
                # An earlier save has failed, and this one has begun.
                begun = getattr(error, "pending_save", None)
                if begun is not None:
                    self._begun(about, began, begun)
                raise
            self._begun(about, began, pending)
            return True
        finally:
            self._cadence.leave()

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Wait until the last save is durable, and copied to the remote tier, and what is not kept is removed.

        For a signal of :meth:`save_on_signal` it waits no longer than the grace period allows, and gives the save up.
        It does not wait for copies then: they go on.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            The report of the last save that became durable, or None.

        Raises:
            TimeoutError: it is not done in time. It goes on.
            CancelledError: it was given up for a signal.
            Exception: the last save failed; or a copy did, also now, and the step is not at the remote tier.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        pending = self._pending
        if self._is_shared:
            self._wait_together(end, self._is_saved)
        if pending is not None:
            around, self._steady = self._steady, self._steady or self._settle
            try:
                if not self._is_shared:
                    self._signal_came()
                self._report = pending.result(left_until(end))
            except Exception as error:
                # Once it is known to have failed, its step may be saved again, and is no base.
                with contextlib.suppress(TimeoutError):
                    self._aftermath.wait(end)
                if failed_of(error, CancelledError) and not isinstance(error, CancelledError):
                    # Given up on all ranks, and this one has heard of another's first.
                    raise CancelledError(str(error)) from error
                raise
            finally:
                self._steady = around
                # A failure is told once.
                if pending.done():
                    self._pending = None
        self._aftermath.wait(end)
        self._wait_for_copies(end)
        return self._report

    # Coming back.

    def restore(
        self, into: Any = None, *, step: int | None = None, exclude: str | Sequence[str] | None = None, **options: Any
    ) -> Restored | None:
        """Load the newest checkpoint that verifies, every byte of it, or that of a step.

        A newer one that cannot be loaded is skipped with a warning that says why; it stays where it is, and does not
        count as one that is kept. One of a format that this release does not read is not skipped but an error.

        With a remote tier, what the directory lacks or has damaged is fetched from there, and loaded from the directory
        then; from the remote itself where the directory cannot take it.

        Args:
            into: as for :func:`fastckpt.load`.
            step: load this one and no other.
            exclude: as for :func:`fastckpt.load`.
            options: further arguments of :func:`fastckpt.load`.

        Returns:
            Step, state, metrics; None where there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none can be loaded.
            FileNotFoundError: there is none of ``step``.
            OSError: there is none in the directory, and the remote tier does not answer.
            Exception: what else :func:`fastckpt.load` raises. After any of these tensors of ``into`` may have changed.

        Warns:
            RuntimeWarning: a checkpoint was skipped, or fetched because it is damaged; or the remote tier does not
                answer.
        """
        self._agree.check("restore")
        how = {**options, "into": into, "exclude": exclude}
        if step is not None:
            found = self._source.of(step_of("restore", step), how, stacklevel=3)
        else:
            newest = self._source.newest(how, stacklevel=3)
            if newest is None:
                return None
            found = newest
        self._retention.damaged.update(number for number, _ in found.skipped)
        self._saved = found.step
        self._cadence.resume(found.step)
        return found

    def __enter__(self) -> Manager:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is in flight, and put the signal handlers back.

        A signal that comes meanwhile, or has come since the last step boundary, is answered: what is in flight becomes
        durable or is given up, and the signal is passed on.
        """
        try:
            if os.getpid() == self._process:
                if error is not None or not self._is_shared:
                    self._steady = self._answer_at_end
                    self._signal_came()
                self._end(error)
        finally:
            try:
                if self._drain is not None and os.getpid() == self._process:
                    # Where nothing ended the block, all is done, or has failed.
                    came = error is not None or self._signals.first is not None
                    self._drain.leave(self._signals.end if came else 0.0)
            finally:
                self._steady = None
                self._signals.uninstall()

    # What happens.

    def _is_wanted(self, step: int, *, force: bool) -> bool:
        """Whether all ranks save the step, for a policy or for a signal; it is a step boundary."""
        self._cadence.reach(step, in_flight=self._in_flight)
        self._wanted = None
        moment = self._cadence.moment(in_flight=self._in_flight)
        if not (force or self._when.due_by_step(moment)) and self._agree.skips():
            return False
        agreed = self._ask(
            "should_save",
            step,
            lambda: force or (step != self._saved and self._when.due(moment)),
            APART if self._when.may_wait else 0.0,
        )
        if agreed.signals:
            if step == agreed.saved:
                self._settle()
            # What was being saved may have failed.
            if not self._agree.first(lambda: step != self._saved and time.monotonic() < self._signals.deadline):
                self._answer(step, None)
                return force
        self._wanted = step if agreed.due else None
        return agreed.due

    def _begin_drain(self, tier: Tier, limit: float | None, share: tuple[int, int]) -> None:
        """From here on this process copies to the remote tier, first what an earlier one has left."""
        self._drain = self._aftermath.drain = Drain(
            self._directory,
            self._catalogue,
            tier,
            limit=limit,
            share=share,
            settled=self._retention.again,
            deadline=lambda: self._signals.end,
        )
        self._retention.held = self._drain.holds
        self._drain.resume()

    def _wait_for_copies(self, end: float) -> None:
        """Wait until all that waits is at the remote tier."""
        if self._tier is None or self._read_only:
            return
        drain = self._drain
        if not self._is_shared:
            if drain is not None:
                # Where a signal has come, the step boundary is more urgent; once it is answered, the process's end is.
                drain.wait(end, lambda: bool(self._signals.pending) or time.monotonic() >= self._signals.end)
            return
        # The first rank commits, so that what it has done is done.
        leading = drain if self._agree.leads else None
        with leading.hurry() if leading else contextlib.nullcontext():
            over = self._wait_together(end, leading.is_over if leading else lambda _: True)
        if over:
            self._agree.first(leading.tell if leading else lambda: None)

    def _warn_of_later(self, step: int) -> None:
        """Say once that this run lies behind what is there, as after a restore of an older step."""
        if not self._looked:
            self._looked = True
            steps = self.steps()
            if steps and steps[-1] > step:
                logger.warning(
                    "%s: step %d is saved, but step %d of an earlier run is there, and restore takes the highest that "
                    "verifies: remove what this run replaces",
                    *(self.directory, step, steps[-1]),
                )

    def _end(self, error: BaseException | None) -> None:
        """Wait for what is in flight; ``error`` has ended the block."""
        failure = error
        try:
            if error is None or not self._is_shared:
                self.wait()
            else:
                # The others may be elsewhere.
                self._settle()
                self._aftermath.wait(math.inf)
        except Exception as failed:  # noqa: BLE001 - it is raised below, or in the log
            # What failed is in the log, and so is what was given up for a signal; the error that ends the block must
            # not be lost.
            if error is None and not isinstance(failed, CancelledError):
                failure = failed
        self._end_together(failure)
        if failure is not error and failure is not None:
            raise failure

    def _begun(self, about: dict[str, Any], began: float, pending: PendingSave) -> None:
        step = about["step"]
        self._pending, self._saved = pending, step

        def failed() -> None:
            if self._saved == step:
                self._saved = None

        self._aftermath.follow(about, began, pending, failed)


def _tier(directory: Directory, remote: AnyPath | None, keep: Any) -> Tier | None:
    """``remote=`` and ``remote_keep=``."""
    policies = [] if keep is None else keep_of(keep, "remote_keep")
    if remote is None:
        if policies:
            raise ValueError("Manager: remote_keep: give remote=, too")
        return None
    place = place_at("Manager", remote, directory.names)
    if place.path == directory.path:
        raise ValueError(f"Manager: remote: {place.path} is the manager's directory: give another place")
    return Tier(place, policies)
