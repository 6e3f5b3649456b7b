"""The control groups that limit this process, of both versions (cgroups(7)): the memory left, and the ranks in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")
#: Memory that the kernel reclaims before it kills a process: cached pages, and its own slabs.
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def local_ranks() -> int | None:
    """The number of ranks on this node, from torchrun (``LOCAL_WORLD_SIZE``); None if that is not set."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(ranks) or None if ranks.isdecimal() else None


def text_of(path: Path) -> str:
    """The content of a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def groups(controller: str, root: Path = _ROOT) -> Iterator[tuple[int, Path]]:
    """Yield version and directory of every control group that limits this process, from its own to the root's."""
    base = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            version, top = 2, base
        elif controller in controllers.split(","):
            # A controller is mounted under its name, or with others under a name with commas, to which its name links.
            version, top = 1, base / controller
        else:
            continue
        # A container sees its own group as the root or, without a namespace, under a name that does not exist there.
        group = Path(name.lstrip("/"))
        for part in (group, *group.parents):
            if ".." not in part.parts and (top / part).is_dir():
                yield version, top / part


def memory_left(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """The least memory limit and the least memory left under any limit, in bytes; None without a limit."""
    limits, left = [], []
    for version, group in groups("memory", root):
        names = ("memory.max", "memory.current") if version == 2 else _V1_MEMORY  # noqa: PLR2004 - cgroup v2
        limit, used = (text_of(group / name).strip() for name in names)
        # Version 1 represents "no limit" as the largest multiple of a page.
        if limit.isdecimal() and int(limit) < 1 << 62:
            limits.append(int(limit))
            counted: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", text_of(group / "memory.stat"), re.MULTILINE))
            # Version 1 counts groups below a group separately.
            reclaimable = sum(int(counted.get(f"total_{name}") or counted.get(name, "0")) for name in _RECLAIMABLE)
            left.append(max(0, int(limit) - int(used) + reclaimable) if used.isdecimal() else int(limit))
    return min(limits, default=None), min(left, default=None)
