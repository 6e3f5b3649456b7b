"""All ranks together write the same files as one process, however the state is spread."""

import errno
import hashlib
import json
import os

import pytest

import fastckpt
from fastckpt import distributed
from harness import needs, parallel, points
from harness.groups import FailedError, Strike, told_of
from harness.machines import wait_until
from harness.parallel import dist, torch

SPREAD = [
    *[("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4)],
    *[("tp_fsdp", 4), ("ddp", 4), ("ddp", 2)],
]
IDS = [f"{topology}{size}" for topology, size in SPREAD]


def shards(path):
    """The SHA-256 of each shard, and the structure from the manifest."""
    files = path.rglob("*.safetensors")
    found = {str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
    manifest = json.loads((path / "fastckpt.json").read_text(encoding="utf-8"))
    return found, manifest["body"]["structure"] if "body" in manifest else manifest["structure"]


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def save_alone(path, tied):
    fastckpt.save(parallel.state("single", tied=tied), path)


@pytest.fixture(scope="module")
def reference(forge, tmp_path_factory):
    """The checkpoints that one process writes, with tied weights and without."""
    folder = tmp_path_factory.mktemp("reference")
    with forge.group(1, backend="") as group:
        for tied in (True, False):
            group.run(save_alone, folder / str(tied), tied)
    return {tied: shards(folder / str(tied)) for tied in (True, False)}


def save(topology, path, how):
    state = parallel.state(topology)
    if how == "async":
        pending = distributed.save_async(state, path)
        _spoil(state)
        return pending.result()
    return distributed.save(state, path)


def _spoil(state):
    """Change all tensors, as the next training step does."""
    for part in (state["model"], *state["optimizer"]["state"].values()):
        for value in part.values():
            getattr(value, "_local_tensor", value).detach().fill_(7)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(("topology", "size"), SPREAD, ids=IDS)
def test_the_bytes_do_not_depend_on_how_the_state_is_spread(lasting, tmp_path, reference, topology, size, how):
    with lasting(size) as group:
        reports = group.run(save, topology, tmp_path / "c", how)
    files, structure = shards(tmp_path / "c")
    assert files == reference[True][0]
    # DistributedDataParallel leaves its prefix in the attributes of the model's state.
    assert structure == reference[True][1] or topology == "ddp"
    assert fastckpt.verify(tmp_path / "c").ok
    totals = {report.bytes_total for report in reports}
    assert totals == {sum(report.bytes for report in reports)}
    assert [(report.rank, report.ranks) for report in reports] == [(rank, size) for rank in range(size)]
    assert sum(report.bytes_sent for report in reports) == sum(report.bytes_received for report in reports)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_stages_of_a_pipeline_write_what_one_process_writes(forge, tmp_path, reference, how):
    with forge.group(2) as group:
        group.run(save, "pipeline", tmp_path / "c", how)
    files, _ = shards(tmp_path / "c")
    assert files == reference[False][0]


def save_small(path, **options):
    state = {"weight": torch.arange(100_000.0), "rank": "all"}
    return distributed.save(state, path, **options)


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_one_process_alone_writes_the_files_of_save(forge, tmp_path, backend):
    state = {"weight": torch.arange(100_000.0), "rank": "all"}
    fastckpt.save(state, tmp_path / "one")
    with forge.group(1, backend=backend) as group:
        (report,) = group.run(save_small, tmp_path / "c")
    assert shards(tmp_path / "c") == shards(tmp_path / "one")
    assert (report.rank, report.ranks, report.bytes, report.bytes_total) == (0, 1, 400_000, 400_000)


def test_without_torch_imported_a_process_works_alone(tmp_path):
    """This process has imported torch, but has no process group, which is what counts."""
    report = distributed.save({"step": 3, "name": "alone"}, tmp_path / "c", metadata={"step": 3})
    assert report.ranks == 1
    assert fastckpt.load(tmp_path / "c") == {"step": 3, "name": "alone"}
    assert fastckpt.open(tmp_path / "c").metadata == {"step": 3}


def save_in_half(path):
    """Save in two groups: ranks 2 and 3, and ranks 0 and 1."""
    halves = [dist.new_group([2, 3]), dist.new_group([0, 1])]
    mine = halves[dist.get_rank() < 2]
    report = distributed.save({"w": torch.full((5000,), 3.0)}, f"{path}-{dist.get_rank() // 2}", ranks=mine)
    return report.rank, report.ranks


def test_a_group_of_some_ranks_saves_by_itself(forge, tmp_path):
    with forge.group(4) as group:
        assert group.run(save_in_half, tmp_path / "c") == [(0, 2), (1, 2), (0, 2), (1, 2)]
    for half in (0, 1):
        assert fastckpt.load(f"{tmp_path}/c-{half}")["w"].tolist() == [3.0] * 5000


def save_as_outsider(path):
    group = dist.new_group([0, 1])
    return distributed.save({"w": torch.ones(3)}, path, ranks=group)


def test_who_is_not_in_the_group_is_told_so(forge, tmp_path):
    with forge.group(3) as group:
        group.start(save_as_outsider, tmp_path / "c")
        outcomes = group.outcomes()
    assert [each.kind for each in outcomes] == ["returned", "returned", "raised"]
    assert "not in the process group of ranks=" in outcomes[2].raised.text
    assert fastckpt.load(tmp_path / "c")["w"].tolist() == [1.0] * 3


def save_many(path, count):
    reports = [distributed.save({"w": torch.full((50_000,), float(step)), "step": step}, path) for step in range(count)]
    return len({report.bytes_total for report in reports})


def test_one_save_after_the_other(forge, tmp_path):
    with forge.group(3) as group:
        assert group.run(save_many, tmp_path / "c", 5) == [1, 1, 1]
    assert fastckpt.load(tmp_path / "c")["step"] == 4


def save_different(path, what):
    rank = dist.get_rank()
    state = {"w": torch.ones(10), "step": 1}
    options = {}
    if what == "value":
        state["step"] = rank
    elif what == "option":
        options["files"] = fastckpt.Files(shard_size=1000 + rank)
    elif what == "step":
        options["metadata"] = [{"step": 7}, None, {"step": 8}][rank]
    elif what == "environment":
        os.environ["FASTCKPT_BLOCK_SIZE"] = str(4096 << rank)
    elif what == "path":
        path = f"{path}-{rank}"
    distributed.save(state, path, ranks=distributed.Ranks(timeout=30), **options)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("value", "step"),
        ("option", "shard_size="),
        ("step", "metadata['step'] differs between ranks: 7 on rank 0, 8 on rank 2"),
        (
            "environment",
            "ranks 0 and 1 would lay out its files differently: give the same Files(shard_size=), the same FASTCKPT_",
        ),
        ("path", "all ranks must make the same calls"),
    ],
)
def test_what_must_be_equal_and_is_not_is_named(forge, tmp_path, what, words):
    fastckpt.save({"old": 1}, tmp_path / "c")
    with forge.group(3 if what == "step" else 2) as group:
        group.start(save_different, tmp_path / "c", what)
        outcomes = group.outcomes()
    assert all(each.kind == "raised" and words in each.raised.text for each in outcomes), outcomes
    assert names(tmp_path) == ["c"]
    assert fastckpt.load(tmp_path / "c") == {"old": 1}


def save_with_own(path, how):
    rank = dist.get_rank()
    files = {"a.txt": f"of {rank}"} if rank < 2 else None
    metadata = {"step": 7, "seconds": 0.1 * rank, f"only {rank}": rank} if rank < 2 else None
    # Stages of a pipeline have separate tables, which are united.
    state = {"w": torch.ones(10), **({f"stage {rank}": torch.ones(10)} if how == "stages" else {})}
    distributed.save(state, path, files=files, metadata=metadata)


@pytest.mark.parametrize("how", ["equal", "stages"])
def test_files_and_metadata_are_those_of_the_first_rank(forge, tmp_path, how):
    with forge.group(3) as group:
        group.run(save_with_own, tmp_path / "c", how)
    assert (tmp_path / "c" / "a.txt").read_text() == "of 0"
    assert fastckpt.open(tmp_path / "c").metadata == {"step": 7, "seconds": 0.0, "only 0": 0}
    assert names(tmp_path) == ["c"]


#: Arguments that a call refuses, with a bad value and the error.
BAD = {"io": ("fast", "ValueError"), "files": ({"a/b": "text"}, "ValueError"), "shard_size": ("many", "TypeError")}


def save_bad(path, argument):
    options = {argument: BAD[argument][0]}
    try:
        distributed.save({"w": torch.ones(10)}, path, **(options if dist.get_rank() == 1 else {}))
    finally:
        # The failed call has taken its turn, so the next call works.
        distributed.save({"w": torch.ones(10)}, f"{path}-next")


@pytest.mark.parametrize("argument", BAD)
def test_a_bad_argument_of_one_rank_fails_all_and_the_next_call_works(forge, tmp_path, argument):
    with forge.group(2) as group:
        group.start(save_bad, tmp_path / "c", argument)
        mine, bad = group.outcomes()
    assert bad.raised.kind == BAD[argument][1]
    assert argument in bad.raised.text
    assert mine.raised.kind == "RanksError"
    assert mine.raised.failures[0][0] == 1
    assert argument in mine.raised.text
    assert names(tmp_path) == ["c-next"]


def save_dtensor(path, timeout):
    """Save one tensor to each file, so that each rank allocates files."""
    state = parallel.state("tp", scale=4)
    distributed.save(state, path, files=fastckpt.Files(shard_size=1), ranks=distributed.Ranks(timeout=timeout))


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("where", "struck"), [(points.CREATE, 0), (points.ALLOCATE, 1), (points.JOIN, 0), (points.JOIN, 1)]
)
def test_an_error_of_one_rank_reaches_all_ranks(forge, tmp_path, where, struck):
    fastckpt.save({"old": 1}, tmp_path / "c")
    with forge.group(4) as group:
        group.start(save_dtensor, tmp_path / "c", 30, strike=Strike(struck, where, signal=FULL))
        told_of(group.outcomes(), struck, FULL.errno)
        assert fastckpt.load(tmp_path / "c") == {"old": 1}
        group.run(save_dtensor, tmp_path / "c", 30)
    assert fastckpt.verify(tmp_path / "c").ok
    assert names(tmp_path) == ["c"]


def save_into_nothing(path):
    """Rank 0 fails after another rank has joined, which allocates its files only when the directory is gone."""

    def allocate_late(allocate):
        def instead(*args):
            (path.parent / "joined").touch()
            wait_until(lambda: names(path.parent) == ["c", "joined"], 25)
            return allocate(*args)

        return instead

    def fail(meet):
        def instead(*args, **kwargs):
            if not dist.get_rank() and args[1] == "joined":
                wait_until((path.parent / "joined").exists, 25)
                raise FULL
            return meet(*args, **kwargs)

        return instead

    with points.replaced(points.ALLOCATE, allocate_late), points.replaced(f"{points.PEERS}:Operation.round", fail):
        save_dtensor(path, 30)


def test_a_rank_that_finds_the_directory_gone_is_no_cause(forge, tmp_path):
    fastckpt.save({"old": 1}, tmp_path / "c")
    with forge.group(2) as group:
        group.start(save_into_nothing, tmp_path / "c")
        told_of(group.outcomes(), 0, FULL.errno)
    assert fastckpt.load(tmp_path / "c") == {"old": 1}
    assert names(tmp_path) == ["c", "joined"]


def test_a_rank_that_is_killed_while_bytes_travel_is_named(forge, tmp_path):
    strike = Strike(2, points.JOIN)
    fastckpt.save({"old": 1}, tmp_path / "c")
    with forge.group(4) as group:
        group.start(save_dtensor, tmp_path / "c", 3.0, strike=strike)
        outcomes = group.outcomes()
    survivors = [each for each in outcomes if each.rank != 2]
    assert outcomes[2].kind == "died"
    assert all(each.raised.kind == "RanksError" for each in survivors), outcomes
    assert all("rank 2" in each.raised.text for each in survivors), outcomes
    assert fastckpt.load(tmp_path / "c") == {"old": 1}


def save_llama(path):
    import transformers
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=71
    )
    model = transformers.LlamaForCausalLM(config)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    distributed.save({"model": model.state_dict()}, path, files={"config.json": config.to_json_string()})
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_transformers_opens_the_directory_as_it_lies(forge, tmp_path):
    transformers = needs.package("transformers")
    with forge.group(3) as group:
        expected = group.run(save_llama, tmp_path / "c", timeout=120)[0]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c").state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def test_an_error_of_a_run_is_one_of_all_ranks(forge, tmp_path):
    with forge.group(2) as group, pytest.raises(FailedError, match="differs between ranks"):
        group.run(save_different, tmp_path / "c", "option")
