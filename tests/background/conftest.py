"""Fixtures for tests of asynchronous saves."""

from __future__ import annotations

import threading

import pytest

import fastckpt
from harness import points
from harness.internals import Staging, unhook_optimizers


@pytest.fixture
def alone():
    """Make sure that after a test none of its saves is in flight, and no optimizer has fastckpt's hook."""
    yield
    fastckpt.background.drain(60)
    fastckpt.background.release_buffers()
    unhook_optimizers()


@pytest.fixture
def unhook():
    """Removes fastckpt's hook from all optimizers until the next lazy save."""
    return unhook_optimizers


@pytest.fixture
def held_background(monkeypatch):
    """Holds the late copy of a lazy save until an event is set; also yields an event for its beginning."""
    release, begun = threading.Event(), threading.Event()
    real = Staging._copy_late

    def copy_late(staging):
        begun.set()
        assert release.wait(60)
        return real(staging)

    monkeypatch.setattr(Staging, "_copy_late", copy_late)
    yield release, begun
    release.set()


@pytest.fixture
def when_waited_for():
    """``when_waited_for(function)`` calls ``function`` once, when a step or guard next waits for an unfinished copy."""
    functions = []

    def watched(wait):
        def waits(gate, timeout=None):
            if functions and not gate.is_open():
                functions.pop()()
            return wait(gate, timeout)

        return waits

    with points.replaced(points.WAIT_FOR_COPY, watched):
        yield functions.append
    assert functions == [], "nobody waited"
