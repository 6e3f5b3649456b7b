"""The parts of sentences: rates, ranks, durations and waits, in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import wait_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt_top.rows import NodeOp, Row

_NAMED: Final = 3
"""The most ranks that are named; more are only counted."""
WAITS: Final = {
    "disk": "waits for the disk",
    "memory": "waits for memory (mmap, page faults)",
    "source": "waits for the source",
    "limit": "waits for bandwidth_limit",
    "fsync": "waits for fsync",
    "peers": "waits for other ranks",
}
"""The wait of one rank, by `Row.wait_kind`."""
SYNCING: Final = ("FSYNC", "COMMIT")
"""States of a rank that has written all its bytes. Before that, it may wait for fsync between its files."""


def colon(*parts: str) -> str:
    """A colon and the parts that are not empty; nothing if all parts are empty."""
    words = ", ".join(part for part in parts if part)
    return f": {words}" if words else ""


def why(row: Row) -> str:
    """The wait of a rank, in words."""
    idle = sum(thread.state == "IDLE" for thread in row.threads)
    left = len(row.threads) - idle
    if row.state in SYNCING:
        return f"in fsync for {seconds(row.phase_s or 0.0)}"
    wait = WAITS.get(row.wait_kind, "")
    words = f"{wait}{share([row])}" if wait else ""
    if row.rate is not None and idle >= left > 0:
        only = f"only {left} of {text.count(len(row.threads), 'thread')} {'has' if left == 1 else 'have'} work left"
        return f"{only}, {words}" if words else only
    slow = [thread for thread in row.threads if thread.slow]
    if len(slow) == 1:
        thread = f"thread w{slow[0].index} at {text.rate(slow[0].rate)}"
        return f"{words}, {thread}" if words else thread
    return words


def waits(kind: str, rows: Sequence[Row]) -> str:
    """`waits for the disk`, or `wait for the disk` of several ranks; empty if they wait for nothing known."""
    return WAITS.get(kind, "").replace("waits", "waits" if len(rows) == 1 else "wait")


def brief(row: Row) -> str:
    """The wait of a rank and its share, `disk 98 %`; empty if the rank waits for nothing."""
    return wait_text(row.wait_kind, row.wait_share).replace("%", " %") if row.wait_kind else ""


def terse(row: Row) -> tuple[str, ...]:
    """`rank 6: 1.83/3.00 GB/s, disk 98 %`; after a fallback `...3.00, disk 98 %, threads!` or `..., disk, threads!`."""
    rate = speed(row, "/")
    if not row.fallback:
        return (f"{row.name}{colon(rate, brief(row))}",)
    rate = rate.removesuffix(" GB/s")
    return tuple(f"{row.name}{colon(rate, wait, f'{row.engine}!')}" for wait in (brief(row), row.wait_kind))


def hint(kind: str, op: str) -> str:
    """What the source may be, ` (checksum or copy)`; empty for any other kind of wait."""
    if kind != "source":
        return ""
    return " (copy, checksum or device)" if op == "save" else " (checksum or copy)"


def fallback(rows: Sequence[Row], lead: str = "", *, named: bool = True, past: bool = False) -> str:
    """`rank 6 runs threads, not io_uring (EPERM)`, for the first of the reasons, after `lead`; empty without one."""
    rows = [row for row in rows if row.fallback]
    if not rows:
        return ""
    row = rows[0]
    why = (row.engine, row.refused, row.fallback)
    same = [other for other in rows if (other.engine, other.refused, other.fallback) == why]
    verb = "ran" if past else "runs" if len(same) == 1 else "run"
    who = f"{names(same)} " if named else ""
    return f"{lead}{who}{verb} {instead(*why)}"


def instead(engine: str, refused: Sequence[str], why: str) -> str:
    """`threads, not io_uring (EPERM)`: the engine that runs, the refused feature, the errno name of the first cause."""
    if list(refused) == ["io_uring"]:
        return f"{engine}, not io_uring ({why})"
    return f"{engine} without {' and '.join(refused) or 'what was asked for'} ({why})"


HINTS: Final = {
    ("io_uring", "EPERM"): "seccomp or sysctl?",
    ("io_uring", "ENOSYS"): "not in this kernel?",
    ("io_uring", "ENOMEM"): "ulimit -l?",
    ("direct I/O", "EINVAL"): "not on this file system?",
    ("worker threads", "EAGAIN"): "ulimit -u?",
}
"""The usual cause of a refusal, by the refused feature and the errno."""


def speed(row: Row, of: str = " of ") -> str:
    """A rank's rate as in its row: the average if no byte moves at the moment."""
    now = row.rate if row.rate is not None else row.average
    if now is None:
        return ""
    rate, target = compared(now, row.target)
    return f"{rate}{of}{target} GB/s" if target else f"{rate} GB/s"


def compared(rate: float | None, target: float) -> tuple[str, str]:
    """Two rates to compare; the second is empty if there is no target."""
    return text.rates(rate, target) if target > 0 else (text.rate(rate), "")


def share(rows: Sequence[Row]) -> str:
    """Mean share of the time that ranks spend waiting, ` 80 %`; empty if unknown."""
    known = [row.wait_share for row in rows if row.wait_share is not None]
    return f" {round(sum(known) / len(known) * 100)} %" if known else ""


def names(rows: Sequence[Row]) -> str:
    """`rank 3`, `rank 1, rank 2`, `12 ranks`."""
    return some([row.name for row in rows])


def some(ranks: Sequence[str]) -> str:
    """The same words, from the names of ranks."""
    return ", ".join(ranks) if len(ranks) <= _NAMED else f"{len(ranks)} ranks"


def count(rows: Sequence[Row]) -> str:
    """`rank 3`, or `2 ranks`."""
    return rows[0].name if len(rows) == 1 else f"{len(rows)} ranks"


def still(op: NodeOp) -> list[str]:
    """The groups in which a save has found no change."""
    return [group for group, share in op.changed if share == 0]


def nothing(op: NodeOp) -> str:
    """The words for an operation without bytes to move, such as a save that linked every file."""
    linked = f", {text.size(op.linked)} GB linked" if op.linked else ""
    return f"nothing to {'write' if op.kind == 'save' else 'copy' if op.copies else 'read'}{linked}"


def moved(op: NodeOp) -> str:
    """`3.20 of 8.00 GB, 0.41 GB/s` of a copy."""
    now = op.rate if op.rate is not None else op.average
    return f"{text.size(op.done)} of {text.size(op.total)} GB, {text.rate(now)} GB/s"


def eta(op: NodeOp) -> str:
    """`ETA 00:13` of a running operation, or the reason why it is unknown."""
    return f"no ETA: {op.no_eta}" if op.no_eta else f"ETA {text.clock(op.eta_s)}"


def safe(op: NodeOp) -> str:
    """`last step safe at: local 12:03:04, remote 12:04:10`; empty if no drain or no save was seen."""
    at = {place: time.strftime("%H:%M:%S", time.localtime(one.real)) for place, one in op.safe.items()}
    local, remote = op.safe.get("local"), op.safe.get("remote")
    if local is None or not (remote or op.kind == "drain"):
        return ""
    there = "not yet"
    if remote:
        there = at["remote"] if remote.label == local.label else f"not yet ({remote.label} {at['remote']})"
    return f"last step safe at: local {at['local']}, remote {there}"


def seconds(span: float) -> str:
    """A duration, `12 s`, rounded down as in the rows."""
    words = text.ago(span)
    return f"{words[:-1]} {'min' if words[-1] == 'm' else words[-1]}"
