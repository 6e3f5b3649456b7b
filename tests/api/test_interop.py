"""Other libraries read our files: safetensors and Hugging Face."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors
import torch

import fastckpt
from harness import needs
from harness.same import bits

NAMED = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
NAMED = [name for name in NAMED if hasattr(torch, name)]  # float8_e8m0fnu came with torch 2.7


@pytest.mark.parametrize("shard_size", [1, 5 * 10**9])
def test_safetensors_reads_the_same_tensors(shard_size, tmp_path, engine):
    state = {
        name: torch.arange(12 * 16, dtype=torch.uint8).view(getattr(torch, name))[:12]
        for name in NAMED
        if name != "bool"
    }
    state |= {
        "bool": torch.tensor([True, False]),
        "t": torch.randn(40, 50).t(),
        "0d": torch.tensor(1.5),
        "0": torch.empty(0, 3),
        "big": torch.randn(600, 1000),
        "nested": {"list": [torch.ones(3)], "é漢": torch.ones(2)},
        "n": np.arange(5),
    }
    fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(shard_size=shard_size), io=engine)
    flat = {**{k: v for k, v in state.items() if isinstance(v, torch.Tensor)}, "n": torch.arange(5)}
    flat |= {"nested.list.0": torch.ones(3), "nested.é漢": torch.ones(2)}
    found = {}
    for file in (tmp_path / "c").rglob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - it is no mapping
    assert found.keys() == flat.keys()
    for name, tensor in flat.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def test_every_name_that_safetensors_reads_is_used(tmp_path):
    named = set()
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
            fastckpt.save({"w": tensor}, tmp_path / "c")
        except (
            RuntimeError,
            TypeError,
            fastckpt.exceptions.UnsupportedTypeError,
        ):  # dtypes of quantized values or of uninterpreted bits
            continue
        with safetensors.safe_open(tmp_path / "c" / "model.safetensors", "pt") as shard:
            if shard.get_tensor("w").dtype is dtype:
                named.add(str(dtype).removeprefix("torch."))
    assert named == set(NAMED)


def test_what_safetensors_cannot_name_is_bytes_there(tmp_path):
    state = {"c": torch.arange(3).to(torch.complex128), "u": torch.zeros(5, dtype=torch.uint4), "s": np.array(["ab"])}
    fastckpt.save(state, tmp_path / "c")
    with safetensors.safe_open(tmp_path / "c" / "model.safetensors", "pt") as shard:
        assert shard.get_tensor("c").dtype is torch.uint8
        assert bits(shard.get_tensor("c")) == bits(state["c"])
        assert shard.get_tensor("u").shape == (5,)
        assert shard.get_tensor("s").numpy().tobytes() == state["s"].tobytes()


@pytest.mark.parametrize("shard_size", [20_000, 5 * 10**9])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_opens_a_model_as_it_lies(family, shard_size, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        needs.missing(str(error))
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
    else:
        config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    path = tmp_path / "m"
    report = fastckpt.save(model.state_dict(), path, files=fastckpt.Files(shard_size=shard_size))
    assert (report.shards > 1) == (shard_size == 20_000)
    config.save_pretrained(path)
    opened, about = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(about[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs, ours = opened.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    tokens = torch.arange(8)[None]
    assert torch.equal(opened.eval()(tokens).logits, model(tokens).logits)
    # A config beside the checkpoint survives the next save, which still replaces the checkpoint.
    fastckpt.save(model.state_dict(), path, files=fastckpt.Files(shard_size=shard_size))
    assert (path / "config.json").exists()
    model.load_state_dict(fastckpt.load(path))
