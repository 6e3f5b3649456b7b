"""The real program in a real terminal: tmux draws it, and the tests read the screen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid

import pytest
from looking import eventually

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Terminal:
    """A separate tmux server with one window."""

    def __init__(self, place):
        # A server that has been told to exit still answers for a moment, so each has its own name.
        self.socket = f"fastckpt-top-{uuid.uuid4().hex}"
        self.place = place

    def tmux(self, *args):
        return subprocess.run(
            ["tmux", "-L", self.socket, *args], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def start(self, *args, env="", size=(100, 30)):
        program = " ".join([sys.executable, "-m", "fastckpt_top", *args])
        # readline, which pytest loads, leaves LINES and COLUMNS in the environment of its children.
        dirs = f"FASTCKPT_TOP_DIR={self.place} XDG_CONFIG_HOME={self.place}/none"
        command = f"env -u LINES -u COLUMNS {dirs} {env} {program}; echo EXIT=$?; sleep 60"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), command)

    def shell(self, *args):
        """Start it from a shell with job control, which a stop signal needs."""
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", "bash --norc -i")
        program = " ".join([sys.executable, "-m", "fastckpt_top", "--no-config", *args])
        self.keys(f"env -u LINES -u COLUMNS {program}", "Enter")

    def screen(self, *args):
        return self.tmux("capture-pane", "-p", *args)

    def wait(self, pattern, seconds=60.0):
        found = eventually(lambda: re.search(pattern, self.screen()), seconds)
        assert found, f"{pattern!r} did not appear:\n{self.screen()}"
        return found

    def drawn(self, width, height):
        """Whether the picture has the size of the window: the corners of the box, or the lines without one."""
        lines = self.screen().rstrip("\n").splitlines()
        if width >= 60:
            return len(lines) == height and lines[0][0] + lines[0][width - 1 :] == "╭╮"
        bar = "░" in lines[0]
        return lines[0].startswith("WRITE ") and bar == (width >= 32) and max(map(len, lines)) <= width

    def keys(self, *keys):
        self.tmux("send-keys", *keys)

    def pid(self):
        shell = self.tmux("display", "-p", "#{pane_pid}").strip()
        return int(
            subprocess.run(
                ["pgrep", "-P", shell, "-f", "fastckpt_top"], capture_output=True, text=True, check=True
            ).stdout.split()[0]
        )

    def restored(self):
        flags = "#{alternate_on} #{mouse_any_flag} #{cursor_flag}"
        return eventually(lambda: self.tmux("display", "-p", flags).strip() == "0 0 1")


@pytest.fixture
def terminal(place):
    made = Terminal(place)
    yield made
    subprocess.run(["tmux", "-L", made.socket, "kill-server"], capture_output=True, check=False)


def test_a_live_rate_appears_and_resizing_and_quitting_work(terminal, producer):
    terminal.start()
    terminal.wait("No fastckpt process yet")
    producer("--rate", 2e9)
    terminal.wait(r"now +[1-9]\.\d+ ")
    terminal.wait(r"0 +\d+ WRITE +[12]\.\d\d")
    for width, height in ((40, 8), (20, 4), (160, 50), (80, 24)):
        terminal.tmux("resize-window", "-x", str(width), "-y", str(height))
        drawn = eventually(lambda w=width, h=height: terminal.drawn(w, h))
        assert drawn, f"{width}x{height}:\n{terminal.screen()}"
    terminal.keys("t", "s", "?")
    terminal.wait("any other key closes")
    terminal.keys("x", "3")
    terminal.wait("history")
    terminal.keys("q")
    terminal.wait("EXIT=0")
    assert terminal.restored()


@pytest.mark.parametrize("number", ["TERM", "HUP", "INT"])
def test_the_terminal_is_restored_after_a_signal(terminal, producer, number):
    producer()
    terminal.start()
    terminal.wait("WRITE")
    subprocess.run(["kill", f"-{number}", str(terminal.pid())], check=True)
    terminal.wait("EXIT=0")
    assert terminal.restored()


def test_ctrl_c_quits(terminal):
    terminal.start("--demo")
    terminal.wait("step-11800")
    terminal.keys("C-c")
    terminal.wait("EXIT=0")
    assert terminal.restored()


def test_no_color_and_ascii_in_a_terminal(terminal):
    terminal.start("--demo", "--ascii", env="NO_COLOR=1")
    terminal.wait("step-11800")
    assert terminal.screen().isascii()
    colors = {tuple(found) for found in re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", terminal.screen("-e"))}
    assert all(len(set(color)) == 1 for color in colors), "grey"
    terminal.keys("q")
    terminal.wait("EXIT=0")


def test_sixteen_colours_are_the_terminals_own(terminal):
    terminal.start("--demo", env="TERM=xterm COLORTERM=")
    terminal.wait("step-11800")
    shown = terminal.screen("-e")
    assert not re.findall(r"\x1b\[[0-9;]*[34]8;[25];", shown), "the program uses no colours that the terminal lacks"
    for style, sign in (("32", "●"), ("35|95", "[⡀⠄⠂⠁]"), ("34|94", "█")):
        assert re.search(rf"\x1b\[[0-9;]*({style})m[^\x1b]*({sign})", shown), (style, sign)
    terminal.keys("c")
    terminal.wait("theme ansi-light")
    terminal.keys("q")
    terminal.wait("EXIT=0")


def test_it_stops_and_goes_on(terminal):
    terminal.shell("--demo")
    terminal.wait("step-11800")
    terminal.keys("C-z")
    terminal.wait("Stopped|suspended")
    terminal.keys("fg", "Enter")
    terminal.wait("slowest first")
    terminal.keys("q")
    assert terminal.restored()
    terminal.keys("echo EXIT=$?", "Enter")
    terminal.wait("EXIT=0")


def test_a_dumb_terminal_gets_lines(terminal, producer):
    producer()
    terminal.start("--count", "2", env="TERM=dumb")
    terminal.wait("EXIT=0")
    assert "save step-7: " in terminal.screen()


def test_inline_stays_under_the_prompt(terminal):
    terminal.start("--demo", "--inline", "--duration", "5")
    terminal.wait("step-11800")
    assert terminal.tmux("display", "-p", "#{alternate_on}").strip() == "0"
    terminal.wait("EXIT=0")


def test_a_terminal_that_goes_without_a_signal_ends_it(place):
    """The monitor's terminal is not its controlling terminal, as under a program without a user."""
    ours, its = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "FASTCKPT_TOP_DIR": str(place)}
    command = [sys.executable, "-m", "fastckpt_top", "--demo"]
    monitor = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True, env=environment)
    os.close(its)
    try:
        seen = b""
        while b"SAVE" not in seen:
            seen += os.read(ours, 1 << 16)
        os.close(ours)
        assert monitor.wait(60) == 0
    finally:
        monitor.kill()
        monitor.wait()
