"""A killed run loses nothing that was acknowledged: a small campaign; FASTCKPT_TEST_KILLS sets another count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("FASTCKPT_TEST_KILLS", "40"))
CAMPAIGN = Path(__file__).parent / "kill_campaign.py"


@pytest.mark.timeout(300 + KILLS)
def test_kills_within_saves_removals_restores_and_rollbacks_lose_nothing(tmp_path):
    """Mutants: no branch is noted; what is newer than the durable one goes; a removal before the save."""
    result = campaign(KILLS, str(tmp_path / "run"))
    assert min(result["kills"].values()) >= KILLS // 8
    assert result["newest_acknowledged"] > [0, 0]


@pytest.mark.timeout(300 + KILLS)
def test_kills_within_drains_and_fetches_lose_nothing(tmp_path):
    """Mutants: a copy that is not committed by a rename; a removal at the remote before the copy is whole."""
    kills = KILLS // 2
    result = campaign(kills, "--remote", str(tmp_path / "remote"), str(tmp_path / "run"))
    assert min(result["kills"].values()) >= 1
    assert result["newest_drained"] > [0, 0]


@pytest.mark.timeout(300 + KILLS)
def test_kills_within_uploads_lose_nothing(tmp_path):
    """Mutant: the manifest of a step that is copied again goes before the new one is there."""
    result = campaign(KILLS // 2, "--store", str(tmp_path / "run"))
    assert result["newest_drained"] > [0, 0]


@pytest.mark.timeout(300 + KILLS)
def test_kills_of_several_ranks_lose_nothing(tmp_path):
    """Mutant: the first rank removes the checkpoint that has become durable, and not the older ones."""
    kills = KILLS // 8
    result = campaign(kills, "--ranks", "3", "--remote", str(tmp_path / "remote"), str(tmp_path / "run"))
    assert result["ranks"] == 3
    assert result["newest_acknowledged"] > [0, 0]


def campaign(kills, *arguments):
    """Run the campaign; its result."""
    seed = os.environ.get("FASTCKPT_TEST_SEED", "20260101")
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--kills", str(kills), "--seed", seed, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    result = json.loads(done.stdout)
    assert result["violations"] == []
    assert done.returncode == 0
    assert sum(result["kills"].values()) == kills
    return result
