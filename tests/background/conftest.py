"""What tests of asynchronous saves share."""

from __future__ import annotations

import threading

import pytest

import fastckpt
from fastckpt._background import guard as _guard
from fastckpt._background.gate import Gate
from harness.internals import Staging


@pytest.fixture
def alone():
    """Nothing of this test is in flight after it, and no optimizer has our hook."""
    yield
    fastckpt.drain(60)
    fastckpt.release_buffers()
    _guard.unhook()


@pytest.fixture
def held_background(monkeypatch):
    """What a lazy save copies after its call is copied when the event is set; with it, that it has begun."""
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
def when_waited_for(monkeypatch):
    """``when_waited_for(function)`` calls it once, when a step or a guard next waits for a copy that is not done."""
    functions = []
    real = Gate.wait

    def wait(gate, timeout=None):
        if functions and not gate.is_open():
            functions.pop()()
        return real(gate, timeout)

    monkeypatch.setattr(Gate, "wait", wait)
    yield functions.append
    assert functions == [], "nobody waited"
