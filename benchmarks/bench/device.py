"""The raw device, and what is in the page cache."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench import BLOCK, IN_FLIGHT, MB
from bench.measure import measure

# Bytes a second; what takes longer than this allows hangs.
SLOWEST = 10 * MB

# -- the raw device ----------------------------------------------------------------------------------------------------


def transfer(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write (``kind`` is ``write``) or read ``size`` bytes as fast as the device does; return the accounts."""
    return (fio if shutil.which("fio") else direct_io)(path, size, kind)


def transfer_name() -> str:
    """Return what the raw device is measured with."""
    return "fio, io_uring, direct" if shutil.which("fio") else "Python threads, direct"


def fio(path: Path, size: int, kind: str) -> dict[str, Any]:
    """Write or read ``size`` bytes with fio; return its seconds, CPU seconds and faults."""
    options = f"--name=raw --rw={kind} --bs={BLOCK} --iodepth={IN_FLIGHT} --direct=1 --ioengine=io_uring".split()
    options += ["--fallocate=native", "--end_fsync=1"] if kind == "write" else []
    options.append("--thread")  # so that to kill it is to kill its job
    command = ["fio", *options, f"--size={size}", f"--filename={path}", "--output-format=json"]
    # With small pages the device gets smaller requests, and some are half as fast: not what they can do.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    limit = 60 + size / SLOWEST
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False, env=environment, timeout=limit)
    try:
        done = run()
    except subprocess.TimeoutExpired:
        # Seen once: it waited for its own job for ever, without using the processor.
        print(f"fio did not come back from its {kind} of {path}; once more", file=sys.stderr)
        done = run()
    if done.returncode:
        raise OSError(f"fio failed to {kind} {path}: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    # Milliseconds; a transfer of less than one still took some time.
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
    """Write or read ``size`` bytes with O_DIRECT from Python threads; return the same."""
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(IN_FLIGHT)]
    for buffer in buffers:
        buffer.write(os.urandom(BLOCK))
    flags = os.O_RDWR | os.O_CREAT if kind == "write" else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_DIRECT, 0o666)

    def work(worker: int) -> None:
        for offset in range(worker * BLOCK, size, IN_FLIGHT * BLOCK):
            buffer = buffers[worker]
            moved = (
                os.pwrite(descriptor, buffer, offset) if kind == "write" else os.preadv(descriptor, [buffer], offset)
            )
            if moved != BLOCK:
                raise OSError(f"{kind} of {path} at {offset} moved {moved} of {BLOCK} bytes")

    def go() -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(work, range(IN_FLIGHT)))
        if kind == "write":
            os.fsync(descriptor)

    try:
        if kind == "write":
            os.posix_fallocate(descriptor, 0, size)
        sample, _ = measure(go)
        return {key: getattr(sample, key) for key in ("seconds", "user", "system", "minor", "major")}
    finally:
        os.close(descriptor)


# -- memory --------------------------------------------------------------------------------------------------------

MADV_POPULATE_WRITE = 23


def back_memory(size: int) -> None:
    """Touch ``size`` bytes of memory and give them back, so that whoever comes next finds free pages that are backed.

    A host may take the free pages of a virtual machine back, and their next touch then costs seconds a GB. Who has
    saved through the page cache would find its pages, dropped a moment ago, and who has not would pay.
    """
    with mmap.mmap(-1, size) as memory:
        with contextlib.suppress(OSError):  # advice only
            memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # before Linux 5.14
            for page in range(0, size, mmap.PAGESIZE):
                memory[page] = 1


# -- the page cache ----------------------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    """Return the regular files in ``path``, all levels."""
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def drop_caches(path: Path) -> str:
    """Make the files in ``path`` cold; return how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for file in files_of(path):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "dropped file by file with posix_fadvise (/proc/sys/vm/drop_caches is not writable here)"
    return "dropped through /proc/sys/vm/drop_caches"


def warm_caches(path: Path) -> None:
    """Have every byte of the files in ``path`` in the page cache."""
    buffer = bytearray(BLOCK)
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def fsync_tree(path: Path) -> None:
    """Make every file and directory in ``path``, and ``path`` itself, durable."""
    for entry in [*path.rglob("*"), path]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, or a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
