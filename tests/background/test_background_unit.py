"""Parts of saves in the background: comparison of tensor versions, the limit of pinned memory, niceness."""

from __future__ import annotations

import errno
import time

import pytest
import torch

import fastckpt
from fastckpt._api.io import most_pinned
from fastckpt._background import nice
from fastckpt._background.late import Late, versions_of


class OnTop:
    """A tensor that runs a function during its comparison, like a signal handler."""

    def __init__(self):
        self.version = 0
        self.function = None

    @property
    def _version(self):
        function, self.function = self.function, None
        if function is not None:
            function()
        return self.version


def test_a_step_on_top_of_a_comparison_decides_it():
    """The result of the inner comparison counts: the outer comparison sees the changes of the inner step."""
    tensor = OnTop()
    late = Late(versions_of([("t", tensor)]))

    def step():
        late.hold_step()
        tensor.version += 1

    tensor.function = step
    late.hold_step()
    assert tensor.version == 1
    assert late.changed() == []
    late.forget()
    assert late.changed() == []


def test_a_change_before_the_first_step_is_found_whatever_comes_later():
    tensor = torch.zeros(3)
    late = Late(versions_of([("t", tensor)]))
    tensor.add_(1)
    late.hold_step()
    late.forget()
    assert late.changed() == ["t"]


def test_comparing_thousands_of_tensors_costs_what_reading_their_versions_costs():
    late = [(f"t{number}", torch.zeros(1)) for number in range(2000)]
    reads, compares = [], []
    for _ in range(10):
        began = time.thread_time()
        asked = Late(versions_of(late))
        read = time.thread_time()
        asked.hold_step()
        reads.append(read - began)
        compares.append(time.thread_time() - read)
    assert min(compares) < 3 * min(reads), (compares, reads)


@pytest.mark.parametrize(
    ("pin", "most"),
    [(True, None), (False, 0), (0, 0), (1, 1), (8 << 30, 8 << 30), ("8GB", 8 * 10**9), ("8GiB", 8 << 30)],
)
def test_pin(pin, most):
    assert most_pinned(fastckpt.IO(pin=pin)) == most


def test_a_niceness_that_could_not_be_tried_is_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(nice, "_tried", {})
    outcomes = [BlockingIOError(errno.EAGAIN, "no thread"), None]

    def attempt(*_):
        if (error := outcomes.pop(0)) is not None:
            raise error

    assert nice.granted(None) is None
    monkeypatch.setattr(nice._core, "try_nice", attempt)
    assert nice.granted(7) is None
    assert "nice=7" in caplog.text
    assert nice.granted(7) == 7
