"""The code around the programs on the pages, with the names that these expect from a reader's program."""

from __future__ import annotations

#: The modules of torch and others that the programs import; they are imported once.
IMPORTS = "torch._dynamo,torch.distributed.checkpoint.state_dict,torch.distributed.tensor,omegaconf"

#: The code before every program.
TRAINING = """
import inspect, os, signal, warnings
from pathlib import Path
from types import SimpleNamespace

import numpy, torch
import fastckpt
from harness import cli, looks

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

#: For each page, its large values and the small ones that replace them in the tests.
SMALLER = {
    "docs/distributed.md": {"50_304": "504", "4096": "16", "12_576": "126"},
    "docs/files.md": {"fastckpt:///shared/runs": "fastckpt://runs"},
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

#: This needs torch 2.9 or newer.
STAGER = """
if "async_stager" in inspect.signature(dcp.async_save).parameters:
    dcp.async_save(state, checkpoint_id="runs/step-3000", async_stager=fastckpt.dcp.Stager()).result()
    assert same(fastckpt.load("runs/step-3000"), before)
"""

#: For each page and each program on it: the code before it and the checks after it, or the test that runs it and names
#: the page, or, if it is a part of a program, the path of that program, which has the names of the part.
STAGES: dict[str, list[tuple[str, str] | str]] = {
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
            (
                "load_per_rank = fastckpt.distributed.load_per_rank\n"
                "fastckpt.distributed.load_per_rank = lambda path, rank=0: load_per_rank(path, rank=min(rank, 0))"
            ),
            "assert own['data'] == other['data'] == {'taken': 7}",
        ),
        ("path = 'later'", "assert report.bytes and fastckpt.load(path)"),
        ("path = 'through-torch'", "assert same(fastckpt.load(path), before)"),
    ],
    "docs/files.md": [
        ("", "assert same(state, before)"),
        ("", "assert same(state, before)"),
        (
            (
                "import fsspec; from fastckpt.integrations.fsspec import FileSystem\n"
                "fsspec.register_implementation('fastckpt', FileSystem, clobber=True)"
            ),
            "assert same(torch.load('runs/state.pt'), before)",
        ),
        "examples/doors/torch_checkpointing_loop.py",
        (
            "tensors = state['model']\nfastckpt.save(state, 'step-1000')",
            "assert tensors.keys() == {'weight', 'bias'} and name in tensors",
        ),
        ("", "import safetensors\nassert not isinstance(safetensors.safe_open, type)"),
    ],
    "docs/manager.md": [
        (RUN, "assert fastckpt.Manager('runs/gpt', read_only=True).latest() == 2000 == training.done"),
        ("manager = fastckpt.Manager('other')", "manager.save(1, {'step': 1}); manager.wait()"),
        (
            (
                "ray = SimpleNamespace(train=SimpleNamespace(get_preemption_info=lambda: 'goes'))\n"
                "manager = fastckpt.Manager('asked', save_when=100)"
            ),
            "assert manager.should_save(1)",
        ),
        ("manager = fastckpt.Manager('other')", ""),
        ("manager = fastckpt.Manager('other')", "assert training.done == 2000"),
        (
            (
                f"{ONE_RANK}loss, train = 1.0, training.step\ndef state(): return {{'weight': torch.ones(4)}}\n"
                "os.rename('runs', 'before')"
            ),
            "assert fastckpt.Manager('runs/gpt', read_only=True, ranks='alone').latest() == 2000",
        ),
    ],
    "docs/names.md": [
        ("fastckpt.save(state, path)", "fastckpt.background.drain(); assert same(fastckpt.load(path), before)")
    ],
    "docs/settings.md": [("", "assert Path(path, 'config.json').read_text() == '{}'")],
    "docs/sizing.md": [("", "assert job.interval and job.to_dict()['write_per_gpu'] == job.write_per_gpu")],
    "docs/states.md": [
        (
            (
                "import dataclasses, enum\nPhase = enum.Enum('Phase', 'WARM')\n"
                "Position = dataclasses.make_dataclass('Position', ['epoch'])\n"
                "with warnings.catch_warnings():\n"
                "    warnings.simplefilter('ignore')\n    fastckpt.save({'at': Position(3), 'phase': Phase.WARM}, path)"
            ),
            "assert state == {'at': Position(3), 'phase': Phase.WARM}",
        ),
        (
            "import omegaconf\nfastckpt.save({'lr': 1}, 'plain')",
            (
                "fastckpt.save(omegaconf.OmegaConf.create({'lr': 1}), 'configuration')\n"
                "assert isinstance(fastckpt.load('configuration'), omegaconf.DictConfig)"
            ),
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
    "docs/monitoring.md": ["tests/tools/test_monitoring_guide.py"] * 3,
    "docs/guides/accelerate.md": ["tests/guides/test_guides.py", "examples/doors/accelerate_loop.py"],
    "docs/guides/deepspeed.md": ["tests/integrations/test_deepspeed.py"] * 3,
    "docs/guides/fsdp2.md": ["tests/guides/test_guides.py"],
    "docs/guides/lightning.md": ["examples/doors/lightning_trainer.py", "tests/guides/test_guides.py"],
    "docs/guides/plain.md": ["tests/guides/test_guides.py"],
    "docs/guides/ray.md": ["tests/integrations/test_ray.py"],
    "docs/guides/torchtitan.md": ["examples/doors/torchtitan_loop.py"],
    "docs/guides/trainer.md": ["tests/guides/test_guides.py"],
    "docs/migrate/lightning.md": ["tests/integrations/test_lightning.py"] * 3,
    "docs/migrate/trainer.md": ["tests/integrations/test_transformers.py"] * 2,
    "docs/migrate/back.md": [("fastckpt.save(state, 'runs/step-1000')", "assert same(again, before)")],
    "docs/migrate/dcp.md": [
        ("warnings.simplefilter('ignore')", "assert same(state, before)"),
        ("", "assert same(state, before)"),
        ("", f"assert same(fastckpt.load('runs/step-2000'), before)\n{STAGER}"),
    ],
    "docs/migrate/torch-save.md": [
        ("", "assert same(state, before)"),
        ("", "assert same(state, before)"),
        ("", "assert all(same(load(path), before) for path in ('step-500', 'step-500.pt', 'step-1000'))"),
    ],
}

#: Pages whose commands also run, in their order on the page, and the checks at the end.
ENDS = {
    "docs/migrate/back.md": """
import safetensors.torch, torch.distributed.checkpoint as dcp
assert same(torch.load("exported.pt"), before)
empty = {"model": {"weight": torch.zeros(8, 8)}}
warnings.simplefilter("ignore")
dcp.load(empty, checkpoint_id="exported-dcp")
assert same(empty, before)
for file, name in (("exported.safetensors", "model.weight"), ("exported-hf/model.safetensors", "weight")):
    assert torch.equal(safetensors.torch.load_file(file)[name], before["model"]["weight"])
""",
    "docs/migrate/dcp.md": "assert same(fastckpt.load('runs/step-500'), before)",
    "docs/migrate/torch-save.md": "",
}
