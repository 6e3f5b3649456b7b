"""The keys: their actions, and their words in the last line of the screen and in the help."""

from __future__ import annotations

from typing import Final, NamedTuple

PAGE: Final = 10
ALL: Final = 1_000_000
"""Lines of a page, and a number greater than the lines of any list."""
SCROLLING: Final = {"up": -1, "down": 1, "pageup": -PAGE, "pagedown": PAGE, "home": -ALL, "end": ALL}
"""The keys that scroll the help, and the lines by which they scroll it."""


class Key(NamedTuple):
    """A key.

    Attributes:
        keys: Textual's names of the key and of others that do the same; empty if another entry has them.
        action: The action of `TopApp` that it calls.
        sign: Its label.
        does: Its effect, for the help; empty if another entry describes both.
        word: Its name in the last line; empty if it is not there.
    """

    keys: str
    action: str
    sign: str = ""
    does: str = ""
    word: str = ""


KEYS: Final = (
    Key("q", "quit", "q", "quit, as Ctrl-C", "Quit"),
    Key("enter", "expand", "Enter", "all threads of the selected rank; back", "Threads"),
    Key("s", "sort", "s", "the slowest rank first, or by rank", "Sort"),
    Key("slash", "filter", "/", "filter by rank, pid, job, label, state", "Filter"),
    Key("tab", "next_view(1)", "Tab", "the next of: ranks, threads, history, events", "View"),
    Key("1", "view('live')", "1 2 3 4", "ranks, threads, history, events"),
    Key("T", "tier", "T", "target: light, medium, high", "Target"),
    Key("z", "zoom", "z", "graph of 1, 2, 5, 10 minutes", "Zoom"),
    Key("space", "pause", "Space", "freeze the screen; recording goes on", "Freeze"),
    Key("r", "record", "r", "start or stop recording", "Record"),
    Key("e", "graph", "e", "with the graph, or without", "Graph"),
    Key("c", "theme", "c", "next theme of colours", "Colours"),
    Key("f12", "screenshot(None, '.')", "F12", "the screen as SVG, in the working directory", "Picture"),
    Key("j", "job", "j", "next job, where there are several"),
    Key("escape", "clear", "Esc", "follow the slowest rank again; clear the filter"),
    Key("up", "move(-1)", "Up Down PgUp PgDn Home End g G", "select a rank, or scroll"),
    Key("ctrl+z", "suspend_process", "Ctrl-Z", "suspend; fg comes back"),
    Key("question_mark,h,f1", "help", "?", "this page"),
    Key("ctrl+c,ctrl+q", "quit"),
    Key("shift+tab", "next_view(-1)"),
    Key("2,t", "view('threads')"),
    Key("3", "view('history')"),
    Key("4", "view('events')"),
    Key("down", "move(1)"),
    Key("pageup", f"move({-PAGE})"),
    Key("pagedown", f"move({PAGE})"),
    Key("home,g", "edge(-1)"),
    Key("end,G", "edge(1)"),
)
"""The keys, the most important first."""
REPLAY_KEYS: Final = (
    Key("", "quit", "q", "quit", "Quit"),
    Key("", "pause", "Space", "play, pause", "Play"),
    Key("left", "replay('step', -1)", "Left", "a tick back", "Back"),
    Key("right", "replay('step', 1)", "Right", "a tick on", "On"),
    Key("left_square_bracket", "replay('jump', -10.0)", "[", "10 s back", "10 s back"),
    Key("right_square_bracket", "replay('jump', 10.0)", "]", "10 s on", "10 s on"),
    Key("comma", "replay('faster', -1)", ",", "half the speed", "Slower"),
    Key("full_stop", "replay('faster', 1)", ".", "twice the speed", "Faster"),
    Key("", "next_view(1)", "Tab", "the next view", "View"),
    Key("", "zoom", "z", "graph of 1, 2, 5, 10 minutes", "Zoom"),
    Key("", "edge(-1)", "Home End", "beginning, end"),
)
"""Keys that mean something else, or matter more, in a replay."""
