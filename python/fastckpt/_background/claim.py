"""Decides which of two callers finishes a save: its thread, or the call that could not start one."""

from __future__ import annotations


class Claim:
    """An object that only the first caller gets. A signal handler may call ``take`` while the thread does."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = [None]

    def take(self) -> bool:
        """Whether this caller is the first."""
        try:
            self._left.pop()
        except IndexError:
            return False
        return True
