"""Measures about two seconds of writing and reading, with plain I/O and by save and load; removes its files."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import fastckpt
from fastckpt._tools.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

#: Bytes of a plain operation, and the number of threads with one in flight each: enough for the devices so far.
_BLOCK, _THREADS = 4 << 20, 4
#: The most bytes to write at a time, and the divisors of the free space on the disk and in memory.
_MOST, _OF_DISK, _OF_MEMORY = 256 << 20, 10, 8
_LEAST = 1 << 20
#: The smallest state that shows the engine: below 2 MiB a save is one operation, without a ring.
TELLING = 4 << 20
#: The limit if the free space is unknown.
_UNKNOWN = 16 << 20
#: The greatest ratio of a second piece to the first, whose time was short and predicts little.
_GROWTH = 16
#: Seconds that one direction of the plain part should take, and all rounds of save and load together.
_PLAIN, _ROUNDS = 0.3, 0.8


def measure(directory: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Time plain writing and reading, then saving and loading, in ``directory``. Speeds are GB/s of 10^9 bytes.

    ``error`` holds the failure, if any; then the rest covers the time before it.
    """
    found: dict[str, Any] = dict.fromkeys(("raw_write", "raw_read", "save", "load", "error"))
    free, memory = facts["directory"]["free_bytes"], facts["memory"]["available_bytes"]
    room = min(
        _UNKNOWN if free is None else free // _OF_DISK, _UNKNOWN if memory is None else memory // _OF_MEMORY, _MOST
    )
    room -= room % mmap.PAGESIZE
    if room < _LEAST:
        return {**found, "error": f"not measured: {room} bytes are all that may be used of disk and memory"}
    io = facts["io"]
    direct = io["direct_open"] == io["direct_write"] == io["direct_read"] == "ok"
    try:
        with scratch(directory, "doctor") as (made, _):
            found["raw_write"], found["raw_read"] = _plain(
                made / "plain", room, direct=direct, allocate=io["fallocate"] == "ok"
            )
            bytes_ = min(room, max(TELLING, int(found["raw_write"]["gigabytes_per_second"] * 1e9 * _PLAIN)))
            found["save"], found["load"] = _rounds(made, bytes_)
    except (OSError, fastckpt.CheckpointError) as error:
        found["error"] = str(error)
    return found


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Keep this process's first operation from publishing live counters: for a process that ends soon."""
    before = os.environ.get("FASTCKPT_TOP")
    os.environ["FASTCKPT_TOP"] = "0"
    try:
        yield
    finally:
        del os.environ["FASTCKPT_TOP"]
        if before is not None:
            os.environ["FASTCKPT_TOP"] = before


def _speed(moved: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"bytes": moved, "seconds": seconds, "gigabytes_per_second": moved / max(seconds, 1e-9) / 1e9, **more}


def _plain(path: Path, room: int, *, direct: bool, allocate: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a file, sync it and read it again with plain calls."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    memory = mmap.mmap(-1, _THREADS * _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # with small pages the device gets small requests
    blocks = [memoryview(memory)[at : at + _BLOCK] for at in range(0, len(memory), _BLOCK)]
    for block in blocks:
        block[:] = _noise(_BLOCK // 8).view(np.uint8).data
    how = {"direct": direct, "threads": _THREADS}
    try:
        path.unlink()
        # Write more each time, until it takes long enough. The first time alone proves little: a sync by another
        # process may slow it down.
        size = _LEAST
        for turn in itertools.count():
            if allocate:
                os.posix_fallocate(fd, 0, size)
            else:
                os.ftruncate(fd, size)
            begin = time.perf_counter()
            written = _in_threads(blocks, size, lambda block, offset: os.pwritev(fd, [block], offset))
            os.fdatasync(fd)
            seconds = time.perf_counter() - begin
            if (turn and seconds > _PLAIN / 4) or size >= room:
                break
            size = size if seconds > _PLAIN else min(room, int(size * min(_GROWTH, max(2, _PLAIN / seconds))))
            size -= size % mmap.PAGESIZE
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        read = _in_threads(blocks, written, lambda block, offset: os.preadv(fd, [block], offset))
        return _speed(written, seconds, **how), _speed(read, time.perf_counter() - begin, **how)
    finally:
        os.close(fd)


def _in_threads(blocks: list[memoryview], size: int, move: Callable[[memoryview, int], int]) -> int:
    """Move ``size`` bytes with a thread for each block of memory; returns the bytes moved by a deadline."""
    offsets = iter(range(0, size, _BLOCK))
    deadline = time.perf_counter() + 2 * _PLAIN
    moved = [0] * len(blocks)
    failures: list[OSError] = []
    stop = threading.Event()

    def work(thread: int) -> None:
        # The threads share this iterator, which the interpreter advances in one step.
        for offset in offsets:
            try:
                moved[thread] += move(blocks[thread][: min(_BLOCK, size - offset)], offset)
            except OSError as error:
                failures.append(error)
            if failures or stop.is_set() or time.perf_counter() > deadline:
                return

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(blocks))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        # After Ctrl-C has ended the wait, no thread may use the descriptor: its number may soon be another file's.
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return sum(moved)


_seeds = itertools.count()


def _noise(words: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return 64-bit words that no file system can compress, differing from call to call."""
    tile = np.frombuffer(os.urandom(1 << 20), np.uint64)
    noise = np.resize(tile, words)
    return np.asarray(noise + np.uint64(next(_seeds)) + np.arange(words, dtype=np.uint64) // len(tile), np.uint64)


def _rounds(directory: Path, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save and load a state of ``size`` bytes until the time is up; returns the medians."""
    state = {f"tensor.{number}": piece for number, piece in enumerate(np.array_split(_noise(size // 8), 16))}
    saves: list[fastckpt.types.SaveReport] = []
    loads: list[float] = []
    begin = time.perf_counter()
    while not saves or (time.perf_counter() - begin) * (len(saves) + 1) / len(saves) < _ROUNDS:
        path = directory / f"round-{len(saves)}"
        saves.append(fastckpt.save(state, path))
        for file in path.iterdir():
            _forget(file)
        start = time.perf_counter()
        fastckpt.load(path)
        loads.append(time.perf_counter() - start)
        shutil.rmtree(path)
    last = saves[-1]
    ran = {"engine": last.engine, "fallback": last.fallback, "threads": last.threads, "blocks": dict(last.blocks)}
    save = _speed(last.bytes, statistics.median(report.seconds for report in saves), rounds=len(saves), **ran)
    return save, _speed(last.bytes, statistics.median(loads), rounds=len(loads))


def _forget(file: Path) -> None:
    """Drop a file from the page cache, as far as possible: after a restart, a load finds nothing there."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
