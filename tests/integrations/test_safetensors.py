"""safetensors files written by the integration: the same bytes, durable and checked; and tensors that threads fetch."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError, TensorSpec

import fastckpt
from fastckpt.integrations import safetensors as door
from harness import needs, points, zygote
from harness.rot import rot

CHECKSUM = "user.fastckpt.crc64nvme"
WAIT = 60
#: The dtypes of torch that safetensors supports, under the names of safetensors.
DTYPES = []
for _dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
    try:
        TensorSpec(dtype=str(_dtype).split(".")[-1], shape=[1], data_ptr=1, data_len=1)
    except SafetensorError:
        continue
    DTYPES.append(_dtype)


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def tensors():
    """Tensors of each dtype, two filled, one empty and one scalar, with names that JSON escapes."""
    made = {'a "\\\n\x01\x7fé€😀': torch.arange(3.0)}
    for number, dtype in enumerate(sorted(DTYPES, key=str)):
        zeros = torch.zeros(4, 3, dtype=torch.uint8).view(torch.uint8)
        zeros = zeros.repeat(1, torch.empty(0, dtype=dtype).element_size())
        zeros += (torch.arange(4, dtype=torch.uint8).reshape(4, 1) + number) % 2
        made |= {f"{place}.{dtype}": zeros.clone().view(dtype) for place in ("b", "A")}
        made[f"none.{dtype}"] = torch.empty(0, 5, dtype=dtype)
        if dtype.itemsize > 1:
            made[f"scalar.{dtype}"] = torch.ones((), dtype=dtype)
    assert len(DTYPES) >= 18
    return made


@pytest.fixture
def state():
    torch.manual_seed(5)
    return {
        "model": {"w": torch.randn(400, 25), "b": torch.randn(25).to(torch.bfloat16), "none": torch.empty(0, 3)},
        "optimizer": {"m": torch.randn(400, 25)},
        "w": torch.ones(3),  # in the other file; the model's file has a tensor of this name, too
        "step": 3,
    }


@pytest.fixture
def checkpoint(state, tmp_path):
    fastckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def damage(checkpoint, name):
    """Damage one tensor, in the middle of the bytes that its header entry gives."""
    file = checkpoint / ("model.safetensors" if name in ("w", "b") else "training/training.safetensors")
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:data])[name]["data_offsets"]
    rot(file, data + (begin + end) // 2)


@pytest.mark.parametrize("metadata", [None, {}, {"format": 'p"t'}])
def test_a_file_holds_what_one_of_safetensors_holds(tensors, tmp_path, metadata):
    """safetensors has its own order for dtypes of equal width."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    safetensors.torch.save_file(tensors, theirs, metadata)
    door.save_file(tensors, str(ours), metadata)
    with door.install():
        safetensors.torch.save_file(tensors, tmp_path / "installed", metadata)
    assert ours.read_bytes() == (tmp_path / "installed").read_bytes()
    assert ours.stat().st_size == theirs.stat().st_size
    with safetensors.safe_open(ours, "pt") as file:
        assert file.metadata() == metadata
    back = door.load_file(ours)
    assert back.keys() == tensors.keys()
    assert all(
        torch.equal(raw(back[name]), raw(one)) and back[name].dtype == one.dtype for name, one in tensors.items()
    )


def test_arrays_are_written_as_they_look(tmp_path):
    """safetensors writes the memory of an array even if the array has another order."""
    square = np.arange(6.0).reshape(2, 3)
    arrays = {
        "w": square,
        "turned": square.T,
        "odd": square[:, ::2],
        "big": square.astype(">f4"),
        "one": np.array(True),
    }
    door.save_file(arrays, tmp_path / "ours", {"a": "1", "b": "2"})
    back = door.load_file(tmp_path / "ours", framework="np")
    assert all(np.array_equal(back[name], one) and back[name].shape == one.shape for name, one in arrays.items())
    plain = {name: arrays[name] for name in ("w", "big", "one")}
    door.save_file(plain, tmp_path / "ours")
    safetensors.numpy.save_file(plain, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for metadata in (None, {}):
        door.save_file({}, tmp_path / "ours", metadata)
        assert door.load_file(tmp_path / "ours") == {}


def test_a_file_is_new_whole_and_summed(tmp_path):
    before = os.umask(0o027)
    try:
        door.save_file({"w": np.ones(3)}, tmp_path / "new" / "m.safetensors")
    finally:
        os.umask(before)
    path = tmp_path / "new" / "m.safetensors"
    assert path.stat().st_mode & 0o777 == 0o640
    assert CHECKSUM in os.listxattr(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    door.save_file({"w": np.zeros(3)}, link)
    assert link.is_symlink()
    assert not door.load_file(path, framework="np")["w"].any()


def spec(**changed):
    return TensorSpec(**{"dtype": "float32", "shape": [2], "data_ptr": SPECIMEN.ctypes.data, "data_len": 8, **changed})


SPECIMEN = np.ones(4, np.float32)
SHARED = torch.ones(4)


@pytest.mark.parametrize(
    ("given", "metadata", "error", "text"),
    [
        ({"__metadata__": np.ones(2)}, None, SafetensorError, "cannot hold '__metadata__'"),
        ({7: np.ones(2)}, None, TypeError, "not an instance of 'str'"),
        ({"\ud800": np.ones(2)}, None, UnicodeEncodeError, "surrogates"),
        ({"w": np.array(["text"])}, None, SafetensorError, "dtype"),
        ({"w": np.ones(2)}, {"step": 7}, TypeError, "int"),
        ({"w": np.ones(2)}, [], TypeError, "list"),
        ({"w": torch.ones(2), "v": np.ones(2)}, None, ValueError, "torch.Tensor"),
        ([torch.ones(2)], None, ValueError, "dict"),
        ({"w": SHARED, "v": SHARED[:2]}, None, RuntimeError, "share memory"),
        ({"w": torch.ones(2, 3).T}, None, ValueError, "contiguous"),
        ({"w": torch.ones(2).to_sparse()}, None, ValueError, "sparse"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, None, Exception, "complex128"),
    ],
)
def test_what_no_file_can_hold_replaces_none(tmp_path, given, metadata, error, text):
    path = tmp_path / "m.safetensors"
    path.write_text("precious")
    with pytest.raises(error, match=text):
        door.save_file(given, path, metadata)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "precious"


@pytest.mark.parametrize("given", [{"w": spec(data_len=4)}, {"w": spec(shape=[2, 2])}, {"__metadata__": spec()}])
def test_a_description_that_is_wrong_replaces_nothing(tmp_path, given):
    path = tmp_path / "m.safetensors"
    path.write_text("precious")
    with door.install():
        with pytest.raises(SafetensorError, match=r"the format cannot hold '\w+': TensorSpec"):
            safetensors.serialize_file(given, path)
        for wrong in ({7: spec()}, {"w": {}}, [spec()]):
            with pytest.raises(TypeError):
                safetensors.serialize_file(wrong, path)
        safetensors.serialize_file({"w": spec(), "v": spec(dtype="float4_e2m1fn_x2", shape=[8])}, path)
    with safetensors.safe_open(path, "pt") as file:
        assert file.get_slice("v").get_shape() == [16]


def test_a_header_that_is_too_long_is_refused(tmp_path):
    """safetensors also refuses this header: no reader could open the file."""
    path = tmp_path / "m.safetensors"
    for save in (safetensors.numpy.save_file, door.save_file):
        with pytest.raises(SafetensorError, match=r"header too large|more than 100000000 bytes"):
            save({"w" * 100_000_000: np.ones(2)}, path)
    assert not path.exists()


def test_installed_it_leaves_what_a_link_points_to(tmp_path):
    """A link may point to a file of a cache, which other links share."""
    door.save_file({"w": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "link").symlink_to("blob")
    with door.install():
        safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "link")
    assert door.load_file(tmp_path / "blob")["w"].all()
    assert not door.load_file(tmp_path / "link")["w"].any()


def test_what_is_no_file_is_not_replaced(tmp_path):
    with door.install():
        for path in (tmp_path, Path(os.devnull)):
            with pytest.raises(FileExistsError):
                safetensors.numpy.save_file({"w": np.ones(2)}, path)


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_handle_has_what_theirs_has(tensors, tmp_path, framework, backend):
    path = tmp_path / "m.safetensors"
    if framework == "np":
        safetensors.numpy.save_file({"w": np.arange(6).reshape(2, 3)}, path, {"a": "b"})
    else:
        # With pread, safetensors makes no tensor of a dtype with two values per byte.
        some = {name: tensor for name, tensor in tensors.items() if "float4" not in name}
        safetensors.torch.save_file(some, path, {"a": "b"})
    with safetensors.safe_open(path, framework, backend=backend) as theirs:
        with door.safe_open(path, framework, "cpu", backend=backend) as ours:
            assert (ours.keys(), ours.offset_keys()) == (theirs.keys(), theirs.offset_keys())
            assert ours.metadata() == {"a": "b"}
            name = ours.keys()[0]
            assert ours.get_tensor(name).tolist() == theirs.get_tensor(name).tolist()
            assert ours.get_slice(name)[1:].tolist() == theirs.get_slice(name)[1:].tolist()
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_tensors().keys() == theirs.get_tensors().keys()
            if hasattr(theirs, "get_tensor_meta"):
                assert ours.get_tensor_meta(name).shape == theirs.get_tensor_meta(name).shape
            for wrong in (lambda one: one.get_tensor("x"), lambda one: one.get_slice("x"), lambda one: one.nonsense):
                texts = []
                for one in (ours, theirs):
                    with pytest.raises((SafetensorError, AttributeError)) as raised:
                        wrong(one)
                    texts.append(str(raised.value))
                assert texts[0] == texts[1]
        for call in (lambda: [*ours.keys()], ours.get_tensors, lambda: ours.get_tensor(name), ours.prefetch):
            with pytest.raises(SafetensorError, match="File is closed"):
                call()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (("missing", "pt"), {}),
        (("m", "nonsense"), {}),
        (("m", "pt", "nonsense"), {}),
        (("m", "np", "cuda"), {}),
        (("m", "pt"), {"backend": "nonsense"}),
        (("text", "pt"), {}),
        ((".", "pt"), {}),
    ],
)
def test_errors_of_opening_are_theirs(tmp_path, monkeypatch, given, options):
    monkeypatch.chdir(tmp_path)
    door.save_file({"w": np.ones(2)}, "m")
    Path("text").write_text("some text that is no header")
    texts = []
    for opening in (safetensors.safe_open, door.safe_open):
        with pytest.raises(Exception) as raised:  # noqa: PT011 - it is compared
            opening(*given, **options)
        texts.append((raised.type, str(raised.value)))
    assert texts[0] == texts[1]
    for wrong in (b"m", None):
        with pytest.raises(TypeError):
            door.safe_open(wrong, "pt")


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("name", ["w", "optimizer.m"])
def test_a_damaged_tensor_of_a_checkpoint_is_not_given(checkpoint, tmp_path, name, framework):
    file = "model.safetensors" if name == "w" else "training/training.safetensors"
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "m.safetensors").symlink_to(checkpoint / file)
    damage(checkpoint, name)
    for path in (checkpoint / file, tmp_path / "link" / file, tmp_path / "m.safetensors"):
        with door.safe_open(path, framework) as opened:
            assert opened.get_slice(name).get_shape() == [400, 25]
            assert name in opened.keys()  # noqa: SIM118 - it is no dict
            for read in (
                lambda opened=opened: opened.get_tensor(name),
                lambda opened=opened: opened.get_slice(name)[:1],
                lambda opened=opened: opened.get_tensors(),
                lambda path=path: door.load_file(path, framework=framework),
            ):
                with pytest.raises(fastckpt.CorruptCheckpointError, match=f"{name}.*checksum"):
                    read()
        door.safe_open(path, framework, verify=False).get_tensor(name)
        door.load_file(path, backend="pread", verify=False)
    if name == "w":
        with door.safe_open(checkpoint / file, "pt") as opened:
            assert opened.get_tensor("none").shape == (0, 3)
            assert opened.get_tensor("b").dtype == torch.bfloat16


def test_a_tensor_is_compared_once(state, checkpoint):
    """Later damage is visible, because a mapping shows the file; a new handle compares again."""
    path = checkpoint / "model.safetensors"
    with door.safe_open(path, "pt") as file:
        assert torch.equal(copy.copy(file.get_slice("w"))[1:], state["model"]["w"][1:])
        damage(checkpoint, "w")
        assert not torch.equal(file.get_tensor("w"), state["model"]["w"])
    with pytest.raises(fastckpt.CorruptCheckpointError):
        door.load_file(path)


def test_a_damaged_header_is_noticed(checkpoint):
    """One letter of a name is changed: safetensors finds a tensor with the changed name."""
    path = checkpoint / "model.safetensors"
    rot(path, path.read_bytes().index(b'"b"') + 1)
    with safetensors.safe_open(path, "pt") as file:
        assert file.keys() == ["c", "none", "w"]
    for name in ("c", "w", "none", "b"):
        with door.safe_open(path, "pt") as file, pytest.raises(fastckpt.CorruptCheckpointError, match="header"):
            file.get_tensor(name)
    assert door.load_file(path, verify=False).keys() == {"c", "none", "w"}


def test_a_damaged_manifest_is_an_error_unless_nothing_is_compared(checkpoint):
    rot(checkpoint / "fastckpt.json", 100)
    with pytest.raises(fastckpt.CorruptCheckpointError, match=r"fastckpt\.json"):
        door.safe_open(checkpoint / "model.safetensors", "pt")
    assert "w" in door.load_file(checkpoint / "model.safetensors", verify=False)


def test_a_file_beside_a_manifest_that_does_not_list_it_is_one_of_its_own(checkpoint):
    damage(checkpoint, "w")
    (checkpoint / "aside").mkdir()
    for path in (checkpoint / "own.safetensors", checkpoint / "aside" / "model.safetensors"):
        safetensors.torch.save_file({"w": torch.ones(3)}, path)
        assert door.load_file(path)["w"].sum() == 3


def test_a_single_file_is_compared_where_it_is_read_as_a_whole(tmp_path):
    path = tmp_path / "m.safetensors"
    door.save_file({"w": torch.ones(1000), "v": torch.ones(10)}, path)
    assert door.load_file(path)["v"].sum() == 10
    rot(path, path.stat().st_size - 1)
    with pytest.raises(fastckpt.CorruptCheckpointError, match=r"open_read: .*damaged"):
        door.load_file(path)
    with door.safe_open(path, "np") as file:
        file.get_tensor("w")
        file.get_slice("w")[1:]
        with pytest.raises(fastckpt.CorruptCheckpointError):
            file.get_tensors()
    door.load_file(path, verify=False)
    os.removexattr(path, CHECKSUM)
    door.load_file(path)


def test_a_handle_of_what_was_replaced(state, checkpoint):
    """A handle continues with the file that it opened; it does not return tensors that can no longer be verified."""
    path = checkpoint / "model.safetensors"
    with door.safe_open(path, "pt") as file, door.safe_open(path, "pt", verify=False) as other:
        file.get_tensor("w")
        fastckpt.save({"model": {"w": torch.zeros(400, 25), "b": torch.zeros(25)}}, checkpoint)
        for one in (file, other):
            assert torch.equal(one.get_tensor("w"), state["model"]["w"])
            with one.prefetch({"w": None}) as loader:
                assert torch.equal(loader.take("w"), state["model"]["w"])
        with file.prefetch() as loader, pytest.raises(fastckpt.exceptions.ReplacedCheckpointError):
            loader.take("b")
        for name in ("b", "none"):
            with pytest.raises(fastckpt.exceptions.ReplacedCheckpointError, match="open it again"):
                file.get_tensor(name)
        assert other.get_tensors().keys() == {"b", "none", "w"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_not_given(state, checkpoint, when):
    """The bytes would be compared with the checksums of another checkpoint with an equal header."""

    def racing(real):
        def opened(*given, **options):
            theirs = real(*given, **options) if when == "after" else None
            state["model"]["w"] += 1
            fastckpt.save(state, checkpoint)
            return theirs or real(*given, **options)

        return opened

    replaced = pytest.raises(fastckpt.exceptions.ReplacedCheckpointError, match="open it again")
    with points.replaced(points.OPEN_TENSORS, racing), replaced:
        door.safe_open(checkpoint / "model.safetensors", "pt").get_tensor("w")


# --- prefetch ---------------------------------------------------------------------------------------------------------


def fetchers():
    return [one for one in threading.enumerate() if one.name.startswith("fastckpt-prefetch")]


@pytest.fixture
def none_left():
    yield
    for one in fetchers():
        one.join(WAIT)
    assert fetchers() == []


@pytest.fixture
def held(checkpoint):
    """Reads of tensors wait: the returned function releases a read by the name of its tensor, or all reads."""
    gates = {name: threading.Event() for name in ("w", "b", "none")}
    begun = concurrent.futures.Future()

    def checked(real):
        def check(file, *names, threads=None):
            if threads is not None:
                if not begun.done():
                    begun.set_result(None)
                assert gates[names[0]].wait(WAIT)
            return real(file, *names, threads=threads)

        return check

    def go(*names):
        for name in names or gates:
            gates[name].set()

    go.begun = lambda: begun.result(WAIT)
    with points.replaced(points.CHECK_TENSORS, checked):
        yield go
        go()


@pytest.mark.usefixtures("none_left")
@pytest.mark.parametrize("threads", [1, 3, 1000])
def test_all_tensors_are_fetched(tensors, tmp_path, threads):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    with door.safe_open(path, "pt") as file:
        loader = file.prefetch(threads=threads)
        assert loader.names() == file.offset_keys()
    first = loader.names()[3]
    found = {first: loader.take(first)}
    with loader:
        assert len(loader) == len(tensors)
        for name, tensor in loader:
            assert name not in found
            found[name] = tensor
        assert list(loader) == []
    assert found.keys() == tensors.keys()
    path.write_bytes(b"\0" * path.stat().st_size)  # a tensor mapped from the file would change
    for name, tensor in tensors.items():
        assert torch.equal(raw(found[name]), raw(tensor))
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)


@pytest.mark.usefixtures("none_left")
def test_rows_are_fetched(tensors, tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    plan = {"b.torch.float64": slice(1, 3), "A.torch.int8": slice(-1, None), "b.torch.bool": None}
    plan |= {"A.torch.bool": slice(2, 2), "none.torch.int8": slice(0, 0), "A.torch.float32": slice(None, np.int64(3))}
    with door.safe_open(path, "pt", backend="pread") as file, file.prefetch(plan) as loader:
        assert loader.names() == [*plan]
        found = dict(loader)
    assert found.keys() == plan.keys()
    for name, rows in plan.items():
        wanted = tensors[name] if rows is None else tensors[name][rows]
        assert torch.equal(found[name], wanted)
        assert found[name].is_contiguous()


def test_a_plan_that_does_not_fit_is_an_error(tensors, tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    file = door.safe_open(path, "pt")
    for name, rows, error, text in (
        ("x", None, SafetensorError, "does not contain tensor x"),
        ("scalar.torch.float32", slice(0, 1), IndexError, "0-dim"),
        ("b.torch.int8", slice("a", None), TypeError, "slice indices must be integers"),
    ):
        with file.prefetch({name: rows}) as loader, pytest.raises(error, match=text):
            loader.take(name)
    with file.prefetch(device="nonsense") as loader, pytest.raises(RuntimeError, match="nonsense"):
        loader.take("b.torch.int8")
    with pytest.raises(SafetensorError, match='framework="pt"'):
        door.safe_open(path, "np").prefetch()
    with pytest.raises(ValueError, match="max_workers"):
        file.prefetch(threads=0)
    with pytest.raises(TypeError, match="not a mapping"):
        file.prefetch(["b.torch.int8"])
    safetensors.torch.save_file({}, path)
    assert list(door.safe_open(path, "pt").prefetch()) == []


@pytest.mark.usefixtures("none_left")
def test_tensors_come_one_after_another(checkpoint, held):
    with door.safe_open(checkpoint / "model.safetensors", "pt") as file, file.prefetch(threads=100) as loader:
        held.begun()
        assert len(fetchers()) <= 3
        coming = iter(loader)
        for name in loader.names():
            held(name)
            assert next(coming)[0] == name
        assert list(coming) == []


@pytest.mark.usefixtures("none_left")
def test_a_tensor_is_given_once(checkpoint, held):
    with door.safe_open(checkpoint / "model.safetensors", "pt") as file:
        loader = file.prefetch()
    with loader, concurrent.futures.ThreadPoolExecutor(3) as pool:
        takers = [pool.submit(loader.take, "w") for _ in range(3)]
        held()
        assert sum(one.exception(WAIT) is None for one in takers) == 1
        assert sorted(name for name, _ in loader) == ["b", "none"]
        for name in ("w", "b", "x"):
            with pytest.raises(SafetensorError, match="not in the plan, was taken"):
                loader.take(name)


@pytest.mark.usefixtures("none_left")
def test_damage_reaches_who_asks_for_the_tensor(state, checkpoint):
    damage(checkpoint, "w")
    for threads in (1, 4):
        with door.safe_open(checkpoint / "model.safetensors", "pt") as file, file.prefetch(threads=threads) as loader:
            with pytest.raises(fastckpt.CorruptCheckpointError, match=r"w.*checksum"):
                loader.take("w")
            assert torch.equal(loader.take("b"), state["model"]["b"])
        file = door.safe_open(checkpoint / "model.safetensors", "pt")
        with file.prefetch(threads=threads) as loader, pytest.raises(fastckpt.CorruptCheckpointError, match=r"w.*sum"):
            list(loader)
        file = door.safe_open(checkpoint / "model.safetensors", "pt", verify=False)
        with file.prefetch({"w": slice(0, 2), "b": None}) as loader:
            assert len(dict(loader)) == 2


@pytest.mark.usefixtures("none_left")
def test_closing_ends_the_reads(checkpoint, held):
    """The thread ends after its current read."""
    with door.safe_open(checkpoint / "model.safetensors", "pt") as file:
        loader = file.prefetch(threads=1)
    held.begun()
    coming = iter(loader)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        last = loader._futures[loader.names()[-1]]
        closing = pool.submit(loader.close)
        with pytest.raises(concurrent.futures.CancelledError):
            last.result(WAIT)
        held()
        closing.result(WAIT)
    assert fetchers() == []
    loader.close()
    for call in (lambda: next(coming), lambda: list(loader), lambda: loader.take("w")):
        with pytest.raises(SafetensorError, match="closed"):
            call()


@pytest.mark.usefixtures("none_left")
def test_an_error_in_the_block_ends_the_reads(checkpoint):
    def fail(file):
        with file.prefetch() as loader:
            for _ in loader:
                raise ZeroDivisionError

    with door.safe_open(checkpoint / "model.safetensors", "pt") as file:
        with pytest.raises(ZeroDivisionError):
            fail(file)
        assert fetchers() == []
        loader = file.prefetch()
    concurrent.futures.wait(loader._futures.values())
    loader.close()
    with pytest.raises(SafetensorError, match="closed"):
        loader.take("w")  # it was fetched, and then released


def test_a_loader_belongs_to_its_process(checkpoint):
    with door.safe_open(checkpoint / "model.safetensors", "pt") as file, file.prefetch() as loader:
        concurrent.futures.wait(loader._futures.values())
        child = os.fork()
        if not child:
            status = 1
            try:
                loader.take("w")
            except SafetensorError:
                loader.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


def test_to_cuda_safetensors_fetches_where_it_can(checkpoint):
    """safetensors fetches after the planned tensors were verified."""
    calls = []

    class Newer:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def prefetch(self, plan, *, device, threads):
            calls.append((plan, device, threads))
            return "loader"

    with points.replaced(points.OPEN_TENSORS, lambda real: lambda *given, **more: Newer(real(*given, **more))):
        file = door.safe_open(checkpoint / "model.safetensors", "pt")
        assert file.prefetch({"w": slice(0, 2)}, device="cuda:1", threads=3) == "loader"
        assert file.prefetch(device=0) == "loader"
        door.safe_open(checkpoint / "model.safetensors", "pt", "cuda:1").prefetch()
        with file.prefetch() as loader:
            assert len(dict(loader)) == 3
        damage(checkpoint, "w")
        file = door.safe_open(checkpoint / "model.safetensors", "pt")
        file.prefetch({"b": None}, device="cuda")
        with pytest.raises(fastckpt.CorruptCheckpointError):
            file.prefetch({"w": None}, device="cuda")
    everything = dict.fromkeys(["w", "none", "b"])
    assert calls == [
        ({"w": slice(0, 2)}, "cuda:1", 3),
        (everything, 0, 8),
        (everything, "cuda:1", 8),
        ({"b": None}, "cuda", 8),
    ]


# --- programs that call safetensors -----------------------------------------------------------------------------------


def test_installed(checkpoint, tmp_path):
    """The program imported ``save_file`` before the install, and imports ``safe_open`` after it."""
    from safetensors.torch import load_file, save_file

    path = tmp_path / "m.safetensors"
    ours = type(door.safe_open(checkpoint / "model.safetensors", "pt"))
    damage(checkpoint, "w")
    with door.install(io="buffered"), door.install(verify=False):
        from safetensors import safe_open

        load_file(checkpoint / "model.safetensors")
    with door.install() as installed:
        save_file({"w": torch.ones(3)}, path)
        assert CHECKSUM in os.listxattr(path)
        for load in (load_file, safetensors.numpy.load_file):
            assert load(path)["w"].sum() == 3
        model = torch.nn.Linear(3, 2)
        safetensors.torch.save_model(model, tmp_path / "model")
        assert CHECKSUM in os.listxattr(tmp_path / "model")
        assert safetensors.torch.load_model(torch.nn.Linear(3, 2), tmp_path / "model") == (set(), [])
        for opened in (safe_open, safetensors.safe_open):
            with opened(checkpoint / "model.safetensors", framework="pt", device="cpu") as file:
                assert isinstance(file, ours)
                with pytest.raises(fastckpt.CorruptCheckpointError):
                    file.get_tensor("w")
        with pytest.raises(fastckpt.CorruptCheckpointError):
            load_file(checkpoint / "model.safetensors")
        installed.uninstall()
        load_file(checkpoint / "model.safetensors")
        save_file({"w": torch.ones(3)}, path)
        assert CHECKSUM not in os.listxattr(path)
        assert not isinstance(safe_open(path, "pt"), ours)
    with pytest.raises(ValueError, match="install: io must be one of"):
        door.install(io="fast")
    with pytest.raises(ValueError, match="save_file: io must be one of"):
        door.save_file({}, path, io="fast")


def test_transformers_saves_by_the_door(tmp_path):
    """transformers imported ``save_file`` before the install."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    with door.install():
        model.save_pretrained(tmp_path / "model")
    assert CHECKSUM in os.listxattr(tmp_path / "model" / "model.safetensors")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


#: The tests of safetensors, except those of frameworks that are not installed. REFUSALS demand that a CPU is refused.
THEIRS = ["simple", "pread_backend", "pt_comparison", "pt_model", "threadable", "multithreaded", "handle"]
REFUSALS = ["works_from_any_backend", "requires_cuda", "device_overrides_the_handle"]
PLUGIN = """
import fastckpt
from fastckpt.integrations import safetensors as door

calls = {"save": 0, "open": 0}


def count(owner, name, what):
    real = getattr(owner, name)

    def call(*given, **options):
        calls[what] += 1
        return real(*given, **options)

    setattr(owner, name, call)


count(fastckpt, "open_write", "save")
count(door, "safe_open", "open")
door.install()


def pytest_unconfigure():
    print("calls of ours:", *calls.values())
"""


@pytest.mark.slow
def test_their_own_tests_pass(tmp_path):
    """The tests come from the source distribution of the installed version."""
    version = safetensors.__version__
    wanted = [
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        "--dest",
        tmp_path,
        f"safetensors=={version}",
    ]
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *wanted], capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        needs.missing(f"needs the source of safetensors {version} from the package index: {fetched.stderr[-300:]}")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (here,) = tmp_path.glob("*/bindings/python")
    (tmp_path / "the_door.py").write_text(PLUGIN)
    environment = zygote.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    command = ["pytest", "-q", "-p", "the_door", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    command += ["-k", " and ".join(f"not {one}" for one in REFUSALS), *(f"tests/test_{one}.py" for one in THEIRS)]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 60
    saves, opens = map(int, re.search(r"calls of ours: (\d+) (\d+)", done.stdout).groups())
    assert saves >= 100
    assert opens >= 100
