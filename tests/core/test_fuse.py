"""File systems in user space.

The commit protocol between two clients of a file system whose locks are local to each of them (docs/format.md, 6): one
directory behind two FUSE mounts, and two machines that differ in boot id and PID namespace. Also a daemon that buffers
writes per handle: a save syncs each handle, and raises the error of a close.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest

import fastckpt
from harness import machines, mounts, two_machines

SCENARIOS = (
    "different_names",
    "one_name",
    "emptied_meanwhile",
    "rival_meanwhile",
    "directory_meanwhile",
    "moved_meanwhile",
    "swept_before_its_lock",
    "swept_in_the_middle",
    "failing_commit",
    "stopped_but_alive",
    "stopped_between_two_renames",
    "killed_and_not_swept",
    "reader_overtaken",
    "readers_beside_a_saver",
)


@pytest.fixture(scope="module", params=[True, False], ids=["one name", "two names"])
def pair(request, tmp_path_factory):
    """Two machines, with or without a common host name, made after a mount for each: they see no later mounts."""
    logs = tmp_path_factory.mktemp("logs")
    names = ("trainer", "trainer") if request.param else ("node-a", "node-b")
    with (
        mounts.twins() as points,
        machines.machine(logs, names[0]) as one,
        machines.machine(logs, names[1]) as two,
    ):
        yield (one, points[0]), (two, points[1]), logs


@pytest.mark.root
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_clients(pair, scenario):
    *clients, logs = pair
    places = [(children, point / scenario) for children, point in clients]
    places[0][1].mkdir()
    machines.wait_until(places[1][1].is_dir)
    getattr(two_machines, scenario)(*places, logs)


# The last bytes of a file that does not end on a page go through a different handle than the others.
STATE = {"a": np.arange(3_000_001), "b": np.ones(5, np.uint8)}


@pytest.mark.root
@pytest.mark.parametrize("io", ["auto", "direct", "buffered", "threads"])
def test_each_handle_is_synced(io):
    with mounts.handle_buffers() as point:
        for _ in range(2):
            report = fastckpt.save(STATE, point / "c", io=io)
            assert fastckpt.verify(point / "c").ok
        assert all(path.startswith("buffered") == (io == "buffered") for path in report.paths)
        loaded = fastckpt.load(point / "c")
        assert all(np.array_equal(loaded[name], STATE[name]) for name in STATE)


@pytest.mark.root
@pytest.mark.parametrize("failing", [".safetensors", "fastckpt.json", "config.json"])
def test_the_error_of_a_close_is_one_of_the_save(failing):
    with mounts.handle_buffers(failing) as point:
        with pytest.raises(OSError, match=rf"sync.*{failing}") as raised:
            fastckpt.save(STATE, point / "c", files={"config.json": b"{}"})
        assert raised.value.errno == errno.EIO
        assert list(point.iterdir()) == []
