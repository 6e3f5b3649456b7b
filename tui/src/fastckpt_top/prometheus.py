"""A file for node_exporter's textfile collector: no time stamps, base units, one family after another."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastckpt_top import console
from fastckpt_top.groups import errno_name
from fastckpt_top.rows import LEVELS
from fastckpt_top.segment import (
    COPIES,
    ENGINES,
    FLAG_FALLBACK,
    HISTOGRAM_BASE_US,
    HISTOGRAM_BUCKETS,
    KINDS,
    PHASES,
    RESULTS,
    Kind,
    Phase,
)
from fastckpt_top.tracks import MOVING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fastckpt_top.model import Model
    from fastckpt_top.rows import Job
    from fastckpt_top.segment import History, Operation
    from fastckpt_top.snapshot import Proc, Snapshot

_FAMILIES: Final = {
    "fastckpt_build_info": ("gauge", "Version of fastckpt and of its segment layout."),
    "fastckpt_process_up": ("gauge", "1 while the process lives; there is no sample once it has ended."),
    "fastckpt_process_died": (
        "gauge",
        "1 if the process died in an operation and no other has its place, 0 while it lives or if it ended otherwise.",
    ),
    "fastckpt_io_bytes_total": ("counter", "Bytes completed by the worker threads."),
    "fastckpt_io_requests_total": ("counter", "Requests completed by the worker threads."),
    "fastckpt_io_errors_total": ("counter", "Requests that failed."),
    "fastckpt_io_busy_seconds_total": ("counter", "Time of the worker threads with a request in flight."),
    "fastckpt_source_wait_seconds_total": ("counter", "Time of the worker threads waiting for data to write."),
    "fastckpt_io_latency_seconds": ("histogram", "Latency of requests."),
    "fastckpt_operation_phase": ("gauge", "1 for the phase that a running operation is in, 0 for the others."),
    "fastckpt_operation_size_bytes": ("gauge", "Bytes of the running operation."),
    "fastckpt_operation_done_bytes": ("gauge", "Bytes completed of the running operation."),
    "fastckpt_operation_bytes_per_second": ("gauge", "Bytes per second of the running operation, over a second."),
    "fastckpt_operation_eta_seconds": ("gauge", "Seconds until the running operation ends, where they are known."),
    "fastckpt_operations_total": ("counter", "Operations ended; copies, drains and fetches are one."),
    "fastckpt_saved_bytes_total": ("counter", "Bytes of all saves ended."),
    "fastckpt_loaded_bytes_total": ("counter", "Bytes of all loads and verifies ended."),
    "fastckpt_copied_bytes_total": ("counter", "Bytes of all copies, drains and fetches ended."),
    "fastckpt_last_safe_timestamp_seconds": ("gauge", "When the last step became durable here, or at the remote."),
    "fastckpt_last_operation_duration_seconds": ("gauge", "Duration of the last operation ended."),
    "fastckpt_last_operation_bytes": ("gauge", "Bytes of the last operation ended."),
    "fastckpt_last_operation_timestamp_seconds": ("gauge", "When the last operation ended."),
    "fastckpt_last_operation_ok": ("gauge", "1 if the last operation ended well."),
    "fastckpt_target_bytes_per_second": ("gauge", "What a job should reach: per GPU, times its GPUs."),
    "fastckpt_engine_fallback": ("gauge", "1 while an operation runs on another engine than was wanted."),
    "fastckpt_job_level": (
        "gauge",
        "1 for what a job's sentence is (info, warn: slow, bad: broken), 0 for the others.",
    ),
}
_PHASES: Final = tuple(PHASES[phase] for phase in (Phase.PLAN, Phase.STAGE, *MOVING, Phase.FSYNC, Phase.COMMIT))

_Labels = tuple[tuple[str, str], ...]


class Prometheus:
    """Rewrites the file at each tick, by rename.

    Args:
        path: The file; node_exporter requires the suffix `.prom`.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, model: Model) -> None:
        """Replace the file.

        Raises:
            OSError: The file cannot be written.
        """
        console.replace(Path(self._path), render(model))

    def close(self) -> None:
        """Do nothing: the file keeps the last state."""


class _Page:
    """Samples by family, in the order of `_FAMILIES`."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, _Labels], float]] = defaultdict(dict)

    def add(self, family: str, labels: dict[str, str], value: float, suffix: str = "") -> None:
        """Add to a sample; equal labels are summed, because a series may occur only once."""
        key = (family + suffix, tuple(labels.items()))
        self._samples[family][key] = self._samples[family].get(key, 0.0) + value

    def put(self, family: str, labels: dict[str, str], value: float) -> None:
        """Set a sample."""
        self._samples[family][family, tuple(labels.items())] = value

    def text(self) -> str:
        """The page."""
        lines = []
        for family, (kind, help_text) in _FAMILIES.items():
            samples = self._samples.get(family)
            if not samples:
                continue
            lines += [f"# HELP {family} {help_text}", f"# TYPE {family} {kind}"]
            for (name, labels), value in samples.items():
                inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
                lines.append(f"{name}{{{inner}}} {_value(value)}" if inner else f"{name} {_value(value)}")
        return "\n".join(lines) + "\n"


def render(model: Model) -> str:
    """The page of a model.

    Returns:
        Prometheus text format 0.0.4, with its final newline.
    """
    page = _Page()
    snapshot = model.snapshot
    if snapshot is None:
        return page.text()
    names = _names(snapshot, model.job_of)
    died = {row.proc_key for row in model.rows if row.state == "DEAD"}
    who = {proc.key: _who(proc, names[proc.key]) for proc in snapshot.procs}
    for proc in _one_per_rank(snapshot, names, died):
        _process(page, proc, who[proc.key])
    for row in model.rows:
        if row.running and row.alive:
            labels = {**who[row.proc_key], "op": row.kind}
            page.put("fastckpt_operation_bytes_per_second", labels, row.rate or 0.0)
            if row.eta_s is not None:
                page.put("fastckpt_operation_eta_seconds", labels, row.eta_s)
    for job in model.jobs:
        _job(page, job, next((names[key] for key, other in model.job_of.items() if other == job.key), job.name))
    return page.text()


def _names(snapshot: Snapshot, job_of: Mapping[str, str]) -> dict[str, str]:
    """The label of each process's job: its name, or its key if another job of this name is alive, too."""
    living: dict[str, set[str]] = defaultdict(set)
    for proc in snapshot.procs:
        if proc.alive:
            living[proc.header.job].add(job_of[proc.key])
    return {
        proc.key: job_of[proc.key] if len(living[proc.header.job]) > 1 else proc.header.job for proc in snapshot.procs
    }


def _one_per_rank(snapshot: Snapshot, names: Mapping[str, str], died: Collection[str]) -> list[Proc]:
    """Live processes, and ended ones whose place no process has taken: a restarted rank is one series, not two.

    A place is the set of labels that distinguish the series. A restarted job is another job, with the same labels.
    Without a rank, each process has a separate place; among ended processes, only those shown as `died` have one.
    """

    def place(proc: Proc) -> tuple[str, int, int]:
        return names[proc.key], proc.rank, proc.header.gpu if proc.rank >= 0 else proc.header.pid

    living = [proc for proc in snapshot.procs if proc.alive]
    places = {place(proc) for proc in living}
    ended: dict[tuple[str, int, int], Proc] = {}
    for proc in snapshot.procs:
        if not proc.alive and (proc.rank >= 0 or proc.key in died) and place(proc) not in places:
            other = ended.get(place(proc))
            if other is None or other.header.mono0_ns < proc.header.mono0_ns:
                ended[place(proc)] = proc
    return sorted([*living, *ended.values()], key=lambda proc: (proc.rank, proc.header.pid))


def _who(proc: Proc, job: str) -> dict[str, str]:
    """The labels of a process's series. `job` is reserved: Prometheus gives that label to its targets."""
    header = proc.header
    labels = {"job_name": job}
    if proc.rank < 0:  # nothing else distinguishes these processes
        return labels | {"rank": "", "gpu": str(header.gpu) if header.gpu >= 0 else "", "pid": str(header.pid)}
    return labels | {"rank": str(proc.rank), "gpu": str(header.gpu) if header.gpu >= 0 else ""}


def _job(page: _Page, job: Job, name: str) -> None:
    labels = {"job_name": name}
    for kind, value in ((Kind.SAVE, job.target.save), (Kind.LOAD, job.target.load)):
        wanted = {**labels, "op": KINDS[kind], "tier": job.target.name}
        page.put("fastckpt_target_bytes_per_second", wanted, value * job.gpus)
    for place, safe in job.safe.items():
        page.put("fastckpt_last_safe_timestamp_seconds", {**labels, "place": place}, safe.real)
    if job.sentence is not None:
        for level in LEVELS:
            page.put("fastckpt_job_level", {**labels, "level": level}, int(level == job.sentence.level))


def _process(page: _Page, proc: Proc, who: dict[str, str]) -> None:
    header, process = proc.header, proc.process
    page.put("fastckpt_build_info", {"version": header.version, "layout": f"{header.major}.{header.minor}"}, 1)
    one = {**who, "pid": str(header.pid)}
    if proc.alive:
        page.put("fastckpt_process_up", one, 1)
    page.put("fastckpt_process_died", one, int(proc.died))
    for op, ok, failed in (
        ("save", process.saves_ok, process.saves_failed),
        ("load", process.loads_ok, process.loads_failed),
        ("verify", process.verifies_ok, process.verifies_failed),
        ("copy", process.copies_ok, process.copies_failed),
    ):
        page.put("fastckpt_operations_total", {**who, "op": op, "result": "ok"}, ok)
        page.put("fastckpt_operations_total", {**who, "op": op, "result": "failed"}, failed)
    page.put("fastckpt_saved_bytes_total", who, process.bytes_written)
    page.put("fastckpt_loaded_bytes_total", who, process.bytes_read)
    page.put("fastckpt_copied_bytes_total", who, process.bytes_copied)
    _threads(page, proc, who)
    for operation in proc.operations:
        if operation.running and proc.alive:
            _running(page, proc, operation, who)
    for kind in Kind:
        last = next((record for record in reversed(proc.history) if record.kind == kind), None)
        if last is not None:
            _last(page, last, {**who, "op": KINDS[kind]})


def _threads(page: _Page, proc: Proc, who: dict[str, str]) -> None:
    """Add the sums over all slots, which never decrease, whichever operation a slot counts for."""
    threads = [thread for _, thread in proc.threads]
    page.put("fastckpt_io_bytes_total", who, sum(thread.bytes_ever for thread in threads))
    page.put("fastckpt_io_requests_total", who, sum(thread.requests for thread in threads))
    page.put("fastckpt_io_errors_total", who, sum(thread.errors for thread in threads))
    page.put("fastckpt_io_busy_seconds_total", who, sum(thread.busy_ns for thread in threads) / 1e9)
    page.put("fastckpt_source_wait_seconds_total", who, sum(thread.source_wait_ns for thread in threads) / 1e9)
    family = "fastckpt_io_latency_seconds"
    seen = 0
    for bucket in range(HISTOGRAM_BUCKETS):
        seen += sum(thread.latency_hist[bucket] for thread in threads)
        bound = "+Inf" if bucket == HISTOGRAM_BUCKETS - 1 else _value(HISTOGRAM_BASE_US * 2.0**bucket / 1e6)
        page.add(family, {**who, "le": bound}, seen, "_bucket")
    page.add(family, who, sum(thread.latency_sum_ns for thread in threads) / 1e9, "_sum")
    page.add(family, who, seen, "_count")


def _running(page: _Page, proc: Proc, op: Operation, who: dict[str, str]) -> None:
    labels = {**who, "op": KINDS.get(op.kind, "unknown")}
    now = PHASES.get(op.phase, "unknown")
    for phase in _PHASES:
        page.add("fastckpt_operation_phase", {**labels, "phase": phase}, int(phase == now))
    page.add("fastckpt_operation_size_bytes", labels, op.bytes_total)
    done = op.bytes_durable if op.kind in COPIES else 0
    done += sum(thread.bytes_op for _, thread in proc.threads if thread.op_id == op.op_id)
    page.add("fastckpt_operation_done_bytes", labels, done)
    if op.flags & FLAG_FALLBACK:
        engine, why = ENGINES.get(op.engine, "unknown"), errno_name(op.fallback_errno)
        page.put("fastckpt_engine_fallback", {**labels, "engine": engine, "errno": why}, 1)


def _last(page: _Page, record: History, labels: dict[str, str]) -> None:
    page.put("fastckpt_last_operation_duration_seconds", labels, record.dur_ns / 1e9)
    page.put("fastckpt_last_operation_bytes", labels, record.bytes)
    page.put("fastckpt_last_operation_timestamp_seconds", labels, (record.t_start_real_ns + record.dur_ns) / 1e9)
    page.put("fastckpt_last_operation_ok", labels, int(RESULTS.get(record.result) == "ok"))


def _value(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
