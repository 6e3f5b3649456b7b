"""Parts: plain tensors of a rank with a description of their place in a larger tensor.

tests/ranks/test_topologies_property.py draws how tensors are divided.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import fastckpt
import fastckpt.distributed
from fastckpt.distributed import Part, Ranks
from harness import needs, standin

SHAPE = (5, 7)
WHOLE = torch.arange(35.0).reshape(SHAPE)
#: The ends of the ranges of four ranks, within and at the ends of rows; one range is empty.
ENDS = (0, 9, 9, 21, 35)


def _range(device="cpu", fill=True, dtype=torch.float32):
    rank = dist.get_rank()
    start, stop = ENDS[rank], ENDS[rank + 1]
    values = WHOLE.reshape(-1)[start:stop].clone().to(dtype)
    return Part.flat((values if fill else torch.zeros_like(values)).to(device), of=SHAPE, start=start)


def _round_trip(path, device, save_dtype, load_dtype, background):
    """Save ranges, load them into others, and return the differences."""
    state = {"w": _range(device), "own": torch.full((3,), 1.0)}
    options = {
        "ranks": Ranks(timeout=30),
        "dtype": {"w": save_dtype} if save_dtype else None,
        "per_rank": {"seed": torch.ones(3).to(device)},
    }
    if background:
        pending = fastckpt.distributed.save_async(state, path, io=fastckpt.IO(lazy=True), **options)
        pending.wait_staged()
        state["w"].tensor.zero_()
        pending.result(60)
    else:
        fastckpt.distributed.save(state, path, **options)
    into = {"w": _range(device, fill=False, dtype=load_dtype or torch.float32), "own": torch.zeros(3)}
    loaded = fastckpt.distributed.load(
        path, into=into, ranks=Ranks(timeout=30), dtype=None if load_dtype is None else {"w": load_dtype}
    )
    assert loaded["w"] is into["w"]
    return torch.equal(into["w"].tensor.cpu().float(), _range().tensor)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("save_dtype", "load_dtype"), [(None, None), ("bfloat16", None), (None, torch.float64)])
def test_ranges_are_cast(forge, tmp_path, save_dtype, load_dtype, background):
    if save_dtype is not None:
        load_dtype = torch.bfloat16
    with forge.group(4) as group:
        assert group.run(_round_trip, tmp_path / "c", "cpu", save_dtype, load_dtype, background) == [True] * 4
    assert torch.equal(fastckpt.load(tmp_path / "c")["w"].float(), WHOLE)


@pytest.mark.parametrize("background", [False, True])
def test_ranges_on_a_device(forge, tmp_path, background):
    if not standin.AVAILABLE:
        needs.missing("needs torch 2.10 (a back end that is set up from Python)")
    with forge.group(4) as group:
        assert group.run(_round_trip, tmp_path / "c", "standin", None, None, background) == [True] * 4
    assert torch.equal(fastckpt.load(tmp_path / "c", device="cpu")["w"], WHOLE)


def _save(path, part, **options):
    return fastckpt.distributed.save({"w": part(dist.get_rank())}, path, ranks=Ranks(timeout=30, **options))


def _rows(rank):
    return Part(WHOLE[rank : rank + 1] if rank else WHOLE[:0], of=SHAPE, at=(rank, 0))


def test_every_element_is_somebody_s(forge, tmp_path):
    with forge.group(4) as group:
        group.start(_save, tmp_path / "c", _rows)
        for outcome in group.outcomes():
            assert outcome.kind == "raised"
            assert "tensor `w`: no rank has" in outcome.raised.text
    assert not (tmp_path / "c").exists()


def _twice(rank):
    """Save rows 0 to 2 and rows 2 to 4, so that two parts have row 2."""
    values = WHOLE.clone()
    values[2] += rank
    return Part(values[2 * rank : 2 * rank + 3], of=SHAPE, at=(2 * rank, 0))


@pytest.mark.parametrize("replicas", ["sample", "full"])
def test_elements_of_several_ranks_are_compared(forge, tmp_path, replicas):
    with forge.group(2) as group:
        group.start(_save, tmp_path / "c", _twice, replicas=replicas)
        for outcome in group.outcomes():
            assert outcome.kind == "raised"
            assert "w: one value on rank 0" in outcome.raised.text
            assert "7 of the 7 elements" in outcome.raised.text
    assert not (tmp_path / "c").exists()


class _Parts:
    """An object whose state is made of temporary Parts."""

    def __init__(self, count, fill):
        self.tensors = [torch.full((4,), float(fill + number)) for number in range(count)]

    def state_dict(self):
        return {f"w{number}": Part(tensor, of=(4,), at=(0,)) for number, tensor in enumerate(self.tensors)}


def test_parts_that_a_state_makes_anew_are_tensors_of_their_own(tmp_path):
    """Mutant: a save takes a part for an earlier part at the same address."""
    objects = {f"o{number}": _Parts(5, 10 * number) for number in range(20)}
    assert fastckpt.distributed.save(objects, tmp_path / "c").tensors == 100
    loaded = fastckpt.load(tmp_path / "c")
    assert all(
        torch.equal(loaded[name][f"w{number}"], tensor)
        for name, value in objects.items()
        for number, tensor in enumerate(value.tensors)
    )


def test_parts_over_the_same_memory_are_tied(tmp_path):
    values = WHOLE.clone()
    state = {name: Part(values, of=SHAPE, at=(0, 0)) for name in "ab"}
    assert fastckpt.distributed.save(state, tmp_path / "c").tensors == 1
    values.zero_()
    fastckpt.distributed.load(tmp_path / "c", into=state)
    assert torch.equal(values, WHOLE)


def _excluded(path):
    """Save where one rank has an additional Part after the others, which exclude= excludes."""
    rank = dist.get_rank()
    state = {"w": _range()} | ({"x": _range()} if rank == 0 else {})
    fastckpt.distributed.save(state, path, exclude="x", ranks=Ranks(timeout=30))


def test_a_part_of_one_rank_is_left_out(forge, tmp_path):
    with forge.group(4) as group:
        group.run(_excluded, tmp_path / "c")
    assert torch.equal(fastckpt.load(tmp_path / "c")["w"], WHOLE)


class _Wrapping(torch.nn.Module):
    """A module whose state has a Part in place of its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(WHOLE.clone())

    def state_dict(self, **_):
        return {"weight": Part(self.weight.detach(), of=SHAPE, at=(0, 0))}


def test_a_module_that_makes_parts_is_not_filled_in_part(tmp_path):
    module, other = _Wrapping(), torch.zeros(2)
    fastckpt.distributed.save({"model": module, "other": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(fastckpt.exceptions.StructureMismatchError, match=r"give its state_dict\(\) in its place"):
        fastckpt.distributed.load(tmp_path / "c", into={"model": module, "other": other})
    assert not other.any()


def test_one_part_in_two_places_is_one_tensor(tmp_path):
    part = Part(WHOLE, of=SHAPE, at=(0, 0))
    report = fastckpt.distributed.save({"a": part, "b": part}, tmp_path / "c")
    assert report.tensors == 1
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded["a"] is loaded["b"]
    # A rank may load two parts of one tensor.
    one, other = torch.zeros(12), torch.zeros(20)
    into = {"a": Part.flat(one, of=SHAPE, start=3), "b": Part.flat(other, of=SHAPE, start=13)}
    fastckpt.distributed.load(tmp_path / "c", into=into)
    assert torch.equal(one, WHOLE.reshape(-1)[3:15])
    assert torch.equal(other, WHOLE.reshape(-1)[13:33])
    # Parts that a load converts have no memory to which the core could write.
    into = {"a": Part.flat(torch.zeros(12, dtype=torch.float64), of=SHAPE, start=3)}
    fastckpt.distributed.load(tmp_path / "c", into=into, keys="a", dtype="float64")
    assert torch.equal(into["a"].tensor, WHOLE.reshape(-1)[3:15].double())


def _two_of_one(path):
    rank = dist.get_rank()
    one, other = torch.zeros(12 + rank), torch.zeros(20)
    into = {"a": Part.flat(one, of=SHAPE, start=3), "b": Part.flat(other, of=SHAPE, start=13 - rank)}
    fastckpt.distributed.load(path, into=into, ranks=Ranks(timeout=30))
    flat = WHOLE.reshape(-1)
    return torch.equal(one, flat[3 : 15 + rank]) and torch.equal(other, flat[13 - rank : 33 - rank])


def test_several_parts_of_a_stored_tensor(forge, tmp_path):
    state = {"a": WHOLE, "b": WHOLE}
    fastckpt.save(state, tmp_path / "c")
    with forge.group(3) as group:
        assert group.run(_two_of_one, tmp_path / "c") == [True] * 3


def _manager(path):
    with fastckpt.Manager(path, ranks=Ranks(timeout=30)) as manager:
        state = {"w": _range(), "step": 3}
        manager.save(3, state)
        manager.wait()
        state["w"].tensor.zero_()
        restored = manager.restore(into=state)
    return restored.step, torch.equal(state["w"].tensor, _range().tensor)


def test_a_manager_saves_and_restores_them(forge, tmp_path):
    with forge.group(4) as group:
        assert group.run(_manager, tmp_path) == [(3, True)] * 4


def _unchanged(path):
    """Save with a base from which nothing differs, then with changed elements on one rank."""
    options = {"ranks": Ranks(timeout=30)}
    fastckpt.distributed.save({"w": _range(), "x": _range()}, path / "a", **options)
    same = fastckpt.distributed.save({"w": _range(), "x": _range()}, path / "b", base=path / "a", **options)
    changed = _range()
    if dist.get_rank() == 2:
        changed.tensor[-1] += 1
    other = fastckpt.distributed.save({"w": changed, "x": _range()}, path / "c", base=path / "b", **options)
    return same.bytes_total, other.bytes_total


def test_unchanged_parts_are_taken_over(forge, tmp_path):
    with forge.group(4) as group:
        assert group.run(_unchanged, tmp_path) == [(0, 280)] * 4
    assert torch.equal(fastckpt.load(tmp_path / "c")["x"], WHOLE)
    assert fastckpt.load(tmp_path / "c")["w"].reshape(-1)[20] == 21


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Part(WHOLE, of=(5, 8), at=(0,)), ValueError, "one number for each dimension"),
        (lambda: Part(WHOLE, of=(5, 8), at=(0, 2)), ValueError, r"at \[0, 2\] does not lie in"),
        (lambda: Part(WHOLE, of=(5, 8), at=(0, -1)), ValueError, "at must hold integers of at least 0"),
        (lambda: Part(WHOLE, of=(5, 8), at=(0, 0.5)), TypeError, "at must hold integers"),
        (lambda: Part(WHOLE, of=5, at=(0, 0)), TypeError, "of must hold integers"),
        (lambda: Part.flat(WHOLE, of=SHAPE, start=0), ValueError, "one-dimensional and contiguous"),
        (lambda: Part.flat(WHOLE[:, 0], of=SHAPE, start=0), ValueError, "one-dimensional and contiguous"),
        (lambda: Part.flat(WHOLE[0], of=SHAPE, start=29), ValueError, "7 elements with start=29"),
        (lambda: Part.flat(WHOLE[0], of=SHAPE, start="a"), TypeError, "start must hold integers"),
        (lambda: Part.flat(WHOLE[0].numpy(), of=SHAPE, start=0), TypeError, "must be a torch.Tensor, not ndarray"),
        (lambda: Part(WHOLE, of=(2**62, 7), at=(0, 0)), ValueError, "is too large"),
    ],
)
def test_what_is_no_part(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


def test_one_process_alone_takes_none(tmp_path):
    part = Part(WHOLE, of=SHAPE, at=(0, 0))
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match=r"\['w'\]: a Part belongs in the state"):
        fastckpt.save({"w": part}, tmp_path / "c")
    fastckpt.save({"w": WHOLE}, tmp_path / "c")
    with pytest.raises(fastckpt.exceptions.StructureMismatchError, match=r"\['w'\]: cannot be filled: a Part belongs"):
        fastckpt.load(tmp_path / "c", into={"w": part})


@pytest.mark.parametrize("value", [WHOLE.to_sparse(), torch.ones(1, 7).expand(5, 7)])
def test_only_a_dense_tensor_is_part_of_another(value, tmp_path):
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match=r"\['w'\]: the tensor of a Part must be plain"):
        fastckpt.distributed.save({"w": Part(value, of=SHAPE, at=(0, 0))}, tmp_path / "c")


@pytest.mark.parametrize("other", [torch.zeros(34), torch.zeros(70)[::2], torch.zeros(7, 5)])
def test_a_part_whose_tensor_is_another_now(other, tmp_path):
    part = Part.flat(WHOLE.reshape(-1).clone(), of=SHAPE, start=0)
    fastckpt.distributed.save({"w": part}, tmp_path / "c")
    part.tensor = other
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="shape or the strides of its tensor have"):
        fastckpt.distributed.save({"w": part}, tmp_path / "d")
    with pytest.raises(fastckpt.exceptions.StructureMismatchError, match="shape or the strides of its tensor have"):
        fastckpt.distributed.load(tmp_path / "c", into={"w": part})


def test_a_part_belongs_into_the_state(tmp_path):
    part = Part(WHOLE, of=SHAPE, at=(0, 0))
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="a Part belongs in the state"):
        fastckpt.distributed.save({}, tmp_path / "c", per_rank={"w": part})


def test_the_shape_of_the_whole_is_that_of_the_checkpoint(tmp_path):
    fastckpt.save({"w": WHOLE}, tmp_path / "c")
    into = {"w": Part.flat(torch.zeros(35), of=(7, 5), start=0)}
    with pytest.raises(fastckpt.exceptions.StructureMismatchError, match=r"shape \[5, 7\] in the checkpoint, \[7, 5\]"):
        fastckpt.distributed.load(tmp_path / "c", into=into)


def _fsdp1(path, saves, background):
    """Train two steps under FSDP1 and save, or load; return the whole state, as torch gathers it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")  # torch warns that FSDP1 is deprecated
    torch.manual_seed(5 if saves else dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if not saves:
        fastckpt.distributed.load(path, into=state, ranks=Ranks(timeout=30))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    elif background:
        fastckpt.distributed.save_async(state, path, ranks=Ranks(timeout=30), io=fastckpt.IO(lazy=True)).result(60)
    else:
        fastckpt.distributed.save(state, path, ranks=Ranks(timeout=30))
    gathered = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return gathered if dist.get_rank() == 0 else None


@pytest.mark.parametrize("background", [False, True])
def test_fsdp1(forge, tmp_path, background):
    """Four ranks save ShardedTensors, one rank without any of the last layer; two ranks and one process load."""
    needs.of_torch(hasattr(torch.cpu.Stream, "record_event"), "training under FSDP on the CPU")
    with forge.group(4) as group:
        weights, moments = group.run(_fsdp1, tmp_path / "c", True, background)[0]
    alone = fastckpt.load(tmp_path / "c")
    assert alone["model"].keys() == weights.keys()
    assert all(torch.equal(alone["model"][name], weights[name]) for name in weights)
    with forge.group(2) as group:
        again, others = group.run(_fsdp1, tmp_path / "c", False, False)[0]
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    for name, mine in moments["state"].items():
        assert mine.keys() == others["state"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[key], others["state"][name][key]) for key in mine)
