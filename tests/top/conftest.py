"""Fixtures of the monitor's tests: a recording of the demonstration, processes that pretend to save, the command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastckpt_top.record import Recorder
from looking import demo, end

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    for name in ("FASTCKPT_TOP_DIR", "FASTCKPT_TOP_TARGET", "NO_COLOR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()


@pytest.fixture(scope="session")
def recording(tmp_path_factory):
    """The demonstration's first 52 s, two looks a second: a save, a pause, a load, a pause."""
    os.environ["TZ"] = "UTC"
    path = tmp_path_factory.mktemp("recording") / "demo.jsonl.gz"
    clock, session = demo()
    session.sinks.append(Recorder(str(path)))
    for tick in range(104):
        clock.now = 100.0 + tick / 2
        session.tick()
    session.close()
    return path


@pytest.fixture
def place(tmp_path):
    """A directory for segments."""
    made = tmp_path / "segments"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def producer(place):
    """Starts processes that pretend to save, and kills them at the end."""
    children = []

    def start(*args, wrap=()):
        command = [*wrap, sys.executable, str(HERE / "producer.py"), str(place), *map(str, args)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        child.first = child.stdout.readline().strip()
        assert child.first, "the producer did not start"
        return child

    yield start
    end(children)


@pytest.fixture
def top(place):
    """Runs the command like a user, without a terminal."""

    def run(*args, timeout=60, **options):
        env = os.environ | {"FASTCKPT_TOP_DIR": str(place), "PYTHONIOENCODING": "utf-8"} | options.pop("env", {})
        command = [sys.executable, "-m", "fastckpt_top", *map(str, args)]
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env=env,
            **options,
        )

    return run
