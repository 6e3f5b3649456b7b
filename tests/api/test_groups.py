"""Groups of shards: other programs open the directory of a full training state as a model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import fastckpt
from harness import manifest as oracle
from harness import needs
from harness.same import same

INDEX = "model.safetensors.index.json"
TRAINING = "training/training.safetensors"


def names(path):
    return sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())


def headers(path):
    """The tensor names in each safetensors file, by path."""
    found = {}
    for file in path.rglob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as shard:
            found[file.relative_to(path).as_posix()] = sorted(shard.keys())
    return found


def as_vllm_does(path):
    """Load the files that vLLM finds by their names, and check that these include all files of the index."""
    chosen = sorted(path.glob("*.safetensors"))
    assert {file.name for file in chosen} >= set(json.loads((path / INDEX).read_bytes())["weight_map"].values())
    return {name: tensor for file in chosen for name, tensor in safetensors.torch.load_file(file).items()}


def model_of(family, *, tied):
    try:
        import transformers
    except ImportError as error:
        needs.missing(str(error))
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=tied,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tied
        )
    torch.manual_seed(3)
    return config, transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("shard_size", [20_000, 5 * 10**9])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore")
def test_a_training_state_opens_as_a_model(family, tied, shard_size, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config, model = model_of(family, tied=tied)
    import transformers

    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = {"step": 3, "optimizer": optimizer.state_dict(), "model": model.state_dict(), "rng": torch.get_rng_state()}
    path = tmp_path / "step-3"
    fastckpt.save(state, path, files=fastckpt.Files(shard_size=shard_size))
    config.save_pretrained(path)

    opened, about = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(about[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs, ours = opened.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert torch.equal(opened.eval()(tokens).logits, model(tokens).logits)
    # vLLM uses the name of the input embeddings for tied embeddings.
    read = as_vllm_does(path)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in read.items())
    assert ours.keys() - read.keys() == ({"lm_head.weight"} if tied else set())
    index = json.loads((path / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read.values())
    # fastckpt returns the whole state, and every rule of the format holds.
    assert same(fastckpt.load(path), state)
    oracle.read(path)


def test_one_shard_of_the_model_is_found_with_and_without_the_index(tmp_path):
    state = {"optimizer": {"m": torch.ones(3)}, "model": {"a": torch.ones(2), "b": {"c": torch.zeros(4)}}, "step": 5}
    fastckpt.save(state, tmp_path / "c")
    assert names(tmp_path / "c") == ["fastckpt.json", "model.safetensors", INDEX, TRAINING]
    assert headers(tmp_path / "c") == {"model.safetensors": ["a", "b.c"], TRAINING: ["optimizer.m"]}
    assert json.loads((tmp_path / "c" / INDEX).read_bytes()) == {
        "metadata": {"total_size": 24},
        "weight_map": {"a": "model.safetensors", "b.c": "model.safetensors"},
    }
    assert as_vllm_does(tmp_path / "c").keys() == {"a", "b.c"}
    # A checkpoint of a model alone has an index, too: tools find checkpoints by it.
    fastckpt.save({"model": state["model"]}, tmp_path / "c")
    assert names(tmp_path / "c") == ["fastckpt.json", "model.safetensors", INDEX]
    assert headers(tmp_path / "c") == {"model.safetensors": ["a", "b.c"]}


def test_several_shards_of_each_group(tmp_path):
    layers = {f"w{i}": torch.full((100,), float(i)) for i in range(4)}
    fastckpt.save({"model": layers, "optimizer": dict(layers)}, tmp_path / "tied", files=fastckpt.Files(shard_size=800))
    copies = {name: tensor.clone() for name, tensor in layers.items()}
    fastckpt.save({"model": layers, "optimizer": copies}, tmp_path / "c", files=fastckpt.Files(shard_size=800))
    assert headers(tmp_path / "c") == {
        "model-00001-of-00002.safetensors": ["w0", "w1"],
        "model-00002-of-00002.safetensors": ["w2", "w3"],
        "training/training-00001-of-00002.safetensors": ["optimizer.w0", "optimizer.w1"],
        "training/training-00002-of-00002.safetensors": ["optimizer.w2", "optimizer.w3"],
    }
    index = json.loads((tmp_path / "c" / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == 1600
    assert index["weight_map"] == {f"w{i}": f"model-0000{i // 2 + 1}-of-00002.safetensors" for i in range(4)}
    # A tensor of both the model and the optimizer is stored once, in the model's files.
    assert [name for name in headers(tmp_path / "tied") if name.startswith("training")] == []


@pytest.mark.parametrize("key", ["model", "module", "state_dict", "model_state_dict"])
def test_the_key_is_found_by_convention(key, tmp_path):
    fastckpt.save({"epoch": 1, "optimizer": {"m": torch.ones(3)}, key: {"w": torch.ones(2)}}, tmp_path / "c")
    assert headers(tmp_path / "c") == {"model.safetensors": ["w"], TRAINING: ["optimizer.m"]}
    assert list(fastckpt.open(tmp_path / "c")) == ["optimizer.m", f"{key}.w"]


ONE, TWO = torch.ones(2), torch.ones(3)
CASES = {
    # state, model_key, names in the files of the model, and in the others
    "named": ({"net": {"w": ONE}, "model": {"w": TWO}}, "net", ["w"], ["model.w"]),
    "none": ({"model": {"w": ONE}, "o": TWO}, None, ["model.w", "o"], None),
    "no-convention": ({"net": {"w": ONE}, "o": TWO}, "auto", ["net.w", "o"], None),
    "first-convention": ({"state_dict": {"w": ONE}, "model": {"w": TWO}}, "auto", ["w"], ["state_dict.w"]),
    "no-mapping": ({"model": [ONE], "o": TWO}, "auto", ["model.0", "o"], None),
    "a-tensor": ({"model": ONE, "module": {"w": TWO}}, "auto", ["w"], ["model"]),
    "only-inside": ({"a": {"model": {"w": ONE}}, "o": TWO}, "auto", ["a.model.w", "o"], None),
    "deeper": ({"model": {"model": {"w": ONE}, "b": TWO}}, "auto", ["b", "model.w"], None),
    "a-list": ([{"model": {"w": ONE}}], "auto", ["0.model.w"], None),
    "a-tensor-alone": (ONE, "auto", ["tensor"], None),
    "empty-by-convention": ({"model": {"name": "gpt"}, "module": {"w": ONE}, "o": TWO}, "auto", ["w"], ["o"]),
    "none-by-convention": ({"model": {}, "o": TWO}, "auto", ["o"], None),
    "empty-by-name": ({"model": {}, "o": TWO}, "model", [], ["o"]),
    "reserved": ({"model": {"__metadata__": ONE, "w": TWO}}, "auto", ["w"], ["model.__metadata__"]),
    "reserved-outside": ({"model": {"w": ONE}, "__metadata__": TWO}, "auto", ["w"], ["__metadata__~1"]),
    "no-name": ({"model": {"": ONE}, "": TWO}, "auto", [""], [""]),
    "key-without-a-name": ({"": {"w": ONE}, "o": TWO}, "", ["w"], ["o"]),
    "dots": ({"a.b": {"w": ONE}, "ab": {"w": TWO}}, "a.b", ["w"], ["ab.w"]),
    # A tensor outside the model has a name with the model's prefix, so the whole state counts as the model.
    "clash": ({"model.w": TWO, "model": {"w": ONE}}, "auto", ["model.w", "model.w~1"], None),
    "no-second-choice": ({"model.x": TWO, "model": {"w": ONE}, "module": {}}, "auto", ["model.w", "model.x"], None),
    "not-utf-8": ({"\ud800": {"w": ONE}, "o": TWO}, "\ud800", ["w"], ["o"]),
    "a-number": ({7: {"w": ONE}, "o": TWO}, 7, ["w"], ["o"]),
    "an-equal-number": ({True: {"w": ONE}, "o": TWO}, 1.0, ["w"], ["o"]),
    "no-tensors": ({"model": {"w": 1}, "o": 2}, "model", [], None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_the_model(case, tmp_path, save):
    state, key, model, others = CASES[case]
    save(state, tmp_path / "c", files=fastckpt.Files(model_key=key))
    expected = {"model.safetensors": model} | ({} if others is None else {TRAINING: others})
    assert headers(tmp_path / "c") == expected
    oracle.read(tmp_path / "c")
    assert same(fastckpt.load(tmp_path / "c"), state)
    assert fastckpt.verify(tmp_path / "c").ok


@pytest.fixture(params=["save", "async"])
def save(request):
    if request.param == "save":
        return fastckpt.save
    return lambda *given, **named: fastckpt.save_async(*given, **named).result(60)


@pytest.mark.parametrize(
    ("state", "key", "remedy"),
    [
        ({"model": {"w": ONE}, "optimizer": {}}, "modle", "give one of 'model', 'optimizer', or None"),
        ({"model": ONE}, "model", "give None"),
        ({"a": {"model": {"w": ONE}}}, "a.model", "give one of 'a', or None"),
        ([ONE], "model", "give None"),
        ({"model": {"w": ONE}}, ["model"], "give one of 'model', or None"),
    ],
)
def test_a_key_that_leads_to_no_mapping_is_refused(state, key, remedy, tmp_path, save):
    with pytest.raises(ValueError, match=r"save(_async)?: model_key=") as caught:
        save(state, tmp_path / "c", files=fastckpt.Files(model_key=key))
    assert str(caught.value).endswith(f"the state has no mapping under that key: {remedy}")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "key", "other"),
    [
        ({"model": {"w": ONE}, "model.ema": {"w": TWO}}, "model", "'model.ema'"),
        ({"a.b": {"w": ONE}, "a": {"b": {"w": TWO}}}, "a.b", "'a'"),
        ({"7": {"w": ONE}, 7: {"w": TWO}}, "7", "7"),
    ],
)
def test_a_key_whose_names_another_can_make_is_refused(state, key, other, tmp_path, save):
    with pytest.raises(ValueError, match=f"tensors under the key {other} can have the same names as the model's"):
        save(state, tmp_path / "c", files=fastckpt.Files(model_key=key))
    assert names(tmp_path) == []


def test_a_registered_mapping_has_no_model(tmp_path, registry, save):
    class Wrapped(dict):
        pass

    fastckpt.register_type(
        Wrapped, lambda value: {"inner": dict(value)}, lambda value: Wrapped(value["inner"]), "wrapped"
    )
    state = Wrapped(model={"w": np.arange(3.0)})
    save(state, tmp_path / "c")
    assert headers(tmp_path / "c") == {"model.safetensors": ["inner.model.w"]}
    with pytest.raises(ValueError, match="no mapping under that key"):
        save(state, tmp_path / "c", files=fastckpt.Files(model_key="model"))


def test_a_refused_key_holds_no_buffer(tmp_path, save):
    raw = bytearray(5000)
    with pytest.raises(ValueError, match="model_key") as caught:
        save({"raw": raw}, tmp_path / "c", files=fastckpt.Files(model_key="model"))
    raw.append(1)  # BufferError, if a view still existed
    assert caught.value


def test_tensors_shared_with_the_model_are_the_models(tmp_path, save):
    """Whatever the order of the state, a model's file holds all tensors of the model."""
    w, b = torch.ones(3), torch.zeros(2)
    state = {"ema": {"w": w, "b": b.clone()}, "also": w, "model": {"first": w, "second": w, "b": b}}
    save(state, tmp_path / "c")
    found = headers(tmp_path / "c")
    assert found == {"model.safetensors": ["b", "first"], TRAINING: ["ema.b"]}
    loaded = fastckpt.load(tmp_path / "c")
    assert same(loaded, state)
    pointers = {loaded["ema"]["w"].data_ptr(), loaded["also"].data_ptr(), loaded["model"]["second"].data_ptr()}
    assert len(pointers) == 1
    # Each tied place can be found by its own name.
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert list(checkpoint) == ["model.first", "ema.b", "model.b"]
        for name in ("ema.w", "also", "model.first", "model.second"):
            assert checkpoint.info(name).name == "model.first"
    assert same(fastckpt.load(tmp_path / "c", keys="ema.*"), {"ema": state["ema"]})
    assert same(fastckpt.load(tmp_path / "c", keys="also"), {"also": w})
    assert same(fastckpt.load(tmp_path / "c", keys="model.*"), {"model": state["model"]})
    into = {"ema": {"w": torch.empty(3), "b": torch.empty(2)}}
    fastckpt.load(tmp_path / "c", keys="ema.*", into=into)
    assert same(into, {"ema": state["ema"]})


def test_readers_of_fastckpt_see_whole_names(tmp_path, capsys):
    from harness.cli import main

    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "optimizer": {"m": np.arange(4)}, "step": 9}
    fastckpt.save(state, tmp_path / "c")
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert list(checkpoint) == ["model.w", "optimizer.m"]
        assert checkpoint.info("model.w").shard == "model.safetensors"
        assert torch.equal(checkpoint["model.w"], state["model"]["w"])
        assert checkpoint.tensor("model.w")[(1, 2)].item() == 5.0
        assert "w" not in checkpoint
    assert same(fastckpt.load(tmp_path / "c", keys="model.*"), {"model": state["model"]})
    into = {"model": {"w": torch.empty(2, 3)}, "optimizer": {"m": np.empty(4, np.int64)}}
    fastckpt.load(tmp_path / "c", into=into)
    assert torch.equal(into["model"]["w"], state["model"]["w"])
    assert main(["ls", str(tmp_path / "c")]) == 0
    listed = capsys.readouterr().out
    assert "model.w" in listed
    assert "optimizer.m" in listed
    assert main(["info", str(tmp_path / "c")]) == 0
    assert "2" in capsys.readouterr().out


def test_damage_names_the_tensor_by_its_whole_name(tmp_path):
    fastckpt.save({"model": {"w": torch.ones(5000)}, "o": torch.ones(3)}, tmp_path / "c")
    with (tmp_path / "c" / "model.safetensors").open("r+b") as file:
        file.seek(9000)
        file.write(b"\xff")
    report = fastckpt.verify(tmp_path / "c")
    assert [(each.file, each.tensor) for each in report.damage] == [("model.safetensors", "model.w")]


def test_a_group_that_is_gone_leaves_no_file(tmp_path):
    path = tmp_path / "c"
    model = {f"w{i}": torch.full((100,), float(i)) for i in range(4)}
    fastckpt.save({"model": model, "optimizer": {"m": torch.zeros(500)}}, path, files=fastckpt.Files(shard_size=800))
    (path / "config.json").write_text("{}")
    assert len(names(path)) == 6
    fastckpt.save(model, path)
    assert names(path) == ["config.json", "fastckpt.json", "model.safetensors", INDEX]
    assert not (path / "training").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", INDEX])
def test_a_file_of_somebody_else_is_not_replaced(name, tmp_path, save):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=f"it holds `{name}` and is not a checkpoint"):
        save({"model": {"w": ONE}, "o": TWO}, tmp_path / "c")
    assert (tmp_path / "c" / name).read_bytes() == b"mine"
    # A file with only a similar name is carried over.
    (tmp_path / "c" / name).rename(tmp_path / "c" / "training_args.bin")
    save({"model": {"w": ONE}, "o": TWO}, tmp_path / "c")
    assert (tmp_path / "c" / "training_args.bin").read_bytes() == b"mine"


def test_an_adapter_beside_a_model_is_somebody_else_s(tmp_path):
    """Such an adapter file is carried over and copied like other files; beside our adapter it was once lost."""
    path, name = tmp_path / "c", "adapter_model.safetensors"
    fastckpt.save({"w": ONE}, path)
    (path / name).write_bytes(b"mine")
    fastckpt.save({"w": TWO}, path)
    assert (path / name).read_bytes() == b"mine"
    assert fastckpt.list(tmp_path)[0].bytes == sum(each.stat().st_size for each in path.iterdir()) - 4
    fastckpt.copy(path, tmp_path / "d")
    assert (tmp_path / "d" / name).read_bytes() == b"mine"
    with pytest.raises(OSError, match=f"it holds `{name}`, which is not part of the checkpoint"):
        fastckpt.remove(path)
    # A shard with the file's name replaces it; a save removes shards of an earlier checkpoint.
    files = fastckpt.Files(model_key="adapter_model")
    fastckpt.save({"adapter_model": {"w": ONE}}, path, files=files)
    assert same(fastckpt.load(path), {"adapter_model": {"w": ONE}})
    (path / "adapter_model-00001-of-00002.safetensors").write_bytes(b"left")
    fastckpt.copy(path, tmp_path / "e")
    fastckpt.save({"w": TWO}, path)
    for kept in (path, tmp_path / "e"):
        assert [each.name for each in kept.glob("adapter_model*")] == ([] if kept == path else [name])
    fastckpt.remove(path)


def test_an_adapter_has_the_file_that_peft_looks_for(tmp_path):
    """Files of the key ``adapter_model`` have all features of a model's files."""
    state = {"adapter_model": {"a.lora_A": torch.ones(2, 3), "b": torch.zeros(2)}, "optimizer": {"m": torch.ones(3)}}
    files = fastckpt.Files(model_key="adapter_model")
    for _ in range(2):
        fastckpt.save(state, tmp_path / "c", files=files)
    found = sorted(path.relative_to(tmp_path / "c").as_posix() for path in (tmp_path / "c").rglob("*.safetensors"))
    assert found == ["adapter_model.safetensors", "training/training.safetensors"]
    assert safetensors.torch.load_file(tmp_path / "c" / found[0]).keys() == {"a.lora_A", "b"}
    assert same(fastckpt.load(tmp_path / "c"), state)
    # An adapter may have several files and a base, and none of its files has a name of the model's.
    small = fastckpt.Files(model_key="adapter_model", shard_size=24)
    fastckpt.save(state, tmp_path / "d", files=small)
    assert (tmp_path / "d" / "adapter_model-00001-of-00002.safetensors").exists()
    assert same(fastckpt.load(tmp_path / "d"), state)
    fastckpt.save(state, tmp_path / "d", files=files, base=tmp_path / "c")
    assert same(fastckpt.load(tmp_path / "d"), state)
    fastckpt.save(state, tmp_path / "d", files=fastckpt.Files(model_key=None))
    assert [path.name for path in (tmp_path / "d").rglob("*.safetensors")] == ["model.safetensors"]
    fastckpt.save(state, tmp_path / "d", files=small)
    assert not (tmp_path / "d" / "model.safetensors").exists()
    for name in "cd":
        fastckpt.remove(tmp_path / name)  # raises if another program's files are left
