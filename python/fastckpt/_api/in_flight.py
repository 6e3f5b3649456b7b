"""Saves in flight: their number, paths and results, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from threading import RLock, get_ident
from typing import Any, NamedTuple

from .event import Event


class SaveInFlight:
    """A save in flight.

    Attributes:
        path: the checkpoint's directory, absolute.
        caller: the thread that requested the save.
        group: the ranks that save together; None for a save of one process.
        operation: its turn among the operations of the ranks; None for a save of one process.
        started: whether another thread has taken over.
        finished: set when it is over.
    """

    path: str
    caller: int
    group: object | None
    operation: Any
    started: bool
    finished: Event


def can_wait_for(save: SaveInFlight) -> bool:
    """Whether this thread can wait for a save: it cannot if the save waits for this thread.

    A save waits for a thread that prepares it and now runs a signal handler, and for a thread in an earlier turn.
    """
    if save.operation is not None and save.operation.waits_for_caller():
        return False
    return save.started or save.caller != get_ident()


class Failure(NamedTuple):
    """A failed save, and why it failed."""

    save: SaveInFlight
    error: BaseException


# The lists change in atomic steps, so that a signal handler never sees them half changed.
_in_flight: list[SaveInFlight] = []
#: One event for each caller that waits to be admitted: the end of any save sets all of them.
_waiting: list[Event] = []
_unasked: list[Failure] = []
# Guards only the count in `admit`. It is reentrant for signal handlers. Writing threads never take it: a handler that
# waits for them while the interrupted code holds it would never end.
_admission = RLock()
_exiting = False
_registered = False


def admit(save: SaveInFlight, most: int) -> None:
    """Wait until fewer than ``most`` other saves are in flight, and none to the same path; then count this save.

    Saves of other groups do not count: other ranks may have called in another order, and would wait for this one.
    Saves with a later turn do not count either: another thread or a handler may overtake this call before its count.
    """
    _register()
    while True:
        # The event is added before the count: otherwise a save could end in between.
        ended = Event()
        _waiting.append(ended)
        with _admission:
            others = [other for other in _in_flight if can_wait_for(other) and other.group is save.group]
            # If two saves go to one path, the later one must win.
            if len(others) < most and not to_path(save.path, save):
                _in_flight.append(save)
                break
        ended.wait()
    with contextlib.suppress(ValueError):
        _waiting.remove(ended)


def _register() -> None:
    """Make the exit of this process wait for saves in flight, and write failures to stderr."""
    global _registered  # noqa: PLW0603 - once a process
    if _registered:
        return
    _registered = True
    atexit.register(_at_exit)
    # Children that multiprocessing forks end without calling atexit, and call finalizers of multiprocessing instead.
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=0)


def leave(save: SaveInFlight) -> None:
    """Record the end of a save; does nothing if it was never admitted."""
    with contextlib.suppress(ValueError):
        _in_flight.remove(save)
    while _waiting:
        with contextlib.suppress(IndexError):  # another thread has taken the last
            _waiting.pop().set()


def saves() -> tuple[SaveInFlight, ...]:
    """All saves in flight."""
    return tuple(_in_flight)


def to_path(path: str | None, waits: SaveInFlight | None = None) -> list[SaveInFlight]:
    """The saves in flight to ``path`` that the caller, or with ``waits`` that save, can wait for: see :func:`admit`."""
    groups = None if waits is None or waits.group is None else {None, waits.group}
    there = [save for save in saves() if save.path == path and can_wait_for(save)]
    return [save for save in there if groups is None or save.group in groups]


def wait_for_paths(*paths: str | None) -> None:
    """Wait for saves in flight to any of these paths."""
    for path in paths:
        for save in to_path(path):
            save.finished.wait()


def failed(failure: Failure) -> None:
    """Record a failure whose result was never requested."""
    _unasked.append(failure)


def asked(error: BaseException) -> None:
    """Record that the caller has seen ``error``."""
    for failure in tuple(_unasked):
        if failure.error is error:
            _unasked.remove(failure)


def unasked() -> tuple[Failure, ...]:
    """Failures whose result was never requested."""
    return tuple(_unasked)


def tell_unasked(why: str, *, but: SaveInFlight | None = None) -> None:
    """Raise the first unreported failure, with ``why`` as a note.

    A failure that has been reported counts as seen. The failure of the save ``but`` is left alone.
    """
    for failure in tuple(_unasked):
        if failure.save is but:
            continue
        try:
            _unasked.remove(failure)
        except ValueError:  # another thread has reported it
            continue
        error = failure.error
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"fastckpt: this is the failure of the asynchronous save to {failure.save.path}; {why}")
        raise error


def unasked_text(failure: Failure) -> str:
    """The text of a warning about a failure."""
    return (
        f"fastckpt: the asynchronous save to {failure.save.path} failed, and its result was never requested: "
        f"{failure.error}"
    )


def drain(timeout: float | None = None) -> None:
    """Wait until all asynchronous saves in flight are durable.

    A signal handler may call it, even while the interrupted code waits for a save or is inside ``save_async``. It then
    does not wait for the save of that call if no thread has taken it over yet, nor for later saves of the ranks. (A
    handler should not call ``save_async`` itself, because Python's threads cannot be started there reliably; it can
    call ``save``.)

    Args:
        timeout: seconds; None waits for as long as it takes.

    Raises:
        TimeoutError: some saves are not durable in time; these saves continue.
        Exception: the first failure of a save whose result was never requested; call again for others.

    Example:
        >>> import fastckpt
        >>> pending = fastckpt.save_async({"step": 7}, "step-7")
        >>> fastckpt.background.drain()
        >>> pending.done()
        True
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    for save in saves():
        if can_wait_for(save) and not save.finished.wait(
            None if deadline is None else max(0.0, deadline - time.monotonic())
        ):
            raise TimeoutError(f"drain: the save to {save.path} has not finished after {timeout} s and continues")
    tell_unasked("drain raised it because its result was never requested")


def is_exiting() -> bool:
    """Whether the interpreter has passed the point where it waits for threads."""
    return _exiting


def _at_exit() -> None:
    """Report failures at exit; by now the interpreter has normally waited for the writing threads.

    A process may call it more than once: a forked child inherits the functions that its parent registered with atexit.
    """
    global _exiting  # noqa: PLW0603 - once a process
    _exiting = True
    for save in saves():
        save.finished.wait()
    while _unasked:
        failure = _unasked.pop(0)
        kind = type(failure.error)
        # Write the line in one call: the failed thread may be logging at this moment.
        line = (
            f"fastckpt: the asynchronous save to {failure.save.path} failed, and its result was never requested: "
            f"{kind.__module__.removeprefix('builtins')}{'.' if kind.__module__ != 'builtins' else ''}"
            f"{kind.__qualname__}: {failure.error}\n"
        )
        if sys.stderr is not None:  # it may be closed by now
            sys.stderr.write(line)


def _forget() -> None:
    """A forked child has none of its parent's threads: nothing to wait for, nothing to report."""
    # Another thread of the parent may have held the lock; and multiprocessing's children lose their finalizers.
    global _admission, _registered  # noqa: PLW0603
    _admission = RLock()
    _registered = False
    _in_flight.clear()
    _waiting.clear()
    _unasked.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
