"""Malicious checkpoints, forged behind a correct checksum, so that no load refuses them for the wrong reason. What is
promised for any file is in SECURITY.md.

Every way to load (:mod:`harness.ways`) refuses each of them, with fastckpt's own error, in under two seconds of CPU
time, in bounded memory, without executing anything, hanging, writing beyond a tensor, or opening
anything outside its directory. At the target of a hostile path there is a valid shard, so that following the path would
succeed.
"""

from __future__ import annotations

import argparse
import collections
import copy
import datetime as dt
import decimal
import errno
import fractions
import io
import json
import os
import pickle
import random
import shutil
import socket
import stat
import struct
import types
import uuid
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import fastckpt
from harness import manifest, needs, strace, ways, zygote
from harness.internals import RESERVED

SEED = int(os.environ.get("FASTCKPT_TEST_SEED", "20260101"))
HEADROOM = 1 << 30  # address space beyond that at the start of the load, for threads and staging buffers
GROWTH = 192 << 20  # resident memory: the staging buffers of 128 MiB, and a little more
SECONDS = 2.0
MUTATIONS = 2100


@pytest.fixture
def children(children_with_torch):
    # torch is imported in advance: decoding some tokens needs it, and its import alone takes longer than these loads
    # may.
    return children_with_torch


TENSORS = [
    ("a", "F32", [8, 400], np.arange(3200, dtype="<f4").tobytes()),
    ("b", "I64", [3], np.arange(3, dtype="<i8").tobytes()),
    ("c", "U8", [5], b"hello"),
    ("e", "U8", [0], b""),
]


@pytest.fixture
def forged(tmp_path):
    """A valid handmade checkpoint, with several blocks in tensor a, and its manifest's body to forge."""
    path = tmp_path / "inside" / "step"
    path.parent.mkdir()
    body = manifest.minimal(path, TENSORS)
    # Tensors of torch and NumPy, which loads handle differently.
    body["structure"] = [["dict", 4], "a", ["tensor", 0], "b", ["array", 1], "c", ["array", 2], "e", ["tensor", 3]]
    manifest.forge(path, body)
    # Beside the checkpoint is the target of a hostile path, a shard that matches every checksum.
    for place in (tmp_path / "secret.safetensors", path.parent / "secret.safetensors"):
        shutil.copy(path / "model.safetensors", place)
    return path, body


def tensor(body, name="a"):
    return next(entry for entry in body["tensors"] if entry["name"] == name)


def shard(body):
    return body["shards"][0]


def check_end(end, *, kinds=("CorruptCheckpointError",), bound=GROWTH):
    assert end["kind"] in kinds, end
    # CPU time is measured, because the CPU may be busy; the parent limits a hang.
    assert end["processor"] < SECONDS, end
    assert end["grown"] < bound, end
    assert end["kind"] == "loaded" or end["text"], end


def refused(children, path, *, kinds=("CorruptCheckpointError",)):
    for operation in ways.WAYS:
        end = children.run("load_timed", path=str(path), headroom=HEADROOM, operation=operation)
        assert not isinstance(end, zygote.Raised), end
        if operation == "verify" and end["kind"] == "loaded" and end["ok"] is False:
            continue  # verify has listed the damage
        check_end(end, kinds=kinds)
        assert str(path) in end["text"], end


def test_control_loads(children, forged):
    """The unchanged checkpoint loads, so each refusal below is due to its single change."""
    path, body = forged
    manifest.read(path)
    end = children.run("load_timed", path=str(path), headroom=HEADROOM)
    assert end["kind"] == "loaded", end
    manifest.forge(path, body)
    end = children.run("load_timed", path=str(path), headroom=HEADROOM, operation="verify")
    assert end["ok"] is True, end


# --- paths -----------------------------------------------------------------------------------------------------------

NAMES = {
    "parent": "../secret.safetensors",
    "grandparent": "../../secret.safetensors",
    "there and back": "../step/model.safetensors",
    "through itself": "./model.safetensors",
    "doubled slash": "x//model.safetensors",
    "absolute": "{base}/secret.safetensors",
    "below": "sub/model.safetensors",
    "dot": ".",
    "dots": "..",
    "empty": "",
    "NUL": "model.safetensors\0",
    "NUL inside": "\0.safetensors",
    "backslashes": "..\\secret.safetensors",
    "no suffix": "model.bin",
    "manifest": "fastckpt.json",
    "long": "n" * 300 + ".safetensors",
    "missing": "other.safetensors",
    "proc": "/proc/self/mem",
    "trailing slash": "model.safetensors/",
    "newline": "model.safetensors\n",
}


@pytest.mark.parametrize("kind", NAMES)
def test_shard_names(children, forged, kind, tmp_path):
    path, body = forged
    (path / "sub").mkdir()
    shutil.copy(path / "model.safetensors", path / "sub" / "model.safetensors")
    shutil.copy(path / "model.safetensors", path / "model.bin")
    shard(body)["file"] = NAMES[kind].format(base=tmp_path)
    manifest.forge(path, body)
    refused(children, path)


def spoil_files(path, tmp_path):
    """The shard, and functions that replace it without a change of the manifest."""
    victim = path / "model.safetensors"
    raw = victim.read_bytes()

    def link_outside():
        victim.symlink_to(tmp_path / "secret.safetensors")

    def link_inside():
        (path / "real.safetensors").write_bytes(raw)
        victim.symlink_to("real.safetensors")

    def link_to_link():
        (path / "hop.safetensors").symlink_to("../secret.safetensors")
        victim.symlink_to("hop.safetensors")

    def link_to_itself():
        victim.symlink_to("model.safetensors")

    def link_to_zero():
        victim.symlink_to("/dev/zero")

    def fifo():
        os.mkfifo(victim)

    def directory():
        victim.mkdir()

    def unix_socket():
        # A socket's path may have 108 bytes, and pytest's paths have more.
        before = Path.cwd()
        os.chdir(path)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind("model.safetensors")
        finally:
            os.chdir(before)

    def device():
        os.mknod(victim, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero

    return victim, {
        made.__name__: made
        for made in (
            link_outside,
            link_inside,
            link_to_link,
            link_to_itself,
            link_to_zero,
            fifo,
            directory,
            unix_socket,
            device,
        )
    }


IRREGULAR = [
    "link_outside",
    "link_inside",
    "link_to_link",
    "link_to_itself",
    "link_to_zero",
    "fifo",
    "directory",
    "unix_socket",
]


@pytest.mark.parametrize("kind", [*IRREGULAR, pytest.param("device", marks=pytest.mark.root)])
def test_shard_that_is_no_regular_file(children, forged, tmp_path, kind):
    path, _ = forged
    if kind == "device":
        needs.root()
    victim, spoilers = spoil_files(path, tmp_path)
    victim.unlink()
    spoilers[kind]()
    refused(children, path)


@pytest.mark.parametrize("kind", ["fifo", "directory", "zero", "outside", "missing"])
def test_manifest_that_is_no_regular_file(children, forged, tmp_path, kind):
    path, _ = forged
    victim = path / manifest.NAME
    victim.rename(tmp_path / "elsewhere.json")
    if kind == "fifo":
        os.mkfifo(victim)
    elif kind == "directory":
        victim.mkdir()
    elif kind == "zero":
        victim.symlink_to("/dev/zero")
    elif kind == "outside":
        victim.symlink_to(tmp_path / "elsewhere.json")
    kinds = ("CorruptCheckpointError", "IsADirectoryError", "FileNotFoundError", "OSError")
    refused(children, path, kinds=("NotACheckpointError",) if kind == "missing" else kinds)


def test_two_shards_of_one_file(children, forged):
    path, body = forged
    body["shards"].append(copy.deepcopy(shard(body)))
    manifest.forge(path, body)
    refused(children, path)


def test_nothing_outside_is_opened(children, forged, tmp_path):
    """strace shows every open.
    A read of a file outside is a failure, even if the load then refuses the file."""
    path, body = forged
    base = path.parent
    paths = []
    for number, name in enumerate(NAMES.values()):
        copied = base / f"name-{number}"
        shutil.copytree(path, copied)
        changed = copy.deepcopy(body)
        shard(changed)["file"] = name.format(base=tmp_path)
        manifest.forge(copied, changed)
        paths.append(copied)
    for kind in ("link_outside", "link_to_link", "link_to_zero"):
        copied = base / f"file-{kind}"
        shutil.copytree(path, copied)
        victim, spoilers = spoil_files(copied, tmp_path)
        victim.unlink()
        spoilers[kind]()
        paths.append(copied)
    control = base / "control"
    shutil.copytree(path, control)
    # The valid checkpoint comes first, so that the opens of a process's first load are known, and last, to show that
    # loads still work.
    order = [control, *paths, control]
    # A load to a device would import the stand-in, which opens files.
    among = [way for way in ways.WAYS if way != "device"]
    child = children.start("load_many", paths=[str(item) for item in order], among=among)
    child.next()
    with strace.attached(
        child.pid, tmp_path / "log", "open,openat,openat2,readlink,readlinkat,execve,connect"
    ) as trace:
        child.go()
        ends = child.outcome()
        calls = trace.calls()
    assert {*ends[0], *ends[-1]} == {"loaded"}
    for end in ends[1:-1]:
        assert end[:-1] == ["CorruptCheckpointError"] * len(among[:-1])
        assert end[-1] in ("CorruptCheckpointError", "damage")
    assert not [call for call in calls if call.name in ("execve", "connect")]
    opened = [call.opened() for call in calls if call.ok and call.name.startswith("open")]
    assert any(name.startswith(f"{control}/") for name in opened), "strace did not see the opens"
    # A load may open only files of the checkpoints, what the runtime reads about the machine, its page of counters,
    # and Python's modules.
    runtime = (
        "/proc/",
        "/sys/",
        "/dev/shm",
        "/dev/null",
        "/etc/",
        "/usr/",
        "/lib",
        str(Path(os.__file__).parents[1]),
        str(manifest.Path(fastckpt.__file__).resolve().parents[1]),
    )
    outside = [name for name in opened if not any(name == str(item) or name.startswith(f"{item}/") for item in order)]
    # A load opens the parent to look for an interrupted save, but must not open other files in it.
    assert [name for name in outside if not name.startswith(runtime) and name != str(base)] == []
    assert not [name for name in opened if "secret" in name or name == "/dev/zero" or name.startswith("/proc/self/mem")]


# --- extents, shapes, numbers ----------------------------------------------------------------------------------------


def number_cases():
    """Names of cases, and the functions that change the body."""

    def of_tensor(member, value, name="a"):
        return lambda body: tensor(body, name).__setitem__(member, value)

    def of_shard(member, value):
        return lambda body: shard(body).__setitem__(member, value)

    def moved(by, name="b"):
        def spoil(body):
            tensor(body, name)["offset"] += by

        return spoil

    def overlap(body):
        # b overlaps a's first bytes and has a matching checksum, so that only the rule against overlap can refuse it.
        entry = tensor(body, "b")
        data = TENSORS[0][3][:24]
        entry["offset"] = tensor(body, "a")["offset"]
        entry["crc"] = manifest.digits(manifest.crc64(data))

    def twice(body):
        again = copy.deepcopy(tensor(body, "b"))
        again["name"] = "b2"
        body["tensors"].append(again)

    def hole(body):
        # c is removed, so that its bytes belong to no tensor.
        body["tensors"] = [entry for entry in body["tensors"] if entry["name"] != "c"]
        body["structure"] = [["dict", 1], "a", ["array", 0]]

    def header_claimed(body):
        entry = tensor(body, "c")
        entry["offset"] = 0

    def same_name(body):
        tensor(body, "b")["name"] = "a"

    def shorter_data(body):
        shard(body)["data_offset"] = 4091

    huge = [1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30]
    wrong = [-1, -(1 << 63), 1.5, 8.0, 1e3, "8", None, True, [8], {}]
    cases = {
        "overlap": overlap,
        "twice the same bytes": twice,
        "hole": hole,
        "tensor over the header": header_claimed,
        "name twice": same_name,
        "name no text": of_tensor("name", 7),
        "moved up": moved(1),
        "moved down": moved(-1),
        "moved past the end": moved(1 << 20),
        "empty tensor past the end": moved(1 << 20, "e"),
        "data_offset into the header": shorter_data,
        "data_offset too small": of_shard("data_offset", 9),
        "data_offset zero": of_shard("data_offset", 0),
        "data_offset past the file": of_shard("data_offset", 1 << 20),
        "shape wraps to nothing": of_tensor("shape", [1 << 32, 1 << 32]),
        "shape wraps to the truth": of_tensor("shape", [(1 << 61) + 400, 8]),
        "shape times size wraps": of_tensor("shape", [1 << 62]),
        "shape huge and zero": of_tensor("shape", [(1 << 63) - 1, 2]),
        "65 dimensions": of_tensor("shape", [1] * 64 + [3200]),
        "a million dimensions": of_tensor("shape", [1] * 1_000_000),
        "shape too small": of_tensor("shape", [8, 399]),
        "shape too large": of_tensor("shape", [8, 401]),
        "shape no list": of_tensor("shape", "8,400"),
        "dtype unknown": of_tensor("dtype", "F31"),
        "dtype empty": of_tensor("dtype", ""),
        "dtype lower case": of_tensor("dtype", "f32"),
        "dtype larger": of_tensor("dtype", "F64"),
        "dtype smaller": of_tensor("dtype", "F16"),
        "dtype below a byte": lambda body: tensor(body, "c").update(dtype="F4", shape=[9]),
        "shard index past the end": of_tensor("shard", 1),
        "crc short": of_tensor("crc", "0" * 15),
        "crc empty": of_tensor("crc", ""),
        "crc too long": lambda body: tensor(body).__setitem__("crc", tensor(body)["crc"] + "0" * 16),
        "crc upper case": lambda body: tensor(body).__setitem__("crc", tensor(body)["crc"].upper()),
        "crc no digits": lambda body: tensor(body).__setitem__("crc", "g" * len(tensor(body)["crc"])),
        "crc of two-byte letters": lambda body: tensor(body).__setitem__("crc", "é" * (len(tensor(body)["crc"]) // 2)),
        "crc other": lambda body: tensor(body).__setitem__("crc", "0" * len(tensor(body)["crc"])),
        "crc of an empty tensor": of_tensor("crc", "0" * 16, "e"),
        "crc of a header": of_shard("header_crc", "0" * 16),
        "no shard": lambda body: body.__setitem__("shards", []),
        "100,001 shards": lambda body: body.__setitem__("shards", [shard(body)] * 2 + [0] * 99_999),
        "an empty file as second shard": lambda body: body["shards"].append(
            {**shard(body), "file": "b.safetensors", "bytes": 0}
        ),
    }
    for value in (0, 1, 4095, 4097, 6144, 1 << 31, 1 << 40, 1 << 63, 1 << 64, -4096, 4096.0, "4096", None):
        cases[f"block_size {value!r}"] = lambda body, value=value: body.__setitem__("block_size", value)
    for value in huge + wrong:
        shown = repr(value)
        cases[f"offset {shown}"] = of_tensor("offset", value)
        cases[f"offset of an empty one {shown}"] = of_tensor("offset", value, "e")
        cases[f"shard {shown}"] = of_tensor("shard", value)
        cases[f"bytes {shown}"] = of_shard("bytes", value)
        cases[f"data_offset {shown}"] = of_shard("data_offset", value)
        if value != [8]:
            cases[f"shape of {shown}"] = of_tensor("shape", [value])
            cases[f"shape of 0 and {shown}"] = of_tensor("shape", [value, 0], "e")
    # These shapes have zero elements, so they are legal.
    for value in huge:
        if value < 1 << 63:
            del cases[f"shape of 0 and {value!r}"]
    return cases


NUMBERS = number_cases()


#: Other errors that a way may raise if load() raises CorruptCheckpointError. verify ignores the structure.
ALSO = {"into": {"StructureMismatchError"}, "strided": {"StructureMismatchError"}, "keys": {"KeyError"}}
#: The ways that read the same things as load().
ALIKE = tuple(way for way in ways.WAYS if way != "verify")


def in_turn(
    children,
    path,
    tmp_path,
    raws,
    *,
    whats,
    sealed=True,
    headroom=HEADROOM,
    framework="numpy",
    rotate=False,
    alike=ALIKE,
):
    """Load under each of these manifests, one after another in one child, in all ways; return how load() ended.

    The ways in ``alike`` must refuse what load() refuses as corrupt.
    """
    seals = sealed if isinstance(sealed, list) else [sealed] * len(raws)
    cases = [
        {"what": what, "bytes": raw.hex(), "sealed": seal} for what, raw, seal in zip(whats, raws, seals, strict=True)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    shutil.copytree(path, tmp_path / "work", dirs_exist_ok=True)
    end = children.run(
        "mutations",
        directory=str(tmp_path / "work"),
        mutants=str(tmp_path / "cases.json"),
        original=str(path),
        headroom=headroom,
        seconds=SECONDS,
        framework=framework,
        among=ways.WAYS,
        rotate=rotate,
        timeout=240,
    )
    assert not isinstance(end, zygote.Raised), end
    ends = end["ends"]
    end["ends"] = ends["load"]
    assert all(ends[way] for way in ways.WAYS)
    others = ways.WAYS[1:]
    for number, (what, kind) in enumerate(zip(whats, ends["load"], strict=True)):
        if kind != "CorruptCheckpointError":
            continue
        for way in [others[number % len(others)]] if rotate else others:
            found = ends[way][number // len(others) if rotate else number]
            if way in alike:
                assert found in {kind, *ALSO.get(way, ())}, (what, way, found)
    return end


def test_numbers(children, forged, tmp_path):
    path, body = forged
    raws = []
    for spoil in NUMBERS.values():
        changed = copy.deepcopy(body)
        spoil(changed)
        raws.append(manifest.seal(changed))
    end = in_turn(children, path, tmp_path, raws, whats=list(NUMBERS))
    assert end["bad"] == []
    assert [what for what, kind in zip(NUMBERS, end["ends"], strict=True) if kind != "CorruptCheckpointError"] == []
    assert end["slowest"] < SECONDS
    assert end["grown"] < GROWTH
    assert len(raws) > 150


def test_sum_of_a_whole_shard_is_verified(children, forged):
    """load() verifies extents and headers, which cover every byte; the checksum of the whole file is for copies,
    and must be right, too."""
    path, body = forged
    shard(body)["crc"] = "0" * 16
    manifest.forge(path, body)
    end = children.run("load_timed", path=str(path), operation="verify")
    assert end["kind"] == "CorruptCheckpointError" or end["ok"] is False, end


def test_every_member_missing_or_of_a_wrong_type(children, forged, tmp_path):
    path, body = forged
    raws, whats, strict = [], [], []
    wrong = [None, True, 3, -3, 2.5, "x", [], {}, [[]], {"x": 1}]
    places = [((), name) for name in body if name != "min_reader"]
    places += [(("shards", 0), name) for name in body["shards"][0]]
    places += [(("tensors", 0), name) for name in body["tensors"][0]]
    places += [(("shards",), 0), (("tensors",), 0), (("saved",), "engine"), (("writer",), "name")]
    for where, name in places:
        for value in [*wrong, KeyError]:
            changed = copy.deepcopy(body)
            holder = changed
            for step in where:
                holder = holder[step]
            if value is KeyError:
                if isinstance(name, int):
                    continue
                del holder[name]
            elif type(value) is type(holder[name]) and not isinstance(value, (str, int)):
                continue
            else:
                holder[name] = value
            raws.append(manifest.seal(changed))
            whats.append(f"{'.'.join(map(str, (*where, name)))} = {value!r}")
            # Informative members may have any harmless value, but members that determine bytes may not.
            informs = where in (("saved",), ("writer",)) or name in ("writer", "created", "saved", "metadata")
            # Some other values of the structure, of names and of a shard's checksum are legal.
            legal = name == "structure" or (name == "crc" and where == ("shards", 0)) or name == "name"
            strict.append(not informs and not legal)
    end = in_turn(children, path, tmp_path, raws, whats=whats, rotate=True)
    assert end["bad"] == []
    ends = list(zip(whats, end["ends"], strict, strict=True))
    assert [what for what, kind, must in ends if must and kind != "CorruptCheckpointError"] == []
    expected = {"CorruptCheckpointError", "FormatVersionError", "loaded", "loaded equal", "UnsupportedTypeError"}
    assert {kind for _, kind, _ in ends} <= expected


# --- texts that are not manifests ------------------------------------------------------------------------------------


def text_cases():
    deep = 1_000_000

    def whole(body):
        return manifest.seal(b'"min_reader":0,' * body.startswith(b'"') + body)

    def nested(member, opening, inner, closing, times):
        return whole(f'"block_size":4096,"{member}":{opening * times}{inner}{closing * times}}}\n'.encode())

    def members(text):
        return whole(text.encode("utf-8", "surrogatepass"))

    cases = {
        "empty body": whole(b""),
        "only a brace": whole(b"}\n"),
        "no JSON": whole(b"hello, world"),
        "cut": whole(b'"writer":{"name"'),
        "trailing": whole(b'"writer":{}}\n{"more":1}'),
        "BOM": b"\xef\xbb\xbf" + whole(b"}\n"),
        "BOM in the body": whole(b"\xef\xbb\xbf}\n"),
        "UTF-16": '{"fastckpt":1}'.encode("utf-16"),
        "invalid UTF-8": whole(b'"writer":{"name":"\xff\xfe"},"block_size":4096}\n'),
        "lone surrogate": members('"writer":{"name":"\udc80"},"block_size":4096}\n'),
        "overlong": whole(b'"wr\xc0\xafiter":1}\n'),
        "NUL": whole(b"\0" * 1000),
        "control characters": whole(b'"writer":"\x01\x02"}\n'),
        "NaN": whole(b'"created":NaN}\n'),
        "Infinity": whole(b'"created":-Infinity}\n'),
        "1e999": whole(b'"block_size":1e999}\n'),
        "long number": whole(b'"block_size":' + b"9" * 100_000 + b"}\n"),
        "long exponent": whole(b'"block_size":1e' + b"9" * 100_000 + b"}\n"),
        "comments": whole(b'/* */"block_size":4096}\n'),
        "single quotes": whole(b"'block_size':4096}\n"),
        "empty file": b"",
        "newlines": b"\n" * 100,
        "prefix alone": b'{"fastckpt":1',
        "no checksum": b'{"fastckpt":1}\n',
        "checksum upper case": whole(b"}\n").replace(
            manifest.digits(manifest.crc64(b"}\n")).encode(), manifest.digits(manifest.crc64(b"}\n")).upper().encode()
        ),
        "checksum cut": b'{"fastckpt":1,"crc64nvme":"0123',
        "spaces in the prefix": whole(b"}\n").replace(b":1,", b": 1,"),
        "safetensors index": json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "../x"}}).encode(),
        "other program's": b'{"fastckpt":"yes"}',
        "ELF": b"\x7fELF" + bytes(100),
    }
    for member in ("writer", "created", "saved", "shards", "tensors", "structure", "metadata", "unknown"):
        cases[f"brackets, deep, in {member}"] = nested(member, "[", "", "]", deep)
        cases[f"braces, deep, in {member}"] = nested(member, '{"a":', "1", "}", deep // 10)
    for opening in (b"[", b'{"a":'):
        cases[f"{opening!r} never closed"] = whole(b'"x":' + opening * (deep // 4))
    stream = io.BytesIO()
    np.save(stream, np.arange(3))
    cases["npy"] = stream.getvalue()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    cases["zip"] = stream.getvalue()
    return cases


class Bomb:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (self.mark,))


def test_texts_that_are_no_manifest(children, forged, tmp_path):
    path, _ = forged
    cases = text_cases()
    mark = tmp_path / "executed"
    for protocol in (0, 2, 5):
        cases[f"pickle {protocol}"] = pickle.dumps(Bomb(str(mark)), protocol)
    end = in_turn(children, path, tmp_path, list(cases.values()), whats=list(cases), sealed=False, rotate=True)
    assert end["bad"] == []
    odd = {what: kind for what, kind in zip(cases, end["ends"], strict=True) if kind != "CorruptCheckpointError"}
    # Only a prefix with another version gives another error; `"yes"` and similar values are not versions.
    assert odd == {}
    assert not mark.exists()
    assert end["grown"] < GROWTH


def test_pickle_in_place_of_shards_and_beside_them(children, forged, tmp_path):
    path, _ = forged
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(str(mark)))
    for name in ("pytorch_model.bin", "data.pkl", "model.pt", ".metadata"):
        (path / name).write_bytes(bomb)
    assert children.run("load_timed", path=str(path))["kind"] == "loaded"
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(bomb + raw[len(bomb) :])
    refused(children, path)
    # As the content of a tensor, the pickle stays bytes.
    (path / "model.safetensors").unlink()
    shutil.rmtree(path)
    manifest.minimal(path, [("a", "U8", [len(bomb)], bomb)])
    assert children.run("load_timed", path=str(path))["kind"] == "loaded"
    assert not mark.exists()


def test_duplicate_members(children, forged, tmp_path):
    """Parsers may pick different members of a pair, so a load refuses an ambiguous file."""
    path, body = forged
    text = json.dumps(body, separators=(",", ":"))
    entry = json.dumps(tensor(body), separators=(",", ":"))
    piece = json.dumps(shard(body), separators=(",", ":"))
    cases = {
        f"{name} twice": text[:-1] + f',"{name}":{json.dumps(body[name])}}}'
        for name in ("block_size", "shards", "tensors", "structure", "metadata")
    }
    for member in ("offset", "shape", "crc", "dtype", "shard", "name"):
        cases[f"{member} of a tensor twice"] = text.replace(
            entry, entry[:-1] + f',"{member}":{json.dumps(tensor(body)[member])}}}'
        )
    for member in ("file", "bytes", "data_offset", "crc"):
        cases[f"{member} of a shard twice"] = text.replace(
            piece, piece[:-1] + f',"{member}":{json.dumps(shard(body)[member])}}}'
        )
    assert all(case != text for case in cases.values())
    # The prefix has these two members.
    cases["fastckpt twice"] = text[:-1] + ',"fastckpt":2}'
    cases["crc64nvme twice"] = text[:-1] + ',"crc64nvme":"0"}'
    raws = [manifest.seal(case[1:].encode() + b"\n") for case in cases.values()]
    end = in_turn(children, path, tmp_path, raws, whats=list(cases))
    assert end["bad"] == []
    accepted = [what for what, kind in zip(cases, end["ends"], strict=True) if kind != "CorruptCheckpointError"]
    assert accepted in ([], ["fastckpt twice", "crc64nvme twice"])


def test_manifest_beyond_its_limit(children, forged):
    """A load must refuse a manifest of more than 512 MiB without reading a page of it."""
    path, _ = forged
    with (path / manifest.NAME).open("r+b") as file:
        file.truncate((512 << 20) + 1)
    refused(children, path)


# --- headers of shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [0, 1, 4087, 4089, 100_000_001, 1 << 31, 1 << 62, (1 << 63) - 9, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
)
def test_header_length_bomb(children, forged, length):
    """Every checksum is recomputed, so that only the rule that 8+N equals data_offset can refuse the file."""
    path, body = forged
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[:8] = struct.pack("<Q", length)
    (path / "model.safetensors").write_bytes(raw)
    begin = shard(body)["data_offset"]
    shard(body).update(
        header_crc=manifest.digits(manifest.crc64(raw[:begin])), crc=manifest.digits(manifest.crc64(raw))
    )
    manifest.forge(path, body)
    refused(children, path)


def test_sparse_giant_shard(children, forged):
    """A shard has a terabyte of holes, rightly declared: the load raises for lack of memory, without the process
    being killed."""
    path, body = forged
    size = 1 << 40
    begin = shard(body)["data_offset"]
    os.truncate(path / "model.safetensors", begin + size)
    body["block_size"] = 1 << 30
    shard(body)["bytes"] = begin + size
    entry = tensor(body)
    entry.update(shape=[size], dtype="U8", crc="0" * 16 * len(manifest.extents(begin, size, 1 << 30)))
    body["tensors"] = [entry]
    body["structure"] = [["array", 0]]
    manifest.forge(path, body)
    end = children.run("load_timed", path=str(path), headroom=HEADROOM)
    assert not isinstance(end, zygote.Raised), end
    check_end(end, kinds=("CorruptCheckpointError", "MemoryError", "OSError"))


# --- the structure ---------------------------------------------------------------------------------------------------

ARRAYS = [["array", 0], ["array", 1], ["array", 2], ["array", 3]]


def named(name):
    """The token of a type."""
    return [["type", name]]


def pairs(**members):
    """The tokens of a dict with these leaves."""
    return [["dict", len(members)], *(part for item in members.items() for part in item)]


def structure_cases():
    hexed = "7ff8000000000000"
    return {
        "nothing": [],
        "two roots": [1, 2],
        "list too short": [["list", 2], 1],
        "list bomb": [["list", 10**9]],
        "list bomb, larger": [["list", 1 << 62]],
        "list of 2^64": [["list", 1 << 64], 1],
        "dict bomb": [["dict", 1 << 40]],
        "set bomb": [["set", 1 << 31], 1],
        "tuple bomb": [["tuple", 1 << 33], 1],
        "bombs in bombs": [["list", 33_000_000]] * 1000,
        "negative count": [["list", -1]],
        "count no int": [["list", 1.0], 1],
        "count true": [["list", True], 1],
        "count text": [["list", "1"], 1],
        "no count": [["list"]],
        "two counts": [["list", 1, 1], 1],
        "empty token": [[]],
        "object token": [{"list": 1}],
        "nested token": [[["list", 1]], 1],
        "tag no text": [[1, 2]],
        "unknown tag": [["exec", "import os"]],
        "unregistered type": [["type", "os.system"], "true"],
        "type without a value": [["type", "x"]],
        "type name no text": [["type", 5], 1],
        "type with neither two values nor one": [["type", "collections.deque", 3], ["list", 0], ["dict", 0], 1],
        "attributes no dict": [["type", "collections.deque", 2], ["list", 0], ["list", 0]],
        "attribute of a class": [["type", "types.SimpleNamespace"], ["dict", 1], "__class__", 1],
        "attribute that hides a method": [["type", "argparse.Namespace"], ["dict", 1], "_get_args", 1],
        "attributes that are a dict": [["type", "argparse.Namespace"], ["dict", 1], "__dict__", None],
        "attributes of an OrderedDict": [
            *named("collections.OrderedDict"),
            ["tuple", 2],
            ["odict", 0],
            *pairs(items=1),
        ],
        "deque too long": [["type", "collections.deque", 2], ["list", 2], 1, 2, *pairs(maxlen=1)],
        "decimal no number": [*named("decimal.Decimal"), "one"],
        "decimal no text": [*named("decimal.Decimal"), 1],
        "fraction of nothing": [*named("fractions.Fraction"), ["tuple", 2], 1, 0],
        "fraction bomb": [*named("fractions.Fraction"), ["tuple", 2], 1, ["int", "0x1" + "0" * 200_000]],
        "uuid no uuid": [*named("uuid.UUID"), "0" * 31],
        "buffer of text": [*named("io.BytesIO"), "text"],
        "zone outside": [*named("zoneinfo.ZoneInfo"), "../../../../etc/passwd"],
        "zone absolute": [*named("zoneinfo.ZoneInfo"), "/etc/passwd"],
        "zone module": [*named("zoneinfo.ZoneInfo"), "tzdata.zones"],
        "random position": [*named("random.Random"), ["tuple", 3], 3, ["tuple", 625], *[1] * 624, 1 << 31, None],
        "random short": [*named("random.Random"), ["tuple", 3], 3, ["tuple", 1], 1, None],
        "configuration of a number": [*named("omegaconf.DictConfig"), 7],
        "configuration deep": [*named("omegaconf.DictConfig"), *[["dict", 1], "a"] * 5000, 1],
        "flags of what is none": [["type", "omegaconf.DictConfig", 2], *pairs(a=1), *pairs(flags=1)],
        "dtype of a program": [*named("numpy.dtype"), "object"],
        "dtype bomb": [*named("numpy.dtype"), *[["tuple", 2]] * 5000, "<f4"],
        "dtype of 2^80 bytes": [*named("numpy.dtype"), ["tuple", 2], "<f4", ["tuple", 2], 1 << 40, 1 << 40],
        "field outside": [
            *(*named("numpy.dtype"), ["dict", 4], "names", ["list", 1], "a", "formats", ["list", 1], "<f8"),
            *("offsets", ["list", 1], (1 << 31) - 4, "itemsize", 8),
        ],
        "objects in bytes": [*named("numpy.ndarray"), ["dict", 2], "dtype", "|O", "data", ["array", 2]],
        "objects in fields": [
            *(*named("numpy.ndarray"), ["dict", 2], "dtype", ["dict", 4], "names", ["list", 1], "a"),
            *("formats", ["list", 1], "|O", "offsets", ["list", 1], 0, "itemsize", 8, "data", ["array", 2]),
        ],
        "elements of another size": [*named("numpy.ndarray"), ["dict", 2], "dtype", "|V4", "data", ["array", 2]],
        "objects missing": [
            *(*named("numpy.ndarray"), ["dict", 3], "dtype", "|O", "shape", ["tuple", 1], 1 << 60, "data", ["list", 0])
        ],
        "records of text": [*named("numpy.recarray"), "text"],
        "bit generator of another": [*named("numpy.random.PCG64"), *pairs(bit_generator="MT19937", seed_sequence=None)],
        "bit generator of a program": [
            *(*named("numpy.random.Generator"), *pairs(bit_generator="default_rng", seed_sequence=None))
        ],
        "numbers beyond the state": [
            *(
                *named("numpy.random.Generator"),
                ["dict", 3],
                "bit_generator",
                "MT19937",
                "seed_sequence",
                None,
                "state",
            ),
            *(["dict", 2], "key", ["array", 1], "pos", 1 << 31),
        ],
        "RandomState of nothing": [*named("numpy.random.RandomState"), ["dict", 0]],
        "torch generator": [*named("torch.Generator"), ["dict", 2], "device", "cpu", "state", ["tensor", 3]],
        "layout private": [*named("torch.layout"), "__class__"],
        "memory format no text": [*named("torch.memory_format"), ["list", 0]],
        "constituents of leaves": [
            *(*named("torch.nested.nested_tensor"), ["dict", 3], "constituents", ["list", 1], 1),
            *("dtype", ["dtype", "float32"], "flags", ""),
        ],
        "jagged beyond its values": [
            *(*named("torch.nested.nested_tensor"), ["dict", 5], "values", ["tensor", 3], "offsets", ["tensor", 0]),
            *("lengths", None, "jagged_dim", 1, "flags", ""),
        ],
        "expanded bomb": [["expanded", [1 << 62, 400], ""], ["tensor", 0]],
        "expanded of a leaf": [["expanded", [3], ""], 1],
        "expanded of an expanded": [["expanded", [8, 400], ""], ["expanded", [8, 400], ""], ["tensor", 0]],
        "expanded with flags of an array": [["expanded", [3], "g"], ["array", 1]],
        "device no device": [["tensor", 0, "", 5]],
        "deep": [["list", 1]] * 20_000 + [1],
        "deeper": [["list", 1]] * 200_000 + [1],
        "deep types": [["type", "x"]] * 100_000 + [1],
        "deep slices": [["slice"]] * 100_000 + [1],
        "tensor past the end": [["array", 4]],
        "tensor -1": [["array", -1]],
        "tensor 2^64": [["array", 1 << 64]],
        "tensor true": [["array", True]],
        "tensor 0.0": [["array", 0.0]],
        "tensor named": [["array", "a"]],
        "no tensor": [["array"]],
        "flags unknown": [["tensor", 0, "x"]],
        "flags no text": [["tensor", 0, 1]],
        "gradient of an integer": [["tensor", 1, "g"]],
        "unhashable key": [["dict", 1], ["list", 0], 1],
        "array as a key": [["dict", 1], ["array", 0], 1],
        "unhashable member": [["set", 1], ["dict", 0]],
        "same key twice": [["dict", 2], "a", 1, "a", 2],
        "factory unknown": [["ddict", 0], "os.system"],
        "factory no text": [["ddict", 0], ["list", 0]],
        "factory missing": [["ddict", 0]],
        "int no hex": [["int", "12"]],
        "int no text": [["int", 5]],
        "int python": [["int", "0x1_0"]],
        "int spaces": [["int", " 0x10 "]],
        "int empty": [["int", ""]],
        "float short": [["float", "7ff8"]],
        "float odd": [["float", hexed[:-1]]],
        "float no hex": [["float", "z" * 16]],
        "complex half": [["complex", hexed]],
        "bytes no base64": [["bytes", "!!!"]],
        "bytes not padded": [["bytes", "YQ"]],
        "bytes not ASCII": [["bytes", "é"]],
        "bytes of a matrix": [["bytes", 0, "tensor"]],
        "bytes of nothing": [["bytes", 9, "tensor"]],
        "bytearray of a number": [["bytearray", 3]],
        "size negative": [["size", [-1]]],
        "size huge": [["size", [1 << 63]]],
        "size huger": [["size", [1 << 200]]],
        "size no list": [["size", 3]],
        "size of text": [["size", ["3"]]],
        "dtype a function": [["dtype", "load"]],
        "dtype a module": [["dtype", "os"]],
        "dtype private": [["dtype", "__class__"]],
        "dtype unknown": [["dtype", "float31"]],
        "dtype no text": [["dtype", 3]],
        "device unknown": [["device", "nonsense:0"]],
        "device no text": [["device", {}]],
        "range of nothing": [["range", "0", "5", "0"]],
        "range of floats": [["range", "0", "5.5", "1"]],
        "range of too many digits": [["range", "0", "9" * 100_000, "1"]],
        "range of ints": [["range", 0, 1, 2]],
        "range short": [["range", "0"]],
        "slice short": [["slice"], 1],
        "date 13": [["date", [2020, 13, 1]]],
        "date short": [["date", [2020]]],
        "date text": [["date", "2020-01-01"]],
        "datetime year 0": [["datetime", [0, 1, 1, 0, 0, 0, 0, 0]], None],
        "datetime zone no zone": [["datetime", [2020, 1, 1, 0, 0, 0, 0, 0]], 5],
        "datetime fold 2": [["datetime", [2020, 1, 1, 0, 0, 0, 0, 2]], None],
        "time 25": [["time", [25, 0, 0, 0, 0]], None],
        "timedelta huge": [["timedelta", [1 << 40, 0, 0]]],
        "timedelta text": [["timedelta", ["1", 0, 0]]],
        "tz two days": [["tz", [2, 0, 0], None]],
        "tz name no text": [["tz", [0, 0, 0], 5]],
        "path kind": [["path", "PosixPathX", "x"]],
        "path callable": [["path", "os", "x"]],
        "path no text": [["path", "Path", 5]],
        "scalar of objects": [["scalar", "|O", "00" * 8]],
        "scalar of objects, 8": [["scalar", "O8", "00" * 8]],
        "scalar of a record": [["scalar", "f4,O", "00" * 16]],
        "scalar too short": [["scalar", "<f8", "00"]],
        "scalar too long": [["scalar", "<f8", "00" * 16]],
        "scalar no dtype": [["scalar", "nonsense", "00"]],
        "scalar no hex": [["scalar", "<f8", "zz"]],
        "scalar bomb": [["scalar", "V2147483647", "00"]],
        "scalar dtype a list": [["scalar", [["x", "O"]], "00"]],
        "coo of nothing": [["coo", [3], True, ""]],
        "coo indices out of range": [["coo", [2], True, ""], ["tensor", 1], ["tensor", 1]],
        "coo negative": [["coo", [-3], True, ""], ["tensor", 1], ["tensor", 1]],
        "coo of leaves": [["coo", [3], True, ""], 1, 2],
        "compressed nonsense": [["compressed", "csr", [3, 3], ""], ["tensor", 1], ["tensor", 1], ["tensor", 1]],
        "compressed layout": [["compressed", "xyz", [3, 3], ""], ["tensor", 1], ["tensor", 1], ["tensor", 1]],
        "compressed of leaves": [["compressed", "csr", [3, 3], ""], None, None, None],
        "quantised of leaves": [["quantized", "qint8", [3], "per_tensor"], 1, 2, 3, 4],
        "quantised scheme": [["quantized", "qint8", [3], "x"], ["tensor", 1], 1.0, 0, None],
        "quantised dtype": [["quantized", "load", [3], "per_tensor"], ["tensor", 1], 1.0, 0, None],
        "bare huge int": [1 << 64],
        "bare huge negative": [-(1 << 70)],
    }


# These cases are legal or harmless: a load may accept or refuse them.
TOLERATED = {
    "same key twice",
    "int python",
    "int spaces",
    "bytes not padded",
    "bare huge int",
    "bare huge negative",
    "datetime fold 2",
    "size negative",
    # A configuration whose class is not declared comes back as its contents.
    "configuration of a number",
    "configuration deep",
    "flags of what is none",
    "size huge",
}


@pytest.mark.parametrize("place", ["structure", "metadata"])
def test_structures(children, forged, tmp_path, place):
    path, body = forged
    raws, whats = [], []
    for what, tokens in structure_cases().items():
        changed = copy.deepcopy(body)
        changed[place] = tokens
        raws.append(manifest.seal(changed))
        whats.append(what)
    if place == "metadata":
        # Metadata must not name a tensor. load() does not read it, so the test does.
        (tmp_path / "cases.json").write_text(
            json.dumps([{"what": what, "bytes": raw.hex()} for what, raw in zip(whats, raws, strict=True)])
        )
        ends = children.run("metadata_of", directory=str(path), mutants=str(tmp_path / "cases.json"), timeout=120)
        assert not isinstance(ends, zygote.Raised), ends
    else:
        # A read of single tensors does not make the structure, a load with into= makes no filled value, keys= leaves
        # out values without tensors, and on a device an array becomes a tensor, which may be a key.
        alike = ("mmap",)
        end = in_turn(children, path, tmp_path, raws, whats=whats, headroom=4 << 30, framework="auto", alike=alike)
        assert end["bad"] == []
        assert end["slowest"] < SECONDS
        assert end["grown"] < 4 * GROWTH  # a million tokens are a million Python objects
        ends = end["ends"]
    accepted = [what for what, kind in zip(whats, ends, strict=True) if kind == "loaded" and what not in TOLERATED]
    assert accepted == []
    others = {
        what: kind
        for what, kind in zip(whats, ends, strict=True)
        if kind not in ("loaded", "CorruptCheckpointError", "FormatVersionError", "UnsupportedTypeError")
    }
    # Every program can read metadata: unknown values become plain values, with a warning.
    assert others == ({"unregistered type": "RuntimeWarning"} if place == "metadata" else {})


def as_cases():
    return {
        "objects": {"dtype": "numpy.|O", "shape": [1600]},
        "objects, bare": {"dtype": "numpy.O", "shape": [1600]},
        "record": {"dtype": "numpy.f4,O", "shape": [10]},
        "subarray": {"dtype": "numpy.(3200,)f4", "shape": [1]},
        "strings": {"dtype": "numpy.S12800", "shape": [1]},
        "unknown to numpy": {"dtype": "numpy.nonsense", "shape": [3200]},
        "unknown to torch": {"dtype": "torch.float31", "shape": [3200]},
        "function of torch": {"dtype": "torch.load", "shape": [3200]},
        "module": {"dtype": "os.system", "shape": [3200]},
        "no module": {"dtype": "float32", "shape": [3200]},
        "dtype no text": {"dtype": 5, "shape": [3200]},
        "more than there is": {"dtype": "numpy.<f4", "shape": [3201]},
        "much more than there is": {"dtype": "numpy.<f4", "shape": [10**12]},
        "less than there is": {"dtype": "numpy.<f4", "shape": [3199]},
        "wraps": {"dtype": "numpy.<f4", "shape": [1 << 32, 1 << 32]},
        "wraps to the truth": {"dtype": "numpy.<f4", "shape": [(1 << 62) + 3200]},
        "negative": {"dtype": "numpy.<f4", "shape": [-3200, -1]},
        "65 dimensions": {"dtype": "numpy.<f4", "shape": [1] * 64 + [3200]},
        "shape no list": {"dtype": "numpy.<f4", "shape": 3200},
        "no shape": {"dtype": "numpy.<f4"},
        "no dtype": {"shape": [3200]},
        "list": [],
        "text": "numpy.<f4",
    }


def test_true_types_that_are_lies(children, forged, tmp_path):
    """A shape larger than the bytes would read past them, and an object dtype would turn them into pointers."""
    path, body = forged
    raws, whats = [], []
    for token in ("array", "tensor"):
        for what, value in as_cases().items():
            changed = copy.deepcopy(body)
            # Section 2.3: dtypes that safetensors cannot name are stored as bytes.
            tensor(changed).update({"as": value, "dtype": "U8", "shape": [12_800]})
            changed["structure"] = [["list", 1], [token, 0]]
            raws.append(manifest.seal(changed))
            whats.append(f"{what}, {token}")
    end = in_turn(children, path, tmp_path, raws, whats=whats, headroom=4 << 30, framework="auto")
    assert end["bad"] == []
    wrong = {
        what: kind
        for what, kind in zip(whats, end["ends"], strict=True)
        if kind not in ("CorruptCheckpointError", "FormatVersionError", "UnsupportedTypeError")
    }
    assert wrong == {}


# --- mutations -------------------------------------------------------------------------------------------------------


def varied_state():
    """A state with every token that does not need torch."""
    return {
        "weights": [np.arange(1500, dtype=np.float32), np.arange(12, dtype=np.int64).reshape(3, 4), np.array(2.5)],
        "be": np.arange(5, dtype=">f8"),
        "complex": np.array([1 + 2j, 3 - 4j]),
        "empty": np.zeros((0, 7), np.int16),
        "python": (
            1,
            -(1 << 60),
            1 << 100,
            1.5,
            float("inf"),
            2 - 3j,
            True,
            None,
            "text",
            "ü\U0001f600",
            b"bytes",
            bytearray(b"array"),
        ),
        "large bytes": bytes(range(256)) * 17,
        "scalar": np.float32(0.1),
        "containers": [
            collections.OrderedDict(a=1),
            collections.defaultdict(list, b=[2]),
            {1, 2},
            frozenset({"x"}),
            (),
            [],
            {},
        ],
        3: {2.5: "float key", None: "none key", True: "bool key", (1, "t"): "tuple key"},
        "time": [
            dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.timezone.utc),
            dt.date(1999, 12, 31),
            dt.time(23, 59),
            dt.timedelta(days=-1, microseconds=5),
        ],
        "other": [range(0, 10, 3), slice(1, None, 2), PurePosixPath("/a/b")],
        "types": [
            argparse.Namespace(a=1),
            types.SimpleNamespace(b=(1, "x")),
            collections.Counter("aab"),
            collections.deque([1, 2], 5),
            decimal.Decimal("1.50"),
            fractions.Fraction(1, 3),
            uuid.UUID(int=7),
            io.BytesIO(b"buffer"),
            np.dtype([("a", "<f4"), ("b", "<i8", (2,))]),
            np.ones(3, [("a", "<f4"), ("b", "|u1", (2,))]),
            np.array([1, "x", None], object),
            np.random.Generator(np.random.PCG64(1)),
            np.random.Generator(np.random.Philox(1)),
            np.broadcast_to(np.arange(3.0), (2, 3)),
        ],
    }


INTERESTING = [
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        8,
        9,
        255,
        256,
        4095,
        4096,
        4097,
        65536,
        (1 << 31) - 1,
        1 << 31,
        1 << 32,
        1 << 53,
        (1 << 63) - 1,
        1 << 63,
        1 << 64,
    ),
    *(
        -(1 << 31),
        -(1 << 63),
        0.5,
        -0.0,
        1e308,
        None,
        True,
        False,
        "",
        "a",
        "..",
        "/",
        "model.safetensors",
        "0" * 16,
        "f" * 16,
        "\0",
    ),
    *(
        [],
        {},
        [0],
        [[]],
        ["list", 1],
        ["array", 0],
        ["dict", 1],
        ["bytes", 0, "tensor"],
        ["scalar", "|O", "00"],
        ["type", "x"],
        {"dtype": "numpy.<f4", "shape": [1]},
    ),
]
TAGS = [
    "dict",
    "odict",
    "ddict",
    "list",
    "tuple",
    "set",
    "fset",
    "array",
    "scalar",
    "bytes",
    "bytearray",
    "int",
    "float",
    "complex",
    "range",
    "slice",
    "datetime",
    "date",
    "time",
    "timedelta",
    "tz",
    "path",
    "type",
    "expanded",
    *sorted(RESERVED),
]


def nodes(value, where=()):
    """All places in a JSON value, with their containers."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        found += nodes(item, (*where, key))
    return found


def mutate_json(dice, body):
    """Make one to three random edits of the tree, and return a description of them."""
    done = []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        holder, key = dice.choice(nodes(body))
        old = holder[key]
        edit = dice.randrange(8)
        if edit == 0:
            del holder[key]
        elif edit == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(dice.choice(holder)))
        elif edit == 2 and isinstance(holder, list):
            other = dice.randrange(len(holder))
            holder[key], holder[other] = holder[other], holder[key]
        elif edit == 3 and isinstance(old, int):
            holder[key] = dice.choice(
                (old + 1, old - 1, old * 2, -old, old + 4096, old ^ 1 << dice.randrange(64), float(old))
            )
        elif edit == 4 and isinstance(old, str) and old:
            at = dice.randrange(len(old))
            holder[key] = dice.choice(
                (old[:at], old[:at] + chr(dice.randrange(1, 0x3000)) + old[at + 1 :], old + old, old.upper())
            )
        elif edit == 5 and isinstance(old, str):
            holder[key] = dice.choice(TAGS)
        elif edit == 6 and isinstance(old, list):
            dice.shuffle(old)
        else:
            holder[key] = copy.deepcopy(dice.choice(INTERESTING))
        done.append(f"{key!r}: {str(old)[:60]!r}, edit {edit}")
    return "; ".join(done)


def mutate_bytes(dice, raw, start):
    raw = bytearray(raw)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randrange(start, len(raw))
        edit = dice.randrange(5)
        if edit == 0:
            raw[at] ^= 1 << dice.randrange(8)
        elif edit == 1:
            raw[at] = dice.choice(b'0123456789-.eE"[]{},:\\ \n\0\xff')
        elif edit == 2:
            del raw[at : at + dice.randrange(1, 20)]
        elif edit == 3:
            piece = raw[at : at + dice.randrange(1, 40)]
            raw[at:at] = piece
        else:
            raw[at:at] = bytes(dice.randrange(256) for _ in range(dice.randrange(1, 5)))
        if start >= len(raw):
            break
    return bytes(raw)


@pytest.mark.slow
def test_random_mutations(children, tmp_path):
    """FASTCKPT_TEST_SEED=n repeats or varies the test. Under a wrong checksum, a load may return only the same state;
    under a right one, a mutant may be a legal checkpoint, but each of its arrays must be one that was saved.
    """
    dice = random.Random(SEED)
    path = tmp_path / "original"
    fastckpt.save(varied_state(), path, metadata={"step": 1})
    raw = (path / manifest.NAME).read_bytes()
    body = manifest.body_of(path)
    cases = []
    for number in range(MUTATIONS):
        kind = ("bytes", "sealed bytes", "json")[number % 3]
        if kind == "bytes":
            mutant, what = mutate_bytes(dice, raw, 0), ""
        elif kind == "sealed bytes":
            mutant, what = manifest.seal(mutate_bytes(dice, raw, manifest.PREFIX)[manifest.PREFIX :]), ""
        else:
            changed = copy.deepcopy(body)
            what = mutate_json(dice, changed)
            mutant = manifest.seal(changed)
        cases.append(
            {"what": f"seed {SEED}, mutant {number} ({kind}) {what}", "bytes": mutant.hex(), "sealed": kind != "bytes"}
        )
    end = in_turn(
        children,
        path,
        tmp_path,
        [bytes.fromhex(case["bytes"]) for case in cases],
        whats=[case["what"] for case in cases],
        sealed=[case["sealed"] for case in cases],
        headroom=2 << 30,
        rotate=True,
        alike=("mmap", "device"),
    )
    assert end["bad"] == []
    assert end["grown"] < GROWTH
    ends = collections.Counter(end["ends"])
    print(dict(ends))
    # Mutants have led to both kinds of ends.
    assert ends["CorruptCheckpointError"] > MUTATIONS // 2, ends
    assert ends["loaded"] + ends["loaded equal"] > MUTATIONS // 50, ends
    assert ends.keys() <= {
        "CorruptCheckpointError",
        "FormatVersionError",
        "UnsupportedTypeError",
        "loaded",
        "loaded equal",
    }, ends


def test_hostile_inputs_exist_as_promised():
    """An errno that this file needs exists, and the number of cases has not silently shrunk."""
    assert errno.ELOOP
    assert len(NAMES) + len(NUMBERS) + len(text_cases()) + len(structure_cases()) + 2 * len(as_cases()) > 400
