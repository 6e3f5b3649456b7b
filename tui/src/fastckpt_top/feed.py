"""Finds and reads the segments of processes: directories, pread, liveness. The rules are in docs/telemetry.md."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from fastckpt_top import segment
from fastckpt_top.processes import Kernel, user_of
from fastckpt_top.segment import BadSegment
from fastckpt_top.snapshot import Proc, Snapshot, proc_key
from fastckpt_top.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

T = TypeVar("T", segment.Operation, segment.Thread, segment.History)
Entries = dict[int, tuple[bytes, T]]
"""Entries of a table by their index, with their bytes."""
ATTEMPTS: Final = 5
"""The most rereads, within one look, of a slot that changes while it is read."""
PROBE_S: Final = 1.0
"""Seconds between two probes of one process's lock."""
RESCAN_S: Final = 5.0
"""Seconds between two searches for directories of other users."""
SWEEP_AGE_S: Final = 600.0
"""A dead process's segment stays this many seconds, for the post-mortem."""
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def directories(env: Mapping[str, str], uid: int) -> list[str]:
    """The directories in which the user's own processes publish.

    Args:
        env: The environment.
        uid: The user.

    Returns:
        `$FASTCKPT_TOP_DIR` alone if it is set, else the defaults.
    """
    named = env.get("FASTCKPT_TOP_DIR")
    if named:
        return [named]
    places = [f"/dev/shm/fastckpt-{uid}"]  # noqa: S108  (the place that the producer checks and owns)
    if runtime := env.get("XDG_RUNTIME_DIR"):
        places.append(f"{runtime}/fastckpt")
    return places


def chosen(directory: str | None, *, all_users: bool) -> list[str] | None:
    """The directories that ``--dir`` and ``--all-users`` select; None means those of all users."""
    if directory is not None:
        return [directory]
    return None if all_users else directories(os.environ, os.geteuid())


def directories_of_all() -> list[str]:
    """The directories of all users, and of containers whose root this user may read, each listed once."""
    found: dict[tuple[int, int], str] = {}
    patterns = ("dev/shm/fastckpt-*", "proc/[0-9]*/root/dev/shm/fastckpt-*")
    for pattern in patterns:
        try:
            places = sorted(str(place) for place in Path("/").glob(pattern))
        except OSError:  # a process ended between its listing and its check
            continue
        for place in places:
            try:
                info = os.stat(place, follow_symlinks=False)  # noqa: PTH116  (strings throughout: this runs twice a second)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                found.setdefault((info.st_dev, info.st_ino), place)
    return list(found.values())


@dataclass(slots=True)
class _File:
    """An open segment, its last contents, and the kernel's last answer about its process."""

    fd: int
    device: int
    inode: int
    header: segment.Header
    mtime: float
    user: str
    alive: bool = True
    probed: float = -1e9
    state: str = ""
    asked: float = -1e9
    progress: dict[int, int] = field(default_factory=dict)
    operations: Entries[segment.Operation] = field(default_factory=dict)
    threads: Entries[segment.Thread] = field(default_factory=dict)
    history: tuple[segment.History, ...] = ()
    hist_head: int = -1
    final: Proc | None = None


class ShmFeed:
    """Reads all segments of some directories.

    Args:
        places: The directories; None for those of all users, searched again from time to time.
        pids: Only these processes, if any are given.
        ranks: Only these ranks, if any are given.
        mono: Monotonic clock, seconds.
        real: Clock, seconds since the epoch.
    """

    def __init__(
        self,
        places: Sequence[str] | None,
        *,
        pids: Collection[int] = (),
        ranks: Collection[int] = (),
        mono: Callable[[], float] = time.monotonic,
        real: Callable[[], float] = time.time,
    ) -> None:
        self._all = places is None
        self._places = directories_of_all() if places is None else list(places)
        self._searched = mono()
        self._pids = frozenset(pids)
        self._ranks = frozenset(ranks)
        self._mono = mono
        self._real = real
        self._files: dict[str, _File] = {}
        self._host = socket.gethostname()
        self._kernel = Kernel()
        self._devices: dict[int, str] = {}

    def poll(self) -> Snapshot:
        """Look at all segments now, in about 0.2 ms per process; never raises, whatever the directories contain."""
        # Both clocks are read at once: time between the two reads would shift the start of every operation.
        mono, real = self._mono(), self._real()
        if self._all and mono - self._searched >= RESCAN_S:
            self._places = directories_of_all()
            self._searched = mono
        problems: list[tuple[str, str]] = []
        present = self._scan(problems)
        for path in [path for path, file in self._files.items() if present.get(path) != file.inode]:
            os.close(self._files.pop(path).fd)
        procs: dict[str, Proc] = {}
        for path, inode in present.items():
            proc = self._try(path, inode, mono, problems)
            if proc is None:
                continue
            other = procs.get(proc.key)  # the same process may have published again (docs/telemetry.md 3)
            if other is None or other.header.generation < proc.header.generation:
                procs[proc.key] = proc
        wanted = {op.st_dev for proc in procs.values() for op in proc.operations}
        if not wanted <= self._devices.keys():
            self._devices = dict.fromkeys(wanted, "") | mounted()
        devices = {number: name for number in wanted if (name := self._devices[number])}
        return Snapshot(mono, real, self._host, tuple(procs.values()), tuple(problems), tuple(self._places), devices)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()

    def _try(self, path: str, inode: int, mono: float, problems: list[tuple[str, str]]) -> Proc | None:
        try:
            return self._read(path, inode, mono)
        except BadSegment as error:
            problems.append((clean(path), str(error)))
        except OSError as error:
            problems.append((clean(path), _reason(error)))
        return None

    def _scan(self, problems: list[tuple[str, str]]) -> dict[str, int]:
        present: dict[str, int] = {}
        for place in self._places:
            try:
                present.update(_segments(place))
            except FileNotFoundError:  # noqa: PERF203  (one directory must not hide the others)
                continue
            except OSError as error:
                problems.append((place, _reason(error)))
        return present

    def _read(self, path: str, inode: int, mono: float) -> Proc | None:
        file = self._files.get(path) or self._open(path, inode)
        if file.final is not None:
            return file.final if not self._ranks or file.final.rank in self._ranks else None
        header = file.header
        if self._pids and header.pid not in self._pids:
            return None
        if file.alive and mono - file.probed >= PROBE_S:
            file.probed = mono
            file.mtime = os.fstat(file.fd).st_mtime
            file.alive = self._probe(file)
        process = self._read_slots(file)
        if process.hist_head != file.hist_head:
            file.history = _read_history(file.fd, header, process.hist_head)
            file.hist_head = process.hist_head
        if mono - file.asked >= PROBE_S or not file.alive:
            file.asked = mono
            self._ask(file, mono)
        proc = Proc(
            key=proc_key(header),
            path=clean(path),
            header=header,
            process=process,
            operations=tuple(op for _, op in file.operations.values()),
            threads=tuple((index, thread) for index, (_, thread) in file.threads.items()),
            history=file.history,
            alive=file.alive,
            same_clock=self._kernel.same_clock(header),
            touched=file.mtime,
            state=file.state,
            user=file.user,
        )
        if not file.alive:  # nothing in the segment will change
            file.final = proc
        return proc if not self._ranks or proc.rank in self._ranks else None

    def _open(self, path: str, inode: int) -> _File:
        fd = os.open(path, _OPEN)
        try:
            header, info = _header(fd)
        except BaseException:
            os.close(fd)
            raise
        user = user_of(header.uid, info.st_uid)
        file = self._files[path] = _File(fd, info.st_dev, inode, header, info.st_mtime, user)
        return file

    def _probe(self, file: _File) -> bool:
        held = is_locked(file.fd)
        return self._kernel.is_alive(file.header) if held is None else held

    def _ask(self, file: _File, mono: float) -> None:
        """Ask the kernel about a process if its operation needs it."""
        if not file.alive or not any(op.running for _, op in file.operations.values()):
            file.state = ""
            file.progress = {}
            return
        before = file.progress
        working = [thread for _, thread in file.threads.values() if thread.state != segment.ThreadState.IDLE]
        file.progress = {thread.tid: thread.last_progress_mono_ns for thread in working}
        # Only workers without progress since the last look count: any worker may wait for the disk for a moment.
        waiting = [tid for tid, progress in file.progress.items() if before.get(tid) == progress]
        file.state = self._kernel.state(file.header, (file.device, file.inode), waiting, mono)

    def _read_slots(self, file: _File) -> segment.Process:
        fd, header = file.fd, file.header
        raw = os.pread(fd, segment.SIZES["process"], segment.PROCESS_OFFSET)
        process = segment.read(segment.Process, raw)
        used = min(process.threads_used, header.thr_count)

        def still(first: bytes, second: bytes, op: segment.Operation) -> bool:
            # Dead processes were killed in the middle of a change, which stays as it is.
            return first == second and not (op.seq % 2 and file.alive)

        def alike(first: bytes, second: bytes, thread: segment.Thread) -> bool:
            return first == second or _plausible(segment.read(segment.Thread, first), thread)

        table = (header.op_off, header.op_stride, header.op_count)
        file.operations = _entries(segment.Operation, fd, table, file.operations, still)
        file.threads = _entries(segment.Thread, fd, (header.thr_off, header.thr_stride, used), file.threads, alike)
        return process


def _header(fd: int) -> tuple[segment.Header, os.stat_result]:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        raise BadSegment("not a regular file with one name")
    return segment.decode_header(os.pread(fd, segment.HEADER_SIZE, 0), info.st_size), info


def _entries(
    kind: type[T], fd: int, table: tuple[int, int, int], old: Entries[T], holds: Callable[[bytes, bytes, T], bool]
) -> Entries[T]:
    """The used entries of a table; for an entry that keeps changing, the contents at the previous look.

    Args:
        kind: The kind of the entries.
        fd: The segment.
        table: The table's offset, stride and number of entries.
        old: The entries of the look before.
        holds: Whether two successive copies of an entry are consistent.
    """
    offset, stride, count = table
    size = segment.SIZES[kind.__name__.lower()]
    found: Entries[T] = {}
    pending = list(range(count))
    for _ in range(ATTEMPTS):
        length = stride * pending[-1] + size if pending else 0
        first, second = os.pread(fd, length, offset), os.pread(fd, length, offset)
        moving = []
        for index in pending:
            at = slice(index * stride, index * stride + size)
            raw, known = second[at], old.get(index)
            entry = known[1] if known and known[0] == raw else segment.read(kind, raw)
            if holds(first[at], raw, entry):
                found[index] = (raw, entry)
            else:
                moving.append(index)
        if not (pending := moving):
            break
    found |= {index: old[index] for index in pending if index in old}
    return {index: pair for index, pair in sorted(found.items()) if pair[1].op_id}


def _plausible(first: segment.Thread, second: segment.Thread) -> bool:
    """Whether two copies taken microseconds apart may be consistent: one owner, and no counter went back or jumped."""
    if first.op_id != second.op_id or second.op_id == 0:
        return False
    pairs = (
        (first.bytes_ever, second.bytes_ever),
        (first.bytes_op, second.bytes_op),
        (first.requests, second.requests),
        (first.busy_ns, second.busy_ns),
        (first.latency_sum_ns, second.latency_sum_ns),
    )
    return all(0 <= b - a < 1 << 32 for a, b in pairs)


def _read_history(fd: int, header: segment.Header, head: int) -> tuple[segment.History, ...]:
    ring = (header.hist_off, header.hist_stride, header.hist_count)
    found = _entries(segment.History, fd, ring, {}, lambda first, second, _: first == second)
    numbers = range(max(0, head - header.hist_count), head) if found else ()
    return tuple(found[place][1] for number in numbers if (place := number % header.hist_count) in found)


def mounted() -> dict[int, str]:
    """The name of each device that is mounted here, by its number: `/dev/nvme0n1p1`, `server:/export`, `tmpfs`."""
    found = {}
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
        for line in lines:
            before, _, after = line.partition(" - ")
            (major, minor), (kind, source) = before.split()[2].split(":"), after.split()[:2]
            found[os.makedev(int(major), int(minor))] = clean(source if set(source) & set("/:") else kind)
    return found


def is_locked(fd: int) -> bool | None:
    """Whether the exclusive lock of a segment is held, that is, whether its process lives.

    Args:
        fd: A separate descriptor, for reading.

    Returns:
        None if the file system does not support flock.

    Raises:
        OSError: The probe failed in another way.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None
        raise
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def sweep(places: Sequence[str], *, now: float, uid: int, dry_run: bool = False) -> list[str]:
    """Remove the segments of dead processes, untouched for `SWEEP_AGE_S`.

    Args:
        places: Directories.
        now: Seconds since the epoch.
        uid: The owner of the files.
        dry_run: Whether to remove nothing.

    Returns:
        The files that were removed, or would be.
    """
    removed = []
    for place in places:
        try:
            with os.scandir(place) as entries:
                names = [entry.path for entry in entries if _is_segment(entry.name.removeprefix("."))]
        except OSError:
            continue
        for path in sorted(names):
            try:
                fd = os.open(path, _OPEN)
            except OSError:
                continue
            try:
                info = os.fstat(fd)
                if (
                    stat.S_ISREG(info.st_mode)
                    and info.st_uid == uid
                    and now - info.st_mtime >= SWEEP_AGE_S
                    and is_locked(fd) is False
                ):
                    if not dry_run:
                        os.unlink(path)  # noqa: PTH108
                    removed.append(path)
            except OSError:
                continue
            finally:
                os.close(fd)
    return removed


def _segments(place: str) -> Iterator[tuple[str, int]]:
    with os.scandir(place) as entries:
        for entry in entries:
            if _is_segment(entry.name):
                yield entry.path, entry.inode()


def _is_segment(name: str) -> bool:
    return name.endswith(".seg") and name[:1].isdigit()


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "a symbolic link, which is not followed"
    return error.strerror or str(error)
