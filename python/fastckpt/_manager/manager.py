"""``fastckpt.Manager``: the checkpoints of one run, saved, kept, found and restored."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal

from fastckpt import keep as keeping
from fastckpt import save_when as saving
from fastckpt._api.options import check_bandwidth
from fastckpt._background.pending import PendingSave
from fastckpt._paths import AnyPath, path_of
from fastckpt._ranks.calls import timeout_of
from fastckpt._ranks.replicas import Policy

from .arguments import keep_of, metadata_of, step_of, told, when_of
from .calls import Calls
from .directory import Directory, Names
from .drain import Drain
from .preemption import Preemption
from .ranks import Ranks
from .restore import Loader, Restored
from .schedule import Schedule
from .tier import Tier, remote_tier

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

    In a job of several ranks, every rank makes a manager with the same arguments, and calls ``should_save``, ``save``,
    ``steady``, ``wait`` and ``restore`` as the others do, in the same order; the ranks also end the block together.
    They save and load as :func:`fastckpt.distributed.save` and ``load`` do. A rank that fails, or has made no progress
    for ``timeout`` seconds, is a :class:`fastckpt.RanksError` on the others.

    Args:
        directory: where the checkpoints lie. The first save makes it.
        process_group: the ranks that save together: a process group of ``torch.distributed``, or None for the default
            one; where none was initialised, this process alone.
        alone: act for this process alone, whatever groups there are.
        timeout: seconds for which a rank may make no progress before the others give up.
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
        stale: what follows where the step has advanced, and no weight of the model has changed, or no moment of the
            optimizer: ``warn`` in the log and in the report's ``warnings``, ``raise`` from the next ``save`` or
            ``wait``, or ``ignore`` it. The checkpoint stays.
        replicas: how saves compare what several ranks hold, as for :func:`fastckpt.distributed.save`.
        on_difference: what a difference does, likewise.
        save_options: further arguments for the saves: ``{"lazy": True, "threads": 1}``. Each save has the checkpoint
            before it as its ``base``, unless that is given here; ``{"base": None}`` for none.

    Raises:
        ImportError: ``remote`` is a URL, and the package for those is not there.
        TypeError: an argument is of another type, or ``process_group`` is not a process group.
        ValueError: an argument is out of range, ``directory`` is a URL, ranks differ in the arguments, or this process
            is not in ``process_group``.
        RanksError: another rank has not made its manager, or has other arguments.
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
        stale: Literal["warn", "raise", "ignore"] = "warn",
        replicas: Literal["sample", "full", "first"] = "sample",
        on_difference: Literal["raise", "warn"] = "raise",
        save_options: Mapping[str, Any] | None = None,
    ) -> None:
        path = path_of("Manager", directory)
        limit = timeout_of("Manager", timeout)
        ranks = Ranks(process_group, path, limit, alone=bool(alone))
        policies = None if keep is None else keep_of(keep)
        when = when_of(save_when, saving.Auto(_MTTF_HOURS / ranks.size if mttf is None else mttf, overhead))
        policy = Policy.of("Manager", {"replicas": replicas, "on_difference": on_difference})
        calls = Calls(save_options, ranks, asdict(policy))
        if stale not in {"warn", "raise", "ignore"}:
            raise ValueError(f'Manager: stale must be "warn", "raise" or "ignore", not {stale!r}')
        local = Tier(Directory(path, Names(name)), policies or (), read_only=bool(read_only))
        far = remote_tier(remote, remote_keep, local.place)
        super().__init__(local, policies, ranks, far, calls, Schedule(when), read_only=bool(read_only), stale=stale)
        bandwidth = check_bandwidth("Manager", remote_bandwidth_limit, "remote_bandwidth_limit")
        self._loader = Loader(local, far, ranks, calls, read_only=self._read_only)
        self._async = bool(async_save)
        ranks.begin(
            {
                "keep": told(policies or ()),
                "save_when": told(when),
                "async_save": str(self._async),
                "name": name,
                "read_only": str(self._read_only),
                "stale": stale,
                "remote": "None" if far is None else far.place.path,
                "remote_keep": told(() if far is None else far.policies),
            }
        )
        if ranks.leads and not self._read_only:
            self._directory.sweep()
            self._leftovers.begin()
        if not self._read_only and far is not None and ranks.share is not None:
            self._drain = self._after_save.drain = Drain(
                local, far, limit=bandwidth, share=ranks.share, deadline=lambda: self._signals.end
            )
            self._drain.resume()

    # Saving.

    def should_save(self, step: int) -> bool:
        """Whether ``step`` is to be saved; call it at the end of each step, where the state is whole.

        It may be asked again about one step, also during an evaluation. When a signal of :meth:`save_on_signal` has
        come, it is true, whatever the policies say; where that step is saved already, the signal is answered here.

        Args:
            step: the number of the training step, the same on all ranks.

        Returns:
            Whether it is to be saved, the same on all ranks. They ask each other about once per second, and whenever a
            policy wants a step for its number.

        Raises:
            SystemExit: a signal has come, the step is durable, and the signal's default is to end the process.
            RanksError: a rank has ended, does not answer, or is at another step.
            RuntimeError: a process group was initialised after the manager was made, or that of the manager is gone.
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
            metrics: numbers by name, such as ``{"loss": 1.5}``: they lie in the checkpoint's metadata; of several ranks
                those of the first.
            force: save whatever the policies say, also a step that is saved already.
            metadata: more for the checkpoint's metadata, without tensors; likewise.
            per_rank: a state that is this rank's own, as for :func:`fastckpt.distributed.save`; ``restore`` gives it
                back.

        Returns:
            Whether the save was begun.

        Raises:
            RuntimeError: the manager is read-only, belongs to the process that this one was forked from, or its process
                group is gone.
            SystemExit: a signal has come, the step is durable, and the signal's default is to end the process.
            Exception: what :func:`fastckpt.save` or :func:`fastckpt.save_async` raises, or their namesakes of
                :mod:`fastckpt.distributed`, among it the failure of the last save in the background; that of this call
                then goes on.
        """
        self._check("save")
        try:
            return self._save(step, state, metrics, force=force, metadata=metadata, per_rank=per_rank)
        except BaseException as error:
            self._miss(f"its save has ended with {type(error).__name__}: {error}")
            raise

    # Coming back.

    def restore(
        self,
        into: Any = None,
        *,
        step: int | None = None,
        exclude: str | Sequence[str] | None = None,
        fresh: bool = False,
        discard_newer: bool = False,
        **options: Any,
    ) -> Restored | None:
        """Load the newest checkpoint that verifies, every byte of it, or that of a step.

        The newest is that of the branch that saved last: what a run left behind when it went back to an earlier step is
        loaded by its number alone. A newer one that cannot be loaded is skipped with a warning that says why; it stays
        where it is, and does not count as one that is kept. One of a format that this release does not read is not
        skipped but an error.

        With a remote tier, what the directory lacks or has damaged is fetched from there, and loaded from the directory
        then; from the remote itself where the directory cannot take it.

        Args:
            into: as for :func:`fastckpt.load`: it is updated in place, and is the ``state`` of what is returned.
            step: load this one and no other.
            exclude: as for :func:`fastckpt.load`.
            fresh: begin anew also where a run was and has no checkpoint left; without it that is an error.
            discard_newer: with ``step``: then remove all higher steps but pinned ones, on each tier.
            options: further arguments of :func:`fastckpt.load`, or of :func:`fastckpt.distributed.load`.

        Returns:
            Step, state, metrics; None where no run has been yet. All ranks get the same step.

        Raises:
            CheckpointError: no checkpoint is here, but something else shows that a run was: the message names it.
            CorruptCheckpointError: there are checkpoints, and none can be loaded.
            NotACheckpointError: what has the names of checkpoints, or is here instead, is another program's.
            FileNotFoundError: there is none of ``step``.
            OSError: there is none in the directory, and the remote tier does not answer.
            RanksError: another rank could not load it.
            RuntimeError: ``discard_newer``, and the manager is read-only.
            TypeError: ``report`` is given: what is returned always has one.
            ValueError: ``discard_newer`` without ``step``.
            Exception: what else :func:`fastckpt.load` raises. After any of these tensors of ``into`` may have changed.

        Warns:
            RuntimeWarning: a checkpoint was skipped, or fetched because it is damaged; or the remote tier does not
                answer.
        """
        self._ranks.check("restore")
        self._miss("it has called restore without the save")
        if "report" in options:
            raise TypeError("restore: report: leave it out: what is returned has the report as its attribute")
        if discard_newer:
            self._check("restore: discard_newer")
            if step is None:
                raise ValueError("restore: discard_newer: give step=, too")
        how = {**options, "into": into, "exclude": exclude}
        if step is not None:
            found = self._loader.at(step_of("restore", step), how, stacklevel=3)
        else:
            newest = self._loader.newest(how, fresh=bool(fresh), stacklevel=3)
            if newest is None:
                return None
            found = newest
        if discard_newer:
            # What is in flight would come after the removal; whether it fails, the next save or wait tells.
            self._after_save.wait(math.inf)
            self._ranks.first("restore: discard_newer", lambda: self._discard_beyond(found.step))
        self._history.resume(found.step, found.lineage)
        self._after_save.resume(found.step, found.path)
        self._history.see(self._loader.candidates.order)
        self._retention.damaged.update(number for number, _ in found.skipped)
        self._saved = found.step
        self._timing.resume(found.step)
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

    def _save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        *,
        force: bool,
        metadata: Mapping[str, Any] | None,
        per_rank: Any,
    ) -> bool:
        step = step_of("save", step)
        try:
            about = metadata_of(step, metrics, metadata)
        except Exception:
            if self._is_shared and step != self._wanted:
                # The others ask whether the step is to be saved, and wait for this rank.
                self._is_wanted(step, force=force)
            raise
        # Ranks ask each other once about a step that is to be saved; one process looks again.
        if (self._ranks.size == 1 or step != self._wanted) and not self._is_wanted(step, force=force):
            return False
        if self._signals.called:
            self._wanted = None
            return self._answer(step, state, about, per_rank)
        if self._stale == "raise":
            # All ranks raise, or none does: nobody waits for the save.
            self._wanted = None
            self._tell_stale()
        how = self._how(about, self._base, self._planned)
        path = self.path(step)
        began = self._timing.begin()
        # Whatever happens from here on, the others hear of it from the save.
        self._wanted = None
        try:
            if not self._async:
                report = self._calls.save(state, path, per_rank, how)
                self._pending, self._report, self._saved = None, report, step
                self._after_save.after(about, began, report)
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
            self._timing.leave()

    def _discard_beyond(self, step: int) -> None:
        """Remove all steps above one, the highest first; pinned ones stay.

        Raises:
            Exception: the remote tier lacks the step, and it cannot be copied.
            OSError: the remote tier does not answer, or something cannot be removed.
        """
        if self._drain is not None:
            self._drain.go_back(step)
        if self._remote is not None:
            self._remote.retention.remove_beyond(step)
        self._retention.remove_beyond(step)

    def _begun(self, about: dict[str, Any], began: float, pending: PendingSave) -> None:
        step = about["step"]
        self._pending, self._saved = pending, step

        def failed() -> None:
            if self._saved == step:
                self._saved = None

        self._after_save.follow(about, began, pending, failed)
