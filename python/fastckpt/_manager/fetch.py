"""What a restore gets from the remote tier: checkpoints that the local one lacks, or has damaged."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

from fastckpt._copy.copy import copy_checkpoint
from fastckpt.exceptions import CorruptCheckpointError

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .directory import Directory
    from .place import Place
    from .tier import Tier

logger = logging.getLogger("fastckpt")

#: What a local tier answers that has no room for a checkpoint, or takes none, or not in place of what lies there.
_NO_ROOM = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "EEXIST", "ENOTDIR", "ELOOP")
    if hasattr(errno, name)
}


class Fetch:
    """The remote tier as a restore sees it.

    Args:
        directory: the local tier.
        tier: the remote one.
        read_only: whether nothing may be written.
    """

    def __init__(self, directory: Directory, tier: Tier, *, read_only: bool) -> None:
        self._directory = directory
        self._tier = tier
        self._read_only = read_only

    @property
    def path(self) -> str:
        """Where the remote tier lies."""
        return self._tier.place.path

    def steps(self) -> list[int]:
        """The steps that the remote tier has, rising.

        Raises:
            OSError: it does not answer.
        """
        return self._tier.place.look().steps

    @property
    def place(self) -> Place:
        """The remote tier itself."""
        return self._tier.place

    @property
    def catalogue(self) -> Catalogue:
        """What its checkpoints say of themselves."""
        return self._tier.retention.catalogue

    def bring(self, step: int, *, alone: bool = False) -> str:
        """Have the local tier hold what the remote one has of a step; where the checkpoint is to be loaded from.

        What of it is good on the local tier is not fetched. Where the local tier has no room, or cannot be written, the
        remote one is read in its place.

        Args:
            step: which.
            alone: the local tier has another save of the step: nothing of that is taken.

        Raises:
            CorruptCheckpointError: the remote tier has it damaged, and the local one nothing of it.
            OSError: the remote tier does not answer, or has no such checkpoint.
        """
        here, there = self._directory.path_of(step), self._tier.place.path_of(step)
        if self._read_only:
            return there
        sources = [here, there] if os.path.lexists(here) and not alone else [there]
        try:
            copied = copy_checkpoint(sources, here, operation="restore", overwrite=True, limit=None, stop=None)
        except CorruptCheckpointError:
            if len(sources) == 1:
                raise
            # The two are not the same: the step was saved again, and not copied again.
            return there
        except ValueError as error:
            # What lies there cannot be copied.
            logger.warning("%s: it is loaded from %s: %s", here, there, error)
            return there
        except OSError as error:
            if error.errno not in _NO_ROOM and not self._is_here(error):
                raise
            logger.warning("%s: it is loaded from %s: %s", here, there, error)
            return there
        logger.info("%s: fetched from %s: %.3f GB in %.2f s", here, there, copied.bytes / 1e9, copied.seconds)
        return here

    def _is_here(self, error: OSError) -> bool:
        """Whether it is the local tier that fails."""
        return str(error.filename).startswith(self._directory.path + os.sep)
