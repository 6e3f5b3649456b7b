"""``into=``: containers are updated in place, and the result is the given object."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import enum
import tempfile
import types
import typing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt import StructureMismatchError
from harness.reports import with_report
from harness.same import same


@dataclasses.dataclass
class Progress:
    epoch: int
    seen: list
    best: dict


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int


class Pair(typing.NamedTuple):
    left: object
    right: object


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


class Table(dict):
    pass


class Row(list):
    pass


KNOWN = fastckpt.Registry(Progress, Frozen, Pair, Phase, Table, Row)


@pytest.fixture
def saved(tmp_path):
    def go(state):
        fastckpt.save(state, tmp_path / "c", registry=KNOWN)
        return tmp_path / "c"

    return go


def load(path, into, **how):
    return fastckpt.load(path, into=into, registry=KNOWN, **how)


def test_values_arrive_where_they_were_asked_for(saved):
    state = {"w": torch.ones(2), "step": 7, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}], "new": {"x": [1]}}
    into = {"w": torch.zeros(2), "step": 0, "groups": [{"lr": 1.0, "betas": (0.0, 0.0)}]}
    w, groups, group = into["w"], into["groups"], into["groups"][0]
    assert load(saved(state), into) is into
    assert same(into, state)
    assert into["w"] is w
    assert into["groups"] is groups
    assert groups[0] is group


def test_each_kind_of_container(saved):
    state = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, x=[1]),
        "table": Table(x={"y": 1}),
        "row": Row([1, [2]]),
        "progress": Progress(3, [1, 2, 3], {"loss": 0.5}),
        "space": types.SimpleNamespace(a=1, b=[2]),
        "arguments": argparse.Namespace(lr=0.1),
        "deep": [[[{"x": 1}]]],
    }
    into = {
        "ordered": collections.OrderedDict(a=0, b=0),
        "default": collections.defaultdict(int, x=[]),
        "table": Table(x={"y": 0, "gone": 1}, gone=1),
        "row": Row([0, [0, 0], 0]),
        "progress": Progress(0, [], {"loss": 1.0, "gone": 2}),
        "space": types.SimpleNamespace(a=0, b=[0], gone=1),
        "arguments": argparse.Namespace(lr=0.0),
        "deep": [[[{"x": 0}]]],
    }
    into["table"].note = into["progress"].note = "gone"
    before = dict(into)
    inner = [into["table"]["x"], into["row"][1], into["progress"].seen, into["progress"].best, into["space"].b]
    assert load(saved(state), into) is into
    assert same(into, state)
    assert list(into["ordered"]) == ["b", "a"]
    assert into["default"].default_factory is list
    assert not hasattr(into["table"], "note")
    assert not hasattr(into["progress"], "note")
    assert all(into[key] is value for key, value in before.items())
    after = [into["table"]["x"], into["row"][1], into["progress"].seen, into["progress"].best, into["space"].b]
    assert all(one is other for one, other in zip(inner, after, strict=True))


def test_what_is_immutable_is_replaced_in_what_holds_it(saved):
    state = {"pair": Pair([1], 2), "tuple": ([1], 2), "frozen": Frozen(1), "phase": Phase.COLD, "set": {1}, "n": None}
    into = {"pair": Pair([0], 0), "tuple": ([0], 0), "frozen": Frozen(0), "phase": Phase.WARM, "set": {2}, "n": 3}
    lists = into["pair"].left, into["tuple"][0]
    frozen = into["frozen"]
    assert load(saved(state), into) is into
    assert same(into, state)
    assert (into["pair"].left, into["tuple"][0]) == lists
    assert into["pair"].left is lists[0]
    assert into["tuple"][0] is lists[1]
    assert frozen == Frozen(0)
    # A tuple whose items were all updated in place stays the same object.
    root = ({"n": 0}, [torch.zeros(2)])
    assert load(saved(({"n": 1}, [torch.ones(2)])), root) is root
    assert same(root, ({"n": 1}, [torch.ones(2)]))


def test_the_state_of_a_module_and_its_versions(saved):
    source, target = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    source(torch.randn(4, 2))
    into = target.state_dict()
    into._metadata = {"": {"version": 1}}
    assert load(saved(source.state_dict()), into) is into
    assert same(into, source.state_dict())
    assert into._metadata == source.state_dict()._metadata
    assert same(target.state_dict(), source.state_dict())
    # Attributes are not values of the state: a checkpoint without them fits.
    ordered = collections.OrderedDict((key, value.clone()) for key, value in source.state_dict().items())
    assert load(saved(ordered), into) is into
    assert into._metadata == source.state_dict()._metadata


def test_a_value_that_only_into_has(saved):
    path = saved({"w": torch.ones(2), "deep": {"n": 1}})
    into = {"w": torch.zeros(2), "step": 3, "deep": {"n": 0, "more": [1, 2], "odd": print, "m": {"x": 1}, "e": {}}}
    before = copy.copy(into["deep"])
    with pytest.raises(StructureMismatchError, match="nothing was changed") as caught:
        load(path, into)
    places = ("['step']", "['deep']['more']", "['deep']['odd']", "['deep']['m']['x']", "['deep']['e']")
    assert caught.value.differences == tuple(f"{place}: not in the checkpoint" for place in places)
    assert (into["step"], into["deep"]) == (3, before)
    assert not into["w"].any()
    loaded, report = with_report(load, path, into, strict=False)
    assert loaded is into
    assert same(into, {"w": torch.ones(2), "step": 3, "deep": {**before, "n": 1}})
    assert report.missing == ("step", "deep.more", "deep.odd", "deep.m.x", "deep.e")


def test_what_counts_as_a_value(saved):
    path = saved({"w": torch.ones(2)})
    ordered = collections.OrderedDict(inside=1)
    ordered.note = {"x": 1}
    into = {
        "w": torch.zeros(2),
        "empty": {"dict": {}, "list": [], "tuple": (), "set": set(), "default": collections.defaultdict(int)},
        "nested": [[], [[1], {"in": 2}], {3}],
        "bytes": {"short": b"1", "long": bytes(5000)},
        "objects": [Table(x={"y": 1}), Pair(1, {"z": 2})],
        "frozen": Frozen(1),
        "size": torch.Size([1]),
        "slice": slice(1, 2),
        "ordered": ordered,
        (1, 2): {3: 4, b"": 5},
        "tensors": [torch.zeros(1), {"sparse": torch.zeros(2).to_sparse()}],
        "mixed": [torch.zeros(1), 1],
    }
    values = [
        *(f"['empty']['{kind}']" for kind in into["empty"]),
        *(
            "['nested']",
            "['nested'][1][1]['in']",
            "['bytes']['short']",
            "['bytes']['long']",
            "['objects']",
            "['frozen']",
        ),
        *("['size']", "['slice']", "['ordered']['inside']", '[["tuple",2],1,2][3]', '[["tuple",2],1,2][["bytes",""]]'),
        "['mixed']",
    ]
    tensors = ["['tensors'][0]", "['tensors'][1]['sparse']", "['mixed'][0]"]
    with pytest.raises(StructureMismatchError) as caught:
        load(path, into)
    assert sorted(caught.value.differences) == sorted(f"{place}: not in the checkpoint" for place in values + tensors)
    _, report = with_report(load, path, into, strict=False)
    assert len(report.missing) == len(values + tensors)
    assert {"empty.list", "nested.1.1.in", "objects", "(1, 2).3", "tensors.1.sparse"} <= {*report.missing}
    # Only the kind of a container counts, not its items: a list matches a mapping of numbers, too.
    assert same(load(saved({"a": [5], "b": {"x": 1}}), {"a": {0: 1}, "b": [7]}), {"a": [5], "b": {"x": 1}})


def test_a_key_that_cannot_be_stored_hides_no_other(saved):
    path = saved({"a": {"x": 1, "y": 2}})
    into = {"a": {"x": 0, "\ud83d\ude00": 7, "y": 0, "z": 3}}
    with pytest.raises(StructureMismatchError) as caught:
        load(path, into)
    assert caught.value.differences == (
        "['a']['\\ud83d\\ude00']: not in the checkpoint",
        "['a']['z']: not in the checkpoint",
    )
    assert load(path, into, strict=False)["a"] == {"x": 1, "\ud83d\ude00": 7, "y": 2, "z": 3}
    with pytest.raises(
        fastckpt.exceptions.UnsupportedTypeError, match=r"cannot store \['a'\]\['.ud83d.ude00'\]: a string with"
    ):
        saved(into)


def test_a_list_gets_the_length_that_it_had(saved):
    path = saved({"losses": [0.5, 0.25], "short": [1, 2, 3], "all": ()})
    into = {"losses": [0.5, 0.25, 0.125], "short": [1], "all": (1, 2)}
    assert same(load(path, into), {"losses": [0.5, 0.25], "short": [1, 2, 3], "all": ()})
    into["losses"] += [9]
    assert load(path, into, keys="losses")["losses"] == [0.5, 0.25]
    into["losses"] += [9]
    assert load(path, into, keys="losses.0")["losses"] == [0.5, 0.25, 9]
    assert load(path, into, strict=False)["losses"] == [0.5, 0.25, 9]
    path = saved([{"n": 1}])
    with pytest.raises(StructureMismatchError, match=r"\[1\]\['n'\]: not in the checkpoint"):
        load(path, [{"n": 0}, {"n": 0}])


def test_parts_of_lists_keep_their_places(saved):
    path = saved({"a": [1, [2, 3], {"x": 4, "y": 5}], "t": (1, 2)})
    into = {"a": [0, [0, 0], {"x": 0, "y": 0}], "t": (0, 0), "n": 0}
    assert same(
        load(path, into, keys=["a.1.1", "a.2.y", "t.1"]), {"a": [0, [0, 3], {"x": 0, "y": 5}], "t": (0, 2), "n": 0}
    )
    # If into= has no such list, the positions close up.
    assert same(load(path, {"a": None}, keys=["a.1.1", "t.1"]), {"a": [[3]], "t": (2,)})


def test_one_container_at_two_places(saved):
    path = saved({"a": [1, torch.ones(1)], "b": [1, torch.ones(1)], "c": [2, torch.ones(1)]})
    one = [0, torch.zeros(1)]
    into = {"a": one, "b": one, "c": [0, torch.zeros(1)]}
    assert load(path, into) is into
    assert into["a"] is into["b"] is one
    assert one == [1, torch.ones(1)]
    with pytest.raises(StructureMismatchError, match="nothing was changed") as caught:
        load(path, {"a": one, "b": [0, torch.zeros(1)], "c": one})
    assert caught.value.differences == (
        "['c']: not the same value as at ['a'] in the checkpoint, but the same object in into=",
    )
    assert one[0] == 1


def test_parts_of_one_container_at_two_places(saved):
    path = saved({"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}, "l": [[1, 2]], "m": [[1, 2]]})
    one, two = {"x": 0, "y": 0}, [0, 0]
    load(path, {"a": one, "b": one, "l": [two], "m": [two]}, keys=["a.x", "b.y", "l.0.0", "m.0.1"])
    assert (one, two) == ({"x": 1, "y": 2}, [1, 2])
    one = {"x": 0, "y": 0}
    load(path, {"a": one, "b": one}, keys=["a", "b"], exclude="a.x")
    assert one == {"x": 1, "y": 2}
    # Values that keys= did not select may differ.
    one = {"x": 0, "y": 0}
    load(saved({"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}), {"a": one, "b": one}, keys=["a.x", "b.x"])
    assert one == {"x": 1, "y": 0}
    # Even if the first place is absent or not selected, the other places may differ.
    for state, how in (
        ({"a": [3], "b": [1], "c": [2]}, {"keys": ["b", "c"]}),
        ({"b": [1], "c": [2]}, {"strict": False}),
    ):
        one = [0]
        with pytest.raises(StructureMismatchError) as caught:
            load(saved(state), {"a": one, "b": one, "c": one}, **how)
        assert caught.value.differences == (
            "['c']: not the same value as at ['b'] in the checkpoint, but the same object in into=",
        )
        assert one == [0]


def test_a_class_that_has_changed_since_changes_nothing(tmp_path):
    def classes(fields, member):
        record = dataclasses.make_dataclass("Record", fields, namespace={"__module__": "elsewhere"})
        phase = enum.Enum("Stage", ["FIRST", member], module="elsewhere")
        table = type("Counts", (dict if "more" in fields else list,), {"__module__": "elsewhere"})
        return record, phase, table, fastckpt.Registry(record, phase, table)

    record, phase, table, then = classes(["n", "w", "more"], "SECOND")
    other, stage, counts, now = classes(["n", "w"], "OTHER")
    for old, mine, why in (
        (record(1, torch.ones(2), 2), other(0, torch.zeros(2)), "no field 'more'"),
        (phase.SECOND, stage.FIRST, "no member 'SECOND'"),
        ([(table(x=1), 2)], [(counts([0]), 0)], "it was saved as a dict"),
    ):
        fastckpt.save({"w": torch.ones(2), "step": 5, "it": old}, tmp_path / "c", registry=then)
        into = {"w": torch.zeros(2), "step": 0, "it": mine}
        before = repr(into)
        with pytest.raises(fastckpt.CheckpointError, match=why):
            fastckpt.load(tmp_path / "c", into=into, registry=now)
        assert repr(into) == before
    # Records and tables fit, whatever kinds of tensors they hold.
    it = {"it": [record(1, torch.ones(2), torch.ones(3).to_sparse()), table(x=torch.ones(1))]}
    fastckpt.save(it, tmp_path / "c", registry=then)
    into = {"it": [record(0, torch.zeros(2), (2 * torch.ones(3)).to_sparse()), table(x=torch.zeros(1))]}
    assert repr(fastckpt.load(tmp_path / "c", into=into, registry=then)) == repr(it)


def test_other_names_and_other_types(saved):
    path = saved({"module.step": 5, "x": {"a": 1}, "y": [1]})
    into = {"step": 0, "x": [7], "y": {}}
    with pytest.raises(StructureMismatchError, match=r"\['y'\]\['b'\]: not in the checkpoint"):
        load(path, {**into, "y": {"b": 1}}, rename=fastckpt.strip_prefix("module."))
    assert same(load(path, into, rename=fastckpt.strip_prefix("module.")), {"step": 5, "x": {"a": 1}, "y": [1]})


def test_deep_states(saved):
    def nest(leaf, depth):
        value = leaf
        for number in range(depth):
            value = [value] if number % 3 else (value, {"k": number})
        return value

    into = {"deep": nest([0], 3000)}
    assert load(saved({"deep": nest([1], 3000)}), into) is into
    at = into["deep"]
    while at not in ([0], [1]):
        at = at[0]
    assert at == [1]


class Scheduler:
    """An object with its own state, like a learning-rate schedule."""

    def __init__(self, n):
        self.n = n

    def state_dict(self):
        return {"n": self.n, "history": [self.n] * 3}

    def load_state_dict(self, state):
        assert state["history"] == [state["n"]] * 3
        self.n = state["n"]


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + seed)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


LEAVES = {
    "int": lambda n: n,
    "float": lambda n: n + 0.5,
    "text": lambda n: f"{n}",
    "none": lambda _: None,
    "phase": lambda n: Phase(1 + n % 2),
    "frozen": Frozen,
    "set": lambda n: {n, -1},
    "tensor": lambda n: torch.full((2,), float(n)),
    "array": lambda n: np.full(3, n),
    "module": lambda n: trained(n)[0],
    "optimizer": lambda n: trained(n)[1],
    "scheduler": Scheduler,
}
CONTAINERS = {
    "dict": lambda parts: {f"k{i}": part for i, part in enumerate(parts)},
    "numbers": lambda parts: dict(enumerate(parts)),
    "ordered": lambda parts: collections.OrderedDict((f"k{i}", part) for i, part in enumerate(parts)),
    "list": list,
    "tuple": tuple,
    "table": lambda parts: Table({f"k{i}": part for i, part in enumerate(parts)}),
    "row": Row,
    "pair": lambda parts: Pair(parts, None),
    "space": lambda parts: types.SimpleNamespace(parts=parts),
    "progress": lambda parts: Progress(len(parts), parts, {}),
}
#: Changes of `into`: an additional key, a longer or shorter list, another kind of leaf.
CHANGES = ("none", "none", "none", "none", "none", "none", "more", "less", "other")


def trees():
    leaf = st.tuples(st.sampled_from(sorted(LEAVES)), st.integers(0, 5), st.sampled_from(CHANGES))
    return st.recursive(
        leaf,
        lambda deeper: st.tuples(
            st.sampled_from(sorted(CONTAINERS)), st.lists(deeper, max_size=4), st.sampled_from(CHANGES)
        ),
        max_leaves=12,
    )


def made(tree, *, changed):
    """The state for a drawn tree, to save it or to load into it."""
    kind, rest, change = tree
    if kind in LEAVES:
        if changed and change == "other" and kind not in {"module", "optimizer", "scheduler"}:
            return "another"
        return LEAVES[kind](rest + changed)
    parts = [made(part, changed=changed) for part in rest]
    if changed and change == "more":
        parts.append(8)
    if changed and change == "less":
        del parts[-1:]
    return CONTAINERS[kind](parts)


def plain(state):
    """A copy of a state as lists, with the names of types and the states of objects."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if isinstance(state, dict):
        return [type(state).__name__, list(state), [plain(value) for value in state.values()]]
    if isinstance(state, (list, tuple)):
        return [type(state).__name__, [plain(part) for part in state]]
    if isinstance(state, (types.SimpleNamespace, Progress)):
        return [type(state).__name__, plain(vars(state))]
    return copy.deepcopy(state)


def containers(state, found=None):
    """All containers that a load updates in place, by their place in the state."""
    found = {} if found is None else found
    rest = [((), state)]
    while rest:
        where, value = rest.pop()
        parts = None
        if hasattr(value, "state_dict"):
            found[where] = value
        elif isinstance(value, dict):
            found[where], parts = value, value
        elif isinstance(value, (list, tuple)):
            parts = dict(enumerate(value))
            if isinstance(value, list):
                found[where] = value
        elif isinstance(value, (types.SimpleNamespace, Progress)):
            found[where], parts = value, vars(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            found[where] = value
        rest += [((*where, key), part) for key, part in (parts or {}).items()]
    return found


@settings(max_examples=300, deadline=None)
@given(trees())
def test_into_equals_what_a_load_gives_or_nothing_changed(tree):
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/c"
        fastckpt.save({"root": made(tree, changed=False)}, path, registry=KNOWN)
        into = {"root": made(tree, changed=True)}
        before, there = plain(into), containers(into)
        expected = fastckpt.load(path, registry=KNOWN)
        failed = False
        try:
            assert load(path, into) is into
        except StructureMismatchError:
            failed = True
        after = containers(into)
        if failed:
            assert same(plain(into), before)
            assert after.keys() == there.keys()
            assert all(after[where] is one for where, one in there.items())
            return
        assert same(plain(into), plain(expected))
        assert all(after[at] is one for at, one in there.items() if type(after.get(at)) is type(one))
