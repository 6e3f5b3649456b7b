"""The help, over the whole screen; any key closes it."""

from __future__ import annotations

from typing import Final

from fastckpt_top.views.paint import Frame, Line

_KEYS: Final = (
    ("1 2 3 4 Tab", "live, threads, history, events"),
    ("Up Down j k", "select a rank, or scroll"),
    ("PgUp PgDn Home End g G", "scroll"),
    ("Enter", "threads of the selected rank"),
    ("t", "threads of all ranks"),
    ("s S < >", "sort column, reverse"),
    ("/  Esc", "filter by rank, pid, job, label, state; clear"),
    ("o", "only ranks with a running operation"),
    ("a", "rate now, average, GB done"),
    ("T", "target: light, medium, high"),
    ("e", "graph on the whole screen"),
    ("Space", "pause the table"),
    ("+ -", "look less or more often"),
    ("r", "start or stop recording"),
    ("F12", "screenshot: SVG and text"),
    ("q Ctrl-C", "quit"),
)
_REPLAY: Final = (
    ("Space", "play, pause"),
    ("Left Right", "a tick back, forward"),
    ("[ ]", "10 s back, forward"),
    (", .", "half, double speed"),
    (":", "go to a time (mm:ss)"),
    ("Home End", "beginning, end"),
)


def lines(frame: Frame) -> list[Line]:
    """The help page, as high and wide as the frame."""
    glyphs = frame.glyphs
    rows = [Line(" fastckpt-top: keys", "title")]
    for key, what in (*(_REPLAY if not frame.live else ()), *_KEYS):
        rows.append(Line(f" {key:<23}" if frame.width >= 60 else f" {key.split()[0]:<6}", "key").add(f" {what}"))  # noqa: PLR2004
    rows.append(Line())
    legend = Line(" ")
    for glyph, style, what in (
        (glyphs.good, "good", "at target"),
        (glyphs.low, "low", "80 % of it"),
        (glyphs.bad, "bad", "less"),
        (glyphs.dead, "bad", "died or failed"),
    ):
        legend.add(glyph, style).add(f" {what}  ", "dim")
    rows.append(legend)
    rows.append(Line(" +D O_DIRECT   ! fallback   GB = 10^9 bytes   verdicts judge the whole operation", "dim"))
    rows = rows[: frame.height]
    rows += [Line() for _ in range(frame.height - len(rows))]
    return [row.fill(frame.width) for row in rows]
