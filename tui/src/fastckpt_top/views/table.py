"""The ranks: one row each, the worst first, with as many columns as fit; rows that do not fit are in a grid below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.views import cells, grid
from fastckpt_top.views.boxes import BORDERS, SIDES, box, boxed, inside, words
from fastckpt_top.views.columns import Column, Columns
from fastckpt_top.views.paint import Frame, Line
from fastckpt_top.views.state import SORTS

if TYPE_CHECKING:
    from fastckpt_top.rows import Row

TINY: Final = 4
"""A list of fewer lines than this has no head."""
TIGHT: Final = 24
"""On screens narrower than this, the rate and its percentage have one cell less each."""
WIDE: Final = 56
"""From this width on (60 with a box), the cause that delays a rank is shown with its share."""
LEAD: Final = 5
"""The fewest rows above a grid."""
MOST: Final = 0.6
"""The largest share of the screen's height for the ranks, unless showing them all takes more."""
OPTIONAL: Final = ("wait", "state", "eta", "bar", "done", "engine", "threads", "spark", "gpu", "pid")
"""Columns that may be missing, the most important first. Rank, rate and percentage never are."""


def columns(rows: list[Row], width: int) -> Columns:
    """Choose the columns. They depend only on the set of ranks, never on their current work.

    Args:
        rows: All ranks of the job, even those that a filter hides.
        width: Cells of a line.
    """
    tight = width < TIGHT
    many = any(len(row.threads) > 8 for row in rows)  # noqa: PLR2004
    every = (
        Column("rank", "RANK", max(1 if tight else 4, _named(rows)), right=True),
        Column("gpu", "GPU", 3, right=True),
        Column("pid", "PID", 7, right=True),
        Column("state", "STATE", cells.STATE),
        Column("rate", "GB/s", cells.RATE - tight, right=True),
        Column("bar", "", 8, most=40),
        Column("percent", "%", cells.PERCENT - tight, right=True),
        Column("spark", "trend", 6, most=60),
        Column("threads", "THREADS", 16 if many else 8, least=7),
        Column("done", "DONE", 4, right=True),
        Column("eta", "ETA", 5, right=True),
        Column("engine", "ENGINE", 8),
        Column("wait", "WAITS", cells.WAIT if width >= WIDE else cells.SHORT_WAIT, least=4),
    )
    return Columns(every, OPTIONAL, width)


def wanted(frame: Frame, width: int) -> int:
    """Lines that the ranks need, borders included: one each, or the lines of a grid."""
    shown = frame.ui.shown(frame.model)
    around = 1 + (BORDERS if boxed(frame) else 0)
    most = int(frame.height * MOST) - around
    if len(shown) <= most:
        return max(len(shown), 1) + around
    size = grid.size(shown[LEAD:], _named(shown), width - SIDES if boxed(frame) else width, most - LEAD)
    return min(max(LEAD + size.lines(len(shown) - LEAD), most), len(shown)) + around


def block(frame: Frame, width: int, height: int) -> list[Line]:
    """The ranks of the shown job."""
    if height <= 0 or width <= 0:
        return []
    shown = frame.ui.shown(frame.model)
    framed, inner, room = inside(frame, width, height)
    cols = columns(_all(frame), inner)
    targets = {row.target for row in _all(frame) if row.target}
    head = [cells.head(frame, cols, targets)] if room >= TINY or room > len(shown) else []
    body, note = _body(frame, shown, cols, room - len(head))
    made = [*head, *body]
    if framed:
        row = frame.ui.selection(shown)
        slowest = Line() if row is None else cells.slowest_thread(row, inner // 2)
        foot = _legend(frame, inner - slowest.width - 6), slowest
        return box(frame, made, _title(frame, shown), Line(note, "dim"), width, height, foot)
    made += [Line() for _ in range(height - len(made))]
    for line in made:
        chosen = line.selected
        line.fill(width)
        line.selected = width if chosen else 0
    return made


def _legend(frame: Frame, width: int) -> Line:
    """The meaning of a thread's cell: `▆ is a thread at its share, 3.00 / 4 = 0.75 GB/s`."""
    share = cells.thread_target(_all(frame))
    variants = (f" is a thread at its share, {share} GB/s", f" a thread at {share.rpartition('= ')[2]} GB/s", "")
    full = Line(cells.level(1.0, frame.glyphs), "good")
    return full.add(said, "dim") if share and (said := words(variants, width - 2)) else Line()


def _all(frame: Frame) -> list[Row]:
    """The job's rows before any filter, which determine the widths of the columns."""
    job = frame.ui.job_of(frame.model)
    return [row for row in frame.model.rows if not job or row.job_key == job]


def _named(rows: list[Row]) -> int:
    """Cells of the longest name."""
    return max((len(cells.name(row)) for row in rows), default=1)


def _title(frame: Frame, shown: list[Row]) -> Line:
    """`8 ranks`, their order, and the filter."""
    ui, glyphs = frame.ui, frame.glyphs
    line = Line(text.count(len({row.proc_key for row in shown}), "rank"), "title")
    line.add(f" {glyphs.middot} ", "dim").add(SORTS[ui.sort], "head")
    if ui.filter:
        line.add(f" {glyphs.middot} ", "dim").add(f"filter {frame.say(text.cut(ui.filter, 20))}", "low")
    return line


def rank_line(frame: Frame, row: Row, cols: Columns, *, selected: bool) -> Line:
    """One rank's line."""
    glyphs = frame.glyphs
    found = cells.figure(row)
    state = cells.state(row)
    parts: dict[str, tuple[str, str] | Line] = {
        "rank": (cells.name(row), "strong" if row.straggler else "text"),
        "gpu": ("-" if row.gpu is None else str(row.gpu), "dim"),
        "pid": (str(row.pid), "dim"),
        "state": (state, cells.STATE_STYLES.get(state, "strong")),
        "rate": (text.rate(found.rate), found.style),
        "bar": cells.gauge(found.share, cols["bar"], found.style, glyphs),
        "percent": (cells.percent(found.share, cols["percent"]), found.style),
        "spark": (
            cells.spark(row.spark, cols["spark"], row.target, glyphs),
            "graph" if found.live else "dim",
        ),
        "threads": cells.threads(frame, row, cols["threads"]),
        "done": (text.percent(row.progress), "text"),
        "eta": (cells.eta(row), "low" if row.straggler else "text"),
        "engine": (cells.engine(row), "low" if row.fallback else "dim"),
        "wait": cells.wait(row, room=cols["wait"], stated=cols["state"] > 0, flag=not cols["engine"]),
    }
    line = cols.row(Line(frame.glyph(found.verdict), found.mark_style), parts, glyphs.select if selected else " ")
    line.selected = cols.width if selected else 0
    return line


def _body(frame: Frame, shown: list[Row], cols: Columns, room: int) -> tuple[list[Line], str]:
    """The rows in at most ``room`` lines, with a grid if they do not fit, and a note on the shown part."""
    if not shown:
        words = f"no rank matches {frame.say(frame.ui.filter)!r}" if frame.ui.filter else "no rank"
        return [Line(f"  {words}", "dim")] if room > 0 else [], "0 of 0"
    count = len(shown)
    chosen = frame.ui.selection(shown)
    if count > room >= LEAD + 2:
        return _with_grid(frame, shown, chosen, cols, room)
    at = shown.index(chosen) if chosen is not None else 0
    first = frame.ui.scroll.get("live", 0)  # it moves only as far as needed to show the selected row
    first = max(0, min(max(min(first, at), at - room + 1), count - room))
    frame.ui.scroll["live"] = first
    part = shown[first : first + max(room, 0)]
    made = [rank_line(frame, row, cols, selected=row is chosen) for row in part]
    dash = "-" if frame.glyphs is text.ASCII else "\N{EN DASH}"
    return made, f"{first + 1}{dash}{first + len(part)} of {count}" if part else f"0 of {count}"


def _with_grid(frame: Frame, shown: list[Row], chosen: Row | None, cols: Columns, room: int) -> tuple[list[Line], str]:
    size = grid.size(shown[LEAD:], _named(_all(frame)), cols.width, room - LEAD)
    lead = LEAD
    while lead + 1 + size.lines(len(shown) - lead - 1) <= room:
        lead += 1
    above = [rank_line(frame, row, cols, selected=row is chosen) for row in shown[:lead]]
    below, count = grid.block(frame, shown[lead:], chosen, size, room - lead)
    every, hidden = len(shown), len(shown) - lead - count
    note = f"{every} of {every}" if not hidden else f"{lead + count} of {every}, {hidden} not shown"
    return [*above, *below], note
