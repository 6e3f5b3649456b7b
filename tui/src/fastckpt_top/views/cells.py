"""The cells in the rows of ranks and threads, and the meaning of their words and signs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import Row, ThreadRow, Verdict, judge, share
from fastckpt_top.tracks import COLUMN_S
from fastckpt_top.views.boxes import words
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fastckpt_top.views.columns import Columns

SCALE: Final = 1.25
"""The multiple of the target at full height or length, in bars, sparks and cells of threads."""
RATE: Final = 6
PERCENT: Final = 5
STATE: Final = 6
WAIT: Final = 12
"""Cells of a rate, a percentage, a state, and a wait with its share."""
SHORT_WAIT: Final = 7
"""Cells of a wait without its share."""
TINY_WAITS: Final = {"source": "src", "limit": "lim", "fsync": "sync", "the last": "last"}
"""Names of waits in at most four cells."""

STATE_STYLES: Final = {
    **dict.fromkeys(("STALL", "STOP", "STUCK", "DEAD", "FAILED", "ERROR"), "bad"),
    **dict.fromkeys(("FSYNC", "COMMIT", "STAGE", "SOURCE", "LIMIT"), "low"),
    **dict.fromkeys(("IDLE", "EXIT", "DONE", "PLAN", "WAIT"), "dim"),
}

STATE_WORDS: Final = (
    ("PLAN", "reads the sizes and lays out the files"),
    ("STAGE", "copies the tensors to memory of its own"),
    ("WRITE READ VERIFY", "moves data"),
    ("FSYNC COMMIT", "makes it durable, then visible"),
    ("COPY DRAIN FETCH", "copies a checkpoint, as the program or its manager wants"),
    ("WAIT", "waits for another rank"),
    ("STALL", "no progress for seconds"),
    ("STOP", "stopped by a signal (T in ps)"),
    ("STUCK", "requests are on their way, and none is answered"),
    ("DEAD FAILED", "died in, or failed with, its operation"),
    ("DONE IDLE EXIT", "has ended; has nothing to do; has exited"),
)
"""States of a rank, for the help."""

WAIT_WORDS: Final = (
    ("disk 98%", "a request was on its way to the storage for so much of the last second"),
    ("source 98%", "waited for tensors: copies from the device, checksums"),
    ("limit 98%", "held back by bandwidth_limit"),
    ("fsync", "the storage makes it durable"),
    ("peers 98%", "waited for the bytes of other ranks"),
    ("memory", "waits for a page of the tensors"),
    ("rank 3", "waits for that rank"),
    ("threads!", "fell back to this engine; so does ! behind a wait"),
)
"""The contents of WAITS and ENGINE, for the help."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The rate that a rank or a thread shows, and its reference.

    Attributes:
        rate: Bytes/s; None if unknown.
        share: The share of the target; None if unknown.
        live: Whether it is the current rate, not the operation's average.
        verdict: The verdict on this figure.
    """

    rate: float | None
    share: float | None
    live: bool
    verdict: Verdict

    @property
    def style(self) -> str:
        """The figure's colour, which repeats the mark; past rates are dimmed."""
        return VERDICT_STYLES[self.verdict] if self.live else "dim"

    @property
    def mark_style(self) -> str:
        """The mark's colour."""
        return VERDICT_STYLES[self.verdict]


def figure(row: Row) -> Figure:
    """The rate of a rank: the current one, or the average if no current one can be judged.

    The rate of a rank whose threads have run out of work does not describe its storage.
    """
    live = row.rate is not None and not running_out(row)
    shown = row.rate if live else row.average
    quiet = row.verdict in (Verdict.FAILED, Verdict.QUIET)
    return Figure(shown, share(shown, row.target), live, row.verdict if quiet else judge(shown, row.target))


def thread_figure(thread: ThreadRow) -> Figure:
    """The rate of a thread: the current one, or its average in the operation if there is none."""
    live = thread.rate is not None
    shown = thread.rate if live else thread.average
    verdict = Verdict.FAILED if thread.state == "ERROR" else judge(shown, thread.target)
    return Figure(shown, share(shown, thread.target), live, verdict)


def running_out(row: Row) -> bool:
    """Whether some threads of a running operation are done and the others continue."""
    return row.running and any(thread.state == "IDLE" and thread.done for thread in row.threads)


def gb(count: float | None, room: int) -> str:
    """A number of GB, right-aligned in `room` cells, without its decimal if that does not fit."""
    words = text.size(count)
    return f"{words if len(words) <= room else words.partition('.')[0]:>{room}}"


def percent(fraction: float | None, room: int = PERCENT) -> str:
    """A percentage, right-aligned in `room` cells; a multiple, `45x`, if the percentage does not fit."""
    words = text.percent(fraction)
    if len(words) > room and fraction is not None:
        words = f"{min(int(fraction), 999)}x"
    return f"{words:>{room}}"


def mark_at(cells: int) -> int:
    """The cell of a bar that contains the target's mark."""
    return min(round(cells / SCALE), cells - 1)


def gauge(fraction: float | None, cells: int, style: str, glyphs: text.Glyphs) -> Line:
    """A bar on a track from 0 to 125 % of the target, with a mark at the target.

    Args:
        fraction: The share of the target; None or nan leaves the track empty.
        cells: Width.
        style: The style of the full part.
        glyphs: The characters.

    Returns:
        Exactly `cells` cells. The part before the mark is full if and only if the target is reached.
    """
    line = Line()
    if cells <= 0:
        return line
    before, after = mark_at(cells), cells - mark_at(cells) - 1
    value = fraction if fraction is not None and math.isfinite(fraction) else 0.0
    first = before if value >= 1 else min(math.floor(value * before + 0.5), before - 1)
    if value > 0 and before > 1:
        first = max(first, 1)  # a value above 0 is visible
    beyond = min(round(max(value - 1.0, 0.0) / (SCALE - 1.0) * after), after)
    first = max(first, 0)
    line.add(glyphs.full * first, style).add(glyphs.track * (before - first), "dim")
    line.add(glyphs.mark, "target")
    return line.add(glyphs.full * beyond, style).add(glyphs.track * (after - beyond), "dim")


def gauge_head(cells: int, target: float | None, glyphs: text.Glyphs) -> Line:
    """The head over bars: 0, the mark, and the target in GB/s at a side with room for it.

    Args:
        cells: Width.
        target: Bytes/s; None if the rows differ.
        glyphs: The characters.
    """
    before, room = mark_at(cells), cells - mark_at(cells) - 1
    words = text.rate(target) if target else ""
    short = words.rstrip("0").rstrip(".") if "." in words else words
    left, right = (short, "") if room < len(short) < before - 1 else ("", short if len(short) <= room else "")
    line = Line("0" + left.rjust(before - 1) if before > 1 else "0"[:before], "dim")
    return line.add(glyphs.mark, "target").add(right.ljust(room), "dim")


def head(frame: Frame, cols: Columns, targets: Collection[float]) -> Line:
    """The head of a list of ranks or threads whose targets, bytes/s, are these."""
    heads: dict[str, str | Line] = {}
    if cols["bar"]:
        target = next(iter(targets)) if len(targets) == 1 else None
        heads["bar"] = gauge_head(cols["bar"], target, frame.glyphs)
    if len(trend := f"last {cols['spark'] * COLUMN_S:.0f} s") <= cols["spark"]:
        heads["spark"] = trend
    if cols["wait"] < len("WAITS FOR"):
        heads["wait"] = "WAITS"
    return cols.head(heads)


def spark(values: Sequence[float], cells: int, target: float, glyphs: text.Glyphs) -> str:
    """The last rates, one per cell, on the scale of the bars."""
    return text.spark(values, cells, SCALE * target, glyphs)


def level(fraction: float | None, glyphs: text.Glyphs) -> str:
    """One cell as high as a share of the target; the lowest for 0, the quiet mark for unknown."""
    if fraction is None:
        return glyphs.quiet
    found = text.spark((max(fraction, 0.0),), 1, SCALE, glyphs)
    return glyphs.spark[1] if found == " " else found


def threads(frame: Frame, row: Row, cells: int) -> Line:
    """One cell per thread, as high as its share of its target. With too few cells, each shows the worst of a group."""
    line = Line()
    count = len(row.threads)
    shown = min(count, cells)
    for cell in range(shown):
        group = row.threads[cell * count // shown : (cell + 1) * count // shown]
        found = min((thread_figure(thread) for thread in group), key=_worst)
        failed = found.verdict is Verdict.FAILED
        line.add(frame.glyphs.dead if failed else level(found.share, frame.glyphs), "bad" if failed else found.style)
    return line.fill(cells)


def _worst(figure: Figure) -> tuple[bool, float]:
    """The sort key of threads: those in error first, then the least share of the target, those without a share last."""
    return figure.verdict is not Verdict.FAILED, float("inf") if figure.share is None else figure.share


def worst_first(row: Row) -> list[ThreadRow]:
    """The threads of a rank, the one that delays it first."""
    return sorted(row.threads, key=lambda thread: _worst(thread_figure(thread)))


def thread_target(rows: Sequence[Row]) -> str:
    """`3.00 / 4 = 0.75`: the target of each thread of these ranks, if all are equal."""
    asked = {(row.target, len(row.threads)) for row in rows if row.threads and row.target}
    if len(asked) != 1:
        return ""
    ((target, count),) = asked
    return f"{text.rate(target)} / {count} = {text.rate(target / count)}"


def slowest_thread(row: Row, width: int) -> Line:
    """`rank 6 w2: 0.31 of 0.38 GB/s 82% disk 98%`: the thread that is furthest below its share of the target."""
    if not row.threads:
        return Line()
    thread = worst_first(row)[0]
    found = thread_figure(thread)
    if found.share is None:
        return Line()
    rate, target = text.rates(found.rate, thread.target)
    name, percentage = f"{row.name} w{thread.index}", text.percent(found.share)
    return Line(
        words(
            (
                f"slowest thread: {name}, {rate} of {target} GB/s {percentage} {thread.wait}".rstrip(),
                f"{name}: {rate} of {target} GB/s {percentage} {thread.wait}".rstrip(),
                f"{name}: {rate}/{target} {percentage}",
                f"w{thread.index} {percentage}",
                "",
            ),
            width,
        ),
        found.mark_style,
    )


def state(row: Row) -> str:
    """A rank's state in at most six cells; the reason why its process is stopped, if known."""
    if row.state == "STALL":
        return "STOP" if row.stopped else "STUCK" if row.wait_kind == "disk" else "STALL"
    return row.state[:STATE]


def wait(row: Row, *, room: int, stated: bool = True, flag: bool = False) -> Line:
    """The cause that delays a rank: with its share if there is room, else only the word.

    Args:
        row: The rank.
        room: Width.
        stated: Whether a column shows its state; else the state is shown here if there is no cause.
        flag: Whether a fallback is marked here, since no column names the engine.
    """
    short = room < WAIT
    style = "dim"
    said = row.wait
    if row.stalled_s is not None:
        lasting = text.ago(row.stalled_s)
        what = {"STOP": "stopped", "STUCK": "storage"}.get(state(row), row.wait_kind or "silent")
        said, style = lasting if short and stated else f"{what} {lasting}", "bad"
        if short and not stated:
            said = state(row)
    elif row.error or row.state == "DEAD":
        said, style = row.error or "died", "bad"
    elif row.straggler and not said:
        said = "the last"
    elif short and said.startswith("rank "):
        said = f"r{said[5:]}"
    elif short:
        said = said.partition(" ")[0]
    if not said and not stated:
        said = state(row).lower()
    if room < SHORT_WAIT - 1:
        said = TINY_WAITS.get(said, said)
    if style == "dim" and (row.straggler or said.startswith(("source", "limit"))):
        style = "low"
    mark = "!" if flag and row.fallback else ""
    return Line(text.cut(said, room - len(mark)), style).add(mark, "low").fill(room)


def thread_wait(thread: ThreadRow, cells: int, glyphs: text.Glyphs) -> Line:
    """The cause that delays a thread."""
    words = thread.wait if cells >= WAIT - 1 else thread.wait.partition(" ")[0]
    style = "low" if words.startswith(("source", "limit")) else "dim"
    return Line(text.fit(words, cells, glyphs), style)


def eta(row: Row) -> str:
    """The time until a rank's part is durable, in five cells."""
    if not row.running or row.stalled_s is not None:
        return "    -"
    if row.eta_s is None or row.eta_s < 3600:  # noqa: PLR2004
        return text.clock(row.eta_s)
    hours = int(row.eta_s // 3600)
    if hours < 100:  # noqa: PLR2004
        return f"{hours}h{int(row.eta_s // 60) % 60:02d}".rjust(5)
    return f"{min(hours // 24, 9999)}d".rjust(5)


def engine(row: Row) -> str:
    """The engine in eight cells at most, with `!` after a fallback."""
    if not row.engine or row.engine == "unknown":
        return "-"
    name = {"buffered": "buffer"}.get(row.engine, row.engine)[:7]
    return name + ("!" if row.fallback else "")


def name(row: Row) -> str:
    """The name of a row in its first column: its rank, else its pid."""
    return str(row.rank) if row.rank is not None else str(row.pid)
