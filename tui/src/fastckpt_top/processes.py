"""The kernel's view of a publishing process: whether it lives, its user, whether it is stopped or held."""

from __future__ import annotations

import os
import pwd
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt_top.segment import Header

_STOPPED: Final = "TtXZ"
"""States of a process, as letters, in which no thread runs, so that the threads need no check."""
_HELD: Final = "D"


class Kernel:
    """The kernel's view of processes, from /proc, as far as it is visible from here.

    A pid is valid only in its PID namespace, and a start time only in its time namespace and boot. If these are not the
    reader's, the process is found by the lock on its segment, or its state stays unknown.
    """

    def __init__(self) -> None:
        self.boot_id = _boot_id()
        self._pid_ns = _namespace("pid")
        self._time_ns = _namespace("time")
        self._owners: dict[tuple[int, int], int] = {}
        self._listed = float("-inf")

    def same_clock(self, header: Header) -> bool:
        """Whether the process's monotonic clock is the reader's."""
        return header.boot_id == self.boot_id and header.time_ns in (0, self._time_ns)

    def is_alive(self, header: Header) -> bool:
        """Whether a process lives, if its lock cannot show it (docs/telemetry.md 3)."""
        if header.boot_id != self.boot_id:
            return False
        if header.pid_ns != self._pid_ns:
            return True  # this cannot be known from here; a dead process will be shown as stalled
        return _stat(f"/proc/{header.pid}/stat").start_ticks == header.start_ticks

    def state(self, header: Header, file: tuple[int, int], waiting: Iterable[int], mono: float) -> str:
        """The state of the process, as the letter that ps shows: R, S, D, T and so on.

        A signal stops a process as a whole, but threads wait in the kernel separately, and the main thread does no I/O.
        So `D` also means a process whose worker hangs there. A worker that waits for its ring sleeps (`S`), whatever
        the storage does.

        Args:
            header: The process.
            file: Device and inode of its segment.
            waiting: Thread ids, in the process's own PID namespace, of workers that make no progress.
            mono: Monotonic clock, seconds.

        Returns:
            The letter; empty if unknown.
        """
        if not self.same_clock(header):
            return ""
        own = header.pid_ns == self._pid_ns
        pid = header.pid if own else self._owner(file, mono)
        leader = _stat(f"/proc/{pid}/stat") if pid else _NOTHING
        if leader.start_ticks != header.start_ticks:
            return ""
        if own and leader.state not in _STOPPED:
            letters = (_stat(f"/proc/{pid}/task/{tid}/stat").state for tid in waiting)
            return _HELD if _HELD in letters else leader.state
        return leader.state

    def _owner(self, file: tuple[int, int], mono: float) -> int:
        """The pid, seen from here, of the process that locked a file; 0 if unknown. Reads all locks once per look."""
        if self._listed != mono:
            self._listed = mono
            self._owners = _lock_owners()
        return self._owners.get(file, 0)


class _Stat(NamedTuple):
    state: str
    start_ticks: int


_NOTHING: Final = _Stat("", -1)


def _stat(path: str) -> _Stat:
    """Fields 3 and 22 of a `stat` of a process or thread; the name before them may hold anything."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return _NOTHING
    try:
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
        return _Stat(fields[0].decode("ascii"), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return _NOTHING
    finally:
        os.close(fd)


def _lock_owners() -> dict[tuple[int, int], int]:
    """Device and inode -> pid, of the exclusive locks of whole files in /proc/locks."""
    owners = {}
    try:
        with open("/proc/locks", encoding="ascii") as lines:  # noqa: PTH123  (as in feed.py)
            for line in lines:
                fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:1a:123 0 EOF
                if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"]:
                    major, minor, inode = fields[5].split(":")
                    owners[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(fields[4])
    except (OSError, ValueError, IndexError):
        return {}
    return owners


@lru_cache(maxsize=256)
def user_of(uid: int, owner: int) -> str:
    """The name of a process's user.

    Args:
        uid: The user id that the process reports.
        owner: The owner of its segment, as seen from here. If it differs, the process is in another user namespace, to
            which local names do not apply.

    Returns:
        The name, or the number if there is none.
    """
    try:
        return pwd.getpwuid(uid).pw_name if uid == owner else str(uid)
    except (KeyError, OverflowError):
        return str(uid)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip().replace("-", "")
    except OSError:
        return ""


def _namespace(name: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino  # noqa: PTH116
    except OSError:
        return 0
