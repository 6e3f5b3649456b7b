"""Axolotl's plugin against its callers: Axolotl's manager of plugins, and its search for a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import trainers

from harness import groups


def train(folder, **config):
    """Do what Axolotl's ``train`` does with a Trainer; return where it resumed, and the step at which it ended."""
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.train import determine_last_checkpoint

    os.environ.update(LOCAL_WORLD_SIZE="1")
    manager = PluginManager.get_instance()
    manager.register("fastckpt.integrations.axolotl.Plugin")
    trainer = trainers.trainer_of(folder, max_steps=10, save_total_limit=None, load_best_model_at_end=False)
    cfg = DictDefault({"output_dir": folder, **config})
    manager.post_trainer_create(cfg, trainer)
    resume = determine_last_checkpoint(cfg)
    trainer.train(resume_from_checkpoint=resume)
    return resume, trainer._initial_global_step, trainer.state.global_step


@pytest.fixture(scope="module")
def libraries():
    with groups.frameworks("axolotl.integrations.base") as forge:
        yield forge


@pytest.mark.slow
def test_the_plugin(libraries, tmp_path):
    def play(**config):
        with libraries.group(1, backend="") as group:
            (outcome,) = group.run(train, str(tmp_path), timeout=120, **config)
        return outcome

    auto = {"auto_resume_from_checkpoints": True}
    # This directory is left by a killed save; Axolotl without the plugin would choose it.
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "tokens_state.json").write_text(json.dumps({"total": 1}))
    assert play(**auto) == (False, 0, 10)
    five, ten = (str(tmp_path / f"checkpoint-{step}") for step in (5, 10))
    assert play(**auto) == (ten, 10, 10)
    shard = Path(ten, "model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "checkpoint-15").mkdir()
    assert play(**auto) == (five, 5, 10)
    # With an explicit path, or without a resume, Axolotl behaves as without the plugin.
    assert play(resume_from_checkpoint=five, **auto) == (five, 5, 10)
    assert play() == (None, 0, 10)
