"""The writer and the reader in one process, in torch's own scenarios for a storage."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import io
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import fastckpt
from fastckpt.dcp import Reader, Stager, Writer
from harness import needs
from harness.boxes import cut

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


def trained():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def fresh():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def shards(path):
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.rglob("*.safetensors*")}


def some_state():
    model, optimizer = trained()
    weights = model.state_dict()
    weights["tied"] = weights["0.weight"]
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "step": 5,
        "name": "run",
        "pair": (1, torch.ones(3)),
        "numbers": [1, 2.5, None],
        "tensors": [torch.zeros(2), {}, {"deep": [torch.ones(1), 2]}],
        "array": np.arange(3),
        "transposed": torch.arange(6).view(2, 3).t(),
        "expanded": torch.ones(1).expand(4),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex128),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "sparse": torch.eye(3).to_sparse(),
        "flags": {1, 2},
    }


def test_the_files_are_those_of_fastckpt_save(tmp_path):
    state = some_state()
    fastckpt.save(state, tmp_path / "own")
    writer = Writer(tmp_path / "dcp")
    dcp.save(state, storage_writer=writer)
    assert shards(tmp_path / "dcp") == shards(tmp_path / "own")
    assert writer.report.tensors == len(fastckpt.open(tmp_path / "own"))
    loaded = fastckpt.load(tmp_path / "dcp")
    assert loaded["model"]["tied"] is loaded["model"]["0.weight"]
    assert loaded["pair"][0] == 1
    assert loaded["tensors"][1] == {}
    assert loaded["flags"] == {1, 2}
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


def test_a_state_comes_back(tmp_path):
    state = some_state()
    dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=Writer())
    target = some_state()
    for value in (*target["model"].values(), target["transposed"], target["bfloat16"], target["complex"]):
        value.zero_()
    target["expanded"] = torch.zeros(4)
    target |= {"step": 0, "name": "", "pair": None, "numbers": None, "array": None, "flags": None}
    given = target["transposed"]
    dcp.load(target, checkpoint_id=tmp_path / "c", storage_reader=Reader())
    assert target["transposed"] is given
    for key in ("transposed", "expanded", "bfloat16", "complex", "empty", "scalar"):
        assert torch.equal(target[key], state[key]), key
    for key, value in state["model"].items():
        assert torch.equal(target["model"][key], value), key
    assert torch.equal(target["sparse"].to_dense(), torch.eye(3))
    assert target["pair"][0] == 1
    assert (target["step"], target["name"], target["numbers"]) == (5, "run", [1, 2.5, None])
    assert np.array_equal(target["array"], np.arange(3))
    assert target["flags"] == {1, 2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("strided", [True, False])
def test_a_tensor_of_another_dtype_is_converted(tmp_path, dtype, strided):
    value = torch.arange(12, dtype=torch.float32).view(3, 4)
    dcp.save({"w": value}, storage_writer=Writer(tmp_path / "c"))
    target = torch.zeros(4, 3, dtype=dtype).t() if strided else torch.zeros(3, 4, dtype=dtype)
    dcp.load({"w": target}, storage_reader=Reader(tmp_path / "c"))
    assert torch.equal(target, value.to(dtype))


def test_a_tensor_whose_rows_interleave_in_memory_is_filled(tmp_path):
    value = torch.arange(6, dtype=torch.float32).view(2, 3)
    dcp.save({"w": value}, storage_writer=Writer(tmp_path / "c"))
    target = torch.zeros(8).as_strided((2, 3), (3, 2))
    dcp.load({"w": target}, storage_reader=Reader(tmp_path / "c"))
    assert torch.equal(target, value)


def test_a_tensor_of_other_sizes_is_refused(tmp_path):
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.ones(4)}, storage_reader=Reader(tmp_path / "c"))


class Training:
    """A Stateful like those in training loops."""

    def __init__(self):
        self.model, self.optimizer = fresh()
        self.epoch = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.epoch = state["epoch"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_objects_with_a_state_come_back_and_train_on(tmp_path, asynchronous):
    first = Training()
    first.model, first.optimizer = trained()
    first.epoch = 7
    writer = Writer(tmp_path / "c")
    if asynchronous:
        dcp.async_save({"training": first}, storage_writer=writer).result()
    else:
        dcp.save({"training": first}, storage_writer=writer)
    second = Training()
    dcp.load({"training": second}, storage_reader=Reader(tmp_path / "c"))
    assert second.epoch == 7
    for training in (first, second):
        training.optimizer.zero_grad()
        training.model(torch.ones(2, 3)).sum().backward()
        training.optimizer.step()
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_the_optimizer_is_loaded(tmp_path):
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, storage_writer=Writer(tmp_path / "c"))
    model, optimizer = fresh()
    _, wanted = get_state_dict(model, optimizer)
    state = {"optim": wanted}
    dcp.load(state, storage_reader=Reader(tmp_path / "c"))
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments["state"]["0.weight"]["exp_avg"])


def test_a_part_is_loaded_and_what_is_missing_is_told(tmp_path):
    dcp.save({"model": {"body": torch.ones(2), "head": torch.ones(3)}}, storage_writer=Writer(tmp_path / "c"))
    state = {"model": {"body": torch.zeros(2), "other": torch.full((4,), 9.0)}}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: model.other"):
        dcp.load(state, storage_reader=Reader(tmp_path / "c"))
    dcp.load(state, storage_reader=Reader(tmp_path / "c"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(state["model"]["body"], torch.ones(2))
    assert torch.equal(state["model"]["other"], torch.full((4,), 9.0))


def test_a_state_is_made_of_the_checkpoint_alone(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "l": [torch.ones(1), 3], "step": 5}
    fastckpt.save(state, tmp_path / "c")
    made = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(made, storage_reader=Reader(tmp_path / "c"), planner=planner, no_dist=True)
    assert torch.equal(made["model"]["w"], torch.ones(2))
    assert made["l"][1] == 3
    assert made["step"] == 5
    chosen = {}
    planner = _EmptyStateDictLoadPlanner(keys={"model"})
    _load_state_dict(chosen, storage_reader=Reader(tmp_path / "c"), planner=planner, no_dist=True)
    assert list(chosen) == ["model"]


@pytest.mark.parametrize("flat", [True, False])
def test_a_planner_need_not_flatten(tmp_path, flat):
    state = {"model": {"w": torch.ones(2)}, "v": torch.zeros(3), "step": 5}
    dcp.save(state, storage_writer=Writer(tmp_path / "c"), planner=DefaultSavePlanner(flatten_state_dict=flat))
    assert list(fastckpt.open(tmp_path / "c")) == ["model.w", "v"]
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    target = {"model": None, "v": torch.ones(3), "step": 0}
    dcp.load(target, storage_reader=Reader(tmp_path / "c"), planner=planner)
    assert torch.equal(target["model"]["w"], torch.ones(2))
    assert torch.equal(target["v"], torch.zeros(3))
    assert target["step"] == 5


class Renaming(DefaultSavePlanner):
    """A planner that adds a prefix to all keys."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"new_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class Casting(DefaultSavePlanner):
    """A planner that saves floating-point tensors in another dtype."""

    def transform_object(self, write_item, object):  # noqa: A002 - torch's interface
        made = super().transform_object(write_item, object)
        return made.to(torch.float64) if isinstance(made, torch.Tensor) else made


def test_planners_of_ones_own_are_obeyed(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "step": 5}
    dcp.save(state, storage_writer=Writer(tmp_path / "r"), planner=Renaming())
    assert list(fastckpt.load(tmp_path / "r")) == ["new_model", "new_step"]
    dcp.save(state, storage_writer=Writer(tmp_path / "c"), planner=Casting())
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded["model"]["w"].dtype is torch.float64
    assert loaded["step"] == 5


class Blunt(DefaultSavePlanner):
    """A planner that serializes values in its own way."""

    def transform_object(self, write_item, object):  # noqa: A002, ARG002 - torch's interface
        return object if isinstance(object, torch.Tensor) else io.BytesIO(b"my own")


def test_bytes_that_torch_did_not_make_are_refused(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match="keep resolve_data and transform_object"):
        dcp.save({"step": 5}, storage_writer=Writer(tmp_path / "c"), planner=Blunt())
    assert not (tmp_path / "c").exists()


class Unsaved:
    """A value of a class that the writer does not support."""


class Evil:
    def __reduce__(self):
        return (print, ("pwned",))


def test_no_pickle_is_stored(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match="Evil is not supported"):
        dcp.save({"step": Evil()}, storage_writer=Writer(tmp_path / "c"))
    dcp.save({"a": {"b": (1, {2}, b"x", None)}}, storage_writer=Writer(tmp_path / "c"))
    for each in (tmp_path / "c").iterdir():
        assert b"\x80\x02" not in each.read_bytes()


def test_collectives_are_needed(tmp_path):
    needs.of_torch("use_collectives" in inspect.signature(dcp.save).parameters, "dcp.save(use_collectives=)")
    with pytest.raises(ValueError, match="use_collectives=False lets each rank finish"):
        dcp.save({"step": 5}, storage_writer=Writer(tmp_path / "c"), use_collectives=False)


def test_a_path_is_needed_and_may_change(tmp_path):
    writer = Writer()
    with pytest.raises(dcp.api.CheckpointException, match="pass a path to the Writer"):
        dcp.save({"step": 5}, storage_writer=writer)
    for step in (1, 2):
        dcp.save({"step": step}, checkpoint_id=tmp_path / str(step), storage_writer=writer)
    dcp.save({"step": 3}, storage_writer=writer)
    assert [fastckpt.load(tmp_path / str(step))["step"] for step in (1, 2)] == [1, 3]
    with pytest.raises(dcp.api.CheckpointException, match="pass a path to the Reader"):
        dcp.load({"step": 0}, storage_reader=Reader())
    assert Writer.validate_checkpoint_id(tmp_path)
    assert Reader.validate_checkpoint_id("relative")
    assert not Writer.validate_checkpoint_id("s3://bucket/c")
    assert not Reader.validate_checkpoint_id(5)


def test_nothing_else_is_replaced(tmp_path):
    dcp.save({"step": 1}, storage_writer=Writer(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match=r"Checkpoint already exists.*overwrite=True"):
        dcp.save({"step": 2}, storage_writer=Writer(tmp_path / "c", overwrite=False))
    dcp.save({"step": 3}, checkpoint_id=tmp_path / "torchs")
    with pytest.raises(dcp.api.CheckpointException, match=r"which torch\.distributed\.checkpoint wrote"):
        dcp.save({"step": 4}, storage_writer=Writer(tmp_path / "torchs"))
    with pytest.raises(dcp.api.CheckpointException, match="fastckpt import"):
        dcp.load({"step": 0}, storage_reader=Reader(tmp_path / "torchs"))
    assert fastckpt.load(tmp_path / "c")["step"] == 1


def test_a_damaged_checkpoint_is_told(tmp_path):
    dcp.save({"w": torch.ones(5000)}, storage_writer=Writer(tmp_path / "c"))
    with (tmp_path / "c" / "model.safetensors").open("r+b") as file:
        file.seek(9000)
        file.write(b"\xff")
    with pytest.raises(dcp.api.CheckpointException, match="CorruptCheckpointError"):
        dcp.load({"w": torch.zeros(5000)}, storage_reader=Reader(tmp_path / "c"))


def test_keys_that_become_one_are_refused(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match="duplicated flatten key"):
        dcp.save({"a.b": 1, "a": {"b": 2}}, storage_writer=Writer(tmp_path / "c"))
    fastckpt.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "own")
    with pytest.raises(dcp.api.CheckpointException, match=r"two entries of the checkpoint have the key 'a\.b'"):
        dcp.load({"a": {"b": 0}}, storage_reader=Reader(tmp_path / "own"))
    fastckpt.save([torch.ones(2)], tmp_path / "list")
    with pytest.raises(dcp.api.CheckpointException, match=r"use fastckpt\.load"):
        dcp.load({"a": 0}, storage_reader=Reader(tmp_path / "list"))


def test_numbers_of_parameters_stay_numbers(tmp_path):
    _, optimizer = trained()
    dcp.save({"o": optimizer.state_dict()}, storage_writer=Writer(tmp_path / "c"))
    loaded = fastckpt.load(tmp_path / "c")
    assert list(loaded["o"]["state"]) == list(optimizer.state_dict()["state"])
    _, unused = fresh()
    dcp.save({"o": unused.state_dict()}, storage_writer=Writer(tmp_path / "c"))
    loaded = fastckpt.load(tmp_path / "c")
    assert list(loaded["o"]) == ["state", "param_groups"]
    assert loaded["o"]["state"] == {}
    # Outside optimizers, keys that look like numbers stay strings.
    dcp.save({"state": {"0": {"x": 1}}}, storage_writer=Writer(tmp_path / "c"))
    assert fastckpt.load(tmp_path / "c") == {"state": {"0": {"x": 1}}}


def test_a_state_may_change_once_it_is_staged(tmp_path):
    state = {"w": torch.ones(1000), "list": [1, {"x": torch.ones(2)}], "plain": [1]}
    state["tied"] = state["w"]
    writer = Writer(tmp_path / "c")
    assert isinstance(writer, AsyncStager)
    assert isinstance(Stager(), AsyncStager)
    future = dcp.async_save(state, storage_writer=writer)
    state["w"].zero_()
    state["list"][1]["x"].zero_()
    state["plain"].append(2)
    future.result()
    loaded = fastckpt.load(tmp_path / "c")
    assert torch.equal(loaded["w"], torch.ones(1000))
    assert loaded["tied"] is loaded["w"]
    assert torch.equal(loaded["list"][1]["x"], torch.ones(2))
    assert loaded["plain"] == [1]


class Held(DefaultSavePlanner):
    """A planner that holds its save until the next save is requested."""

    def __init__(self, go):
        super().__init__()
        self.go = go

    def create_local_plan(self):
        assert self.go.wait(60)
        return super().create_local_plan()


def test_a_writer_may_be_given_the_next_save_while_one_is_under_way(tmp_path):
    writer, go = Writer(), threading.Event()
    saves = [
        dcp.async_save({"step": step}, checkpoint_id=tmp_path / str(step), storage_writer=writer, planner=Held(go))
        for step in range(3)
    ]
    go.set()
    for save in saves:
        save.result()
    assert [fastckpt.load(tmp_path / str(step))["step"] for step in range(3)] == [0, 1, 2]


def test_memory_of_a_stage_is_used_again_once_nobody_has_it():
    fastckpt.background.release_buffers()
    stager = Stager()
    first = stager.stage({"w": torch.ones(1 << 20)})
    address = first["w"].data_ptr()
    second = stager.stage({"w": torch.zeros(1 << 20)})
    assert second["w"].data_ptr() != address
    assert bool((first["w"] == 1).all())
    del first
    third = stager.stage({"w": torch.full((1 << 20,), 3.0)})
    assert third["w"].data_ptr() == address
    fastckpt.background.release_buffers()


def test_an_asynchronous_save_that_fails_says_so(tmp_path):
    writer = Writer(tmp_path / "c")
    with pytest.raises(dcp.api.CheckpointException, match="Unsaved is not supported"):
        dcp.async_save({"x": Unsaved()}, storage_writer=writer).result()
    dcp.async_save({"x": 1}, storage_writer=writer).result()
    assert fastckpt.load(tmp_path / "c") == {"x": 1}
    writer.close()


def test_a_writer_and_a_reader_can_be_pickled(tmp_path):
    writer = Writer(tmp_path / "c", files=fastckpt.Files(shard_size="1MB"), metadata={"step": 3})
    writer.stage({"w": torch.ones(3)})
    dcp.save({"w": torch.ones(3)}, storage_writer=pickle.loads(pickle.dumps(writer)))
    reader = Reader(tmp_path / "c")
    reader.read_metadata()
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert torch.equal(state["w"], torch.ones(3))
    assert fastckpt.open(tmp_path / "c").metadata == {"step": 3}


def test_finish_refuses_what_was_not_written(tmp_path):
    writer = Writer(tmp_path / "c")
    writer.set_up_storage_writer(is_coordinator=True)
    with pytest.raises(fastckpt.CheckpointError, match="finish was called before write_data wrote"):
        writer.finish(None, [])


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_a_tensor_in_boxes_is_stored_as_a_whole_one(tmp_path, shard_size):
    torch.manual_seed(0)
    state = {
        "rows": torch.randn(700, 300),
        "plain": torch.randn(17),
        "both": torch.randn(35, 44).t(),
        "step": 5,
        "model": {"three": torch.randn(5, 6, 7), "bfloat16": torch.randn(33, 9).to(torch.bfloat16)},
        "complex": torch.randn(4, 5, dtype=torch.complex128),
        "flags": torch.randn(10, 3) > 0,
        "empty": torch.zeros(0, 3),
        "expanded": torch.ones(1, 4).expand(6, 4).clone(),
        "one": torch.tensor(3.0),
    }
    fastckpt.save(state, tmp_path / "own", files=fastckpt.Files(shard_size=shard_size))
    boxes = {
        **state,
        "rows": cut(state["rows"], [300, 301]),
        "both": cut(state["both"], [7, 40], [11]),
        "model": {
            "three": cut(state["model"]["three"], [2], [3], [1, 6]),
            "bfloat16": cut(state["model"]["bfloat16"], [32], [4]),
        },
        "complex": cut(state["complex"], [], [2]),
        "flags": cut(state["flags"], [3], [1, 2]),
        "empty": cut(state["empty"], [], [2]),
        "expanded": cut(state["expanded"], [2], place=lambda _, box: box[:1].expand(box.shape)),
        "one": cut(state["one"]),
    }
    writer = Writer(tmp_path / "dcp", files=fastckpt.Files(shard_size=shard_size))
    dcp.save(boxes, storage_writer=writer)
    assert shards(tmp_path / "dcp") == shards(tmp_path / "own")
    assert list(fastckpt.open(tmp_path / "dcp")) == list(fastckpt.open(tmp_path / "own"))
    assert writer.report.bytes == sum(
        value.nbytes for value in (*state.values(), *state["model"].values()) if isinstance(value, torch.Tensor)
    )
    assert fastckpt.load(tmp_path / "dcp")["step"] == 5


def test_what_a_rank_lacks_is_refused(tmp_path):
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2, 4)})
    plan = planner.create_local_plan()
    (item,) = plan.items
    chunk = dcp.metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4]))
    data = dcp.planner.TensorWriteData(chunk, item.tensor_data.properties, torch.Size([3, 4]))
    half = dcp.planner.WriteItem(item.index, dcp.planner.WriteItemType.SHARD, tensor_data=data)
    writer = Writer(tmp_path / "c")
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([dcp.planner.SavePlan([half])])
    with pytest.raises(fastckpt.CheckpointError, match=r"'w'.*\(8 of 12 elements\).*without no_dist=True") as raised:
        writer.write_data(plan, planner)
    assert not getattr(raised.value, "__notes__", [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="twice"):
        writer.write_data(dcp.planner.SavePlan([item, item]), planner)


def test_what_a_checkpoint_holds_is_told_as_torch_counts_it(tmp_path):
    fastckpt.save({"a": {1: {"w": torch.ones(2)}}, "l": [[torch.ones(1)], [1]], "t": (torch.ones(1),)}, tmp_path / "c")
    metadata = Reader(tmp_path / "c").read_metadata()
    assert list(metadata.state_dict_metadata) == ["a.1.w", "l.0.0", "l.1", "t"]
    assert metadata.planner_data["l.0.0"] == ("l", 0, 0)
    assert isinstance(metadata.state_dict_metadata["t"], BytesStorageMetadata)
    assert metadata.state_dict_metadata["a.1.w"].size == torch.Size([2])


def test_torch_makes_its_own_file_of_it(tmp_path):
    dcp.save({"w": torch.ones(2), "step": 3}, storage_writer=Writer(tmp_path / "c"))
    with fastckpt.dcp.install():
        dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(loaded["w"], torch.ones(2))
    assert loaded["step"] == 3


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


def test_an_enum_comes_back_declared_or_plain(tmp_path):
    dcp.save({"phase": Phase.COLD, "w": torch.ones(2)}, storage_writer=Writer(tmp_path / "c"))

    def load(**how):
        state = {"phase": None, "w": torch.zeros(2)}
        dcp.load(state, storage_reader=Reader(tmp_path / "c", **how))
        assert torch.equal(state["w"], torch.ones(2))
        return state["phase"]

    with pytest.raises(dcp.api.CheckpointException, match=r'Phase.*registry=, or .*undeclared="plain"'):
        load()
    assert load(registry=fastckpt.Registry(Phase)) is Phase.COLD
    with pytest.warns(RuntimeWarning, match=r"stored form: .*Phase"):
        assert load(registry=fastckpt.Registry(undeclared="plain")) == "COLD"
    state = {"phase": None}
    plain = fastckpt.Registry(undeclared="plain")
    with fastckpt.dcp.install(registry=plain), pytest.warns(RuntimeWarning, match="Phase"):
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state == {"phase": "COLD"}
    with pytest.raises(TypeError, match=r"'undeclared': it is an option of registry=fastckpt\.Registry"):
        fastckpt.dcp.install(undeclared="plain")


def test_a_class_of_the_program_is_warned_of_as_in_save(tmp_path):
    kind = dataclasses.make_dataclass("Settings", [("rate", float)])
    kind.__module__ = "__main__"
    with pytest.warns(RuntimeWarning, match=r"dcp\.save: the checkpoint holds values of __main__\.Settings"):
        dcp.save({"settings": kind(0.5), "w": torch.ones(2)}, storage_writer=Writer(tmp_path / "c"))


def some(dtype, shape, first):
    """A tensor of a dtype, with values that depend on ``first``."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) % 2 + first).to(torch.int8).reshape(shape).to(dtype)


SPARSE = ["float32", "float64", "float16", "bfloat16", "complex64", "int8", "int64", "bool"]


@pytest.mark.parametrize("dtype", SPARSE)
@pytest.mark.parametrize("template", ["empty", "fewer", "more", "same"])
def test_a_sparse_tensor_is_filled(tmp_path, dtype, template):
    kind = getattr(torch, dtype)

    def coo(places, first):
        rows, columns = zip(*places, strict=True) if places else ((), ())
        values = some(kind, (len(places),), first)
        return torch.sparse_coo_tensor([rows, columns], values, (4, 5), check_invariants=True).coalesce()

    saved = coo([(0, 1), (2, 3), (3, 0)], 1)
    grown = [(row, column) for row in range(4) for column in range(5)]
    places = {"empty": [], "fewer": [(1, 1)], "more": grown, "same": [(0, 1), (2, 3), (3, 0)]}[template]
    state = {"a": coo(places, 0), "dense": torch.zeros(3)}
    held = state["a"]
    dcp.save({"a": saved, "dense": torch.ones(3)}, checkpoint_id=tmp_path / "c", storage_writer=Writer())
    dcp.load(state, checkpoint_id=tmp_path / "c", storage_reader=Reader())
    assert state["a"] is held
    assert torch.equal(held.to_dense(), saved.to_dense())
    assert torch.equal(state["dense"], torch.ones(3))
