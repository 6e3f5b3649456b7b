"""Decides which of two callers finishes a save: its thread, or the call that could not start one."""

from __future__ import annotations


class Claim:
    """An object for the first caller only, without a lock: a signal handler may interrupt ``take`` and call it."""

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
