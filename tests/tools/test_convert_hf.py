"""``fastckpt export --format hf``: a directory for Hugging Face's readers, without holding the state in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.testing._internal.two_tensor import TwoTensor

import fastckpt
from harness import cli, manifest, zygote


def export(capsys, *arguments):
    status = cli.main(["export", *map(str, arguments), "--format", "hf", "--json"])
    return status, json.loads(capsys.readouterr().out)


def read(directory):
    """Return the tensors that any reader of the format finds, through the index if there is one."""
    index = directory / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    found = {}
    for file in files:
        with safe_open(directory / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - no dict
    return found


def test_transformers_opens_what_was_compiled_and_wrapped(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="NOT TESTED HERE: needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    wanted = model.state_dict()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in wanted.items()}
    source, target = tmp_path / "step", tmp_path / "runs" / "hf"
    fastckpt.save(
        {"model": wrapped, "optimizer": [torch.ones(3)], "step": 5},
        source,
        metadata={"step": 5},
        files={"config.json": config.to_json_string(), "notes.log": "not a model's"},
    )
    extra = tmp_path / "tokenizer.model"
    extra.write_bytes(b"\0")
    options = ("--strip-prefix", "module._orig_mod.", "--shard-size", "30kB", "--files", extra)
    status, document = export(capsys, source, target, *options)
    assert status == 0, document
    assert document["files"] == ["config.json", "tokenizer.model"]
    assert len(list(target.glob("model-*.safetensors"))) > 2
    assert not (target / "notes.log").exists()
    again = transformers.LlamaForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())
    # The exported directory is also a checkpoint.
    assert fastckpt.verify(target).ok
    assert fastckpt.open(target).metadata == {"step": 5}
    assert set(fastckpt.load(target)) == set(read(target)) == set(wanted) - {"lm_head.weight"}


def test_what_is_chosen_and_how_it_is_called(tmp_path, capsys):
    shared = torch.arange(6, dtype=torch.bfloat16)
    state = {
        "model": torch.nn.Sequential(torch.nn.Linear(2, 3)).state_dict() | {"embed": shared},
        "ema": {"head": shared, "b": np.ones(2, np.float16), "raw": b"x" * 5000, "0": torch.zeros(0, 4)},
    }
    source = tmp_path / "c"
    fastckpt.save(state, source)
    for number, (options, names) in enumerate(
        (
            ((), {"0.weight", "0.bias", "embed"}),
            (("--strip-prefix", "0."), {"weight", "bias", "embed"}),
            (("--keys", "ema.*"), {"ema.head", "ema.b", "ema.0"}),
            (("--keys", "ema.*", "--strip-prefix", "ema."), {"head", "b", "0"}),
            # A name chooses everything below it, as in an export to one file.
            (("--keys", "ema"), {"ema.head", "ema.b", "ema.0"}),
            (("--keys", "model.0.*", "--keys", "*.b"), {"0.weight", "0.bias", "ema.b"}),
            # A tied tensor is written once, and its readers tie it again.
            (("--keys", "*"), {"0.weight", "0.bias", "embed", "ema.b", "ema.0"}),
        )
    ):
        target = tmp_path / str(number)
        status, document = export(capsys, source, target, *options)
        assert status == 0, document
        found = read(target)
        assert set(found) == names, options
        assert document["tensors"] == len(names)
        for name in found.keys() & {"embed", "ema.head", "head"}:
            assert torch.equal(found[name], shared)
        for name in found.keys() & {"ema.b", "b"}:
            assert found[name].tolist() == [1, 1]


def test_what_cannot_be_exported_leaves_nothing(tmp_path, capsys):
    source = tmp_path / "c"
    state = {
        "w": torch.ones(3),
        "a.w": torch.ones(3),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex128),
        "wide": torch.ones(1).expand(5),
        "generator": torch.Generator(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "wrapped": TwoTensor(torch.ones(2), torch.ones(2)),
    }
    fastckpt.save(state, source)
    plain = ("--keys", "w", "--keys", "a.w")
    (tmp_path / "x.safetensors").write_bytes(b"")
    for options, kind, what in (
        ((), "UnsupportedTypeError", "sparse"),
        (("--keys", "complex"), "UnsupportedTypeError", "torch.complex128"),
        (("--keys", "wide"), "UnsupportedTypeError", "expanded"),
        (("--keys", "generator.*"), "UnsupportedTypeError", "generator.state"),
        (("--keys", "nested.*"), "UnsupportedTypeError", "nested.values"),
        (("--keys", "wrapped.*"), "UnsupportedTypeError", "wrapped.0.a"),
        (("--keys", "x*"), "CheckpointError", "chooses no tensor"),
        ((*plain, "--strip-prefix", "a."), "CheckpointError", "two tensors named 'w'"),
        (
            (*plain, "--strip-prefix", "b."),
            "CheckpointError",
            "--strip-prefix b.: no name begins with that: the first name is 'w'",
        ),
        ((*plain, "--strip-prefix", "w"), "CheckpointError", "a tensor named ''"),
        ((*plain, "--files", tmp_path / "missing.json"), "FileNotFoundError", "missing.json"),
        ((*plain, "--files", tmp_path / "x.safetensors"), "ValueError", "x.safetensors"),
        ((*plain, "--shard-size", "0"), "ValueError", "shard-size"),
    ):
        status, document = export(capsys, source, tmp_path / "hf", *options)
        assert (status, document["type"]) == (2, kind), (options, document)
        assert what in document["error"]
    assert manifest.listing(tmp_path) == ["c", "x.safetensors"]
    status, document = export(capsys, tmp_path / "x.safetensors", tmp_path / "hf")
    assert (status, document["type"]) == (2, "NotACheckpointError")
    assert cli.main(["export", str(source), str(tmp_path / "x.pt"), "--strip-prefix", "a."]) == 2
    assert "--strip-prefix is for --format hf, not torch" in capsys.readouterr().err


def test_a_checkpoint_is_not_exported_onto_itself(tmp_path, capsys):
    source, link = tmp_path / "c", tmp_path / "link"
    fastckpt.save({"model": {"w": torch.ones(3)}, "optimizer": torch.ones(2)}, source)
    link.symlink_to(source)
    before = manifest.listing(source)
    for target in (source, link, source / "hf", link / "hf"):
        status, document = export(capsys, source, target, "--overwrite")
        assert (status, document["type"]) == (2, "CheckpointError"), document
        assert "one is inside the other" in document["error"]
    assert cli.main(["export", str(source), str(source / "training" / "training.safetensors"), "--overwrite"]) == 2
    assert manifest.listing(source) == before
    assert fastckpt.verify(source).ok


def test_a_name_that_no_model_has_does_not_go_along(tmp_path, capsys):
    source = tmp_path / "c"
    fastckpt.save({"w": torch.ones(3)}, source, files={"config.json": "{}", "a\nb.json": "{}"})
    (source / "\udcff.json").write_text("{}")
    status, document = export(capsys, source, tmp_path / "hf")
    assert (status, document["files"]) == (0, ["config.json"]), document


def test_only_what_belongs_to_a_model_goes_along(tmp_path, capsys):
    """Neither targets of links nor unknown files are copied."""
    source, private = tmp_path / "c", tmp_path / "private"
    private.write_text("secret")
    fastckpt.save({"w": torch.ones(3)}, source, files={"config.json": "{}", "notes.txt": "mine", "wandb.json": "{}"})
    (source / "LICENSE.txt").symlink_to(private)
    (source / "vocab.txt").symlink_to(private)
    (source / "tokenizer.json").mkdir()
    os.mkfifo(source / "merges.txt")
    status, document = export(capsys, source, tmp_path / "hf")
    assert (status, document["files"]) == (0, ["config.json"]), document
    assert manifest.listing(tmp_path / "hf") == [
        "config.json",
        "fastckpt.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    # Links that are named explicitly are followed: files of a hub's cache are links.
    named = ("--files", source / "LICENSE.txt", "--files", source / "notes.txt")
    status, document = export(capsys, source, tmp_path / "named", *named)
    assert (status, document["files"]) == (0, ["LICENSE.txt", "config.json", "notes.txt"])
    assert (tmp_path / "named" / "LICENSE.txt").read_text() == "secret"
    assert cli.main(["export", str(source), str(tmp_path / "told"), "--format", "hf", "--files", str(private)]) == 0
    assert "with config.json, private\n" in capsys.readouterr().out


def test_damage_is_found_on_the_way(tmp_path, capsys):
    source = tmp_path / "c"
    fastckpt.save({"w": np.zeros(20 << 20, np.uint8)}, source)
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(13 << 20)
        file.write(b"x")
    status, document = export(capsys, source, tmp_path / "hf")
    assert (status, document["type"]) == (1, "CorruptCheckpointError")
    assert "tensor `w`" in document["error"]
    assert manifest.listing(tmp_path) == ["c"]


def test_the_state_need_not_fit_into_memory(tmp_path):
    """The state has one large tensor and many small ones."""
    size = 600 << 20
    fastckpt.save({"large": np.zeros(size, np.uint8), "small": [np.ones(1000) for _ in range(2000)]}, tmp_path / "c")
    program = (
        "import sys\n"
        "from harness import cli\n"
        "assert cli.main(['export', *sys.argv[3:], '--format', 'hf']) == 0\n"
        "def peak():\n"
        "    with open('/proc/self/status') as file:\n"
        "        return next(int(line.split()[1]) for line in file if line.startswith('VmHWM:'))\n"
        "before = peak()\n"
        "assert cli.main(['export', *sys.argv[1:3], '--format', 'hf']) == 0\n"
        "assert 'torch' not in sys.modules\n"
        "print('grown', 1024 * (peak() - before))\n"
    )
    # This export imports all modules before the measurement.
    fastckpt.save({"w": np.zeros(1)}, tmp_path / "small")
    command = [sys.executable, "-c", program, *(str(tmp_path / name) for name in ("c", "hf", "small", "small-hf"))]
    environment = zygote.environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    assert int(done.stdout.split()[-1]) < 250 << 20
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > size
