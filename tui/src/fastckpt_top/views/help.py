"""The help, over the whole screen: keys, and the meaning of every sign, column and word. Pure."""

from __future__ import annotations

import textwrap
from typing import Final

from fastckpt_top.keys import KEYS, REPLAY_KEYS, Key
from fastckpt_top.views import cells
from fastckpt_top.views.paint import Frame, Line, scrolled

_TOP: Final = (
    ("done", "bytes written or read, of all; the full bar is 100 %"),
    ("speed", "average of the operation so far, its target, and the share of it"),
    ("now peak", "rate of all ranks in the last second, and the largest one seen"),
    ("elapsed took", "time since the first rank began; time in all"),
    ("ETA", "until the last rank's bytes are durable"),
    ("OK NEAR SLOW", "verdict on the average: from 100 %, from 80 %, below 80 % of the target"),
    ("FAILED", "a rank died or failed; the sentence below says which"),
    ("3 of 4 ranks", "so many processes of the job live"),
    ("high 3.00 GB/s", "name of the target and what it asks of each GPU; custom ones have no name"),
    ("0.5 s", "time between two looks"),
)
_TABLE: Final = (
    ("RANK GPU PID", "rank, index of its GPU, process"),
    ("GB/s %", "rate of the last second, or the average where that says nothing; share of the rank's target"),
    ("last 4 s", "the rates of the last seconds, one column each half second"),
    ("THREADS", "a cell for each thread, as high as its share of its target: that of the rank by its threads"),
    ("DONE ETA", "share of the bytes that are done; time until they are durable"),
    ("ENGINE", "uring, threads (of pwrite or pread), buffer (page cache); ! after a fallback"),
    ("THR TID", "thread, and its number in ps"),
    ("QD", "requests in flight"),
    ("p50 p99", "latency that half, or all but one in a hundred, of the requests keep to"),
    ("GB TOOK fsync", "of an operation that has ended: size, seconds, and those of them in fsync"),
)


def lines(frame: Frame) -> list[Line]:
    """The visible part of the help page, as high and wide as the frame."""
    rows = _page(frame)
    if frame.height == 1:
        return [rows[0].fill(frame.width)]
    part, first = scrolled(rows, frame.ui.scroll.get("help", 0), frame.height - 1)
    frame.ui.scroll["help"] = first
    below = len(rows) - first - len(part)
    foot = Line(" any other key closes" if frame.width < 60 else " Up and Down scroll, any other key closes", "key")  # noqa: PLR2004
    if first or below:
        more = f"{below} more lines" if below else "end"
        foot.add(f"   {more}", "low")
    part += [Line() for _ in range(frame.height - 1 - len(part))]
    return [row.fill(frame.width) for row in (*part, foot)]


def _page(frame: Frame) -> list[Line]:
    glyphs = frame.glyphs
    signs = (
        (glyphs.good, "good", "at its target: from 100 %"),
        (glyphs.low, "low", "from 80 % of it"),
        (glyphs.bad, "bad", "below 80 %"),
        (glyphs.dead, "bad", "died or failed"),
        (glyphs.quiet, "dim", "nothing to judge"),
        (glyphs.warn, "low", "something to know"),
        (glyphs.mark, "target", "the target in a bar of speed, which goes to 125 % of it"),
        (glyphs.spark[-1], "graph", "GB/s written, by the node"),
        (glyphs.dotted[-1], "read", "GB/s read"),
        (glyphs.level[1], "target", "the target in the graph"),
    )
    rows: list[Line] = []
    if not frame.live:
        rows += _section(frame, "Keys of a replay", _explained(REPLAY_KEYS))
    rows += _section(frame, "Keys", _explained(KEYS))
    rows += [Line(" Signs", "title"), *(_sign(frame, *sign) for sign in signs), Line()]
    rows += _section(frame, "The box at the top", _TOP)
    rows += _section(frame, "Ranks, threads, history", _TABLE)
    rows += _section(frame, "States", cells.STATE_WORDS)
    rows += _section(frame, "What a rank waits for", cells.WAIT_WORDS)
    rows.append(Line(" GB is 10^9 bytes, MiB 2^20. A label in the graph is what the", "dim"))
    rows.append(Line(" upper edge of its line stands for.", "dim"))
    return rows


def _explained(keys: tuple[Key, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((key.sign, key.does) for key in keys if key.does)


def _sign(frame: Frame, glyph: str, style: str, what: str) -> Line:
    return Line(f" {glyph}", style).add(f"{'':{_indent(frame) - 2}}{what}")


def _indent(frame: Frame) -> int:
    return 18 if frame.width >= 60 else 6  # noqa: PLR2004


def _section(frame: Frame, name: str, pairs: tuple[tuple[str, str], ...]) -> list[Line]:
    """Words at the left, and their meanings at the right, or below them if there is no room."""
    indent = _indent(frame)
    rows = [Line(f" {name}", "title")]
    for word, what in pairs:
        wrapped = textwrap.wrap(what, max(frame.width - indent, 8))
        line = Line(f" {word}", "key")
        if len(word) + 2 > indent:
            rows.append(line)
            line = Line()
        rows.append(line.fill(indent).add(wrapped[0]))
        rows += [Line(" " * indent).add(rest) for rest in wrapped[1:]]
    return [*rows, Line()]
