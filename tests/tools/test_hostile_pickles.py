"""Pickles that are made to harm: what they name is recorded, and nothing else happens, in a child that must not die."""

from __future__ import annotations

import codecs
import collections
import datetime as dt
import io
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt._tools import cli
from fastckpt._tools.convert import needs as _needs
from fastckpt._tools.convert import pickled as _pickled
from fastckpt._tools.convert import torch_items as _items
from fastckpt._tools.convert.distributed import DAMAGED
from fastckpt.exceptions import CheckpointError
from harness import needs

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as error:
    needs.missing(str(error))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
#: How many pickles are drawn.
DRAWS = int(os.environ.get("FASTCKPT_DRAWS", "200000"))
SLOT = b"N}(U\x08__name__U\x01xU\x01aK\x01u\x86b"


class Storages:
    """The storages of a file, each of 64 bytes."""

    def storage(self, _):
        return np.zeros(64, np.uint8)


def read(code, *, table=False):
    if table:
        return _items.MetadataUnpickler(torch, io.BytesIO(code)).load()
    return _items._ItemUnpickler(torch, Storages(), io.BytesIO(code)).load()


def named(module, name):
    return f"c{module}\n{name}\n".encode()


GLOBALS = [
    *_items._VALUES,
    *_items._PLAIN,
    *_items.KINDS,
    *(("torch", name) for name in ("device", "float32", "FloatStorage", "Tensor", "load", "nn")),
    *(("torch._utils", name) for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
    *(("numpy", name) for name in ("dtype", "ndarray", "load", "memmap")),
    *(("numpy.core.multiarray", name) for name in ("_reconstruct", "scalar", "frombuffer")),
    *(("pathlib", "PosixPath"), ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("copyreg", "x")),
]
STORAGE = b"(U\x07storage" + named("torch", "FloatStorage") + b"U\x010U\x03cpuK\x10tQ"
PIECES = [
    *(b"K\x00", b"K\x07", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"G" + b"\x7f\xf8" + b"\0" * 6),
    *(b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"(", b"0", b"1", b"2", b"U\x01b", b"U\x02O8", b"U\x02f4"),
    *(b"X\x05\0\0\0names", b"C\x04abcd", b"B\x08\0\0\0abcdefgh", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"),
    *(b"\x96" + b"\xff" * 7 + b"\x7f", b"r\xff\xff\xff\x7f", b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"\x94", b"Q"),
    *(b"R", b"R", b"R", b"b", b"b", b"b", SLOT, b"a", b"e", b"s", b"u", b"\x90", b"\x91", b"t", b"\x85", b"\x86"),
    *(b"\x87", b"l", b"d", b"o", b"i", b"\x81", b"\x92", b"\x82\x01", b"\x93", b"\x95" + b"\xff" * 8, STORAGE),
    b"I99999999999999999999\n",
    *(named(*one) for one in GLOBALS),
]


def valid():
    """Pickles as torch writes them."""
    values = [
        *(np.arange(3, dtype=">i2"), np.float32(3), np.array(["2020-01-01"], "M8[D]"), np.array([1, None], object)),
        *(dt.datetime(2020, 1, 2, tzinfo=dt.timezone.utc), dt.timedelta(1, 2, 3), collections.deque([1, 2], 5)),
        *(collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aab")),
        *({1, 2}, frozenset([1]), 1j, bytearray(b"abc"), slice(1, 2), torch.Size([1, 2]), torch.float32, b"abc"),
        torch.device("cuda:0"),
    ]
    view = named("torch._utils", "_rebuild_tensor_v2") + b"(" + STORAGE + b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89"
    tensor = b"\x80\x02" + view + named("collections", "OrderedDict") + b")RtR."
    return [*(pickle.dumps(value, protocol) for value in values for protocol in (2, 4)), tensor]


def table():
    metadata = dcp.metadata
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    properties = metadata.TensorProperties(torch.float32)
    about = metadata.TensorStorageMetadata(properties, torch.Size([2]), [chunk])
    return pickle.dumps(metadata.Metadata({"w": about}, {"w": ("w",)}, {metadata.MetadataIndex("w"): 1}), 2)


def drawn(dice, seeds):
    if dice.random() < 0.4:
        return b"\x80\x02" + b"".join(dice.choices(PIECES, k=dice.randrange(1, 30))) + b"."
    code = bytearray(dice.choice(seeds))
    for _ in range(dice.choice([1, 1, 2, 4])):
        at = dice.randrange(len(code))
        code[at : at + dice.choice([0, 0, 1, 4])] = dice.choice(
            [dice.choice(PIECES), bytes([dice.randrange(256)]), code[at : at + 20]]
        )
    return bytes(code)


def marks():
    """What a pickle may not change."""
    kinds = (collections.Counter, collections.OrderedDict, _items.Record, _items.Recorder, *_items.KINDS.values())
    functions = [each for each in vars(_items).values() if callable(each) and hasattr(each, "__dict__")]
    return [sorted(vars(kind)) for kind in kinds], [(each.__name__, sorted(vars(each))) for each in functions]


def watch():
    """A list that grows with whatever runs, is imported, opened or looked up by a name of a pickle."""
    seen = []
    kinds = ("compile", "ctypes", "exec", "import", "marshal", "open", "os", "pickle", "shutil", "socket", "subprocess")

    def hook(event, arguments):
        if event.partition(".")[0] in kinds:
            seen.append((event, repr(arguments)[:200]))

    sys.addaudithook(hook)
    return seen


def main(seed, count):
    import faulthandler
    import resource
    import warnings

    faulthandler.enable()
    warnings.simplefilter("ignore")
    dice, seeds, tables = random.Random(seed), valid(), [table()]
    for code in seeds:
        read(code)
    read(tables[0], table=True)
    codecs.lookup("raw-unicode-escape")  # which an opcode needs, whatever it says
    # As much as the process may have that reads them for a conversion.
    resource.setrlimit(resource.RLIMIT_DATA, (_pickled._data(0), resource.getrlimit(resource.RLIMIT_DATA)[1]))
    before, modules, seen = marks(), set(sys.modules), watch()
    ends = collections.Counter()
    for number in range(count):
        is_table = number % 4 == 0
        code = drawn(dice, tables if is_table else seeds)
        try:
            found = read(code, table=is_table)
            assert not isinstance(found, type) or issubclass(found, _items.Record), (found, code)
            ends["read"] += 1
        except (pickle.UnpicklingError, MemoryError, *DAMAGED) as error:
            ends[type(error).__name__] += 1
        assert not seen, (seen, code)
        if number % 50 == 0:
            assert marks() == before, code
            assert set(sys.modules) == modules, (set(sys.modules) - modules, code)
    assert marks() == before
    print(json.dumps(ends))


def test_no_pickle_harms_the_process_that_reads_it():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, __file__, "1", str(DRAWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends["read"] > DRAWS // 50
    assert ends["UnpicklingError"] > DRAWS // 50


DTYPE = named("numpy", "dtype") + b"U\x02%bK\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
ARRAY = named("numpy.core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85U\x01b\x87R"
NOT_READ = "is not among the classes that are read"
METADATA = named(_items.METADATA, "Metadata")
#: Pickles of values and of tables, and why each is refused.
HOSTILE = {
    "an array beyond its bytes": (
        ARRAY + b"(K\x01M\xff\xff\x85" + DTYPE % b"i8" + b"\x89C\x08abcdefghtb.",
        "another size",
    ),
    "objects of bytes": (ARRAY + b"(K\x01K\x01\x85" + DTYPE % b"O8" + b"\x89C\x08abcdefghtb.", "bytes instead of list"),
    "a dtype with fields": (named("numpy", "dtype") + b"U\x02i8\x85R(K\x03U\x01<N)}K\x08K\x01K\x00tb.", "not plain"),
    "a dtype of many bytes": (named("numpy", "dtype") + b"U\x0bV2147483647\x85R.", "an invalid dtype"),
    "an attribute of a class": (named("collections", "Counter") + SLOT + b".", "a state of a Recorder"),
    "an attribute of a recorder": (named("torch", "Size") + SLOT + b".", "a state of a Recorder"),
    "an attribute of a record": (METADATA + SLOT + b".", NOT_READ),
    "an attribute of a dtype": (named("torch", "float32") + SLOT + b".", "a state of a dtype"),
    "a state of a tensor": (valid()[-1][:-1] + b"(" + STORAGE + b"K\x00K\x02\x85K\x01\x85tb.", "a state of a Tensor"),
    "a tensor outside its storage": (valid()[-1].replace(b"QK\x00K\x02K\x03\x86", b"QK\x0fK\x02K\x03\x86"), "outside"),
    "bytes by their number": (named("builtins", "bytearray") + b"J\xff\xff\x00\x00\x85R.", "int instead of bytes"),
    "an item of an array": (ARRAY + b"K\x00K\x01s.", "ndarray instead of dict"),
    "items of an array": (ARRAY + b"(K\x00K\x01u.", "ndarray instead of dict"),
    "a member of an array": (ARRAY + b"K\x00a.", "ndarray instead of list"),
    "a member of a list for a set": (b"](K\x00\x90.", "list instead of set"),
    "a scalar beyond its bytes": (
        named("numpy.core.multiarray", "scalar") + DTYPE % b"f8" + b"C\x02ab\x86R.",
        "an invalid scalar",
    ),
    "objects as a scalar": (
        named("numpy.core.multiarray", "scalar") + DTYPE % b"O8" + b"C\x08abcdefgh\x86R.",
        "an invalid scalar",
    ),
    "a length of 2^63": (b"\x8e" + b"\xff" * 7 + b"\x7f.", "^$"),
    "a buffer of 2^62": (b"\x96" + b"\0" * 7 + b"\x40.", "150"),
}
HOSTILE_TABLES = {
    "another function of a recorder": (
        named("torch", "Size") + b"N}U\x04makeU\x01xs\x86b.",
        "a state for an object that has none",
    ),
    "an attribute of a record": (METADATA + SLOT + b".", "__setstate__"),
    "an attribute of a dtype": (named("torch", "float32") + SLOT + b".", "no attribute"),
    "an array": (ARRAY + b".", NOT_READ),
}


@pytest.mark.parametrize(
    ("code", "why", "table"),
    [
        *(pytest.param(*HOSTILE[what], False, id=what) for what in HOSTILE),
        *(pytest.param(*HOSTILE_TABLES[what], True, id=f"{what} in a table") for what in HOSTILE_TABLES),
    ],
)
def test_hostile_pickles_are_refused(code, why, table):
    before = marks()
    with pytest.raises((pickle.UnpicklingError, *DAMAGED), match=why):
        read(b"\x80\x02" + code, table=table)
    assert marks() == before


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    "module", ["os", "posix", "builtins", "__builtin__", "copyreg", "subprocess", "pathlib", "torch"]
)
@pytest.mark.parametrize(
    "name", ["system", "eval", "getattr", "__import__", "_reconstructor", "Popen", "load", "path.join"]
)
def test_names_beyond_the_list_are_not_found(module, name, table):
    stacked = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    for code in (b"\x80\x02" + named(module, name) + b".", b"\x80\x04" + stacked):
        with pytest.raises(pickle.UnpicklingError, match=NOT_READ):
            read(code, table=table)


@pytest.mark.parametrize("table", [False, True])
def test_a_name_makes_torch_import_nothing(table):
    """Attributes of the module that are not there yet are modules that it imports."""
    program = (
        "import sys, test_hostile_pickles as own\n"
        "before = set(sys.modules)\n"
        "for name in ('_dynamo', '_inductor', 'onnx', 'float31'):\n"
        "    try:\n"
        f"        own.read(b'\\x80\\x02' + own.named('torch', name) + b'.', table={table})\n"
        "    except own.pickle.UnpicklingError:\n"
        "        continue\n"
        "    raise SystemExit(name)\n"
        "raise SystemExit(str(set(sys.modules) - before) if set(sys.modules) - before else 0)\n"
    )
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_torch_writes_is_read():
    for code in valid():
        read(code)


@pytest.fixture
def overlapping(tmp_path):
    """A file of 1 MB whose tensor has 512 GB."""
    torch.save({"w": torch.zeros(1 << 18).as_strided((1 << 17, 1 << 17), (1, 1))}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.usefixtures("quick_look")
def test_overlapping_tensors_do_not_become_gigabytes(overlapping, tmp_path, capsys):
    assert cli.main(["convert", str(overlapping), str(tmp_path / "c")]) == 2
    assert "--expand" in capsys.readouterr().err
    dcp.save({"w": torch.ones(4), "blob": [1]}, checkpoint_id=tmp_path / "torchs")
    assert cli.main(["convert", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 0


def test_an_expanded_tensor_becomes_a_file_only_when_told(tmp_path, capsys):
    fastckpt.save({"w": torch.ones(1).expand(20 << 20), "x": torch.ones(2)}, tmp_path / "c")
    command = ["convert", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]
    assert cli.main(command) == 2
    assert "its 12 bytes would become 83886088" in capsys.readouterr().err
    assert cli.main([*command, "--expand"]) == 0
    assert (tmp_path / "m.safetensors").stat().st_size > 80 << 20


def test_an_old_torch_reads_no_pickles(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(CheckpointError, match=r"torch 2\.5\.1\+cpu executes code"):
        _needs.unpickling_torch_for(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert _needs.unpickling_torch_for(tmp_path) is torch


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
