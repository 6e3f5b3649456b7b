"""Loads by ranks from checkpoints of any origin, and how often the ranks read a checkpoint."""

import signal

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastckpt
from fastckpt import distributed
from harness import parallel, points, stillness
from harness.draws import some
from harness.groups import Strike
from harness.parallel import dist, torch
from harness.reports import with_report

# Each way to spread the state, with the number of ranks. A pipeline cannot tie its weights.
WAYS = [
    *[("single", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4)],
    *[("tp_fsdp", 4), ("ddp", 4), ("pipeline", 2)],
]
WRITTEN = [*[(*way, way[0] != "pipeline") for way in WAYS], ("fsdp", 3, False), ("tp", 2, False)]


def name_of(way):
    return "".join(map(str, way[:2]))


def save(topology, path, tied):
    state = parallel.state(topology, tied=tied)
    (distributed.save if dist.is_initialized() else fastckpt.save)(state, path)


@pytest.fixture(scope="module")
def written(lasting, tmp_path_factory):
    """A checkpoint written in each way: the paths by whether weights are tied."""
    folder = tmp_path_factory.mktemp("written")
    found = {True: [], False: []}
    for topology, size, tied in WRITTEN:
        path = folder / f"{topology}{size}-{tied}"
        with lasting(size) as group:
            group.run(save, topology, path, tied)
        found[tied].append(path)
    return found


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def differences(found, expected, at="state"):
    """The differences between two states of this rank, bit for bit."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{at}: keys"]
        return [text for key in expected for text in differences(found[key], expected[key], f"{at}.{key}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{at}: length"]
        pairs = zip(found, expected, strict=True)
        return [text for index, pair in enumerate(pairs) for text in differences(*pair, f"{at}.{index}")]
    if isinstance(expected, torch.Tensor):
        if type(found) is not type(expected) or found.dtype != expected.dtype or found.shape != expected.shape:
            return [f"{at}: kind"]
        mine, theirs = local(found), local(expected)
        same = mine.shape == theirs.shape and bool((mine == theirs).all())
        return [] if same else [at]
    return [] if found == expected else [f"{at}: {found!r}"]


def untangled(state):
    """A state whose optimizer lists only this stage's parameters, in order: a pipeline saves those of all stages."""
    for group in state["optimizer"]["param_groups"]:
        group["params"] = sorted(name for name in group["params"] if name in state["optimizer"]["state"])
    return state


def spoiled(state):
    """Fill the tensors of a state with values that no checkpoint has; return them in new dicts and lists."""
    if isinstance(state, dict):
        return {key: spoiled(value) for key, value in state.items()}
    if isinstance(state, list):
        return [spoiled(value) for value in state]
    if isinstance(state, torch.Tensor):
        local(state).detach().fill_(113)
    return state


def load_all(topology, paths, tied, io):
    """Load each checkpoint into a state with other values; return the differences from the state of one process."""
    expected = untangled(parallel.state(topology, tied=tied))
    others = parallel.state(topology, trained=False, tied=tied)
    found = []
    for path in paths:
        state = spoiled(others)
        again = distributed.load(path, into=state, io=io)
        if not all(again["model"][key] is value for key, value in state["model"].items()):
            found.append(f"{path}: the load replaced tensors")
        found += [f"{path}: {text}" for text in differences(untangled(again), expected)]
    return found


@pytest.mark.parametrize(
    ("topology", "size", "io"),
    [(*way, "threads") for way in WAYS] + [(*way, "buffered") for way in some(WAYS) if way[1] == 4],
    ids=str,
)
def test_each_way_loads_what_each_other_has_written(lasting, written, topology, size, io):
    with lasting(size) as group:
        for tied, paths in written.items():
            if tied and topology == "pipeline":
                continue
            assert group.run(load_all, topology, paths, tied, io, timeout=120) == [[]] * size


def load_plain(paths, tied):
    expected = untangled(parallel.state("single", tied=tied))
    return [text for path in paths for text in differences(untangled(fastckpt.load(path)), expected)]


def test_one_process_loads_what_each_way_has_written(lasting, written):
    with lasting(1) as group:
        for tied, paths in written.items():
            assert group.run(load_plain, paths, tied) == [[]]


def load_whole(path, io):
    state, report = with_report(distributed.load, path, io=io)
    return differences(state, parallel.state("single")), report


@pytest.mark.parametrize("io", ["auto", "buffered", "threads"])
def test_without_into_every_rank_has_the_whole_state_in_plain_tensors(forge, written, io):
    with forge.group(3) as group:
        for rank, (wrong, report) in enumerate(group.run(load_whole, written[True][3], io)):
            assert wrong == []
            assert (report.rank, report.ranks) == (rank, 3)


LARGE = 12 << 20


def save_large(path):
    fastckpt.save({"w": torch.arange(LARGE, dtype=torch.float32).reshape(1024, -1), "b": torch.ones(5)}, path)


def load_large(path, how, io):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = (1024, LARGE // 1024)
    placements = {"replicas": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}[how]
    whole = torch.arange(LARGE, dtype=torch.float32).reshape(shape)
    into = {"w": parallel.distributed(torch.zeros(shape), mesh, placements), "b": torch.zeros(5)}
    state, report = with_report(distributed.load, path, into=into, io=io)
    expected = parallel.distributed(whole, mesh, placements)
    assert torch.equal(state["w"].to_local(), expected.to_local())
    assert state["w"] is into["w"]
    return report


@pytest.mark.parametrize("how", ["replicas", "rows", "columns"])
def test_ranks_that_exchange_read_the_storage_once(forge, tmp_path, how):
    save_large(tmp_path / "c")
    with forge.group(4) as group:
        reports = group.run(load_large, tmp_path / "c", how, "threads")
    total = LARGE * 4 + 20
    storage, peers, sent = (
        sum(getattr(report, name) for report in reports) for name in ("bytes_storage", "bytes_peers", "bytes_sent")
    )
    assert total <= storage <= 1.05 * total
    assert peers == sent
    assert peers >= {"replicas": 3 * total, "columns": total // 2, "rows": 20}[how]
    assert "from storage" in str(reports[0])
    # The ranks share the reading.
    assert max(report.bytes_storage for report in reports) < total / 2


@pytest.mark.parametrize("how", ["replicas", "rows", "columns"])
def test_ranks_of_one_host_read_through_its_page_cache(forge, tmp_path, how):
    save_large(tmp_path / "c")
    with forge.group(4) as group:
        reports = group.run(load_large, tmp_path / "c", how, "buffered")
    assert {report.engine for report in reports} == {"buffered"}
    assert sum(report.bytes_peers for report in reports) == 0
    # The kernel counts all reads of a process, even those of code that it had evicted.
    assert sum(report.bytes_storage for report in reports) <= 1.5 * (LARGE * 4 + 20)


def load_damaged(path, engine, only):
    return load_large(path, "columns", fastckpt.IO(engine, verify=only in (None, dist.get_rank())))


#: Rank 0 reads the damaged block for all.
@pytest.mark.parametrize(("io", "only"), [("threads", None), ("buffered", None), ("threads", 2)])
def test_damage_is_found_and_told_to_all(forge, tmp_path, io, only):
    save_large(tmp_path / "c")
    shard = next((tmp_path / "c").glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"damage")
    with forge.group(3) as group:
        group.start(load_damaged, tmp_path / "c", io, only)
        outcomes = group.outcomes()
    kinds = [each.raised.kind for each in outcomes]
    assert "CorruptCheckpointError" in kinds
    assert set(kinds) <= {"CorruptCheckpointError", "RanksError"}
    assert all("checksum" in each.raised.text or "damaged" in each.raised.text for each in outcomes), outcomes


def load_parts(path, names, strict=(True, True)):
    into = {name: torch.zeros(4) for name in names[dist.get_rank()]}
    state, report = with_report(distributed.load, path, into=into, strict=strict[dist.get_rank()])
    return {name: value.tolist() for name, value in state.items()}, report.unexpected


@pytest.mark.parametrize("io", ["auto"])
def test_ranks_want_different_tensors(forge, tmp_path, io):
    fastckpt.save({name: torch.full((4,), float(number)) for number, name in enumerate("abc")}, tmp_path / "c")
    with forge.group(2) as group:
        found = group.run(load_parts, tmp_path / "c", ["ab", "bc"])
        assert found[0] == ({"a": [0.0] * 4, "b": [1.0] * 4}, ())
        assert found[1] == ({"b": [1.0] * 4, "c": [2.0] * 4}, ())
        for strict in ((True, True), (False, True)):
            group.start(load_parts, tmp_path / "c", ["a", "b"], strict)
            told = [each.raised for each in group.outcomes()]
            assert "no rank has a destination" in told[0].text
            assert all("c" in each.text for each in told)
            assert told[1].text.endswith(": nothing was loaded")
        found = group.run(load_parts, tmp_path / "c", ["a", "b"], (False, False))
        assert [unexpected for _, unexpected in found] == [("c",), ("c",)]
        group.start(load_parts, tmp_path / "c", ["abc", "bcd"])
        told = [each.raised.kind for each in group.outcomes()]
        assert told == ["RanksError", "StructureMismatchError"]


def load_values(path):
    rank = dist.get_rank()
    into = {"w": torch.zeros(4), "step": 0, "groups": [{"lr": 0.0}], f"own{rank}": torch.zeros(1)}
    groups, group = into["groups"], into["groups"][0]
    assert distributed.load(path, into=into) is into
    assert into["groups"] is groups
    assert groups[0] is group
    other = {**into, "more": 1, "w": torch.zeros(4)}
    with pytest.raises(fastckpt.StructureMismatchError, match=r"\['more'\]: not in the checkpoint"):
        distributed.load(path, into=other)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in into.items()}


def test_values_of_into_are_updated_in_place_on_every_rank(forge, tmp_path):
    own = {f"own{rank}": torch.full((1,), float(rank)) for rank in range(2)}
    fastckpt.save({"w": torch.ones(4), "step": 7, "groups": [{"lr": 0.5}], **own}, tmp_path / "c")
    with forge.group(2) as group:
        for rank, found in enumerate(group.run(load_values, tmp_path / "c")):
            assert found == {"w": [1.0] * 4, "step": 7, "groups": [{"lr": 0.5}], f"own{rank}": [float(rank)]}


def load_rows(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {"m": torch.arange(235_611).to(torch.bfloat16), "z": torch.empty(0, 4), "a": torch.empty(3, 0)}
    placed = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for name, tensor in full.items()}
    distributed.load(path, into=placed)
    mine = {name: distribute_tensor(tensor, mesh, [Shard(0)]).to_local() for name, tensor in full.items()}
    return [name for name, tensor in placed.items() if not torch.equal(tensor.to_local(), mine[name])]


def test_an_empty_tensor_that_begins_where_another_does_hinders_nobody(forge, tmp_path):
    state = {"m": torch.arange(235_611).to(torch.bfloat16), "z": torch.empty(0, 4), "a": torch.empty(3, 0)}
    fastckpt.save(state, tmp_path / "c")
    for ranks in (2, 3, 4):
        with forge.group(ranks) as group:
            assert group.run(load_rows, tmp_path / "c") == [[]] * ranks


def load_nothing(path):
    distributed.load(path)


def test_where_there_is_nothing_all_are_told(forge, tmp_path):
    with forge.group(2) as group:
        group.start(load_nothing, tmp_path / "none")
        told = [each.raised for each in group.outcomes()]
    assert told[0].kind == "FileNotFoundError"
    assert told[1].kind == "RanksError"
    assert "none" in told[1].text
    assert told[1].text.endswith(": nothing was loaded")


def load_objects(path):
    model, optimizer = parallel.build("fsdp", trained=False)
    distributed.load(path, into={"model": model, "optimizer": optimizer})
    return differences(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}, *[expected_objects()]
    )


def expected_objects():
    model, optimizer = parallel.build("fsdp")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def save_objects(path):
    model, optimizer = parallel.build("fsdp")
    distributed.save({"model": model, "optimizer": optimizer}, path)


def test_modules_and_optimizers_are_filled(forge, tmp_path):
    with forge.group(3) as group:
        group.run(save_objects, tmp_path / "c")
    with forge.group(2) as group:
        assert group.run(load_objects, tmp_path / "c") == [[], []]


def save_own(path, *, who):
    rank = dist.get_rank()
    own = {"seed": torch.full((3,), rank), "position": rank * 10} if rank in who else None
    distributed.save({"w": torch.ones(100)}, path, per_rank=own)


def load_own(path, rank=None):
    found = distributed.load_per_rank(path, rank=rank)
    return None if found is None else (found["seed"].tolist(), found["position"])


def test_each_rank_gets_its_own_state_back(forge, tmp_path):
    with forge.group(3) as group:
        group.run(save_own, tmp_path / "c", who=[0, 2])
        assert group.run(load_own, tmp_path / "c") == [([0] * 3, 0), None, ([2] * 3, 20)]
        group.run(save_own, tmp_path / "none", who=[])
        group.start(load_own, tmp_path / "none")
        assert [each.raised.kind for each in group.outcomes()] == ["KeyError"] * 3
    with fastckpt.open(tmp_path / "c") as opened:
        assert opened.ranks == 3
    with fastckpt.open(tmp_path / "none") as opened:
        assert opened.ranks == 0
    with pytest.raises(ValueError, match=r"3 ranks saved .* 1 now: choose one with rank=0 to rank=2"):
        distributed.load_per_rank(tmp_path / "c")
    assert distributed.load_per_rank(tmp_path / "c", rank=2)["position"] == 20
    with pytest.raises(ValueError, match="from 0 to 2, not 3"):
        distributed.load_per_rank(tmp_path / "c", rank=3)
    # The state itself lacks the values of single ranks.
    assert fastckpt.load(tmp_path / "c").keys() == {"w"}


def load_and_tell(path):
    try:
        distributed.load(path, ranks=distributed.Ranks(timeout=2.0), io="threads")
    except fastckpt.exceptions.RanksError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_stopped_while_the_manifest_is_passed_on_is_named_in_time(forge, tmp_path, rank):
    """Outside rounds, a rank that waits for the manifest must notice a silent rank, and must not be silent itself."""
    fastckpt.save({"w": torch.ones(100)}, tmp_path / "c")
    strike = Strike(rank, points.BROADCAST, signal.SIGSTOP)
    with forge.group(3) as group, stillness.watched() as still:
        group.start(load_and_tell, tmp_path / "c", strike=strike)
        outcomes = group.outcomes(60)
    assert group.struck is not None
    for each in outcomes:
        if each.rank == rank:
            assert each.kind == "stopped"
        else:
            assert f"rank {rank}" in each.value
            assert f"rank {2 - rank}" not in each.value
            assert each.ended - group.struck < 2.0 + 5.0 + still.since(group.struck)
