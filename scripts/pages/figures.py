"""Draws the pictures of docs/figures, which explain the idea: python scripts/pages/figures.py writes them.

Each has colours for light and dark and its own background, so it is readable on any page. Text is in the
reader's fonts, so places leave room: a test compares them with letters of a wide font.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TO = ROOT / "docs" / "figures"
WIDTH = 720
#: By class: fill and stroke in light, then in dark. The first two are letters and lines.
COLOURS = {
    "ink": ("#1f2328", "none", "#e6edf3", "none"),
    "dim": ("#57606a", "none", "#a8b3bf", "none"),
    "ground": ("#ffffff", "#d0d7de", "#14181d", "#3d444d"),
    "grey": ("#eef1f4", "#8c959f", "#262c33", "#7d8590"),
    "blue": ("#dbeafe", "#2f6fbf", "#17324f", "#6cb0f5"),
    "green": ("#daf5e1", "#1a7f37", "#12371f", "#57c97a"),
    "amber": ("#fff0cf", "#9a6700", "#40300d", "#e0b050"),
    "line": ("none", "#57606a", "none", "#a8b3bf"),
    "rule": ("none", "#d0d7de", "none", "#3d444d"),
    "tip": ("#57606a", "none", "#a8b3bf", "none"),
}


def _style() -> str:
    light = "".join(f".{name}{{fill:{fill};stroke:{edge}}}" for name, (fill, edge, _, _) in COLOURS.items())
    dark = "".join(f".{name}{{fill:{fill};stroke:{edge}}}" for name, (_, _, fill, edge) in COLOURS.items())
    return (
        "text{font:14px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        ".small{font-size:12px}.bold{font-weight:600}"
        ".code{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:13px}"
        f".line{{stroke-width:1.5}}.dashed{{stroke-dasharray:5 4}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


class Figure:
    """A picture that grows piece by piece: `title` is its name for screen readers."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self._parts: list[str] = []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "ground")

    def text(self, x: float, y: float, words: str, style: str = "ink", anchor: str = "start") -> None:
        """A text on the line y."""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}"{at}>{escape(words, quote=False)}</text>')

    def box(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """A box with round corners."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} rx="5" class="{style}"/>')

    def label(self, x: float, y: float, width: float, height: float, style: str, *lines: str, of: str = "ink") -> None:
        """A box with lines of text in its middle."""
        self.box(x, y, width, height, style)
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, words in enumerate(lines):
            self.text(x + width / 2, first + 18 * number, words, of, "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> None:
        """A straight arrow, along an axis or not."""
        style = "line dashed" if dashed else "line"
        self._parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{style}" marker-end="url(#tip)"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, style: str = "line dashed") -> None:
        """A line without a tip."""
        self._parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{style}"/>')

    def dot(self, x: float, y: float, style: str) -> None:
        """A mark in a table."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="6" class="{style}"/>')

    def svg(self) -> str:
        """The file."""
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker>'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n<title>{escape(self.title)}</title>'
        return "\n".join([head, f"<style>{_style()}</style>", f"<defs>{tip}</defs>", *self._parts, "</svg>\n"])


def directory() -> Figure:
    """The files of a checkpoint, and who reads which."""
    figure = Figure("The files of a checkpoint, and which tools read them", 292)
    columns = {"fastckpt": (430, "blue"), "transformers": (540, "green"), "safetensors": (655, "amber")}
    figure.text(20, 34, "step-1000/", "ink code bold")
    for name, (x, _) in columns.items():
        figure.text(x, 34, name, "ink small bold", "middle")
    rows = (
        ("model-00001-of-00002.safetensors", "weights", "fastckpt transformers safetensors"),
        ("model-00002-of-00002.safetensors", "weights", "fastckpt transformers safetensors"),
        ("model.safetensors.index.json", "which weight is in which file", "transformers"),
        ("config.json", "if you give it: files=", "transformers"),
        ("training/training.safetensors", "optimizer and the rest", "fastckpt safetensors"),
        ("fastckpt.json", "values, names, checksums: last", "fastckpt"),
    )
    for number, (name, about, readers) in enumerate(rows):
        y = 70 + 38 * number
        figure.line(20, y - 23, WIDTH - 20, y - 23, style="rule")
        figure.text(34, y - 6, name, "ink code")
        figure.text(34, y + 9, about, "dim small")
        for reader in readers.split():
            x, style = columns[reader]
            figure.dot(x, y - 3, style)
    return figure


def timeline() -> Figure:
    """A training step under the three ways to save."""
    figure = Figure("Training steps under save, save_async and a lazy save_async", 372)
    left, unit = 132, 9.5

    def lane(y: float, *pieces: tuple[str, float, float, str]) -> None:
        for style, start, length, words in pieces:
            figure.label(left + unit * start, y, unit * length, 28, style, words, of="ink small")

    def head(y: float, name: str, about: str) -> None:
        figure.text(20, y, name, "ink code bold")
        figure.text(left, y, about, "dim small")

    def left_names(y: float, *names: str) -> None:
        for number, name in enumerate(names):
            figure.text(20, y + 19 + 34 * number, name, "dim small")

    compute, step = "forward, backward", "step"
    head(30, "save", "training stands still until the checkpoint is durable")
    left_names(42, "training")
    lane(42, ("grey", 0, 13, compute), ("grey", 13, 4, step), ("amber", 17, 25, "write, sync"))
    lane(42, ("grey", 42, 13, compute), ("grey", 55, 4, step))

    head(108, "save_async", "training stands still for one copy in memory")
    left_names(120, "training", "background")
    lane(120, ("grey", 0, 13, compute), ("grey", 13, 4, step), ("amber", 17, 8, "copy"))
    lane(120, ("grey", 25, 13, compute), ("grey", 38, 4, step), ("grey", 42, 13, compute), ("grey", 55, 4, step))
    lane(154, ("blue", 25, 17, "write, sync"))

    head(220, "lazy", "the copy runs beside the next forward and backward; the next step waits for its end")
    left_names(232, "training", "background")
    lane(232, ("grey", 0, 13, compute), ("grey", 13, 4, step))
    lane(
        232, ("grey", 17.6, 13, compute), ("grey", 30.6, 4, step), ("grey", 34.6, 13, compute), ("grey", 47.6, 4, step)
    )
    lane(266, ("green", 17.6, 11, "copy"), ("blue", 28.6, 17, "write, sync"))
    figure.box(left + unit * 17, 232, unit * 0.6, 28, "amber")
    figure.line(left + unit * 30.6, 226, left + unit * 30.6, 300)

    for x, style, words in (
        (20, "grey", "training"),
        (120, "amber", "training stands still"),
        (310, "green", "a copy, and training goes on"),
        (556, "blue", "writing, beside it"),
    ):
        figure.box(x, 334, 14, 14, style)
        figure.text(x + 21, 346, words, "dim small")
    figure.arrow(20, 318, WIDTH - 20, 318)
    return figure


def ranks() -> Figure:
    """Four ranks write the files that two ranks read."""
    figure = Figure("Four ranks save, two ranks load, and the files are the same", 282)
    figure.text(96, 32, "saved by 4 ranks", "ink bold", "middle")
    figure.text(360, 32, "one checkpoint", "ink bold", "middle")
    figure.text(624, 32, "loaded by 2 ranks", "ink bold", "middle")
    for rank in range(4):
        y = 48 + 46 * rank
        figure.label(20, y, 152, 36, "blue", f"rank {rank}: rows {64 * rank}-{64 * rank + 63}", of="ink small")
        figure.arrow(172, y + 18, 248, 100 + 14 * rank)
    figure.box(250, 48, 220, 174, "grey")
    figure.text(266, 76, "step-1000/", "ink code bold")
    for number, name in enumerate(("model.safetensors", "training/", "  training.safetensors", "fastckpt.json")):
        figure.text(282 + 14 * name.startswith(" "), 104 + 22 * number, name.strip(), "ink code")
    figure.text(360, 208, "each tensor whole, once", "dim small", "middle")
    for rank in range(2):
        y = 60 + 92 * rank
        figure.arrow(470, 112 + 28 * rank, 546, y + 32)
        figure.label(548, y, 152, 64, "green", f"rank {rank}:", f"rows {128 * rank}-{128 * rank + 127}", of="ink small")
    words = "The same shards as from one process, to the last byte: nothing to consolidate, convert or reshard."
    figure.text(360, 258, words, "dim small", "middle")
    return figure


def tiers() -> Figure:
    """Save, drain, restore."""
    figure = Figure("Two tiers: save to the local disk, drain to the remote, restore from either", 304)
    figure.label(20, 62, 120, 120, "grey", "training")
    for x, style, name, about, steps in (
        (252, "blue", "local tier", "a fast disk: keep=2", ("step-2000", "step-3000")),
        (532, "green", "remote tier", "remote_keep=", ("step-1000", "step-2000")),
    ):
        figure.box(x, 24, 168, 196, style)
        figure.text(x + 84, 54, name, "ink bold", "middle")
        figure.text(x + 84, 73, about, "dim small", "middle")
        for number, step in enumerate(steps):
            figure.label(x + 24, 96 + 38 * number, 120, 30, "ground", step, of="ink code")
    figure.text(616, 196, "step-3000 is being copied", "dim small", "middle")
    figure.text(336, 196, "step-1000 was removed", "dim small", "middle")
    figure.arrow(140, 100, 250, 100)
    figure.text(195, 90, "save", "ink bold", "middle")
    figure.arrow(250, 160, 142, 160, dashed=True)
    figure.text(195, 178, "restore", "ink", "middle")
    figure.arrow(420, 100, 530, 100)
    figure.text(475, 90, "drain", "ink bold", "middle")
    figure.arrow(530, 160, 422, 160, dashed=True)
    figure.text(475, 178, "restore", "ink", "middle")
    figure.text(20, 250, "Save: durable on the local disk, then training continues.", "dim small")
    figure.text(20, 268, "Drain: in the background, each byte compared with its checksum.", "dim small")
    figure.text(
        20,
        286,
        "Restore: from the local tier after a lost process, from the remote one after a lost node.",
        "dim small",
    )
    return figure


def commit() -> Figure:
    """The steps of a commit, and the state after a kill at each."""
    figure = Figure("The steps of a save over an old checkpoint, and what is there if it is killed at each", 330)
    steps = (
        ("1", "write the", "files beside"),
        ("2", "sync them;", "manifest last"),
        ("3", "exchange", "the names"),
        ("4", "sync the", "parent"),
        ("5", "remove the", "old one"),
    )
    left, wide, gap = 20, 112, 30
    places = [left + (wide + gap) * number for number in range(5)]
    for x, (number, *words) in zip(places, steps, strict=True):
        figure.label(x, 26, wide, 74, "amber" if number == "3" else "grey", number, *words, of="ink small")
    for x in places[:-1]:
        figure.arrow(x + wide, 63, x + wide + gap - 2, 63)
    commits, durable = places[2] + wide / 2, places[3] + wide
    for x in (commits, durable):
        figure.line(x, 100, x, 252)
    figure.text(20, 130, "If the process is killed, load gives", "ink small bold")
    figure.label(20, 140, commits - 24, 30, "blue", "the old checkpoint", of="ink small")
    figure.label(commits + 4, 140, 696 - commits, 30, "green", "the new checkpoint", of="ink small")
    figure.text(20, 196, "If the machine loses power, load gives", "ink small bold")
    figure.label(20, 206, commits - 24, 30, "blue", "the old checkpoint", of="ink small")
    figure.label(commits + 4, 206, durable - commits - 8, 30, "amber", "the old or the new one", of="ink small")
    figure.label(durable + 4, 206, 696 - durable, 30, "green", "the new one", of="ink small")
    figure.text(commits, 268, "the commit", "dim small", "middle")
    figure.text(durable, 268, "durable", "dim small", "middle")
    figure.text(
        20,
        294,
        "Never half a checkpoint. Without an exchange of names (NFS, Lustre, FUSE), step 3 is two renames:",
        "dim small",
    )
    figure.text(20, 311, "between them load waits for the new checkpoint, or restores the old one.", "dim small")
    return figure


def calls() -> Figure:
    """Which call do I need?"""
    figure = Figure("Which call do I need? Questions from top to bottom", 470)
    questions = (
        ("Does a framework write", "the checkpoints?", "integrations, dcp", "one line: see its guide"),
        ("One file", "in another format?", "open_write, open_read", "torch.save, pickle, numpy"),
        ("Many saves of a run,", "to keep and to resume?", "Manager", "one process or all ranks"),
        ("Is the state spread", "over ranks?", "distributed.save, .load", "or distributed.save_async"),
        ("Must training go on", "during the save?", "save_async", "IO(lazy=True) hides the copy, too"),
    )
    for number, (first, second, call, about) in enumerate(questions):
        y = 22 + 76 * number
        figure.label(40, y, 230, 50, "grey", first, second)
        figure.arrow(270, y + 25, 386, y + 25)
        figure.text(328, y + 18, "yes", "dim small", "middle")
        figure.box(390, y, 300, 50, "blue")
        figure.text(406, y + 21, call, "ink code bold")
        figure.text(406, y + 39, about, "dim small")
        figure.arrow(155, y + 50, 155, y + 74)
        figure.text(167, y + 67, "no", "dim small")
    figure.box(40, 402, 650, 46, "green")
    figure.text(56, 430, "save, load", "ink code bold")
    figure.text(170, 430, "the whole state, in one call; open for parts of it", "dim small")
    return figure


DRAWN = (directory, timeline, ranks, tiers, commit, calls)


def files() -> dict[str, str]:
    """All pictures, by the names of their files."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in DRAWN}


if __name__ == "__main__":
    TO.mkdir(exist_ok=True)
    for _name, _text in files().items():
        (TO / _name).write_text(_text, encoding="utf-8")
