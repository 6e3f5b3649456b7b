"""A producer of segments based only on docs/telemetry.md: it takes each offset from the page's tables.

Run as a program, it pretends to save a checkpoint: ``python producer.py DIR --rank 0 --rate 1e9 --total 2e10``.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import mmap
import os
import re
import struct
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"
TABLES = {"5.1": "header", "5.2": "process", "5.3": "operation", "5.4": "thread", "5.5": "history"}
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "i64": "q"}
SIZE = 0x9000
BASES = {
    "header": (0, 0),
    "process": (0x100, 0),
    "operation": (0x200, 512),
    "thread": (0x1000, 256),
    "history": (0x5000, 256),
}
MADV_DONTFORK = 10


def read_page():
    """Table -> field -> (offset, type), from the page."""
    layout = {name: {} for name in TABLES.values()}
    table = None
    for line in PAGE.read_text("utf-8").splitlines():
        if heading := re.match(r"### (5\.\d) ", line):
            table = TABLES.get(heading[1])
        elif line.startswith("## "):
            table = None
        row = re.match(r"\| (0x[0-9A-F]+) \| ([a-z0-9\[\]]+) \| (\w+) \|", line)
        if table and row:
            layout[table][row[3]] = (int(row[1], 16), row[2])
    return layout


LAYOUT = read_page()


class Image:
    """The bytes of a segment, with setters by name."""

    def __init__(self, data=None, **header):
        self.data = bytearray(SIZE) if data is None else data
        values = {
            "magic": b"FCKTTOP\0", "major": 1, "minor": 0, "header_size": 256, "total_size": SIZE, "features": 1,
            "endian_tag": 0x01020304, "op_off": 0x200, "op_stride": 512, "op_count": 7, "thr_off": 0x1000,
            "thr_stride": 256, "thr_count": 64, "hist_off": 0x5000, "hist_stride": 256, "hist_count": 64,
            "generation": 1, "pid": os.getpid(), "uid": os.geteuid(), "start_ticks": start_ticks(),
            "pid_ns": Path("/proc/self/ns/pid").stat().st_ino, "time_ns": Path("/proc/self/ns/time").stat().st_ino,
            "mono0_ns": time.monotonic_ns(), "real0_ns": time.time_ns(), "boot_id": boot_id(), "rank": -1,
            "local_rank": -1, "world": -1, "local_world": -1, "gpu": -1, "numa": -1, "version": b"0.1.0",
            "job": b"producer",
        } | header  # fmt: skip
        self.set("header", 0, **values)

    def set(self, table, index, **values):
        base, stride = BASES[table]
        for name, value in values.items():
            offset, kind = LAYOUT[table][name]
            at = base + index * stride + offset
            element, _, count = kind.partition("[")
            if element in ("char", "u8"):
                room = int(count.rstrip("]"))
                raw = value if isinstance(value, bytes) else value.encode()
                self.data[at : at + room] = raw[:room].ljust(room, b"\0")
            elif count:
                struct.pack_into(f"<{len(value)}{CODES[element]}", self.data, at, *value)
            else:
                struct.pack_into("<" + CODES[element], self.data, at, value)

    def get(self, table, index, name):
        base, stride = BASES[table]
        offset, kind = LAYOUT[table][name]
        return struct.unpack_from("<" + CODES[kind], self.data, base + index * stride + offset)[0]

    def operation(self, slot=0, **values):
        """A save of 10 GB that began 2 s ago and is in phase write, except for `values`."""
        now = time.monotonic_ns()
        self.set("operation", slot, **({
            "seq": 2, "op_id": slot + 1, "kind": 1, "phase": 3, "engine": 1, "flags": 1, "threads": 2, "step": 7,
            "bytes_total": 10**10, "files_total": 2, "t_start_mono_ns": now - 2 * 10**9,
            "t_phase_mono_ns": now - 2 * 10**9, "block_size": 4 << 20, "queue_depth": 8, "label": "step-7",
            "path": "/ckpt/step-7",
        } | values))  # fmt: skip

    def thread(self, slot, **values):
        self.set("thread", slot, **({"op_id": 1, "state": 2, "tid": 100 + slot, "in_flight": 8} | values))
        used = max(self.get("process", 0, "threads_used"), slot + 1)
        self.set("process", 0, threads_used=used)

    def record(self, number, **values):
        self.set("history", number % 64, **({
            "op_id": number + 1, "kind": 1, "result": 1, "engine": 1, "threads": 2, "bytes": 10**9, "step": -1,
            "t_start_real_ns": 10**18, "dur_ns": 10**9, "label": "step-1",
        } | values))  # fmt: skip
        self.set("process", 0, hist_head=number + 1)

    def write(self, place, name=None):
        """Write the segment as a dead process leaves it: without a lock."""
        path = Path(place) / (name or f"{os.getpid()}-{start_ticks()}.seg")
        path.write_bytes(self.data)
        path.chmod(0o600)
        return path


class Published(Image):
    """A segment, locked and mapped as docs/telemetry.md 3 says, so that it dies with this process."""

    def __init__(self, place, **header):
        name = f"{os.getpid()}-{start_ticks()}.seg"
        self.path = Path(place) / name
        hidden = Path(place) / f".{name}"
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, SIZE)
        # Python's own mmap would keep a copy of the descriptor, and with it a forked child would keep the lock.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        address = libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        assert libc.madvise(address, SIZE, MADV_DONTFORK) == 0
        super().__init__(memoryview((ctypes.c_char * SIZE).from_address(address)).cast("B"), **header)
        hidden.rename(self.path)
        os.close(fd)


def start_ticks():
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def boot_id():
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def save(segment, args):
    """Count a save of `args.total` bytes at `args.rate` bytes/s, in blocks over `args.threads` threads."""
    block = 1 << 20
    began = time.monotonic_ns()
    segment.set("process", 0, state=1)
    segment.operation(
        t_start_mono_ns=began,
        t_phase_mono_ns=began,
        bytes_total=int(args.total),
        block_size=block,
        threads=args.threads,
    )
    share = int(args.total) // args.threads
    for slot in range(args.threads):
        segment.thread(slot, tid=os.getpid() + slot)
    print("ready", flush=True)
    done = 0
    beats = 0
    while done < share:
        time.sleep(0.02)
        elapsed = (time.monotonic_ns() - began) / 1e9
        done = min(int(elapsed * args.rate / args.threads) // block * block, share)
        beats += 1
        segment.set("process", 0, heartbeat=beats)
        for slot in range(args.threads):
            segment.set(
                "thread", slot, bytes_ever=done, bytes_op=done, requests=done // block, busy_ns=int(elapsed * 9e8)
            )
            segment.set("thread", slot, last_progress_mono_ns=time.monotonic_ns())
    now = time.monotonic_ns()
    segment.set("operation", 0, phase=6, bytes_durable=int(args.total), t_end_mono_ns=now, t_phase_mono_ns=now)
    segment.record(
        0,
        bytes=int(args.total),
        dur_ns=now - began,
        t_start_real_ns=time.time_ns() - (now - began),
        label="step-7",
        step=7,
    )
    segment.set("process", 0, state=0, saves_ok=1, bytes_written=int(args.total))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e9)
    parser.add_argument("--total", type=float, default=1e12)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument(
        "--fork", action="store_true", help="leave a sleeping child behind and exit; its pid is printed"
    )
    args = parser.parse_args()
    Path(args.dir).mkdir(mode=0o700, exist_ok=True)
    segment = Published(args.dir, rank=args.rank, local_rank=args.rank, gpu=args.rank)
    if args.fork:
        child = os.fork()
        if child == 0:
            sys.stdout.close()
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        sys.stdin.read()
        os._exit(0)
    save(segment, args)
    time.sleep(60)


if __name__ == "__main__":
    main()
