"""Each program of docs/guides, killed and preempted, ends with the checkpoint of an undisturbed run, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import recipes
import torch

import fastckpt
from harness import pages
from harness.same import same


def play(forge, page, folder, strikes=None, *, ranks=1):
    """Run the program of a page on some ranks, and return how it ended on each."""
    folder.mkdir(exist_ok=True)
    with forge.group(ranks, backend="") as group:
        group.start(recipes.run, max(pages.python(f"docs/guides/{page}"), key=len), str(folder), strikes)
        return group.outcomes(120)


def resumes(forge, folder, name, steps, *, killed, preempted, ranks=1, boundaries=None):
    """Run a page's program undisturbed, and killed, preempted and resumed; return the last checkpoints of both runs.

    ``boundaries`` are the steps that may be saved, if not all.
    """
    page, run, boundaries = f"{name}.md", Path("runs", name), boundaries or range(1, steps + 1)
    whole = play(forge, page, folder / "whole", ranks=ranks)
    assert [each.value for each in whole] == [list(boundaries)] * ranks, whole

    outcomes = play(forge, page, folder / "cut", {killed: signal.SIGKILL}, ranks=ranks)
    assert [each.kind for each in outcomes] == ["died"] * ranks, outcomes
    left = fastckpt.Manager(folder / "cut" / run, read_only=True).latest()
    assert 0 < left <= killed

    outcomes = play(forge, page, folder / "cut", {preempted: signal.SIGTERM}, ranks=ranks)
    assert [each.raised and (each.raised.kind, each.raised.text) for each in outcomes] == [
        ("SystemExit", "143")
    ] * ranks
    left = fastckpt.Manager(folder / "cut" / run, read_only=True).latest()
    assert preempted <= left < steps

    last = play(forge, page, folder / "cut", ranks=ranks)
    assert [each.value for each in last] == [[step for step in boundaries if step > left]] * ranks, last
    # If a run that has ended is started again, it takes no step, ends well and leaves its checkpoints.
    before = manifests(folder / "cut" / run)
    assert f"step-{steps:08d}" in before
    again = play(forge, page, folder / "cut", ranks=ranks)
    assert [each.value for each in again] == [[]] * ranks, again
    assert manifests(folder / "cut" / run) == before
    found, wanted = (fastckpt.load(folder / which / run / f"step-{steps:08d}") for which in ("cut", "whole"))
    return found, wanted


def manifests(run):
    return {each.parent.name: each.read_bytes() for each in run.glob("*/fastckpt.json")}


def goes_on(forge, folder, name, boundaries, *, ranks):
    """Remove the last checkpoint, run the program again on another number of ranks, and load its last checkpoint."""
    run, steps = folder / "cut" / "runs" / name, boundaries[-1]
    fastckpt.remove(run / f"step-{steps:08d}", force=True)  # what `files` gave, too
    left = fastckpt.Manager(run, read_only=True).latest()
    assert 0 < left < steps
    last = play(forge, f"{name}.md", folder / "cut", ranks=ranks)
    assert [each.value for each in last] == [[step for step in boundaries if step > left]] * ranks, last
    return fastckpt.load(run / f"step-{steps:08d}")


def assert_near(found, wanted):
    """Check that results differ only a little: on another number of ranks, dropout draws other numbers."""
    assert found["scheduler"] == wanted["scheduler"]
    for name, value in found["model"].items():
        torch.testing.assert_close(value, wanted["model"][name], rtol=0, atol=0.2)
        assert not torch.equal(value, wanted["model"][name])


def test_plain(forge, tmp_path):
    # The kill comes in the middle of an epoch; the preemption comes on the way to the end of one.
    found, wanted = resumes(forge, tmp_path, "plain", 120, killed=55, preempted=63)
    assert same(found, wanted)
    found, wanted = (fastckpt.load(tmp_path / which / "release") for which in ("cut", "whole"))
    assert same(found, wanted)
    assert found["model"]["0.weight"].dtype is torch.bfloat16


def test_lightning(libraries, tmp_path):
    boundaries = [*range(1, 20), *range(21, 40), *range(41, 61)]  # no last batches
    found, wanted = resumes(
        libraries, tmp_path, "lightning", 60, killed=33, preempted=39, ranks=2, boundaries=boundaries
    )
    assert same(found, wanted)
    goes_on(libraries, tmp_path, "lightning", boundaries, ranks=1)


def test_trainer(libraries, tmp_path):
    """tests/integrations/test_transformers.py kills and stops such a run; here the page's program runs three times."""
    run = tmp_path / "runs" / "trainer"
    for ranks in (2, 2, 1):
        before = manifests(run)
        assert [one.kind for one in play(libraries, "trainer.md", tmp_path, ranks=ranks)] == ["returned"] * ranks
        assert {"checkpoint-50", "checkpoint-60"} <= manifests(run).keys()
        assert before in ({}, manifests(run))
    # Each rank took half of the rows, so the ranks trained together.
    assert json.loads((run / "checkpoint-60" / "trainer_state.json").read_text())["epoch"] == 6


def test_accelerate(libraries, tmp_path):
    found, wanted = resumes(libraries, tmp_path, "accelerate", 40, killed=13, preempted=25, ranks=2)
    assert same(found, wanted)
    assert_near(goes_on(libraries, tmp_path, "accelerate", range(1, 41), ranks=1), wanted)


def test_fsdp2(forge, tmp_path):
    found, wanted = resumes(forge, tmp_path, "fsdp2", 40, killed=13, preempted=25, ranks=2)
    assert same(found, wanted)
    assert_near(goes_on(forge, tmp_path, "fsdp2", range(1, 41), ranks=1), wanted)
