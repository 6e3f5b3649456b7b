"""JSON lines: one schema (schema.json) for --json, --record and --replay.

A line is a `header` or a `tick`. A tick has the figures for users (`node`, `jobs`, `ops`, `ranks`, `events`: in base
units, null if unknown) and those for a replay (`procs`: the counters as they were in the segments, as arrays in the
order of docs/telemetry.md). Within `fastckpt-top/1` keys and array elements are only ever added.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TextIO

from fastckpt_top import __version__
from fastckpt_top.groups import remembered
from fastckpt_top.rows import Event, Job, NodeOp, Row, Sentence, ThreadRow, Verdict
from fastckpt_top.segment import Header, History, Operation, Process, T, Thread
from fastckpt_top.text import clean

if TYPE_CHECKING:
    from fastckpt_top.model import Model
    from fastckpt_top.snapshot import Proc
    from fastckpt_top.targets import Target

SCHEMA: Final = "fastckpt-top/1"
Json = dict[str, Any]

_FIELDS: Final[dict[type, dict[str, Any]]] = {
    kind: {one.name: one.default for one in fields(kind)} for kind in (Header, Process, Operation, Thread, History)
}
"""For each kind of record, its fields by name, each with a default that has the type of all its values."""


def header_line(model: Model) -> Json:
    """The first line of a stream or recording."""
    target = model.target
    return {
        "schema": SCHEMA,
        "kind": "header",
        "version": __version__,
        "host": model.node.host,
        "t": model.real,
        "gpus": model.gpus,
        "target": None if target is None else _target(target),
    }


@dataclass(slots=True)
class Sent:
    """Records that a stream has already sent: headers, history records and dead processes by key, events by number."""

    headers: set[str]
    dead: set[str]
    history: dict[str, frozenset[int]]
    events: int


class Ticks:
    """Makes the ticks of one stream, each with its new records.

    A built tick counts as sent only after `commit`, so that a recorder can drop it.
    """

    def __init__(self) -> None:
        self._sent = Sent(set(), set(), {}, 0)

    def build(self, model: Model) -> tuple[Json, Sent]:
        """A tick with the current state of the model.

        Returns:
            The line, and the records to `commit` when it has been written.
        """
        sent = Sent(set(self._sent.headers), set(self._sent.dead), dict(self._sent.history), model.event_count)
        snapshot = model.snapshot
        procs = [] if snapshot is None else [_proc(proc, sent) for proc in snapshot.procs]
        new = min(model.event_count - self._sent.events, len(model.events))
        node = model.node
        tick = {
            "schema": SCHEMA,
            "kind": "tick",
            "t": model.real,
            "mono": model.mono,
            "node": {
                "host": node.host,
                "ranks": node.ranks,
                "alive": node.alive,
                "gpus": node.gpus,
                "job": node.job,
                "save_Bps": _number(node.save_rate),
                "load_Bps": _number(node.load_rate),
                "target": _target(node.target),
            },
            "jobs": [_job(job) for job in model.jobs],
            "ops": [_node_op(op) for op in model.ops],
            "ranks": [_rank(row) for row in model.rows],
            "events": [_event(event) for event in list(model.events)[len(model.events) - new :]],
            "problems": [{"path": path, "reason": reason} for path, reason in model.problems],
            "devices": {} if snapshot is None else {str(number): name for number, name in snapshot.devices.items()},
            "procs": procs,
        }
        return tick, sent

    def commit(self, sent: Sent) -> None:
        """Count a built tick as sent."""
        self._sent = sent

    def next(self, model: Model) -> Json:
        """Build and commit."""
        tick, sent = self.build(model)
        self.commit(sent)
        return tick


class JsonWriter:
    """Writes ticks to a stream, a header first.

    Args:
        out: The stream, which is flushed after each line.
        header: Whether to write the header line.
    """

    def __init__(self, out: TextIO, *, header: bool = True) -> None:
        self._out = out
        self._header = header
        self._ticks = Ticks()

    def write(self, model: Model) -> None:
        """Write the current state of the model."""
        if self._header:
            self._header = False
            self._out.write(dumps(header_line(model)))
        self._out.write(dumps(self._ticks.next(model)))
        self._out.flush()


def dumps(line: Json) -> str:
    """One line, ASCII, with its newline. Never NaN or Infinity."""
    return json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"


def proc_values(
    proc: Json, headers: dict[str, Header]
) -> tuple[Header, Process, list[Operation], list[tuple[int, Thread]], list[History]]:
    """Read a process of a tick's `procs` back.

    Args:
        proc: The object.
        headers: Headers seen so far, by process key; a new one is added.

    Raises:
        KeyError: An entry is missing.
        TypeError: A value has the wrong type, or an array is too short.
        ValueError: A value is not a number.
        OverflowError: A number is infinite.
    """
    key = _text(proc["key"])
    if proc.get("header") is not None:
        headers[key] = _made(Header, [proc["header"][name] for name in _FIELDS[Header]])
    process = _made(Process, proc["process"])
    operations = [_made(Operation, values) for values in proc["operations"]]
    threads = [(int(slot), _made(Thread, values)) for slot, *values in proc["threads"]]
    history = [_made(History, values) for values in proc["history"]]
    return headers[key], process, operations, threads, history


def _made(kind: type[T], values: list[Any]) -> T:
    """An entry of a table, each value of its type. Elements that a later minor version added are left out."""
    known = _FIELDS[kind]
    if len(values) < len(known):
        raise TypeError(f"expected {len(known)} values, found {len(values)}")
    made: Json = {}
    for (name, default), value in zip(known.items(), values, strict=False):
        if isinstance(default, tuple):
            made[name] = tuple(int(count) for count in value[: len(default)])
            if len(made[name]) < len(default):
                raise TypeError("histogram cut short")
        else:
            made[name] = _text(value) if isinstance(default, str) else int(value)
    return kind(**made)


def _values(entry: Any) -> list[Any]:
    return [getattr(entry, name) for name in _FIELDS[type(entry)]]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return clean(value)


def _proc(proc: Proc, sent: Sent) -> Json:
    if proc.key in sent.dead:
        return {"key": proc.key, "same": True}
    if not proc.alive:
        sent.dead.add(proc.key)
    header = None
    if proc.key not in sent.headers:
        sent.headers.add(proc.key)
        header = asdict(proc.header)
    given = sent.history.get(proc.key, frozenset())
    history = [record for record in proc.history if record.op_id not in given]
    if history:
        sent.history[proc.key] = remembered(given, proc)
    return {
        "key": proc.key,
        "path": proc.path,
        "alive": proc.alive,
        "same_clock": proc.same_clock,
        "touched": proc.touched,
        "state": proc.state,
        "user": proc.user,
        "header": header,
        "process": _values(proc.process),
        "operations": [_values(op) for op in proc.operations],
        "threads": [[slot, *_values(thread)] for slot, thread in proc.threads],
        "history": [_values(record) for record in history],
    }


def _target(target: Target) -> Json:
    return {"save_Bps": target.save, "load_Bps": target.load, "name": target.name, "source": target.source}


def _sentence(sentence: Sentence | None) -> Json | None:
    return None if sentence is None else {"level": sentence.level, "text": sentence.words[0]}


def _job(job: Job) -> Json:
    return {
        "key": job.key,
        "name": job.name,
        "pid": job.pid,
        "user": job.user,
        "ranks": job.ranks,
        "alive": job.alive,
        "gpus": job.gpus,
        "target": _target(job.target),
        "active": job.active,
        "safe": {
            place: {"label": one.label, "step": one.step, "t": _number(one.real)} for place, one in job.safe.items()
        },
        "sentence": _sentence(job.sentence),
    }


def _node_op(op: NodeOp) -> Json:
    return {
        "job": op.job_key,
        "op": op.kind,
        "label": op.label,
        "step": op.step,
        "running": op.running,
        "phase": op.phase,
        "ranks": op.ranks,
        "missing": list(op.missing),
        "gpus": op.gpus,
        "bytes": op.total,
        "done": op.done,
        "linked": op.linked,
        "Bps": _number(op.rate),
        "avg_Bps": _number(op.average),
        "peak_Bps": _number(op.peak),
        "target_Bps": _number(op.target),
        "target": op.target_name,
        "progress": _number(op.progress, 4),
        "eta_s": _number(op.eta_s),
        "no_eta": op.no_eta or None,
        "elapsed_s": _number(op.elapsed_s),
        "t_start": round(op.started_real, 3),
        "last": op.last or None,
        "verdict": _verdict(op.verdict),
        "failed": op.failed,
        "changed": {group: _number(share, 6) for group, share in op.changed},
        "sentence": _sentence(op.sentence),
    }


def _rank(row: Row) -> Json:
    return {
        "job": row.job_key,
        "user": row.user,
        "process_state": row.process_state or None,
        "rank": row.rank,
        "gpu": row.gpu,
        "pid": row.pid,
        "alive": row.alive,
        "op": row.kind or None,
        "label": row.label,
        "step": row.step,
        "running": row.running,
        "state": row.state.lower(),
        "phase_s": _number(row.phase_s),
        "stalled_s": _number(row.stalled_s),
        "engine": row.engine or None,
        "direct": row.direct,
        "fallback": row.fallback or None,
        "refused": list(row.refused),
        "async": row.asynchronous,
        "Bps": _number(row.rate),
        "avg_Bps": _number(row.average),
        "target_Bps": _number(row.target),
        "bytes": row.total,
        "done": row.done,
        "durable": row.durable,
        "progress": _number(row.progress, 4),
        "eta_s": _number(row.eta_s),
        "elapsed_s": _number(row.elapsed_s),
        "verdict": _verdict(row.verdict),
        "straggler": row.straggler,
        "wait": row.wait or None,
        "wait_kind": row.wait_kind or None,
        "wait_share": _number(row.wait_share, 4),
        "error": row.error or None,
        "lat_p50_us": _number(None if row.p50_s is None else row.p50_s * 1e6),
        "lat_p99_us": _number(None if row.p99_s is None else row.p99_s * 1e6),
        "path": row.path,
        "threads": [_thread(thread) for thread in row.threads],
    }


def _thread(thread: ThreadRow) -> Json:
    return {
        "i": thread.index,
        "tid": thread.tid,
        "cpu": thread.cpu,
        "state": thread.state.lower(),
        "Bps": _number(thread.rate),
        "avg_Bps": _number(thread.average),
        "target_Bps": _number(thread.target),
        "bytes": thread.done,
        "inflight": thread.in_flight,
        "lat_us": _number(None if thread.latency_s is None else thread.latency_s * 1e6),
        "busy": _number(thread.waits.get("disk"), 4),
        "source_wait": _number(thread.waits.get("source"), 4),
        "limit_wait": _number(thread.waits.get("limit"), 4),
        "fsync_wait": _number(thread.waits.get("fsync"), 4),
        "peers_wait": _number(thread.waits.get("peers"), 4),
        "slow": thread.slow,
    }


def _event(event: Event) -> Json:
    return {"t": round(event.real, 3), "level": event.level, "text": event.text, "job": event.job}


def _verdict(verdict: Verdict) -> str | None:
    return None if verdict is Verdict.QUIET else verdict.value


def _number(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or value != value or value in (float("inf"), float("-inf")) else round(value, digits)  # noqa: PLR0124
