"""What stands around the programs on the pages: the names that they take from their reader's program."""

from __future__ import annotations

#: Before every program.
TRAINING = """
import os, signal, warnings
from pathlib import Path
from types import SimpleNamespace

import numpy, torch
import fastckpt

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
def loss(model, batch):
    return model(batch).square().mean()
loss(model, torch.ones(8)).backward()
optimizer.step()
step, path, text = 1000, "step-1000", "{}"
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
def same(one, other):
    return torch.equal(one["model"]["weight"], other["model"]["weight"])
before = {"model": {"weight": model.weight.detach().clone()}}
"""

#: Of each page, what is small here for what is large there.
SMALLER = {
    "docs/distributed.md": {"50_304": "504", "4096": "16", "12_576": "126"},
    "docs/guides/ray.md": {"10_000": "300"},
    "docs/manager.md": {"100_000": "2_000"},
    "docs/stores.md": {"s3://bucket": "bucket"},
    "docs/copy.md": {"s3://bucket": "bucket"},
    "docs/tiers.md": {"s3://bucket": "bucket", '"/nvme': '"nvme'},
}

RUN = """
class Training:
    def __init__(self): self.done = 0
    def state_dict(self): return {"done": self.done, "weight": torch.ones(4)}
    def load_state_dict(self, found): self.done = found["done"]
    def step(self): self.done += 1; return 1 / self.done
training, evaluate, batches = Training(), lambda: None, iter([1])
"""

ONE_RANK = """
init = torch.distributed.init_process_group
def alone(): init("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.init_process_group = alone
loader = SimpleNamespace(state_dict=lambda: {"taken": 7})
"""

RAY = """
import sys, types
context = SimpleNamespace(get_storage=lambda: SimpleNamespace(experiment_fs_path="runs", storage_filesystem=None))
context.get_world_rank = lambda: 0
reported = []
ray, train_module = types.ModuleType("ray"), types.ModuleType("ray.train")
ray.train = train_module
train_module.__dict__.update(
    get_context=lambda: context, get_preemption_info=lambda: None, Checkpoint=lambda path, filesystem: path,
    get_all_reported_checkpoints=lambda consistency_mode: [], report=lambda metrics, *a, **b: reported.append(metrics),
    CheckpointUploadMode=SimpleNamespace(NO_UPLOAD=0), CheckpointConsistencyMode=SimpleNamespace(COMMITTED=0),
    ScalingConfig=dict, RunConfig=dict, CheckpointConfig=dict, FailureConfig=dict,
)
sys.modules.update({"ray": ray, "ray.train": train_module})
class TorchTrainer:
    def __init__(self, function, scaling_config, run_config): self.function = function
    def fit(self): self.function({})
def make_state(): return {"weight": torch.ones(4)}
def train_step(state): return 0.5
"""

ZERO = """
import deepspeed
epoch, config = 1, {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
config["zero_allow_untested_optimizer"] = True
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(8, 8)
    def forward(self, x): return self.embed(x).sum()
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
"""

#: Of each page, for each program on it: what comes before it, and what holds after it.
STAGES: dict[str, list[tuple[str, str]]] = {
    "README.md": [("", "assert report.bytes and same(state, before)")],
    "docs/async.md": [
        ("", "assert report.bytes and same(fastckpt.load('checkpoints/step-1000'), before)"),
        (
            "saved, data = state, [torch.ones(8)] * 3\ndef state(): return saved",
            "fastckpt.background.drain()\nassert fastckpt.load(path)['step'] == 1000",
        ),
        ("report = fastckpt.save_async(saved, path).result()", "assert report.staging and report.phases"),
    ],
    "docs/calls.md": [("", "assert str(report).startswith('saved ')")],
    "docs/copy.md": [("fastckpt.save(state, 'run/step-1000')", "assert report.files")],
    "docs/distributed.md": [
        (
            "optimizer_state = optimizer.state_dict()",
            "assert step == 1000 and os.path.exists('checkpoints/step-1000')",
        ),
        ("", "assert fastckpt.load(path).keys() == {'model', 'optimizer'}"),
        (
            "rank, first, path = 0, 0, 'parts'\nlocal, partition = torch.ones(504, 16), torch.ones(16 * 16)",
            "assert fastckpt.load(path)['embedding'].shape == (504, 16)",
        ),
        (f"path = 'again'\n{ONE_RANK}torch.distributed.init_process_group()", "assert fastckpt.load(path)"),
        (
            "load_per_rank = fastckpt.distributed.load_per_rank\n"
            "fastckpt.distributed.load_per_rank = lambda path, rank=0: load_per_rank(path, rank=min(rank, 0))",
            "assert own['data'] == other['data'] == {'taken': 7}",
        ),
        ("path = 'later'", "assert report.bytes and fastckpt.load(path)"),
        ("path = 'through-torch'", "assert same(fastckpt.load(path), before)"),
    ],
    "docs/files.md": [
        ("", "assert same(state, before)"),
        ("", "assert same(state, before)"),
        ("from torch_checkpointing import CheckpointManager", "assert manager.save"),
        (
            "tensors = state['model']\nfastckpt.save(state, 'step-1000')",
            "assert tensors.keys() == {'weight', 'bias'} and name in tensors",
        ),
        ("", "import safetensors.torch; assert safetensors.torch.save_file.__module__.startswith('fastckpt')"),
    ],
    "docs/manager.md": [
        (RUN, "assert fastckpt.Manager('runs/gpt', read_only=True).latest() == 2000 == training.done"),
        ("manager = fastckpt.Manager('other')", "manager.save(1, {'step': 1}); manager.wait()"),
        ("manager = fastckpt.Manager('other')", ""),
        ("manager = fastckpt.Manager('other')", "assert training.done == 2000"),
        (
            f"{ONE_RANK}loss, train = 1.0, training.step\ndef state(): return {{'weight': torch.ones(4)}}\n"
            "os.rename('runs', 'before')",
            "assert fastckpt.Manager('runs/gpt', read_only=True, ranks='alone').latest() == 2000",
        ),
    ],
    "docs/names.md": [("fastckpt.save(state, path)", "fastckpt.background.drain(); assert same(fastckpt.load(path), before)")],
    "docs/settings.md": [("", "assert Path(path, 'config.json').read_text() == '{}'")],
    "docs/sizing.md": [("", "assert job.interval and job.to_dict()['write_per_gpu'] == job.write_per_gpu")],
    "docs/states.md": [
        (
            "import dataclasses, enum\nPhase = enum.Enum('Phase', 'WARM')\n"
            "Position = dataclasses.make_dataclass('Position', ['epoch'])\n"
            "with warnings.catch_warnings():\n"
            "    warnings.simplefilter('ignore')\n    fastckpt.save({'at': Position(3), 'phase': Phase.WARM}, path)",
            "assert state == {'at': Position(3), 'phase': Phase.WARM}",
        ),
        (
            "import omegaconf\nfastckpt.save({'lr': 1}, 'plain')",
            "fastckpt.save(omegaconf.OmegaConf.create({'lr': 1}), 'configuration')\n"
            "assert isinstance(fastckpt.load('configuration'), omegaconf.DictConfig)",
        ),
        (
            "state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}",
            "assert fastckpt.load('release')['model']['weight'].dtype is torch.bfloat16",
        ),
    ],
    "docs/stores.md": [("fastckpt.save(state, 'bucket/runs/gpt/step-00001000')", "assert same(state, before)")],
    "docs/tiers.md": [
        (
            "os.makedirs('bucket/runs/gpt')",
            "assert found is None and manager.steps() == []",
        )
    ],
    "docs/unchanged.md": [
        ("train = lambda state: None", "assert fastckpt.list('checkpoints')[-1].name.endswith('9000')"),
        ("path = 'next'", "assert same(fastckpt.load(path), before)"),
    ],
    "docs/guides/deepspeed.md": [
        (ZERO, "assert client_state is None and os.path.exists('runs/latest')"),
        (
            "engine.backward(engine(torch.arange(8)))\nengine.step()\nengine.global_steps = 1000",
            "_, found = engine.load_checkpoint('runs')\nassert found.keys() == {'step', 'random'}",
        ),
        ("", ""),
    ],
    "docs/guides/ray.md": [(RAY, "assert len(reported) == 31 and os.path.exists('runs/steps/step-00000300')")],
    "docs/guides/torchtitan.md": [("", "assert checkpoint.enable and checkpoint.interval == 500")],
}

#: Blocks that are parts of a program which other tests run: the names of fastckpt in the block are in that program.
PARTS = {
    "docs/guides/accelerate.md": "examples/doors/accelerate_loop.py",
    "docs/guides/lightning.md": "examples/doors/lightning_trainer.py",
}

#: Tests that run all other programs of a page, as they stand there, and that name the page.
ELSEWHERE = {
    "docs/guides/accelerate.md": "tests/guides/test_guides.py",
    "docs/guides/fsdp2.md": "tests/guides/test_guides.py",
    "docs/guides/lightning.md": "tests/guides/test_guides.py",
    "docs/guides/plain.md": "tests/guides/test_guides.py",
    "docs/guides/trainer.md": "tests/guides/test_guides.py",
    "docs/monitoring.md": "tests/tools/test_monitoring_guide.py",
}
