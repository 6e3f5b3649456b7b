"""A made-up node: 8 ranks of 4 threads that save and load; one rank has a fallback, one a slow thread.

Each snapshot depends only on the time.
"""

from __future__ import annotations

import errno
import math
import time
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from fastckpt_top.segment import (
    FEATURE_HEARTBEAT,
    FLAG_DIRECT,
    FLAG_FALLBACK,
    FLAG_NO_RING,
    Header,
    History,
    Kind,
    Operation,
    Phase,
    Process,
    Thread,
)
from fastckpt_top.snapshot import Proc, Snapshot, proc_key

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS: Final = 8
THREADS: Final = 4
BYTES: Final = 39_900_000_000
"""Bytes of each rank's checkpoint."""
BLOCK: Final = 16 << 20
HOST: Final = "gpu07"
TARGET_SAVE: Final = 3_000_000_000
TARGET_LOAD: Final = 4_000_000_000
_CYCLE_S: Final = 64.0
_LOAD_AT_S: Final = 40.0
_BEGIN_S: Final = 9.0
"""Where in the cycle the demonstration begins: in the middle of a save."""
_PLAN_S: Final = 0.3
_COMMIT_S: Final = 0.15
_SAVE_BPS: Final = (3.12e9, 3.09e9, 3.04e9, 3.01e9, 3.06e9, 2.62e9, 1.82e9, 3.15e9)
_LOAD_BPS: Final = (4.9e9, 4.8e9, 4.8e9, 4.7e9, 4.9e9, 4.4e9, 3.7e9, 4.9e9)
_FALLBACK_RANK: Final = 6
_SLOW: Final = (5, 2)
"""The rank and thread with a slow disk."""
_LATENCY: Final = (0, 0, 0, 2, 9, 40, 160, 420, 280, 70, 16, 3, 0, 0, 0, 0)
"""Requests per thousand, by latency bucket."""
_BEFORE_S: Final = 25.0
"""The time that each earlier operation adds to the growing totals; at least as long as any operation."""
_SYNC_BEFORE_S: Final = 2.0
_LATENCY_BEFORE_NS: Final = 300 * 10**9
_PAST: Final = 6
"""Cycles of history before the beginning."""


class DemoSource:
    """Snapshots of the made-up node.

    Args:
        mono: Monotonic clock, seconds; the demonstration begins at its first value.
        real: Clock, seconds since the epoch.
        begin: Seconds into the cycle of 64 s at which it begins.
    """

    def __init__(
        self,
        mono: Callable[[], float] = time.monotonic,
        real: Callable[[], float] = time.time,
        begin: float = _BEGIN_S,
    ) -> None:
        self._mono = mono
        self._real = real
        self._zero = mono() - begin
        self._real_zero = real() - begin
        self._begin = begin

    def poll(self) -> Snapshot:
        """The state of the node now."""
        return self.at(self._mono())

    def past(self, seconds: float, interval: float) -> list[Snapshot]:
        """The records that a longer observation would have seen, so that the first screen is not empty.

        Args:
            seconds: How many seconds before the present the records begin, at most to the beginning of the cycle.
            interval: Seconds between two snapshots.
        """
        now = self._mono()
        count = int(min(seconds, self._begin) / interval)
        return [self.at(now - index * interval) for index in range(count, 0, -1)]

    def at(self, mono: float) -> Snapshot:
        """The state of the node at a moment.

        Args:
            mono: Monotonic clock, seconds.
        """
        t = mono - self._zero
        procs = tuple(self._proc(rank, t) for rank in range(RANKS))
        return Snapshot(mono, self._real_zero + t, HOST, procs, (), ("demo",))

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _proc(self, rank: int, t: float) -> Proc:
        header = _header(rank)
        cycle, tau = divmod(t, _CYCLE_S)
        operations, threads = [], []
        for kind, begin in ((Kind.SAVE, 0.0), (Kind.LOAD, _LOAD_AT_S)):
            if tau >= begin:
                op, rows = self._operation(kind, rank, int(cycle), tau - begin)
                operations.append(op)
                threads = rows
        ended = [record for record in _past(rank, int(cycle)) if record.t_start_real_ns + record.dur_ns <= t * 1e9]
        history = tuple(_shifted(record, self._real_zero) for record in ended)
        process = Process(
            heartbeat=int(t * 4),
            state=1 if any(op.running for op in operations) else 0,
            bytes_written=sum(record.bytes for record in ended if record.kind == Kind.SAVE),
            bytes_read=sum(record.bytes for record in ended if record.kind == Kind.LOAD),
            saves_ok=sum(record.kind == Kind.SAVE for record in ended),
            loads_ok=sum(record.kind == Kind.LOAD for record in ended),
            hist_head=len(ended),
            threads_used=THREADS,
            target_save=TARGET_SAVE,
            target_load=TARGET_LOAD,
        )
        path = f"demo/{header.pid}.seg"
        return Proc(
            proc_key(header),
            path,
            header,
            process,
            tuple(operations),
            tuple(threads),
            history,
            alive=True,
            same_clock=True,
            touched=self._real_zero + t,
            state="S" if process.state else "",
            user="mira",
        )

    def _operation(self, kind: Kind, rank: int, cycle: int, tau: float) -> tuple[Operation, list[tuple[int, Thread]]]:
        durations = [_duration(kind, rank, index) for index in range(THREADS)]
        write_s = max(durations)
        total_s = _seconds(kind, rank)
        start = self._zero + cycle * _CYCLE_S + (0.0 if kind == Kind.SAVE else _LOAD_AT_S)
        number = op_number(kind, cycle)
        save = kind == Kind.SAVE
        sync_at, commit_at = _PLAN_S + write_s, total_s - _COMMIT_S
        steps = [(0.0, Phase.PLAN), (_PLAN_S, Phase.WRITE if save else Phase.READ)]
        if save:
            steps += [(sync_at, Phase.FSYNC), (commit_at, Phase.COMMIT)]
        steps.append((total_s, Phase.DONE))
        since, phase = [step for step in steps if tau >= step[0]][-1]
        threads = []
        for index, duration in enumerate(durations):
            share = min(max((tau - _PLAN_S) / duration, 0.0), 1.0)
            threads.append((index, _thread(kind, rank, index, number, share, start, tau, durations)))
        fell = rank == _FALLBACK_RANK
        step = step_of(cycle)
        op = Operation(
            seq=2,
            op_id=number,
            kind=kind,
            phase=phase,
            engine=2 if fell else 1,
            flags=FLAG_DIRECT | (FLAG_FALLBACK | FLAG_NO_RING if fell else 0),
            fallback_errno=errno.EPERM if fell else 0,
            threads=THREADS,
            bytes_total=BYTES,
            bytes_durable=BYTES if phase in (Phase.COMMIT, Phase.DONE) else 0,
            files_total=8,
            files_done=8 if phase in (Phase.FSYNC, Phase.COMMIT, Phase.DONE) else int(8 * min(tau / sync_at, 0.99)),
            t_start_mono_ns=int(start * 1e9),
            t_phase_mono_ns=int((start + since) * 1e9),
            t_end_mono_ns=int((start + total_s) * 1e9) if phase == Phase.DONE else 0,
            st_dev=0x10301,
            step=step,
            block_size=BLOCK,
            queue_depth=8,
            target=TARGET_SAVE if save else TARGET_LOAD,
            label=f"step-{step}",
            path=f"/mnt/nvme{rank % 4}/ckpt/llama70b/step-{step}",
        )
        return op, threads


def step_of(cycle: int) -> int:
    """Training step of a cycle's checkpoint."""
    return 11_800 + 200 * cycle


def op_number(kind: Kind, cycle: int) -> int:
    """Operation number of a cycle's save or load, as if the processes had run since the first cycle of the history."""
    return 2 * (cycle + _PAST) + (1 if kind == Kind.SAVE else 2)


def _duration(kind: Kind, rank: int, thread: int) -> float:
    rate = (_SAVE_BPS if kind == Kind.SAVE else _LOAD_BPS)[rank] / THREADS
    slow = 0.72 if (rank, thread) == _SLOW else 1.0
    return BYTES / THREADS / (rate * slow * (1.0 - 0.012 * thread))


def _seconds(kind: Kind, rank: int) -> float:
    """Duration of a rank's operation."""
    write_s = max(_duration(kind, rank, index) for index in range(THREADS))
    return _PLAN_S + write_s + (0.9 + 0.05 * rank + _COMMIT_S if kind == Kind.SAVE else 0.0)


def _thread(
    kind: Kind, rank: int, index: int, number: int, share: float, start: float, tau: float, durations: list[float]
) -> Thread:
    waves = 5 + (rank + 2 * index) % 4
    angle = 2 * math.pi * waves
    smooth = share + 0.06 * math.sin(angle * share) / angle
    moving = 0.0 < share < 1.0
    part = BYTES // THREADS
    done = part if share >= 1.0 else min(int(smooth * part) // BLOCK * BLOCK, part)
    before = (number - 1) * part
    requests = (before + done) // BLOCK
    latency_ns = int(8 * BLOCK / (part / durations[index]) * 1e9)
    write_s = max(durations)
    synced_s = max(tau - _PLAN_S - write_s, 0.0) if kind == Kind.SAVE else 0.0
    sync_s = max(_seconds(kind, rank) - _COMMIT_S - _PLAN_S - write_s, 0.0)
    syncing = 0.0 < synced_s < sync_s
    active_s = min(max(tau - _PLAN_S, 0.0), durations[index])
    source = 0.55 if rank == _SLOW[0] and index == 0 else 0.01
    return Thread(
        bytes_ever=before + done,
        requests=requests,
        busy_ns=int(((number - 1) * _BEFORE_S + active_s * (1 - source)) * 0.985e9),
        source_wait_ns=int(((number - 1) * _BEFORE_S + active_s) * source * 1e9),
        last_progress_mono_ns=int((start + min(tau, _PLAN_S + durations[index])) * 1e9),
        in_flight=8 - (rank + index + int(tau * 2)) % 2 if moving else 0,
        state=2 if moving else 3 if syncing else 0,
        latency_sum_ns=(number - 1) * _LATENCY_BEFORE_NS + done // BLOCK * latency_ns,
        latency_max_ns=latency_ns * 3,
        fsync_wait_ms=int(((number - 1) * _SYNC_BEFORE_S + min(synced_s, sync_s)) * 1e3),
        tid=5400 + 10 * rank + index,
        cpu=12 * rank + index,
        op_id=number,
        bytes_op=done,
        latency_hist=tuple(requests * count // 1000 for count in _LATENCY),
    )


@lru_cache(maxsize=RANKS)
def _header(rank: int) -> Header:
    return Header(
        major=1,
        features=FEATURE_HEARTBEAT,
        generation=1,
        pid=5327 + 3 * rank,
        uid=1000,
        start_ticks=100_000 + rank,
        pid_ns=4026531836,
        boot_id="00112233445566778899aabbccddeeff",
        rank=rank,
        local_rank=rank,
        world=RANKS,
        local_world=RANKS,
        gpu=rank,
        version="0.1.0",
        job="llama70b",
        launch=1,
    )


@lru_cache(maxsize=4 * RANKS)
def _past(rank: int, cycle: int) -> tuple[History, ...]:
    """Records up to the end of `cycle`; their times count from the beginning of cycle 0."""
    records = []
    for number in range(-_PAST, cycle + 1):
        for kind, begin in ((Kind.SAVE, 0.0), (Kind.LOAD, _LOAD_AT_S)):
            if kind == Kind.LOAD and number % 2:
                continue
            fell = rank == _FALLBACK_RANK and number >= 0
            healthy = _seconds(kind, 0) * (0.92 + 0.06 * (number % 3))  # before one rank fell back
            seconds = _seconds(kind, rank) if number >= 0 else healthy
            records.append(
                History(
                    op_id=op_number(kind, number),
                    kind=kind,
                    result=1,
                    engine=2 if fell else 1,
                    threads=THREADS,
                    bytes=BYTES,
                    t_start_real_ns=int((number * _CYCLE_S + begin) * 1e9),
                    dur_ns=int(seconds * 1e9),
                    sync_ns=int(1.1e9) if kind == Kind.SAVE else 0,
                    peak_bps=int(BYTES / seconds * 1.1),
                    p50_us=5100,
                    p99_us=11_800,
                    step=step_of(number),
                    flags=FLAG_DIRECT | (FLAG_FALLBACK | FLAG_NO_RING if fell else 0),
                    fallback_errno=errno.EPERM if fell else 0,
                    label=f"step-{step_of(number)}",
                    path=f"/mnt/nvme{rank % 4}/ckpt/llama70b/step-{step_of(number)}",
                )
            )
    return tuple(sorted(records, key=lambda record: record.t_start_real_ns))


@lru_cache(maxsize=1024)
def _shifted(record: History, real_zero: float) -> History:
    return replace(record, t_start_real_ns=record.t_start_real_ns + int(real_zero * 1e9))
