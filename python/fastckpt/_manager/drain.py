"""The drain copies durable checkpoints of the local tier to the remote one during training.

The last save goes first, because it would be lost with the node. Checkpoints that wait, or are being copied, are not
removed from the local tier. The queue is not a file: at its next start a manager queues all checkpoints of the local
tier, asks which of them the remote has, and continues with the rest.

The drain's thread copies until nothing waits, and ends. Like the thread of a save it keeps the process alive; if the
remote does not answer then, the next run copies the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING

from fastckpt._api.event import Event
from fastckpt._background.claim import Claim
from fastckpt._copy.copy import copy_checkpoint
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, NotACheckpointError

from .directory import MANIFEST

if TYPE_CHECKING:
    from .directory import Directory
    from .remote import Remote
    from .tier import Tier

logger = logging.getLogger("fastckpt")

#: Seconds until a failed copy is tried again, at first and at most.
_FIRST, _MOST = 1.0, 60.0
#: Seconds between two checks by a waiting call for something more urgent.
_LOOK = 0.1

#: Drains whose thread is running, or must run before the process ends.
_running: set[Drain] = set()
_ending = False


def _at_end() -> None:
    """Wait for the drains after the main thread has ended."""
    global _ending  # noqa: PLW0603 - once a process
    _ending = True
    for drain in tuple(_running):
        drain.start()
        drain.end()


# concurrent.futures ends its pools, which make the copies, in a function that it has registered here before. The last
# registered function runs first, so the pools still work in this one. Without it, waiting steps are left behind.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_at_end)  # noqa: SLF001 - there is no other way, and they do the same
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_running.clear)


class Drain:
    """Copies the checkpoints of a run from the local tier to the remote one.

    Args:
        local: the source tier. Waiting checkpoints are not removed there.
        remote: the target tier.
        limit: the most bytes per second; None without limit.
        share: the number of this process among those that copy each checkpoint together, and their count; the first one
            commits.
        deadline: the time, by ``time.monotonic``, until which it may continue when the process ends.
    """

    def __init__(
        self,
        local: Tier[Directory],
        remote: Remote,
        *,
        limit: float | None,
        share: tuple[int, int] = (0, 1),
        deadline: Callable[[], float],
    ) -> None:
        self._local = local
        self._remote = remote
        self._from, self._to = local.place, remote.place
        local.held = self.holds
        self._limit = limit
        self._share, self._leads = share, share[0] == 0
        self._deadline = deadline
        self._process = os.getpid()
        # Reentrant: a signal handler that saves may run in between.
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        #: Numbers for steps older than the step that is being saved.
        self._late = itertools.count(0, -1)
        #: The steps that wait, or are being copied; the highest numbers go first.
        self._waiting: dict[int, int] = {}
        #: All steps that ever waited: the local tier may remove a step that is here but not in `_waiting`.
        self._seen: set[int] = set()
        #: The steps that this process has saved.
        self._own: set[int] = set()
        #: The exception of the last attempt at each step. If the step no longer waits, its copy was abandoned.
        self._failed: dict[int, Exception] = {}
        #: Set when the thread has ended.
        self._idle = Event()
        self._idle.set()
        #: Interrupts the pause after a failure.
        self._wake = Event()
        self._delay = _FIRST
        #: Whether the steps that policies of the remote tier want must be determined again.
        self._changed = False
        #: Whether another thread waits, so that each step is tried once, without pauses.
        self._hurry = False
        self._stopped = False

    # Queries.

    def resume(self) -> None:
        """Queue all checkpoints of the local tier: an earlier process may have ended before they were copied."""
        with self._lock:
            steps = self._from.look().steps
            entries = self._local.catalogue.entries(steps)
            # The last saved one is copied first; checkpoints of unknown order come after the others.
            for step in sorted(steps, key=lambda step: (step in entries and entries[step].lineage.order, step)):
                self._queue(step)
            self.start()

    def add(self, step: int) -> None:
        """Queue a step that is durable on the local tier; a signal handler may call this, too."""
        with self._lock:
            self._own.add(step)
            self._queue(step)
            # If a signal ends the process, nothing else starts the thread.
            _running.add(self)

    def start(self) -> None:
        """Start copying waiting steps; not for a signal handler, in which no thread can be started."""
        with self._lock:
            if self._stopped or not self._waiting or not self._idle.is_set():
                return
            idle, claim = Event(), Claim()
            thread = threading.Thread(target=self._run, args=(idle, claim), name="fastckpt-drain")
            _running.add(self)
            try:
                self._idle = idle
                thread.start()
            except BaseException as error:
                # A signal handler may have raised this error, before or during the start of the thread.
                if not claim.take():
                    raise
                idle.set()
                if not isinstance(error, RuntimeError):
                    raise
                # No more threads, or the interpreter is ending.
                _running.discard(self)
                logger.warning("%s: nothing is copied to %s: %s", self._from.path, self._to.path, error)

    def holds(self, step: int) -> bool:
        """Whether a step must stay on the local tier for now."""
        if os.getpid() != self._process:
            return False
        with self._lock:
            # Another process may have saved the step, or a save of this process has just ended.
            if step not in self._seen:
                self._queue(step, next(self._late))
                self.start()
            return step in self._waiting

    def again(self, step: int) -> None:
        """Queue a step behind the others, and start copying now."""
        with self._lock:
            if step not in self._waiting:
                self._queue(step, next(self._late))
            self.start()

    @contextlib.contextmanager
    def going_back(self, step: int, *, from_here: bool) -> Iterator[None]:
        """A context that abandons the current copy and copies nothing above this step, unless it raises.

        When the context begins, the remote tier has the step: the local save if the run continues ``from_here``.

        Raises:
            Exception: the step cannot be copied.
            OSError: the remote does not answer.
        """
        try:
            self._stop()
            with self._lock:
                above = {one: number for one, number in self._waiting.items() if one > step}
                failed = {one: error for one, error in self._failed.items() if one > step}
                self._waiting = {one: number for one, number in self._waiting.items() if one <= step}
                # The reason why a step cannot reach the remote tier does not matter if it is about to be removed.
                self._failed = {one: error for one, error in self._failed.items() if one <= step}
                before = self._remote.go_back()
        finally:
            self._stopped = False
        try:
            if from_here and self._remote.lacks(step):
                # The remote tier lacks the step, or has a save of it on a branch that this run has left: if the node
                # were lost now, everything would be lost.
                self._bring(step)
            self.start()
            yield
        except BaseException:
            # The run does not go back.
            with self._lock:
                self._waiting, self._failed = {**above, **self._waiting}, {**failed, **self._failed}
                self._remote.go_back(before)
            self.start()
            raise

    def _bring(self, step: int) -> None:
        """Copy one step now, even if the copies of other steps fail.

        Raises:
            Exception: the remote tier lacks it.
        """
        self.again(step)
        with self.hurry():
            self.end()
        if self._remote.lacks(step):
            here, there = self._from.path_of(step), self._to.path_of(step)
            failed = self._failed.pop(step, None)
            raise failed or CheckpointError(f"restore: discard_newer: {here} is not at {there}: nothing was removed")

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """A context for a caller that waits: the thread tries each step once, without pauses, and then ends."""
        with self._lock:
            self._hurry = True
            self._forgive()
            self._wake.set()
            self.start()
        try:
            yield
        finally:
            self._hurry = False

    def is_over(self, limit: float) -> bool:
        """Whether the thread ends before ``limit`` of ``time.monotonic``."""
        return self._idle.wait(max(0.0, limit - time.monotonic()))

    def raise_failure(self) -> None:
        """Raise the errors of the last attempts; waiting steps are tried again.

        Raises:
            Exception: an attempt failed, and the step is not at the remote.
        """
        with self._lock:
            failed = next(iter(self._failed), None)
            error = None if failed is None else self._failed.pop(failed)
            self.start()
        if error is not None:
            raise error

    def wait(self, end: float, must_leave: Callable[[], bool]) -> None:
        """Wait until nothing waits, or each step was tried once more.

        Args:
            end: the time, by ``time.monotonic``, until which to wait.
            must_leave: whether something else is more urgent; then this returns, and the drain continues.

        Raises:
            TimeoutError: the copies are not done by ``end``; they continue.
            Exception: the last attempt at a step failed, and it is not at the remote.
        """
        with self.hurry():
            while not self.is_over(min(end, time.monotonic() + _LOOK)):
                if must_leave():
                    return
                if time.monotonic() >= end:
                    here, there = self._from.path, self._to.path
                    raise TimeoutError(f"wait: {here}: checkpoints are still being copied to {there}; the copies go on")
        self.raise_failure()

    def leave(self, end: float) -> None:
        """Wait until ``end``; then abandon the current copy, which the next save or the next run makes again."""
        try:
            self.wait(math.inf, lambda: time.monotonic() >= end)
        except Exception as error:  # noqa: BLE001 - the block of the manager ends for another reason
            text = "%s: not all checkpoints are copied to %s: %s"
            logger.error(text, self._from.path, self._to.path, error)  # noqa: TRY400
        try:
            waiting = self._stop()
        finally:
            self._stopped = False
        if waiting and self._leads:
            logger.warning(
                "%s: steps that are not yet at %s are left to the next run: %s",
                *(self._from.path, self._to.path, ", ".join(map(str, waiting))),
            )

    def end(self) -> None:
        """Wait for the thread, without a pause after a failure."""
        with self._lock:
            self._wake.set()
            idle = self._idle
        idle.wait()

    def _stop(self) -> list[int]:
        """Abandon the current copy, and wait for the thread; returns the waiting steps. The drain stays stopped."""
        with self._lock:
            self._stopped = True
            waiting = sorted(self._waiting)
        self.end()
        return waiting

    # The queue.

    def _queue(self, step: int, number: int | None = None) -> None:
        self._seen.add(step)
        self._waiting[step] = next(self._numbers) if number is None else number
        self._failed.pop(step, None)
        self._changed = True
        self._wake.set()

    def _next(self) -> int | None:
        """The step to copy; None ends the thread."""
        with self._lock:
            fresh = [step for step in self._waiting if step not in self._failed]
            if self._waiting and not fresh and not self._hurry:
                # Each waiting step has been tried once.
                self._forgive()
                fresh = list(self._waiting)
            if self._stopped or not fresh:
                _running.discard(self)
                self._idle.set()
                return None
            return max(fresh, key=lambda step: self._waiting[step])

    def _forgive(self) -> None:
        """Forget the failures of waiting steps, so that these steps are tried again."""
        self._failed = {step: error for step, error in self._failed.items() if step not in self._waiting}

    def _drop(self, step: int, number: int | None) -> None:
        """Remove a step from the queue, unless it was queued again."""
        with self._lock:
            if self._waiting.get(step) == number:
                del self._waiting[step]
                self._failed.pop(step, None)

    # The thread.

    def _run(self, idle: Event, claim: Claim) -> None:
        if not claim.take():
            return
        try:
            while (step := self._next()) is not None:
                self._try(step)
        except CancelledError:
            logger.debug("%s: the copy to %s was abandoned", self._from.path, self._to.path)
        finally:
            if not idle.is_set():
                _running.discard(self)
                idle.set()

    def _try(self, step: int) -> None:
        """Make one attempt to copy a step.

        Raises:
            CancelledError: the copy was abandoned.
        """
        number = self._waiting.get(step)
        name = self._from.names.name_of(step)
        before = self._from.identity(name)
        try:
            if self._changed:
                self._skip()
                if self._waiting.get(step) != number:
                    return
            # The next turn asks about steps that arrived meanwhile: otherwise a run that saves faster than the remote
            # answers would never copy anything.
            if before is None and self._is_gone(step):
                self._drop(step, number)
                logger.info("%s: step %d was removed before it was copied", self._from.path, step)
            else:
                self._copy(step, number)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, others are tried
            # A checkpoint that was replaced or removed while it was being copied is not a failure.
            if self._from.identity(name) == before:
                self._note(step, number, error)

    def _copy(self, step: int, number: int | None) -> None:
        source, target = self._from.path_of(step), self._to.path_of(step)
        if self._remote.is_better(step):
            text = f"{source} is not copied, and stays: {target} is a later save of step {step} by another run"
            logger.info("%s", text)
            self._drop(step, number)
            if self._leads and step in self._own:
                # This save was in vain: another run saves there, or this run did not know of the later save.
                self._failed[step] = CheckpointError(
                    f"drain: {text} (save again: a new save is later, and is copied. If the other run continues, give "
                    "each run a separate remote=)"
                )
            return
        copied = copy_checkpoint(
            [source],
            target,
            operation="drain",
            overwrite=True,
            limit=self._limit,
            stop=self._must_stop,
            share=self._share,
            step=step,
        )
        logger.info(
            "%s: step %d is at %s: %.3f GB in %.2f s, %.2f GB/s, %.3f GB were there",
            *(self._from.path, step, target, copied.bytes / 1e9, copied.seconds),
            *(copied.bytes / 1e9 / max(copied.seconds, 1e-9), copied.reused_bytes / 1e9),
        )
        if self._delay != _FIRST:
            logger.info("%s: %s answers again", self._from.path, self._to.path)
        self._delay = _FIRST
        if self._leads:
            self._remote.follow(step, number or 0, was_there=copied.was_there, waits=lambda one: one in self._waiting)
        self._drop(step, number)
        if self._leads:
            self._local.clear_again()

    def _skip(self) -> None:
        """Drop the steps that the remote would not keep."""
        with self._lock:
            self._changed = False
            waiting = dict(self._waiting)
        try:
            unwanted = self._remote.unwanted(waiting)
        except OSError:
            self._changed = True
            raise
        for step in unwanted:
            self._drop(step, waiting[step])
            if self._leads:
                self._to.forget(step)
            logger.debug("%s: step %d is not copied: no policy of the remote keeps it", self._from.path, step)
        if unwanted and self._leads:
            self._local.clear_again()

    def _is_gone(self, step: int) -> bool:
        """Whether the local tier has no such checkpoint. An unreadable checkpoint is not gone."""
        try:
            Path(self._from.path_of(step), MANIFEST).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False

    def _note(self, step: int, number: int | None, error: Exception) -> None:
        """Decide what happens to a step after a failed attempt."""
        where = self._from.path, self._to.path
        if not self._leads:
            # The first process sends the missing files.
            logger.warning("%s: this process did not upload its share of step %d: %s", where[0], step, error)
            self._drop(step, number)
            return
        if isinstance(error, (CorruptCheckpointError, NotACheckpointError)):
            # The checkpoint stays damaged, but one of an earlier run must not make each later run fail.
            logger.error("%s: step %d is not copied to %s: %s", where[0], step, where[1], error)
            self._drop(step, number)
            if step in self._own:
                self._failed[step] = error
            self._local.clear_again()
            return
        with self._lock:
            if self._waiting.get(step) != number:
                return
            self._failed[step] = error
            wake = self._wake = Event()
            pause = 0.0 if self._hurry or self._stopped else self._delay
        if self._delay == _FIRST:
            text = "%s: step %d is not at %s yet, and its copy is tried again: %s"
            logger.warning(text, where[0], step, where[1], error)
        self._delay = min(2 * self._delay, _MOST)
        if not _ending:
            wake.wait(pause)
        if _ending and not self._hurry:
            logger.error("%s: the process ends: the next run copies what waits to %s", *where)
            self._hurry = True

    def _must_stop(self) -> bool:
        return self._stopped or (_ending and time.monotonic() > self._deadline())
