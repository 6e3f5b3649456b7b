"""Text output without a screen: one line per interval, the table of --once, the sentence of --check."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, TextIO

from fastckpt_top import phrases, text
from fastckpt_top.jobs import judged
from fastckpt_top.rows import NodeOp, Row, ThreadRow, share

if TYPE_CHECKING:
    from fastckpt_top.model import Model
    from fastckpt_top.targets import Target

IDLE_EVERY_S: Final = 60.0
"""Seconds between two lines without a running operation."""
_FIGURES: Final = re.compile(r"\d+(\.\d+)?")
_MARKS: Final = {"info": "-", "warn": "!", "bad": "x"}
"""The mark before a sentence."""
_TABLE_HEAD: Final = (
    "RANK GPU      PID OP     STATE    GB/s    avg    of target   done GB  total GB    ETA  ENGINE     WAITS FOR"
)


class LineWriter:
    """Line mode: the output for a terminal, a pipe or a log.

    Args:
        out: The stream, which is flushed after each line.
        glyphs: Characters.
    """

    def __init__(self, out: TextIO, glyphs: text.Glyphs = text.UNICODE) -> None:
        self._out = out
        self._glyphs = glyphs
        self._idle_since: float | None = None
        self._events = 0
        self._said: dict[str, str] = {}

    def write(self, model: Model) -> None:
        """Write the current state of the model: events, a line per operation, and its sentence."""
        lines = self._event_lines(model)
        running = [op for op in model.ops if op.running]
        if running:
            self._idle_since = None
            lines += [f"{_time(model.real)} {_op_summary(op, _named(op.job_key, model))}" for op in running]
        elif self._idle_since is None or model.mono - self._idle_since >= IDLE_EVERY_S:
            self._idle_since = model.mono
            lines.append(f"{_time(model.real)} {_idle(model)}")
        lines += self._sentence_lines(model)
        for line in lines:
            self._out.write(_narrow(line, self._glyphs) + "\n")
        if lines:
            self._out.flush()

    def _event_lines(self, model: Model) -> list[str]:
        new = min(model.event_count - self._events, len(model.events))
        self._events = model.event_count
        return [
            f"{_time(event.real)} {'!' if event.level != 'info' else '-'} {_prefix(event.job, model)}{event.text}"
            for event in list(model.events)[len(model.events) - new :]
        ]

    def _sentence_lines(self, model: Model) -> list[str]:
        """The sentence of each job, if it has changed; changed figures alone do not count."""
        lines = []
        before, self._said = self._said, {}
        for job in model.jobs:
            if job.sentence is None:
                continue
            words = job.sentence.words[0]
            self._said[job.key] = f"{job.sentence.row} {_FIGURES.sub('', words)}"
            if before.get(job.key) != self._said[job.key]:
                prefix = _prefix(job.key, model)
                lines.append(f"{_time(model.real)} {_MARKS[job.sentence.level]} {prefix}{words}")
        return lines


def _idle(model: Model) -> str:
    """The text while no operation runs."""
    if not model.node.ranks:
        return empty_text(model)
    last, alive = model.main, model.node.alive
    words = f"idle: {alive} {'process' if alive == 1 else 'processes'}"
    return f"{words}; last {_op_summary(last)}" if last is not None else words


def empty_text(model: Model) -> str:
    """The text when there is no process."""
    what = f"process of job {model.job}" if model.job else "fastckpt process"
    return f"no {what} in {', '.join(model.places) or 'any directory'}"


def table(model: Model, glyphs: text.Glyphs = text.UNICODE) -> str:
    """The table of `--once`: one section per job.

    Returns:
        Lines with their final newline; no escape sequences.
    """
    node = model.node
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(model.real))
    alive = f"{node.alive} of {node.ranks} processes alive"
    several = len(model.jobs) > 1
    target = "".join(f"  {_target(job.target, job.gpus)}" for job in model.jobs if not several)
    lines = [f"fastckpt-top  {node.host}  {when}  {alive}{target}"]
    for job in model.jobs:
        if several:
            alive = f"{job.alive} of {job.ranks} processes alive"
            lines += ["", f"job {job.key}  user {job.user}  {alive}  {_target(job.target, job.gpus)}"]
        for op in model.ops:
            if op.job_key == job.key:
                lines.append(_op_summary(op))
                lines += [f"{_MARKS[op.sentence.level]} {op.sentence.words[0]}"] if op.sentence is not None else []
        lines += ["", _TABLE_HEAD]
        for row in model.rows:
            if row.job_key == job.key:
                lines.append(_row_line(row))
                lines += [_thread_line(thread) for thread in row.threads if row.running]
    lines += _others(model)
    lines += [f"! {path}: {reason}" for path, reason in model.problems]
    return "".join(_narrow(line.rstrip(), glyphs) + "\n" for line in lines)


def _others(model: Model) -> list[str]:
    """The line about dead processes that are neither shown nor judged; nothing if there are none."""
    if not model.others:
        return []
    what = "processes of other launches" if model.others > 1 else "process of another launch"
    how = "`debug ls` names them, `debug clean --yes` removes them after 10 minutes"
    return [f"- {model.others} {what} died before that: {how}"]


def _target(target: Target, gpus: int) -> str:
    per_gpu = f"{text.rate(target.save)} written, {text.rate(target.load)} read GB/s per GPU"
    return f"target {target.name}: {per_gpu}, {text.count(gpus, 'GPU')}"


def _named(key: str, model: Model) -> str:
    """The name of a job: empty if it is the only one."""
    return key if len(model.jobs) > 1 else ""


def _prefix(key: str, model: Model) -> str:
    """The name of a job before its line: empty if it is the only one."""
    return f"{key}: " if key and len(model.jobs) > 1 else ""


def _op_summary(op: NodeOp, job: str = "") -> str:
    """An operation in a line, with the name of its job if necessary."""
    name = f"{job} {op.kind} {op.label}".strip()
    words = f"{op.phase} in {op.elapsed_s:.1f} s"
    if op.running:
        now = "" if op.copies else f", now {text.rate(op.rate if op.rate is not None else op.average)}"
        words = f"{op.phase} {text.percent(op.progress)}, {phrases.eta(op)}{now}"
    if op.empty:
        return f"{name}: {phrases.nothing(op)}, {words}"
    if op.copies:
        return f"{name}: {phrases.moved(op)}, {words}"
    amount = f"{text.size(op.done)} of {text.size(op.total)} GB"
    average = f"average {' of '.join(text.rates(op.average, op.target))} GB/s"
    verdict = f"({text.percent(share(op.average, op.target))}): {op.verdict.value}"
    return f"{name}: {amount}, {words}, {average} {verdict}" + (f", last: {op.last}" if op.last else "")


def _row_line(row: Row) -> str:
    engine = row.engine + ("+D" if row.direct else "") + ("!" if row.fallback else "")
    parts = (
        f"{_int(row.rank):>4} {_int(row.gpu):>3} {row.pid:>8} {row.kind or '-':6} {row.state:6}",
        f"{text.rate(row.rate):>6} {text.rate(row.average):>6}",
        f"{text.percent(share(row.average, row.target)):>5} {row.verdict.value:6}",
        f"{text.size(row.done if row.total else None):>9} {text.size(row.total or None):>9}",
        f"{text.clock(row.eta_s) if row.running else '-':>6}  {engine or '-':10} {row.wait or '-'}",
    )
    return " ".join(parts)


def _thread_line(thread: ThreadRow) -> str:
    """A thread, in the columns of its rank: its rates against its share of the rank's target."""
    start = f"       w{thread.index:<3} {thread.tid:>8}        {thread.state:6} {text.rate(thread.rate):>6}"
    reached = f"{text.rate(thread.average):>6} {text.percent(share(thread.average, thread.target)):>5}"
    done = f"{text.size(thread.done):>9}{'':18}{thread.in_flight:>3} in flight"
    return f"{start} {reached}{'':8}{done}  {thread.wait or '-'}"


def check(model: Model, percent: float) -> tuple[bool | None, str]:
    """Judge the running operations of each job, or else its last ended one; and its copies in the same way.

    Args:
        model: The model.
        percent: The percentage of the target that the average must reach.

    Returns:
        Whether all reach it (None if there is no operation), and one line for each operation, then one about dead
        processes that are not judged.
    """
    ops = judged(model.ops)
    if not ops:
        last = model.past.checkpoints[-1] if model.past.checkpoints else None
        return None, empty_text(model) if last is None and not model.node.ranks else "no operation to judge"
    good = True
    words = []
    for op in ops:
        reached = op.average is not None and op.average * 100 >= percent * op.target
        fine = op.failed == 0 and (op.empty or op.copies or reached)
        good &= fine
        percentage = text.percent(share(op.average, op.target))
        state = "running" if op.running else op.phase
        result = "ok" if fine else "FAILED" if op.failed else "BELOW TARGET"
        figures = f"{' of '.join(text.rates(op.average, op.target))} GB/s, {percentage} (want {percent:g}%)"
        target = f", target {op.target_name} x {text.count(op.gpus, 'GPU')}"
        if op.empty or op.copies:
            figures, target = phrases.nothing(op) if op.empty else phrases.moved(op), ""
        name = f"{_named(op.job_key, model)} {op.kind} {op.label}".strip()
        told = op.sentence if op.running or op.failed else None
        why = f"; {told.words[0]}" if told is not None and told.level != "info" else ""
        words.append(f"{result}: {name} ({state}): {figures}{target}{why}")
    return good, "\n".join([*words, *_others(model)])


def _narrow(line: str, glyphs: text.Glyphs) -> str:
    return text.ascii_only(line) if glyphs is text.ASCII else line


def _time(real: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(real))


def _int(value: int | None) -> str:
    return "-" if value is None else str(value)
