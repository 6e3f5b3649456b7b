"""What this process may use of the machine's cores and memory: affinity, control groups (both versions), huge pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def cpu(root: Path = Path("/")) -> dict[str, Any]:
    """Return the cores there are, those of the affinity mask, the control group's quota in cores, and the ranks."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return {
        "online": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "quota": _quota(root),
        "local_world_size": int(ranks) if ranks.isdecimal() and int(ranks) else None,
    }


def memory(root: Path = Path("/")) -> dict[str, Any]:
    """Return how much memory is left, the control group's limit, and the setting of transparent huge pages."""
    meminfo = dict(re.findall(r"^(\w+): +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    available = int(meminfo["MemAvailable"]) * 1024 if "MemAvailable" in meminfo else None
    limit, left = _memory_limit(root)
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "available_bytes": min((value for value in (available, left) if value is not None), default=None),
        "cgroup_limit_bytes": limit,
        "transparent_huge_pages": chosen[1] if chosen else None,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and directory of every control group that limits this process, from its own to the root's."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            version, top = 2, base
        elif controller in controllers.split(","):
            # Mounted alone, or together with others under a name with commas, to which links lead.
            version, top = 1, base / controller
        else:
            continue
        # A container sees its own group as the root, or, without a namespace, a name that is not there.
        group = Path(name.lstrip("/"))
        for part in (group, *group.parents):
            if ".." not in part.parts and (top / part).is_dir():
                yield version, top / part


def _quota(root: Path) -> float | None:
    """Return the least quota, in cores, or None."""
    quotas = []
    for version, group in _groups(root, "cpu"):
        if version == 2:  # noqa: PLR2004 - cgroup v2
            words = _read(group / "cpu.max").split()
        else:
            words = [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # noqa: PLR2004
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limit(root: Path) -> tuple[int | None, int | None]:
    """Return the least limit and the least that is left under any, in bytes."""
    limits, left = [], []
    for version, group in _groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else _V1_MEMORY  # noqa: PLR2004 - cgroup v2
        limit, used = (_read(group / name).strip() for name in names)
        # Version 1 says "no limit" as the largest multiple of a page.
        if limit.isdecimal() and int(limit) < 1 << 62:
            limits.append(int(limit))
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            # Cached pages are given up when memory is asked for.
            reclaimable = int(cached[1]) if cached else 0
            left.append(max(0, int(limit) - int(used) + reclaimable) if used.isdecimal() else int(limit))
    return min(limits, default=None), min(left, default=None)


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")
