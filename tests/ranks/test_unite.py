"""Tables of ranks that differ become one: pipeline and expert stages, meshes beside each other, what is per rank."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fastckpt import UnsupportedTypeError
from fastckpt._ranks.offers import combine_arrivals, combine_offers
from fastckpt._state.builders import StateBuilder
from fastckpt._state.flatten import flatten
from fastckpt._state.unflatten import parse, unflatten
from fastckpt._tensors.spread import Spread
from harness.internals import Agreement, local_of


def tree(combine, values, fan):
    """Combine values as a tree of ranks does: each node its own first, then its children in their order."""
    values = [json.loads(json.dumps(value)) if not isinstance(value, bytes) else value for value in values]
    while len(values) > 1:
        values = [combine(values[at : at + fan]) for at in range(0, len(values), fan)]
    return combine(values)


def agree(states, *, fan=3, extras=None, **options):
    """What each rank knows once all have agreed, and whether their tables had to be sent."""
    size = len(states)
    agreements = [
        local_of(state, rank, range(size), per_rank=None if extras is None else extras[rank], **options)
        for rank, state in enumerate(states)
    ]
    verdict = agreements[0].decide(tree(combine_arrivals, [each.arrival() for each in agreements], fan))
    verdict = json.loads(json.dumps(verdict))
    answer = None
    if agreements[0].is_open(verdict):
        answer = agreements[0].unite(tree(combine_offers, [each.offer(verdict) for each in agreements], fan))
    agreed = [each.settle(verdict, answer) for each in agreements]
    for each in agreed[1:]:
        assert (each.tensors, each.spreads, each.prefix) == (agreed[0].tensors, agreed[0].spreads, agreed[0].prefix)
        assert each.structure is None
    check_held(agreed)
    return agreed, verdict[0]


def check_held(agreed):
    """Each rank holds what the spreads say, and only that."""
    for rank, each in enumerate(agreed):
        held = {(tensor, part) for tensor, part, _, _ in each.held}
        assert len(held) == len(each.held)
        for number, tensor in enumerate(each.tensors):
            parts = [each.spreads[index] for index in tensor.spreads if rank in each.spreads[index].ranks]
            mine = [part for which, part in held if which == number]
            assert len(mine) <= len(parts)
            if np.prod(tensor.shape, dtype=int) and not any(part.mesh for part in parts):
                assert len(mine) == len(parts)


def holders(agreed, name):
    """The ranks that have a tensor whole."""
    (tensor,) = [one for one in agreed.tensors if one.name == name]
    (number,) = tensor.spreads
    assert not agreed.spreads[number].mesh
    return agreed.spreads[number].ranks


def state_of(agreed):
    """The state that the coordinator will name in the manifest, with a name for each tensor."""

    class Names(StateBuilder):
        def tensor(self, token):
            return f"<{agreed.tensors[token[1]].name}>"

    tokens = parse(agreed.structure)
    unflatten(tokens, Names("numpy", ()))
    return unflatten(tokens, Names("numpy", ()))


def test_equal_tables_are_not_sent():
    (first, second), verdict = agree([{"model": {"w": torch.ones(2)}, "step": 1} for _ in range(2)])
    assert verdict == "equal"
    assert holders(first, "model.w") == (0, 1)
    assert first.prefix == "model."
    assert [each.tensor for each in second.held] == [0]


def pipeline(stage, *, flat=False):
    own = {f"layers.{stage}.{name}": torch.full((stage + 2,), 1.0) for name in ("weight", "bias")}
    optimizer = {
        "state": {name: {"step": torch.tensor(3.0), "exp_avg": value} for name, value in own.items()},
        "param_groups": [{"lr": 0.1, "params": list(own)}, {"lr": 0.2, "params": []}],
    }
    if flat:
        optimizer = {
            **{f"state.{name}.exp_avg": value for name, value in own.items()},
            **{f"param_groups.{name}.lr": 0.1 for name in own},
        }
    return {"model": {"embed": torch.ones(3), **own}, "optimizer": optimizer, "step": 7}


@pytest.mark.parametrize("flat", [False, True])
def test_stages_of_a_pipeline(flat):
    agreed, verdict = agree([pipeline(rank // 2, flat=flat) for rank in range(4)])
    assert verdict == "tables"
    first = agreed[0]
    assert holders(first, "model.embed") == (0, 1, 2, 3)
    assert holders(first, "model.layers.1.bias") == (2, 3)
    names = {tensor.name for tensor in first.tensors}
    state = state_of(first)
    both = [f"layers.{stage}.{name}" for stage in (0, 1) for name in ("weight", "bias")]
    assert list(state["model"]) == ["embed", *both[:2], *both[2:]]
    assert first.prefix == "model."
    if flat:
        assert set(state["optimizer"]) == {f"state.{n}.exp_avg" for n in both} | {f"param_groups.{n}.lr" for n in both}
    else:
        assert state["optimizer"]["param_groups"] == [{"lr": 0.1, "params": both}, {"lr": 0.2, "params": []}]
        assert holders(first, "optimizer.state.layers.0.bias.step") == (0, 1)
        # The optimizer's state shares memory with the model here: it is stored once, under the model's name.
        assert "optimizer.state.layers.0.bias.exp_avg" not in names
    assert [one.tensor for one in agreed[0].held] != [one.tensor for one in agreed[2].held]


values = st.one_of(st.integers(-3, 3), st.booleans(), st.none(), st.text("ab", max_size=2), st.floats(-1, 1))
leaves = st.one_of(values, st.integers(1, 5).map(lambda size: ("tensor", size)))
states = st.recursive(
    st.dictionaries(st.text("abc.", min_size=1, max_size=3), leaves, max_size=4),
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.text("abc.", min_size=1, max_size=3), st.integers(0, 2)), inner, max_size=4),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


def made(state, memory):
    """The state, with tensors; ``memory`` keeps one for each place."""
    if isinstance(state, dict):
        return {key: made(value, memory) for key, value in state.items()}
    if isinstance(state, list):
        return [made(value, memory) for value in state]
    if isinstance(state, tuple) and state and state[0] == "tensor":
        memory.append(torch.zeros(state[1]))
        return memory[-1]
    return tuple(made(value, memory) for value in state) if isinstance(state, tuple) else state


def thinned(state, drop):
    """The state without some keys of its mappings, in another order."""
    if isinstance(state, dict):
        items = [(key, thinned(value, drop)) for key, value in state.items() if drop.random() < 0.7]
        drop.shuffle(items)
        return dict(items)
    if isinstance(state, list):
        return [thinned(value, drop) for value in state]
    if isinstance(state, tuple) and not (state and state[0] == "tensor"):
        return tuple(thinned(value, drop) for value in state)
    return state


def shown(state):
    """A state with the shapes of its tensors for these."""
    if isinstance(state, dict):
        return {key: shown(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(shown, state))
    return f"<{tuple(state.shape)}>" if isinstance(state, torch.Tensor) else state


@given(states, st.integers(0, 1 << 30), st.integers(2, 5), st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_what_is_cut_apart_is_united(state, seed, size, fan):
    drop = random.Random(seed)
    # The last rank has everything.
    parts = [made(thinned(state, drop), []) for _ in range(size - 1)]
    whole = made(state, [])
    agreed, _ = agree([*parts, whole], fan=fan, model_key=None)
    first = agreed[0]
    flat = flatten(whole)
    assert sorted(map(tuple, (tensor.shape for tensor in first.tensors))) == sorted(
        tuple(tensor.shape) for tensor in flat.tensors
    )
    assert len({tensor.name for tensor in first.tensors}) == len(first.tensors)

    class Shapes(StateBuilder):
        def tensor(self, token):
            return f"<{tuple(first.tensors[token[1]].shape)}>"

    assert unflatten(parse(first.structure), Shapes("numpy", ())) == shown(whole)
    clash = any("~" in tensor.name for tensor in first.tensors)
    for each, part in zip(agreed, [*parts, whole], strict=True):
        mine = flatten(part)
        assert len(each.held) == len(mine.tensors)
        names = {first.tensors[one.tensor].name: one.address for one in each.held}
        assert clash or names == {tensor.name: tensor.address for tensor in mine.tensors}


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"a": {"lr": 0.1}}, {"a": {"lr": 0.2}}, r"\['a'\]\['lr'\]: 0\.1 on ranks 0, 1, 0\.2 on rank 2"),
        ({"a": 1}, {"a": 1.0}, r"\['a'\]: 1 on ranks 0, 1, 1\.0 on rank 2"),
        ({"a": 1}, {"a": True}, r"\['a'\]: 1 on ranks 0, 1, True on rank 2"),
        ({"a": None}, {"a": "x" * 200}, r"\['a'\]: None on ranks 0, 1, 'x{39}\.\.\.x{19}' on rank 2"),
        ({"a": [1, 2]}, {"a": [1]}, r"\['a'\]: a list of 2 on ranks 0, 1, a list of 1 on rank 2"),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, r"\['a'\]\[0\]\['b'\]: 1 on"),
        ({"a": (1,)}, {"a": [1]}, r"\['a'\]: a tuple of 1 on .* a list of 1 on"),
        ({"a": {}}, {"a": OrderedDict()}, r"\['a'\]: a dict of 0 on .* an OrderedDict of 0 on"),
        ({"a": defaultdict(int)}, {"a": defaultdict(list)}, r"\['a'\]: 'int' on .* 'list' on"),
        ({"a": {1}}, {"a": {2}}, r"\['a'\]\[0\]: 1 on"),
        ({3: {"b": 1}}, {3: {"b": 2}}, r"\[3\]\['b'\]: 1 on"),
        ({(1, "x"): 1}, {(1, "x"): 2}, r"1 on ranks 0, 1, 2 on rank 2"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, r"\['a'\]: a tensor of F32 \[2\] on .* a tensor of F32 \[3\] on"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).half()}, r"a tensor of F32 \[2\] on .* a tensor of F16 \[2\] on"),
        ({"a": torch.ones(2)}, {"a": 5}, r"a tensor of F32 \[2\] on ranks 0, 1, 5 on rank 2"),
        ({"a": torch.ones(2)}, {"a": np.ones(2, np.float32)}, r"a tensor .* on rank"),
        ({"a": math.nan}, {"a": 0.5}, r"\['a'\]: nan on ranks 0, 1, 0\.5 on rank 2"),
        ({"a": 0.0}, {"a": -0.0}, r"\['a'\]: 0\.0 on ranks 0, 1, -0\.0 on rank 2"),
        ({"a": 2**53}, {"a": 2**53 + 1}, r"\['a'\]: 9007199254740992 on .*, 9007199254740993 on"),
        ({"a": 1j}, {"a": 2j}, r"\['a'\]: 1j on ranks 0, 1, 2j on rank 2"),
        ({"a": np.int8(1)}, {"a": np.int8(2)}, r"\['a'\]: .*1\)? on ranks 0, 1, .*2\)? on rank 2"),
        ({"a": b"x"}, {"a": b"y"}, r"\['a'\]: b'x' on ranks 0, 1, b'y' on rank 2"),
        ({"a": {1}}, {"a": frozenset({1})}, r"\['a'\]: a set of 1 on .* a frozenset of 1 on"),
        ({"a": torch.Size([1])}, {"a": torch.Size([2])}, r"\['a'\]: \(1,\) on .* \(2,\) on"),
        ({"param_groups": [{"params": ["x", 1]}]}, {"param_groups": [{"params": ["x"]}]}, r"a list of 2 on"),
    ],
)
def test_what_differs_is_named(one, other, text):
    with pytest.raises(ValueError, match=rf"^save: the states of the ranks do not fit.* per_rank= of .*:(\n.*)*{text}"):
        agree([one, one, other])


def test_all_differences_are_counted():
    one, other = ({f"k{index}": value for index in range(40)} for value in (1, 2))
    with pytest.raises(ValueError, match=r"\['k0'\].*\n.*\['k1'\](.*\n)*.*and 30 more$"):
        agree([one, other])


def test_nan_equals_nan():
    agreed, verdict = agree([{"a": math.nan, "b": 1}, {"a": math.nan, "c": 1}])
    assert verdict == "tables"
    assert math.isnan(state_of(agreed[0])["a"])


def test_flags_are_those_of_the_first_rank():
    grown = [{"a": torch.ones(2).requires_grad_(rank == 0)} for rank in range(2)]
    agreed, verdict = agree(grown)
    assert verdict == "tables"
    assert agreed[0].structure == '[["dict",1],"a",["tensor",0,"g"]]'


def test_names_that_only_the_union_needs():
    """Two places that make one name are one tensor's place each, and the second gets another name."""
    agreed, _ = agree([{"a": {"b": torch.ones(2)}}, {"a.b": torch.zeros(2)}])
    assert [tensor.name for tensor in agreed[0].tensors] == ["a.b", "a.b~1"]
    assert [[one.tensor for one in each.held] for each in agreed] == [[0], [1]]


def test_ties():
    shared = torch.ones(3)
    tied = {"model": {"embed": shared, "head": shared}}
    # Where all that have both places say so, they are one tensor.
    agreed, _ = agree([tied, {"model": {"head": torch.ones(3)}}])
    assert [tensor.name for tensor in agreed[0].tensors] == ["model.embed"]
    assert holders(agreed[0], "model.embed") == (0, 1)
    assert [[one.tensor for one in each.held] for each in agreed] == [[0], [0]]
    # Where one rank has two tensors, they are two.
    agreed, _ = agree([tied, {"model": {"embed": torch.ones(3), "head": torch.ones(3)}}])
    assert [tensor.name for tensor in agreed[0].tensors] == ["model.embed", "model.head"]
    assert [[one.tensor for one in each.held] for each in agreed] == [[0, 1], [0, 1]]
    # A tensor has the name of its first place in the union, whatever comes first on the rank that has it.
    agreed, _ = agree([{"z": {"x": 1}, "a": {"x": 2}}, {"a": {"w": shared}, "z": {"w": shared}}])
    assert [tensor.name for tensor in agreed[0].tensors] == ["z.w"]
    assert [[one.tensor for one in each.held] for each in agreed] == [[], [0]]
    # The model's name is the one that is stored, wherever the first place is.
    early = {"ema": {"head": shared}, "model": {"head": shared}}
    agreed, _ = agree([early, {"model": {"other": torch.ones(2)}}])
    assert [tensor.name for tensor in agreed[0].tensors] == ["model.head", "model.other"]
    assert state_of(agreed[0])["ema"]["head"] == "<model.head>"


def test_the_model_of_the_union():
    """One stage may have no tensor of the model."""
    agreed, _ = agree([{"model": {}, "x": {"y": torch.ones(1)}}, {"model": {"w": torch.ones(2)}, "x": {}}])
    assert agreed[0].prefix == "model."
    with pytest.raises(ValueError, match=r"model_key='net'.*give one of 'model', 'x'"):
        agree([{"model": {}, "x": {"y": torch.ones(1)}}, {"model": {"w": torch.ones(2)}, "x": {}}], model_key="net")
    agreed, _ = agree([{7: {"w": torch.ones(1)}}, {7: {"v": torch.ones(1)}}], model_key=7)
    assert agreed[0].prefix == "7."


def test_modules_as_stages():
    """An OrderedDict with attributes, as modules give it: its ``_metadata`` is united, too."""
    stages = [torch.nn.Sequential(OrderedDict([(f"l{rank}", torch.nn.Linear(2, 2))])).state_dict() for rank in (0, 1)]
    agreed, _ = agree([{"model": each} for each in stages])
    state = state_of(agreed[0])["model"]
    assert list(state) == ["l0.weight", "l0.bias", "l1.weight", "l1.bias"]
    assert set(state._metadata) == {"", "l0", "l1"}


def test_odd_keys():
    key = (1, "x")
    agreed, _ = agree([{key: {"a": torch.ones(1)}, None: 1}, {key: {"b": torch.ones(2)}, 2.5: 3}])
    assert state_of(agreed[0]) == {key: {"a": "<(1, 'x').a>", "b": "<(1, 'x').b>"}, None: 1, 2.5: 3}


def test_deep_nesting():
    state = {"a": 1}
    for _ in range(5000):
        state = {"k": state}
    other = {"k": {"k": {"b": torch.ones(1)}}}
    agreed, _ = agree([state, other])
    assert '"b",["tensor",0]' in agreed[0].structure


# What belongs to one rank alone.


def test_per_rank_does_not_make_tables_differ():
    extras = [{"rng": torch.full((4,), float(rank)), "at": rank} for rank in range(3)]
    extras[1] = None
    extras.append({"seed": 5})
    agreed, verdict = agree([{"model": {"w": torch.ones(2)}} for _ in range(4)], extras=extras)
    assert verdict == "equal"
    assert [tensor.name for tensor in agreed[0].tensors] == ["model.w", "per_rank.0.rng", "per_rank.2.rng"]
    assert holders(agreed[0], "per_rank.2.rng") == (2,)
    assert [[one.tensor for one in each.held] for each in agreed] == [[0, 1], [0], [0, 2], [0]]
    assert agreed[0].per_rank == (
        '[["list",4],["dict",2],"rng",["tensor",1],"at",0,null,["dict",2],"rng",["tensor",2],"at",2,["dict",1],"seed",5]'
    )
    assert agreed[2].pulled == 0


def test_per_rank_beside_tables_that_differ_and_names_that_are_taken():
    states = [{"per_rank": {"0": {"x": torch.ones(1)}}, f"k{rank}": torch.ones(2)} for rank in range(2)]
    agreed, _ = agree(states, extras=[{"x": torch.ones(3)}, {"x": torch.ones(3)}])
    assert [tensor.name for tensor in agreed[0].tensors] == [
        *("per_rank.0.x", "k0", "k1"),
        *("per_rank.0.x~1", "per_rank.1.x"),
    ]


def test_per_rank_holds_no_dtensors_and_equal_ones_travel_once():
    agreements = [local_of({}, rank, range(64), per_rank={"rng": torch.zeros(100)}) for rank in range(64)]
    offers = [each.offer(["equal", True]) for each in agreements]
    united = agreements[0].unite(combine_offers(offers))
    assert len(united) < 200
    assert len(combine_offers(offers)) < 64 * 120


# With meshes.


def _beside() -> None:
    """Tensor parallel groups beside each other differ in their meshes alone."""
    rank = dist.get_rank()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(12.0).reshape(4, 3)
    state = {"w": distribute_tensor(full, square["tp"], [Shard(0)]), "b": torch.ones(2)}
    agreement = local_of(state, rank, range(4))
    verdict, answer = _rounds(agreement)
    assert verdict == ["cuts", False]
    agreed = agreement.settle(verdict, answer)
    spread = ("shard", 0, 0)
    w, b = agreed.tensors
    assert [agreed.spreads[number] for number in w.spreads] == [
        Spread((0, 1), (2,), (spread,)),
        Spread((2, 3), (2,), (spread,)),
    ]
    assert [agreed.spreads[number] for number in b.spreads] == [Spread((0, 1, 2, 3))]
    assert [one.nbytes for one in agreed.held] == [24, 8]


def _rounds(agreement: Agreement):
    """Both rounds over a gloo group."""
    arrivals: list = [None] * dist.get_world_size()
    dist.all_gather_object(arrivals, agreement.arrival())
    verdict = agreement.decide(combine_arrivals(arrivals))
    answer = None
    if agreement.is_open(verdict):
        offers: list = [None] * dist.get_world_size()
        dist.all_gather_object(offers, agreement.offer(verdict))
        answer = agreement.unite(combine_offers(offers))
    return verdict, answer


def _not_all_of_a_mesh() -> None:
    rank = dist.get_rank()
    value = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (4,)), [Shard(0)])
    agreement = local_of({"w": value} if rank != 2 else {}, rank, range(4))
    with pytest.raises(
        ValueError, match=r"\['w'\]: a DTensor over ranks 0, 1, 2, 3 on ranks 0, 1, 3, no such on rank 2"
    ):
        _rounds(agreement)


def _shapes_that_from_local_guessed() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    value = DTensor.from_local(torch.ones(1 if rank == 3 else 2, 3), mesh, [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match=r"needs shape= and stride=.*\n  \['w'\]: .*\[8, 3\] on .*\[4, 3\] on rank 3$"):
        _rounds(local_of({"w": value}, rank, range(4)))


def _stages_with_meshes() -> None:
    """Pipeline over FSDP, with the states that torch makes of modules and optimizers."""
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    stage = rank // 2
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "dp"))["dp"]
    torch.manual_seed(stage)
    model = torch.nn.Sequential(OrderedDict([(f"stage{stage}", torch.nn.Linear(3, 5 + stage))]))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }
        agreement = local_of(state, rank, range(4))
        agreed = agreement.settle(*_rounds(agreement))
        names = {tensor.name: tensor for tensor in agreed.tensors}
        assert agreed.prefix == "model."
        for at in (0, 1):
            tensor = names[f"model.stage{at}.weight"]
            assert tensor.shape == (5 + at, 3)
            assert [agreed.spreads[number].ranks for number in tensor.spreads] == [(2 * at, 2 * at + 1)]
            step = names[f"optim.state.stage{at}.weight.step"]
            assert [agreed.spreads[number] for number in step.spreads] == [Spread((2 * at, 2 * at + 1))]
        assert {agreed.tensors[one.tensor].name.split("stage")[1][0] for one in agreed.held} == {str(stage)}
        if rank == 0 and not flat:
            structure = state_of(agreed)
            assert structure["optim"]["param_groups"][0]["params"] == [
                f"stage{at}.{name}" for at in (0, 1) for name in ("weight", "bias")
            ]


@pytest.mark.parametrize(
    "case",
    [_beside, _not_all_of_a_mesh, _shapes_that_from_local_guessed, _stages_with_meshes],
    ids=lambda case: case.__name__.strip("_"),
)
def test_meshes(forge, case):
    with forge.group(4) as group:
        group.run(case)


def _per_rank_with_dtensors() -> None:
    value = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(UnsupportedTypeError, match=r"save: per_rank: cannot store \['w'\]: a DTensor is spread over"):
        local_of({}, 0, [0], per_rank={"w": value})


def test_what_is_per_rank_is_not_spread(forge):
    with forge.group(1) as group:
        group.run(_per_rank_with_dtensors)
