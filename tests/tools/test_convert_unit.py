"""Parts of ``fastckpt import`` and ``export``: malicious pickles, the child that examines them, a file's header.

A child records the names in a pickle and does nothing else with them; it must not die.
"""

from __future__ import annotations

import codecs
import collections
import datetime as dt
import errno
import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

import fastckpt
from fastckpt._tools.convert import needs as _needs
from fastckpt._tools.convert import one_file as _one_file
from fastckpt._tools.convert import pickled as _pickled
from fastckpt._tools.convert import torch_items as _items
from fastckpt._tools.convert.distributed import DAMAGED
from fastckpt.exceptions import CheckpointError
from harness import cli, needs, zygote

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as error:
    needs.missing(str(error))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
#: The number of drawn pickles.
DRAWS = int(os.environ.get("FASTCKPT_DRAWS", "200000"))
SLOT = b"N}(U\x08__name__U\x01xU\x01aK\x01u\x86b"


class Storages:
    """The storages of a file, of 64 bytes each."""

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
    """Return pickles in torch's format."""
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
    """The state that a pickle must not change."""
    kinds = (collections.Counter, collections.OrderedDict, _items.Record, _items.Recorder, *_items.KINDS.values())
    functions = [each for each in vars(_items).values() if callable(each) and hasattr(each, "__dict__")]
    return [sorted(vars(kind)) for kind in kinds], [(each.__name__, sorted(vars(each))) for each in functions]


def watch():
    """A list of everything that a pickle's names run, import, open or look up."""
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
    codecs.lookup("raw-unicode-escape")  # an opcode needs this lookup, whatever its argument
    # The same limit as in the process that reads pickles for a conversion.
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
    command = [sys.executable, __file__, "1", str(DRAWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=zygote.environment())
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
        "does not fit its shape and dtype",
    ),
    "objects of bytes": (ARRAY + b"(K\x01K\x01\x85" + DTYPE % b"O8" + b"\x89C\x08abcdefghtb.", "bytes instead of list"),
    "a dtype with fields": (named("numpy", "dtype") + b"U\x02i8\x85R(K\x03U\x01<N)}K\x08K\x01K\x00tb.", "not plain"),
    "a dtype of many bytes": (named("numpy", "dtype") + b"U\x0bV2147483647\x85R.", "an invalid dtype"),
    "an attribute of a class": (named("collections", "Counter") + SLOT + b".", "a state that a Recorder cannot have"),
    "an attribute of a recorder": (named("torch", "Size") + SLOT + b".", "a state that a Recorder cannot have"),
    "an attribute of a record": (METADATA + SLOT + b".", NOT_READ),
    "an attribute of a dtype": (named("torch", "float32") + SLOT + b".", "a state that a dtype cannot have"),
    "a state of a tensor": (valid()[-1][:-1] + b"(" + STORAGE + b"K\x00K\x02\x85K\x01\x85tb.", "a Tensor cannot have"),
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
    """Missing attributes of the module would be imported as modules."""
    program = (
        "import sys, test_convert_unit as own\n"
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
    assert cli.main(["import", str(overlapping), str(tmp_path / "c")]) == 2
    assert "--expand" in capsys.readouterr().err
    dcp.save({"w": torch.ones(4), "blob": [1]}, checkpoint_id=tmp_path / "torchs")
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 0


def test_an_expanded_tensor_becomes_a_file_only_when_told(tmp_path, capsys):
    fastckpt.save({"w": torch.ones(1).expand(20 << 20), "x": torch.ones(2)}, tmp_path / "c")
    command = ["export", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]
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


#: A child that waits for a pipe would wait forever; this limit suits a busy machine.
PATIENCE = 300


class Measured(NamedTuple):
    """The end of a conversion, and the bytes of memory that it and its child took beyond their modules.

    ``held`` is the memory without a file behind it when the written file is synced: the kernel cannot reclaim it.
    """

    status: int
    grown: int
    child_grown: int
    held: int
    stderr: str


def measured(command, *arguments, memory=512 << 20):
    """Convert in a separate process, which measures itself; ``memory`` is the limit of its child for any file.

    The process reads VmHWM, because ru_maxrss begins with the peak of the parent. For the child, ru_maxrss will do: its
    parent is the converter, which has not read anything yet.
    """
    program = (
        "import json, os, resource, sys\n"
        "from fastckpt._tools.convert import one_file as _one_file\n"
        "from fastckpt._tensors import torch as _torch\n"
        "from harness import cli\n"
        "from fastckpt._tools.convert import pickled\n"
        "import safetensors.torch\n"
        "last = 'look(sys.argv[1]'\n"
        "assert last in pickled._PROGRAM and pickled._MEMORY == 512 << 20\n"
        f"less = 'import fastckpt._tools.convert.pickled as pickled; pickled._MEMORY = {memory}; '\n"
        "pickled._PROGRAM = pickled._PROGRAM.replace(last, less + last)\n"
        "def memory(name='VmHWM:'):\n"
        "    with open('/proc/self/status') as file:\n"
        "        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(name))\n"
        "before, held, sync = memory(), [memory('RssAnon:')], os.fsync\n"
        "os.fsync = lambda file: (held.append(memory('RssAnon:')), sync(file))\n"
        f"status = cli.main(['{command}', *sys.argv[1:]])\n"
        "child = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(json.dumps([status, memory() - before, child - before, max(held) - held[0]]))\n"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = zygote.environment()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, env=environment)
    return Measured(*json.loads(done.stdout.splitlines()[-1]), done.stderr)


def test_ties_are_not_copied(tmp_path):
    """A tensor has a hundred names: the file has each, but memory has the tensor only once."""
    shared = torch.arange(1 << 18, dtype=torch.float32)
    state = {f"t{number}": shared for number in range(100)}
    state["half"] = torch.arange(7, dtype=torch.bfloat16)
    state["flag"] = torch.tensor(True)
    state["none"] = torch.empty(0, 3, dtype=torch.int64)
    state["turned"] = torch.arange(6.0).reshape(2, 3).T
    fastckpt.save(state, tmp_path / "c")
    done = measured("export", tmp_path / "c", tmp_path / "m.safetensors", "--expand")
    assert done.status == 0
    assert done.grown < 64 << 20  # the file has 100 MiB
    back = load_file(tmp_path / "m.safetensors")
    assert set(back) == set(state)
    assert all(back[name].dtype == tensor.dtype and torch.equal(back[name], tensor) for name, tensor in state.items())
    (tmp_path / "m.safetensors").unlink()


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_an_export_does_not_hold_the_state(tmp_path, form):
    """The tensors of an export are pages of the checkpoint's files until the last tensor is written."""
    fastckpt.save({"w": torch.ones(32 << 20), "turned": torch.ones(1 << 10, 1 << 10).T}, tmp_path / "c")
    done = measured("export", tmp_path / "c", tmp_path / "out", "--format", form)
    assert done.status == 0, done.stderr
    assert done.held < 96 << 20


def test_a_file_that_the_library_refuses_replaces_nothing(tmp_path, monkeypatch, capsys):
    fastckpt.save({"w": torch.ones(4)}, tmp_path / "c")
    (tmp_path / "m.safetensors").write_text("precious")
    header = _one_file._header
    monkeypatch.setattr(_one_file, "_header", lambda *given: header(*given).replace(b"[4]", b"[5]"))
    assert cli.main(["export", "--overwrite", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]) != 0
    assert "safetensors refuses the file" in capsys.readouterr().err
    assert (tmp_path / "m.safetensors").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["c", "m.safetensors"]  # noqa: PTH208 - names


def test_a_header_is_counted_in_bytes(tmp_path, monkeypatch, capsys):
    """Names have many bytes per character; the refusal comes before the file is created."""
    state = {"é" * 400: torch.ones(1), "x": torch.ones(1)}
    fastckpt.save(state, tmp_path / "c")
    command = ["export", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]
    monkeypatch.setattr(_one_file, "HEADER", 800)
    write = _one_file._write_safetensors
    monkeypatch.setattr(_one_file, "_write_safetensors", lambda *_: pytest.fail("a file was opened"))
    assert cli.main(command) == 2
    assert "more than the 800 bytes" in capsys.readouterr().err
    monkeypatch.setattr(_one_file, "_write_safetensors", write)
    monkeypatch.setattr(_one_file, "HEADER", 1040)
    assert cli.main(command) == 0
    assert set(load_file(tmp_path / "m.safetensors")) == set(state)


def test_the_longest_header_is_the_one_that_the_library_opens(tmp_path):
    """A header of 100,000,000 bytes is written; with 8 more bytes, neither fastckpt nor the library accepts it."""
    tensor = torch.ones(1)
    dtypes = {torch.float32: ("F32", 1)}
    path = tmp_path / "m.safetensors"
    spare = 100_000_000 - len(_one_file._header([("", tensor)], dtypes, path))
    header = _one_file._header([("n" * spare, tensor)], dtypes, path)
    assert len(header) == 100_000_000
    _one_file._write_safetensors(path, header, [tensor], torch)
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 1
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="100000000 bytes"):
        _one_file._header([("n" * (spare + 8), tensor)], dtypes, path)
    path.unlink()
    _one_file._write_safetensors(path, header + b" " * 8, [tensor], torch)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    path.unlink()


def pickled(path, code):
    """A file in the layout of ``torch.save``, without storages, with a given pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3\n")


def nested_tuples(levels):
    """Nested tuples that hold the same tuple twice: each level doubles the number of values of 8 bytes."""
    code = b"\x80\x02K\x01"
    for level in range(levels):
        code += b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return code + b"."


def test_a_control_is_imported(tmp_path, import_):
    pickled(tmp_path / "few.pt", nested_tuples(2))
    done = import_(tmp_path / "few.pt", tmp_path / "out")
    assert done.returncode == 0, done
    assert fastckpt.load(tmp_path / "out") == ((1, 1), (1, 1))


@pytest.mark.parametrize(("levels", "limit", "less"), [(40, "_MEMORY", 64 << 20), (200, "_SECONDS", 2)])
def test_a_pickle_of_nested_tuples_is_refused(tmp_path, import_, monkeypatch, levels, limit, less):
    assert less < getattr(_pickled, limit)
    monkeypatch.setattr(_pickled, limit, less)
    pickled(tmp_path / "bomb.pt", nested_tuples(levels))
    assert (tmp_path / "bomb.pt").stat().st_size < 2000
    done = import_(tmp_path / "bomb.pt", tmp_path / "out")
    assert done.returncode == 2, done
    assert "more memory or time than a file of" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_asks_for_much_is_refused(tmp_path, import_):
    code = b"\x80\x02cbuiltins\nbytearray\n" + b"\x8a\x05" + struct.pack("<q", 3 << 32)[:5] + b"\x85R."
    pickled(tmp_path / "bomb.pt", code)
    done = import_(tmp_path / "bomb.pt", tmp_path / "out")
    assert done.returncode in (1, 2), done
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("objects", "memory", "status"), [(1 << 18, 512 << 20, 0), (1 << 19, 64 << 20, 2)])
def test_many_small_objects_are_refused_or_imported_in_proportion(tmp_path, objects, memory, status):
    """With megabytes of empty dictionaries, excessive memory ends the child, but not this process."""
    pickled(tmp_path / "many.pt", b"\x80\x02](" + b"}" * objects + b"e.")
    done = measured("import", tmp_path / "many.pt", tmp_path / "out", memory=memory)
    share = memory + 16 * (tmp_path / "many.pt").stat().st_size
    slack = 128 << 20
    assert done.status == status
    assert ("more memory or time" in done.stderr) == (status == 2)
    assert 0 < done.child_grown < share + slack
    assert done.grown < (slack if status else share + slack)


@pytest.mark.slow
def test_a_pickle_of_keys_that_collide_ends_with_its_time(tmp_path, import_, monkeypatch):
    monkeypatch.setattr(_pickled, "_SECONDS", 2)
    period = (1 << 61) - 1
    pickled(
        tmp_path / "bomb.pt",
        pickle.dumps(dict.fromkeys(range(4)), 2)[:2]
        + b"}("
        + b"".join(b"\x8a\x0a" + (number * period).to_bytes(10, "little") + b"N" for number in range(1, 150_000))
        + b"u.",
    )
    done = import_(tmp_path / "bomb.pt", tmp_path / "out")
    assert done.returncode == 2, done
    assert "more memory or time than a file of" in done.stderr


def test_the_child_takes_no_module_from_where_it_is_started(tmp_path):
    """A directory of downloads may hold a torch.py, or a json.py."""
    for name in ("torch", "json", "fastckpt", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')\n")
    torch.save({"w": torch.zeros(2)}, tmp_path / "m.pt")
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from fastckpt._tools.convert import pickled as _pickled\n"
        "os.chdir(sys.argv[1])\n"
        "_pickled.check(Path('m.pt'))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def printing(tmp_path, monkeypatch):
    """An environment in which Python prints when it starts, and when it ends."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import atexit\nprint('hello')\nprint('{}')\nprint('hello', end='')\natexit.register(print, 'bye')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    printed = subprocess.run([sys.executable, "-c", ""], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert printed.stdout == "hello\n{}\nhellobye\n"


@pytest.mark.usefixtures("printing")
def test_what_python_prints_when_it_starts_is_no_answer(tmp_path, capsys):
    """The answer of the child goes to a separate file."""
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    torch.save({"w": Path()}, tmp_path / "bad.pt")
    assert cli.main(["import", str(tmp_path / "good.pt"), str(tmp_path / "good")]) == 0
    assert torch.equal(fastckpt.load(tmp_path / "good")["w"], torch.ones(2))
    capsys.readouterr()
    assert cli.main(["import", str(tmp_path / "bad.pt"), str(tmp_path / "bad")]) == 2
    assert "more than tensors and plain containers" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_the_answer_may_be_longer_than_a_pipe_holds(tmp_path, monkeypatch):
    """The answer quotes names from a pickle, whose lengths have no bound."""
    (tmp_path / "m.pt").touch()
    program = "import json, sys; json.dump({'kind': 'Kind', 'reason': 'n' * (1 << 20)}, open(int(sys.argv[2]), 'w'))"
    monkeypatch.setattr(_pickled, "_PROGRAM", program)
    with pytest.raises(_pickled.RefusedError) as caught:
        _pickled.check(tmp_path / "m.pt")
    assert str(caught.value) == "n" * (1 << 20)


def test_the_standard_input_may_be_closed(tmp_path):
    """A new descriptor may then get a number that the child replaces."""
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    torch.save({"w": Path()}, tmp_path / "bad.pt")
    program = "from harness.cli import main; print(*[main(['import', f'{n}.pt', n]) for n in ('good', 'bad')])"
    command = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, program]
    pipe, environment = subprocess.PIPE, zygote.environment()
    done = subprocess.run(command, cwd=tmp_path, timeout=PATIENCE, check=True, stdout=pipe, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "0 2"
    assert (tmp_path / "good").exists()
    assert not (tmp_path / "bad").exists()


def test_a_child_without_an_answer_is_no_consent(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.setattr(_pickled, "_PROGRAM", "")
    with pytest.raises(_pickled.RefusedError, match="without an answer"):
        _pickled.check(tmp_path / "m.pt")


def test_a_full_disk_is_told_with_the_file(tmp_path, export, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_one_file, "_write_safetensors", full)
    fastckpt.save({"w": torch.ones(4)}, tmp_path / "c")
    done = export(tmp_path / "c", tmp_path / "m.safetensors", "--json")
    status, document = done.returncode, json.loads(done.stdout)
    assert (status, document["type"]) == (2, "OSError")
    assert str(tmp_path / "m.safetensors") in document["error"]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
