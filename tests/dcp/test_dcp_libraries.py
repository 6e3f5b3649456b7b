"""accelerate and Lightning name torch's writer and reader; with fastckpt installed, they use fastckpt's."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import StateDictType

import fastckpt
from fastckpt.distributed import Ranks
from harness import parallel

pytestmark = [
    pytest.mark.slow,  # imports take long
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"NOT TESTED HERE: needs {name}")
        for name in ("accelerate", "lightning")
    ),
]


def differing(model, topology):
    wanted = parallel.get_model_state_dict(parallel.build(topology)[0])
    found = parallel.get_model_state_dict(model)
    return [key for key in wanted if not torch.equal(_local(found[key]), _local(wanted[key]))]


def _local(value):
    return getattr(value, "_local_tensor", value)


def with_accelerate(folder, *, ours):
    from accelerate.utils import fsdp_utils

    fsdp_utils.logger = logging.getLogger("accelerate")  # accelerate's own logger needs a launcher
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType.SHARDED_STATE_DICT, state_dict_config=None)
    accelerator = SimpleNamespace(process_index=parallel.dist.get_rank(), num_processes=2)
    accelerator.wait_for_everyone = parallel.dist.barrier
    model, optimizer = parallel.build("fsdp")
    with fastckpt.dcp.install(ranks=Ranks(timeout=60)):
        if ours:
            fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(folder))
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    if not ours:
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(folder))
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    model, optimizer = parallel.build("fsdp", trained=False)
    with fastckpt.dcp.install(ranks=Ranks(timeout=60)):
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, str(folder))
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return differing(model, "fsdp"), steps


@pytest.mark.parametrize("ours", [True, False])
def test_accelerate_saves_and_loads(libraries, tmp_path, ours):
    with libraries.group(2) as group:
        assert group.run(with_accelerate, tmp_path, ours=ours) == [([], {2})] * 2
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert (tmp_path / name / ".metadata").exists()  # other tools look for this file
        assert (tmp_path / name / "fastckpt.json").exists() is ours


def with_lightning(folder):
    from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load, _distributed_checkpoint_save

    folder.mkdir(exist_ok=True)
    with fastckpt.dcp.install(ranks=Ranks(timeout=60)):
        _distributed_checkpoint_save({"model": parallel.state("fsdp")["model"]}, folder)
        model, _ = parallel.build("fsdp", trained=False)
        state = {"model": parallel.get_model_state_dict(model)}
        _distributed_checkpoint_load(state, folder)
    model.load_state_dict(state["model"])
    return differing(model, "fsdp")


def test_lightning_saves_and_loads(libraries, tmp_path):
    with libraries.group(2) as group:
        assert group.run(with_lightning, tmp_path / "c") == [[], []]
    assert fastckpt.verify(tmp_path / "c").ok
