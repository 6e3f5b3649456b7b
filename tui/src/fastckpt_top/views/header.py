"""The top of the screen: title, a pair of lines an operation, the graph. And the bottom: message and keys."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from fastckpt_top import __version__, text
from fastckpt_top.rows import NodeOp, Verdict
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line, rate_style, share

if TYPE_CHECKING:
    from fastckpt_top.rows import Checkpoint

KEYS: Final = (
    ("q", "Quit", "quit"),
    ("?", "Help", "help"),
    ("Enter", "Threads", "expand"),
    ("s", "Sort", "sort"),
    ("/", "Filter", "filter"),
    ("Space", "Pause", "pause"),
    ("T", "Tier", "tier"),
    ("1-4", "Views", "next_view"),
    ("r", "Record", "record"),
)
MORE_KEYS: Final = (
    ("t", "All threads", "all_threads"),
    ("S", "Reverse", "reverse"),
    ("a", "Average", "mode"),
    ("e", "Graph", "full"),
    ("+/-", "Interval", "slower"),
    ("F12", "Screenshot", "picture"),
)
REPLAY_KEYS: Final = (
    ("q", "Quit", "quit"),
    ("?", "Help", "help"),
    ("Space", "Play", "pause"),
    ("Left/Right", "Step", "step_forward"),
    ("[ ]", "10 s", "jump_forward"),
    (", .", "Speed", "faster"),
    (":", "Go to", "goto"),
    ("1-4", "Views", "next_view"),
)
EVENT_SHOWN_S: Final = 60.0
"""How long a warning stays in the message line, seconds."""


LAST: Final = 18
"""Cells for the rank that the node waits for: `  last: pid 1234567`."""
NAMED: Final = 3
"""How many fallbacks the message line names."""


def title(frame: Frame) -> Line:
    """The first line. What matters least is left out where it is narrow."""
    model, node, glyphs = frame.model, frame.model.node, frame.glyphs
    target = node.target
    main = model.main
    saving = main is None or main.kind == "save"
    figure = target.save if saving else target.load
    count = f"{node.alive}/{text.count(node.ranks, 'rank')}"
    tier = f"{target.name} {text.rate(figure)} GB/s/GPU"
    paused = frame.ui.paused and frame.live
    status = "TABLE PAUSED" if paused else frame.status
    mark, mark_style = (glyphs.pause, "low") if paused or not frame.live else (glyphs.live, "good")
    clock = time.strftime("%H:%M:%S", time.localtime(model.real))
    optional: list[tuple[int, str]] = [
        (1, count),
        (3, frame.say(node.host)),
        (4, f"tier {tier}" if target.name != "custom" else f"target {text.rate(figure)} GB/s/GPU"),
        (6, f"{frame.ui.interval:g}s"),
        (7, f"job {frame.say(text.cut(node.job, 32))}" if node.job else ""),
        *_choices(frame),
    ]
    name = "fastckpt-top" if frame.width >= 46 else "fastckpt"  # noqa: PLR2004
    if frame.width >= 140:  # noqa: PLR2004
        name += f" {__version__}"
    room = frame.width - len(name) - 2
    right: list[tuple[int, str]] = [(0, f"{mark} {status}"), (5, clock)]
    chosen: set[str] = set()
    for _, word in sorted((*optional, *right)):
        if word and text.width(word) + 2 <= room:
            room -= text.width(word) + 2
            chosen.add(word)
    line = Line(" ").add(name, "title")
    for _, word in (pair for pair in optional if pair[1] in chosen):
        line.add("  ").add(
            word, "bad" if word == "REC" else "low" if word.startswith(("filter ", "running ")) else "text"
        )
    tail = Line()
    for _, word in right:
        if word in chosen:
            tail.add("  ")
            if word.startswith(mark):
                tail.add(mark, mark_style).add(word[len(mark) :], "low" if paused else "text")
            else:
                tail.add(word, "dim")
    return line.fill(frame.width - tail.width).extend(tail)


def _choices(frame: Frame) -> list[tuple[int, str]]:
    """What the user has chosen that changes what is shown: how much it matters, and a word."""
    ui = frame.ui
    order = f"sort {ui.sort}{' reversed' if ui.reverse else ''}" if ui.sort != "rank" or ui.reverse else ""
    return [
        (8, order),
        (2, f"filter {frame.say(text.cut(ui.filter, 16))}" if ui.filter else ""),
        (2, "running only" if ui.active_only else ""),
        (2, "REC" if ui.recording else ""),
    ]


def op_lines(frame: Frame) -> list[Line]:
    """Two lines for each running operation; for none, the last one and how long ago."""
    running = [op for op in frame.model.ops if op.running]
    room = 1 if frame.height < 12 else 2 if frame.height < 24 else 3  # noqa: PLR2004
    lines: list[Line] = []
    for op in running[:room]:
        lines += [_rate_line(frame, op), _progress_line(frame, op)]
    if running:
        return lines
    last = frame.model.main
    if last is None:
        return [Line(" idle: no operation yet", "dim").fill(frame.width)]
    return [_rate_line(frame, last), _idle_line(frame, last)]


def one_line(frame: Frame) -> Line:
    """All that fits into a screen of one line."""
    op = frame.model.main
    if op is None:
        words = "idle" if frame.model.node.ranks else "no fastckpt process"
        return Line(f"{frame.glyphs.quiet} {words}", "dim").fill(frame.width)
    now = op.rate if op.rate is not None else op.average
    line = Line(frame.glyph(op.verdict), VERDICT_STYLES[op.verdict])
    unit = " GB/s" if frame.width >= 34 else ""  # noqa: PLR2004
    line.add(f" {text.percent(op.progress)} {text.rate(now)}/{text.rate(op.target)}{unit}")
    line.add(f" ETA {text.clock(op.eta_s)}" if op.running else f" {op.phase}")
    return line.fill(frame.width)


def _verdict(frame: Frame, op: NodeOp) -> Line:
    words = {
        Verdict.GOOD: "OK",
        Verdict.LOW: "LOW",
        Verdict.BAD: "SLOW",
        Verdict.FAILED: op.phase.upper() if not op.running else "TROUBLE",
        Verdict.QUIET: "",
    }
    style = VERDICT_STYLES[op.verdict]
    return Line(f"{frame.glyph(op.verdict)} {words[op.verdict]}".rstrip(), style)


def _rate_line(frame: Frame, op: NodeOp) -> Line:
    """`SAVE  21.21 / 24.0 GB/s [bar] 88%  avg 20.9  peak 22.0  LOW`; in fsync and after the end the average, dim."""
    width, glyphs = frame.width, frame.glyphs
    now = op.rate if op.rate is not None else op.average
    fraction = share(now, op.target)
    current = op.rate is not None
    style = rate_style(fraction) if current else "dim"
    line = Line(f" {op.kind.upper():<6}" if width >= 40 else " ", "strong")  # noqa: PLR2004
    line.add(f"{text.rate(now):>6}", style if not current else "strong").add(f" / {text.rate(op.target)}")
    if width >= 30:  # noqa: PLR2004
        line.add(" GB/s")
    tail = Line(f" {text.percent(fraction):>4}", style)
    if width >= 60:  # noqa: PLR2004
        tail.add("  avg ", "dim").add(f"{text.rate(op.average):>5}")
    if width >= 110:  # noqa: PLR2004
        tail.add("  peak ", "dim").add(f"{text.rate(op.peak or None):>5}")
    if width >= 48:  # noqa: PLR2004
        tail.add("  ").extend(_verdict(frame, op).fill(9))
    room = width - line.width - tail.width - 4
    if room >= 4:  # noqa: PLR2004
        line.add(f" {glyphs.left}", "dim").add(text.bar(fraction, room, glyphs.bar), style).add(glyphs.right, "dim")
    return line.extend(tail).fill(width)


def _progress_line(frame: Frame, op: NodeOp) -> Line:
    """`step-1000  WRITE  [bar] 62%  198.9/319.2 GB  ETA 00:13  t+09  last: rank 6`."""
    width, glyphs = frame.width, frame.glyphs
    label = frame.say(op.label) or (f"step {op.step}" if op.step is not None else op.kind)
    line = Line(" ")
    if width >= 60:  # noqa: PLR2004
        line.add(text.fit(label, min(max(text.width(label), 6), width // 5), glyphs), "strong").add("  ")
    line.add(f"{op.phase.upper():<6}", "strong" if op.phase in ("write", "read") else "low")
    tail = Line(f" {text.percent(op.progress):>4}")
    if width >= 48:  # noqa: PLR2004
        tail.add(f"  {text.size(op.done)}/{text.size(op.total or None)} GB")
    if width >= 34:  # noqa: PLR2004
        tail.add("  ETA ", "dim").add(text.clock(op.eta_s))
    if width >= 70:  # noqa: PLR2004
        tail.add("  t+", "dim").add(text.clock(op.elapsed_s))
    end = tail.width
    if width >= 96:  # noqa: PLR2004  (also while nobody is behind: the bar must not shrink when somebody is)
        tail.add("  last: " if op.last else "", "dim").add(op.last, "low").fill(end + LAST)
    room = width - line.width - tail.width - 4
    if room >= 4:  # noqa: PLR2004
        line.add(f" {glyphs.left}", "dim").add(text.bar(op.progress, room, glyphs.bar), "graph").add(
            glyphs.right, "dim"
        )
    return line.extend(tail).fill(width)


def _idle_line(frame: Frame, last: NodeOp) -> Line:
    """`step-1000 done 319.2 GB in 14.9 s, 00:41 ago, every 04:00`."""
    label = frame.say(last.label)
    line = Line(" idle  ", "dim").add(text.fit(label, min(text.width(label), frame.width // 4), frame.glyphs)).add(" ")
    line.add(last.phase, "bad" if last.verdict is Verdict.FAILED else "text")
    line.add(f"  {text.size(last.done)} GB in {last.elapsed_s:.1f} s")
    ago = frame.model.real - last.started_real - last.elapsed_s
    line.add(f"  {text.ago(ago)} ago", "dim")
    every = frame.model.past.interval_s(last.kind)
    if every is not None:
        line.add(f"  every {text.clock(every)}", "dim")
    return line.fill(frame.width)


def graph(frame: Frame, height: int, width: int | None = None) -> list[Line]:
    """The node's rate over time, on a fixed scale, with a dotted line at the target.

    Args:
        frame: What to paint.
        height: Lines.
        width: Cells; None for the whole width.
    """
    width = frame.width if width is None else width
    if height <= 0 or width < 20:  # noqa: PLR2004
        return []
    model, glyphs = frame.model, frame.glyphs
    op = model.main
    saving = op is None or op.kind == "save"
    values = list(model.save_graph if saving else model.load_graph)
    target = op.target if op is not None else (model.node.target.save * model.node.gpus)
    top = max(1.1 * target, op.peak if op is not None else 0.0, 1e6)
    cells = width - 8
    labels = axis(top, height)
    # The cell that the target's height falls into.
    target_row = height - 1 - min(int(target / top * height), height - 1)
    labels[target_row] = text.rate(target) if target > 0 else labels[target_row]
    lines = []
    for row, columns in enumerate(text.columns(values, cells, height, top, glyphs)):
        at_target = row == target_row and target > 0
        line = Line(f"{labels[row]:>6}", "target" if at_target else "dim")
        line.add(">" if at_target else " ", "target").add(glyphs.axis, "dim")
        if at_target:
            start = 0
            while start < len(columns):
                blank = columns[start] == " "
                stop = start
                while stop < len(columns) and (columns[stop] == " ") == blank:
                    stop += 1
                line.add(glyphs.dots * (stop - start) if blank else columns[start:stop], "target" if blank else "graph")
                start = stop
        else:
            line.add(columns, "graph")
        lines.append(line.fill(width))
    return lines


def axis(top: float, height: int) -> list[str]:
    """Round numbers at the axis of a graph, each in the line that its height falls into.

    Args:
        top: Bytes/s of the full height, positive.
        height: Lines.

    Returns:
        A label a line, in GB/s, the top line first; empty where no round number is.
    """
    labels = [""] * height
    least = 1.3 * top / max(height, 1) / text.GB  # fewer labels than lines
    power = math.floor(math.log10(least))
    step = next(n * 10.0**power for n in (1, 2, 5, 10) if n * 10.0**power >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    for number in range(int(top / text.GB / step * (1 + 1e-9)) + 1):
        row = height - 1 - min(int(number * step * text.GB / top * height * (1 + 1e-9)), height - 1)
        labels[row] = f"{number * step:.{decimals}f}"
    return labels


def message(frame: Frame) -> Line:
    """The most urgent thing to say: a notice, a stall, a fallback, a warning, or the last checkpoint."""
    model, glyphs, width = frame.model, frame.glyphs, frame.width
    line = Line()
    if frame.ui.notice:
        line.add(f" {frame.say(frame.ui.notice)}", "strong")
        return line.fill(width)
    stalled = [row for row in model.rows if row.stalled_s is not None]
    last = model.past.checkpoints[-1] if model.past.checkpoints else None
    recent = [event for event in model.events if event.level == "bad" and model.real - event.real < EVENT_SHOWN_S]
    if stalled:
        words = ", ".join(f"{row.name} STALL {text.ago(row.stalled_s or 0.0)}" for row in stalled[:4])
        line.add(f"{glyphs.warn} {words}", "bad")
    elif recent:
        line.add(f"{glyphs.warn} {frame.say(recent[-1].text)}", "bad")
    elif model.node.fallbacks:
        more = len(model.node.fallbacks) - NAMED
        words = ", ".join(model.node.fallbacks[:NAMED]) + (f" and {more} more" if more > 0 else "")
        line.add(f"{glyphs.warn} fallback: {words}", "low")
    elif model.problems:
        path, reason = model.problems[0]
        line.add(f"{glyphs.warn} {frame.say(path)}: {reason}", "low")
    if last is not None:
        tail = f"last {_checkpoint(last)}"
        if line.width + len(tail) + 3 <= width:
            line.fill(width - text.width(tail) - 1).add(frame.say(tail), "bad" if last.error else "dim")
    return line.fill(width)


def _checkpoint(last: Checkpoint) -> str:
    return f"{last.kind} {last.label} {last.seconds:.1f}s {text.rate(last.average)} GB/s" + (
        f" {last.error}" if last.error else ""
    )


def keys(frame: Frame) -> tuple[Line, list[tuple[int, int, str]]]:
    """The last line, and which cells of it mean which action."""
    words = (KEYS + MORE_KEYS if frame.width >= 110 else KEYS) if frame.live else REPLAY_KEYS  # noqa: PLR2004
    line = Line()
    zones = []
    for key, word, action in words:
        if line.width + len(key) + len(word) + 3 > frame.width:
            break
        start = line.width
        line.add(" ").add(key, "key").add(f" {word} ", "dim")
        zones.append((start, line.width - 1, action))
    return line.fill(frame.width), zones
