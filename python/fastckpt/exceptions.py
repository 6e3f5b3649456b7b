"""What fastckpt raises beyond Python's own exceptions.

Where Python has an exception for the case, that one is raised: ``FileNotFoundError``, ``FileExistsError``,
``PermissionError``, and ``OSError`` with its ``errno`` (``ENOSPC``, ``EIO``) and ``filename``.
"""


class CheckpointError(Exception):
    """The root of all errors that are fastckpt's own."""


class CorruptCheckpointError(CheckpointError):
    """A file of the checkpoint is not what was written: damaged, cut short, or missing."""


class NotACheckpointError(CheckpointError):
    """What is at the path was not written by fastckpt: a file, or a directory without a manifest (``fastckpt.json``).

    The message says what it looks like, and names ``fastckpt convert`` where that makes a checkpoint of it.
    """


class ReplacedCheckpointError(CheckpointError, FileNotFoundError):
    """The checkpoint was replaced or removed while it was read: open it again.

    ``load`` and ``verify`` do so by themselves, for half a minute.
    """


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a format version that this release does not read."""


class UnsupportedTypeError(CheckpointError, TypeError):
    """The state holds something that cannot be saved, or cannot be given back as asked, or is too large to be saved."""


class StructureMismatchError(CheckpointError, ValueError):
    """The state given as ``into=`` does not fit the checkpoint.

    Attributes:
        differences: every difference, one line each; the message lists only the first of many.
    """

    differences: tuple[str, ...] = ()
