"""The reader fills tensors of every layout and dtype with the saved values, or raises an error with their names."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import fastckpt
from fastckpt.dcp import Reader, Writer
from fastckpt.distributed import Ranks
from harness.parallel import dist, torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
]

SHAPE = (4, 6)
DENSE = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def values(first, dtype=torch.float32):
    """A tensor with zeros in fixed places; the other values depend on ``first``."""
    numbers = torch.arange(SHAPE[0] * SHAPE[1])
    made = (numbers % 2) * (numbers % 3 + first)
    return (made % 2 + (first > 1) if dtype is torch.bool else made).to(dtype).reshape(SHAPE)


def placed(value, how):
    """A tensor like ``value``, with another placement of elements in memory, or of another form."""
    rows, columns = SHAPE
    if how == "contiguous":
        return value.clone()
    if how == "transposed":
        return value.t().contiguous().t()
    if how == "interleaved":
        wide = torch.empty(11 * rows + 2 * columns, dtype=value.dtype).as_strided(SHAPE, (11, 2))
        return wide.copy_(value)
    if how == "reinterpreted":
        other = value.conj().resolve_conj().conj() if value.is_complex() else torch._neg_view(-value)
        assert other.is_conj() or other.is_neg()
        return other
    if how == "inference":
        with torch.inference_mode():
            return value.clone()
    assert how == "offset"
    return torch.cat([value.new_zeros(1, columns), value])[1:]


def same_bytes(one, other):
    plain = [each.clone().resolve_conj().resolve_neg().contiguous().view(torch.uint8) for each in (one, other)]
    return one.dtype is other.dtype and torch.equal(*plain)


def loaded(path, template):
    """Load ``a`` and another tensor, and check that the load fills the template, and does not replace it."""
    state = {"a": template, "beside": torch.zeros(3)}
    dcp.load(state, storage_reader=Reader(path))
    assert state["a"] is template
    assert torch.equal(state["beside"], torch.ones(3))
    return template


def refused(path, template, why):
    """Load ``a`` into a tensor that does not fit, and check that the error names ``a`` and no other tensor."""
    with pytest.raises(dcp.api.CheckpointException, match=why) as raised:
        dcp.load({"a": template, "beside": torch.zeros(3)}, storage_reader=Reader(path))
    (cause,) = raised.value.failures.values()
    error = cause[0]
    assert isinstance(error, fastckpt.StructureMismatchError), error
    assert "'a'" in str(error)
    assert "beside" not in str(error)


PLACES = ["contiguous", "transposed", "interleaved", "offset", "inference"]
REINTERPRETED = [torch.complex128, torch.complex64, torch.complex32, torch.float32, torch.int32]


@pytest.mark.parametrize(
    ("dtype", "how"), [*itertools.product(DENSE, PLACES), *((dtype, "reinterpreted") for dtype in REINTERPRETED)]
)
def test_a_dense_tensor_of_any_dtype_and_strides_holds_what_was_saved(tmp_path, dtype, how):
    saved = values(1, dtype)
    dcp.save({"a": placed(saved, how), "beside": torch.ones(3)}, storage_writer=Writer(tmp_path / "c"))
    template = placed(values(2, dtype), how)
    assert not same_bytes(template, saved)
    assert same_bytes(loaded(tmp_path / "c", template), saved)


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}
SCALES = torch.tensor([0.5, 0.25, 0.5, 0.125])
ZEROS = torch.tensor([0, 1, 2, 0])


def per_channel(dense, scales=SCALES, zeros=ZEROS, axis=0, dtype=torch.qint8):
    return torch.quantize_per_channel(dense, scales, zeros, axis, dtype)


QUANTIZED = {
    "per tensor": lambda dense: torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8),
    "another scale": lambda dense: torch.quantize_per_tensor(dense, 0.25, 3, torch.qint8),
    "another zero point": lambda dense: torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
    "another dtype": lambda dense: torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8),
    "32 bits": lambda dense: torch.quantize_per_tensor(dense, 0.5, 3, torch.qint32),
    "per channel": per_channel,
    "other scales": lambda dense: per_channel(dense, SCALES.flip(0)),
    "other zero points": lambda dense: per_channel(dense, zeros=ZEROS.flip(0)),
    "zero points that are not integers": lambda dense: per_channel(dense, zeros=ZEROS.float(), dtype=torch.quint8),
    "other channels": lambda dense: per_channel(dense, SCALES.repeat(2)[:6], ZEROS.repeat(2)[:6], axis=1),
}
FORMS = {
    "dense": lambda dense: dense.clone(),
    "repeated": lambda dense: dense[:1].expand(SHAPE),
    **SPARSE,
    **QUANTIZED,
}
#: Forms in which any tensor can be filled from any other, unless its elements share memory.
PLAIN = {"dense", "repeated"}


@pytest.mark.parametrize("given", FORMS)
@pytest.mark.parametrize("saved", FORMS)
def test_a_tensor_of_any_form_holds_what_was_saved_or_is_refused_by_name(tmp_path, saved, given):
    held, template = FORMS[saved](values(1)), FORMS[given](values(2))
    fastckpt.save({"a": held, "beside": torch.ones(3)}, tmp_path / "c")
    if given == saved or (given == "dense" and saved in PLAIN):
        filled = loaded(tmp_path / "c", template)
        assert filled.layout is held.layout
        assert filled.is_quantized == held.is_quantized
        plain = [one.dequantize() if one.is_quantized else one.to_dense() for one in (filled, held)]
        assert torch.equal(*plain)
    else:
        refused(tmp_path / "c", template, "share memory" if PLAIN.issuperset([saved, given]) else "in the state")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("form", SPARSE)
def test_a_sparse_tensor_of_any_dtype_holds_what_was_saved(tmp_path, dtype, form):
    saved, template = (SPARSE[form](values(first).to(dtype)) for first in (1, 2))
    fastckpt.save({"a": saved, "beside": torch.ones(3)}, tmp_path / "c")
    assert torch.equal(loaded(tmp_path / "c", template).to_dense(), saved.to_dense())


@pytest.mark.parametrize("form", ["csr", "csc", "bsr", "bsc"])
def test_a_compressed_tensor_with_another_number_of_elements_is_refused_by_name(tmp_path, form):
    fastckpt.save({"a": SPARSE[form](values(1)), "beside": torch.ones(3)}, tmp_path / "c")
    refused(tmp_path / "c", SPARSE[form](torch.eye(*SHAPE)), "'a' cannot be copied to the tensor in the state")


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4], ids=str)
def test_a_tensor_of_packed_integers_which_torch_cannot_copy_is_refused_by_name(tmp_path, dtype):
    fastckpt.save(
        {"a": per_channel(values(1), zeros=ZEROS.float(), dtype=dtype), "beside": torch.ones(3)}, tmp_path / "c"
    )
    refused(
        tmp_path / "c",
        per_channel(values(2), zeros=ZEROS.float(), dtype=dtype),
        "'a' cannot be copied to the tensor in the state",
    )


def test_the_quantizer_of_an_alias_stays_right(tmp_path):
    module = torch.nn.Module()
    module.register_buffer("a", QUANTIZED["per tensor"](values(2)))
    fastckpt.save({"a": QUANTIZED["per tensor"](values(1)), "beside": torch.ones(3)}, tmp_path / "c")
    loaded(tmp_path / "c", module.state_dict()["a"])
    assert torch.equal(module.a.dequantize(), QUANTIZED["per tensor"](values(1)).dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("strides", [(1, 1), (2, 3), (5, 1), (0, 0), (1, 0)])
@pytest.mark.parametrize("saved", ["dense", "repeated"])
def test_a_tensor_whose_elements_share_memory_is_refused_by_name(tmp_path, saved, strides, dtype):
    fastckpt.save({"a": FORMS[saved](values(1)), "beside": torch.ones(3)}, tmp_path / "c")
    template = torch.full((30,), 7, dtype=dtype).as_strided(SHAPE, strides)
    refused(tmp_path / "c", template, "elements of the tensor in the state share memory")
    assert (template == 7).all()


def load_on_ranks(path):
    """Load on all ranks, though the last has a tensor that cannot be filled; return the error and the other tensor."""
    last = dist.get_rank() == dist.get_world_size() - 1
    state = {"a": torch.zeros(30).as_strided(SHAPE, (1, 1)) if last else torch.zeros(SHAPE), "beside": torch.zeros(3)}
    try:
        dcp.load(state, storage_reader=Reader(path, ranks=Ranks(timeout=60)))
    except dcp.api.CheckpointException as error:
        return str(error), state["beside"].tolist()
    return "", state["beside"].tolist()


def test_a_tensor_that_cannot_be_filled_on_one_rank_fails_all_before_a_byte_is_read(forge, tmp_path):
    fastckpt.save({"a": values(1), "beside": torch.ones(3)}, tmp_path / "c")
    with forge.group(2) as group:
        for text, beside in group.run(load_on_ranks, tmp_path / "c"):
            assert "load: 'a': elements of the tensor in the state share memory" in text
            assert beside == [0, 0, 0]


def test_a_tensor_under_two_keys_gets_one_value_or_is_refused(tmp_path):
    fastckpt.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.zeros(2)}, tmp_path / "c")
    tied = torch.zeros(2)
    dcp.load({"a": tied, "b": tied}, storage_reader=Reader(tmp_path / "c"))
    assert torch.equal(tied, torch.ones(2))
    with pytest.raises(dcp.api.CheckpointException, match="'b' and 'c' are one tensor in the state, and differ"):
        dcp.load({"a": torch.zeros(2), "b": tied, "c": tied}, storage_reader=Reader(tmp_path / "c"))
    assert torch.equal(tied, torch.ones(2))


def test_tensors_in_one_memory_that_do_not_overlap_are_filled(tmp_path):
    fastckpt.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "c")
    memory = torch.full((8,), 5.0)
    dcp.load({"a": memory[::2][:3], "b": memory[1::2][:3]}, storage_reader=Reader(tmp_path / "c"))
    assert memory.tolist() == [1, 0, 1, 0, 1, 0, 5, 5]


class Plain(torch.Tensor):
    """A subclass of Tensor."""


def flat_beside_views(memory, flat="a"):
    # torch fills tensors in the order of the keys.
    return {flat: memory, "b": memory[:12].view(3, 4), "c": memory[12:]}


def autoencoder(memory):
    encoder, decoder = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)
    encoder.weight = torch.nn.Parameter(memory.view(6, 4))
    decoder.weight = torch.nn.Parameter(encoder.weight.t())
    return {"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}


def in_inference(memory):
    with torch.inference_mode():
        weight = memory.clone().view(SHAPE)
        return {"a": weight, "b": weight.t()}


#: States in which tensors share the memory of 24 numbers.
SHARING = {
    "a flat buffer beside views": flat_beside_views,
    "views beside a flat buffer": lambda memory: flat_beside_views(memory, "d"),
    "transposed": lambda memory: {"a": memory.view(SHAPE), "b": memory.view(SHAPE).t()},
    "transposed parameters": autoencoder,
    "transposed in inference mode": in_inference,
    "flattened": lambda memory: {"a": memory.view(SHAPE), "b": memory},
    "real and complex": lambda memory: {"a": torch.view_as_complex(memory.view(12, 2)), "b": memory.view(12, 2)},
    "conjugate": lambda memory: {
        "a": torch.view_as_complex(memory.view(12, 2)),
        "b": torch.view_as_complex(memory.view(12, 2)).conj(),
    },
    "integers": lambda memory: {"a": memory, "b": memory.view(torch.int32)},
    "a dimension of size 1": lambda memory: {"a": memory.view(1, 24), "b": memory.as_strided((1, 24), (1, 1))},
    "a single element": lambda memory: {"a": memory, "b": memory[::2][3:4]},
    "one object": lambda memory: {"a": memory, "b": memory, "c": memory.view(SHAPE)},
    "expanded": lambda memory: {"a": memory.view(1, 24).expand(2, 24), "b": memory},
    "a subclass": lambda memory: {"a": memory.as_subclass(Plain), "b": memory},
    "parts of a subclass": lambda memory: {"a": memory.as_subclass(Plain)[:15], "b": memory.as_subclass(Plain)[9:]},
}


def entries(state):
    """Copies of all tensors of a state, by their keys."""
    return {
        key: value.detach().clone().as_subclass(torch.Tensor) for key, value in flatten_state_dict(state)[0].items()
    }


@pytest.mark.parametrize("saved", ["tied", "apart"])
@pytest.mark.parametrize("form", SHARING)
def test_tensors_that_share_memory_are_filled_if_they_agree_in_the_checkpoint(tmp_path, form, saved):
    numbers = torch.arange(24.0) * 3 + 1
    wanted = entries(SHARING[form](numbers.clone()))
    # The expanded tensor is always saved as an expanded tensor.
    source = wanted if saved == "apart" and form != "expanded" else SHARING[form](numbers)
    if form.endswith("a subclass"):
        source = wanted
    dcp.save(source, storage_writer=Writer(tmp_path / "c"))
    template = SHARING[form](torch.zeros(24))
    dcp.load(template, storage_reader=Reader(tmp_path / "c"))
    found = entries(template)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


#: Pairs of values that fill one tensor from two keys: of one kind and sizes, and equal or not.
TIED = {
    "expanded": lambda dense: dense[:1].expand(SHAPE),
    "dtypes": lambda dense: dense.bfloat16(),
    **SPARSE,
    "per tensor": QUANTIZED["per tensor"],
    "per channel": per_channel,
}


@pytest.mark.parametrize("form", TIED)
def test_a_tensor_of_any_form_under_two_keys_gets_one_value_or_is_refused(tmp_path, form):
    like = "dense" if form in {"expanded", "dtypes"} else form
    for other in (1, 3):
        second = values(other) if form == "dtypes" else TIED[form](values(other))
        fastckpt.save({"a": TIED[form](values(1)), "b": second}, tmp_path / f"{other}")
        template = FORMS[like](values(2))
        state = {"a": template, "b": template}
        if other == 1:
            dcp.load(state, storage_reader=Reader(tmp_path / f"{other}"))
            assert torch.equal(
                *[one.dequantize() if one.is_quantized else one.to_dense() for one in (template, second)]
            )
        else:
            with pytest.raises(dcp.api.CheckpointException, match="'a' and 'b' share memory in the state, and differ"):
                dcp.load(state, storage_reader=Reader(tmp_path / f"{other}"))


def test_sparse_templates_without_elements_under_two_keys_are_refused_if_they_differ(tmp_path):
    fastckpt.save({"a": torch.eye(3).to_sparse(), "b": 2 * torch.eye(3).to_sparse()}, tmp_path / "c")
    template = torch.zeros(3, 3).to_sparse()
    with pytest.raises(dcp.api.CheckpointException, match="'a' and 'b' share memory in the state, and differ"):
        dcp.load({"a": template, "b": template}, storage_reader=Reader(tmp_path / "c"))


@pytest.mark.parametrize("form", SHARING)
def test_tensors_that_share_memory_are_refused_if_they_differ_in_the_checkpoint(tmp_path, form):
    saved = entries(SHARING[form](torch.arange(24.0)))
    *_, last = saved
    saved[last] += 1
    expanded = {"a": saved["a"][:1].expand(2, 24)} if form == "expanded" else {}
    dcp.save({**saved, **expanded}, storage_writer=Writer(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match=f"'{last}'.* in the state, and differ in the checkpoint"):
        dcp.load(SHARING[form](torch.zeros(24)), storage_reader=Reader(tmp_path / "c"))


def load_shared_on_ranks(path):
    """Load on all ranks, the last of which has both tensors in one memory; return the error and the values."""
    last = dist.get_rank() == dist.get_world_size() - 1
    weight = torch.zeros(SHAPE)
    state = {"a": weight, "b": weight.t() if last else torch.zeros(SHAPE).t()}
    try:
        dcp.load(state, storage_reader=Reader(path, ranks=Ranks(timeout=60)))
    except dcp.api.CheckpointException as error:
        return str(error), None
    return "", [state["a"], state["b"].t()]


def test_ranks_that_load_together_fill_tensors_that_share_memory_or_fail_together(forge, tmp_path):
    fastckpt.save({"a": values(1), "b": values(1).t().contiguous()}, tmp_path / "c")
    fastckpt.save({"a": values(1), "b": values(3).t().contiguous()}, tmp_path / "d")
    with forge.group(2) as group:
        for text, found in group.run(load_shared_on_ranks, tmp_path / "c"):
            assert text == ""
            assert all(torch.equal(one, values(1)) for one in found)
        assert all(
            "'a' and 'b' share memory in the state, and differ" in text
            for text, _ in group.run(load_shared_on_ranks, tmp_path / "d")
        )


def test_the_error_names_the_two_of_many_that_differ(tmp_path):
    saved = entries(flat_beside_views(torch.arange(24.0)))
    saved["c"] += 1
    dcp.save(saved, storage_writer=Writer(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match="'a' and 'c' share memory") as raised:
        dcp.load(flat_beside_views(torch.zeros(24)), storage_reader=Reader(tmp_path / "c"))
    assert "'b'" not in str(raised.value.failures[0][0])


def test_an_expanded_tensor_and_a_view_of_its_target_are_refused(tmp_path):
    fastckpt.save({"x": torch.tensor([[1.0], [2.0]]).expand(2, 3), "y": torch.zeros(3)}, tmp_path / "c")
    whole = torch.zeros(2, 3)
    with pytest.raises(dcp.api.CheckpointException, match="'x' and 'y' share memory in the state, and differ"):
        dcp.load({"x": whole, "y": whole[1]}, storage_reader=Reader(tmp_path / "c"))


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_a_subclass_whose_elements_share_memory_is_refused_by_name(tmp_path, strides):
    fastckpt.save({"a": values(1), "beside": torch.ones(3)}, tmp_path / "c")
    template = torch.zeros(30).as_strided(SHAPE, strides).as_subclass(Plain)
    refused(tmp_path / "c", template, "elements of the tensor in the state share memory")


@pytest.mark.parametrize("saved", [torch.eye(3).to_sparse(), torch.ones(1, 3).expand(3, 3)], ids=["sparse", "expanded"])
def test_a_refusal_of_a_tensor_of_several_changes_nothing(tmp_path, saved):
    fastckpt.save({"a": saved, "beside": torch.ones(3), "n": 5}, tmp_path / "c")
    template = torch.zeros(3, 3)
    state = {"a": template if saved.is_sparse else template.to_sparse(), "beside": torch.zeros(3), "n": 0}
    with pytest.raises(dcp.api.CheckpointException, match=r"'a' is a .* in the checkpoint, and a .* in the state"):
        dcp.load(state, storage_reader=Reader(tmp_path / "c"))
    assert state["beside"].tolist() == [0, 0, 0]
    assert state["n"] == 0


class Larger(DefaultLoadPlanner):
    """A planner that gives a tensor with more rows than are requested, under another key."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [replace(item, dest_index=replace(item.dest_index, fqn="mine")) for item in plan.items]
        return replace(plan, items=items)

    def resolve_tensor(self, _):
        return torch.zeros(5, 3)


@pytest.mark.parametrize("saved", [torch.ones(1, 1).expand(1, 3), torch.ones(1, 3)], ids=["expanded", "dense"])
def test_a_tensor_of_other_sizes_is_refused_by_its_key_in_the_state(tmp_path, saved):
    fastckpt.save({"a": saved}, tmp_path / "c")
    with pytest.raises(dcp.api.CheckpointException, match=r"'mine': a box of the sizes \[1, 3\] was requested"):
        dcp.load({"a": torch.zeros(1, 3)}, storage_reader=Reader(tmp_path / "c"), planner=Larger())


class OutOfMemory(torch.Tensor):
    """A tensor whose copy raises an error for lack of memory."""

    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            raise cls.error
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "error", [OutOfMemory.error, torch.cuda.OutOfMemoryError("CUDA out of memory")], ids=["cpu", "gpu"]
)
def test_memory_that_has_run_out_is_no_mismatch(tmp_path, monkeypatch, error):
    fastckpt.save({"a": torch.ones(3)}, tmp_path / "c")
    monkeypatch.setattr(OutOfMemory, "error", error)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.load({"a": torch.zeros(3).as_subclass(OutOfMemory)}, storage_reader=Reader(tmp_path / "c"))
    assert raised.value.failures[0][0] is error
