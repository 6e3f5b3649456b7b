"""Windows and macOS, imitated: everything that Python lacks there is removed before the import."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fastckpt

torch = pytest.importorskip("torch")

#: Modules and names that each platform lacks. Modules that other packages need are imported before the removal.
LACKS = """
import argparse, ctypes, importlib, importlib.metadata, inspect, json, logging, mmap, multiprocessing.connection, os
import pathlib, shutil, signal, subprocess, sys, tempfile, threading
import anycrc, numpy, safetensors.torch, torch, tqdm.auto

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "syslog", "pty"}
NAMES = {
    os: ["sched_getaffinity", "memfd_create", "O_DIRECT", "posix_fadvise", "preadv", "pread", "statvfs"],
    mmap: [name for name in dir(mmap) if name in ("MADV_HUGEPAGE", "MADV_POPULATE_READ", "MADV_DONTFORK")],
}
platform = sys.argv[1]
if platform == "darwin":
    MODULES = set()
else:
    NAMES[os] += ["register_at_fork", "fork", "getuid", "getegid", "getgroups", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"]
    NAMES[mmap] = [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))]
    NAMES[signal] = ["SIGHUP", "pthread_sigmask"]

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
for name in MODULES:
    sys.modules.pop(name, None)
for module, names in NAMES.items():
    for name in names:
        delattr(module, name)
sys.platform = platform

import fastckpt
from harness import cli

path, parent = sys.argv[2], os.path.dirname(sys.argv[2])
"""
PLATFORMS = ["win32", "darwin"]


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {"w": torch.arange(3_000_000.0).reshape(1000, 3000), "tie": None, "b": torch.ones(5)},
        "array": np.arange(12, dtype=">i4").reshape(3, 4).T,
        "bytes": b"x" * 5000,
        "step": 7,
    }
    state["model"]["tie"] = state["model"]["b"]
    fastckpt.save(state, tmp_path / "step-7", metadata={"step": 7})
    return tmp_path / "step-7"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_for_laptops_works(laptop, saved, platform):
    program = """
state = fastckpt.load(path)
assert state["model"]["w"][999, 2999] == 2_999_999 and state["model"]["tie"] is state["model"]["b"]
assert state["array"].tolist() == numpy.arange(12).reshape(3, 4).T.tolist() and state["bytes"] == b"x" * 5000
into = {**state, "model": {name: torch.zeros_like(one).t() .contiguous().t() for name, one in state["model"].items()}}
into["model"]["tie"] = into["model"]["b"]
fastckpt.load(path, into=into)
assert torch.equal(into["model"]["w"], state["model"]["w"])
assert torch.equal(fastckpt.load(path, io=fastckpt.IO(mmap=True))["model"]["w"], state["model"]["w"])
assert fastckpt.load(path, framework="numpy", keys="model.b")["model"]["b"].tolist() == [1] * 5
with fastckpt.open(path) as checkpoint:
    assert checkpoint.metadata == {"step": 7}
    assert checkpoint.tensor("model.w")[::500, 7].tolist() == [7, 1_500_007]
    assert "model.w" in checkpoint and checkpoint.structure["step"] == 7
report = fastckpt.verify(path)
assert report.ok and report.engine == "buffered" and report.bytes > 12_000_000
assert [one.name for one in fastckpt.list(parent)] == ["step-7"]
with fastckpt.Manager(parent, name="step-{step}", read_only=True) as manager:
    assert manager.steps() == [7] and manager.latest() == 7
    found = manager.restore()
assert found.step == 7 and torch.equal(found.state["model"]["w"], state["model"]["w"])
for command in ("info", "ls", "verify"):
    assert cli.main([command, path]) == 0, command
assert cli.main(["export", path, path + ".safetensors", "--keys", "model.*"]) == 0
assert torch.equal(safetensors.torch.load_file(path + ".safetensors")["model.w"], state["model"]["w"])
for name in fastckpt.__all__:
    getattr(fastckpt, name)
"""
    assert "exported" in laptop(LACKS + program, platform, saved)


REFUSED = {
    "save": "fastckpt.save({'a': 1}, path + 'x')",
    "save with a file": "fastckpt.save({'a': 1}, path + 'x', files={'f': pathlib.Path(path + '.pt')})",
    "save_async": "fastckpt.save_async({'a': 1}, path + 'x')",
    "remove": "fastckpt.remove(path)",
    "probe": "fastckpt.tools.probe(parent)",
    "clean": "fastckpt.clean(parent)",
    "doctor": "fastckpt.tools.doctor(parent)",
    "set_target": "fastckpt.tools.set_target('high')",
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_for_linux_says_so(laptop, saved, platform):
    program = f"""
said = {{}}
for name, code in {REFUSED!r}.items():
    try:
        exec(code)
    except NotImplementedError as error:
        said[name] = str(error)
import contextlib, io
for command in (["doctor", parent], ["bench", parent], ["clean", parent], ["import", path + ".pt", path + "y"]):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        assert cli.main(command) == 2, command
    said["fastckpt " + command[0]] = text.getvalue()
print(json.dumps([said, sorted(os.listdir(parent))]))
"""
    torch.save({"a": torch.ones(3)}, f"{saved}.pt")
    said, names = json.loads(laptop(LACKS + program, platform, saved))
    assert said.keys() == {*REFUSED, *(f"fastckpt {name}" for name in ("doctor", "bench", "clean", "import"))}
    assert all("Linux" in text for text in said.values()), said
    assert names == ["step-7", "step-7.pt"]


#: Tries the import without the package for checksums, as if on a given platform.
WITHOUT_ANYCRC = """
import sys
import numpy, tqdm.auto
sys.platform, sys.modules["anycrc"] = sys.argv[1], None
try:
    import fastckpt
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("platform", PLATFORMS)
def test_without_the_package_for_checksums_the_import_says_what_to_install(laptop, platform):
    said = laptop(WITHOUT_ANYCRC, platform)
    assert "pip install anycrc" in said
    assert "free-threaded" not in said


def test_on_linux_without_the_core_the_import_says_which_interpreters_have_none_and_what_to_do(laptop):
    said = laptop(WITHOUT_ANYCRC, "linux")
    for cause in ("no compiled core", "free-threaded CPython (3.14t)", "musl (Alpine)", "x86-64 and aarch64"):
        assert cause in said
    for remedy in ("Use the usual build of CPython on a Linux with glibc", "pip install anycrc"):
        assert remedy in said


def test_on_linux_without_the_core_but_with_the_package_for_checksums_reading_works(laptop, saved):
    program = """
import sys, fastckpt
assert sys.platform == "linux"
state = fastckpt.load(sys.argv[1])
assert state["step"] == 7 and state["model"]["w"][999, 2999] == 2_999_999
assert fastckpt.verify(sys.argv[1]).ok
try:
    fastckpt.save(state, sys.argv[1] + "x")
except NotImplementedError as error:
    print(error)
"""
    assert "pip install --no-binary fastckpt-io fastckpt-io" in laptop(program, saved)
