"""The action of each key, and which of them scroll the help."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding

from fastckpt_top.views.state import VIEWS

PAGE: Final = 10
ALL: Final = 1_000_000
"""Lines of a page, and more than there are."""
SCROLLING: Final = {"up": -1, "down": 1, "pageup": -PAGE, "pagedown": PAGE, "home": -ALL, "end": ALL}
"""Keys that scroll the help, and by how many lines."""
BINDINGS: Final = (
    Binding("ctrl+c,ctrl+q", "quit", "Quit", priority=True),
    Binding("q", "quit", "Quit"),
    Binding("ctrl+z", "suspend_process", "Suspend"),
    Binding("question_mark,h,f1", "help", "Help"),
    Binding("up", "move(-1)", "Up"),
    Binding("down", "move(1)", "Down"),
    Binding("pageup", f"move({-PAGE})", "Page up"),
    Binding("pagedown", f"move({PAGE})", "Page down"),
    Binding("home,g", "edge(-1)", "First"),
    Binding("end,G", "edge(1)", "Last"),
    Binding("left", "step(-1)", "Back"),
    Binding("right", "step(1)", "Forward"),
    Binding("less_than_sign", "sort(-1)", "Sort by column before"),
    Binding("greater_than_sign,s", "sort(1)", "Sort"),
    Binding("S", "reverse", "Reverse"),
    Binding("enter", "expand", "Threads"),
    Binding("t", "all_threads", "All threads"),
    Binding("slash", "filter", "Filter"),
    Binding("escape", "clear", "Clear"),
    Binding("o", "active", "Active only"),
    Binding("space", "pause", "Freeze"),
    Binding("j", "job", "Next job"),
    Binding("z", "zoom", "Zoom"),
    Binding("c", "theme", "Colours"),
    Binding("plus,equals_sign", "interval(2)", "Longer interval"),
    Binding("minus", "interval(0.5)", "Shorter interval"),
    Binding("T", "tier", "Tier"),
    Binding("a", "mode", "Average"),
    Binding("e", "layout", "Layout"),
    Binding("tab", "next_view", "Next view", priority=True),
    Binding("shift+tab", "next_view(-1)", "View before", priority=True),
    *(Binding(str(index + 1), f"view('{name}')", name) for index, name in enumerate(VIEWS)),
    Binding("r", "record", "Record"),
    Binding("f12", "picture", "Screenshot"),
    Binding("left_square_bracket", "replay('jump', -10.0)", "10 s back"),
    Binding("right_square_bracket", "replay('jump', 10.0)", "10 s forward"),
    Binding("comma", "replay('faster', -1)", "Half speed"),
    Binding("full_stop", "replay('faster', 1)", "Double speed"),
    Binding("colon", "goto", "Go to"),
)
"""Keys, what of `TopApp` they call, and its name."""
