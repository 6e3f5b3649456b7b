"""torchtitan's checkpoint manager under ``install()`` finds its checkpoints, resumes from them and removes old ones."""

from __future__ import annotations

import re

import pytest

import fastckpt
from harness import titan

pytestmark = [pytest.mark.slow, titan.needed]


@pytest.fixture(scope="module")
def forge():
    with titan.forge() as made:
        yield made


@pytest.fixture(scope="module")
def straight(forge, tmp_path_factory):
    """The final values of a run of torchtitan's own manager without a fault."""
    with forge.group(2) as group:
        return group.run(titan.train, tmp_path_factory.mktemp("straight"), 7, "stock", timeout=240)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_save_restart_resume_and_keep_the_latest(forge, straight, tmp_path, mode):
    config = {"async_mode": mode, "keep_latest_k": 2}
    with forge.group(2) as group:
        begun = group.run(titan.train, tmp_path, 4, timeout=240, **config)
    assert [result[:2] for result in begun] == [(0, 0)] * 2
    run = tmp_path / "run"
    assert fastckpt.load(run / "step-4")["train_state"]["step"] == 4
    with forge.group(2) as group:
        resumed = group.run(titan.train, tmp_path, 7, timeout=240, **config)
    assert [result[:2] for result in resumed] == [(4, 28)] * 2
    assert [result[2] for result in resumed] == [result[2] for result in straight]
    kept = sorted(int(found[1]) for each in run.iterdir() if (found := re.fullmatch(r"step-(\d+)", each.name)))
    # One more checkpoint stays if the last save was in flight when the manager removed old ones.
    assert kept in ([6, 7], [5, 6, 7])
    for step in kept:
        path = run / f"step-{step}"
        assert not list(path.glob("*.distcp"))
        assert {".metadata", "fastckpt.json"} <= {each.name for each in path.iterdir()}
        assert fastckpt.verify(path).ok
