"""The Textual application: keys, timer and signals; `views` paints the screen."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import events
from textual.app import App
from textual.binding import Binding

from fastckpt_top import config, targets, text
from fastckpt_top.keys import ALL, KEYS, REPLAY_KEYS, SCROLLING
from fastckpt_top.record import Recorder
from fastckpt_top.replay import Replay, ReplayError
from fastckpt_top.session import Live
from fastckpt_top.views import colours
from fastckpt_top.views.canvas import Canvas
from fastckpt_top.views.graph import ZOOMS
from fastckpt_top.views.paint import Frame
from fastckpt_top.views.prompt import Prompt
from fastckpt_top.views.state import SORTS, VIEWS, Ui

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.widgets import Input

    from fastckpt_top.model import Model
    from fastckpt_top.session import Session

TICK_S: Final = 0.1
"""Seconds between two reads of the clock."""
IDLE_S: Final = 1.0
"""Seconds between two looks without a running operation."""
NOTICE_S: Final = 4.0
"""Seconds for which a message stays."""


def _hung_up() -> bool:
    """Whether the terminal is gone. Only processes with this controlling terminal receive SIGHUP."""
    poll = select.poll()
    poll.register(sys.__stdin__ or 0, 0)
    return any(found & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, found in poll.poll(0))


class TopApp(App[None]):
    """The monitor.

    Args:
        session: The session to show.
        ui: The first choice of view, sorting and so on.
        glyphs: Characters.
        theme: The name of a Textual theme; empty for one that suits the terminal.
        duration: The seconds after which to quit; None for never.
        remembered: The file for the user's choices; None to forget them.
        notice: The first message.
        clock: Monotonic clock, seconds.
    """

    TITLE = "fastckpt-top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None  # otherwise the hidden prompt gets the keys
    BINDINGS: ClassVar[list[Any]] = [
        Binding(key.keys, key.action, key.does, priority=key.keys.startswith(("ctrl+c", "tab", "shift")))
        for key in (*KEYS, *REPLAY_KEYS)
        if key.keys
    ]

    def __init__(
        self,
        session: Session,
        ui: Ui | None = None,
        glyphs: text.Glyphs = text.UNICODE,
        theme: str = "",
        duration: float | None = None,
        remembered: Path | None = None,
        notice: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.session = session
        self.ui = ui or Ui()
        self.glyphs = glyphs
        self._theme_wanted = theme
        self._remembered = remembered
        self._first_notice = notice
        self._frozen: Model | None = None
        self._duration = duration
        self._clock = clock
        self._next = float("-inf")
        self._notice_until = 0.0
        self.recorder: Recorder | None = None
        self.canvas = Canvas(self._frame)
        self.prompt = Prompt()
        self._asked_target = session.model.target

    # --- life ------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The canvas, and a line for text input that is shown only on request."""
        yield self.canvas
        yield self.prompt

    def on_mount(self) -> None:
        """Start the timer; ensure that the terminal is restored when a signal ends the program."""
        self.theme_changed_signal.subscribe(self, lambda _: self.canvas.restyle())
        themes = self.available_themes
        wanted = self._theme_wanted if self._theme_wanted in themes else ""
        self.theme = wanted or colours.default(themes, os.environ, sixteen=self._sixteen) or self.theme
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit)
        self.set_focus(None)
        if self._first_notice:
            self._say(self._first_notice)
        self.look()
        self._timer = self.set_interval(TICK_S, self._tick)
        if self._duration is not None:
            self.set_timer(self._duration, self.exit)

    def _tick(self) -> None:
        if not self.is_headless and _hung_up():
            self.exit()
            return
        if self._notice_until and self._clock() >= self._notice_until:
            self.ui.notice, self._notice_until = "", 0.0
            self.canvas.repaint()
        if self._clock() >= self._next - 1e-3:
            self.look()

    def look(self) -> None:
        """Advance the session, and show it."""
        now = self._clock()
        try:
            self.session.tick()
        except OSError as error:
            self._stop_recording()
            self._say(f"cannot write: {error.strerror or error}")
        except ReplayError as error:
            self.exit(return_code=4, message=str(error))
            return
        node = self.session.model.node
        idle = self.session.live and node.ranks > 0 and not node.active
        pause = max(self.ui.interval, IDLE_S) if idle else self.ui.interval
        due = self._next + pause
        self._next = due if now < due <= now + pause else now + pause
        self.canvas.repaint()

    def _frame(self, width: int, height: int) -> Frame:
        session = self.session
        model = self._frozen or session.model
        frozen = self._frozen is not None
        return Frame(model, self.ui, self.glyphs, width, height, session.status(), session.live, frozen)

    @property
    def _sixteen(self) -> bool:
        """Whether the terminal has 16 colours or fewer."""
        return not self.is_headless and self.console.color_system not in ("256", "truecolor")

    # --- the user's actions ----------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Handle keys while the help is shown: those that do not scroll it close it, and do nothing else."""
        if isinstance(event, events.Key) and self.ui.help and event.key not in ("ctrl+c", "ctrl+q", "ctrl+z"):
            if event.key in SCROLLING:
                self.action_move(SCROLLING[event.key])
            else:
                self.ui.help = False
                self.canvas.repaint()
            return
        await super().on_event(event)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action is possible: during text input keys are letters, and only clearing and quitting remain."""
        del parameters
        return not self.prompt.asking or action in ("clear", "quit")

    def action_help(self) -> None:
        """Show the keys, and the meaning of the screen's signs and words."""
        self.ui.help = True
        self.ui.scroll["help"] = 0
        self.canvas.repaint()

    def action_move(self, lines: int) -> None:
        """Select another row, or scroll a list."""
        ui = self.ui
        if ui.help:
            ui.scroll["help"] = max(ui.scroll.get("help", 0) + lines, 0)
        elif ui.view == "live":
            rows = ui.shown(self._model)
            chosen = ui.selection(rows)
            if chosen is not None:
                index = rows.index(chosen) + lines
                ui.selected = rows[min(max(index, 0), len(rows) - 1)].key
        else:
            ui.scroll[ui.view] = max(ui.scroll.get(ui.view, 0) + lines, 0)
        self.canvas.repaint()

    def action_edge(self, way: int) -> None:
        """Go to the first or last row, or to the beginning or end of a recording."""
        if isinstance(self.session, Replay):
            (self.session.home if way < 0 else self.session.end)()
            self.canvas.repaint()
        else:
            self.action_move(way * ALL)

    def action_sort(self) -> None:
        """Change the order: the slowest first, or by rank."""
        self.ui.sort = next(order for order in SORTS if order != self.ui.sort)
        self._remember("sort", self.ui.sort)
        self._say(SORTS[self.ui.sort])

    def action_expand(self) -> None:
        """Show the threads of the selected rank, and of the ranks below it, or go back."""
        rows = self.ui.shown(self._model)
        row = self.ui.selection(rows)
        if self.ui.view == "threads" or row is None:
            self.ui.view = "live"
        else:
            self.ui.view, self.ui.selected = "threads", row.key
            self.ui.scroll["threads"] = sum(len(one.threads) for one in rows[: rows.index(row)])
        self.canvas.repaint()

    def action_pause(self) -> None:
        """Freeze the screen while the model continues, or play and pause a recording."""
        if isinstance(self.session, Replay):
            self.session.toggle()
        else:
            self._frozen = None if self._frozen is not None else self.session.model.frozen()
        self.canvas.repaint()

    def action_job(self) -> None:
        """Show the next job."""
        jobs = sorted(self._model.jobs, key=lambda job: job.since)
        if len(jobs) < 2:  # noqa: PLR2004
            self._say("there is one job" if jobs else "there is no job")
            return
        keys = [job.key for job in jobs]
        now = keys.index(self.ui.job_of(self._model))
        chosen = jobs[(now + 1) % len(jobs)]
        self.ui.job, self.ui.selected = chosen.key, ""
        self._say(f"job {text.clean(chosen.name or str(chosen.pid))}")

    def action_zoom(self) -> None:
        """Let the graph show a longer time, or, after the longest, the shortest again."""
        now = self.ui.zoom_s if self.ui.zoom_s in ZOOMS else ZOOMS[0]
        self.ui.zoom_s = ZOOMS[(ZOOMS.index(now) + 1) % len(ZOOMS)]
        self._remember("zoom", self.ui.zoom_s)
        self._say(f"graph of {self.ui.zoom_s / 60:.0f} min")

    def action_theme(self) -> None:
        """Show the next theme."""
        names = colours.choices(self.available_themes, sixteen=self._sixteen)
        self.theme = names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0]
        self._remember("theme", self.theme)
        self._say(f"theme {self.theme}{', without its colours: NO_COLOR' if self.no_color else ''}")

    def action_tier(self) -> None:
        """Judge by the next target."""
        model = self.session.model
        target = targets.following(model.node.target, self._asked_target)
        model.set_target(target)
        self._say(f"target {target.name}: {text.rate(target.save)} written, {text.rate(target.load)} read GB/s per GPU")

    def action_graph(self) -> None:
        """Show the graph, or give its room to the ranks."""
        self.ui.graph = not self.ui.graph
        self.canvas.repaint()

    def action_view(self, name: str) -> None:
        """Change the view."""
        self.ui.view = name
        self.canvas.repaint()

    def action_next_view(self, by: int = 1) -> None:
        """Change to the next or the previous view."""
        self.action_view(VIEWS[(VIEWS.index(self.ui.view) + by) % len(VIEWS)])

    def action_replay(self, what: str, by: float) -> None:
        """Move in a recording, or play it at another speed."""
        if isinstance(self.session, Replay):
            getattr(self.session, what)(by)
            self.canvas.repaint()
        else:
            self._say("only in a replay")

    # --- typing ----------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Ask for a filter."""
        self.prompt.ask(self.ui.filter)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter while it is typed."""
        if self.prompt.asking:
            self.ui.filter = text.clean(event.value)
            self.canvas.repaint()

    def on_input_submitted(self) -> None:
        """Accept the filter."""
        self.prompt.close()
        self.canvas.repaint()

    def action_clear(self) -> None:
        """Leave the text input; clear the filter; follow the slowest rank again."""
        self.ui.clear()
        self.prompt.value = ""
        self.prompt.close()
        self.canvas.repaint()

    # --- files -----------------------------------------------------------------------------------------------------

    def action_record(self) -> None:
        """Start or stop a recording in the working directory."""
        path = datetime.now().astimezone().strftime("fastckpt-top-%Y%m%d-%H%M%S.jsonl.gz")
        if self.recorder is not None:
            words = f"recorded {self.recorder.ticks} ticks to {self.recorder.path}"
            self._say(self._stop_recording() or words)
        elif not isinstance(self.session, Live):
            self._say("this is a recording")
        else:
            try:
                self.recorder = Recorder(path)
            except OSError as error:
                self._say(f"cannot record to {path}: {error.strerror}")
                return
            self.session.sinks.append(self.recorder)
            self.ui.recording = path
            self._say(f"recording to {path}")

    def _stop_recording(self) -> str:
        """Finish the recording, if there is one; return why the file could not be finished, empty if it is complete."""
        recorder, self.recorder, self.ui.recording = self.recorder, None, ""
        if recorder is not None and isinstance(self.session, Live):
            self.session.sinks.remove(recorder)
            try:
                recorder.close()
            except OSError as error:
                return f"cannot write {recorder.path}: {error.strerror or error}"
        return ""

    @property
    def _model(self) -> Model:
        """The text on the screen."""
        return self._frozen or self.session.model

    def _remember(self, key: str, value: object) -> None:
        """Save a choice for the next start; after a failure, report it once and save no more."""
        if self._remembered is None:
            return
        problem = config.remember(self._remembered, key, value)
        if problem:
            self._remembered = None
            self.call_later(self._say, problem)

    def _say(self, notice: str) -> None:
        self.ui.notice = notice
        self._notice_until = self._clock() + NOTICE_S
        self.canvas.repaint()
