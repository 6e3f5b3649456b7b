"""Worker threads: all of the selected rank, those of an expanded row, and those of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.views import cells
from fastckpt_top.views.boxes import BORDERS, box, boxed, inside
from fastckpt_top.views.columns import Column, Columns
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import Row, ThreadRow

DETAILS: Final = 2
"""Lines about the rank below its threads, if there is room."""
OPTIONAL: Final = ("state", "bar", "p50", "depth", "p99", "tid", "spark")
"""Columns that may be missing, the most important first."""


def columns(width: int, rank: int = 0) -> Columns:
    """Choose the columns of threads.

    Args:
        width: Cells of a line.
        rank: Cells for the name of their rank; 0 if the title has it.
    """
    wait = cells.WAIT - 1 if width >= 56 else cells.SHORT_WAIT - 1  # noqa: PLR2004  (60 with a box)
    every = (
        *([Column("rank", "RANK", max(rank, 4), right=True)] if rank else []),
        Column("thread", "THR", 4),
        Column("tid", "TID", 7, right=True),
        Column("state", "STATE", cells.STATE),
        Column("rate", "GB/s", cells.RATE, right=True),
        Column("bar", "", 8, most=40),
        Column("percent", "%", cells.PERCENT, right=True),
        Column("spark", "trend", 8, most=60),
        Column("depth", "QD", 3, right=True),
        Column("p50", "p50 ms", 7, right=True),
        Column("p99", "p99 ms", 7, right=True),
        Column("wait", "WAITS FOR", wait),
    )
    return Columns(every, OPTIONAL, width)


def thread_line(frame: Frame, row: Row, thread: ThreadRow, cols: Columns) -> Line:
    """One thread: mark, colour and percentage judge the figure beside them against its share of the rank's target."""
    glyphs = frame.glyphs
    found = cells.thread_figure(thread)
    parts: dict[str, tuple[str, str] | Line] = {
        "rank": (cells.name(row), "text"),
        "thread": (f"w{thread.index}", "strong" if thread.slow else "dim"),
        "tid": (str(thread.tid), "dim"),
        "state": (thread.state[: cells.STATE], cells.STATE_STYLES.get(thread.state, "text")),
        "rate": (text.rate(found.rate), found.style),
        "bar": cells.gauge(found.share, cols["bar"], found.style, glyphs),
        "percent": (cells.percent(found.share), found.style),
        "spark": (
            cells.spark(thread.spark, cols["spark"], thread.target, glyphs),
            "graph" if row.running else "dim",
        ),
        "depth": (str(thread.in_flight), "dim"),
        "p50": (_ms(thread.p50_s), "dim"),
        "p99": (_ms(thread.p99_s), "dim"),
        "wait": cells.thread_wait(thread, cols["wait"], glyphs),
    }
    return cols.row(Line(frame.glyph(found.verdict), found.mark_style), parts)


def wanted(frame: Frame, row: Row) -> int:
    """Lines that the threads of a rank need, borders included."""
    return len(row.threads) + (1 if row.threads else 0) + DETAILS + (BORDERS if boxed(frame) else 1)


def block(frame: Frame, row: Row, width: int, height: int) -> list[Line]:
    """The selected rank in full: its threads, the worst first if they do not fit, and other facts about it."""
    if height <= 0 or width <= 0:
        return []
    framed, inner, room = inside(frame, width, height)
    room -= not framed
    share = cells.thread_target([row])
    word = Line(f"a thread's share: {share} GB/s" if share else "")
    back = Line("Esc: the slowest" if frame.ui.selected else "", "dim")
    title = _title(frame, row, inner - 4 if framed else inner)
    return box(frame, _body(frame, row, inner, room), title, Line(), width, height, (word, back))


def _body(frame: Frame, row: Row, width: int, room: int) -> list[Line]:
    if room <= 0:
        return []
    if not row.threads:
        return (_details(frame, row, width) if row.kind else [Line("no operation yet", "dim")])[:room]
    made = []
    cols = columns(width)
    if room > 1:
        made.append(cells.head(frame, cols, {thread.target for thread in row.threads}))
    left = room - len(made)
    threads = list(row.threads)
    hidden = 0
    if len(threads) > left:
        kept = max(left - 1, 1)
        hidden = len(threads) - kept if left > 1 else 0
        threads = cells.worst_first(row)[:kept]
    made += [thread_line(frame, row, thread, cols) for thread in threads]
    if hidden:
        made.append(Line(f"  {hidden} more, none of them worse: Enter shows all", "dim"))
    return [*made, *_details(frame, row, width)][:room]


def _title(frame: Frame, row: Row, room: int) -> Line:
    """Rank, process, user, engine, blocks and the path, which loses its beginning if it does not fit."""
    engine = row.engine if row.engine != "unknown" else ""
    if engine and engine != "buffered":
        engine += "+cached" if not row.direct else "+direct, cached too" if row.mixed else "+direct"
    if row.fallback:
        engine += f" (fallback: {row.fallback})"
    blocks = f"{text.block(row.block_size)} {frame.glyphs.times} {row.queue_depth}" if row.block_size else ""
    line = Line(row.name, "title")
    for words, style in (
        (f"pid {row.pid}" if row.rank is not None else "", "text"),
        (f"uid {row.user}" if row.user.isdigit() else frame.say(row.user), "text"),
        (engine, "low" if row.fallback else "text"),
        (blocks, "text"),
    ):
        if words and line.width + text.width(words) + 3 <= room:
            line.add(f" {frame.glyphs.middot} ", "dim").add(words, style)
    path = frame.say(row.path)
    left = room - line.width - 3
    if path and left >= min(12, text.width(path)):
        words = text.fit_front(path, min(left, text.width(path)), frame.glyphs)
        line.add(f" {frame.glyphs.middot} ", "dim").add(words)
    return line


def _details(frame: Frame, row: Row, width: int) -> list[Line]:
    """Facts about a rank besides its threads: two lines, each cut to the width."""
    parts = [
        (f"average {text.rate(row.average)} of {text.rate(row.target)} GB/s", VERDICT_STYLES[row.verdict]),
        (f"{text.size(row.done)} of {text.size(row.total or None)} GB", "text"),
        (f"{text.size(row.durable)} GB durable" if row.durable and row.kind == "save" else "", "dim"),
        (f"{row.files_done} of {text.count(row.files, 'file')}" if row.files else "", "dim"),
        (f"device {frame.say(row.device)}" if row.device else "", "dim"),
    ]
    more = []
    if row.p50_s is not None and row.p99_s is not None:
        worst = max((thread.latency_max_s for thread in row.threads), default=0.0)
        bars = text.spark(
            [float(count) for count in row.histogram],
            len(row.histogram),
            float(max(row.histogram, default=0)),
            frame.glyphs,
        )
        words = f"latency p50 {_ms(row.p50_s)} p99 {_ms(row.p99_s)} max {_ms(worst)} ms"
        more += [(words, "text"), (f"64 us {bars} 1 s" if bars.strip() else "", "dim")]
    retries, shorts = sum(thread.retries for thread in row.threads), sum(thread.shorts for thread in row.threads)
    errors = sum(thread.errors for thread in row.threads)
    more += [
        (f"ever: {text.count(retries, 'retry') if retries == 1 else f'{retries} retries'}, {shorts} short", "dim"),
        (text.count(errors, "error"), "bad" if errors else "dim"),
    ]
    return [_joined(frame, part, width) for part in (parts, more)]


def _joined(frame: Frame, parts: list[tuple[str, str]], width: int) -> Line:
    line = Line()
    for words, style in parts:
        between = f" {frame.glyphs.middot} " if line.width else "  "
        if words and line.width + len(between) + text.width(words) <= width:
            line.add(between, "dim").add(words, style)
    return line


def _ms(seconds: float | None) -> str:
    """Milliseconds with about three digits, in at most seven cells."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"  # noqa: PLR2004
