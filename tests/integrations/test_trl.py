"""TRL's ``sft`` under ``fastckpt run``: the command of another package, killed and restarted."""

from __future__ import annotations

import sys

import fine_tuning
import pytest
import trainer_kills
from test_run import run

import fastckpt
from harness import groups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    fine_tuning.write_material(folder)
    return folder


@pytest.fixture(scope="module")
def libraries():
    with groups.frameworks(trainer_kills.TRL) as running:
        yield running


def test_the_command(tmp_path, libraries, material):
    """The command runs through accelerate's launcher, as users call it, and resumes by an option given as text."""
    with libraries.group(1, backend="") as group:
        group.start(fine_tuning.tune, str(tmp_path), str(material), max_steps=5, load_best_model_at_end=False)
        assert [one.kind for one in group.outcomes(120)] == ["returned"]
    command = fine_tuning.command_of(material, tmp_path / "out", max_steps=10, load_best_model_at_end=False)
    trl_itself = "import sys; from trl.cli.main import main; sys.exit(main())"
    done = run(
        tmp_path,
        *("--", sys.executable, "-c", trl_itself, "sft", *command),
        PYTHONWARNINGS="ignore",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    assert fastckpt.verify(tmp_path / "out" / "checkpoint-10").ok
    # The command ran five steps.
    assert done.stdout.count("'loss'") == 2


def test_killed_at_random_moments(tmp_path, libraries, material):
    """The log has TRL's own counts: tokens, and averages since the last line."""
    kills = 0
    for more in trainer_kills.campaign(libraries, fine_tuning.tune, tmp_path, seed=3, material=str(material)):
        kills += more
        if kills >= 2:
            break
