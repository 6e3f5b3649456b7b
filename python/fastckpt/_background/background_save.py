"""A save that its call begins, and that a thread finishes, or the call itself where there is no thread."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fastckpt._api import in_flight
from fastckpt._api.outcome import logger

from .claim import Claim

if TYPE_CHECKING:
    from .pending import PendingSave


class BackgroundSave(ABC):
    """What the saves of one process and of ranks share.

    Args:
        pending: the handle.

    Attributes:
        claim: taken by whoever finishes the save, or gives it up before that.
        inline: whether the call finishes it.
    """

    def __init__(self, pending: PendingSave) -> None:
        self.pending = pending
        self.claim = Claim()
        self.inline = False

    @abstractmethod
    def save(self) -> BaseException | None:
        """Write what was copied, set the report of the handle, and let go of everything; why it failed, or None."""

    def start(self) -> bool:
        """Start the thread; whether there is one."""
        if in_flight.is_exiting():
            return False
        try:
            # No daemon: the interpreter waits for it at its end, while everything still works.
            threading.Thread(target=self.run, name="fastckpt-save", daemon=False).start()
        except RuntimeError as error:  # the process may have no more threads, or the interpreter is ending
            logger.warning("%s: no thread for the save, so the caller does it: %s", self.pending.path, error)
            return False
        # The thread says so itself when it runs, but the next save or drain must know now.
        self.pending.started = True
        return True

    def run(self) -> None:
        """The life of the thread."""
        if not self.claim.take():
            return
        pending = self.pending
        # Not before: a signal handler can interrupt the start of a thread, and must not wait for one it blocks; nor may
        # one wait for the call that it has interrupted, and that finishes the save itself.
        pending.started = not self.inline
        try:
            pending._finish(self.save())
        finally:
            # An error's traceback leads here, and the handle has the error: they would live until Python looks for
            # cycles.
            del self, pending

    def run_here(self) -> None:
        """Finish the save in the calling thread.

        Raises:
            BaseException: what ends the program, KeyboardInterrupt and the like.
        """
        self.inline = True
        self.run()
        error = self.pending._error
        if error is not None and not isinstance(error, Exception):
            # Ctrl-C is the program's, not the save's alone.
            in_flight.asked(error)
            raise error
