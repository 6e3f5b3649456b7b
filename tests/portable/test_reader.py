"""The portable reader beside the compiled core, in one process: reads by both, and parts that only the reader has."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import CorruptCheckpointError, _core, _crc64
from fastckpt._api.per_rank import load_state_of
from fastckpt._portable import checksum, files, hashes, listing, reader, records
from fastckpt._portable.boxes import MERGE
from fastckpt._portable.members import check_tokens, members
from fastckpt._portable.records import ReadRequest
from harness import draws, manifest

OPTIONS = {"io": "auto", "drain": None, "tick": None}


@pytest.mark.parametrize("core", [_core, checksum], ids=["compiled", "portable"])
def test_sums_are_those_of_the_format(core, monkeypatch):
    monkeypatch.setattr(_crc64, "_sum", core.crc64)
    monkeypatch.setattr(_crc64, "_join", core.crc64_joined)
    data = random.Random(1).randbytes(10_000)
    for cut in (0, 1, 4096, 9999, 10_000):
        first, second = data[:cut], data[cut:]
        assert _crc64.of(second, _crc64.of(first)) == manifest.crc64_by_definition(data) == _crc64.of(data)
        assert _crc64.joined(_crc64.of(first), [(_crc64.of(second), len(second))]) == _crc64.of(data)
    assert _crc64.of(b"123456789") == 0xAE8B14860A799888


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "c"
    dice = np.random.default_rng(0)
    state = {f"small.{number}": dice.integers(0, 256, number, np.uint8) for number in range(300)}
    state["large"] = dice.integers(0, 1 << 30, (70, 90, 301), np.int32)
    state["cut"] = dice.integers(0, 256, (700, 3001, 3), np.uint8).view("S3").reshape(700, 3001)
    state["odd"] = dice.random((321, 77))
    state["wide"] = dice.integers(0, 1 << 30, (5, 1_000_000), np.int32)
    fastckpt.save(state, path, files=fastckpt.Files(shard_size=9_000_000))
    return path, state


def test_it_has_all_that_the_stub_promises():
    """The stand-in has everything that reading may use of the core, even in the next release."""
    package = Path(fastckpt.__file__).parent
    stub = ast.parse((package / "_core.pyi").read_text("utf-8"))
    spec = importlib.util.spec_from_file_location("stand_in", package / "_core.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    assert stand_in.__all__ == ast.literal_eval(
        next(node.value for node in stub.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    )
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    readable = 0
    for name, node in classes.items():
        ours = getattr(stand_in, name, None)
        if ours is None or ours.__module__ == "fastckpt":  # only for type checkers, or only on Linux
            continue
        readable += 1
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and (name, member.name) != ("Reader", "save"):
                found = ours if member.name == "__new__" else getattr(ours, member.name)
                asked = {one.arg for one in (*member.args.args, *member.args.kwonlyargs)} - {"self", "cls"}
                known = asked if isinstance(found, type(ReadRequest.tensor)) else inspect.signature(found).parameters
                assert not asked - set(known), (name, member.name)
    assert readable == 8
    assert stand_in.__version__ == _core.__version__
    with pytest.raises(NotImplementedError, match="Linux"):
        stand_in.Reader.save()
    functions = [node.name for node in stub.body if isinstance(node, ast.FunctionDef)]
    assert all(callable(getattr(stand_in, name)) for name in functions)


def both(path, saved_number, nbytes, **asked):
    """Send the same request to both readers; return the bytes, which must be equal."""
    found = []
    for kind, request in ((_core.Reader, _core.ReadRequest), (reader.Reader, ReadRequest)):
        memory = np.zeros(nbytes, np.uint8)
        address = memory.__array_interface__["data"][0]
        report = kind(str(path)).read(
            [request(saved_number, address, nbytes, **asked)], verify=True, threads=2, **OPTIONS
        )
        found.append((memory.tobytes(), report["bytes"], report["tensors"], report["shards"]))
    assert found[0] == found[1]
    return found[0][0]


def test_all_that_a_manifest_says(saved):
    path, _ = saved
    compiled, portable = _core.Reader(str(path)), reader.Reader(str(path))
    fields = ("name", "dtype", "shape", "shard", "offset", "nbytes")
    for theirs, ours in zip(compiled.tensors(), portable.tensors(), strict=True):
        assert all(getattr(theirs, field) == getattr(ours, field) for field in fields)
    for number in range(len(compiled.tensors())):
        assert compiled.checksum(number) == portable.checksum(number)
    assert [(one.file, one.nbytes) for one in compiled.shards()] == [
        (one.file, one.nbytes) for one in portable.shards()
    ]
    assert (compiled.structure(), compiled.metadata()) == (portable.structure(), portable.metadata())
    # The two readers round the last digit of a number differently.
    theirs, ours = compiled.info(), portable.info()
    assert theirs["saved"].pop("options") == ours["saved"].pop("options")
    assert theirs.pop("saved") == pytest.approx(ours.pop("saved"))
    assert theirs.pop("created") == pytest.approx(ours.pop("created"))
    assert theirs == ours
    assert len(compiled.shards()) > 1


def test_drawn_boxes(saved):
    """Boxes have any steps and order of memory, and span blocks or a part of a row."""
    path, state = saved
    dice = random.Random(2)
    names = list(state)
    for _ in range(150):
        name = dice.choice(["large", "odd", "wide", "small.299", "cut"])
        array = state[name]
        box = []
        for size in array.shape:
            start, stop = sorted((dice.randint(0, size), dice.randint(0, size)))
            box.append((start, stop, dice.choice([1, 1, 1, 2, 7, 100_000])))
        part = array[tuple(slice(*along) for along in box)]
        order = dice.sample(range(part.ndim), part.ndim)
        layout = np.empty([part.shape[axis] for axis in order], part.dtype).transpose(np.argsort(order))
        strides = dice.choice([None, layout.strides])
        if not part.size:
            continue
        read = both(path, names.index(name), part.nbytes, box=box, strides=strides)
        whole = np.ndarray(part.shape, part.dtype, read, strides=strides)
        assert np.array_equal(whole, part), (name, box, strides)


def test_a_box_reads_no_large_gaps(saved, monkeypatch):
    path, state = saved
    read = []
    fill = files.LocalFile.read_at
    monkeypatch.setattr(
        files.LocalFile, "read_at", lambda file, offset, to: read.append(len(to)) or fill(file, offset, to)
    )
    number = list(state).index("wide")
    memory = np.zeros(5, np.int32)
    request = ReadRequest(number, memory.ctypes.data, memory.nbytes, [(0, 5, 1), (7, 8, 1)])
    reader.Reader(path).read([request], verify=False, threads=1, **OPTIONS)
    assert memory.tolist() == state["wide"][:, 7].tolist()
    assert read == [4] * 5
    assert MERGE < 4_000_000


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "longer", "header", "whole sum"])
def test_damage_is_what_the_core_finds(saved, tmp_path, damage):
    path = tmp_path / "c"
    shutil.copytree(saved[0], path)
    shard = sorted(path.glob("*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    if damage == "flipped":
        content[5_000_000] ^= 1
    elif damage == "cut":
        del content[6_000_000:]
    elif damage == "longer":
        content += b"x"
    elif damage == "header":
        content[100] ^= 1
    else:
        body = manifest.body_of(path)
        body["shards"][1]["crc"] = "0" * 16
        manifest.forge(path, body)
    shard.write_bytes(content)
    if damage == "missing":
        shard.unlink()
    found = []
    for kind in (_core.Reader, reader.Reader):
        verified = kind(str(path)).verify(io="auto", threads=2, tick=None)
        found.append({(one.file, one.offset, one.length, one.tensor) for one in verified["damage"]})
    assert found[0] == found[1]
    assert found[0]


def test_damage_beside_a_box_is_what_the_core_finds(saved, tmp_path):
    """The damage is in the half of a block outside the box; reads of other blocks do not detect it."""
    path, state = tmp_path / "c", saved[1]
    shutil.copytree(saved[0], path)
    number = list(state).index("wide")
    stored = _core.Reader(str(path)).tensors()[number]
    file = path / _core.Reader(str(path)).shards()[stored.shard].file
    content = bytearray(file.read_bytes())
    row = state["wide"][0].nbytes
    content[stored.offset + 2 * row - 1] ^= 1
    file.write_bytes(content)
    memory = np.zeros(8, np.int32)
    texts = []
    for kind, request in ((_core.Reader, _core.ReadRequest), (reader.Reader, ReadRequest)):

        def read(box, *, verify, kind=kind, request=request):
            wanted = request(number, memory.ctypes.data, memory.nbytes, box)
            kind(str(path)).read([wanted], verify=verify, threads=1, **OPTIONS)
            part = state["wide"][tuple(slice(*along) for along in box)]
            assert memory.tobytes() == part.tobytes()

        for rows, columns in ((1, 2, 1), (999_980, 999_988, 1)), ((0, 2, 1), (999_991, 999_995, 1)):
            with pytest.raises(CorruptCheckpointError, match="tensor `wide`") as raised:
                read([rows, columns], verify=True)
            read([rows, columns], verify=False)
            texts.append(str(raised.value))
        read([(3, 4, 1), (0, 8, 1)], verify=True)
    assert texts[:2] == texts[2:]


def _beside(member, value):
    """Insert a member before the member ``metadata`` of the manifest."""
    return lambda text: text.replace(b'"metadata":', b'"%b":%b,"metadata":' % (member, value))


def _in_tensor(members):
    return lambda text: text.replace(b'"dtype":"I64"', b'"dtype":"I64",' + members)


def _in_saved(members):
    return lambda text: text.replace(b'"engine":', members + b',"engine":')


def _nested(levels, inside=b""):
    return b"[" * levels + inside + b"]" * levels


#: By the forged part of a manifest: the change, and whether the manifest can still be read.
FORGED = {
    "a bracket in the place of the last brace": (lambda text: text.replace(b"]}\n", b"]]\n"), False),
    "a minor version beyond 64 bits": (
        lambda text: text.replace(b'"min_reader":0', b'"min_reader":18446744073709551616'),
        False,
    ),
    "space around a structure": (
        lambda text: text.replace(b'"structure":', b'"structure" : \t').replace(b"]}\n", b"] } "),
        True,
    ),
    "a number that no float can be": (lambda text: text.replace(b'"metadata":[', b'"metadata":[1e400,'), True),
    "such a number in an unknown member": (_beside(b"x", b"[1e400]"), True),
    "such a number in an unknown member of a tensor": (_in_tensor(b'"x":1e400'), True),
    "such a number for a time": (lambda text: text.replace(b'"created":', b'"created":1e400,"x":'), False),
    "such an integer for a time": (
        lambda text: text.replace(b'"created":', b'"created":1%b,"x":' % (b"0" * 400)),
        False,
    ),
    "minus zero for a size": (lambda text: text.replace(b'"shard":0', b'"shard":-0'), False),
    "minus zero for a time": (lambda text: text.replace(b'"created":', b'"created":-0,"x":'), True),
    "another name for infinity": (lambda text: text.replace(b'"metadata":[', b'"metadata":[Infinity,'), False),
    "such a name in an unknown member": (_beside(b"x", b"[NaN]"), False),
    "a member twice in an unknown one": (_beside(b"x", b'{"a":1,"a":2}'), True),
    "an unknown member twice": (_beside(b"x", b'1,"x":[2]'), True),
    "an unknown member twice, once damaged": (_beside(b"x", b'[1,,2],"x":2'), False),
    "an unknown member of a tensor twice": (_in_tensor(b'"x":1,"x":2'), True),
    "a shard's member in a tensor, twice": (_in_tensor(b'"file":1,"file":2'), True),
    "a known member twice": (_beside(b"block_size", b"4194304"), False),
    "tokens twice": (_beside(b"metadata", b"[null]"), False),
    "a known member of a tensor twice": (_in_tensor(b'"dtype":"I64"'), False),
    "a second checksum of a tensor twice": (_in_tensor(b'"crc64xz":"","crc64xz":""'), False),
    "a second checksum that is a number": (
        lambda text: text.replace(b'"crc64xz":"', b'"crc64xz":1,"x":"'),
        False,
    ),
    "files of another type": (_in_saved(b'"files":{}'), False),
    "a file of a wrong time": (_in_saved(b'"files":[{"modified":9223372036854775808,"links":0}]'), False),
    "a file without its number": (
        lambda text: text.replace(b'"files":', b'"files":[{"modified":-9223372036854775808,"links":0}],"x":'),
        True,
    ),
    "options": (_in_saved(b'"options":[["exclude","a"],["exclude","b"]]'), True),
    "as many options as there may be": (_in_saved(b'"options":[%b]' % b",".join([b'["",""]'] * 1024)), True),
    "more options": (_in_saved(b'"options":[%b]' % b",".join([b'["",""]'] * 1025)), False),
    "options of another type": (_in_saved(b'"options":{"exclude":"a"}'), False),
    "an option without a value": (_in_saved(b'"options":[["exclude"]]'), False),
    "an option of three": (_in_saved(b'"options":[["exclude","a","b"]]'), False),
    "an option that is no text": (_in_saved(b'"options":[["exclude",1]]'), False),
    "options twice": (_in_saved(b'"options":[],"options":[]'), False),
    "files twice": (_in_saved(b'"files":[]'), False),
    "a known member of the writer twice": (lambda text: text.replace(b'"writer":{', b'"writer":{"name":"",'), False),
    "an unknown member as deep as a parser may go": (_beside(b"x", _nested(126)), True),
    "an unknown member that is deep": (_beside(b"x", _nested(128)), True),
    "an unknown member that is very deep": (_beside(b"x", _nested(100_000)), True),
    "deep values side by side": (_beside(b"x", _nested(126, b"[]," * 9 + _nested(300, b'"]"') + b',{"y":[]}')), True),
    "deep objects": (_beside(b"x", b'{"y":' * 5000 + b"0" + b"}" * 5000), True),
    "a deep value that is damaged": (_beside(b"x", _nested(5000, b"1 1")), False),
    "a deep value that is damaged above": (_beside(b"x", b"[" * 200 + b"[0][0]" + b"]" * 200), False),
    "a deep value with the wrong bracket": (_beside(b"x", b"[" * 200 + b"}" + b"]" * 199), False),
    "a deep value that is not closed": (_beside(b"x", b"[" * 200 + b"]" * 199), False),
    "a deep member of a tensor": (_in_tensor(b'"x":' + _nested(5000)), True),
    "a deep shape": (lambda text: text.replace(b'"shape":[10]', b'"shape":' + _nested(5000)), False),
    "deep tokens": (lambda text: text.replace(b'"metadata":[', b'"metadata":[' + _nested(5000) + b","), False),
    "a name with half of a character": (_beside(b"\\ud800", b"1"), False),
    "such a name in what was saved": (_in_saved(b'"\\ud800":1'), False),
    "such a name in the writer": (lambda text: text.replace(b'"writer":{', b'"writer":{"\\ud800":1,'), False),
    "such a name in a file": (lambda text: text.replace(b'"modified":', b'"\\ud800":1,"modified":'), False),
    "such a name in a shard": (lambda text: text.replace(b'"file":', b'"\\ud800":1,"file":'), False),
    "such a name in a tensor": (_in_tensor(b'"\\udfff":1'), False),
    "such a name in an unknown object": (_beside(b"x", b'{"\\ud800":1}'), True),
    "such a name in an unknown object of a tensor": (_in_tensor(b'"x":{"\\ud800":1}'), True),
    "both halves of a character in a name": (_in_tensor(b'"\\ud83d\\ude00":1'), True),
}


def verdict(kind, path):
    """Return the result of a reader for a checkpoint: its error, or the values that it read."""
    try:
        opened = kind(str(path))
    except fastckpt.CheckpointError as error:
        return type(error)
    options = opened.info()["saved"]["options"]
    return opened.structure(), opened.metadata(), len(opened.tensors()), options


@pytest.mark.parametrize("forged", FORGED)
def test_forged_manifests_have_the_verdict_of_the_core(tmp_path, forged):
    fastckpt.save({"a": np.arange(10)}, tmp_path / "c")
    text = (tmp_path / "c" / "fastckpt.json").read_bytes().split(b"\n", 1)[1]
    change, readable = FORGED[forged]
    changed = change(text)
    assert changed != text
    manifest.forge(tmp_path / "c", changed)

    verdicts = [verdict(kind, tmp_path / "c") for kind in (_core.Reader, reader.Reader)]
    assert verdicts[0] == verdicts[1]
    assert (verdicts[0] is CorruptCheckpointError) is not readable


def mutations(text, dice, how_many):
    """Yield the text of a manifest with some values, brackets and names changed."""
    at = [found.span() for found in re.finditer(rb'"[^"]*"|-?[0-9.]+|[][{},:]', text)]
    words = [text[begin:end] for begin, end in at]
    words += [b"null", b"1e400", b"-0", b"18446744073709551615", b"9223372036854775808", b'"\\ud800"', b"[[", b"NaN"]
    for _ in range(how_many):
        changed = bytearray(text)
        for begin, end in sorted(dice.sample(at, dice.choice((1, 1, 2, 3))), reverse=True):
            match dice.randrange(4):
                case 0:
                    changed[begin:end] = dice.choice(words)
                case 1:
                    del changed[begin:end]
                case 2:
                    changed[begin:begin] = dice.choice(words)
                case _:
                    changed[dice.randrange(begin, end)] ^= 1 << dice.randrange(8)
        yield bytes(changed)


def test_mutated_manifests_have_the_verdict_of_the_core(tmp_path, record_property):
    """The gate tries some mutations. ``FASTCKPT_TEST_RUNS=all`` tries many, and those that ``scripts/fuzz`` saved."""
    path = tmp_path / "c"
    state = {
        "a": np.arange(10),
        "b": [np.zeros((2, 0), np.int8), {"c": (1, "x", None)}],
        "d": np.ones(3, np.complex128),
    }
    fastckpt.save(state, path, metadata={"step": 1})
    text = (path / "fastckpt.json").read_bytes().split(b"\n", 1)[1]
    everything = draws.one_in(2) == 1
    kept = sorted(Path("target/fuzz/corpus/manifest").glob("*")) if everything else []
    tried = [*mutations(text, random.Random(1), 100_000 if everything else 1000), *(one.read_bytes() for one in kept)]
    taken = 0
    for changed in tried:
        manifest.forge(path, changed)
        core, portable = verdict(_core.Reader, path), verdict(reader.Reader, path)
        assert core == portable, changed
        taken += core is not CorruptCheckpointError
    # Some mutations are accepted, and some are refused.
    assert len(tried) // 50 < taken < len(tried)
    record_property("trials", len(tried))


def test_replaced_while_it_is_read(tmp_path):
    fastckpt.save({"a": np.arange(1000)}, tmp_path / "c")
    opened = reader.Reader(tmp_path / "c")
    memory = np.zeros(1000, np.int64)
    request = ReadRequest(0, memory.ctypes.data, memory.nbytes)
    fastckpt.save({"a": np.arange(1, 1001)}, tmp_path / "c")
    with pytest.raises(fastckpt.exceptions.ReplacedCheckpointError, match="open it again"):
        opened.read([request], verify=True, threads=1, **OPTIONS)
    fastckpt.remove(tmp_path / "c")
    with pytest.raises(fastckpt.exceptions.ReplacedCheckpointError):
        opened.read([request], verify=True, threads=1, **OPTIONS)


def test_an_error_of_a_callback_ends_the_read(saved):
    path, state = saved
    number = list(state).index("wide")
    memory = np.empty(state["wide"].nbytes, np.uint8)
    request = ReadRequest(number, memory.ctypes.data, memory.nbytes)

    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        reader.Reader(path).read([request], verify=True, threads=2, **{**OPTIONS, "tick": fail})
    lost = ReadRequest(number, 0, memory.nbytes)
    with pytest.raises(KeyError, match="mine"):
        reader.Reader(path).read([lost], verify=True, threads=2, **{**OPTIONS, "drain": fail})


def test_listed_as_by_the_core(tmp_path):
    for name in ("step-1", "step-2", "step-3"):
        fastckpt.save({"a": np.arange(10)}, tmp_path / name)
    (tmp_path / "step-2" / "model.safetensors").unlink()
    (tmp_path / "step-3" / "fastckpt.json").write_bytes(b"no")
    (tmp_path / "latest").symlink_to("step-1")
    (tmp_path / "logs").mkdir()
    (tmp_path / ".step-4.tmp-host-0000000000000001-1-1-1-00000000").mkdir()
    (tmp_path / ".step-4.tmp-host-0000000000000001-1-1-1-00000000" / "fastckpt.json").write_bytes(b"")
    for ours, theirs in zip(listing.list_checkpoints(str(tmp_path)), fastckpt.list(tmp_path), strict=True):
        assert ours._replace(created=None, damage=None)[:5] == (
            theirs.name,
            theirs.path,
            None,
            theirs.bytes,
            theirs.aside,
        )
        assert ours.created == pytest.approx(theirs.created) if theirs.created else ours.created is None
        assert (ours.damage is None) == (theirs.damage is None), (ours, theirs)
    with pytest.raises(FileNotFoundError, match="cannot list"):
        listing.list_checkpoints(str(tmp_path / "nowhere"))


def test_keys_that_crowd():
    """The verdicts are equal to the core's, for usual keys and for keys that were made to collide."""
    period = (1 << 61) - 1
    families = {
        "numbers": range(5000),
        "strides": range(0, 1 << 40, 1 << 26),
        "names": [f"layer.{number}.weight" for number in range(5000)],
        "powers": [1 << number for number in range(5000)],
        "floats": [number / 7 for number in range(5000)],
        "forged": [number * period for number in range(5000)],
        "half forged": [*range(5000), *(number * period for number in range(2000))],
    }
    verdicts = {}
    for (name, keys), neighbours in itertools.product(families.items(), (0, 9)):
        verdicts[name, neighbours] = hashes.crowded(list(keys), neighbours=neighbours)
        assert verdicts[name, neighbours] == _core.crowded(list(keys), neighbours=neighbours), (name, neighbours)
    assert set(verdicts.values()) == {True, False}


def test_members_are_told_apart_wherever_the_text_is_cut(monkeypatch):
    def told_apart(text):
        return [(name, bytes(value)) for name, value in members(memoryview(text))]

    deep = b"[" * 200 + rb'"\\\\]",{"":"[\\\"]"}' + b"]" * 200
    text = rb'"a\"]\\":[1,{"b":"]}\\\\\""}] , "c":"\\\\\\\"{[,:","d":{"e":[]},"d":[[],["x",[1,2]]]}' + b" \n"
    found = told_apart(text)
    assert [name for name, _ in found] == ['a"]\\', "c", "d", "d"]
    cut = told_apart(b'"x":' + deep + b"," + text)
    assert cut[1:] == found
    assert cut[0][1].count(b"[") == cut[0][1].count(b"]") < 128
    for size in range(1, 40):
        monkeypatch.setattr("fastckpt._portable.members._CHUNK", size)
        assert told_apart(text) == found
        assert told_apart(b'"x":' + deep + b"," + text) == cut
        check_tokens("it", memoryview(found[-1][1]))
        for bad in (b'[["x",[1],[2]]]', b'[["x",[[]]]]', b'[{"a":1}]', b"1"):
            with pytest.raises(ValueError, match="it "):
                check_tokens("it", memoryview(bad))
    for bad in (
        b"",
        b"}",
        b"]",
        b'"a":1}}',
        b'"a":1]',
        b'"a":1}{',
        b'"a":1',
        b"1:2}",
        b'"a" 1}',
        b'"a":1},',
    ):
        with pytest.raises(ValueError, match=r"it |follows"):
            members(memoryview(bad))


# --- states of ranks --------------------------------------------------------------------------------------------------


STATES_OF_RANKS = {
    "nothing": [],
    "empty token": [[]],
    "no list": [["dict", 1], "a", 1],
    "a value": [None],
    "fewer": [["list", 5], 1],
    "very many": [["list", 10**18]],
    "negative": [["list", -1]],
    "true": [["list", True], 1],
    "more": [["list", 1], 1, 2],
    "no tensor": [["list", 1], ["tensor", 4]],
    "negative tensor": [["list", 1], ["tensor", -1]],
    "long tensor": [["list", 1], ["tensor", 10**30]],
    "unknown": [["list", 1], ["call", "os.system", 1], "true"],
}


@pytest.mark.parametrize("core", ["compiled", "portable"])
@pytest.mark.parametrize("kind", STATES_OF_RANKS)
def test_states_of_ranks(tmp_path, monkeypatch, core, kind):
    if core == "portable":
        monkeypatch.setattr(_core, "Reader", reader.Reader)
        monkeypatch.setattr(_core, "ReadRequest", records.ReadRequest)
    path = tmp_path / "step"
    body = manifest.minimal(path, [("a", "U8", [4], b"abcd"), ("b", "U8", [3], b"\0\1\2")])
    body["per_rank"] = [["list", 1], ["array", 1]]
    manifest.forge(path, body)
    assert load_state_of(path, 0, None).tolist() == [0, 1, 2]
    body["per_rank"] = STATES_OF_RANKS[kind]
    manifest.forge(path, body)
    errors = fastckpt.exceptions
    with pytest.raises(errors.FormatVersionError if kind == "unknown" else errors.CorruptCheckpointError):
        load_state_of(path, 0, None)


def test_names_that_lead_elsewhere_on_windows():
    from fastckpt._portable.manifest import is_plain

    assert is_plain("model.safetensors", windows=True)
    for name in ("C:model.safetensors", "model.bin:x.safetensors"):
        assert is_plain(name, windows=False)
        assert not is_plain(name, windows=True)
