"""What a restore gets from the remote tier: checkpoints that the local one lacks, or has damaged."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

from fastckpt._copy.copy import copy_checkpoint
from fastckpt.exceptions import CorruptCheckpointError

if TYPE_CHECKING:
    from .directory import Directory
    from .prefix import Place

logger = logging.getLogger("fastckpt")

#: What a local tier answers that has no room for a checkpoint, or takes none, or not in place of what lies there.
_NO_ROOM = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "EEXIST", "ENOTDIR", "ELOOP")
    if hasattr(errno, name)
}


def fetch(local: Directory, remote: Place, step: int, *, alone: bool = False) -> str:
    """Have the local tier hold what the remote one has of a step; where the checkpoint is to be loaded from.

    What of it is good on the local tier is not fetched. Where the local tier has no room, or cannot be written, the
    remote one is read in its place.

    Args:
        local: the local tier.
        remote: the remote one.
        step: which.
        alone: the local tier has another save of the step: nothing of that is taken.

    Raises:
        CorruptCheckpointError: the remote tier has it damaged, and the local one nothing of it.
        OSError: the remote tier does not answer, or has no such checkpoint.
    """
    here, there = local.path_of(step), remote.path_of(step)
    sources = [here, there] if os.path.lexists(here) and not alone else [there]
    try:
        copied = copy_checkpoint(sources, here, operation="restore", overwrite=True, limit=None, stop=None)
    except CorruptCheckpointError:
        if len(sources) == 1:
            raise
        # The two are not the same: the step was saved again, and not copied again.
        return there
    except (OSError, ValueError) as error:
        # With a ValueError, what lies there cannot be copied.
        fails_here = str(getattr(error, "filename", None)).startswith(local.path + os.sep)
        if isinstance(error, OSError) and error.errno not in _NO_ROOM and not fails_here:
            raise
        logger.warning("%s: it is loaded from %s: %s", here, there, error)
        return there
    logger.info("%s: fetched from %s: %.3f GB in %.2f s", here, there, copied.bytes / 1e9, copied.seconds)
    return here
