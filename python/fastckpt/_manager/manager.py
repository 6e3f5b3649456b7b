"""``fastckpt.Manager``: the checkpoints of one run, saved, kept, found and restored."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

from fastckpt import keep as keeping
from fastckpt import when as saving
from fastckpt._api.files import check_files
from fastckpt._api.io import IO, give_report
from fastckpt._api.load_settings import LoadSettings
from fastckpt._api.options import check_bandwidth
from fastckpt._api.reports import SaveReport
from fastckpt._paths import AnyPath, path_of
from fastckpt._units import seconds

from .after_save import AfterSave
from .arguments import keep_of, policies_text, save_options_of, step_of, when_of
from .candidates import Candidates
from .checkpoints import ManagedCheckpoint, checkpoints_of
from .completion import Completion
from .crew import Crew
from .directory import Directory, Names
from .drain import Drain
from .leftovers import Leftovers
from .preemption import Preemption, Signals
from .remote import remote_of
from .restore import Loader, Restored
from .saves import Saves
from .schedule import Schedule
from .stale import StaleAlarm
from .step_boundary import StepBoundary
from .step_timing import StepTiming
from .tier import Tier


class Manager:
    """The checkpoints of one run, which share one directory.

    Each checkpoint is a separate directory, ``step-00001000``, which :func:`fastckpt.load` reads without a manager.
    Only the directories count. The file ``latest`` names the checkpoint that became durable last, and is a hint for
    people and scripts.

    Several managers, of several processes, may use one directory: each removes only checkpoints older than one that it
    has made durable itself, so the newest always stays. No manager knows the policies of another; pass the same
    policies to all, or ``read_only=True`` to all but one. See docs/manager.md.

    In a job of several ranks, every rank makes a manager with the same arguments, and calls ``should_save``, ``save``,
    ``steady``, ``wait`` and ``restore`` as the others do, in the same order; the ranks also leave the ``with``
    statement together. They save and load as :func:`fastckpt.distributed.save` and ``load`` do. If a rank fails, or
    makes no progress for the timeout, the others raise :class:`fastckpt.exceptions.RanksError`.

    Args:
        directory: the directory of the checkpoints. The first save makes it.
        ranks: the ranks that save together: a process group of ``torch.distributed``, None for the default group, or a
            :class:`fastckpt.distributed.Ranks`, which adds a timeout and the comparison of copies; without an
            initialised group, only this process. ``"alone"``: only this process, whatever groups exist.
        keep: policies of :mod:`fastckpt.keep`, one or a list: a checkpoint stays if one of them keeps it. A number is
            short for ``keep.Last(number)``; None keeps all. The newest and the pinned checkpoints always stay.
        save_when: policies of :mod:`fastckpt.when`, one or a list: a step is saved if one of them wants it. A
            number is short for ``when.Every(steps=number)``; ``"auto"`` for ``when.Auto()``, the interval with the
            least lost time. None saves each step for which ``save`` is called.
        async_save: save in the background (:func:`fastckpt.save_async`); else in the call (:func:`fastckpt.save`).
        name: the format of the checkpoints' names.
        read_only: write and remove nothing: for programs that evaluate the checkpoints of a run. Without ``keep`` it
            uses the policies of the run's own manager.
        remote: a second place for the checkpoints, a path or the URL of an object store: once durable, each is copied
            there in the background (docs/tiers.md).
        remote_keep: like ``keep``, for the remote tier.
        remote_bandwidth_limit: bytes per second for each process that copies, or a string such as ``"500MB/s"``; None
            for no limit.
        stale: how to react if the step has advanced, but no weight of the model has changed, or no moment of the
            optimizer: ``warn`` in the log and in the report's ``warnings``, ``raise`` from the next ``save`` or
            ``wait``, or ``ignore`` it. The checkpoint stays.
        save_options: further arguments for the saves: ``{"io": fastckpt.IO(lazy=True, threads=1)}``. Each save has the
            previous checkpoint as its ``base``, unless ``base`` is given here; ``{"base": None}`` for none.

    Raises:
        ImportError: ``remote`` is a URL, and the package obstore cannot be imported.
        TypeError: an argument has the wrong type, or ``ranks`` is not a process group.
        ValueError: an argument is out of range, ``directory`` is a URL, ranks differ in the arguments, or this process
            is not in the process group.
        RanksError: another rank has not made its manager, or its arguments differ.

    Example:
        >>> import fastckpt, signal, torch
        >>> state = {"w": torch.zeros(3)}
        >>> with fastckpt.Manager("runs/gpt", keep=2, save_when=10) as manager:
        ...     manager.save_on_signal(signal.SIGTERM, grace="25s")
        ...     found = manager.restore(into=state)
        ...     for step in range(found.step + 1 if found else 1, 41):
        ...         state["w"] += 1  # a step of training
        ...         if manager.should_save(step):
        ...             _ = manager.save(step, state, metrics={"loss": 1 / step})
        >>> [one.name for one in fastckpt.list("runs/gpt")]
        ['step-00000030', 'step-00000040']
    """

    def __init__(
        self,
        directory: AnyPath,
        *,
        ranks: Any = None,
        keep: int | keeping.Policy | Iterable[keeping.Policy] | None = None,
        save_when: int | str | saving.Policy | Iterable[int | str | saving.Policy] | None = None,
        async_save: bool = True,
        name: str = "step-{step:08d}",
        read_only: bool = False,
        remote: AnyPath | None = None,
        remote_keep: int | keeping.Policy | Iterable[keeping.Policy] | None = None,
        remote_bandwidth_limit: float | str | None = None,
        stale: Literal["warn", "raise", "ignore"] = "warn",
        save_options: Mapping[str, Any] | None = None,
    ) -> None:
        path = path_of("Manager", directory)
        crew = Crew(ranks, path)
        policies = None if keep is None else keep_of(keep)
        when = when_of(save_when, crew.size)
        save_options = save_options_of(save_options)
        local = Tier(Directory(path, Names(name)), policies or (), read_only=bool(read_only))
        alarm = StaleAlarm(local, stale, check_files("Manager", save_options.get("files")).frozen or ())
        far = remote_of(remote, remote_keep, local)
        bandwidth = check_bandwidth("Manager", remote_bandwidth_limit, "remote_bandwidth_limit")
        self._local, self._remote, self._ranks, self._keep = local, far, crew, policies
        self._catalogue = local.catalogue
        self._read_only = bool(read_only)
        self._restored = 0
        self._process = os.getpid()
        crew.begin(
            {
                "keep": policies_text(policies or ()),
                "save_when": policies_text(when),
                "async_save": str(bool(async_save)),
                "name": name,
                "read_only": str(self._read_only),
                "stale": stale,
                "remote": "None" if far is None else far.place.path,
                "remote_keep": policies_text(() if far is None else far.policies),
            }
        )
        self._assemble(save_options, when, alarm, bandwidth, asynchronous=bool(async_save))

    def _assemble(
        self,
        options: Mapping[str, Any],
        when: list[saving.Policy],
        alarm: StaleAlarm,
        limit: int | None,
        *,
        asynchronous: bool,
    ) -> None:
        """Make the parts of the manager. Each part refers only to parts that are made before it."""
        local, remote, ranks, path = self._local, self._remote, self._ranks, self.directory
        timing, leftovers = StepTiming(), Leftovers(local.place)
        signals = self._signals = Signals(shared=ranks.size > 1)
        drain = None
        if ranks.leads and not self._read_only:
            local.place.sweep()
            leftovers.begin()
        if ranks.share is not None and remote is not None and not self._read_only:
            drain = Drain(local, remote, limit=limit, share=ranks.share, deadline=lambda: signals.end)
            drain.resume()
        self._drain = drain
        candidates = Candidates(local, remote)
        self._loader = Loader(candidates, ranks)
        self._after_save = after_save = AfterSave(local, timing, alarm, leftovers, drain, ranks.leads)
        self._saves = saves = Saves(candidates, ranks, options, timing, alarm, after_save, asynchronous)
        preemption = Preemption(path, signals, saves, ranks)
        self._boundary = StepBoundary(ranks, Schedule(when, timing), timing, saves, alarm, preemption)
        copies = remote is not None and not self._read_only
        shared = ranks.size > 1 and not self._read_only
        if shared:
            ranks.listen(signals.told)
        self._completion = Completion(path, ranks, saves, after_save, drain, preemption, self._boundary, copies, shared)

    # Saving.

    def should_save(self, step: int) -> bool:
        """Whether to save ``step``; call it at the end of each step, when the state is whole.

        It may be called repeatedly for one step, even in an evaluation. After a signal of :meth:`save_on_signal`, it is
        true, whatever the policies decide; if that step is saved already, this call answers the signal.

        Args:
            step: the number of the training step, the same on all ranks.

        Returns:
            Whether to save it, the same on all ranks. Ranks ask each other at most once per second, after a signal to
            one of them, and at each step that a policy wants because of its number.

        Raises:
            SystemExit: a signal has come, the step is durable, and the signal's default is to end the process.
            RanksError: a rank has ended, does not answer, or is at another step.
            RuntimeError: a process group was initialised after the manager was made, or the manager's group is gone.
        """
        step = step_of("should_save", step)
        if self._read_only:
            return False
        self._check("should_save")
        return self._boundary.should_save(step)

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
        """Save ``state`` as the checkpoint of ``step``, if :meth:`should_save` returns True.

        In the background, it returns when the state may change, like :func:`fastckpt.save_async`. When the checkpoint
        is durable, the file ``latest`` names it, and checkpoints that no policy keeps are removed, in the background.
        After a signal, the step is saved at once, within the grace period, and then the signal is passed on.

        Args:
            step: the number of the training step.
            state: as for :func:`fastckpt.save`.
            metrics: numbers by name, such as ``{"loss": 1.5}``, which are stored in the checkpoint's metadata; in a
                job, the coordinator's.
            force: save whatever the policies decide, even a step that is saved already.
            metadata: more for the checkpoint's metadata, without tensors; in a job, the coordinator's.
            per_rank: a separate state of this rank, as for :func:`fastckpt.distributed.save`; ``restore`` returns it.

        Returns:
            Whether the save was begun.

        Raises:
            RuntimeError: the manager is read-only, belongs to the process that this one was forked from, or its process
                group is gone.
            SystemExit: a signal has come, the step is durable, and the signal's default is to end the process.
            Exception: the errors of :func:`fastckpt.save` or :func:`fastckpt.save_async`, or of their namesakes in
                :mod:`fastckpt.distributed`, including the failure of the last save in the background; the save of this
                call then continues.
        """
        self._check("save")
        try:
            return self._boundary.save(step, state, metrics, metadata, per_rank, force=force)
        except BaseException as error:
            self._boundary.miss(f"its save has ended with {type(error).__name__}: {error}")
            raise

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Wait until the last save is durable, and copied to the remote tier, and unneeded checkpoints are removed.

        After a signal of ``save_on_signal`` it waits at most for the grace period, then abandons the save. It does not
        wait for copies then; they continue. In a job, all ranks call it, and it returns when all of this is true on
        all ranks.

        Args:
            timeout: the seconds to wait; None for no limit.

        Returns:
            The report of the last save that became durable, or None.

        Raises:
            TimeoutError: the work has not finished in time; it continues.
            CancelledError: the save was abandoned because of a signal.
            CheckpointError: with ``stale="raise"``, a trained group has not changed with the last save.
            Exception: the last save failed; or a step is not at the remote tier, after another failed attempt.
        """
        return self._completion.wait(timeout)

    # Preemption.

    def save_on_signal(self, *signals: int, grace: float | str | None = None, exit: bool = True) -> None:  # noqa: A002 - reads best
        """Save when one of these signals comes, at the next step boundary, and then let it have its usual effect.

        The next call of :meth:`should_save` or :meth:`save` saves the step; within :meth:`steady`, the handler saves at
        once. When the checkpoint is durable, or abandoned, the earlier handler of the signal is called. Without one the
        process ends by SystemExit with 128 + the signal number. In a forked child nothing is saved, and the signal has
        its earlier effect, except that SIGUSR1 and similar ones do not end a child. Call this in the main thread, after
        other code has installed its handlers.

        In a job of several ranks, all respond to a signal that reaches one of them, and save the same step. Each then
        acts as if it had received the signal itself.

        Args:
            signals: their numbers; by default SIGTERM.
            grace: how long after a signal the process may live: seconds, or a string with a unit (``"25s"``). A save
                that is not durable after nine tenths of it is abandoned, and nothing of it stays. None: no limit.
            exit: whether the process ends if there is no earlier handler; else the loop must check :attr:`preempted`.

        Raises:
            RuntimeError: this is not the main thread, or the manager is read-only.
            ValueError: a number is not the number of a signal.
        """
        self._check("save_on_signal")
        from signal import SIGTERM  # noqa: PLC0415 - beside the argument of that name

        limit = None if grace is None else seconds("save_on_signal: grace", grace)
        self._signals.install(tuple(signals) or (SIGTERM,), limit, exits=bool(exit))

    def save_on(self, *, notice: Callable[[], object]) -> None:
        """Save at each boundary at which ``notice`` returns a new result: for a scheduler that sends no signal.

        ``notice`` is called once at each boundary, on all ranks. Each new true result saves that step, whatever the
        policies decide. Training continues until the scheduler ends it.

        Args:
            notice: the function to call, such as ``ray.train.get_preemption_info``. It must return the same on all
                ranks in the same step; it may wait for them.

        Raises:
            RuntimeError: the manager is read-only.

        Example:
            >>> import fastckpt, pathlib
            >>> manager = fastckpt.Manager("runs/gpt", save_when=100)
            >>> manager.save_on(notice=pathlib.Path("/run/goes-at").exists)
        """
        self._check("save_on")
        self._boundary.notice = notice

    @property
    def preempted(self) -> int | None:
        """The first signal of :meth:`save_on_signal` that was answered, or None. If it is set, the loop may end.

        It is None until the checkpoint is durable, or abandoned, so a loop that ends when it is set has saved.
        """
        return self._signals.first

    @contextlib.contextmanager
    def steady(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        per_rank: Any = None,
    ) -> Iterator[None]:
        """A context in which ``state`` does not change: an evaluation, a wait for data, a compilation.

        If a signal comes within or before it, the signal handler saves ``state`` at once as the checkpoint of ``step``,
        unless that is saved already. Elsewhere a handler cannot know whether a step is half done. Pass the state as for
        :meth:`save`, made when the context begins.

        In a job of several ranks no handler can act alone: all ranks respond to a signal together, at the beginning or
        the end of the context.

        Args:
            step: as for :meth:`save`.
            state: as for :meth:`save`.
            metrics: as for :meth:`save`.
            metadata: as for :meth:`save`.
            per_rank: as for :meth:`save`.

        Returns:
            A context manager.
        """
        self._check("steady")
        with self._boundary.steady(step, state, metrics, metadata, per_rank):
            yield

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
        """Load the newest checkpoint in which every byte verifies, or the checkpoint of a step.

        "Newest" is on the branch that saved last: checkpoints that a run left behind when it went back to an earlier
        step are loaded by their number only. A newer checkpoint that cannot be loaded is skipped with a warning that
        names the reason; it stays, and does not count as kept. A format that this release does not read is an error.

        With a remote tier, missing or damaged checkpoints are fetched from there and loaded from the directory, or, if
        the directory has no room, loaded from the remote tier.

        Args:
            into: as for :func:`fastckpt.load`: it is updated in place, and is the ``state`` of the result.
            step: load the checkpoint of this step and no other.
            exclude: as for :func:`fastckpt.load`.
            fresh: start from the beginning even if an earlier run left traces but no checkpoint; else that is an error.
            discard_newer: afterwards remove all higher steps except pinned ones, on each tier; requires ``step``.
            options: further arguments of :func:`fastckpt.load`, or of :func:`fastckpt.distributed.load`.

        Returns:
            Step, state, metrics; None if there was no run. All ranks get the same step.

        Raises:
            CheckpointError: no checkpoint is here, but there is a trace of a run, which the message names.
            CorruptCheckpointError: none of the checkpoints can be loaded.
            NotACheckpointError: the directory holds files of another program, perhaps under names of checkpoints.
            FileNotFoundError: there is no checkpoint of ``step``.
            OSError: the remote tier does not answer, and the directory has no checkpoint, or ``discard_newer`` is
                given; or a newer checkpoint cannot be removed: then the run continues as before.
            RanksError: another rank could not load it.
            RuntimeError: ``discard_newer`` is given, and the manager is read-only.
            ValueError: ``discard_newer`` is given without ``step``.
            Exception: any other error of :func:`fastckpt.load`. Tensors of ``into`` may have been filled already.

        Warns:
            RuntimeWarning: a checkpoint was skipped, or fetched because it is damaged; or the remote tier does not
                answer.
        """
        # Check the options now, not only when there is something to load.
        LoadSettings.of("restore", options)
        self._ranks.check("restore")
        self._boundary.miss("it has called restore without the save")
        if discard_newer:
            self._check("restore: discard_newer")
            if step is None:
                raise ValueError("restore: discard_newer= requires step=")
        how = {**options, "into": into, "exclude": exclude}
        if step is None:
            found = self._loader.newest(how, fresh=bool(fresh))
        else:
            found = self._loader.at(step_of("restore", step), how, needed=bool(discard_newer))
        if found is None:
            return None
        if discard_newer:
            # A save in flight would arrive after the removal; the next save or wait reports its failure.
            self._after_save.wait(math.inf)
            self._ranks.first("restore: discard_newer", partial(self._discard_beyond, found))
        self._local.damaged.update(number for number, _ in found.skipped)
        self._saves.resume(found.step, found.path, found.lineage)
        self._restored = found.step
        told = options.get("io")
        if isinstance(told, IO):
            give_report(told, found.report)
        return found

    def __enter__(self) -> Manager:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._process:
            self._completion.end_block(error)

    # Queries.

    def __repr__(self) -> str:
        return f"<fastckpt.Manager {self.directory!r}{' read-only' if self._read_only else ''}>"

    @property
    def directory(self) -> str:
        """The directory, absolute."""
        return self._local.place.path

    def path(self, step: int) -> str:
        """The path of the checkpoint of a step, whether it exists or not.

        Args:
            step: the training step.

        Returns:
            The directory, absolute.
        """
        return self._local.place.path_of(step)

    def remaining(self, last: int) -> range:
        """The remaining steps of a run: those after the restored one, up to and including ``last``.

        Args:
            last: the step at which the run ends.

        Returns:
            Steps, rising. All steps, beginning with 1, if nothing was restored; none if the run had ended.

        Raises:
            ValueError: ``last`` is not a non-negative integer.

        Example:
            >>> import fastckpt
            >>> state = {"step": 0}
            >>> with fastckpt.Manager("runs/toy", save_when=2) as manager:
            ...     found = manager.restore(into=state)
            ...     for step in manager.remaining(4):
            ...         state["step"] = step
            ...         if manager.should_save(step):
            ...             manager.save(step, state)
            >>> manager.steps()
            [2, 4]
        """
        return range(self._restored + 1, step_of("remaining", last) + 1)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in rising order. Only the names of the directories are read."""
        return self._local.place.look().steps

    def checkpoints(self) -> list[ManagedCheckpoint]:
        """The checkpoints of all tiers, by rising step: with their metrics, their tiers, and the reasons why they stay.

        Raises:
            OSError: the remote tier does not answer.
            ValueError: as for :attr:`policies`.
        """
        return checkpoints_of(self._local, self._remote, self.policies)

    def latest(self) -> int | None:
        """The newest step of the branch that saved last, or None. Only :meth:`restore` shows whether it loads."""
        return max(self._catalogue.own(self._catalogue.entries(self.steps())), default=None)

    @property
    def policies(self) -> list[keeping.Policy]:
        """The policies of ``keep=``. A read-only manager without ``keep=`` uses the policies of the run's own manager.

        Raises:
            ValueError: a later release wrote them, and this release does not know them.
        """
        if self._keep is not None or not self._read_only:
            return [*(self._keep or ())]
        return [keeping.parse(text) for text in self._catalogue.keep or ()]

    def best(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step of the branch that saved last whose checkpoint has the best metric, or None if none has the metric.

        Args:
            metric: its name; by default that of the first :class:`fastckpt.keep.Best` among the policies.
            mode: ``min`` or ``max``; by default that policy's, or ``min``.

        Returns:
            The step, or None.

        Raises:
            ValueError: no metric is given, and no policy names one.
        """
        known = next((one for one in self.policies if isinstance(one, keeping.Best)), None)
        if metric is None:
            if known is None:
                raise ValueError("best: pass metric=, since no keep.Best policy names one")
            metric = known.metric
        if mode is None:
            mode = known.mode if known is not None and known.metric == metric else "min"
        steps, catalogue = self.steps(), self._catalogue
        own = catalogue.own(catalogue.entries(steps))
        ranked = keeping.Best(1, metric, mode).ranked([entry.saved for entry in own.values()])
        if self._ranks.leads and not self._read_only:
            with contextlib.suppress(OSError):
                catalogue.write(steps)
        return ranked[0].step if ranked else None

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step whatever the policies decide, until :meth:`unpin`; durably, on each tier.

        A checkpoint that only the local tier has is copied to the remote one, and then pinned there.

        Args:
            step: its training step.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            OSError: the remote tier does not answer; the local checkpoint is pinned.
            RuntimeError: the manager is read-only.
        """
        self._check("pin")
        there = self._local.pin(step)
        if self._remote is not None:
            there = self._remote.pin(step) or there
        if self._drain is not None and self._local.place.is_pinned(step):
            # The remote tier may have removed it, or never had it.
            self._drain.again(step)
        if not there:
            raise FileNotFoundError(2, "pin: there is no such checkpoint", self.path(step))

    def unpin(self, step: int) -> None:
        """Let the policies decide on the checkpoint of a step again, after the next save.

        Args:
            step: its training step.

        Raises:
            OSError: the remote tier does not answer; the local pin is removed.
            RuntimeError: the manager is read-only.
        """
        self._check("unpin")
        self._local.place.unpin(step)
        if self._remote is not None:
            self._remote.place.unpin(step)

    def _discard_beyond(self, found: Restored) -> None:
        step, remote = found.step, self._remote
        place = self._saves.place_after(step, found.lineage)
        # Checkpoints pinned before there was a remote tier, or while it did not answer, are pinned only here.
        held = self._local.place.look().pinned
        with contextlib.ExitStack() as stack:
            # The directory may not exist, or may be full.
            stack.enter_context(self._catalogue.going_back(place, needed=remote is None))
            if self._drain is not None:
                stack.enter_context(self._drain.going_back(step, from_here=found.path == self.path(step)))
            if remote is not None:
                stack.enter_context(remote.catalogue.going_back(place, needed=True))
                remote.remove_beyond(step, held)
            self._local.remove_beyond(step, held)

    def _check(self, operation: str) -> None:
        if self._read_only:
            raise RuntimeError(f"{operation}: {self.directory}: the manager is read-only")
        if os.getpid() != self._process:
            raise RuntimeError(f"{operation}: the manager belongs to the process that this one was forked from")
        self._ranks.check(operation)
