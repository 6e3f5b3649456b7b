"""Rows of ranks and threads. Columns are left out as the screen gets narrower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import Row, ThreadRow, Verdict
from fastckpt_top.tracks import COLUMN_S
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line, rate_style, share

if TYPE_CHECKING:
    from collections.abc import Sequence

STATE_STYLES: Final = {
    "STALL": "bad",
    "DEAD": "bad",
    "FAILED": "bad",
    "FSYNC": "low",
    "COMMIT": "low",
    "IDLE": "dim",
    "EXIT": "dim",
    "DONE": "dim",
    "PLAN": "dim",
    "WAIT": "dim",
    "STAGE": "low",
    "SOURCE": "low",
    "LIMIT": "low",
    "ERROR": "bad",
}
SPARK_TOP: Final = 1.5
"""A full column stands for so many times the target: with less, rows at their target would be one solid block."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns fit, and how wide the elastic ones are."""

    width: int
    pid: bool
    gpu: bool
    state: bool
    bar: int
    spark: int
    done: bool
    eta: bool
    engine: bool
    wait: bool


def columns(width: int) -> Columns:
    """Choose the columns for a table.

    Args:
        width: Cells of the table.
    """
    if width < 60:  # noqa: PLR2004
        fixed = 2 + 5 + 7 + 6
        return Columns(width, False, False, False, max(0, width - fixed), 0, False, False, False, False)
    if width < 80:  # noqa: PLR2004
        fixed = 2 + 5 + 4 + 8 + 7 + 8 + 6 + 5
        spark = 6
        return Columns(width, True, True, True, max(4, width - fixed - spark - 1), spark, True, False, False, False)
    wait = width >= 100  # noqa: PLR2004
    fixed = 2 + 5 + 4 + 8 + 7 + 8 + 6 + 5 + 6 + 12 + (13 if wait else 0)
    free = width - fixed - 2
    bar = min(max(7, free // 2), 32)
    spark = min(max(7, free - bar), 48)
    return Columns(width, True, True, True, bar, spark, True, True, True, wait)


def head(frame: Frame, cols: Columns) -> Line:
    """The table's head."""
    mode = {"current": "GB/s", "average": "avg", "total": "GB"}[frame.ui.mode]
    last = f"last {cols.spark * COLUMN_S:.0f}s"
    target = "of target" if cols.bar >= len("of target") else "target"
    words = [
        (" RANK", "rank", True),
        (" GPU", "", cols.gpu),
        ("     PID", "pid", cols.pid),
        (" STATE ", "state", cols.state),
    ]
    words += [
        (f"{mode:>{8 if cols.state else 6}}", "rate", True),
        (" " + text.fit(target, cols.bar, frame.glyphs), "target", cols.bar > 0),
        ("    %", "target", True),
        (" " + text.fit(last if cols.spark > len(last) else "trend", cols.spark, frame.glyphs), "", cols.spark > 0),
        (" DONE", "done", cols.done),
        ("   ETA", "eta", cols.eta),
        ("  ENGINE    ", "", cols.engine),
        ("  WAITS FOR  ", "", cols.wait),
    ]
    line = Line("  ")
    for word, column, shown in words:
        if shown:
            line.add(word, "key" if column == frame.ui.sort else "head")
    return line.fill(cols.width)


def rank_line(frame: Frame, row: Row, cols: Columns, *, selected: bool) -> Line:
    """One rank's line. In fsync, commit and after the end the average stands where the rate was, dim."""
    glyphs = frame.glyphs
    current = row.rate is not None and frame.ui.mode == "current"
    shown = row.rate if current else row.average
    fraction = share(shown, row.target)
    style = rate_style(fraction) if current else "dim"
    line = Line(frame.glyph(row.verdict), VERDICT_STYLES[row.verdict])
    line.add(glyphs.select if selected else " ", "key")
    line.add(
        f"{_int(row.rank):>4}" if row.rank is not None or cols.pid else f"{row.pid:>4}"[-5:],
        "strong" if row.straggler else "text",
    )
    line.add(glyphs.warn if row.straggler and not cols.wait else " ", "low")
    if cols.gpu:
        line.add(f" {_int(row.gpu):>3}")
    if cols.pid:
        line.add(f"{row.pid:>8}")
    if cols.state:
        line.add(f" {row.state:<6}", STATE_STYLES.get(row.state, "strong"))
    amount = text.size(row.done if row.total else None) if frame.ui.mode == "total" else text.rate(shown)
    line.add(f"{amount:>{8 if cols.state else 6}}", style if shown is not None else "dim")
    if cols.bar:
        line.add(" ").add(text.bar(fraction, cols.bar, glyphs.thin), style)
    line.add(f" {text.percent(fraction):>4}", style)
    if cols.spark:
        line.add(" ").add(
            text.spark(row.spark, cols.spark, SPARK_TOP * row.target, glyphs), "graph" if current else "dim"
        )
    if cols.done:
        line.add(f" {text.percent(row.progress):>4}")
    if cols.eta:
        line.add(f" {_eta(row):>5}", "low" if row.straggler else "text")
    if cols.engine:
        line.add(f"  {engine(row):<10}", "low" if row.fallback else "dim")
    if cols.wait:
        wait = "the last" if row.straggler and not row.wait else row.wait
        line.add("  ").add(
            text.fit(wait, 11, glyphs), "low" if wait.startswith(("source", "limit")) or row.straggler else "dim"
        )
    line.selected = cols.width if selected else 0
    return line.fill(cols.width)


def thread_line(frame: Frame, row: Row, thread: ThreadRow, cols: Columns, *, named: bool = False) -> Line:
    """One thread's line, its figures under the rank's.

    Args:
        frame: What to paint.
        row: Its rank.
        thread: The thread.
        cols: The table's columns.
        named: Whether to name the rank, where no line of the rank stands above.
    """
    glyphs = frame.glyphs
    fraction = share(thread.rate, thread.target)
    style = "dim" if not row.running else rate_style(fraction)
    line = Line(glyphs.bad if thread.slow else " ", "bad").add(" ")
    name = f"w{thread.index}"
    if not cols.pid:
        line.add(f"{f'{_int(row.rank)}.{thread.index}' if named else name:>4} ", "dim")
    elif named:
        line.add(f"{_int(row.rank):>4} ").add(f"{name:<4}", "dim").add(f"{thread.tid:>8}", "dim")
    else:
        line.add(f"   {glyphs.branch}{name:<5}", "dim").add(f"{thread.tid:>8}", "dim")
    if cols.state:
        line.add(f" {thread.state:<6}", STATE_STYLES.get(thread.state, "text"))
    amount = text.size(thread.done) if frame.ui.mode == "total" else text.rate(thread.rate)
    line.add(f"{amount:>{8 if cols.state else 6}}", style)
    if cols.bar:
        line.add(" ").add(text.bar(fraction, cols.bar, glyphs.thin), style)
    line.add(f" {text.percent(fraction):>4}", style)
    if cols.spark:
        line.add(" ").add(
            text.spark(thread.spark, cols.spark, SPARK_TOP * thread.target, glyphs), "graph" if row.running else "dim"
        )
    if cols.eta:
        latency = f"{thread.latency_s * 1e3:.1f}ms" if thread.latency_s is not None else "-"
        line.add(f" {thread.in_flight:>3}q {latency:>7}", "dim")
        wait = thread.wait if cols.wait else thread.wait.replace("source", "src")
        line.add(" " * (12 if cols.wait else 1))
        line.add(text.fit(wait, 11 if cols.wait else 9, glyphs), _wait_style(thread.wait))
    return line.fill(cols.width)


def rows(frame: Frame, shown: Sequence[Row], cols: Columns) -> list[tuple[Line, str]]:
    """All lines of the live table, each with its row's key."""
    chosen = frame.ui.selection(list(shown))
    lines = []
    for row in shown:
        lines.append((rank_line(frame, row, cols, selected=row is chosen), row.key))
        if frame.ui.open(row):
            lines.extend((thread_line(frame, row, thread, cols), row.key) for thread in row.threads)
    return lines


def engine(row: Row) -> str:
    """`uring+D`: engine, `+D` with O_DIRECT, `!` after a fallback."""
    if not row.engine or row.engine == "unknown":
        return "-"
    name = {"buffered": "buffer"}.get(row.engine, row.engine) if row.direct or row.fallback else row.engine
    return name + ("+D" if row.direct else "") + ("!" if row.fallback and len(name) < 8 else "")  # noqa: PLR2004


def _eta(row: Row) -> str:
    if row.stalled_s is not None:
        return text.ago(row.stalled_s)
    if row.verdict is Verdict.FAILED:
        return row.error[:5] or "-"
    return text.clock(row.eta_s) if row.running else "-"


def _wait_style(wait: str) -> str:
    return "low" if wait.startswith(("source", "limit")) else "dim"


def _int(value: int | None) -> str:
    return "-" if value is None else str(value)
