"""New tensors that do not fit into what a control group leaves: an error, and not the end of the process."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

import fastckpt
from fastckpt._api import prepare, room
from harness import needs
from harness.container import Spec, control_groups

GB = 10**9


def machine(root, *, left, swap=0):
    """A group that is limited to 10 GB and has this much left, half of it by what can be taken back."""
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
        # Small tensors may get memory that the process has had before.
        (5 * GB, 3 * GB, 0, True),
        (5 * GB, 5 * GB, 1, True),
    ],
)
def test_what_may_fit_is_told_where_it_is_near(tmp_path, caplog, nbytes, certain, swap, told):
    room.check_room("/c", nbytes, certain, root=machine(tmp_path, left=4 * GB, swap=swap))
    assert bool(caplog.records) is told
    assert all(record.levelno == logging.WARNING for record in caplog.records)


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
    """New memory of the host, and nothing else; a tie once."""
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
    assert counts(mmap=True) == (0, 0)
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
    """Mutant: nothing is compared, and the kernel kills the process."""
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
        assert loaded("{'mmap': True}") == loaded("{'keys': ['w.0', 'w.1', 'small']}") == "2\n"
        assert groups.killed == 0
