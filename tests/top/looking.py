"""How tests look at the demonstration, with a manual clock, and at real events."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from fastckpt_top.demo import DemoSource
from fastckpt_top.model import Model
from fastckpt_top.session import Live

BEGIN = 1_795_262_662.0


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def end(children):
    """Kill processes, and close their pipes."""
    for child in children:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def demo(seconds_into=0.0, model=None, sinks=()):
    """A manual clock, and a live session of the demonstration with this clock."""
    clock = Clock()
    source = DemoSource(clock, lambda: BEGIN + clock.now - 100.0, seconds_into)
    return clock, Live(source, model or Model(), list(sinks))


def eventually(probe, seconds=60.0):
    """Poll until `probe` returns a true value or the seconds have passed, and return the last value."""
    ends = time.monotonic() + seconds
    while True:
        found = probe()
        if found or time.monotonic() > ends:
            return found
        time.sleep(0.05)


def top(place, *arguments, wrap=()):
    command = [*wrap, sys.executable, "-m", "fastckpt_top", "--dir", str(place), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def once(place, **options):
    done = top(place, "--once", "--json", "--interval", "0.5", **options)
    assert done.returncode == 0, done.stderr
    ticks = [json.loads(line) for line in done.stdout.splitlines()]
    return next(tick for tick in reversed(ticks) if tick["kind"] == "tick")
