"""Measures one call from inside the process that makes it: time, CPU, page faults and memory.

- **CPU** is user and system time of all threads of the process, without the kernel's writeback of buffered writes,
  which favours contenders that write through the page cache.
- **Page faults** are ``ru_minflt`` and ``ru_majflt`` of the process.
- **Extra memory** is the peak of the resident set during the call, minus the resident set before, minus the tensors
  that the call returned.
- **Mapped** is the memory that became resident as pages of files: a result that is a mapping of a file.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Sample:
    """One timed call.

    Attributes:
        bytes: bytes of tensor data that were moved.
        seconds: wall-clock seconds.
        user: CPU seconds in user mode, all threads.
        system: CPU seconds in the kernel.
        minor: page faults without I/O, or None if they were not counted.
        major: page faults with I/O, or None.
        extra: bytes of memory beyond the state, or None.
        mapped: bytes of the result that are pages of a file, or None.
        copied: bytes that the CPU copied between buffers, as the contender reports it, or None.
        notes: the contender's notes about the call.
    """

    bytes: int
    seconds: float
    user: float
    system: float
    minor: int | None = None
    major: int | None = None
    extra: int | None = None
    mapped: int | None = None
    copied: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu(self) -> float:
        """The sum of user and system seconds."""
        return self.user + self.system


def status(field_name: str) -> int | None:
    """Return a size from /proc/self/status, such as ``VmRSS`` or ``VmHWM``, in bytes; None if it is not reported."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name):
            return int(line.split()[1]) * 1024
    # gVisor has fewer fields than Linux.
    return None


def grown(before: int | None, after: int | None, but: int = 0) -> int | None:
    """Return by how many bytes a size grew, minus ``but``; None if unknown."""
    return None if before is None or after is None else max(0, after - before - but)


def reset_peak() -> bool:
    """Reset the peak of the resident set to the current size; False if the kernel forbids it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back_freed_memory() -> None:
    """Have malloc return free memory to the kernel.

    A job loads once, into fresh memory; otherwise, the load of a second round would reuse the pages of the first.
    """
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


def measure(call: Callable[[], Any], kept: Callable[[Any], int] = lambda _: 0) -> tuple[Sample, Any]:
    """Run ``call`` once; return its sample and its result.

    ``kept`` returns how many bytes of the result are not extra memory. The sample's ``bytes`` are still 0.
    """
    gc.collect()
    give_back_freed_memory()
    can_tell = reset_peak()
    memory, files = status("VmRSS"), status("RssFile")
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = call()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    sample = Sample(
        bytes=0,
        seconds=seconds,
        user=after.ru_utime - before.ru_utime,
        system=after.ru_stime - before.ru_stime,
        minor=after.ru_minflt - before.ru_minflt,
        major=after.ru_majflt - before.ru_majflt,
        extra=grown(memory, status("VmHWM"), kept(result)) if can_tell else None,
        mapped=grown(files, status("RssFile")),
    )
    return sample, result


def with_notes(sample: Sample, size: int, notes: dict[str, Any]) -> Sample:
    """Add the moved bytes and the contender's own report.

    A tool in another process reports its own ``seconds``, ``user``, ``system``, ``minor`` and ``major``, which replace
    the measurements of this process.
    """
    notes = dict(notes)
    size, copied = notes.pop("bytes", size), notes.pop("copied", None)
    if "seconds" not in notes:
        return replace(sample, bytes=size, copied=copied, notes=notes)
    own = {key: notes.pop(key, None) for key in ("seconds", "user", "system", "minor", "major")}
    return Sample(bytes=size, **own, copied=copied, notes=notes)
