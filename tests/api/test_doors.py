"""Every way to save writes the same bytes, gives the same reports and errors, and leaves nothing behind.

These tests use only the public API, so that the code behind it may change.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import fastckpt
from fastckpt import dcp, distributed
from harness.machines import wait_until
from harness.same import same


def by_torch(state, path, **options):
    writer = dcp.Writer(path, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            torch_dcp.save(state, storage_writer=writer, no_dist=True)
        except torch_dcp.CheckpointException as error:
            # The error has one failure for each rank.
            raise error.failures[0][0] from None
    return writer.report


DOORS = {
    "save": fastckpt.save,
    "save_async": lambda state, path, **options: fastckpt.save_async(state, path, **options).result(),
    "distributed.save": distributed.save,
    "distributed.save_async": lambda state, path, **options: distributed.save_async(state, path, **options).result(),
    "dcp.Writer": by_torch,
}
OF_STATES = {*DOORS} - {"dcp.Writer"}
IN_BACKGROUND = {"save_async", "distributed.save_async"}
OF_RANKS = {"distributed.save", "distributed.save_async", "dcp.Writer"}


def state():
    generator = torch.Generator().manual_seed(3)
    model = {f"layer.{number}": torch.randn(300, 70, generator=generator) for number in range(4)}
    return {"model": model, "optimizer": {"step": 7, "moments": [torch.ones(5), torch.zeros(3, 2)]}}


def shards(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*.safetensors"))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("doors") / "c"
    fastckpt.save(state(), path, metadata={"step": 7}, files=fastckpt.Files(shard_size="200KB"))
    return shards(path)


@pytest.mark.parametrize("door", DOORS)
def test_the_same_bytes_and_a_report_that_adds_up(tmp_path, expected, door):
    heard = []
    how = {"files": fastckpt.Files(shard_size="200KB"), "io": fastckpt.IO(threads=1, on_report=heard.append)}
    report = DOORS[door](state(), tmp_path / "c", metadata={"step": 7}, **how)
    assert len(expected) > 2
    assert shards(tmp_path / "c") == expected
    order = ["wait", "stage"] * (door in IN_BACKGROUND) + ["plan", "write", "fsync", "commit"]
    assert list(report.phases) == order
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert (report.step, report.shards, report.warnings) == (7, len(expected), ())
    assert report.bytes == sum(tensor.nbytes for tensor in (*state()["model"].values(), torch.ones(5), torch.zeros(6)))
    assert (report.staged > 0) == (door in IN_BACKGROUND)
    # A save in the background calls it after the result is available.
    wait_until(lambda: heard)
    assert heard == [report]


@pytest.mark.parametrize("door", DOORS)
def test_a_function_that_fails_on_the_report_costs_no_checkpoint(tmp_path, door, caplog):
    def fail(_):
        raise ValueError("no room for reports")

    io = fastckpt.IO(on_report=fail)
    if door in IN_BACKGROUND:
        DOORS[door](state(), tmp_path / "c", io=io)
        wait_until(lambda: "no room for reports" in caplog.text)
    else:
        with pytest.raises(ValueError, match="no room for reports"):
            DOORS[door](state(), tmp_path / "c", io=io)
    assert same(fastckpt.load(tmp_path / "c"), state())


#: A wrong argument, the saves that take it, and the error. A record of options checks its own fields.
WRONG = {
    "overwrite": ({"overwrite": False}, {*DOORS}, FileExistsError, "overwrite=False"),
    "files": ({"files": {"a/b": ""}}, {*DOORS}, ValueError, "files: 'a/b' is not a plain file name"),
    "files that are none": ({"files": "config.json"}, {*DOORS}, TypeError, "files must be a dict"),
    "model_key": ({"files": fastckpt.Files(model_key="weights")}, {*DOORS}, ValueError, "model_key"),
    "io": (
        {"io": "fast"},
        {*DOORS},
        ValueError,
        "io must be one of auto, uring, threads, direct, buffered, not 'fast'",
    ),
    "io that is none": ({"io": 2}, {*DOORS}, TypeError, "io must be the name of an engine or a fastckpt.IO, not 2"),
    "registry that is none": (
        {"registry": state},
        {*DOORS},
        TypeError,
        "registry must be a fastckpt.Registry, not <function",
    ),
    "base": ({"base": "s3://bucket/c"}, OF_STATES, ValueError, "base"),
    "frozen of nothing": (
        {"files": fastckpt.Files(frozen="nothing.*")},
        {*DOORS},
        KeyError,
        "frozen: 'nothing.\\*' matches nothing",
    ),
    "exclude": ({"exclude": 1}, OF_STATES, TypeError, "exclude must be a pattern"),
    "exclude of nothing": ({"exclude": "nothing.*"}, OF_STATES, KeyError, "exclude: 'nothing.\\*' matches nothing"),
    "dtype": ({"dtype": "int8"}, OF_STATES, ValueError, "dtype"),
    "metadata": (
        {"metadata": {"w": torch.ones(1)}},
        {*DOORS},
        fastckpt.exceptions.UnsupportedTypeError,
        "metadata cannot hold",
    ),
    "an unknown one": ({"speed": 1}, {*DOORS}, TypeError, "unexpected keyword argument 'speed'$"),
    "one of IO": (
        {"threads": 1},
        {*DOORS},
        TypeError,
        r"unexpected keyword argument 'threads': it is an option of io=fastckpt\.IO\(threads=\.\.\.\)$",
    ),
    "one of Files": (
        {"shard_size": "1GB"},
        {*DOORS},
        TypeError,
        r"unexpected keyword argument 'shard_size': it is an option of files=fastckpt\.Files\(shard_size=\.\.\.\)$",
    ),
    "one of Registry": (
        {"encode": repr},
        {*DOORS},
        TypeError,
        r"unexpected keyword argument 'encode': it is an option of registry=fastckpt\.Registry\(encode=\.\.\.\)$",
    ),
    "one of Ranks": (
        {"timeout": 3},
        OF_RANKS,
        TypeError,
        r"argument 'timeout': it is an option of ranks=fastckpt\.distributed\.Ranks\(timeout=\.\.\.\)$",
    ),
    "one of Ranks, of one process": (
        {"timeout": 3},
        {*DOORS} - OF_RANKS,
        TypeError,
        r"argument 'timeout': it is an option of fastckpt\.distributed\.Ranks, not of this call$",
    ),
    "what Hugging Face calls it": (
        {"max_shard_size": "1GB"},
        {*DOORS},
        TypeError,
        r"argument 'max_shard_size': it is files=fastckpt\.Files\(shard_size=\.\.\.\) here$",
    ),
    "ranks that are none": (
        {"ranks": "alone"},
        OF_RANKS,
        TypeError,
        "ranks must be a process group of torch.* 'alone'",
    ),
}


@pytest.mark.parametrize(
    ("door", "wrong"), [(door, name) for name, (_, doors, *_) in WRONG.items() for door in DOORS if door in doors]
)
def test_what_is_wrong_is_refused_alike_and_leaves_and_keeps_nothing(tmp_path, door, wrong):
    options, _, kind, message = WRONG[wrong]
    path = tmp_path / "c"
    if wrong == "overwrite":
        fastckpt.save({"w": torch.ones(1)}, path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    mine = state()
    alive = weakref.ref(mine["model"]["layer.0"])
    gc.disable()
    try:
        with pytest.raises(kind, match=message) as raised:
            DOORS[door](mine, path, **options)
        assert door.split(".")[0] in str(raised.value) or "save" in str(raised.value)
        del raised, mine
        # The thread may not have ended yet. Torch's exceptions are referenced by their own frames, and stay alive.
        wait_until(lambda: alive() is None or door == "dcp.Writer")
    finally:
        gc.enable()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    # The next save works.
    DOORS[door](state(), path)


#: For each record of options: wrong arguments, and the error that each raises.
REFUSED = {
    fastckpt.IO: [
        ({"engine": "fast"}, ValueError, "engine must be one of auto, uring, threads, direct, buffered, not 'fast'"),
        ({"threads": 0}, ValueError, "threads must be None or an int from 1 to 256, not 0"),
        ({"bandwidth_limit": -1}, ValueError, "bandwidth_limit must be a number of bytes from 1 to"),
        ({"pin": -1}, ValueError, "pin must be True, False"),
        ({"max_in_flight": 0}, ValueError, "max_in_flight must be an int, at least 1, not 0"),
        ({"nice": 20}, ValueError, "nice must be None or an int from 0 to 19, not 20"),
        ({"on_report": 1}, TypeError, "on_report must be a function, not 1"),
    ],
    fastckpt.Files: [
        ({"beside": "config.json"}, TypeError, "files beside the shards must be a dict of names and contents, not str"),
        ({"beside": {"a/b": ""}}, ValueError, "files: 'a/b' is not a plain file name"),
        ({"beside": {"a": 1}}, TypeError, "files: the content of 'a' must be"),
        ({"shard_size": "much"}, ValueError, "shard_size must be a number of bytes from 1 to"),
        ({"frozen": 1}, TypeError, "frozen must be a pattern"),
        ({"frozen": ["a", 1]}, TypeError, "frozen: a pattern must be a string, not 1"),
    ],
    fastckpt.Registry: [
        ({"encode": "repr"}, TypeError, "encode must be a function, not 'repr'"),
        ({"undeclared": "hide"}, ValueError, "undeclared must be one of error, plain, not 'hide'"),
    ],
    distributed.Ranks: [
        ({"timeout": 0}, ValueError, "timeout must be above 0 and at most 100,000,000 seconds, not 0"),
        ({"timeout": "60"}, TypeError, "timeout must be a number of seconds, not str"),
        ({"replicas": "some"}, ValueError, "replicas must be one of sample, full, first, not 'some'"),
        ({"on_difference": "hide"}, ValueError, "on_difference must be one of raise, warn, not 'hide'"),
    ],
}


@pytest.mark.parametrize(
    ("record", "options", "kind", "message"),
    [
        pytest.param(record, *row, id=f"{record.__name__}-{'-'.join(row[0])}")
        for record, rows in REFUSED.items()
        for row in rows
    ],
)
def test_a_record_refuses_what_is_wrong_when_it_is_made(record, options, kind, message):
    with pytest.raises(kind, match=f"^{record.__name__}: {message}"):
        record(**options)


@pytest.mark.parametrize("door", sorted(OF_STATES))
def test_patterns_may_come_one_by_one(tmp_path, door):
    files = fastckpt.Files(frozen=iter(["model.*"]))
    DOORS[door](state(), tmp_path / "c", exclude=(text for text in ["optimizer"]), files=files)
    assert list(fastckpt.load(tmp_path / "c")) == ["model"]
    assert fastckpt.open(tmp_path / "c").origin.options == {"exclude": "optimizer", "frozen": "model.*"}


@pytest.mark.parametrize("door", sorted(IN_BACKGROUND))
def test_a_save_in_the_background_lets_go_of_functions_of_the_program(tmp_path, door):
    def default(value):
        return list(value)

    save = fastckpt.save_async if door == "save_async" else distributed.save_async
    alive = weakref.ref(default)
    registry = fastckpt.Registry(encode=default)
    pending = save(state(), tmp_path / "c", registry=registry, io=fastckpt.IO(bandwidth_limit="500KB"))
    del registry
    del default
    assert alive() is None
    pending.result()


@pytest.mark.parametrize("door", DOORS)
def test_a_save_keeps_nothing_of_the_state(tmp_path, door):
    mine = state()
    alive = [weakref.ref(tensor) for tensor in mine["model"].values()]
    gc.disable()
    try:
        DOORS[door](mine, tmp_path / "c")
        del mine
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()


def by_manager(state, path, *, async_save):
    with fastckpt.Manager(path, ranks="alone", async_save=async_save) as manager:
        manager.save(1, state)


@pytest.mark.filterwarnings("default:fastckpt. .*which this program does not declare:RuntimeWarning")
@pytest.mark.parametrize("door", [*DOORS, "Manager, at once", "Manager"])
def test_a_warning_points_at_the_line_of_the_program(tmp_path, door, monkeypatch):
    # Each type is reported once per process.
    undeclared = dataclasses.make_dataclass(re.sub(r"\W", "_", f"Undeclared {door}"), ["a"], frozen=True)
    monkeypatch.setattr(undeclared, "__module__", "__main__")
    ways = {
        **DOORS,
        "Manager": lambda state, path: by_manager(state, path, async_save=True),
        "Manager, at once": lambda state, path: by_manager(state, path, async_save=False),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ways[door]({"w": torch.ones(3), "config": undeclared(1)}, tmp_path / "c")
    told = [one for one in caught if undeclared.__name__ in str(one.message)]
    assert [one.filename for one in told] == [__file__]


def test_a_switch_of_io_is_a_truth_value():
    io = fastckpt.IO(verify=0, mmap=1, lazy="", progress=None)
    assert (io.verify, io.mmap, io.lazy, io.progress) == (False, True, False, False)


def test_files_do_not_change_with_the_dict_that_they_were_made_of(tmp_path):
    beside = {"a.json": "{}"}
    files = fastckpt.Files(beside)
    beside["../b"] = 1
    fastckpt.save(state(), tmp_path / "c", files=files)
    assert (tmp_path / "c" / "a.json").read_text() == "{}"


def test_what_stands_beside_is_read_after_all_other_options_are_checked(tmp_path):
    with pytest.raises(TypeError, match="exclude must be a pattern"):
        fastckpt.save(state(), tmp_path / "c", files={"a": tmp_path / "missing"}, exclude=5)


def test_verifications_and_copies_give_their_reports(tmp_path):
    fastckpt.save(state(), tmp_path / "c")
    heard = []
    io = fastckpt.IO(on_report=heard.append)
    reports = [fastckpt.verify(tmp_path / "c", io=io), fastckpt.copy(tmp_path / "c", tmp_path / "d", io=io)]
    assert heard == reports


def test_an_open_checkpoint_is_verified_unless_that_is_turned_off(tmp_path):
    fastckpt.save({"w": np.zeros(100)}, tmp_path / "c")
    shard = tmp_path / "c" / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with fastckpt.open(tmp_path / "c") as checkpoint, pytest.raises(fastckpt.CorruptCheckpointError):
        checkpoint["w"]
    with fastckpt.open(tmp_path / "c", io=fastckpt.IO(verify=False)) as checkpoint:
        assert checkpoint["w"][-1]
