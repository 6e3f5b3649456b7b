"""What each worker thread of this process's last operation moved, from its own live counters.

``docs/telemetry.md`` is the authority for these bytes. They are for looking: where there are none, nothing fails.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_MAGIC, _MAJOR = b"FCKTTOP\0", 1
#: op_off, op_stride, op_count, thr_off, thr_stride, thr_count: at 0x20 of the header.
_TABLES = struct.Struct("<6I")
_OP_ID, _THREAD_OP_ID, _THREAD_BYTES = 0x08, 0x68, 0x78


def thread_bytes() -> list[int] | None:
    """Bytes that each thread of the last operation moved, or None without counters."""
    try:
        (_, _, words) = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        name = f"{os.getpid()}-{words.split()[19]}*.seg"
        for directory in _directories():
            for file in sorted(directory.glob(name)):
                return read(file.read_bytes())
    except (OSError, ValueError, IndexError, struct.error):
        pass
    return None


def _directories() -> list[Path]:
    if chosen := os.environ.get("FASTCKPT_TOP_DIR"):
        return [Path(chosen)]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(f"/dev/shm/fastckpt-{os.geteuid()}"), *([Path(runtime, "fastckpt")] if runtime else [])]  # noqa: S108


def read(segment: bytes) -> list[int] | None:
    """Bytes by thread of the last operation in a segment; None if there was none, or it is of another layout."""
    if segment[:8] != _MAGIC or struct.unpack_from("<H", segment, 8)[0] != _MAJOR:
        return None
    op_off, op_stride, op_count, thr_off, thr_stride, thr_count = _TABLES.unpack_from(segment, 0x20)

    def word(at: int) -> int:
        (value,) = struct.unpack_from("<Q", segment, at)
        return int(value)

    last = max((word(op_off + number * op_stride + _OP_ID) for number in range(op_count)), default=0)
    slots = [thr_off + number * thr_stride for number in range(thr_count)]
    return [word(at + _THREAD_BYTES) for at in slots if last and word(at + _THREAD_OP_ID) == last] or None
