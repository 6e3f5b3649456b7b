"""``dtype=`` and ``exclude=`` in a save of several ranks: each casts its own parts, and the files are the same."""

import hashlib

import pytest

import fastckpt
from fastckpt import distributed
from harness import parallel
from harness.parallel import dist, torch

OPTIONS = {"dtype": {"model": "bfloat16"}, "exclude": ["optimizer", "lr.1"]}


def shards(path):
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.rglob("*.safetensors")}


def save_alone(path):
    fastckpt.save(parallel.state("single", tied=True), path, **OPTIONS)


def save(topology, path, how):
    state = parallel.state(topology)
    if how == "async":
        pending = distributed.save_async(state, path, **OPTIONS)
        for value in state["model"].values():
            getattr(value, "_local_tensor", value).detach().fill_(7)
        return pending.result()
    return distributed.save(state, path, **OPTIONS)


@pytest.fixture(scope="module")
def reference(forge, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "c"
    with forge.group(1, backend="") as group:
        group.run(save_alone, path)
    return path


@pytest.mark.parametrize(("topology", "how"), [("fsdp", "sync"), ("fsdp", "async"), ("tp", "sync"), ("ddp", "sync")])
def test_the_bytes_do_not_depend_on_the_ranks(forge, tmp_path, reference, topology, how):
    with forge.group(2) as group:
        reports = group.run(save, topology, tmp_path / "c", how)
    assert shards(tmp_path / "c") == shards(reference)
    loaded = fastckpt.load(tmp_path / "c")
    assert sorted(loaded) == ["lr", "model", "step"]
    assert loaded["lr"] == [0.01]
    assert {value.dtype for value in loaded["model"].values()} <= {torch.bfloat16, torch.int64}
    assert not any(report.warnings for report in reports)


def save_stages(path, exclude, dtype):
    rank = dist.get_rank()
    state = {"model": {f"stage{rank}": {"w": torch.full((1000,), 1e9 if rank else 1.0), "f": print}}, "step": 1}
    return distributed.save(
        state, path, ranks=distributed.Ranks(timeout=60), exclude=["model.stage?.f", *exclude], dtype=dtype
    )


def test_each_rank_tells_what_its_casts_lose_and_may_lack_what_a_pattern_names(forge, tmp_path):
    with forge.group(2) as group:
        one, other = group.run(save_stages, tmp_path / "c", ["step"], {"model.stage1": "float16", "*": "bfloat16"})
    assert not one.warnings
    assert "'model.stage1.w'" in other.warnings[0]
    loaded = fastckpt.load(tmp_path / "c")["model"]
    assert (loaded["stage0"]["w"].dtype, loaded["stage1"]["w"].dtype) == (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("exclude", "dtype", "words"),
    [
        (["stepp"], None, "exclude: 'stepp' matches nothing on any rank"),
        ([], {"stage0": "float16", "model.stage0": "float16"}, "dtype: 'stage0' matches nothing on any rank"),
    ],
)
def test_a_pattern_that_matches_nothing_on_any_rank(forge, tmp_path, exclude, dtype, words):
    with forge.group(2) as group:
        group.start(save_stages, tmp_path / "c", exclude, dtype)
        outcomes = group.outcomes()
    assert all(each.kind == "raised" and words in each.raised.text for each in outcomes), outcomes
    assert not list(tmp_path.iterdir())
