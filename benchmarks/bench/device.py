"""The raw device, and the contents of the page cache."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from bench import BLOCK, IN_FLIGHT, MB
from bench.measure import measure
from fastckpt._tools.bench import caches, raw

if TYPE_CHECKING:
    from pathlib import Path

# Bytes per second; a slower operation counts as hung.
SLOWEST = 10 * MB

# -- the raw device ----------------------------------------------------------------------------------------------------


def transfer(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write (``kind`` is ``write``) or read ``size`` bytes as fast as the device does; return the measurements."""
    return (fio if shutil.which("fio") else direct_io)(path, size, kind)


def transfer_name() -> str:
    """Return the tool that measures the raw device."""
    return "fio, io_uring, direct" if shutil.which("fio") else "Python threads, direct"


def fio(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write or read ``size`` bytes with fio; return its seconds, CPU seconds and faults."""
    options = f"--name=raw --rw={kind} --bs={BLOCK} --iodepth={IN_FLIGHT} --direct=1 --ioengine=io_uring".split()
    options += ["--fallocate=native", "--end_fsync=1"] if kind == "write" else []
    options.append("--thread")  # so that a kill also ends its job
    command = ["fio", *options, f"--size={size}", f"--filename={path}", "--output-format=json"]
    # With small pages, requests are smaller, and some devices are half as fast.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    limit = 60 + size / SLOWEST
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False, env=environment, timeout=limit)
    try:
        done = run()
    except subprocess.TimeoutExpired:
        # Seen once: fio waited forever for its own job and used no CPU time.
        print(f"fio did not end its {kind} of {path} in time; trying once more", file=sys.stderr)
        done = run()
    if done.returncode:
        raise OSError(f"fio failed to {kind} {path}: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    # fio reports whole milliseconds; a transfer of less than one counts as half a millisecond.
    seconds = max(job[kind]["runtime"], 0.5) / 1000
    if job["error"] or job[kind]["io_bytes"] != size:
        raise OSError(f"fio moved {job[kind]['io_bytes']} of {size} bytes, error {job['error']}")
    return {
        "seconds": seconds,
        "user": seconds * job["usr_cpu"] / 100,
        "system": seconds * job["sys_cpu"] / 100,
        "minor": job["minf"],
        "major": job["majf"],
    }


def direct_io(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write or read ``size`` bytes with O_DIRECT from Python threads, as ``fastckpt bench`` does; return the same."""
    device = raw.Device()
    transfer = device.write(path, size) if kind == "write" else device.read(path)
    sample, _ = measure(lambda: transfer.run(time.monotonic()))
    if not transfer.direct:
        raise OSError(errno.EINVAL, f"no direct I/O to {kind} it", str(path))
    return {key: getattr(sample, key) for key in ("seconds", "user", "system", "minor", "major")}


# -- memory --------------------------------------------------------------------------------------------------------

MADV_POPULATE_WRITE = 23
# Above this share of the free memory, the kernel would make room: drop files from the page cache, kill contenders.
SHARE = 0.75


def back_memory(size: int) -> None:
    """Touch ``size`` bytes of memory and free them, so that the next contender gets free pages that the host backs.

    A host may reclaim free pages of a virtual machine, and their next touch costs seconds per GB. A contender that
    saved through the page cache would reuse its recently dropped pages, and only the others would pay. If less than
    ``size`` is free, three quarters of the free memory are touched.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    size = max(mmap.PAGESIZE, min(size, int(free * SHARE)))
    # The mapping is private, because shared memory has small pages.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # advice only
            memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # before Linux 5.14
            for page in range(0, size, mmap.PAGESIZE):
                memory[page] = 1


# -- the page cache ----------------------------------------------------------------------------------------------------


def drop_caches(path: Path) -> str:
    """Drop the files in ``path`` from the page cache; return how that was done."""
    os.sync()
    if caches.drop():
        return "dropped through /proc/sys/vm/drop_caches"
    caches.forget(path)
    return "dropped file by file with posix_fadvise (/proc/sys/vm/drop_caches is not writable here)"


def fsync_tree(path: Path) -> None:
    """Make every file and directory in ``path``, and ``path`` itself, durable."""
    for entry in [*path.rglob("*"), path]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a directory with its contents, or a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
