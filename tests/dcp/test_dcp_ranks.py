"""dcp.save and dcp.load on real groups: the files equal those of one process, and any group can load them."""

import dataclasses
import hashlib
import inspect
from unittest import mock

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastckpt
from fastckpt.dcp import Reader, Writer
from fastckpt.distributed import Ranks
from harness import needs, parallel, points
from harness.boxes import cut
from harness.groups import FailedError, Strike
from harness.internals import AgreedByRanks, process_group
from harness.options import grouped
from harness.parallel import dist, torch

TOPOLOGIES = [("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("tp_fsdp", 4), ("ddp", 2)]
IDS = [f"{topology}{size}" for topology, size in TOPOLOGIES]


def shards(path):
    """The SHA-256 of each shard, and the tensor names in the order of the state."""
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.rglob("*.safetensors*")}
    return found, list(fastckpt.open(path))


def save_alone(path):
    fastckpt.save(parallel.state("single"), path)


@pytest.fixture(scope="module")
def reference(forge, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "c"
    with forge.group(1, backend="") as group:
        group.run(save_alone, path)
    return path


def save(topology, path, how="sync", timeout=60):
    state = parallel.state(topology)
    writer = Writer(ranks=Ranks(timeout=timeout))
    if how == "sync":
        dcp.save(state, checkpoint_id=path, storage_writer=writer)
    else:
        future = dcp.async_save(state, checkpoint_id=path, storage_writer=writer)
        for part in (state["model"], *state["optimizer"]["state"].values()):
            for value in part.values():
                getattr(value, "_local_tensor", value).detach().fill_(7)
        future.result()
    return writer.report.bytes, writer.report.bytes_total


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(("topology", "size"), TOPOLOGIES, ids=IDS)
def test_the_bytes_are_those_of_one_process(lasting, tmp_path, reference, topology, size, how):
    with lasting(size) as group:
        reports = group.run(save, topology, tmp_path / "c", how)
    assert shards(tmp_path / "c") == shards(reference)
    assert sum(own for own, _ in reports) == reports[0][1]
    assert fastckpt.verify(tmp_path / "c").ok


def load(topology, path, io="auto"):
    """Load into a model and an optimizer of other values; return what differs from the trained state."""
    model, optimizer = parallel.build(topology, trained=False)
    state = parallel.state_of(model, optimizer)
    state["step"], state["lr"] = -1, None
    reader = Reader(path, ranks=Ranks(timeout=60), io=io)
    dcp.load(state, storage_reader=reader)
    report.append(reader.report)
    assert (state["step"], state["lr"]) == (2, [0.01, None])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    again, wanted = parallel.state_of(model, optimizer), parallel.state(topology)
    return [
        key
        for part in ("model", "optimizer")
        for key, value in _flat(again[part]).items()
        if not _equal(value, _flat(wanted[part])[key])
    ]


# The reports of this rank's loads.
report = []


def load_by_messages(topology, path):
    different = load(topology, path, io="threads")
    return different, report[-1].bytes, report[-1].bytes_storage, report[-1].bytes_peers


@pytest.mark.parametrize(("topology", "size"), [("fsdp", 2), ("tp", 2), ("hsdp", 4), ("ddp", 3)], ids=str)
def test_ranks_pass_on_what_they_read(lasting, reference, topology, size):
    with lasting(size) as group:
        done = group.run(load_by_messages, topology, reference)
    assert [different for different, *_ in done] == [[]] * size
    stored = sum(fastckpt.open(reference).info(name).bytes for name in fastckpt.open(reference))
    read = sum(storage for *_, storage, _ in done)
    # Apart from headers, each byte is read once, even of the tied tensor, which is loaded under both names.
    assert read <= 1.05 * stored
    if topology == "ddp":
        assert sum(peers for *_, peers in done) >= (size - 1) * stored * 0.9


def load_checked(path, only):
    io = fastckpt.IO("threads", verify=dist.get_rank() == only)
    dcp.load({"w": torch.zeros(1000)}, storage_reader=Reader(path, ranks=Ranks(timeout=60), io=io))


def test_what_a_rank_reads_is_compared_for_another_one(lasting, tmp_path):
    fastckpt.save({"w": torch.ones(1000)}, tmp_path / "c")
    with (tmp_path / "c" / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"bad!")
    # Rank 0 reads for both ranks, and only rank 1 requests verification.
    with lasting(2) as group, pytest.raises(FailedError, match="checksum"):
        group.run(load_checked, tmp_path / "c", 1)


def _flat(state):
    flat, _ = dcp._nested_dict.flatten_state_dict(state)
    return flat


def _equal(value, wanted):
    if isinstance(value, torch.Tensor):
        value, wanted = getattr(value, "_local_tensor", value), getattr(wanted, "_local_tensor", wanted)
        return torch.equal(value, wanted)
    return value == wanted


@pytest.mark.parametrize(("topology", "size"), TOPOLOGIES, ids=IDS)
def test_any_group_loads_what_one_process_saved(lasting, reference, topology, size):
    with lasting(size) as group:
        assert group.run(load, topology, reference) == [[]] * size


def save_plain_optimizer(path, *, same, trained=True, apart=False):
    """Save a plain ``optimizer.state_dict()``, in which numbers identify parameters.

    Args:
        path: the target path.
        same: whether the ranks have equal modules.
        trained: whether rank 0's optimizer has made a step.
        apart: whether each rank saves under its own key.
    """
    size = 3 if same else 3 + dist.get_rank()
    module = torch.nn.Linear(size, 2)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.ones_(module.bias)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, size)).sum().backward()
    if trained or dist.get_rank():
        optimizer.step()
    key = f"optim{dist.get_rank()}" if apart else "optim"
    dcp.save({key: optimizer.state_dict()}, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)))
    return optimizer.state_dict()


def test_numbers_of_parameters_stay_numbers(forge, tmp_path):
    with forge.group(2) as group:
        wanted = group.run(save_plain_optimizer, tmp_path / "c", same=True)[0]
    loaded = fastckpt.load(tmp_path / "c")["optim"]
    assert list(loaded["state"]) == [0, 1]
    assert loaded["param_groups"] == wanted["param_groups"]
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.load_state_dict(loaded)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], wanted["state"][0]["exp_avg"])


@pytest.mark.parametrize("trained", [True, False])
def test_numbers_of_different_parameters_are_refused(forge, tmp_path, trained):
    with forge.group(2) as group:
        group.start(save_plain_optimizer, tmp_path / "c", same=False, trained=trained)
        outcomes = group.outcomes()
    for each in outcomes:
        assert each.raised.kind.endswith("CheckpointException")
        assert "get_optimizer_state_dict" in each.raised.text
    assert not (tmp_path / "c").exists()


def test_numbers_may_stand_for_other_parameters_under_other_keys(forge, tmp_path):
    with forge.group(3) as group:
        wanted = group.run(save_plain_optimizer, tmp_path / "c", same=False, apart=True)
    loaded = fastckpt.load(tmp_path / "c")
    for rank in range(3):
        found = loaded[f"optim{rank}"]
        assert found["param_groups"] == wanted[rank]["param_groups"]
        assert all(
            torch.equal(found["state"][number]["exp_avg"], wanted[rank]["state"][number]["exp_avg"])
            for number in range(2)
        )


def save_stages(path):
    """Save different keys on each rank, and one key on all ranks."""
    rank = dist.get_rank()
    state = {f"stage{rank}": {"w": torch.full((5,), float(rank))}, "shared": torch.ones(2), "step": 7}
    dcp.save(state, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)))


def test_ranks_may_have_different_keys(forge, tmp_path):
    with forge.group(3) as group:
        group.run(save_stages, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert [loaded[f"stage{rank}"]["w"][0].item() for rank in range(3)] == [0.0, 1.0, 2.0]
    assert loaded["step"] == 7


def save_two_kinds(path, *, kinds):
    dcp.save({"a": kinds[dist.get_rank()]}, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((5, {"b": 6}), "['a']: 'a value' on rank 0, a dict of 1 on rank 1"),
        (({"b": 6}, torch.ones(3)), "['a']: a dict of 1 on rank 0, a tensor of F32 [3] on rank 1"),
        (([{"b": 6}], {"0": {"b": 6}}), "'a' is an entry on one rank, and leads to others on another, or is a list"),
    ],
    ids=["value", "tensor", "list"],
)
def test_entries_of_two_kinds_are_refused(forge, tmp_path, kinds, message):
    with forge.group(2) as group:
        group.start(save_two_kinds, tmp_path / "c", kinds=kinds)
        outcomes = group.outcomes()
    assert all(message in each.raised.text for each in outcomes)
    assert list(tmp_path.iterdir()) == []


def save_values(path):
    """Save values that differ between ranks, with tensors of several pages in them, among equal tensors."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "first": torch.ones(3),
        "random": (torch.full((5000,), float(rank)), {"numpy": np.full(3000, rank), "position": rank}),
        "model": {"weight": distribute_tensor(torch.arange(40.0), mesh, [Shard(0)]), "array": np.full((2, 2), rank)},
        "list": [{"of": rank}, torch.ones(2)][: 1 + rank],
        f"stage{rank}": {"array": np.full(4, rank), "value": rank},
    }
    dcp.save(state, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60, on_difference="warn")))


def test_a_value_is_that_of_one_rank_whole(forge, tmp_path):
    with forge.group(3) as group:
        group.run(save_values, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    tensor, more = loaded["random"]
    assert {*tensor.tolist()} == {*more["numpy"].tolist()} == {more["position"]} == {0}
    assert {*loaded["model"]["array"].ravel().tolist()} == {0}
    assert torch.equal(loaded["model"]["weight"], torch.arange(40.0))
    assert [(stage["array"].tolist(), stage["value"]) for stage in (loaded[f"stage{rank}"] for rank in range(3))] == [
        ([rank] * 4, rank) for rank in range(3)
    ]
    assert [*loaded["list"][0]] == ["of"]
    assert torch.equal(loaded["list"][1], torch.ones(2))
    fastckpt.save(loaded, tmp_path / "alone")
    assert shards(tmp_path / "c") == shards(tmp_path / "alone")


class Cutting(DefaultSavePlanner):
    """A planner that gives the parts of tensors itself, so that no mesh is known."""

    def resolve_data(self, write_item):
        made = super().resolve_data(write_item)
        return made.detach().clone() if isinstance(made, torch.Tensor) else made


class Dropping(DefaultSavePlanner):
    """A planner that leaves the optimizer out of all plans."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        kept = [[item for item in plan.items if not item.index.fqn.startswith("optimizer")] for plan in plans]
        return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, kept, strict=True)], metadata


class DroppingAndCutting(Dropping, Cutting):
    """A planner that does both."""


def save_with_planner(topology, path, planner):
    dcp.save(
        parallel.state(topology), checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)), planner=planner()
    )


@pytest.mark.parametrize(("topology", "size"), [("fsdp", 3), ("hsdp", 4)], ids=str)
def test_parts_that_a_planner_cuts_by_itself_become_the_same_tensors(forge, tmp_path, reference, topology, size):
    with forge.group(size) as group:
        group.run(save_with_planner, topology, tmp_path / "c", Cutting)
    found, wanted = (fastckpt.load(path) for path in (tmp_path / "c", reference))
    assert all(_equal(value, _flat(wanted)[key]) for key, value in _flat(found).items())
    assert _flat(found).keys() == _flat(wanted).keys()


@pytest.mark.parametrize("cutting", [True, False])
def test_what_a_planner_leaves_out_of_all_plans_is_not_saved(forge, tmp_path, reference, cutting):
    planner = DroppingAndCutting if cutting else Dropping
    with forge.group(2) as group:
        group.run(save_with_planner, "fsdp", tmp_path / "c", planner)
    wanted = _flat(fastckpt.load(reference))
    found = _flat(fastckpt.load(tmp_path / "c"))
    assert found.keys() == {key for key in wanted if not key.startswith("optimizer")}
    assert all(_equal(value, wanted[key]) for key, value in found.items())


class LeavingToOne(DefaultSavePlanner):
    """A planner that leaves the bad value out of all plans, or of all plans but one rank's."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan([dataclasses.replace(plan, items=[]) for plan in all_plans])
        kept = [
            [item for item in plan.items if item.index.fqn != "bad" or rank == self.rank]
            for rank, plan in enumerate(all_plans)
        ]
        return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, kept, strict=True)], metadata


def save_left_out(path, *, chosen):
    """Save a key whose value cannot be stored on rank 0, but can be stored on rank 1."""
    state = {"w": torch.ones(3), "bad": dist.get_rank() or Unsaved()}
    planner = LeavingToOne(chosen)
    dcp.save(state, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)), planner=planner)


@pytest.mark.parametrize("chosen", [0, 1])
def test_what_cannot_be_stored_may_be_left_out_of_all_plans_alone(forge, tmp_path, chosen):
    with forge.group(2) as group:
        group.run(save_left_out, tmp_path / "c", chosen=None)
        group.start(save_left_out, tmp_path / "none", chosen=chosen)
        outcomes = group.outcomes()
    assert list(fastckpt.load(tmp_path / "c")) == ["w"]
    # The lowest rank's value is stored, whichever plan has the key.
    assert all("Unsaved is not supported" in each.raised.text for each in outcomes)
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def save_with(path, option, values):
    """Save with a different value of an option on each rank, and with different metadata, of which rank 0's count."""
    rank = dist.get_rank()
    writer = Writer(metadata={"step": rank}, **grouped({"timeout": 60, option: values[rank]}))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, storage_writer=writer)


@pytest.mark.parametrize(
    ("option", "values", "shown"),
    [
        ("shard_size", ["1MB", "2MB"], "1000000 on rank 0, 2000000 on rank 1"),
        ("replicas", ["sample", "first"], "'sample' on rank 0, 'first' on rank 1"),
        ("overwrite", [True, False], "True on rank 0, False on rank 1"),
    ],
)
def test_options_that_have_to_be_alike_are_told_by_name(forge, tmp_path, option, values, shown):
    with forge.group(2) as group:
        group.start(save_with, tmp_path / "c", option, values)
        outcomes = group.outcomes()
        group.run(save_with, tmp_path / "d", option, values[:1] * 2)
    for each in outcomes:
        assert f"{option}= differs between ranks: {shown}: give the same on all ranks" in each.raised.text
    assert [each.name for each in tmp_path.iterdir()] == ["d"]
    assert fastckpt.open(tmp_path / "d").metadata == {"step": 0}


def caches_plans():
    """Whether planners of this torch can cache their plans."""
    return "enable_plan_caching" in inspect.signature(DefaultSavePlanner).parameters


def cached(caching):
    """The arguments of a planner that caches its plans, or does not."""
    return {"enable_plan_caching": caching} if caches_plans() else {}


def save_often(path, *, caching):
    """Save three times with a new planner; the second state differs in values, the third one in a shape."""
    for turn, size in enumerate((4, 4, 6)):
        state = {"w": torch.full((size, 2), float(turn)), "turn": turn}
        planner = DefaultSavePlanner(**cached(caching))
        dcp.save(state, checkpoint_id=path / str(turn), storage_writer=Writer(ranks=Ranks(timeout=60)), planner=planner)


@pytest.mark.parametrize("caching", [True, False])
def test_plans_may_be_kept_for_later_saves(forge, tmp_path, caching):
    if caching:
        needs.of_torch(caches_plans(), "planners that keep their plans")
    with forge.group(2) as group:
        group.run(save_often, tmp_path, caching=caching)
    for turn, size in enumerate((4, 4, 6)):
        loaded = fastckpt.load(tmp_path / str(turn))
        assert loaded["turn"] == turn
        assert torch.equal(loaded["w"], torch.full((size, 2), float(turn)))


def save_by_itself(path):
    """Save on each rank to its own path, while the other rank waits."""
    own = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    copies = distribute_tensor(torch.arange(40.0), mesh, [Replicate()])
    state = {"w": torch.full((30, 4), float(own)), "copies": copies}
    for rank in range(dist.get_world_size()):
        for number, value in enumerate((state["w"], cut(state["w"], [7], [1, 3]))):
            if rank == own:
                writer = Writer(path / f"{rank}-{number}", ranks=Ranks(timeout=5))
                dcp.save({**state, "w": value}, storage_writer=writer, no_dist=True)
        dist.barrier()


def test_no_dist_saves_one_rank_alone(forge, tmp_path):
    needs.of_torch("no_dist" in inspect.signature(dcp.save).parameters, "dcp.save(no_dist=)")
    with forge.group(2) as group, pytest.warns(UserWarning, match="torch.distributed is"):
        group.run(save_by_itself, tmp_path)
    for rank in range(2):
        loaded = [fastckpt.load(tmp_path / f"{rank}-{number}") for number in range(2)]
        assert all(torch.equal(state["w"], torch.full((30, 4), float(rank))) for state in loaded)
        assert all(torch.equal(state["copies"], torch.arange(40.0)) for state in loaded)
        assert shards(tmp_path / f"{rank}-0") == shards(tmp_path / f"{rank}-1")


class Trusting(DefaultSavePlanner):
    """A planner that accepts all plans without checks."""

    def create_global_plan(self, all_plans):
        return all_plans, dcp.Metadata({})


def save_boxes(path, *, lacking):
    """Save a tensor in boxes, of which each rank has some, and no rank has box ``lacking``."""
    rank = dist.get_rank()
    boxes = cut(torch.arange(12.0).view(4, 3), [1, 3], [2], keep=lambda box: box % 2 == rank and box != lacking)
    dcp.save({"boxes": boxes}, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)), planner=Trusting())


def test_boxes_of_several_ranks_are_one_tensor_or_refused_where_one_is_lacking(forge, tmp_path):
    with forge.group(2) as group:
        group.run(save_boxes, tmp_path / "c", lacking=None)
        assert torch.equal(fastckpt.load(tmp_path / "c")["boxes"], torch.arange(12.0).view(4, 3))
        group.start(save_boxes, tmp_path / "none", lacking=3)
        outcomes = group.outcomes()
    assert all(
        r"'boxes' of the sizes [4, 3] is incomplete here (10 of 12 elem" in each.raised.text for each in outcomes
    )
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def save_one_memory_twice(path):
    """Save tensors that share memory on half of the ranks; their two meshes have the ranks in different orders."""
    first = dist.new_group([0, 1])
    own = torch.arange(4.0) + 10 * (dist.get_rank() % 2)
    state = {}
    for name, ranks in (("a", [[0, 1], [2, 3]]), ("b", [[1, 0], [3, 2]]), ("tied to a", [[0, 1], [2, 3]])):
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        state[name] = DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False)
    if dist.get_rank() in (0, 1):
        writer = Writer(path, ranks=Ranks(first, timeout=60))
        dcp.save(state, storage_writer=writer, process_group=first)


def test_one_memory_that_is_another_part_of_two_tensors_ties_them_not(forge, tmp_path):
    with forge.group(4) as group:
        group.run(save_one_memory_twice, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    low, high = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
    assert (loaded["a"].tolist(), loaded["b"].tolist()) == ([*low, *high], [*high, *low])
    assert loaded["tied to a"] is loaded["a"]


def save_in_half(path, *, told):
    half = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    state = {"w": torch.ones(3)}
    writer = Writer(path, ranks=Ranks(half if told else None, timeout=60))
    dcp.save(state, storage_writer=writer, process_group=half)


def test_a_part_of_the_ranks_saves(forge, tmp_path):
    needs.of_torch(needs.torch_at_least(2, 7), "dcp.save in a group without rank 0")
    with forge.group(3) as group:
        group.run(save_in_half, tmp_path / "c", told=True)
    assert torch.equal(fastckpt.load(tmp_path / "c")["w"], torch.ones(3))


def test_a_writer_that_was_not_told_of_the_group_says_so(forge, tmp_path):
    needs.of_torch(needs.torch_at_least(2, 7), "dcp.save in a group without rank 0")
    with forge.group(3) as group:
        group.start(save_in_half, tmp_path / "c", told=False)
        first, *others = group.outcomes()
    assert first.kind == "returned"
    for each in others:
        assert "Writer(ranks=)" in each.raised.text


class Unsaved:
    """A value of a class that the writer does not support."""


def save_bad(path, *, bad):
    state = {"w": torch.ones(3), "value": 1}
    if dist.get_rank() == bad:
        state[f"bad{bad}"] = Unsaved()
    dcp.save(state, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failure_of_one_rank_fails_all_and_the_old_checkpoint_stays(forge, tmp_path, bad):
    fastckpt.save({"old": torch.ones(1)}, tmp_path / "c")
    with forge.group(2) as group:
        group.start(save_bad, tmp_path / "c", bad=bad)
        outcomes = group.outcomes()
        for each in outcomes:
            assert each.raised.kind.endswith("CheckpointException")
            assert "Unsaved is not supported" in each.raised.text
        assert list(fastckpt.load(tmp_path / "c")) == ["old"]
        # The next save succeeds.
        group.run(save_bad, tmp_path / "c", bad=-1)
    assert fastckpt.load(tmp_path / "c")["value"] == 1


class Failing(DefaultSavePlanner):
    """A planner that fails on one rank, while the others go on to the storage."""

    def __init__(self, bad, *, caching):
        super().__init__(**cached(caching))
        self.bad = bad

    def finish_plan(self, new_plan):
        if dist.get_rank() == self.bad:
            raise RuntimeError("no plan")
        return super().finish_plan(new_plan)


class FailingToLoad(dcp.DefaultLoadPlanner):
    """A load planner that fails on one rank, while the others go on to the storage."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def finish_plan(self, central_plan):
        if dist.get_rank() == self.bad:
            raise RuntimeError("no plan")
        return super().finish_plan(central_plan)


def save_and_load_with_failing_planners(path, *, bad, caching):
    """Save and load three times; the second time fails. Return the errors, and whether the last load is right."""
    state = {"model": parallel.state("fsdp")["model"]}
    told = []
    for turn in range(3):
        planner = Failing(bad if turn == 1 else None, caching=caching)
        try:
            dcp.save(state, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=3)), planner=planner)
        except dcp.api.CheckpointException as error:
            told.append((turn, sorted(error.failures), "no plan" in str(error)))
    for turn in range(3):
        planner = FailingToLoad(bad if turn == 1 else None)
        model, _ = parallel.build("fsdp", trained=False)
        loaded = {"model": parallel.get_model_state_dict(model)}
        try:
            dcp.load(
                loaded, checkpoint_id=path, storage_reader=Reader(ranks=Ranks(timeout=3), io="threads"), planner=planner
            )
        except dcp.api.CheckpointException as error:
            told.append((turn, sorted(error.failures), "no plan" in str(error)))
    wanted = _flat(state)
    return told, all(_equal(value, wanted[key]) for key, value in _flat(loaded).items())


@pytest.mark.parametrize(("bad", "caching"), [(0, False), (1, False), (1, True)])
def test_a_planner_that_fails_on_one_rank_fails_that_call_alone(forge, tmp_path, bad, caching):
    with forge.group(2) as group:
        outcomes = group.run(save_and_load_with_failing_planners, tmp_path / "c", bad=bad, caching=caching)
    assert outcomes == [([(1, [0, 1], True)] * 2, True)] * 2


def save_bad_metadata(path, *, bad):
    metadata = dist if dist.get_rank() == bad else {"epoch": 3}
    dcp.save(
        {"w": torch.ones(3)}, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60), metadata=metadata)
    )


def test_metadata_that_one_rank_cannot_store_fails_all_at_once(forge, tmp_path):
    with forge.group(2) as group:
        group.start(save_bad_metadata, tmp_path / "c", bad=1)
        outcomes = group.outcomes()
        for each in outcomes:
            assert "module is not supported" in each.raised.text
            assert each.seconds < 30
        group.run(save_bad_metadata, tmp_path / "c", bad=-1)
    assert fastckpt.open(tmp_path / "c").metadata == {"epoch": 3}


def save_bad_texts(path):
    """Save with an invalid structure; return the error, and whether the save wrote anything."""
    texts = mock.patch.object(AgreedByRanks, "texts", ("1", "[null]", None))
    with texts, mock.patch.object(process_group, "_write") as write:
        try:
            dcp.save({"w": torch.ones(3)}, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60)))
        except dcp.api.CheckpointException as error:
            return str(error), write.called
    return "", write.called


def test_what_makes_no_manifest_is_refused_before_a_byte_is_written(forge, tmp_path):
    with forge.group(2) as group:
        outcomes = group.run(save_bad_texts, tmp_path / "c")
    assert all("structure" in text and not written for text, written in outcomes), outcomes
    assert list(tmp_path.iterdir()) == []


def save_async_bad(path, *, bad):
    state = {"w": torch.ones(3)}
    if dist.get_rank() == bad:
        state["bad"] = Unsaved()
    writer = Writer(ranks=Ranks(timeout=60))
    try:
        dcp.async_save(state, checkpoint_id=path, storage_writer=writer).result()
    except dcp.api.CheckpointException as error:
        return str(error)
    return None


def test_an_asynchronous_save_that_fails_says_so_on_all_ranks(forge, tmp_path):
    with forge.group(2) as group:
        texts = group.run(save_async_bad, tmp_path / "c", bad=1)
        assert all("Unsaved is not supported" in text for text in texts)
        assert group.run(save_async_bad, tmp_path / "c", bad=-1) == [None, None]
    assert fastckpt.verify(tmp_path / "c").ok


def test_a_rank_that_dies_fails_the_others(forge, tmp_path):
    fastckpt.save({"old": torch.ones(1)}, tmp_path / "c")
    with forge.group(3) as group:
        strike = Strike(1, points.DCP_WRITE)
        group.start(save, "fsdp", tmp_path / "c", timeout=10, strike=strike)
        outcomes = group.outcomes(ranks=[0, 1, 2], timeout=120)
    assert outcomes[1].kind == "died"
    assert outcomes[0].kind == outcomes[2].kind == "raised"
    assert list(fastckpt.load(tmp_path / "c")) == ["old"]


def cuts():
    """Ways to divide a tensor of 10 by 4 for two ranks: by rows, in several parts a rank, by columns, unequally."""
    return [
        ChunkShardingSpec(0, ["rank:0", "rank:1"]),
        ChunkShardingSpec(0, ["rank:0", "rank:1", "rank:1", "rank:0"]),
        ChunkShardingSpec(1, ["rank:1", "rank:0"]),
        EnumerableShardingSpec([ShardMetadata([0, 0], [8, 4], "rank:1"), ShardMetadata([8, 0], [2, 4], "rank:0")]),
    ]


def save_sharded_tensors(path):
    whole = torch.arange(40.0).view(10, 4)
    state = {str(number): sharded_tensor.zeros(cut, 10, 4) for number, cut in enumerate(cuts())}
    for value in state.values():
        for shard in value.local_shards():
            (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[top : top + height, left : left + width])
    dcp.async_save(state, checkpoint_id=path, storage_writer=Writer(ranks=Ranks(timeout=60))).result()
    different = []
    for turn in range(len(state)):
        loaded = {
            str((number + turn) % len(state)): sharded_tensor.zeros(cut, 10, 4) for number, cut in enumerate(cuts())
        }
        dcp.load(loaded, checkpoint_id=path, storage_reader=Reader(ranks=Ranks(timeout=60), io="threads"))
        for key, value in loaded.items():
            for shard in value.local_shards():
                (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                if not torch.equal(shard.tensor, whole[top : top + height, left : left + width]):
                    different.append((turn, key))
    return different


@pytest.mark.filterwarnings("ignore:.*Please use DTensor instead:FutureWarning")
def test_sharded_tensors_load_into_any_other_cut(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(save_sharded_tensors, tmp_path / "c") == [[], []]
    loaded = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(value, torch.arange(40.0).view(10, 4)) for value in loaded.values())


def load_with_holes(path):
    """Load as for fine-tuning, into a model that has another head than the saved one."""
    model, _ = parallel.build("fsdp", trained=False)
    state = {"model": {key: value for key, value in parallel.get_model_state_dict(model).items() if "head" not in key}}
    state["model"]["new_head"] = torch.full((2,), 3.0)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=Reader(path, ranks=Ranks(timeout=60)), planner=planner)
    wanted = _flat({"model": parallel.state("fsdp")["model"]})
    same = all(_equal(value, wanted[key]) for key, value in _flat(state).items() if key != "model.new_head")
    return same and bool((state["model"]["new_head"] == 3).all())


def test_a_part_is_loaded_and_the_rest_stays(forge, reference):
    with forge.group(2) as group:
        assert group.run(load_with_holes, reference) == [True, True]


def load_nothing(path):
    dcp.load({"absent": torch.ones(1)}, storage_reader=Reader(path, ranks=Ranks(timeout=60)))


def test_what_is_missing_is_an_error_on_all_ranks(forge, reference):
    with forge.group(2) as group, pytest.raises(FailedError, match="Missing key in checkpoint state_dict: absent"):
        group.run(load_nothing, reference)


class Odd:
    """A value that can be sent to another process, but not saved."""


def save_in_a_process(path, *, bad):
    state = parallel.state("fsdp")
    if bad:
        state["bad"] = Odd()
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    writer = Writer(path, ranks=Ranks(timeout=60))
    try:
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result(timeout=100)
    except dcp.api.CheckpointException as error:
        return str(error)
    return None


@pytest.mark.slow
def test_a_process_beside_training_saves(forge, tmp_path, reference):
    needs.of_torch(hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"), "AsyncCheckpointerType")
    with forge.group(2) as group:
        texts = group.run(save_in_a_process, tmp_path / "c", bad=True, timeout=200)
        assert all("Odd is not supported" in text for text in texts)
        assert not (tmp_path / "c").exists()
        assert group.run(save_in_a_process, tmp_path / "c", bad=False, timeout=200) == [None, None]
    assert shards(tmp_path / "c") == shards(reference)


def _values_of_ranks(path: str) -> None:
    rank = dist.get_rank()
    state = dict.fromkeys(("a", "b", "c"), rank)
    state |= {name: np.full(3, rank) for name in ("m", "n", "o")}
    if rank:
        state |= {name: [rank, np.full(2, rank)] for name in ("x", "y", "z")}
    dcp.save(state, storage_writer=Writer(path, ranks=Ranks(on_difference="warn")))


def test_values_that_differ_are_all_of_the_lowest_rank_that_has_them(forge, tmp_path):
    """torch would assign each value to another rank, and so save a state that no rank had."""
    with forge.group(4) as group:
        group.run(_values_of_ranks, str(tmp_path / "c"))
    found = fastckpt.load(tmp_path / "c")
    assert [found[name] for name in "abc"] == [0, 0, 0]
    assert [found[name].tolist() for name in "mno"] == [[0, 0, 0]] * 3
    assert [(found[name][0], found[name][1].tolist()) for name in "xyz"] == [(1, [1, 1])] * 3
