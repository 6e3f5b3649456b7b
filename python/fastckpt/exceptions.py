"""Exceptions of fastckpt beyond Python's own.

If Python has an exception for the case, that is raised: ``FileNotFoundError``, ``FileExistsError``,
``PermissionError``, and ``OSError`` with its ``errno`` (``ENOSPC``, ``EIO``) and ``filename``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "DeadlineError",
    "FormatVersionError",
    "NotACheckpointError",
    "RankFailure",
    "RanksError",
    "ReplacedCheckpointError",
    "StructureMismatchError",
    "UnsupportedTypeError",
]


class CheckpointError(Exception):
    """The base class of fastckpt's own errors."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is damaged, truncated, or missing."""


class NotACheckpointError(CheckpointError):
    """The path is not a checkpoint of fastckpt: a file, or a directory without a manifest (``fastckpt.json``).

    The message names the likely format, and ``fastckpt import`` if that can convert it.
    """


class ReplacedCheckpointError(CheckpointError, FileNotFoundError):
    """The checkpoint was replaced or removed while it was read: open it again.

    ``load`` and ``verify`` retry for half a minute before they raise it.
    """


class DeadlineError(CheckpointError, OSError):
    """Storage has not answered within ``IO(deadline=...)``, so the save was abandoned.

    ``filename`` is the file of the last call; the message names the call. The threads that wait for an answer, and
    their memory, stay until it comes. (This is not a ``TimeoutError``: that ends only a wait, and the save continues.)
    """


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a format version that this release does not read."""


class UnsupportedTypeError(CheckpointError, TypeError):
    """The state holds a value that cannot be saved, cannot be loaded as requested, or is too large."""


class StructureMismatchError(CheckpointError, ValueError):
    """The state given as ``into=`` does not fit the checkpoint.

    Attributes:
        differences: every difference, one line each; the message lists only the first of many.
    """

    differences: tuple[str, ...] = ()


class RankFailure(NamedTuple):
    """The failure of one rank, or its silence.

    Attributes:
        rank: the index of the rank in the process group.
        host: the name of its host; empty if the rank never sent a message.
        message: the failure, such as ``failed: OSError: [Errno 28] No space left on device``.
    """

    rank: int
    host: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}{self.host and ' on ' + self.host} {self.message}"


class RanksError(CheckpointError):
    """Ranks that save or load together did not all succeed. A rank that failed itself raises its own exception instead.

    Attributes:
        failures: the ranks that failed or have not answered, at most 16 of them, and why. Empty if no rank is known to
            be the cause: the store of the process group is gone.
    """

    failures: tuple[RankFailure, ...] = ()

    def __init__(self, message: str, failures: tuple[RankFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    def __reduce__(self) -> tuple[type[RanksError], tuple[str, tuple[RankFailure, ...]]]:
        return type(self), (str(self), self.failures)


def __dir__() -> list[str]:
    return sorted(__all__)
