"""What tests of asynchronous saves share."""

from __future__ import annotations

import threading

import pytest

import fastckpt
from fastckpt import PendingSave
from fastckpt._background import guard as _guard
from fastckpt._background import job as _job


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
    real = _job.Job.stage

    def stage(job, wanted, *, last):
        if last and job.late:
            begun.set()
            assert release.wait(60)
        real(job, wanted, last=last)

    monkeypatch.setattr(_job.Job, "stage", stage)
    yield release, begun
    release.set()


@pytest.fixture
def when_waited_for(monkeypatch):
    """``when_waited_for(function)`` calls it once, when somebody next waits for a copy that is not done."""
    functions = []
    real = PendingSave.wait_staged

    def wait_staged(pending, timeout=None):
        if functions and not pending._staged.is_set():
            functions.pop()()
        real(pending, timeout)

    monkeypatch.setattr(PendingSave, "wait_staged", wait_staged)
    yield functions.append
    assert functions == [], "nobody waited"
