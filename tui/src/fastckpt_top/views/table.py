"""The ranks: a row each, the worst first, as many columns as fit; those that do not fit are in a grid below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.tracks import COLUMN_S
from fastckpt_top.views import cells, grid
from fastckpt_top.views.boxes import BORDERS, SIDES, Block, box, boxed, inside
from fastckpt_top.views.paint import Frame, Line
from fastckpt_top.views.state import RISING, SORT_WORDS
from fastckpt_top.views.threads import lines as thread_lines

if TYPE_CHECKING:
    from fastckpt_top.rows import Row

TINY: Final = 4
"""Of fewer lines none is a head."""
TIGHT: Final = 24
"""On narrower screens a cell is taken from the rate and from its percentage."""
WIDE: Final = 56
"""From this width on (60 with a box) what holds a rank up has its share beside it."""
LEAST_WAIT: Final = 4
"""It is said in so many cells, or not at all."""
LEAD: Final = 5
"""Rows above a grid, at least."""
MOST: Final = 0.6
"""Share of the screen's height that the ranks ask for at most, unless it takes more to show them all."""
GPU: Final = 3
PID: Final = 7
ENGINE: Final = 8
SHORT_BAR: Final = 8
LONG_BAR: Final = 40
SHORT_SPARK: Final = 6
LONG_SPARK: Final = 60
OPTIONAL: Final = ("state", "eta", "bar", "done", "engine", "threads", "spark", "gpu", "pid")
"""Columns that may be missing, the most important first. Rank, rate, percentage and wait never are from 24 cells on."""
MODES: Final = {"current": "GB/s", "average": "avg", "total": "GB"}


@dataclass(frozen=True, slots=True)
class Columns:
    """The width of each column, without the blank before it; 0 if it is left out.

    `target` is the rate that a rank should reach, bytes/s, if all have the same.
    """

    width: int
    rank: int
    rate: int
    percent: int
    state: int
    bar: int
    spark: int
    threads: int
    done: int
    eta: int
    engine: int
    wait: int
    gpu: int
    pid: int
    target: float | None


def columns(rows: list[Row], width: int) -> Columns:
    """Choose the columns. They depend only on which ranks there are, never on their current work.

    Args:
        rows: All ranks of the job, also those that a filter hides.
        width: Cells of a line.
    """
    tight = width < TIGHT
    rank = max(1 if tight else 3, _named(rows))
    rate, percent = (cells.RATE - 1, cells.PERCENT - 1) if tight else (cells.RATE, cells.PERCENT)
    most = max((len(row.threads) for row in rows), default=0)
    per_thread = next((count for count in (4, 8) if most <= count), 16)
    wanted = {
        "state": cells.STATE,
        "done": 4,
        "eta": 5,
        "bar": SHORT_BAR,
        "engine": ENGINE,
        "threads": per_thread,
        "spark": SHORT_SPARK,
        "gpu": GPU,
        "pid": PID,
    }
    left = width - 2 - rank - 1 - rate - 1 - percent
    wait = min(cells.WAIT if width >= WIDE else cells.SHORT_WAIT, left - 1) if left > LEAST_WAIT else 0
    left -= wait + 1
    chosen = dict.fromkeys(wanted, 0)
    for column in OPTIONAL:
        size = wanted[column]
        if column == "threads" and size + 1 > left >= 5:  # noqa: PLR2004  (grouped by the worst)
            size = 8 if left > 8 else 4  # noqa: PLR2004
        if size + 1 > left:
            break
        chosen[column] = size
        left -= size + 1
    if chosen["bar"]:
        share = left if not chosen["spark"] else left // 2
        more = min(share, LONG_BAR - chosen["bar"])
        chosen["bar"] += more
        if chosen["spark"]:
            chosen["spark"] += min(left - more, LONG_SPARK - chosen["spark"])
    targets = {row.target for row in rows if row.target}
    return Columns(width, rank, rate, percent, wait=wait, target=targets.pop() if len(targets) == 1 else None, **chosen)


def wanted(frame: Frame, width: int) -> int:
    """Lines that the ranks would like, borders included: one each, or on a low screen as many as show them in a grid.

    Args:
        frame: The frame to paint.
        width: Cells.
    """
    shown = frame.ui.shown(frame.model)
    around = 1 + (BORDERS if boxed(frame) else 0)
    lines = sum(1 + (len(row.threads) if frame.ui.open(row) else 0) for row in shown)
    most = frame.height * MOST
    if lines + around <= most or any(frame.ui.open(row) for row in shown):
        return max(lines, 1) + around
    across = grid.across(_named(shown), width - SIDES if boxed(frame) else width)
    return min(max(LEAD + -(-(len(shown) - LEAD) // across), int(most) - around), lines) + around


def block(frame: Frame, width: int, height: int) -> Block:
    """The ranks of the job that is shown.

    Args:
        frame: The frame to paint.
        width: Cells.
        height: Lines.

    Returns:
        Exactly `height` lines of `width` cells, in a box where the screen has room for boxes.
    """
    if height <= 0 or width <= 0:
        return Block()
    shown = frame.ui.shown(frame.model)
    framed, inner, room = inside(frame, width, height)
    made = Block()
    cols = columns(_all(frame), inner)
    if room >= TINY or room > len(shown):
        made = _head(frame, cols)
    body, note = _body(frame, shown, cols, room - len(made.lines))
    above = len(made.lines)
    made.lines += body.lines
    made.rows |= {line + above: key for line, key in body.rows.items()}
    made.actions += [(y + above, start, end, what) for y, start, end, what in body.actions]
    if framed:
        return box(frame, made, _title(frame, shown), Line(note, "dim"), width, height)
    made.lines += [Line() for _ in range(height - len(made.lines))]
    for line in made.lines:
        chosen = line.selected
        line.fill(width)
        line.selected = width if chosen else 0
    return made


def _all(frame: Frame) -> list[Row]:
    """The job's rows before any filter: they decide how wide the columns are."""
    job = frame.ui.job_of(frame.model)
    return [row for row in frame.model.rows if not job or row.job_key == job]


def _named(rows: list[Row]) -> int:
    """Cells of the longest name."""
    return max((len(cells.name(row)) for row in rows), default=1)


def _title(frame: Frame, shown: list[Row]) -> Line:
    """`8 ranks`, how they are sorted, and the filter."""
    ui, glyphs = frame.ui, frame.glyphs
    line = Line(text.count(len({row.proc_key for row in shown}), "rank"), "title")
    sign = glyphs.rising if (ui.sort in RISING) != ui.reverse else glyphs.falling
    line.add(f" {glyphs.middot} ", "dim").add(f"{SORT_WORDS[ui.sort][ui.reverse]} {sign}", "head")
    if ui.mode != "current":
        line.add(f" {glyphs.middot} ", "dim").add({"average": "averages", "total": "GB done"}[ui.mode], "low")
    if ui.active_only:
        line.add(f" {glyphs.middot} ", "dim").add("running only", "low")
    if ui.filter:
        line.add(f" {glyphs.middot} ", "dim").add(f"filter {frame.say(text.cut(ui.filter, 20))}", "low")
    return line


def _head(frame: Frame, cols: Columns) -> Block:
    """The head; a click on a word sorts by its column."""
    made = Block()
    ui, glyphs = frame.ui, frame.glyphs
    sign = glyphs.rising if (ui.sort in RISING) != ui.reverse else glyphs.falling
    line = Line(sign if ui.sort == "worst" else " ", "key")
    made.actions.append((0, 0, 0, "sort_by('worst')"))

    def add(word: str, size: int, sort: str, *, right: bool = False) -> None:
        if not size:
            return
        start = line.width
        marked = word + sign if sort == ui.sort else word
        words = f"{marked:>{size + 1}}" if right else f" {marked:<{size}}"
        line.add(text.cut(words, size + 1), "key" if sort == ui.sort else "head")
        if sort:
            made.actions.append((0, start, line.width - 1, f"sort_by({sort!r})"))

    add("RK", cols.rank, "rank", right=True)
    add("GPU", cols.gpu, "", right=True)
    add("PID", cols.pid, "pid", right=True)
    add("STATE", cols.state, "state")
    add(MODES[ui.mode], cols.rate, "rate", right=True)
    if cols.bar:
        line.add(" ").extend(cells.gauge_head(cols.bar, cols.target, glyphs))
    add("%", cols.percent, "target", right=True)
    seconds = f"last {cols.spark * COLUMN_S:.0f} s"
    add(seconds if len(seconds) <= cols.spark else "trend", cols.spark, "")
    add("THRD", cols.threads, "")
    add("DONE", cols.done, "done", right=True)
    add("ETA", cols.eta, "eta", right=True)
    add("ENGINE", cols.engine, "")
    add("WAITS"[: cols.wait], cols.wait, "")
    made.lines.append(line.fill(cols.width))
    return made


def rank_line(frame: Frame, row: Row, cols: Columns, *, selected: bool) -> Line:
    """One rank's line."""
    glyphs = frame.glyphs
    found = cells.figure(frame, row)
    line = Line(frame.glyph(found.verdict), found.mark_style).add(glyphs.select if selected else " ", "key")
    _who(line, row, cols)
    known = bool(row.total) if frame.ui.mode == "total" else found.rate is not None
    line.add(" ").add(
        cells.amount(frame, found.rate, row.done, cols.rate, known=known), found.style if known else "dim"
    )
    if cols.bar:
        line.add(" ").extend(cells.gauge(found.share, cols.bar, found.style, glyphs))
    line.add(" ").add(cells.percent(found.share, cols.percent), found.style)
    if cols.spark:
        line.add(" ").add(cells.spark(row.spark, cols.spark, row.target, glyphs), "graph" if found.live else "dim")
    if cols.threads:
        line.add(" ").extend(cells.threads(row, cols.threads, glyphs))
    if cols.done:
        line.add(f" {text.percent(row.progress):>{cols.done}}")
    if cols.eta:
        line.add(" ").add(cells.eta(row), "low" if row.straggler else "text")
    if cols.engine:
        line.add(" ").add(f"{cells.engine(row):<{cols.engine}}", "low" if row.fallback else "dim")
    if cols.wait:
        line.add(" ").extend(cells.wait(row, room=cols.wait, stated=cols.state > 0, flag=not cols.engine))
    line.fill(cols.width)
    line.selected = cols.width if selected else 0
    return line


def _who(line: Line, row: Row, cols: Columns) -> None:
    """Rank, GPU, process and state."""
    line.add(f"{cells.name(row):>{cols.rank}}", "strong" if row.straggler else "text")
    if cols.gpu:
        line.add(f" {'-' if row.gpu is None else row.gpu:>{cols.gpu}}", "dim")
    if cols.pid:
        line.add(f" {row.pid:>{cols.pid}}", "dim")
    if cols.state:
        state = cells.state(row)
        line.add(f" {state:<{cols.state}}", cells.STATE_STYLES.get(state, "strong"))


def _body(frame: Frame, shown: list[Row], cols: Columns, room: int) -> tuple[Block, str]:
    """The rows in at most ``room`` lines, with a grid if they do not fit, and words for which of them are shown."""
    if not shown:
        words = f"no rank matches {frame.say(frame.ui.filter)!r}" if frame.ui.filter else "no running operation"
        return Block([Line(f"  {words}", "dim")] if room > 0 else []), "0 of 0"
    count = len(shown)
    chosen = frame.ui.selection(shown)
    opened = any(frame.ui.open(row) for row in shown)
    if count > room >= LEAD + 2 and not opened:
        return _with_grid(frame, shown, chosen, cols, room)
    lines: list[tuple[Line, str]] = []
    for row in shown:
        lines.append((rank_line(frame, row, cols, selected=row is chosen), row.key))
        if frame.ui.open(row):
            lines += [(line, row.key) for line in thread_lines(frame, row, cols.width)]
    first = _first(frame, [line for line, _ in lines], chosen, room)
    part = lines[first : first + max(room, 0)]
    seen = [key for _, key in part]
    keys = [row.key for row in shown]
    note = f"{keys.index(seen[0]) + 1}\N{EN DASH}{keys.index(seen[-1]) + 1} of {count}" if seen else f"0 of {count}"
    made = Block([line for line, _ in part])
    made.rows = dict(enumerate(seen))
    return made, note if frame.glyphs is not text.ASCII else note.replace("\N{EN DASH}", "-")


def _with_grid(frame: Frame, shown: list[Row], chosen: Row | None, cols: Columns, room: int) -> tuple[Block, str]:
    name = _named(_all(frame))
    across = grid.across(name, cols.width)
    lead = LEAD
    while lead + 1 + -(-(len(shown) - lead - 1) // across) <= room:
        lead += 1
    made = Block([rank_line(frame, row, cols, selected=row is chosen) for row in shown[:lead]])
    made.rows = {line: row.key for line, row in enumerate(shown[:lead])}
    below, count = grid.block(frame, shown[lead:], chosen, name, cols.width, room - lead)
    made.lines += below.lines
    made.actions += [(y + lead, start, end, what) for y, start, end, what in below.actions]
    hidden = len(shown) - lead - count
    return (
        made,
        f"{len(shown)} of {len(shown)}" if not hidden else f"{lead + count} of {len(shown)}, {hidden} not shown",
    )


def _first(frame: Frame, lines: list[Line], chosen: Row | None, room: int) -> int:
    """The first visible line, chosen so that the selected row is visible; it moves no more than necessary."""
    first = frame.ui.scroll.get("live", 0)
    at = next((index for index, line in enumerate(lines) if line.selected), 0)
    last = at
    if chosen is not None and frame.ui.open(chosen):
        last = min(at + len(chosen.threads), at + room - 1)
    first = max(min(first, at), last - room + 1, 0)
    first = max(0, min(first, len(lines) - room))
    frame.ui.scroll["live"] = first
    return first
