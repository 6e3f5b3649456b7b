"""``fastckpt convert`` and input made to harm: what is not a file, what shares memory, and pickles that make much."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fastckpt
from fastckpt._tools import cli
from fastckpt._tools.convert import one_file as _one_file
from fastckpt._tools.convert import pickled as _pickled
from harness import needs

try:
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save
except ImportError as error:
    needs.missing(str(error))

#: A child that waits for a pipe waits for ever; this is for a busy machine.
PATIENCE = 300


@pytest.fixture
def convert(quick_look, capsys):
    """The command, in this process; its child, under its limits, is forked."""

    def go(*arguments):
        capsys.readouterr()
        status = cli.main(["convert", *map(str, arguments)])
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return go


class Measured(NamedTuple):
    """How a conversion ended, and its memory in bytes beyond what its modules take: its own, and its child's."""

    status: int
    grown: int
    child_grown: int
    stderr: str


def measured(*arguments, memory=512 << 20):
    """Convert in a process of its own, which measures itself; ``memory`` is what its child may take for any file.

    VmHWM and not ru_maxrss, because the latter begins with the peak of the process that starts it. Of the child's, that
    is the converter before it has read anything.
    """
    program = (
        "import json, resource, sys\n"
        "from fastckpt._tools.convert import one_file as _one_file\n"
        "from fastckpt._tensors import torch as _torch\n"
        "from fastckpt._tools import cli\n"
        "from fastckpt._tools.convert import pickled\n"
        "import safetensors.torch\n"
        "last = 'look(sys.argv[1]'\n"
        "assert last in pickled._PROGRAM and pickled._MEMORY == 512 << 20\n"
        f"less = 'import fastckpt._tools.convert.pickled as pickled; pickled._MEMORY = {memory}; '\n"
        "pickled._PROGRAM = pickled._PROGRAM.replace(last, less + last)\n"
        "def peak():\n"
        "    with open('/proc/self/status') as file:\n"
        "        return next(int(line.split()[1]) for line in file if line.startswith('VmHWM:'))\n"
        "before = peak()\n"
        "status = cli.main(['convert', *sys.argv[1:]])\n"
        "child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(json.dumps([status, 1024 * (peak() - before), 1024 * (child - before)]))\n"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return Measured(*json.loads(done.stdout.splitlines()[-1]), done.stderr)


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def hugging_face(shard=None, index=None):
    def make(path):
        path.mkdir()
        if index is None:
            (path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
        else:
            index(path / "model.safetensors.index.json")
        if shard is not None:
            shard(path / "a.safetensors")

    return make


def long_index(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def one_shard(spoil):
    def make(path):
        path.mkdir()
        spoil(path / "model.safetensors")

    return make


NO_FILES = {
    "fifo.pt": fifo,
    "fifo.bin": fifo,
    "fifo.safetensors": fifo,
    "device.pt": device,
    "device.safetensors": device,
    "fifo in a directory": one_shard(fifo),
    "device in a directory": one_shard(device),
    "fifo as a shard": hugging_face(shard=fifo),
    "device as a shard": hugging_face(shard=device),
    "fifo as an index": hugging_face(index=fifo),
    "device as an index": hugging_face(index=device),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_not_a_file_is_refused(tmp_path, convert, name):
    NO_FILES[name](tmp_path / name)
    done = convert(tmp_path / name, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "not a regular file" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_index_without_end_is_not_read(tmp_path, convert):
    hugging_face(index=long_index)(tmp_path / "model")
    done = convert(tmp_path / "model", tmp_path / "out")
    assert done.returncode == 2
    assert "is not an index" in done.stderr


def test_ties_are_not_copied(tmp_path):
    """A hundred names of one tensor: each is in the file, and none but the first in memory."""
    shared = torch.arange(1 << 18, dtype=torch.float32)
    state = {f"t{number}": shared for number in range(100)}
    state["half"] = torch.arange(7, dtype=torch.bfloat16)
    state["flag"] = torch.tensor(True)
    state["none"] = torch.empty(0, 3, dtype=torch.int64)
    state["turned"] = torch.arange(6.0).reshape(2, 3).T
    fastckpt.save(state, tmp_path / "c")
    done = measured(tmp_path / "c", tmp_path / "m.safetensors", "--expand")
    assert done.status == 0
    assert done.grown < 64 << 20  # the file has 100 MiB
    back = load_file(tmp_path / "m.safetensors")
    assert set(back) == set(state)
    assert all(back[name].dtype == tensor.dtype and torch.equal(back[name], tensor) for name, tensor in state.items())
    (tmp_path / "m.safetensors").unlink()


@pytest.fixture
def fp4():
    if not hasattr(torch, "float4_e2m1fn_x2"):
        needs.missing("torch.float4_e2m1fn_x2")
    return torch.arange(128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def test_fp4_has_the_header_that_the_library_gives_it(tmp_path, convert, fp4):
    """One element of torch is two values of the format, so the last dimension doubles."""
    shapes = [(128,), (8, 16), (2, 4, 16), (1, 128, 1), (0, 3), (3, 0)]
    state = {str(shape): (fp4 if 0 not in shape else fp4[:0]).reshape(shape) for shape in shapes}
    state["w"] = torch.ones(3)
    fastckpt.save(state, tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 0, done
    (tmp_path / "library.safetensors").write_bytes(save({name: tensor.clone() for name, tensor in state.items()}))
    back = load_file(tmp_path / "m.safetensors")
    with (
        safe_open(tmp_path / "m.safetensors", framework="pt") as ours,
        safe_open(tmp_path / "library.safetensors", framework="pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        for name, tensor in state.items():
            mine, its = ours.get_slice(name), theirs.get_slice(name)
            assert (mine.get_dtype(), mine.get_shape()) == (its.get_dtype(), its.get_shape())
            assert back[name].shape == tensor.shape
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8))


def test_fp4_without_dimensions_is_refused(tmp_path, convert, fp4):
    """It is two values of the format, and has no dimension to count them in; the library refuses it, too."""
    fastckpt.save({"w": fp4[0]}, tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 2, done
    assert "['w'] is a tensor of torch.float4_e2m1fn_x2 without dimensions" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["c"]  # noqa: PTH208 - names


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused(tmp_path, convert, layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    fastckpt.save({"w": nested}, tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 2, done
    assert "['w'] is a " in done.stderr
    assert "which a safetensors file cannot hold" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["c"]  # noqa: PTH208 - names


def test_a_file_that_the_library_refuses_replaces_nothing(tmp_path, monkeypatch, capsys):
    fastckpt.save({"w": torch.ones(4)}, tmp_path / "c")
    (tmp_path / "m.safetensors").write_text("precious")
    header = _one_file._header
    monkeypatch.setattr(_one_file, "_header", lambda *given: header(*given).replace(b"[4]", b"[5]"))
    assert cli.main(["convert", "--overwrite", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]) != 0
    assert "safetensors refuses the file" in capsys.readouterr().err
    assert (tmp_path / "m.safetensors").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["c", "m.safetensors"]  # noqa: PTH208 - names


def test_a_header_is_counted_in_bytes(tmp_path, monkeypatch, capsys):
    """Names of many bytes for each character; the refusal comes before there is a file."""
    state = {"é" * 400: torch.ones(1), "x": torch.ones(1)}
    fastckpt.save(state, tmp_path / "c")
    command = ["convert", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]
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
    """One of 100,000,000 bytes is written; of 8 more, neither we nor the library take it."""
    tensor = torch.ones(1)
    dtypes = {torch.float32: ("F32", 1)}
    path = tmp_path / "m.safetensors"
    spare = 100_000_000 - len(_one_file._header([("", tensor)], dtypes, path))
    header = _one_file._header([("n" * spare, tensor)], dtypes, path)
    assert len(header) == 100_000_000
    _one_file._write_safetensors(path, header, [tensor], torch)
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 1
    with pytest.raises(fastckpt.UnsupportedTypeError, match="100000000 bytes"):
        _one_file._header([("n" * (spare + 8), tensor)], dtypes, path)
    _one_file._write_safetensors(path, header + b" " * 8, [tensor], torch)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    path.unlink()


def pickled(path, code):
    """A file as ``torch.save`` lays it out, of no storages, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3\n")


def nested_tuples(levels):
    """A tuple of twice a tuple of twice ...: 2^levels values of 8 bytes each level."""
    code = b"\x80\x02K\x01"
    for level in range(levels):
        code += b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return code + b"."


def test_a_control_is_converted(tmp_path, convert):
    pickled(tmp_path / "few.pt", nested_tuples(2))
    done = convert(tmp_path / "few.pt", tmp_path / "out")
    assert done.returncode == 0, done
    assert fastckpt.load(tmp_path / "out") == ((1, 1), (1, 1))


@pytest.mark.parametrize(("levels", "limit", "less"), [(40, "_MEMORY", 64 << 20), (200, "_SECONDS", 2)])
def test_a_pickle_of_nested_tuples_is_refused(tmp_path, convert, monkeypatch, levels, limit, less):
    assert less < getattr(_pickled, limit)
    monkeypatch.setattr(_pickled, limit, less)
    pickled(tmp_path / "bomb.pt", nested_tuples(levels))
    assert (tmp_path / "bomb.pt").stat().st_size < 2000
    done = convert(tmp_path / "bomb.pt", tmp_path / "out")
    assert done.returncode == 2, done
    assert "more memory or time than a file of" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_asks_for_much_is_refused(tmp_path, convert):
    code = b"\x80\x02cbuiltins\nbytearray\n" + b"\x8a\x05" + struct.pack("<q", 3 << 32)[:5] + b"\x85R."
    pickled(tmp_path / "bomb.pt", code)
    done = convert(tmp_path / "bomb.pt", tmp_path / "out")
    assert done.returncode in (1, 2), done
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("objects", "memory", "status"), [(1 << 18, 512 << 20, 0), (1 << 19, 64 << 20, 2)])
def test_many_small_objects_are_refused_or_converted_in_proportion(tmp_path, objects, memory, status):
    """Megabytes of empty dictionaries: what takes more than its share ends in the child, and not in this process."""
    pickled(tmp_path / "many.pt", b"\x80\x02](" + b"}" * objects + b"e.")
    done = measured(tmp_path / "many.pt", tmp_path / "out", memory=memory)
    share = memory + 16 * (tmp_path / "many.pt").stat().st_size
    slack = 128 << 20
    assert done.status == status
    assert ("more memory or time" in done.stderr) == (status == 2)
    assert 0 < done.child_grown < share + slack
    assert done.grown < (slack if status else share + slack)


@pytest.mark.slow
def test_a_pickle_of_keys_that_collide_ends_with_its_time(tmp_path, convert, monkeypatch):
    monkeypatch.setattr(_pickled, "_SECONDS", 2)
    period = (1 << 61) - 1
    pickled(
        tmp_path / "bomb.pt",
        pickle.dumps(dict.fromkeys(range(4)), 2)[:2]
        + b"}("
        + b"".join(b"\x8a\x0a" + (number * period).to_bytes(10, "little") + b"N" for number in range(1, 150_000))
        + b"u.",
    )
    done = convert(tmp_path / "bomb.pt", tmp_path / "out")
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
    """The answer of the child has a file of its own."""
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    torch.save({"w": Path()}, tmp_path / "bad.pt")
    assert cli.main(["convert", str(tmp_path / "good.pt"), str(tmp_path / "good")]) == 0
    assert torch.equal(fastckpt.load(tmp_path / "good")["w"], torch.ones(2))
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "bad.pt"), str(tmp_path / "bad")]) == 2
    assert "more than tensors and plain containers" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_the_answer_may_be_longer_than_a_pipe_holds(tmp_path, monkeypatch):
    """It quotes names that a pickle has, which have no bound."""
    (tmp_path / "m.pt").touch()
    program = "import json, sys; json.dump({'kind': 'Kind', 'reason': 'n' * (1 << 20)}, open(int(sys.argv[2]), 'w'))"
    monkeypatch.setattr(_pickled, "_PROGRAM", program)
    with pytest.raises(_pickled.RefusedError) as caught:
        _pickled.check(tmp_path / "m.pt")
    assert str(caught.value) == "n" * (1 << 20)


def test_the_standard_input_may_be_closed(tmp_path):
    """A new descriptor is then its own, which the child replaces."""
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    torch.save({"w": Path()}, tmp_path / "bad.pt")
    program = "from fastckpt._tools.cli import main; print(*[main(['convert', f'{n}.pt', n]) for n in ('good', 'bad')])"
    command = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, program]
    done = subprocess.run(command, cwd=tmp_path, timeout=PATIENCE, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[-1] == "0 2"
    assert (tmp_path / "good").exists()
    assert not (tmp_path / "bad").exists()


def test_a_child_without_an_answer_is_no_consent(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.setattr(_pickled, "_PROGRAM", "")
    with pytest.raises(_pickled.RefusedError, match="without an answer"):
        _pickled.check(tmp_path / "m.pt")


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path, convert):
    fastckpt.save({"w": np.zeros(4), "x": "text"}, tmp_path / "c")
    assert convert(tmp_path / "c", tmp_path / "m.safetensors").returncode == 2
    assert sorted(os.listdir(tmp_path)) == ["c"]  # noqa: PTH208 - names
    assert Path(tmp_path / "c").is_dir()
