"""Internal parts: records of options, free memory, reads, casts, and internal failures of saves."""

from __future__ import annotations

import enum
import gc
import inspect
import logging
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
import typing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import _core, _foreign, dcp, distributed
from fastckpt._api import load as load_module
from fastckpt._api import outcome as _outcome
from fastckpt._api import prepare, room
from fastckpt._api import progress as _progress
from fastckpt._api.build_report import build_report
from fastckpt._api.io import bytes_per_second
from fastckpt._api.load_settings import LoadSettings
from fastckpt._api.reports import LoadReport
from fastckpt._api.save_settings import SaveSettings, WriteSettings
from fastckpt._api.settings import Settings, with_lines
from fastckpt._state.select import named
from fastckpt._tensors import cast_out, slicing
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors import torch as _torch
from fastckpt._tensors.cast import Cast
from fastckpt._tensors.memory import address_of
from fastckpt.exceptions import UnsupportedTypeError
from harness import manifest, needs
from harness.container import Spec, control_groups
from harness.same import same

RECORDS = [WriteSettings, SaveSettings, LoadSettings]
#: The public functions and their options.
DOORS = {
    "save": (fastckpt.save, SaveSettings),
    "save_async": (fastckpt.save_async, SaveSettings),
    "distributed.save": (distributed.save, SaveSettings),
    "distributed.save_async": (distributed.save_async, SaveSettings),
    "dcp.Writer": (dcp.Writer, WriteSettings),
    "load": (fastckpt.load, LoadSettings),
    "distributed.load": (distributed.load, LoadSettings),
}
ALONE = {"save", "save_async"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_type_checkers_see_the_options_of_the_record(record):
    assert record.given.__annotations__.keys() == record.options().keys()


@pytest.mark.parametrize("door", DOORS)
def test_help_shows_every_option(door):
    function, record = DOORS[door]
    parameters = inspect.signature(function).parameters
    assert not [name for name, one in parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD]
    named = function.__init__ if isinstance(function, type) else function
    hints = typing.get_type_hints(named)
    for name, one in record.options().items():
        assert parameters[name].default == one.default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert name in hints
        assert parameters[name].annotation == hints[name]
        assert f"\n    {name}: " in inspect.getdoc(function)
    assert "{options}" not in function.__doc__
    of_ranks = any(one.alike for one in record.options().values()) and door not in ALONE
    assert ("The same on all ranks." in function.__doc__) == of_ranks
    assert all(len(line) <= 120 for line in function.__doc__.splitlines())


@pytest.mark.parametrize("record", [fastckpt.IO, fastckpt.Files, fastckpt.Registry, distributed.Ranks])
def test_help_of_a_record_shows_every_option(record):
    for name in inspect.signature(record).parameters:
        assert f"\n    {name}: " in inspect.getdoc(record)


@pytest.mark.parametrize("door", DOORS)
def test_an_argument_that_there_is_not_is_an_error_with_what_there_is(door, tmp_path):
    function, _ = DOORS[door]
    loads = "load" in door
    arguments = (tmp_path / "c",) if loads or isinstance(function, type) else ({"w": torch.ones(1)}, tmp_path / "c")
    for like in ("strict", "registry") if loads else ("overwrite", "metadata"):
        name = like[:-1]
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; similar: '{like}'"):
            function(*arguments, **{name: True})
    assert not (tmp_path / "c").exists()


def test_a_record_is_checked_once_and_does_not_change():
    files, io = fastckpt.Files(shard_size="1MB", frozen="a.*"), fastckpt.IO(bandwidth_limit="2GB")
    settings = SaveSettings.of("save", {"files": files, "io": io})
    assert (settings.files.shard_size, settings.files.frozen) == (1_000_000, ("a.*",))
    assert bytes_per_second(settings.io) == 2_000_000_000
    records = {"overwrite": settings, "shard_size": files, "threads": io, "timeout": distributed.Ranks()}
    for name, record in records.items():
        with pytest.raises(AttributeError):
            setattr(record, name, 1)


@pytest.mark.parametrize("indent", ["", "        "], ids=["from Python 3.13 on", "before"])
def test_a_docstring_gets_the_options_where_it_says_so(indent):
    doc = f"Save.\n\n{indent}state: it.\n{indent}{{options}}\n\n{indent}Returns: none.\n"
    made = with_lines(doc, ["one: " + "word " * 30, "two: short."])
    assert made.splitlines()[3].startswith(f"{indent}one: word")
    assert made.splitlines()[4].startswith(f"{indent}    word")
    assert made.splitlines()[5:] == [f"{indent}two: short.", "", f"{indent}Returns: none."]


class Word(str, enum.Enum):
    BUFFERED = "buffered"
    FULL = "full"
    WARN = "warn"


def test_a_member_of_an_enum_of_texts_is_its_text():
    for io in (SaveSettings.of("save", {"io": Word.BUFFERED}).io, fastckpt.IO(Word.BUFFERED)):
        assert (type(io.engine), io.engine) == (str, "buffered")
    ranks = distributed.Ranks(replicas=Word.FULL, on_difference=Word.WARN)
    assert [type(text) for text in (ranks.replicas, ranks.on_difference)] == [str, str]
    assert (ranks.replicas, ranks.on_difference) == ("full", "warn")


def test_what_is_written_needs_no_functions_of_the_program():
    settings = SaveSettings.of(
        "save", {"registry": fastckpt.Registry(encode=list), "exclude": "a", "dtype": "half", "files": {"a": "b"}}
    )
    kept = settings.for_writing()
    assert (kept.registry, kept.dtype) == (None, None)
    assert (kept.files, kept.io) == (settings.files, settings.io)


def test_a_report_has_every_phase_in_its_order():
    core = {"phases": {"exchange": 1.0, "plan": 2.0, "read": 3.0, "another": 4.0}, "seconds": 10.0}
    figures = {"bytes": 0, "threads": 1, "engine": "uring", "fallback": None, "blocks": {}, "paths": {}, "copied": 0}
    began = time.perf_counter() - 20
    report = build_report(LoadReport, "/c", began, {**core, **figures, "shards": 0, "tensors": 0}, beside={"wait": 5.0})
    assert list(report.phases) == ["wait", "plan", "read", "exchange", "another"]
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert report.phases["plan"] == pytest.approx(report.seconds - 13)


ADDED = """
    tag: str | None = option(None, as_given, "a made-up option.", alike=True, kept=str)

    def core("""
CALLS = """
import glob, sys, torch, fastckpt, torch.distributed.checkpoint as tdcp
from fastckpt import dcp, distributed
from fastckpt._api import save_settings
from fastckpt._tools.cli import main

said, core = [], save_settings.WriteSettings.core
save_settings.WriteSettings.core = lambda self, **more: (said.append(self.tag), core(self, **more))[1]
state, path = {"w": torch.ones(3)}, sys.argv[1]
manager = fastckpt.Manager(path + "-run", save_options={"tag": "Manager"})
calls = {
    "save": lambda: fastckpt.save(state, path, tag="save"),
    "save_async": lambda: fastckpt.save_async(state, path, tag="save_async").result(),
    "distributed.save": lambda: distributed.save(state, path, tag="distributed.save"),
    "distributed.save_async": lambda: distributed.save_async(state, path, tag="distributed.save_async").result(),
    "dcp.Writer": lambda: tdcp.save(state, storage_writer=dcp.Writer(path, tag="dcp.Writer"), no_dist=True),
    "Manager": lambda: (manager.save(1, state), manager.wait()),
}
for name, call in calls.items():
    call()
    assert set(said) == {name}, (name, said)
    said.clear()
    (written,) = glob.glob(path + "-run/*[0-9]") or [path]
    kept = fastckpt.open(written).origin.options
    assert kept == {"tag": name}, (name, kept)
main(["info", path])
assert "tag: a made-up option." in fastckpt.save.__doc__
"""


def test_an_option_is_added_in_one_file(tmp_path):
    """Add an option to a copy of the package: one line for type checkers, and the option itself.

    Every save takes the option, the checkpoint records it, and ``info`` shows it.
    """
    package = tmp_path / "fastckpt"
    shutil.copytree(Path(fastckpt.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / "_api" / "save_settings.py"
    text = file.read_text(encoding="utf-8")
    text = text.replace("    overwrite: bool\n", "    overwrite: bool\n    tag: str | None\n", 1)
    file.write_text(text.replace("\n    def core(", ADDED, 1), encoding="utf-8")
    command = [sys.executable, "-W", "error::UserWarning:fastckpt", "-c", CALLS, str(tmp_path / "c")]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tag +dcp.Writer$", done.stdout, re.MULTILINE)


def test_every_record_is_tried_here():
    def below(kind):
        return {kind.__name__}.union(*(below(one) for one in kind.__subclasses__()))

    assert below(Settings) - {Settings.__name__} == {record.__name__ for record in RECORDS}


def test_a_look_at_a_target_makes_no_parents(tmp_path):
    _core.check_target(str(tmp_path / "a" / "b" / "step"), False)
    assert manifest.listing(tmp_path) == []


# --- room -------------------------------------------------------------------------------------------------------------


GB = 10**9


def machine(root, *, left, swap=0):
    """A control group with a limit of 10 GB, of which `left` bytes are free; half of these are reclaimable."""
    cached = left // 2
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/meminfo": f"MemAvailable: 99000000 kB\nSwapFree: {swap} kB\n",
        "sys/fs/cgroup/job/memory.max": f"{10 * GB}\n",
        "sys/fs/cgroup/job/memory.current": f"{10 * GB - left + cached}\n",
        "sys/fs/cgroup/job/memory.stat": (
            f"anon 7\nactive_file {cached - 20}\ninactive_file 10\nslab_reclaimable 10\nslab_unreclaimable 99\n"
        ),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_does_not_fit_is_refused(tmp_path):
    root = machine(tmp_path, left=4 * GB)
    with pytest.raises(
        MemoryError, match=r"^load: /c: .*need 5.00 GB.*limited to 10.00 GB, has 4.00 GB left.*mmap=True"
    ):
        room.check_room("/c", 5 * GB, 5 * GB, root=root)


@pytest.mark.parametrize(
    ("nbytes", "certain", "swap", "told"),
    [
        (3 * GB, 3 * GB, 0, False),
        (3_700_000_000, 3_700_000_000, 0, True),
        # Small tensors may get memory that the process already has.
        (5 * GB, 3 * GB, 0, True),
        (5 * GB, 5 * GB, 1, True),
    ],
)
def test_what_may_fit_is_told_where_it_is_near(tmp_path, caplog, nbytes, certain, swap, told):
    room.check_room("/c", nbytes, certain, root=machine(tmp_path, left=4 * GB, swap=swap))
    assert bool(caplog.records) is told
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(("ranks", "told"), [("4", True), ("3", False), ("0", False), ("four", False)])
def test_the_ranks_of_a_node_count_together(tmp_path, caplog, monkeypatch, ranks, told):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    room.check_room("/c", GB, GB, root=machine(tmp_path, left=4 * GB))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * told
    assert caplog.text.count("too little if all 4 ranks of this node load as much") == told


def test_little_and_machines_without_a_limit_are_not_looked_at(tmp_path, caplog):
    room.check_room("/c", 5 * GB, 5 * GB, root=tmp_path)
    room.check_room("/c", 10**7, 10**7, root=machine(tmp_path, left=10**6))
    assert not caplog.records


def test_version_1_counts_what_lies_below(tmp_path):
    directory = tmp_path / "sys/fs/cgroup/memory"
    directory.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")
    (directory / "memory.limit_in_bytes").write_text(f"{4 * GB}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{4 * GB}\n")
    (directory / "memory.stat").write_text(f"active_file 0\ntotal_active_file {2 * GB}\ntotal_inactive_file {GB}\n")
    room.check_room("/c", 2 * GB, 2 * GB, root=tmp_path)
    with pytest.raises(MemoryError, match=r"has 3\.00 GB left"):
        room.check_room("/c", 3 * GB + 1, 3 * GB + 1, root=tmp_path)


def test_what_a_load_counts(tmp_path, monkeypatch):
    """Only new memory of the host counts; a tie counts once."""
    counted = []
    monkeypatch.setattr(prepare, "check_room", lambda _, *counts: counted.append(counts))
    large, small = np.zeros(2 << 20, np.float32), np.zeros(10, np.float32)
    fastckpt.save({"large": large, "again": large, "small": small, "more": b"1" * 5000}, tmp_path / "c")

    def counts(**options):
        fastckpt.load(tmp_path / "c", **options)
        return counted.pop()

    assert counts() == (large.nbytes + small.nbytes + 5000, large.nbytes)
    assert counts(keys="small") == (small.nbytes, 0)
    assert counts(keys=["large", "small"], dtype={"large": "float16", "small": "float64"}) == (
        large.nbytes // 2 + 2 * small.nbytes,
        large.nbytes // 2,
    )
    assert counts(io=fastckpt.IO(mmap=True)) == (0, 0)
    assert counts(into={"large": large, "again": large, "small": small, "more": b""}) == (5000, 0)


def test_a_parameter_and_its_tensor_are_one_memory(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    counted = []
    monkeypatch.setattr(prepare, "check_room", lambda _, *counts: counted.append(counts))
    weight = torch.nn.Parameter(torch.zeros(2 << 20))
    for number, state in enumerate([{"a": weight, "b": weight.data}, {"b": weight.data, "a": weight}]):
        fastckpt.save(state, tmp_path / f"c{number}")
        fastckpt.load(tmp_path / f"c{number}")
        assert counted.pop() == (8 << 20, 8 << 20)


LOAD = """
import sys, fastckpt
try:
    print(len(fastckpt.load(sys.argv[1], **eval(sys.argv[2]))))
except MemoryError as error:
    print(error)
"""


@pytest.mark.root
def test_a_load_in_a_tight_group_is_an_error_and_no_kill(tmp_path):
    """Mutant: the load does not compare its needs with the limit, and the kernel kills the process."""
    needs.root()
    if room.text_of(room.Path("/proc/meminfo")).find("SwapFree:              0 kB") < 0:
        needs.missing("needs a machine without swap space")
    path = tmp_path / "c"
    fastckpt.save({"w": [np.zeros(32 << 20, np.uint8) for _ in range(8)], "small": np.ones(3)}, path)
    with control_groups(Spec(tmp_path, memory=192 << 20)) as groups:

        def loaded(options):
            command = [*groups.enter(), sys.executable, "-c", LOAD, str(path), options]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, (done.returncode, done.stderr)
            return done.stdout

        assert "mmap=True" in loaded("{}")
        assert loaded("{'io': fastckpt.IO(mmap=True)}") == loaded("{'keys': ['w.0', 'w.1', 'small']}") == "2\n"
        assert groups.killed == 0


# --- reads ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint with long and short rows, and its arrays."""
    wide, narrow = np.arange(40_000_000, dtype=np.uint8).reshape(100, 400_000), np.zeros((50_000, 10), np.float32)
    path = tmp_path_factory.mktemp("large") / "c"
    fastckpt.save({"wide": wide, "narrow": narrow}, path)
    return path, {"wide": wide, "narrow": narrow}


def called():
    """Bytes that this process has requested from the kernel in reads."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("nbytes", "name", "index"),
    [
        (40_000, "narrow", slice(1000, 2000)),
        (16, "narrow", (5, slice(3, 7))),
        (0, "narrow", slice(7, 7)),
        # A column of short rows is read with the bytes between its elements, a column of long rows without them.
        (49_999 * 40 + 4, "narrow", (slice(None), 3)),
        (2 * 40, "narrow", slice(None, None, 25_000)),
        (100 * 1000, "wide", (slice(None), slice(7, 1007))),
        (3 * 400_000 + 150_000, "wide", (slice(0, 4), slice(None, 150_000))),
    ],
)
def test_a_slice_is_read_in_whole_blocks_unless_it_is_not_verified(large, monkeypatch, nbytes, name, index):
    """The kernel's read counters show the blocks. Gaps of less than 256 KiB are read, too."""
    monkeypatch.setenv("FASTCKPT_IO", "buffered")
    path, arrays = large
    expected = arrays[name][index]
    itemsize = expected.itemsize
    with fastckpt.open(path) as checkpoint:
        checkpoint["narrow"], checkpoint["wide"]  # reads the headers, which later reads skip
        before = called()
        part = checkpoint.tensor(name)[index]
        verified = called() - before
        assert part.tobytes() == expected.tobytes()
        assert checkpoint.report.bytes == expected.nbytes
    offsets = np.arange(arrays[name].size).reshape(arrays[name].shape)[index].ravel() * itemsize
    reader = _core.Reader(str(path))
    numbers = {tensor.name: number for number, tensor in enumerate(reader.tensors())}
    stored, size = reader.tensors()[numbers[name]], reader.info()["block_size"]
    blocks = np.unique((stored.offset + offsets) // size) * size
    low, high = np.maximum(blocks, stored.offset), np.minimum(blocks + size, stored.offset + stored.nbytes)
    whole = int((high - low).sum())
    assert whole <= verified < whole + 1000  # reading the counters adds bytes, too
    if not expected.size:
        return
    box, strides, _ = slicing.part(arrays[name].shape, itemsize, index)
    memory = np.empty(expected.nbytes, np.uint8)
    request = _core.ReadRequest(numbers[name], address_of(memory), memory.nbytes, box, strides)
    before = called()
    reader.read([request], verify=False, io="buffered", threads=None, drain=None, tick=None)
    assert nbytes <= called() - before < nbytes + 1000
    assert memory.tobytes() == expected.tobytes()


def test_an_interrupt_ends_the_check_of_pages(tmp_path):
    path = tmp_path / "c"
    fastckpt.save({"w": torch.zeros(3 << 20)}, path)

    def stop(done, total):
        raise KeyboardInterrupt

    reader = fastckpt._core.Reader(str(path))
    with pytest.raises(KeyboardInterrupt):
        reader.check(reader.map([0]), [0], threads=None, tick=stop)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_what_cannot_be_made_is_told_before_anything_is_read(tmp_path, monkeypatch):
    path = tmp_path / "c"
    fastckpt.save({"w": torch.ones(2, dtype=torch.bfloat16)}, path)

    def read(*_, **__):
        raise AssertionError("the file was read")

    monkeypatch.setattr(fastckpt._tensors.torch, "dtype_of", lambda *_: None)
    monkeypatch.setattr(fastckpt._api.load, "ticker", read)
    with pytest.raises(UnsupportedTypeError, match="'w' has dtype bfloat16, which this version of torch"):
        fastckpt.load(path, io=fastckpt.IO(mmap=True))


def test_into_in_pieces_for_ordinary_tensors(monkeypatch, tmp_path, engine):
    """Contiguous CPU tensors take the code path for tensors on other devices."""
    path = tmp_path / "c"
    fastckpt.save({"a": torch.randn(3 << 20), "z": torch.randn(5, 3, dtype=torch.complex128)}, path, io=engine)
    monkeypatch.setattr(_torch, "_describe", _torch._describe_strided)
    into = {"a": torch.zeros(3 << 20), "z": torch.zeros(5, 3, dtype=torch.complex128)}
    loaded = fastckpt.load(path, into=into, io=engine)
    monkeypatch.undo()
    assert loaded["a"] is into["a"]
    assert same(loaded, fastckpt.load(path))


def test_names_of_deep_values_do_not_pile_up():
    """Each of 1,000 levels holds a value, and the names of all values together have 100 MB."""
    tokens: list[object] = []
    for _ in range(1000):
        tokens += [["dict", 2], "a" * 200]
    tokens += [["dict", 0], *(["n", 1] * 1000)]
    tracemalloc.start()
    try:
        longest = max(len(name) for _, name in named(tokens, []))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert longest == 1000 * 201 - 1
    assert peak < 10 << 20


def test_dtype_that_this_torch_lacks(tmp_path, monkeypatch):
    path = tmp_path / "c"
    fastckpt.save({"w": torch.ones(2, dtype=torch.float8_e5m2)}, path)
    monkeypatch.delitem(_torch.DTYPES, "float8_e5m2")
    with pytest.raises(UnsupportedTypeError, match="'w' has dtype float8_e5m2, which this version of torch"):
        fastckpt.load(path)


def test_a_cast_takes_ranges_as_they_come():
    """Ranges come in any order, with any ends, and some twice, like blocks that are read again after an error."""
    from fastckpt._tensors import memory as _memory

    chance = random.Random(0)
    given = np.random.default_rng(0).random(257)
    convert = _numpy.converter(given.dtype, np.dtype("float32"))
    data = np.zeros(given.nbytes + 1, np.uint8)[1:]
    for turn in range(200):
        made = np.full(257, 7, np.float32)
        cuts = sorted(chance.sample(range(1, given.nbytes), chance.randrange(1, 300)))
        ranges = list(zip([0, *cuts], [*cuts, given.nbytes], strict=True))
        chance.shuffle(ranges)
        taken = np.full(257, 7, np.float32)

        def take(start, address, nbytes, taken=taken):
            assert not start % 4
            assert not nbytes % 4
            taken.view(np.uint8)[start : start + nbytes] = _memory.at(address, nbytes)

        casts = [
            Cast(convert, (8, 4), _memory.address_of(made), None),
            Cast(convert, (8, 4), 0, take),
        ]
        data[:] = given.view(np.uint8)
        for start, stop in [*ranges, *ranges[:3]]:
            for cast in casts:
                cast(start, _memory.address_of(data) + start, stop - start)
        expected = given.astype(np.float32)
        assert (made == expected).all(), turn
        assert (taken == expected).all(), turn


def test_a_cast_that_torch_refuses_is_told(tmp_path, monkeypatch):
    fastckpt.save({"w": torch.ones(2)}, tmp_path / "c")
    monkeypatch.setattr(_torch, "converter", mock.Mock(side_effect=RuntimeError("no")))
    with pytest.raises(UnsupportedTypeError, match=r"'w' of dtype float32 cannot be cast to float16 \(no\): leave it"):
        fastckpt.load(tmp_path / "c", dtype="float16")


def test_a_load_that_starts_over_forgets_what_matched(tmp_path, monkeypatch):
    """The checkpoint is replaced during the load: what matched in the old one does not count in the new one."""
    fastckpt.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "c")
    read, turns = load_module._read, []

    def replaced(*arguments):
        turns.append(1)
        if len(turns) > 1:
            return read(*arguments)
        fastckpt.save({"b": torch.zeros(1)}, tmp_path / "c")
        raise fastckpt.exceptions.ReplacedCheckpointError

    monkeypatch.setattr(load_module, "_read", replaced)
    with pytest.raises(KeyError, match="keys: 'a' matches nothing"):
        fastckpt.load(tmp_path / "c", keys=["a", "b"])
    turns.clear()
    fastckpt.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(KeyError, match="rename: there is no key 'a'"):
        fastckpt.load(tmp_path / "c", rename={"a": "x", "b": "y"})


@pytest.mark.parametrize(("done", "words"), [(0, "no progress"), (500, "s left")])
def test_progress_line_says_what_is_left(caplog, monkeypatch, done, words):
    caplog.set_level(logging.INFO, "fastckpt")
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    with _progress.ticker("load", "/c", shown=False) as tick:
        tick(done, 1000)
        assert not caplog.records
        now[0] += _progress.LOG_INTERVAL
        tick(done, 1000)
        tick(done, 1000)
    assert len(caplog.records) == 1
    assert words in caplog.records[0].getMessage()


# --- saves ------------------------------------------------------------------------------------------------------------


def test_fallback_is_a_warning_once(monkeypatch, tmp_path, caplog):
    core = _core.save
    reason = "io_uring is blocked (for a test)"
    monkeypatch.setattr(_core, "save", lambda *a, **k: {**core(*a, **k), "engine": "threads", "fallback": reason})
    monkeypatch.setattr(_outcome, "_told", set())
    for _ in range(3):
        report = fastckpt.save(1, tmp_path / "c")
        assert reason in str(report)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert reason in warnings[0].getMessage()


def test_error_while_filling_stops_the_save(monkeypatch, tmp_path, engine):
    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(_memory, "copy_out", fail)
    fastckpt.save({"v": 1}, tmp_path / "c", io=engine)
    with pytest.raises(RuntimeError, match="the device is gone"):
        fastckpt.save({"w": torch.ones(3000, 1000).t()}, tmp_path / "c", io=engine)
    assert fastckpt.load(tmp_path / "c") == {"v": 1}
    assert manifest.listing(tmp_path) == ["c"]


def test_a_lazy_save_notices_a_change_of_what_it_casts(tmp_path, monkeypatch):
    """The tensor changes in place between the call of the save and the copy of the tensor."""
    value = torch.ones(1 << 20)
    copy = cast_out.CastOut.__call__

    def changed(self, start, address, nbytes):
        copy(self, start, address, nbytes)
        value.add_(1)

    monkeypatch.setattr(cast_out.CastOut, "__call__", changed)
    with pytest.raises(RuntimeError, match=r"changed in place while IO\(lazy=True\) was copying: w\."):
        fastckpt.save_async({"w": value}, tmp_path / "c", dtype="bfloat16", io=fastckpt.IO(lazy=True)).result(60)
    assert not (tmp_path / "c").exists()


def test_a_cast_takes_little_memory(tmp_path, monkeypatch):
    """No converted piece is larger than the caches."""
    asked = []
    copy = cast_out._memory.copy_out
    monkeypatch.setattr(cast_out._memory, "copy_out", lambda *given: (asked.append(given[-1]), copy(*given))[1])
    fastckpt.save({"w": torch.ones(1 << 20), "a": np.ones(1 << 20)}, tmp_path / "c", dtype="float32")
    fastckpt.save({"w": torch.ones(1 << 20), "a": np.ones(1 << 20)}, tmp_path / "c", dtype="float16")
    assert sum(asked) == 4 * (1 << 20) + 2 * 2 * (1 << 20)
    assert max(asked) <= 4 * cast_out._PIECE


def test_a_dtype_that_torch_lacks(tmp_path, monkeypatch):
    monkeypatch.delitem(_torch.DTYPES, "float8_e5m2")
    with pytest.raises(UnsupportedTypeError, match="'w' cannot be cast to float8_e5m2, which this version of torch"):
        fastckpt.save({"w": torch.ones(2)}, tmp_path / "c", dtype="float8_e5m2")
    monkeypatch.setattr(cast_out, "recast_tensor", lambda *_: torch.zeros(1).view(3))
    with pytest.raises(UnsupportedTypeError, match="'w' cannot be cast to float16 "):
        fastckpt.save({"w": torch.ones(2)}, tmp_path / "c", dtype="float16")


def test_the_core_has_the_same_table_of_other_programs_checkpoints():
    source = Path(__file__).parents[2] / "rust/fastckpt-core/src/commit/foreign.rs"
    table = source.read_text(encoding="utf-8").partition("const FORMATS")[2].partition("];\n")[0]
    rows = re.findall(r'\(\s*"([^"]+)",\s*&\[([^\]]*)\],?\s*\)', table)
    assert {who: tuple(re.findall(r'"([^"]+)"', patterns)) for who, patterns in rows} == _foreign._FORMATS


def test_debug_build_warns_once():
    code = """
import sys, types, warnings
real = __import__("fastckpt._core")._core
for name in [m for m in sys.modules if m.startswith("fastckpt")]:
    del sys.modules[name]
fake = types.ModuleType("fastckpt._core")
fake.__dict__.update({k: v for k, v in vars(real).items() if not k.startswith("__")}, DEBUG_BUILD=True, __version__="0")
sys.modules["fastckpt._core"] = fake
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fastckpt
print(len(caught), [str(w.message)[:60] for w in caught], caught[0].category.__name__ if caught else "")
"""

    def child(code):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    shown = child(code)
    assert shown.startswith("1 ")
    assert "fastckpt's compiled core is a debug build" in shown
    assert "RuntimeWarning" in shown
    assert child("import os; os.environ['FASTCKPT_ALLOW_DEBUG'] = '1'" + code).startswith("0 ")
