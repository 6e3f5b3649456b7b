"""Processes whose state the tests set by hand, and looks at them: no clock runs."""

from __future__ import annotations

from dataclasses import replace

from fastckpt_top import demo as demonstration
from fastckpt_top.segment import Phase
from fastckpt_top.snapshot import Snapshot

GB = 10**9


class Rank:
    """One process whose state a test sets by hand."""

    def __init__(self, rank=0, threads=2):
        base = demonstration.DemoSource(lambda: 0.0, lambda: 0.0, 9.0).at(0.0).procs[rank]
        self.proc = replace(
            base, operations=(), threads=(), history=(), process=replace(base.process, target_save=0, target_load=0)
        )
        self.base = base
        self.count = threads

    def op(self, done=0, phase=Phase.WRITE, total=10 * GB, start=0.0, end=0.0, slot=0, **values):
        op = replace(
            self.base.operations[0],
            op_id=slot + 1, phase=phase, bytes_total=total, t_start_mono_ns=int(start * 1e9),
            t_phase_mono_ns=int(start * 1e9), t_end_mono_ns=int(end * 1e9),
            flags=0, fallback_errno=0, target=0, label="step-1", step=1, **values,
        )  # fmt: skip
        others = tuple(o for o in self.proc.operations if o.op_id != op.op_id)
        threads = tuple(t for t in self.proc.threads if t[1].op_id != op.op_id) + tuple(
            (
                slot * 8 + i,
                replace(
                    self.base.threads[0][1], op_id=op.op_id, bytes_op=done // self.count, requests=done // (4 << 20)
                ),
            )
            for i in range(self.count)
        )
        self.proc = replace(self.proc, operations=(*others, op), threads=threads)
        return self

    def of(self, **values):
        """Make it another process, with these values in its header."""
        key = values.pop("key", None) or f"{self.proc.key}-{values.get('pid', '')}"
        self.proc = replace(self.proc, key=key, header=replace(self.proc.header, **values))
        return self

    def named(self, label, step=-1):
        """Give its operations another label and step."""
        self.proc = replace(
            self.proc, operations=tuple(replace(op, label=label, step=step) for op in self.proc.operations)
        )
        return self

    def record(self, start, seconds, label="step-1", step=1, op_id=1, **values):
        """Add the record of an ended operation to its history; `start` counts from the epoch of `look`."""
        record = replace(
            demonstration._past(0, 0)[0], op_id=op_id, label=label, step=step, bytes=GB,
            t_start_real_ns=int((1e9 + start) * 1e9), dur_ns=int(seconds * 1e9),
            **({"result": 1, "kind": 1} | values),
        )  # fmt: skip
        self.proc = replace(self.proc, history=(*self.proc.history, record))
        return self

    def beat(self, heartbeat):
        self.proc = replace(self.proc, process=replace(self.proc.process, heartbeat=heartbeat))
        return self

    def thread(self, index, **values):
        slot, old = self.proc.threads[index]
        changed = list(self.proc.threads)
        changed[index] = (slot, replace(old, **values))
        self.proc = replace(self.proc, threads=tuple(changed))
        return self


def look(model, now, *ranks):
    model.update(Snapshot(now, 1e9 + now, "host", tuple(rank.proc for rank in ranks)))
    return model


def joined(rank, number, group=77, waits_for=None, size=3):
    """Make the rank save in a process group with others."""
    waits = 0 if waits_for is None else waits_for + 1
    process = replace(rank.proc.process, group=group, group_rank=number, group_size=size, waits_for=waits)
    rank.proc = replace(rank.proc, process=process)
    return rank


def moving(rank, now, rate, wait="disk", share=0.97, *, start=0.0, **values):
    """Make a rank have moved bytes at `rate` since `start`, while its threads waited for `share` of the time."""
    elapsed = now - start
    rank.op(int(rate * elapsed), start=start, **({"total": 100 * GB} | values))
    for index in range(rank.count):
        moved = int(rate * elapsed) // rank.count
        rank.thread(
            index, bytes_op=moved, bytes_ever=moved, requests=moved // (4 << 20), state=5 if wait == "limit" else 2,
            busy_ns=int((share if wait == "disk" else 0.1) * elapsed * 1e9),
            source_wait_ns=int((share if wait == "source" else 0.0) * elapsed * 1e9),
            limit_wait_ms=int((share if wait == "limit" else 0.0) * elapsed * 1e3),
            latency_sum_ns=0, last_progress_mono_ns=int(now * 1e9),
        )  # fmt: skip
    return rank.beat(int(now * 10))
