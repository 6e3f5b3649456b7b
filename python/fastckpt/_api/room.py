"""Whether new tensors fit into the memory that the control groups of this process leave.

A load fills all the memory that it allocates. Beyond the limit the kernel kills the process without a message, and
perhaps the job; an error names the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastckpt._cgroups import local_ranks, memory_left, text_of
from fastckpt._text import size

from .outcome import logger

#: Loads of fewer bytes are not checked, because they fit anywhere.
_LITTLE = 64 << 20
#: A load that fills at least this share of the remaining memory logs a warning.
_NEAR = 0.9


def check_room(source: str, nbytes: int, certain: int, *, root: Path = Path("/")) -> None:
    """Compare the memory that a load fills with the memory that is left.

    The ranks of a node (``LOCAL_WORLD_SIZE``) usually load equal amounts, in one control group: a warning counts all.

    Args:
        source: the checkpoint, for messages.
        nbytes: bytes of all new tensors in host memory.
        certain: bytes of these for which no memory of the process is reused.
        root: the directory of ``/proc`` and ``/sys``.

    Raises:
        MemoryError: the new tensors do not fit, and there is no swap space.
    """
    if nbytes < _LITTLE:
        return
    limit, left = memory_left(root)
    alike = local_ranks() or 1
    if limit is None or left is None or alike * nbytes < _NEAR * left:
        return
    what = (
        f"load: {source}: its new tensors need {size(nbytes)} of host memory, but the control group of this "
        f"process, limited to {size(limit)}, has {size(left)} left"
    )
    advice = "raise the limit, load less (keys=), fill existing tensors (into=), or map the files (io=IO(mmap=True))"
    swap = re.search(r"^SwapFree: +(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    if certain > left and not (swap and int(swap[1])):
        raise MemoryError(f"{what}: {advice}")
    if nbytes < _NEAR * left:
        what += f", too little if all {alike} ranks of this node load as much"
    logger.warning("%s; beyond the limit the kernel ends the process: %s", what, advice)
