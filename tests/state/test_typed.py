"""Values of users' classes: they are saved by their kind, and restored."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import json
import random
import subprocess
import sys
import tempfile
import time
import types
import typing
import uuid
import warnings
import zoneinfo
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastckpt
from fastckpt import CheckpointError, CorruptCheckpointError, Registry
from fastckpt.exceptions import UnsupportedTypeError
from harness import manifest, needs, programs
from harness.same import same


class Point(typing.NamedTuple):
    x: int
    w: torch.Tensor | None = None


class Slotted(typing.NamedTuple("Slotted", [("x", int)])):  # noqa: SLOT002 - it is the point
    """A named tuple whose instances have attributes."""


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str] = dataclasses.field(default_factory=lambda: ["default"])
    steps: int = 3
    derived: int = dataclasses.field(init=False)
    unset: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        self.derived = int(self.lr) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: typing.Any = None


class Colour(enum.Enum):
    RED = object()
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Dict(dict):
    kind = "class level"

    def __init__(self):
        raise AssertionError("a load must not call __init__")

    def __getitem__(self, key):
        raise AssertionError("it is taken apart without this")

    @functools.cached_property
    def size(self):
        return len(self)

    def method(self):
        pass


class Ordered(collections.OrderedDict):
    pass


class Default(collections.defaultdict):
    pass


class Tally(collections.Counter):
    pass


class Ring(collections.deque):
    pass


class List(list):
    __slots__ = ("note", "unset")


class Tuple(tuple):
    __slots__ = ()


class Set(set):
    pass


class Frozenset(frozenset):
    pass


class Text(str):  # noqa: SLOT000 - it is the point
    pass


class Int(int):
    pass


class Float(float):
    __slots__ = ()


class Complex(complex):
    __slots__ = ()


class Bytes(bytes):
    pass


class Bytearray(bytearray):
    pass


class Options(argparse.Namespace):
    pass


class Attribute(dict):
    """A dict whose keys are also its attributes, which is common."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Sorted(dict):
    """A dict whose methods show its items in another order, and with other values."""

    def __iter__(self):
        return iter(sorted(dict.keys(self)))

    def __getitem__(self, key):
        raise AssertionError("it is taken apart without this")


class Generic(dict, typing.Generic[typing.TypeVar("T")]):
    pass


class Named(enum.Enum):
    ONE = 1

    @property
    def name(self):
        return "one"

    @property
    def value(self):
        return "a value"


def bare(cls, *args):
    """An instance made without ``__init__``."""
    made = cls.__new__(cls)
    dict.update(made, *args)
    return made


def attributed(value, **attributes):
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


STRUCTURAL = {
    "named tuple": lambda: Point(3, torch.arange(3.0)),
    "named tuple with attributes": lambda: attributed(Slotted(3), note="x"),
    "dataclass": lambda: Config(2.5, ["a"]),
    "frozen dataclass": lambda: Frozen(1, {"t": torch.ones(2)}),
    "enum": lambda: Colour.RED,
    "int enum": lambda: Level.LOW,
    "flag": lambda: Bits.A | Bits.B,
    "dict": lambda: bare(Dict, {"w": torch.ones(2), 3: 4}),
    "dict with attributes": lambda: attributed(bare(Dict, {"w": 1}), kind="own", size=7, note=[1]),
    "OrderedDict": lambda: attributed(Ordered(b=1, a=2), _metadata={"version": 1}),
    "defaultdict": lambda: Default(list, a=[1]),
    "Counter": lambda: attributed(Tally("aab"), note=1),
    "deque": lambda: Ring([1, 2], maxlen=3),
    "list": lambda: attributed(List([1, [2]]), note="n"),
    "tuple": lambda: Tuple((1, 2)),
    "set": lambda: attributed(Set({1, 2}), note=1),
    "frozenset": lambda: Frozenset({1}),
    "str": lambda: attributed(Text("text"), note="n"),
    "int": lambda: Int(2**70),
    "float": lambda: Float(-0.0),
    "complex": lambda: Complex(1, -0.0),
    "bytes": lambda: Bytes(b"x" * 5000),
    "bytearray": lambda: Bytearray(b"x"),
    "namespace": lambda: Options(lr=1, nested=[1]),
    "attributes are keys": lambda: Attribute(lr=1),
    "another iteration": lambda: bare(Sorted, {"b": 1, "a": 2}),
    "generic": lambda: Generic[int](a=1),
    "enum with a name and a value of its own": lambda: Named.ONE,
    "struct sequence": lambda: time.gmtime(7),
    "struct sequence of torch": lambda: torch.topk(torch.arange(3.0), 1),
}


def shown(value):
    """A value as text, with its class, its built-in value, and its attributes."""
    own = getattr(value, "__dict__", None)
    attributes = "itself" if own is value else {} if isinstance(value, (enum.Enum, Generic)) else own
    notes = [getattr(value, name, None) for name in ("note", "unset", "maxlen", "default_factory")]
    if isinstance(value, dict):
        content = list(dict.items(value))
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        content = [*value]
    else:
        content = value
    return f"{type(value)} {content!r} {attributes} {notes}"


@pytest.mark.parametrize("name", STRUCTURAL)
def test_what_explains_itself_is_saved_unasked_and_comes_back_where_it_is_declared(name, tmp_path):
    value = STRUCTURAL[name]()
    fastckpt.save({"at": [value]}, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", registry=Registry(type(value)))["at"][0]
    assert shown(loaded) == shown(value)
    assert loaded is value or not isinstance(value, enum.Enum)
    into = fastckpt.load(tmp_path / "c", into={"at": [STRUCTURAL[name]()]}, registry=Registry(type(value)))
    assert shown(into["at"][0]) == shown(value)
    with pytest.raises(
        UnsupportedTypeError, match=rf"{type(value).__qualname__}'.*register_type.*registry=.*undeclared="
    ):
        fastckpt.load(tmp_path / "c")


def test_classes_are_tried_beside_keys_that_are_dtypes(tmp_path):
    """Mutant: classes are tried with keys decoded for numpy, so that ``torch.float32`` becomes the key "float32"."""
    state = {"at": Colour.RED, "by": {torch.float32: 1, "float32": 2, "torch.float32": 3}}
    fastckpt.save(state, tmp_path / "c")
    into = {"at": Colour.BLUE, "by": dict.fromkeys(state["by"], 0)}
    assert fastckpt.load(tmp_path / "c", into=into, registry=Registry(Colour)) == state


def test_only_the_type_of_a_struct_sequence_makes_one():
    topk, short = torch.return_types.topk, [["tuple", 1], 1]
    with pytest.raises(CheckpointError, match="takes a 2-sequence"):
        decode([["type", "torch.return_types.topk"], *short], topk)
    with pytest.raises(CorruptCheckpointError):
        decode([["type", "torch.return_types.topk"], ["list", 0]], topk)


PLAIN = {
    "named tuple": {"x": 1, "w": None},
    "dataclass": {"lr": 2.5, "names": ["a"], "steps": 3, "derived": 3},
    "enum": "RED",
    "flag": 3,
    "dict with attributes": {"w": 1},
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "deque": collections.deque([1, 2], 3),
    "str": "text",
    "float": -0.0,
    "namespace": {"lr": 1, "nested": [1]},
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_known_comes_back_plain_with_one_warning(name, tmp_path):
    value = Point(1) if name == "named tuple" else STRUCTURAL[name]()
    fastckpt.save({"one": value, "two": [value]}, tmp_path / "c", metadata={"m": value})
    with pytest.warns(RuntimeWarning) as caught:
        loaded = fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain"))
    assert [(str(one.message).count(type(value).__qualname__), one.filename) for one in caught] == [(1, __file__)]
    assert type(loaded["one"]) is type(PLAIN[name])
    assert loaded == {"one": PLAIN[name], "two": [PLAIN[name]]}
    with pytest.warns(RuntimeWarning, match=r"open: metadata") as caught:
        assert fastckpt.open(tmp_path / "c").metadata == {"m": PLAIN[name]}
    assert caught[0].filename == __file__
    assert fastckpt.open(tmp_path / "c").structure["one"].about[0].endswith(type(value).__qualname__)


def test_types_of_what_is_not_loaded_need_not_be_known(tmp_path):
    fastckpt.save({"a": Colour.RED, "b": torch.ones(2)}, tmp_path / "c")
    assert list(fastckpt.load(tmp_path / "c", keys="b")) == ["b"]
    with pytest.raises(UnsupportedTypeError, match="Colour"):
        fastckpt.load(tmp_path / "c", keys="a")
    with pytest.raises(ValueError, match=r"^Registry: undeclared must be one of error, plain"):
        fastckpt.Registry(undeclared="ignore")


class Zone(dt.tzinfo):
    def utcoffset(self, _):
        return dt.timedelta(hours=1)


def test_plain_where_only_a_key_or_a_time_zone_can_be(tmp_path):
    known = Registry()
    known.register(Zone, lambda _: [1], lambda _: Zone(), "zone")
    state = {
        "keys": {Frozen(1, (2,)): "f", Colour.RED: "r", Point(1): "p", Text("w"): torch.ones(1)},
        "set": {Frozen(1), Colour.BLUE},
        "when": dt.datetime(2024, 7, 1, tzinfo=Zone()),
    }
    fastckpt.save(state, tmp_path / "c", registry=known)
    with pytest.warns(RuntimeWarning, match="Frozen.*Colour.*zone"):
        loaded = fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain"))
    assert list(loaded["keys"]) == [(("a", 1), ("b", (2,))), "RED", (("x", 1), ("w", None)), "w"]
    assert loaded["set"] == {(("a", 1), ("b", None)), "BLUE"}
    assert loaded["when"] == dt.datetime(2024, 7, 1)  # noqa: DTZ001 - that is what is left
    fastckpt.save({Colour.RED: 1, "RED": 2}, tmp_path / "c")
    with pytest.warns(RuntimeWarning, match="Colour"), pytest.raises(CheckpointError, match="become equal") as caught:
        fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain"))
    assert not isinstance(caught.value, CorruptCheckpointError)


def own_random():
    made = random.Random(7)
    made.gauss()
    return made


BUILT_IN = {
    "BytesIO": lambda: io.BytesIO(b"x" * 9000),
    "deque": lambda: collections.deque([1, [2]], maxlen=5),
    "endless deque": lambda: collections.deque("ab"),
    "Counter": lambda: attributed(collections.Counter("aab"), note=1),
    "Decimal": lambda: decimal.Decimal("-1.10"),
    "Decimals": lambda: [decimal.Decimal(text) for text in ("sNaN12", "-Infinity", "1E+999999", "-0.000")],
    "UUID": lambda: uuid.UUID(int=2**127),
    "ZoneInfo": lambda: zoneinfo.ZoneInfo("Europe/Berlin"),
    "when": lambda: dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "Fraction": lambda: fractions.Fraction(-7, 3),
    "Namespace": lambda: argparse.Namespace(lr=0.1, w=[1]),
    "SimpleNamespace": lambda: types.SimpleNamespace(a={"b": 1}),
    "Random": own_random,
    "version of torch": lambda: torch.__version__,
    "set of them": lambda: {decimal.Decimal(1), uuid.UUID(int=1), fractions.Fraction(1, 2)},
    "keys": lambda: {decimal.Decimal("1.5"): 1, uuid.UUID(int=1): 2},
}


def same_built_in(left, right):
    if isinstance(left, io.BytesIO):
        return left.tell() == 0 and left.getvalue() == right.getvalue()
    if isinstance(left, random.Random):
        return [left.random(), left.gauss()] == [right.random(), right.gauss()]
    return repr(left) == repr(right) and getattr(left, "note", None) == getattr(right, "note", None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_types_come_back_unasked(name, tmp_path):
    value = BUILT_IN[name]()
    report = fastckpt.save({"v": value}, tmp_path / "c", metadata=None if name == "BytesIO" else {"v": value})
    loaded = fastckpt.load(tmp_path / "c")["v"]
    assert type(loaded) is type(value)
    assert same_built_in(loaded, value)
    assert report.tensors == (name == "BytesIO")
    assert fastckpt.open(tmp_path / "c").structure is not None


def test_omegaconf(tmp_path):
    omegaconf = needs.package("omegaconf")
    tree = {"model": {"d": 8, "twice": "${model.d}"}, "sizes": [1, "???", None], "by": {Level.LOW: 1, 2: 3}}
    config = omegaconf.OmegaConf.create(tree)
    omegaconf.OmegaConf.set_struct(config, value=True)
    omegaconf.OmegaConf.set_readonly(config.model, value=True)
    empty = omegaconf.DictConfig(None)
    fastckpt.save({"cfg": config, "part": config.sizes, "none": empty}, tmp_path / "c")
    known = Registry(Level, omegaconf.DictConfig, omegaconf.ListConfig)
    loaded = fastckpt.load(tmp_path / "c", registry=known)
    assert [type(loaded[name]) for name in loaded] == [omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.DictConfig]
    plain = functools.partial(omegaconf.OmegaConf.to_container, resolve=False)
    assert plain(loaded["cfg"]) == plain(config)
    assert plain(loaded["part"]) == [1, "???", None]
    assert loaded["none"]._is_none()
    assert loaded["cfg"].model.twice == 8
    assert omegaconf.OmegaConf.is_struct(loaded["cfg"])
    assert omegaconf.OmegaConf.is_readonly(loaded["cfg"].model)
    assert not omegaconf.OmegaConf.is_readonly(loaded["cfg"])
    with pytest.raises(omegaconf.errors.ConfigAttributeError):
        loaded["cfg"].other = 1


def test_configurations_are_plain_where_they_are_not_declared(tmp_path, monkeypatch):
    omegaconf = needs.package("omegaconf")
    config = omegaconf.OmegaConf.create({"a": [1, {"b": "${a}"}], "c": "${oc.env:HOME}"})
    omegaconf.OmegaConf.set_struct(config, value=True)
    plain = {"a": [1, {"b": "${a}"}], "c": "${oc.env:HOME}"}
    fastckpt.save({"cfg": config}, tmp_path / "c", metadata={"cfg": config})
    assert fastckpt.load(tmp_path / "c") == {"cfg": plain}
    assert fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain")) == {"cfg": plain}
    monkeypatch.setattr(torch.serialization, "get_safe_globals", lambda: [omegaconf.DictConfig], raising=False)
    assert type(fastckpt.load(tmp_path / "c")["cfg"]) is omegaconf.DictConfig
    assert type(fastckpt.open(tmp_path / "c").metadata["cfg"]) is dict


def test_configurations_are_no_keys(tmp_path, monkeypatch):
    """A configuration comes back as a dict or list, which cannot be a key."""
    omegaconf = needs.package("omegaconf")
    # Some versions of ListConfig have a hash.
    monkeypatch.setattr(omegaconf.ListConfig, "__hash__", lambda _: 1)
    config = omegaconf.OmegaConf.create([1])
    for state in ({config: 1}, {config}, {("x", config): 1}, frozenset({(1, config)})):
        with pytest.raises(UnsupportedTypeError, match="neither a key nor a member"):
            fastckpt.save(state, tmp_path / "c")
    for tokens in (
        [["dict", 1], ["type", "omegaconf.DictConfig"], ["dict", 0], 1],
        [["set", 1], ["tuple", 1], ["type", "omegaconf.ListConfig"], ["tuple", 0]],
    ):
        for known in ((), (omegaconf.DictConfig, omegaconf.ListConfig)):
            with pytest.raises(CorruptCheckpointError, match="unhashable"):
                decode(tokens, *known)


def test_a_package_that_is_missing_makes_its_types_unknown(tmp_path, monkeypatch):
    fastckpt.save({"d": decimal.Decimal(1)}, tmp_path / "c")
    monkeypatch.setitem(sys.modules, "decimal", None)
    with pytest.raises(UnsupportedTypeError, match=r"decimal\.Decimal', which cannot be imported here"):
        fastckpt.load(tmp_path / "c")
    with pytest.warns(RuntimeWarning, match=r"decimal\.Decimal"):
        assert fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain")) == {"d": "1"}


# Values with their own state.


def test_objects_with_a_state_are_stored_as_that(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    states = {name: one.state_dict() for name, one in objects.items()}
    one, other = (fastckpt.save(state, tmp_path / name) for name, state in (("a", objects), ("b", states)))
    assert one.bytes == other.bytes
    found = [fastckpt.open(tmp_path / name)._reader.structure() for name in "ab"]
    assert found[0] == found[1]
    # The model is found by its key, and has its own files.
    assert list(fastckpt.open(tmp_path / "a").shards) == ["model.safetensors", "training/training.safetensors"]
    with pytest.raises(UnsupportedTypeError, match=r"type builtins\.type is not supported"):
        fastckpt.save({"class": torch.nn.Linear}, tmp_path / "c")


def test_a_state_of_its_own_comes_before_fields(tmp_path):
    @dataclasses.dataclass
    class Train:
        step: int
        cache: object = None

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            self.step = state["step"]

    class Broken(Train):
        def state_dict(self):
            return 1 / 0

    fastckpt.save(Train(7, object()), tmp_path / "c")
    assert fastckpt.load(tmp_path / "c") == {"step": 7}
    with pytest.raises(UnsupportedTypeError, match=r"\['b'\]: its state_dict\(\) raised ZeroDivisionError"):
        fastckpt.save({"b": Broken(1)}, tmp_path / "c")


def test_a_state_dict_that_gives_no_state_is_refused(tmp_path):
    with pytest.raises(UnsupportedTypeError, match=r"\['m'\]: its state_dict\(\) returned a unittest.mock"):
        fastckpt.save({"m": mock.MagicMock()}, tmp_path / "c")
    fastckpt.save({"m": mock.Mock()}, tmp_path / "c", registry=fastckpt.Registry(encode=repr))


def test_what_a_dataclass_holds_is_named_by_its_fields(tmp_path):
    fastckpt.save({"at": Point(1, torch.ones(2))}, tmp_path / "c")
    assert list(fastckpt.open(tmp_path / "c")) == ["at.w"]
    # The state itself may be a dataclass, in which the model is found, too.
    state = Frozen(a={"w": torch.ones(2)}, b=torch.ones(1))
    fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(model_key="a"))
    assert list(fastckpt.open(tmp_path / "c")) == ["a.w", "b"]
    assert list(fastckpt.open(tmp_path / "c").shards) == ["model.safetensors", "training/training.safetensors"]
    into = Frozen(a={"w": torch.zeros(2)}, b=torch.zeros(1))
    loaded = fastckpt.load(tmp_path / "c", into=into, registry=Registry(Frozen))
    assert loaded.a["w"] is into.a["w"]
    assert into.b.tolist() == [1]


# The rest.


def test_default(tmp_path):
    calls = []

    def default(value):
        calls.append(value)
        if isinstance(value, types.FunctionType):
            return value.__name__
        if isinstance(value, torch.Tensor):
            return {"shape": list(value.shape)}
        if value == "again":
            return object()
        raise TypeError("no such value")

    meta = torch.ones(2, device="meta")
    with_default = fastckpt.Registry(encode=default)
    state = {"f": own_random, "m": meta, "n": 1}
    fastckpt.save(state, tmp_path / "c", registry=with_default, metadata={"f": own_random})
    assert fastckpt.load(tmp_path / "c") == {"f": "own_random", "m": {"shape": [2]}, "n": 1}
    assert fastckpt.open(tmp_path / "c").metadata == {"f": "own_random"}
    assert calls == [own_random, own_random, meta]
    with pytest.raises(
        UnsupportedTypeError, match=r"\['x'\]: type builtins\.object.*encode raised TypeError: no such value"
    ):
        fastckpt.save({"x": object()}, tmp_path / "c", registry=with_default)
    with pytest.raises(UnsupportedTypeError, match=r"encode raised ZeroDivisionError"):
        fastckpt.save({"x": object()}, tmp_path / "c", registry=fastckpt.Registry(encode=lambda _: 1 / 0))
    with pytest.raises(UnsupportedTypeError, match="deeper than 10000"):
        fastckpt.save({"x": object()}, tmp_path / "c", registry=fastckpt.Registry(encode=lambda _: object()))
    fastckpt.save_async({"f": own_random}, tmp_path / "c", registry=with_default).result()
    assert fastckpt.load(tmp_path / "c") == {"f": "own_random"}


def test_a_registry_of_a_call_comes_first(registry, tmp_path):
    registry(Frozen, lambda value: value.a, lambda value: Frozen(value, "process"), "frozen")
    mine = Registry()
    mine.register(Frozen, lambda value: value.a, lambda value: Frozen(value, "call"), "frozen")
    fastckpt.save([Frozen(1)], tmp_path / "c")
    assert fastckpt.load(tmp_path / "c") == [Frozen(1, "process")]
    assert fastckpt.load(tmp_path / "c", registry=mine) == [Frozen(1, "call")]
    assert fastckpt.load(tmp_path / "c", registry=Registry(Point)) == [Frozen(1, "process")]
    for call in (fastckpt.save, fastckpt.save_async):
        with pytest.raises(TypeError, match=f"{call.__name__}: registry must be a fastckpt.Registry, not"):
            call({}, tmp_path / "c", registry=Frozen)
    with pytest.raises(TypeError, match=r"load: registry must be a fastckpt\.Registry"):
        fastckpt.load(tmp_path / "c", registry=[Frozen])


def test_a_refusal_is_not_remembered(registry, tmp_path):
    class Plain:
        pass

    for _ in range(2):
        with pytest.raises(UnsupportedTypeError, match=r"leave it out.*encode=.*fastckpt\.register_type"):
            fastckpt.save([Plain()], tmp_path / "c")
    registry(Plain, lambda _: 1, lambda _: Plain(), "plain")
    fastckpt.save([Plain()], tmp_path / "c")
    assert type(fastckpt.load(tmp_path / "c")[0]) is Plain


def test_torch_s_safe_classes_are_known(tmp_path):
    fastckpt.save([Frozen(3)], tmp_path / "c")
    with torch.serialization.safe_globals([Frozen, own_random]):
        assert fastckpt.load(tmp_path / "c") == [Frozen(3)]
    with pytest.raises(UnsupportedTypeError, match="Frozen"):
        fastckpt.load(tmp_path / "c")


def test_a_class_of_the_program_itself_is_warned_of_once(tmp_path):
    program = """
import dataclasses, sys, warnings, fastckpt
@dataclasses.dataclass
class Pos:
    x: int
@dataclasses.dataclass
class Named(Pos): pass
fastckpt.register_type(Named, name="named")
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    for _ in range(2):
        fastckpt.save([Pos(1), Pos(2), Named(3)], sys.argv[1])
assert len(caught) == 1, caught
assert "__main__.Pos" in str(caught[0].message) and 'register_type(Pos, name="...")' in str(caught[0].message)
assert caught[0].category is RuntimeWarning and caught[0].filename == "<string>", caught[0]
fastckpt.register_type(Pos)
assert fastckpt.load(sys.argv[1]) == [Pos(1), Pos(2), Named(3)]
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True, timeout=60)


SAVES = {
    "save": "fastckpt.save(state, path)",
    "save_async": "fastckpt.save_async(state, path).result()",
    "distributed.save": "fastckpt.distributed.save(state, path)",
    "distributed.save_async": "fastckpt.distributed.save_async(state, path).result()",
    "Manager": "fastckpt.Manager(path).save(1, state)",
    "dcp.Writer": "dcp.save({'state': state}, storage_writer=fastckpt.dcp.Writer(path), no_dist=True)",
}


@pytest.mark.parametrize("how", SAVES)
def test_a_class_that_the_program_does_not_declare_is_warned_of_once(tmp_path, children_with_torch, how):
    (tmp_path / "app.py").write_text("""
import collections, dataclasses, enum
@dataclasses.dataclass
class Position:
    epoch: int
class Phase(enum.Enum):
    WARM = 1
Pair = collections.namedtuple("Pair", "a b")
class Known(enum.Enum):
    A = 1
""")
    program = f"""
import sys, warnings
import fastckpt.dcp, app, omegaconf
import torch.distributed.checkpoint as dcp
fastckpt.register_type(app.Known)
state = [app.Position(1), app.Phase.WARM, app.Pair(1, 2), app.Known.A, omegaconf.OmegaConf.create({{"a": 1}}), {{1}}]
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    for number in range(2):
        path = f"{{sys.argv[1]}}{{number}}"
        {SAVES[how]}
said = [str(one.message) for one in caught if "fastckpt: " in str(one.message)]
names = ["Position", "Phase", "Pair", "DictConfig"]
if {how!r} == "dcp.Writer":
    names.pop()  # torch takes mappings apart
assert len(said) == len(names), said
for one, name in zip(said, names):
    assert f".{{name}}" in one and f"fastckpt.register_type({{name}})" in one, one
classes = app.Position, app.Phase, app.Pair, omegaconf.DictConfig
for cls in classes:
    fastckpt.register_type(cls)
if {how!r} == "save":
    assert fastckpt.load(path) == state
"""
    (tmp_path / "program.py").write_text(program)
    done = programs.run(children_with_torch, [tmp_path / "program.py", tmp_path / "c"])
    assert done.returncode == 0, done.stderr


@dataclasses.dataclass
class Base:
    n: int

    @functools.cached_property
    def doubled(self):
        return 2 * self.n


class Undecorated(Base):
    def __init__(self, n, more):
        super().__init__(n)
        self.more = more
        self.w = torch.ones(2)


@dataclasses.dataclass
class WithSlots:
    __slots__ = ("extra", "n")
    n: int


def test_what_a_dataclass_has_beside_its_fields(tmp_path):
    base, sub, slotted = Base(1), Undecorated(2, {"x": [1]}), WithSlots(3)
    base.note, slotted.extra = "kept", (1, 2)
    assert base.doubled == 2
    known = fastckpt.Registry(Base, Undecorated, WithSlots)
    fastckpt.save({"all": [base, sub, slotted]}, tmp_path / "c", registry=known)
    loaded = fastckpt.load(tmp_path / "c", registry=known)["all"]
    assert [type(one) for one in loaded] == [Base, Undecorated, WithSlots]
    assert vars(loaded[0]) == {"n": 1, "note": "kept"}
    assert same(vars(loaded[1]), vars(sub))
    assert (loaded[2].n, loaded[2].extra) == (3, (1, 2))
    with pytest.warns(RuntimeWarning, match="Undecorated"):
        plain = fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain"))["all"]
    assert plain == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_an_attribute_beside_the_fields_that_cannot_be_stored_is_named(tmp_path):
    known = fastckpt.Registry(Base)
    base = Base(1)
    base.call, base.note = print, 5
    with pytest.warns(
        RuntimeWarning, match=r"attribute 'call' of .*Base is not a field.*\(builtins\.builtin_.*left out"
    ):
        fastckpt.save(base, tmp_path / "c", registry=known)
    assert vars(fastckpt.load(tmp_path / "c", registry=known)) == {"n": 1, "note": 5}
    fastckpt.save(base, tmp_path / "c", registry=fastckpt.Registry(Base, encode=repr))
    assert fastckpt.load(tmp_path / "c", registry=known).call == repr(print)
    del base.call
    base.note = [print]
    with pytest.raises(UnsupportedTypeError, match=r"\['note'\]\[0\]: type builtins\.builtin"):
        fastckpt.save(base, tmp_path / "c", registry=known)


@pytest.mark.parametrize("way", ["save", "save_async", "Manager"])
def test_a_warning_that_is_an_error_ends_a_save_before_anything_is_written(tmp_path, way):
    """The next save, which has nothing new to warn about, succeeds."""
    kind = dataclasses.make_dataclass(f"Undeclared{way}", ["n"], namespace={"__module__": "elsewhere"})
    state, path = {"w": torch.ones(2), "it": kind(1)}, tmp_path / "step-00000001"
    manager = fastckpt.Manager(tmp_path)
    manager.save(1, {"w": torch.zeros(2)})
    manager.wait()
    save = {
        "save": lambda: fastckpt.save(state, path),
        "save_async": lambda: fastckpt.save_async(state, path).result(),
        "Manager": lambda: manager.save(2, state) and manager.wait(),
    }[way]
    before = sorted(tmp_path.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="which this program does not declare"):
            save()
        assert sorted(tmp_path.iterdir()) == before
        assert fastckpt.clean(tmp_path) == []
        assert not fastckpt.load(path)["w"].any()
        save()
    newest = tmp_path / "step-00000002" if way == "Manager" else path
    assert fastckpt.load(newest, registry=Registry(kind))["it"].n == 1


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_do_not_depend_on_the_process(kind, tmp_path):
    program = f"""
import sys, fastckpt, decimal
names = [f"name {{i}}" for i in range(40)]
members = [*names, *range(5), None, (1, "x"), decimal.Decimal(1), frozenset(names), b"b"]
fastckpt.save({{"s": {kind.__name__}(members), "keys": {{frozenset(names): 1}}}}, sys.argv[1])
"""
    found = []
    for seed in "12":
        path = tmp_path / seed
        environment = {"PYTHONHASHSEED": seed, "PATH": ""}
        subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60, env=environment)
        manifest = json.loads((path / "fastckpt.json").read_text())
        found.append({name: value for name, value in manifest.items() if name not in ("created", "saved", "crc64nvme")})
        assert fastckpt.load(path)["s"] >= {None, (1, "x"), "name 3"}
    assert found[0] == found[1]


def test_a_set_that_no_load_takes_in_this_order_is_refused(tmp_path):
    members = {number * (2**61 - 1) for number in range(1000)}
    with pytest.raises(UnsupportedTypeError, match=r"\['s'\]: the hashes of its keys collide"):
        fastckpt.save({"s": members}, tmp_path / "c")


def test_attributes_that_hide_what_a_class_does_are_refused(tmp_path):
    value = bare(Dict, {"w": 1})
    vars(value)["method"] = 1
    with pytest.raises(
        UnsupportedTypeError,
        match=r"its attribute 'method' stands in for a method .*: rename it, or convert .* Registry\(encode=\)",
    ):
        fastckpt.save([value], tmp_path / "c")
    vars(value).pop("method")
    vars(value)[7] = 1
    with pytest.raises(UnsupportedTypeError, match="attribute 7, which is not a string"):
        fastckpt.save([value], tmp_path / "c")


def decode(tokens, *classes):
    """The value that a load makes from tokens without tensors."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "c")
        fastckpt.save(None, path)
        manifest.forge(path, {**manifest.body_of(path), "structure": tokens})
        return fastckpt.load(path, registry=Registry(*classes))


def name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


DIFFERENT = {
    "no such member": ([["type", name(Colour)], "GREEN"], "no member 'GREEN'"),
    "no such flags": ([["type", name(Level)], "HIGH"], "no member 'HIGH'"),
    "a field more": ([["type", name(Point)], ["dict", 2], "x", 1, "y", 2], "no field 'y'"),
    "a field less": ([["type", name(Point)], ["dict", 0]], "the field 'x' of the class is not in the checkpoint"),
    "a field of a dataclass more": ([["type", name(Frozen)], ["dict", 2], "a", 1, "c", 2], "no field 'c'"),
    "a field of a dataclass less": ([["type", name(Frozen)], ["dict", 0]], "the field 'a'"),
    "another base": ([["type", name(Dict)], ["list", 0]], "saved as a list, but the class is a dict"),
    "hidden method": ([["type", name(Dict), 2], ["dict", 0], ["dict", 1], "method", 1], "'method' would hide"),
    "hidden built-in": ([["type", name(Dict), 2], ["dict", 0], ["dict", 1], "items", 1], "'items' would hide"),
    "class": ([["type", name(Dict), 2], ["dict", 0], ["dict", 1], "__class__", 1], "'__class__' would hide"),
    "no attributes": ([["type", name(Tuple), 2], ["tuple", 0], ["dict", 1], "a", 1], "has no attribute 'a'"),
    "no zone": ([["type", "zoneinfo.ZoneInfo"], "Mars/Olympus"], "no time zone 'Mars/Olympus'"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_class_that_differs_is_an_error_with_type_and_place(case):
    tokens, message = DIFFERENT[case]
    place = [["dict", 2], "a", 1, "at", ["list", 2], None, *tokens]
    with pytest.raises(CheckpointError, match=message) as caught:
        decode(place, Colour, Level, Point, Frozen, Dict, Tuple)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert "load: cannot make ['at'][1]: a value of the type" in str(caught.value)
    assert tokens[0][1] in str(caught.value)


MALFORMED = [
    [["type", name(Colour)], 1],
    [["type", name(Bits)], "A"],
    [["type", name(Bits)], True],
    [["type", name(Point)], ["list", 0]],
    [["type", name(Point)], ["dict", 1], 1, 1],
    [["type", name(Frozen)], ["dict", 1], 1, 1],
    [["type", name(Frozen), 2], ["dict", 1], "a", 1, ["dict", 1], 1, 1],
    [["type", name(Dict), 1], ["dict", 0]],
    [["type", name(Dict), 3], ["dict", 0], ["dict", 0], ["dict", 0]],
    [["type", name(Dict), True], ["dict", 0]],
    [["type", name(Dict), 2.0], ["dict", 0], ["dict", 0]],
    [["type", name(Dict), 2, 2], ["dict", 0], ["dict", 0]],
    [["type", name(Dict), 2], ["dict", 0], ["list", 0]],
    [["type", name(Dict), 2], ["dict", 0], None],
    [["type", name(Dict), 2], ["dict", 0], ["dict", 1], 1, 1],
    [["type", name(Dict), 2], ["dict", 0]],
    [["type", "argparse.Namespace"], 1],
    [["type", "argparse.Namespace"], ["dict", 1], "__class__", 1],
    [["type", "types.SimpleNamespace"], ["dict", 1], 1, 1],
    [["type", "collections.Counter"], ["list", 0]],
    [["type", "collections.deque"], 1],
    [["type", "collections.deque", 2], ["list", 0], ["dict", 0]],
    [["type", "collections.deque", 2], ["list", 0], ["dict", 1], "maxlen", -1],
    [["type", "collections.deque", 2], ["list", 2], 1, 2, ["dict", 1], "maxlen", 1],
    [["type", "collections.deque", 2], ["list", 0], ["dict", 1], "maxlen", True],
    [["type", "collections.deque", 2], ["list", 0], ["dict", 1], "maxlen", ["int", "0x" + "f" * 40]],
    [["type", "decimal.Decimal"], 1],
    [["type", "decimal.Decimal"], "one"],
    [["type", "decimal.Decimal"], "1e9999999999999999999999"],
    [["type", "fractions.Fraction"], ["tuple", 2], 1, 0],
    [["type", "fractions.Fraction"], ["tuple", 2], 2, 4],
    [["type", "fractions.Fraction"], ["tuple", 2], 1.5, 2],
    [["type", "fractions.Fraction"], ["tuple", 1], 1],
    [["type", "fractions.Fraction"], ["tuple", 2], 1, ["int", "0x1" + "0" * 50_000]],
    [["type", "io.BytesIO"], "text"],
    [["type", "uuid.UUID"], "x"],
    [["type", "uuid.UUID"], 1],
    [["type", "zoneinfo.ZoneInfo"], "../../../../etc/passwd"],
    [["type", "zoneinfo.ZoneInfo"], "/etc/passwd"],
    [["type", "zoneinfo.ZoneInfo"], "Europe/../../../../../etc/passwd"],
    [["type", "zoneinfo.ZoneInfo"], "tzdata.zones"],
    [["type", "zoneinfo.ZoneInfo"], "a\0b"],
    [["type", "zoneinfo.ZoneInfo"], ""],
    [["type", "zoneinfo.ZoneInfo"], 1],
    [["type", "random.Random"], 1],
    [["type", "random.Random"], ["tuple", 3], 2, ["tuple", 0], None],
    [["type", "random.Random"], ["tuple", 3], 3, ["tuple", 1], 7, None],
    [["type", "random.Random"], ["tuple", 3], 3, ["tuple", 625], *[1] * 624, 625, None],
    [["type", "random.Random"], ["tuple", 3], 3, ["tuple", 625], *[-1] * 624, 624, None],
    [["type", "random.Random"], ["tuple", 3], 3, ["tuple", 625], *[1] * 624, 624, "x"],
    [["type", "omegaconf.DictConfig"], 7],
    [["type", "omegaconf.DictConfig"], ["dict", 1], "a", "${" * 100_000],
    [["type", "omegaconf.ListConfig"], ["dict", 1], "a", 1],
    [["type", "omegaconf.DictConfig", 2], ["dict", 0], ["dict", 0]],
    [["type", "omegaconf.DictConfig", 2], ["dict", 0], ["dict", 1], "flags", 1],
    [
        *(["type", "omegaconf.DictConfig", 2], ["dict", 0], ["dict", 1], "flags"),
        *(["list", 1], ["tuple", 2], ["list", 1], "a", ["dict", 1], "struct", True),
    ],
]


@pytest.mark.parametrize("tokens", MALFORMED, ids=lambda tokens: json.dumps(tokens)[:70])
def test_malformed_values_of_types(tokens):
    omegaconf = needs.package("omegaconf")
    with pytest.raises(CorruptCheckpointError):
        decode(tokens, Colour, Bits, Point, Frozen, Dict, omegaconf.DictConfig, omegaconf.ListConfig)


def test_huge_numbers_are_built():
    huge = decimal.Decimal("1e999999999")
    assert decode([["dict", 1], ["type", "decimal.Decimal"], "1e999999999", 1]) == {huge: 1}


def test_registered_types_take_no_attributes_of_others(registry, tmp_path):
    fastckpt.save([attributed(bare(Dict, {"w": 1}), note=1)], tmp_path / "c")
    registry(Dict, dict, lambda value: value)
    with pytest.raises(CheckpointError, match=r"has attributes, which the decode registered for .* does not accept"):
        fastckpt.load(tmp_path / "c")


@pytest.mark.parametrize("state", ["a\ud83d\ude00", {"\ud83d\ude00": 1, "\U0001f600": 2}, [{"x": ("\ud83d\ude00",)}]])
def test_pairs_of_surrogates_are_refused(tmp_path, state):
    """JSON cannot distinguish such a pair from the character that it encodes."""
    with pytest.raises(UnsupportedTypeError, match="surrogate pair"):
        fastckpt.save(state, tmp_path / "c")
    fine = ["\ud83d", "\ude00", "\ude00\ud83d", "\U0001f600", {"\udc80": 1}]
    fastckpt.save(fine, tmp_path / "c")
    assert fastckpt.load(tmp_path / "c") == fine


@pytest.mark.parametrize("name", ["items", "__class__"])
def test_attributes_that_hide_a_method_of_an_ordered_dict_are_refused(tmp_path, name):
    state = collections.OrderedDict(a=1)
    vars(state)[name] = 7
    with pytest.raises(UnsupportedTypeError, match="would hide a method"):
        fastckpt.save({"s": state}, tmp_path / "c")
