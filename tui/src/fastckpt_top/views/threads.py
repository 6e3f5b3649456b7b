"""Worker threads: the selected rank's in full, those of an opened row, and those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.tracks import COLUMN_S
from fastckpt_top.views import cells
from fastckpt_top.views.boxes import BORDERS, Block, boxed, inside, titled
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line, rate_style

if TYPE_CHECKING:
    from fastckpt_top.rows import Row, ThreadRow

DETAILS: Final = 2
"""Lines about the rank below its threads, where there is room."""
ROOMY: Final = 100
"""From this width on the title leaves room for the note."""
THREAD: Final = 4
TID: Final = 7
DEPTH: Final = 3
LATENCY: Final = 7
SHORT_BAR: Final = 8
LONG_BAR: Final = 40
SHORT_SPARK: Final = 8
LONG_SPARK: Final = 60


@dataclass(frozen=True, slots=True)
class Columns:
    """The width of each column, without the blank before it; 0 if it is left out."""

    width: int
    rank: int
    tid: int
    state: int
    bar: int
    spark: int
    depth: int
    p50: int
    p99: int
    wait: int


def columns(width: int, rank: int = 0) -> Columns:
    """Choose the columns of threads.

    Args:
        width: Cells of a line.
        rank: Cells for the name of their rank; 0 if a line above has it.
    """
    wait = cells.WAIT - 1 if width >= 56 else cells.SHORT_WAIT - 1  # noqa: PLR2004  (60 with a box)
    wanted = (
        ("state", cells.STATE),
        ("bar", SHORT_BAR),
        ("p50", LATENCY),
        ("depth", DEPTH),
        ("p99", LATENCY),
        ("tid", TID),
        ("spark", SHORT_SPARK),
    )
    left = width - 1 - (rank + 1 if rank else 0) - 1 - THREAD - 1 - cells.RATE - 1 - cells.PERCENT - 1 - wait
    chosen = {column: 0 for column, _ in wanted}
    for column, size in wanted:
        if size + 1 > left:
            break
        chosen[column] = size
        left -= size + 1
    if chosen["bar"]:
        more = min(left // 2 if chosen["spark"] else left, LONG_BAR - chosen["bar"])
        chosen["bar"] += more
        if chosen["spark"]:
            chosen["spark"] += min(left - more, LONG_SPARK - chosen["spark"])
    return Columns(width, rank, wait=wait, **chosen)


def head(frame: Frame, cols: Columns, target: float | None) -> Line:
    """The head of a list of threads.

    Args:
        frame: The frame to paint.
        cols: Its columns.
        target: Bytes/s of a thread where all have the same; else None.
    """
    line = Line(" ")
    mode = "GB" if frame.ui.mode == "total" else "GB/s"
    trend = f"last {cols.spark * COLUMN_S:.0f} s"
    for word, size, right in (
        ("RK", cols.rank, True),
        ("THR", THREAD, False),
        ("TID", cols.tid, True),
        ("STATE", cols.state, False),
        (mode, cells.RATE, True),
    ):
        if size:
            line.add(f" {word:>{size}}" if right else f" {word:<{size}}", "head")
    if cols.bar:
        line.add(" ").extend(cells.gauge_head(cols.bar, target, frame.glyphs))
    for word, size, right in (
        ("%", cells.PERCENT, True),
        (trend if len(trend) <= cols.spark else "trend", cols.spark, False),
        ("QD", cols.depth, True),
        ("p50 ms", cols.p50, True),
        ("p99 ms", cols.p99, True),
        ("WAITS FOR"[: cols.wait].strip(), cols.wait, False),
    ):
        if size:
            line.add(f" {word:>{size}}" if right else f" {word:<{size}}", "head")
    return line.fill(cols.width)


def thread_line(frame: Frame, row: Row, thread: ThreadRow, cols: Columns) -> Line:
    """One thread: its mark, colour and percentage judge its rate of now against its share of the rank's target."""
    glyphs = frame.glyphs
    share = cells.thread_share(thread) if row.running else None
    style = rate_style(share)
    marks = {"good": glyphs.good, "low": glyphs.low, "bad": glyphs.bad, "dim": glyphs.quiet}
    line = Line(glyphs.dead if thread.state == "ERROR" else marks[style], "bad" if thread.state == "ERROR" else style)
    if cols.rank:
        line.add(f" {cells.name(row):>{cols.rank}}")
    name = f"w{thread.index}"
    line.add(f" {name:<{THREAD}}", "strong" if thread.slow else "dim")
    if cols.tid:
        line.add(f" {thread.tid:>{cols.tid}}", "dim")
    if cols.state:
        line.add(f" {thread.state[: cols.state]:<{cols.state}}", cells.STATE_STYLES.get(thread.state, "text"))
    line.add(" ").add(cells.amount(frame, thread.rate, thread.done), style)
    if cols.bar:
        line.add(" ").extend(cells.gauge(share, cols.bar, style, glyphs))
    line.add(" ").add(cells.percent(share), style)
    if cols.spark:
        line.add(" ").add(
            cells.spark(thread.spark, cols.spark, thread.target, glyphs), "graph" if row.running else "dim"
        )
    if cols.depth:
        line.add(f" {thread.in_flight:>{cols.depth}}", "dim")
    for size, seconds in ((cols.p50, thread.p50_s), (cols.p99, thread.p99_s)):
        if size:
            line.add(f" {_ms(seconds):>{size}}", "dim")
    line.add(" ").extend(cells.thread_wait(thread, cols.wait, glyphs))
    return line.fill(cols.width)


def lines(frame: Frame, row: Row, width: int) -> list[Line]:
    """The threads of an opened row, below it."""
    cols = columns(width - 3)
    return [Line("   ").extend(thread_line(frame, row, thread, cols)).fill(width) for thread in row.threads]


def wanted(frame: Frame, row: Row) -> int:
    """Lines that a rank would like for itself, borders included.

    Args:
        frame: The frame to paint.
        row: The rank.
    """
    return len(row.threads) + (1 if row.threads else 0) + DETAILS + (BORDERS if boxed(frame) else 1)


def block(frame: Frame, row: Row, width: int, height: int) -> Block:
    """The selected rank in full: its threads, the worst first if they do not fit, and other facts about it.

    Args:
        frame: The frame to paint.
        row: The rank.
        width: Cells.
        height: Lines.

    Returns:
        Exactly `height` lines of `width` cells, in a box where the screen has room for boxes.
    """
    if height <= 0 or width <= 0:
        return Block()
    framed, inner, room = inside(frame, width, height)
    room -= not framed
    note = Line("Esc: the slowest" if frame.ui.selected else "", "dim")
    spare = note.width + 3 if note.width and width >= ROOMY else 0
    title = _title(frame, row, inner - 4 - spare if framed else inner)
    return titled(frame, _body(frame, row, inner, room), title, note, width, height)


def _body(frame: Frame, row: Row, width: int, room: int) -> list[Line]:
    if room <= 0:
        return []
    if not row.threads:
        return (_details(frame, row, width) if row.kind else [Line("no operation yet", "dim")])[:room]
    made = []
    cols = columns(width)
    if room > 1:
        targets = {thread.target for thread in row.threads}
        made.append(head(frame, cols, targets.pop() if len(targets) == 1 else None))
    left = room - len(made)
    threads = list(row.threads)
    hidden = 0
    if len(threads) > left:
        kept = max(left - 1, 1)
        hidden = len(threads) - kept if left > 1 else 0
        threads = sorted(threads, key=_worst)[:kept]
    made += [thread_line(frame, row, thread, cols) for thread in threads]
    if hidden:
        made.append(Line(f"  {hidden} more, none of them worse: t shows all", "dim"))
    return [*made, *_details(frame, row, width)][:room]


def _worst(thread: ThreadRow) -> float:
    """Sorts threads: one in error first, then the least share of the target, those without work last."""
    if thread.state == "ERROR":
        return -1.0
    found = cells.thread_share(thread)
    return float("inf") if found is None else found


def _title(frame: Frame, row: Row, room: int) -> Line:
    """Rank, process, user, engine, blocks and the path, which loses its beginning where it does not fit."""
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
    """Facts about a rank besides its threads: two lines, each as far as it fits."""
    major, minor = row.st_dev >> 8 & 0xFFF, row.st_dev & 0xFF
    parts = [
        (f"average {text.rate(row.average)} of {text.rate(row.target)} GB/s", VERDICT_STYLES[row.verdict]),
        (f"{text.size(row.done)} of {text.size(row.total or None)} GB", "text"),
        (f"{text.size(row.durable)} GB durable" if row.durable else "", "dim"),
        (f"{row.files_done} of {text.count(row.files, 'file')}" if row.files else "", "dim"),
        (f"device {major}:{minor}" if row.st_dev else "", "dim"),
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
    retries, shorts, errors = (
        sum(getattr(thread, name) for thread in row.threads) for name in ("retries", "shorts", "errors")
    )
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
    """Milliseconds with three digits or so, in seven cells at most."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"  # noqa: PLR2004
