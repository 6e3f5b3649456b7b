"""Files that name known types in wrong places: none of their code runs, and nothing grows.

Values of all types are saved, parts of their structure are replaced by others, and the manifest is forged behind a
correct checksum. The draws run in a separate process, which measures itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import decimal
import fractions
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import types
import uuid
import zoneinfo
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import manifest, needs, zygote
from harness.draws import one_in
from harness.internals import ends_of

#: The number of drawn files; a campaign sets a larger one.
DRAWS = int(os.environ.get("FASTCKPT_DRAWS", 750 // one_in(3)))
#: Bytes by which a process's memory may grow after its first load, and the CPU seconds that one load may take.
GROWTH, SECONDS = 192 << 20, 10.0

HOOKS = (
    *("__iter__", "__eq__", "__ne__", "__lt__", "__hash__", "__len__", "__bool__", "__getitem__", "__contains__"),
    *("__reduce__", "__reduce_ex__", "__str__", "__repr__", "__index__", "__int__", "__float__", "__getattribute__"),
    *("__array__", "__next__", "__call__", "__copy__", "__deepcopy__", "__buffer__", "__format__", "keys", "items"),
)
#: The methods of a key that Python itself calls.
OF_KEYS = {"__hash__", "__eq__"}
ran: list[str] = []


def hostile(base):
    """A class whose methods record their calls, and fail."""

    def hook(name):
        def run(*_, **__):
            ran.append(name)
            raise ValueError(f"{name} ran")

        return run

    class Base(base):
        __slots__ = ()

    members = {name: hook(name) for name in HOOKS}
    return type(f"Hostile{base.__name__}", (Base,), {**members, "__slots__": (), "__module__": "hostile"})


BASES = (dict, list, tuple, str, int, float, bytes, frozenset, set, collections.OrderedDict, collections.deque)
CLASSES = {base: hostile(base) for base in BASES}
BARE = hostile(object)


def registry(**options):
    known = fastckpt.Registry(*CLASSES.values(), **options)
    known.register(BARE, lambda _: None, lambda _: object.__new__(BARE), name="hostile.bare")
    import omegaconf

    known.register(omegaconf.DictConfig)
    known.register(omegaconf.ListConfig)

    def resolve(*_):
        ran.append("resolver")
        raise ValueError("resolved")

    omegaconf.OmegaConf.register_new_resolver("boom", resolve, replace=True)
    return known


VALUES = {
    dict: [["dict", 1], "a", 1],
    list: [["list", 1], 1],
    tuple: [["tuple", 2], 1, 2],
    str: ["text"],
    int: [7],
    float: [0.5],
    bytes: [["bytes", "YQ=="]],
    frozenset: [["fset", 1], 1],
    set: [["set", 1], 1],
    collections.OrderedDict: [["odict", 1], "a", 1],
    collections.deque: [["type", "collections.deque"], ["list", 1], 1],
}
CONFIG = [["type", "omegaconf.DictConfig"], ["dict", 2], "a", "${boom:1}", "b", "${oc.env:HOME}"]
LEAVES = [
    *([["type", f"hostile.Hostile{base.__name__}"], *tokens] for base, tokens in VALUES.items()),
    [["type", "hostile.bare"], None],
    CONFIG,
    [["type", "omegaconf.ListConfig"], ["list", 2], "${boom:1}", "${boom:2}"],
    [["type", "omegaconf.DictConfig", 2], ["dict", 0], ["dict", 1], "flags", ["list", 1], *CONFIG],
    [["type", "collections.deque"], ["list", 1], *CONFIG],
]


def corpus():
    """Values of all types, by name."""
    import torch

    nested = [torch.ones(2, 3), torch.ones(4, 3)]
    fields = np.dtype([("a", "<f4"), ("b", "<i8", (2,))])
    quantized = torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    zone = zoneinfo.ZoneInfo("Europe/Vienna")
    generator = np.random.Generator(np.random.MT19937(np.random.SeedSequence([1, 2], spawn_key=(3,))))
    default = collections.defaultdict(list, {"a": [1]})
    attributed = torch.nn.Linear(2, 2).state_dict()
    return {
        "containers": {"d": {1: 2}, "l": [1, (2, 3)], "s": {1, 2}, "f": frozenset({3}), "slice": slice(1, 2, 3)},
        "mappings": [collections.OrderedDict(a=1), default, collections.Counter("aab"), attributed],
        "spaces": [argparse.Namespace(a=1), types.SimpleNamespace(b=[1])],
        "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1 << 80, float("nan"), 1j, range(3)],
        "deque": [collections.deque([1, 2], 5), io.BytesIO(b"abc"), uuid.UUID(int=7), bytearray(b"abc")],
        "times": [dt.datetime(2020, 1, 1, tzinfo=zone), dt.time(1, tzinfo=dt.timezone.utc), dt.timedelta(1)],
        "random": [random.Random(1), np.random.RandomState(1), generator, np.random.Philox(1)],
        "generator": [torch.Generator(), np.random.PCG64(5), np.random.SFC64(2)],
        "arrays": [np.zeros(3, fields), np.zeros(2, fields).view(np.recarray), np.array([1, None], object), fields],
        "nested": [torch.nested.nested_tensor(nested), torch.nested.nested_tensor(nested, layout=torch.jagged)],
        "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), quantized],
        "expanded": [torch.ones(1, 3).expand(4, 3), np.broadcast_to(np.ones(3), (4, 3))],
        "torch": [
            torch.float32,
            torch.strided,
            torch.channels_last,
            torch.Size([1]),
            torch.device("cpu"),
            torch.ones(2),
        ],
    }


def hashed(tokens, ends):
    """The positions of tokens within keys or members of sets."""
    found = set()
    for position, token in enumerate(tokens):
        tag = token[0] if isinstance(token, list) else None
        if tag in ("set", "fset"):
            found.update(range(position + 1, ends[position]))
        if tag not in ("dict", "odict", "ddict"):
            continue
        at = position + 1 + (tag == "ddict")
        while at < ends[position]:
            found.update(range(at, ends[at]))
            at = ends[ends[at]]
    return found


def expanded(dice, tensors):
    """The tokens of a small tensor that claims gigabytes."""
    number = dice.randrange(tensors)
    kind = dice.choice(["tensor", "array"])
    return [["expanded", [1 << dice.choice([3, 31, 40])] * dice.choice([1, 2]), ""], [kind, number]]


def drawn(dice, tokens, tensors):
    """Tokens with some replaced values, and whether loads may call methods of keys."""
    tokens = list(tokens)
    of_keys = False
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        ends = ends_of(tokens)
        keys = hashed(tokens, ends)
        position = dice.randrange(len(tokens))
        choice = dice.random()
        if choice < 0.2 and tensors:
            new = expanded(dice, tensors)
        elif choice < 0.35:
            other = dice.randrange(len(tokens))
            new = tokens[other : ends[other]]
        elif choice < 0.45 and isinstance(tokens[position], list) and tokens[position][0] == "type":
            names = [token[1] for token in tokens if isinstance(token, list) and token[0] == "type"]
            new = [["type", dice.choice(names), *tokens[position][2:]], *tokens[position + 1 : ends[position]]]
        else:
            new = dice.choice(LEAVES)
        of_keys = of_keys or position in keys
        tokens[position : ends[position]] = new
    return tokens, of_keys or bool(hashed(tokens, ends_of(tokens)) & _named(tokens))


def _named(tokens):
    return {
        at for at, token in enumerate(tokens) if isinstance(token, list) and str(token[1:2]).startswith("['hostile")
    }


def peak():
    with Path("/proc/self/status").open(encoding="ascii") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


#: Options to load a part of a state, or a state with other keys.
CHOICES = (
    {"keys": "*"},
    {"keys": "*a*"},
    {"exclude": "*1*", "strict": False},
    {"rename": {"a": "z"}, "strict": False},
    {"rename": str.upper},
    {"rename": fastckpt.strip_prefix("a")},
    {"into": lambda: {"a": [0, np.zeros(3)], "l": [1], "d": {}}, "strict": False},
)


def chosen(dice):
    """One of these choices, drawn."""
    return {name: value() if name == "into" else value for name, value in dice.choice(CHOICES).items()}


def look(path, known, plain, dice):
    """Read a file in several ways; return the ends."""
    ends = []
    for how in (
        lambda: fastckpt.load(path, registry=known, **chosen(dice)),
        lambda: fastckpt.load(path, registry=known),
        lambda: fastckpt.load(path, registry=known, framework="torch"),
        lambda: fastckpt.load(path, registry=plain),
        lambda: fastckpt.open(path).structure,
        lambda: fastckpt.open(path).metadata,
    ):
        try:
            how()
            ends.append("read")
        except (fastckpt.CheckpointError, ImportError) as error:  # noqa: PERF203 - each ends by itself
            ends.append(type(error).__name__)
        except (KeyError, ValueError) as error:
            # The requested part is absent, or does not fit.
            if not str(error).strip("'\"").startswith("load: "):
                raise
    return ends


COMMANDS = (
    ["info", "{path}"],
    ["ls", "{path}"],
    ["ls", "{run}"],
    ["ls", "{run}", "--keep", "last=1"],
    ["diff", "{path}", "{sound}"],
    ["diff", "{path}", "{path}"],
    ["export", "{path}", "{out}.safetensors"],
    ["export", "{path}", "{out}", "--format", "hf"],
)


def commanded(path, sound, out, dice):
    """Run a drawn command on a file; return its end."""
    from harness.cli import main

    places = {"path": path, "run": path.parent, "sound": sound, "out": out}
    command = [word.format(**places) for word in dice.choice(COMMANDS)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        main([*command, "--json"])
    for made in (out, out.with_suffix(".safetensors")):
        if made.exists():
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    return json.loads(said.getvalue()).get("type", "read")


def restored(path, known):
    """Restore a file by a manager; return the end."""
    try:
        with fastckpt.Manager(path.parent) as manager:
            manager.restore(step=1, registry=known)
    except (fastckpt.CheckpointError, ImportError) as error:
        return type(error).__name__
    return "read"


def main(seed, count):
    import warnings

    import torch  # noqa: F401

    warnings.simplefilter("ignore")
    known, plain, dice = registry(), registry(undeclared="plain"), random.Random(seed)
    ends = collections.Counter()
    with tempfile.TemporaryDirectory() as directory:
        bodies = {}
        for name, value in corpus().items():
            with fastckpt.Manager(Path(directory) / name) as manager:
                manager.save(1, value)
                manager.wait()
                path = Path(manager.path(1))
            look(path, known, plain, dice)
            restored(path, known)
            bodies[path] = manifest.body_of(path)
        sound = Path(directory) / "sound"
        fastckpt.save({"a": np.zeros(3)}, sound)
        for _ in range(20):
            commanded(sound, sound, Path(directory) / "out", dice)
        before, modules = peak(), set(sys.modules)
        for _ in range(count):
            path = dice.choice(list(bodies))
            body = dict(bodies[path])
            body["structure"], of_keys = drawn(dice, body["structure"], len(body["tensors"]))
            if dice.random() < 0.3:
                body["metadata"] = [["dict", 1], "step", *dice.choice(LEAVES)]
            manifest.forge(path, body)
            ran.clear()
            began = time.process_time()
            said = json.dumps(body["structure"])[:3000]
            try:
                ends.update(look(path, known, plain, dice))
                ends[restored(path, known)] += 1
                ends[commanded(path, sound, Path(directory) / "out", dice)] += 1
            except Exception as error:
                raise AssertionError(said) from error
            took = time.process_time() - began
            assert set(ran) <= (OF_KEYS if of_keys else set()), (ran, said)
            assert took < SECONDS, (took, said)
            assert peak() - before < GROWTH, (peak() - before, said)
            assert not set(sys.modules) - modules, (set(sys.modules) - modules, said)
    print(json.dumps(ends))


@pytest.mark.parametrize("seed", [1])
def test_nothing_of_a_file_runs_and_nothing_grows(seed):
    needs.package("omegaconf")
    command = [sys.executable, __file__, str(seed), str(DRAWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=zygote.environment())
    assert done.returncode == 0, done.stderr[-4000:]
    ends = json.loads(done.stdout)
    # Most changes are refused, and some do no harm.
    assert ends["CorruptCheckpointError"] > DRAWS
    assert ends["read"] > DRAWS
    assert set(ends) <= {"read", "CorruptCheckpointError", "CheckpointError", "UnsupportedTypeError"}


@pytest.mark.parametrize("part", ["values", "constituents", "state"])
def test_an_expanded_tensor_is_no_part_of_another(tmp_path, part):
    torch = pytest.importorskip("torch")
    wide = [["expanded", [1 << 40], ""], ["tensor", 0]]
    fastckpt.save({"a": torch.zeros(1, dtype=torch.uint8), "i": torch.zeros(1, 1, dtype=torch.int64)}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    body["structure"] = {
        "values": [["coo", [1], False, ""], ["tensor", 1], *wide],
        "constituents": [
            *(["type", "torch.nested.nested_tensor"], ["dict", 3], "constituents", ["list", 1], *wide),
            *("dtype", ["dtype", "uint8"], "flags", ""),
        ],
        "state": [["type", "torch.Generator"], ["dict", 2], "device", "cpu", "state", *wide],
    }[part]
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(fastckpt.CorruptCheckpointError, match=r"expanded tensor that is part|not a tensor"):
        fastckpt.load(tmp_path / "c")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_parts_that_are_used_again_are_bounded(tmp_path):
    torch = pytest.importorskip("torch")
    fastckpt.save({"big": torch.zeros(4 << 20, dtype=torch.uint8)}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")

    def nested(times):
        one = [["type", "torch.nested.nested_tensor"], ["dict", 3], "constituents", ["list", 1], ["tensor", 0]]
        return [["list", times], *[*one, "dtype", ["dtype", "uint8"], "flags", ""] * times]

    for times, taken in ((20, True), (100, False)):
        body["structure"] = nested(times)
        manifest.forge(tmp_path / "c", body)
        if taken:
            assert len(fastckpt.load(tmp_path / "c")) == times
        else:
            with pytest.raises(fastckpt.CorruptCheckpointError, match="part of too many others"):
                fastckpt.load(tmp_path / "c")


def test_what_no_load_would_make_is_not_saved(tmp_path):
    torch = pytest.importorskip("torch")
    matrix = torch.ones(2 << 20).to_sparse()
    fastckpt.save([matrix] * 60, tmp_path / "c")
    assert len(fastckpt.load(tmp_path / "c")) == 60
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="at so many places"):
        fastckpt.save([matrix] * 100, tmp_path / "d")


def test_parts_of_tensors_are_stored_in_full(tmp_path):
    """The values of a matrix may be one expanded number, as in graphs."""
    torch = pytest.importorskip("torch")
    indices = torch.stack([torch.arange(50), torch.arange(50)])
    matrix = torch.sparse_coo_tensor(indices, torch.ones(1).expand(50), (50, 50))
    nested = torch.nested.nested_tensor_from_jagged(torch.ones(1, 3).expand(7, 3), torch.tensor([0, 3, 7]))
    report = fastckpt.save({"m": matrix, "n": nested, "leaf": torch.ones(1).expand(50)}, tmp_path / "c")
    assert report.bytes >= 50 * 16 + 50 * 4 + 84
    back = fastckpt.load(tmp_path / "c")
    assert torch.equal(back["m"].to_dense(), matrix.to_dense())
    assert torch.equal(back["n"].values(), torch.ones(7, 3))
    assert back["leaf"].stride() == (0,)


@pytest.mark.parametrize("kind", ["tuple", "fset"])
def test_deep_keys_are_refused_before_they_are_hashed(tmp_path, kind):
    """Hashing a deep key recurses in C, so a thread with a small stack would crash."""
    np_state = tmp_path / "c"
    fastckpt.save({"a": 1}, np_state)
    body = manifest.body_of(np_state)
    for depth, taken in ((100, True), (101, False), (9000, False)):
        for holder in ([["dict", 1], *[[kind, 1]] * depth, 1, 2], [["set", 1], *[[kind, 1]] * depth, 1]):
            body["structure"] = holder
            manifest.forge(np_state, body)
            if taken:
                assert len(fastckpt.load(np_state)) == 1
            else:
                with pytest.raises(fastckpt.CorruptCheckpointError, match="nested deeper than 100 levels"):
                    fastckpt.load(np_state)
    key = ()
    for _ in range(101):
        key = (key,)
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="nested deeper than 100 levels"):
        fastckpt.save({key: 1}, tmp_path / "d")
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="nested deeper than 100 levels"):
        fastckpt.save({key}, tmp_path / "d")


@pytest.mark.parametrize("lengths", [[float("nan"), 1.0], [True, True]])
def test_lengths_of_a_nested_tensor_are_integers(tmp_path, lengths):
    torch = pytest.importorskip("torch")
    state = [torch.ones(5), torch.tensor([0, 2, 5]), torch.tensor(lengths)]
    fastckpt.save(state, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    body["structure"] = [
        *(["type", "torch.nested.nested_tensor"], ["dict", 5], "values", ["tensor", 0], "offsets", ["tensor", 1]),
        *("lengths", ["tensor", 2], "jagged_dim", 1, "flags", ""),
    ]
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(fastckpt.CorruptCheckpointError, match="not integers"):
        fastckpt.load(tmp_path / "c")


def test_deep_metadata_is_shown(tmp_path, capsys):
    from harness import cli

    deep = 1
    for _ in range(1500):
        deep = {"x": deep}
    queue = 1
    for _ in range(1500):
        queue = collections.deque([queue])
    fastckpt.save({"a": 1}, tmp_path / "c", metadata={"deep": deep, "queue": queue})
    assert cli.main(["info", str(tmp_path / "c"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["metadata"]
    assert "nested deeper than 100 levels" in json.dumps(shown["deep"])
    assert shown["queue"] == "a deep deque"


def test_info_shows_no_environment(tmp_path, capsys, monkeypatch):
    omegaconf = needs.package("omegaconf")
    from harness import cli

    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    config = omegaconf.OmegaConf.create({"a": "${oc.env:TOKEN_OF_MINE}"})
    fastckpt.save({"cfg": config}, tmp_path / "c", metadata={"cfg": config})
    for command in (["info"], ["info", "--json"], ["diff", str(tmp_path / "c")]):
        assert cli.main([command[0], str(tmp_path / "c"), *command[1:]]) == 0
        assert "secret" not in capsys.readouterr().out


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))


@pytest.mark.parametrize(
    "value",
    [
        *([["type", "collections.OrderedDict"], *items] for items in ([7], [["list", 3], 1, 2, 3], [["dict", 0]])),
        [["ddict", 1], ["list", 2], 1, 2, "k", 1],
    ],
)
def test_malformed_mappings_are_refused_by_all_that_walk_over_them(tmp_path, capsys, value):
    """A conversion to Hugging Face's layout makes no objects from a structure, but must still check it."""
    from harness.cli import main

    fastckpt.save({"model": {"a": np.zeros(3)}}, tmp_path / "c", files=fastckpt.Files(model_key="model"))
    body = manifest.body_of(tmp_path / "c")
    body["structure"] = [["dict", 2], "a", ["array", 0], "b", *value]
    manifest.forge(tmp_path / "c", body)
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "hf"), "--format", "hf"]) == 1
    assert "malformed at token" in capsys.readouterr().err
    for how in ({}, {"keys": "*a*"}, {"rename": str.upper}, {"into": {"a": 1}, "strict": False}):
        with pytest.raises(fastckpt.CorruptCheckpointError, match="malformed at token"):
            fastckpt.load(tmp_path / "c", **how)
    with pytest.raises(fastckpt.CorruptCheckpointError, match="malformed at token"):
        fastckpt.open(tmp_path / "c")


def test_an_error_asks_no_key_how_it_looks(tmp_path):
    """An error must not call methods of newly made objects."""

    class Refused:
        """A class whose decoder fails."""

    def refuse(_):
        raise ValueError("no")

    fastckpt.save({"a": 1}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    key = [["tuple", 1], ["type", "hostile.bare"], None]
    body["structure"] = [["dict", 1], *key, ["type", "hostile.refused"], None]
    manifest.forge(tmp_path / "c", body)
    known = fastckpt.Registry()
    known.register(BARE, lambda _: None, lambda _: object.__new__(BARE), name="hostile.bare")
    known.register(Refused, lambda _: None, refuse, name="hostile.refused")
    ran.clear()
    with pytest.raises(fastckpt.CheckpointError, match=r"cannot make \[<tuple>\]: .*no"):
        fastckpt.load(tmp_path / "c", registry=known)
    assert set(ran) <= OF_KEYS
