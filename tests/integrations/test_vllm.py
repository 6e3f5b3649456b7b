"""vLLM's loader against a stand-in with the interface of vLLM's: vLLM itself needs a GPU, and has NOT been run."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastckpt
from fastckpt.integrations import vllm as door
from harness.rot import rot

LOADERS = "vllm.model_executor.model_loader"


class DefaultModelLoader:
    """The interface that the integration uses, from vLLM's main branch of November 2026, without its loading report."""

    def __init__(self, load_config):
        self.load_config = load_config
        self.counter_before_loading_weights = 0.0

    def load_weights(self, model, model_config):
        model.load_weights(self.get_all_weights(model_config, model))
        assert self.counter_before_loading_weights > 0


class Model(LlamaForCausalLM):
    """A model that loads weights as vLLM's models do."""

    def load_weights(self, weights):
        parameters, self.order = dict(self.named_parameters()), []
        for name, weight in weights:
            assert weight.device.type == "cpu"
            parameters[name].data.copy_(weight)
            self.order.append(name)


@pytest.fixture
def loader(monkeypatch):
    """The loader, made as vLLM makes it."""
    known = {}

    def register_model_loader(name):
        return lambda kind: known.update({name: kind}) or kind

    interface = {"DefaultModelLoader": DefaultModelLoader, "register_model_loader": register_model_loader}
    parts = LOADERS.split(".")
    for number in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: number + 1]), types.ModuleType(parts[number]))
    vars(sys.modules[LOADERS]).update(interface)
    door.register()
    door.register()
    return known["fastckpt"](None)


def model_of(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 11, "num_attention_heads": 2}
    return Model(LlamaConfig(vocab_size=32, **sizes)).eval()


def config_of(path):
    return types.SimpleNamespace(model=str(path))


def state_of(model):
    return {"model": model.state_dict(), "optimizer": {"moment": torch.ones(5)}, "step": 7}


def test_a_training_state_becomes_a_model(loader, tmp_path):
    """Weights come in the order of the layers, not of the files. Mutant: the order of the files."""
    one, other = model_of(1), model_of(2)
    fastckpt.save(state_of(one), tmp_path / "c", files=fastckpt.Files(shard_size="20kB"))
    assert len(fastckpt.open(tmp_path / "c").shards) > 3
    loader.download_model(config_of(tmp_path / "c"))
    loader.load_weights(other, config_of(tmp_path / "c"))
    for name, weight in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
    assert other.order == [name for name, _ in one.named_parameters()]
    # A second load reads the checkpoint that is there by then.
    fastckpt.save(state_of(model_of(3)), tmp_path / "c")
    loader.load_weights(other, config_of(tmp_path / "c"))
    assert torch.equal(other.lm_head.weight, model_of(3).lm_head.weight)


def test_vllm_finds_the_format(loader):
    """vLLM finds the format by the entry point that the package declares."""
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    (target,) = re.findall(r'"vllm\.general_plugins"\]\nfastckpt = "(.+)"', text)
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is door.register


def test_an_older_vllm_starts(monkeypatch):
    for name in ("vllm", "vllm.model_executor", LOADERS):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    door.register()


def test_what_is_damaged_or_no_model_is_refused(loader, tmp_path):
    one = model_of(1)
    state = state_of(one)
    fastckpt.save(state, tmp_path / "damaged")
    rot(tmp_path / "damaged" / "model.safetensors", 6000)
    with pytest.raises(fastckpt.CorruptCheckpointError, match="damaged"):
        loader.load_weights(model_of(2), config_of(tmp_path / "damaged"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        loader.download_model(config_of(tmp_path / "nothing"))
    fastckpt.save({"step": 7}, tmp_path / "none")
    with pytest.raises(ValueError, match=r"none holds no tensors of a model"):
        loader.load_weights(model_of(2), config_of(tmp_path / "none"))
    one.secondary_weights = ["another"]
    with pytest.raises(ValueError, match="secondary weights of Model are unsupported"):
        loader.load_weights(one, config_of(tmp_path / "damaged"))


def test_the_program_of_the_examples(loader, tmp_path, monkeypatch, capsys):
    """The program uses the names and arguments of vLLM's ``LLM``, ``SamplingParams`` and outputs."""
    model, path = model_of(2), tmp_path / "c"
    fastckpt.save(state_of(model_of(1)), path)

    class LLM:
        def __init__(self, model, *, load_format):
            assert load_format == "fastckpt"
            self.config = config_of(model)
            loader.download_model(self.config)

        def generate(self, prompts, sampling_params):
            assert sampling_params.temperature == 0
            loader.load_weights(model, self.config)
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(text="whole.")]) for _ in prompts]

    vars(sys.modules["vllm"]).update(LLM=LLM, SamplingParams=types.SimpleNamespace)
    monkeypatch.setattr(sys, "argv", ["vllm_generate.py", str(path)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "doors" / "vllm_generate.py"), run_name="__main__")
    assert capsys.readouterr().out == "Checkpoints are whole.\n"
    assert torch.equal(model.lm_head.weight, model_of(1).lm_head.weight)
