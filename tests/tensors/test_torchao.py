"""torchao's tensors need no registration in fastckpt, because torchao declares them safe to torch."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import fastckpt
from fastckpt.exceptions import UnsupportedTypeError
from harness import needs

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim
        from torchao.quantization import Float8Tensor, Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig as Int8Config
except ImportError as error:
    needs.missing(str(error))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def flat(value):
    """All plain tensors within a tensor, by their path, and the other data of its class."""
    if not hasattr(value, "__tensor_flatten__"):
        return {"": value.detach()}
    names, context = value.__tensor_flatten__()
    parts = {f"{name}{way}": part for name in names for way, part in flat(getattr(value, name)).items()}
    return {**parts, "context": context, "about": (type(value), value.shape, value.dtype, value.requires_grad)}


def alike(left, right):
    left, right = flat(left), flat(right)
    assert left.keys() == right.keys()
    for name, part in left.items():
        assert torch.equal(part, right[name]) if isinstance(part, torch.Tensor) else part == right[name], name
    return True


def trained(kind):
    torch.manual_seed(5)
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = kind(model.parameters(), lr=1e-2)
    step(model, optimizer, 3)
    return model, optimizer


def step(model, optimizer, count):
    torch.manual_seed(9)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().sum().backward()
        optimizer.step()


@pytest.mark.states("tensors and optimizer states of torchao")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("way", ["load", "into"])
def test_optimizers_go_on(tmp_path, kind, way):
    kind = getattr(torchao.optim, kind)
    model, optimizer = trained(kind)
    fastckpt.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    fresh, again = trained(kind)
    with torch.no_grad():
        fresh.weight.zero_()
    into = {"model": fresh.state_dict(), "optimizer": again.state_dict()} if way == "into" else None
    loaded = fastckpt.load(tmp_path / "c", into=into)
    moments = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert alike(loaded["optimizer"]["state"][0][name], moments[name])
    fresh.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    step(model, optimizer, 2)
    step(fresh, again, 2)
    assert torch.equal(model.weight, fresh.weight)
    assert alike(again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def quantized(config):
    torch.manual_seed(6)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False), torch.nn.Linear(128, 64)).bfloat16()
    quantize_(model, config())
    return model


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Int8Config, Float8WeightOnlyConfig])
@pytest.mark.parametrize("mmap", [False, True])
def test_quantized_models(tmp_path, config, mmap):
    model = quantized(config)
    state = model.state_dict()
    fastckpt.save(state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", io=fastckpt.IO(mmap=mmap))
    assert all(alike(loaded[name], value) for name, value in state.items())
    fresh = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False), torch.nn.Linear(128, 64)).bfloat16()
    fresh.load_state_dict(loaded, assign=True)
    rows = torch.randn(3, 256).bfloat16()
    assert torch.equal(fresh(rows), model(rows))


def test_contexts_with_enums_dataclasses_and_named_tuples(tmp_path):
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    tensor = Float8Tensor(
        torch.randn(64, 32).to(torch.float8_e4m3fn),
        torch.rand(64, 1),
        block_size=[1, 32],
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=PerRow()),
        dtype=torch.bfloat16,
    )
    state = {"tensor": tensor, "parameter": torch.nn.Parameter(tensor, requires_grad=False)}
    fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True)).result(60)
    loaded = fastckpt.load(tmp_path / "c")
    assert all(alike(loaded[name], value) for name, value in state.items())
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert [type(part) for part in loaded["tensor"].__tensor_flatten__()[1].values()] == [
        type(part) for part in tensor.__tensor_flatten__()[1].values()
    ]


def test_a_program_needs_to_import_torchao_and_no_more(tmp_path):
    _, optimizer = trained(torchao.optim.AdamW8bit)
    fastckpt.save(optimizer.state_dict()["state"], tmp_path / "c")
    knows = (
        "import sys, warnings, fastckpt\n"
        "warnings.simplefilter('ignore')\n"
        "import torchao.optim\n"
        "print(type(fastckpt.load(sys.argv[1])[0]['exp_avg']).__qualname__)\n"
    )
    ignorant = (
        "import sys, fastckpt\n"
        "plain = fastckpt.load(sys.argv[1], registry=fastckpt.Registry(undeclared='plain'))\n"
        "print(type(plain[0]['exp_avg']).__qualname__, flush=True)\n"
        "fastckpt.load(sys.argv[1])\n"
    )

    def run(program):
        return subprocess.run(
            [sys.executable, "-c", program, tmp_path / "c"], check=False, capture_output=True, text=True
        )

    assert run(knows).stdout.split() == ["OptimState8bit"]
    done = run(ignorant)
    assert done.stdout.split() == ["tuple"]
    assert "torchao.optim.subclass_8bit.OptimState8bit" in done.stderr.splitlines()[-1]


def test_what_saves_refuse_no_file_may_name(tmp_path):
    """The import of DTensor declares it safe for torch, but no checkpoint of fastckpt holds one."""
    from torch.distributed.tensor import DTensor

    from harness import manifest

    assert DTensor in torch.serialization.get_safe_globals()
    fastckpt.save({"v": None}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    body["structure"].insert(2, ["type", f"{DTensor.__module__}.{DTensor.__qualname__}"])
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(UnsupportedTypeError, match="DTensor"):
        fastckpt.load(tmp_path / "c")
