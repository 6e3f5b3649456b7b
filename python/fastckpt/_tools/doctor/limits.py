"""The limits of this process on cores and memory: affinity, control groups (both versions), huge pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from fastckpt._cgroups import groups, local_ranks, memory_left, text_of


def cpu(root: Path = Path("/")) -> dict[str, Any]:
    """Return the numbers of cores, of those in the affinity mask and of local ranks, and the cgroup's quota (cores)."""
    return {
        "online": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "quota": _quota(root),
        "local_world_size": local_ranks(),
    }


def memory(root: Path = Path("/")) -> dict[str, Any]:
    """Return how much memory is left, the control group's limit, and the setting of transparent huge pages."""
    meminfo = dict(re.findall(r"^(\w+): +(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE))
    available = int(meminfo["MemAvailable"]) * 1024 if "MemAvailable" in meminfo else None
    limit, left = memory_left(root)
    chosen = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "available_bytes": min((value for value in (available, left) if value is not None), default=None),
        "cgroup_limit_bytes": limit,
        "transparent_huge_pages": chosen[1] if chosen else None,
    }


def _quota(root: Path) -> float | None:
    """Return the least quota, in cores, or None."""
    quotas = []
    for version, group in groups("cpu", root):
        if version == 2:  # noqa: PLR2004 - cgroup v2
            words = text_of(group / "cpu.max").split()
        else:
            words = [*text_of(group / "cpu.cfs_quota_us").split(), *text_of(group / "cpu.cfs_period_us").split()]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # noqa: PLR2004
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)
