"""Each program of docs/guides, killed and preempted, against an undisturbed run: the same checkpoint, bit for bit."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fastckpt
import recipes
from harness import groups, needs
from harness.same import same


@pytest.fixture(scope="module")
def warm():
    """Processes that have imported torch and torchdata."""
    with groups.forge(env={"FASTCKPT_TEST_IMPORT": "harness.member,torchdata.stateful_dataloader"}) as forge:
        yield forge


def play(forge, page, folder, strikes=None, *, ranks=1):
    """Run the program of a page on so many ranks, and say how it ended on each."""
    folder.mkdir(exist_ok=True)
    (program,) = recipes.programs(page)
    with forge.group(ranks, backend="") as group:
        group.start(recipes.run, program, str(folder), strikes)
        return group.outcomes(120)


def test_plain(warm, tmp_path):
    steps = 120
    (whole,) = play(warm, "plain.md", tmp_path / "whole")
    assert whole.value == list(range(1, steps + 1)), whole

    folder, run = tmp_path / "run", tmp_path / "run" / "runs" / "plain"
    (killed,) = play(warm, "plain.md", folder, {55: signal.SIGKILL})
    assert killed.kind == "died"
    # In the middle of an evaluation, and of one epoch; then at the end of another one.
    (preempted,) = play(warm, "plain.md", folder, {64: signal.SIGTERM})
    assert preempted.raised.kind == "SystemExit", preempted
    assert preempted.raised.text == "143"
    with fastckpt.Manager(run, read_only=True) as manager:
        assert manager.latest() == 64
    (last,) = play(warm, "plain.md", folder)
    assert last.value == list(range(65, steps + 1)), last

    final = f"step-{steps:08d}"
    assert same(fastckpt.load(run / final), fastckpt.load(tmp_path / "whole/runs/plain" / final))
    assert same(fastckpt.load(folder / "release"), fastckpt.load(tmp_path / "whole/release"))
    assert fastckpt.load(folder / "release")["model"]["0.weight"].dtype is torch.bfloat16
