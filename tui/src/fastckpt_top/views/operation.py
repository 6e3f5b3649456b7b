"""The box at the top: the operation, its progress, rate and remaining time, and the sentence with the reason. Pure."""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import Verdict, share
from fastckpt_top.views import cells, footer
from fastckpt_top.views.boxes import box, boxed, by_rank, words
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import NodeOp

LEVELS: Final = {"info": "text", "warn": "low", "bad": "bad"}
"""Styles of sentences and events, by their level."""
VERDICT_WORDS: Final = {
    Verdict.GOOD: "OK",
    Verdict.LOW: "NEAR",
    Verdict.BAD: "SLOW",
    Verdict.FAILED: "FAILED",
    Verdict.QUIET: "",
}
_WIDE: Final = 36
"""On narrower screens the sentence has two lines."""
_NAME: Final = 6
"""A name cut to fewer cells is useless."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Cells of the text at the left and right of the two bars: the same in both lines, whatever the figures are.

    Attributes:
        left: Cells for the work, and its rate.
        bar: Cells for the bars themselves; 0 for none.
        right: Cells for the remaining time, and its reliability.
        size: The amount of detail: 3 with names and peaks, 2 with names, 1 with the essentials, 0 with less.
    """

    left: int
    bar: int
    right: int
    size: int


def columns(width: int) -> Columns:
    """The columns of an operation's lines."""
    for size, least, left, right in (
        (3, 100, min(33 + max(width - 112, 0) // 4, 52), 43),
        (2, 64, min(25 + max(width - 76, 0) // 3, 32), 27),
        (1, 46, 18, 9),
        (1, 32, 11, 9),
    ):
        if width >= least:
            return Columns(left, width - left - right - 7, right, size)
    return Columns(0, 0, 0, 0)


def block(frame: Frame, width: int) -> list[Line]:
    """The box, or the same lines without a box."""
    if not boxed(frame):
        top = [title(frame)] if frame.height >= 10 or frame.frozen else []  # noqa: PLR2004
        return [line.fill(width) for line in (*top, *lines(frame, width))]
    inner = lines(frame, width - 4)
    foot = footer.urgent(frame), footer.last_checkpoint(frame)
    names = _names(frame)
    facts = by_rank(_facts(frame), width - names.width - 12, Line(f" {frame.glyphs.middot} ", "dim"))
    return box(frame, inner, names, facts, width, len(inner) + 2, foot)


def lines(frame: Frame, width: int) -> list[Line]:
    """Two lines for each running operation, else for the last one, and the sentence; their number never changes."""
    running = [op for op in frame.ops if op.running]
    room = 1 if frame.height < 20 else 2 if frame.height < 40 else 3  # noqa: PLR2004
    shown = running[:room] or frame.ops[:1]
    cols = columns(width)
    painted: list[Line] = []
    for op in shown:
        painted += [_done(frame, op, cols), _speed(frame, op, cols)] if cols.size else _narrow(frame, op, width)
    if not shown:
        painted = [Line("idle: no operation yet", "dim"), Line()]
    if frame.height > 2:  # noqa: PLR2004
        high = 2 if width < _WIDE and frame.height > 3 else 1  # noqa: PLR2004
        why = _why(frame, shown if running else frame.ops[:2], width, high)
        painted += [*why, *(Line() for _ in range(high - len(why)))]
    return [line.fill(width) for line in painted]


def _done(frame: Frame, op: NodeOp, cols: Columns) -> Line:
    """`done   SAVE step-1000 WRITE   62% [bar] 198.9/319.2 GB  ETA 00:13`."""
    phase = op.phase.upper()
    style = "bad" if op.verdict is Verdict.FAILED else "text" if op.running else "dim"
    line = Line("done   " if cols.size == 3 else "", "dim")  # noqa: PLR2004
    if cols.size >= 2:  # noqa: PLR2004
        line.add(f"{op.kind.upper():<6} ", "strong" if op.running else "dim")
        line.add(
            text.fit(_name(frame, op), cols.left - line.width - 7, frame.glyphs), "strong" if op.running else "dim"
        ).add(" ")
    line.add(f"{phase:<6}", style)
    if cols.size == 1 and cols.left > line.width + _NAME:
        line.add(" ").add(text.fit(_name(frame, op), cols.left - line.width, frame.glyphs), "strong")
    tail = Line()
    eta = op.no_eta or f"ETA {text.clock(op.eta_s)}"
    if not op.running:
        eta = f"{text.ago(frame.model.real - op.started_real - op.elapsed_s)} ago"
    if cols.size >= 2:  # noqa: PLR2004
        tail.add(f"{text.size(op.done):>6}/{text.size(op.total or None)} GB").fill(17)
    if cols.size == 3:  # noqa: PLR2004
        elapsed = text.clock(op.elapsed_s)
        tail.add(f"{elapsed:>6} {'elapsed' if op.running else 'took'} ", "dim")
    tail.add(eta, "strong" if op.running else "dim")
    full = text.bar(op.progress, cols.bar, frame.glyphs.bar).rstrip()
    bar = Line(full, "graph" if op.running else "dim").add(frame.glyphs.track * (cols.bar - len(full)), "dim")
    return _joined(line, f"{text.percent(op.progress):>5}", "text", bar, tail, cols)


def _name(frame: Frame, op: NodeOp) -> str:
    return frame.say(op.label) or (f"step {op.step}" if op.step is not None else op.kind)


def _speed(frame: Frame, op: NodeOp, cols: Columns) -> Line:
    """`speed  21.55 of 24.00 GB/s 89% [bar] now 22.45  peak 22.60  NEAR`.

    Mark, colour, word, bar and percentage all judge the average; the current rate is plain: at the end of a save, with
    one rank left, it is low without a problem.
    """
    fraction = share(op.average, op.target)
    style = VERDICT_STYLES[op.verdict] if op.running else "dim"
    average, target = text.rates(op.average, op.target)
    line = Line("speed  " if cols.size == 3 else "", "dim")  # noqa: PLR2004
    line.add(f"{average:>5}", "strong" if op.running else "dim")
    if cols.size >= 2:  # noqa: PLR2004
        line.add(f" of {target:>5} GB/s", "text" if op.running else "dim")
    else:
        line.add(f"/{target}").add(" GB/s" if cols.left > 16 else "")  # noqa: PLR2004
    tail = Line()
    if cols.size >= 2:  # noqa: PLR2004
        now = text.rate(op.rate) if op.running else "-"
        tail.add("   now ", "dim").add(f"{now:<6}")
    if cols.size == 3:  # noqa: PLR2004
        tail.fill(17).add("  peak ", "dim").add(f"{text.rate(op.peak or None):<6}")
    # The word repeats the mark; a failure is never dim.
    judged = style if op.verdict is not Verdict.FAILED else "bad"
    tail.add(" " * max(cols.right - 9 - tail.width, 0))
    tail.add(f"{frame.glyph(op.verdict)} {VERDICT_WORDS[op.verdict]}", judged)
    bar = cells.gauge(fraction, cols.bar, style, frame.glyphs)
    return _joined(line, f"{text.percent(fraction):>5}", style, bar, tail, cols)


def _narrow(frame: Frame, op: NodeOp, width: int) -> list[Line]:
    """Two lines without bars: `WRITE   60% ETA 00:15` and `21.55/24.00  89%` with the mark."""
    style = VERDICT_STYLES[op.verdict]
    fraction = share(op.average, op.target)
    average, target = text.rates(op.average, op.target)
    eta = f"{text.clock(op.eta_s):>6}" if op.running and not op.no_eta else f" {op.no_eta}" if op.running else ""
    done = [
        (2, Line(f"{op.phase.upper():<6}", "strong")),
        (0, Line(f"{text.percent(op.progress):>4}")),
        (3, Line(" ETA" if op.running and not op.no_eta else "")),
        (1, Line(eta)),
    ]
    speed = [
        (1, Line(f"{average:>5}", "strong")),
        (3, Line(f"/{target:<5}")),
        (0, Line(f"{text.percent(fraction):>5}", style)),
        (2, Line(f" {frame.glyph(op.verdict)}", style)),
    ]
    return [by_rank(pieces, width, Line()) for pieces in (done, speed)]


def _joined(left: Line, percent: str, style: str, bar: Line, right: Line, cols: Columns) -> Line:
    line = left.fill(cols.left).add(percent, style).add(" ")
    return line.extend(bar).add(" " if bar.width else "").extend(right.fill(cols.right))


def _why(frame: Frame, shown: list[NodeOp], width: int, high: int) -> list[Line]:
    """The most severe sentence of the shown operations, in at most `high` lines."""
    order = list(LEVELS)
    found = [(op, op.sentence) for op in shown if op.sentence is not None]
    if not found:
        return []
    op, said = max(found, key=lambda pair: order.index(pair[1].level))
    glyphs = frame.glyphs
    bad = glyphs.dead if op.failed else glyphs.bad
    mark = {"bad": bad, "warn": glyphs.warn}.get(said.level, glyphs.quiet)
    before = f"{mark} {op.kind}: " if len(shown) > 1 else f"{mark} "
    variants = tuple(before + frame.say(text.clean(variant)) for variant in said.words)
    return [Line(part, LEVELS[said.level]) for part in _wrapped(variants, width, high)]


def _wrapped(variants: tuple[str, ...], width: int, high: int) -> list[str]:
    """The first wording, longest first, that fits into this many lines; else the last one, cut."""
    if high == 1:
        return [words(variants, width)]
    parts: list[str] = []
    for variant in variants:
        parts = textwrap.wrap(variant, width)
        if len(parts) <= high:
            return parts
    return [*parts[: high - 1], words((" ".join(parts[high - 1 :]),), width)]


# --- the names in the border ---------------------------------------------------------------------------------------


def _names(frame: Frame) -> Line:
    """`fastckpt-top · gpu07 · llama70b`, and choices of the user that hide rows."""
    glyphs, ui = frame.glyphs, frame.ui
    line = Line("fastckpt-top" if frame.width >= 100 else "", "title")  # noqa: PLR2004
    job = frame.job
    pieces = [frame.say(frame.model.node.host), frame.say(text.cut(_job_name(frame), 32))]
    for word in filter(None, pieces):
        line.add(f" {glyphs.middot} " if line.width else "", "dim").add(word, "head")
    if job is not None and len(frame.model.jobs) > 1:
        number = 1 + sum(other.since < job.since for other in frame.model.jobs)
        line.add(f" {glyphs.middot} ", "dim").add(f"job {number} of {len(frame.model.jobs)}", "low")
        line.add(f" {glyphs.middot} ", "dim").add("j", "key").add(" next", "dim")
    if ui.recording:
        line.add(f" {glyphs.middot} ", "dim").add("REC", "bad")
    return line


def _job_name(frame: Frame) -> str:
    job = frame.job
    return (f"{job.name}({job.pid})" if job.name else "") if job is not None else frame.model.node.job


def _target_words(frame: Frame) -> str:
    """`high: 3.00 GB/s x 8 GPUs`, by which the shown operation is judged."""
    job, main, glyphs = frame.job, frame.main, frame.glyphs
    target = job.target if job is not None else frame.model.node.target
    gpus = main.gpus if main is not None else job.gpus if job is not None else frame.model.node.gpus
    figure = target.save if main is None or main.kind not in ("load", "verify") else target.load
    name = "target" if target.name == "custom" else target.name
    return f"{name} {text.rate(figure)} GB/s {glyphs.times} {text.count(gpus, 'GPU')}"


def _alive(frame: Frame) -> str:
    job, node = frame.job, frame.model.node
    alive, ranks = (job.alive, job.ranks) if job is not None else (node.alive, node.ranks)
    return "" if alive == ranks else f"{alive} of {text.count(ranks, 'rank')}"


def _status(frame: Frame) -> Line:
    if frame.frozen:
        return Line(f"{frame.glyphs.pause} FROZEN", "low")
    mark = Line(frame.glyphs.live if frame.live else frame.glyphs.pause, "good" if frame.live else "low")
    return mark.add(f" {frame.status}")


def _facts(frame: Frame, *names: tuple[int, Line]) -> list[tuple[int, Line]]:
    """The parts of the border or the first line, the least important with the highest number."""
    clock = time.strftime("%H:%M:%S", time.localtime(frame.model.real))
    alive, target = Line(_alive(frame), "low"), Line(_target_words(frame))
    return [*names, (3, alive), (2, target), (4, Line(clock, "dim")), (0, _status(frame))]


def title(frame: Frame) -> Line:
    """The first line of a screen without boxes."""
    return by_rank(_facts(frame, (1, _names(frame))), frame.width - 1, Line("  ")).fill(frame.width)


def one_line(frame: Frame) -> Line:
    """The contents of a screen of one line."""
    op = frame.main
    if op is None:
        said = "idle" if frame.model.node.ranks else "no fastckpt process"
        return Line(f"{frame.glyphs.quiet} {said}", "dim").fill(frame.width)
    line = Line(frame.glyph(op.verdict), VERDICT_STYLES[op.verdict])
    unit = " GB/s" if frame.width >= 34 else ""  # noqa: PLR2004
    average, target = text.rates(op.average, op.target)
    line.add(f" {text.percent(op.progress)} {average}/{target}{unit}")
    line.add(f" {op.no_eta or f'ETA {text.clock(op.eta_s)}'}" if op.running else f" {op.phase}")
    return line.fill(frame.width)
