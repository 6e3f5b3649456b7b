"""Many ranks, many shards, files with leases: how processes share the limited resources of a node."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import mounts, needs, strace

MIB = 1 << 20
SHARED = "buffered: shared by the ranks of this node"


def state(nbytes: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": rng.integers(0, 256, nbytes // 4, np.uint8) for i in range(4)}


# Ranks

RANK = """
import sys
import numpy as np, fastckpt

def read_bytes():
    return int(open("/proc/self/io").read().partition("\\nread_bytes: ")[2].split()[0])

print("ready", flush=True)
sys.stdin.readline()
before = read_bytes()
loaded = fastckpt.load(sys.argv[1], io=sys.argv[2])
print(read_bytes() - before, sum(int(array.sum()) for array in loaded.values()), flush=True)
"""


def read_by_ranks(path: Path, count: int, io: str) -> tuple[list[int], set[int]]:
    """The bytes that each of ``count`` ranks reads from the device in a cold load of ``path``, and the states."""
    for file in filter(Path.is_file, path.rglob("*")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ranks = []
    for rank in range(count):
        labels = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        command = [sys.executable, "-c", RANK, str(path), io]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env={**os.environ, **labels}, **pipes))
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    told = [rank.communicate(timeout=240)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count
    return [int(moved) for moved, _ in told], {int(total) for _, total in told}


def test_ranks_that_load_one_path_read_the_storage_once(tmp_path):
    wanted = state(64 * MIB)
    total = {sum(int(array.sum()) for array in wanted.values())}
    fastckpt.save(wanted, tmp_path / "c")
    moved, found = read_by_ranks(tmp_path / "c", 1, "threads")
    assert found == total
    if moved[0] < 64 * MIB:
        needs.missing("a temporary directory on a disk, and files that can be dropped from the page cache")
    # If another process drops the page cache meanwhile, the storage is read again, but hardly in all four attempts.
    for _ in range(4):
        moved, found = read_by_ranks(tmp_path / "c", 4, "auto")
        assert found == total
        if sum(moved) <= 64 * MIB * 1.3:
            break
    assert 64 * MIB * 0.9 <= sum(moved) <= 64 * MIB * 1.3, moved


@pytest.mark.parametrize(
    ("name", "environment", "options", "shared"),
    [
        ("step-3", {"LOCAL_WORLD_SIZE": "8", "RANK": "11", "LOCAL_RANK": "3"}, {}, True),
        ("rank-4", {"LOCAL_WORLD_SIZE": "8", "RANK": "11", "LOCAL_RANK": "3"}, {}, True),
        ("step", {"LOCAL_WORLD_SIZE": "8"}, {}, True),
        # A path that names its rank is read only by that rank.
        ("rank-11", {"LOCAL_WORLD_SIZE": "8", "RANK": "11", "LOCAL_RANK": "3"}, {}, False),
        ("mp_rank_03", {"LOCAL_WORLD_SIZE": "8", "RANK": "11", "LOCAL_RANK": "3"}, {}, False),
        ("step", {"LOCAL_WORLD_SIZE": "1"}, {}, False),
        ("step", {}, {}, False),
        ("step", {"LOCAL_WORLD_SIZE": "8"}, {"io": "uring"}, False),
        ("step", {"LOCAL_WORLD_SIZE": "8"}, {"io": "threads"}, False),
    ],
)
def test_report_tells_that_ranks_share(tmp_path, caplog, monkeypatch, name, environment, options, shared):
    wanted = state(16 * MIB)
    for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    fastckpt.save(wanted, tmp_path / name)
    with (tmp_path / name / "model.safetensors").open("rb") as shard:
        os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    caplog.set_level("INFO", "fastckpt")
    loaded = fastckpt.load(tmp_path / name, **options)
    assert all(np.array_equal(loaded[key], array) for key, array in wanted.items())
    report = caplog.records[-1].args[0]
    assert (set(report.paths) == {SHARED}) == shared, report.paths
    assert (SHARED in report.paths) == shared
    if shared:
        assert (report.engine, report.fallback) == ("buffered", None)
    # Verifications must read the disk, and each rank writes its own checkpoint.
    assert SHARED not in fastckpt.verify(tmp_path / name, **options).paths
    assert SHARED not in fastckpt.save(wanted, tmp_path / name, **options).paths


@pytest.mark.parametrize(
    ("kind", "arguments", "shared", "ahead"),
    [
        ("ext4", {"keys": "w0"}, False, False),
        ("ext4", {}, True, False),
        ("fuse", {"keys": "w0"}, True, True),
        ("fuse", {}, True, True),
        ("fuse", "part", False, False),
    ],
)
def test_ranks_share_what_all_of_them_probably_read(kind, arguments, shared, ahead, monkeypatch, tmp_path):
    """Ranks may select different tensors, so only shared storage is read once for selected tensors, too. Only shared
    storage is asked to read ahead."""
    wanted = state(16 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with mounts.mount(kind, size=128 * MIB) as point:
        fastckpt.save(wanted, point / "c")
        with (point / "c" / "model.safetensors").open("rb") as shard:
            os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        reports = []
        with strace.attached(os.getpid(), tmp_path / "log", "fadvise64") as trace:
            if arguments == "part":
                with fastckpt.open(point / "c") as found:
                    part = found.tensor("w0")[: 3 * MIB]
                    reports.append(found.report)
            else:
                part = fastckpt.load(point / "c", io=fastckpt.IO(on_report=reports.append), **arguments)["w0"]
        assert np.array_equal(part, wanted["w0"][: len(part)])
    assert (SHARED in reports[-1].paths) == shared, reports[-1].paths
    assert any(call.name == "fadvise64" for call in trace.calls()) == ahead


READ = """
import os, sys
import fastckpt

os.environ["LOCAL_WORLD_SIZE"] = sys.argv[3]
sys.stdin.readline()
fastckpt.load(sys.argv[1], io=sys.argv[2])
"""


def test_the_kernel_reads_ahead_of_ranks_that_share(tmp_path):
    """Read-ahead requests each byte of a shard once, and the first 64 MiB before the first block is read."""
    with mounts.mount("fuse", size=512 * MIB) as point:
        fastckpt.save(state(200 * MIB), point / "c", files=fastckpt.Files(shard_size="100MiB"))
        command = [sys.executable, "-c", READ, str(point / "c"), "auto", "2"]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE) as child,
            strace.attached(child.pid, tmp_path / "log", "fadvise64,preadv,pread64,readv,preadv2") as trace,
        ):
            child.communicate(b"\n", timeout=60)
            calls = trace.calls()
    assert child.returncode == 0
    advised = [call for call in calls if "POSIX_FADV_WILLNEED" in call.arguments]
    for shard in {call.fd_paths()[0] for call in advised}:
        ours = [call for call in advised if call.fd_paths() == [shard]]
        place = {call: [int(word) for word in call.arguments.split(", ")[1:3]] for call in ours}
        ours.sort(key=place.__getitem__)
        # The kernel reads at most 128 KiB for one request.
        assert max(length for _, length in place.values()) == 128 << 10
        gaps = [place[b][0] - sum(place[a]) for a, b in itertools.pairwise(ours)]
        assert all(0 <= gap < 4096 for gap in gaps)
        assert sum(length for _, length in place.values()) == 100 * MIB
        alike = [call for call in calls if call.pid == ours[0].pid and call.fd_paths()[:1] == [shard]]
        reads = [call for call in alike if call.result.split()[0].isdecimal() and int(call.result.split()[0]) >= MIB]
        early = [call for call in ours if call.pid == ours[0].pid and call.start < reads[0].start]
        assert 64 * MIB < sum(place[call][1] for call in early) <= 68 * MIB
    assert len({call.fd_paths()[0] for call in advised}) == 2


def test_buffered_that_was_asked_for_is_not_called_shared(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    fastckpt.save(state(MIB), tmp_path / "c")
    caplog.set_level("INFO", "fastckpt")
    fastckpt.load(tmp_path / "c", io="buffered")
    assert set(caplog.records[-1].args[0].paths) == {"buffered: as asked"}


# Descriptors

FEW = """
import resource, sys
import numpy as np, fastckpt

path, io = sys.argv[1:]
state = {f"w{i}": np.full(5000 + i, i % 251, np.uint8) for i in range(600)}
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
for name in ("c", "c", "d"):
    fastckpt.save(state, f"{path}/{name}", files=fastckpt.Files(shard_size=4096), io=fastckpt.IO(io, threads=2))
    loaded = fastckpt.load(f"{path}/{name}", io=fastckpt.IO(io, threads=2))
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    assert fastckpt.verify(f"{path}/{name}", io=fastckpt.IO(io, threads=2)).ok
assert len(fastckpt.load(f"{path}/c", io=fastckpt.IO(io, threads=20))) == 600
"""


def test_many_shards_need_few_descriptors(tmp_path, engine):
    command = [sys.executable, "-c", FEW, str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 600


NONE = """
import json, os, resource, sys
import fastckpt

checkpoint = fastckpt.open(sys.argv[1], io="threads")
# Now all descriptors below the limit are in use.
last = os.open("/dev/null", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, last + 1))
try:
    checkpoint["64"]
except OSError as error:
    print(json.dumps([error.errno, str(error)]))
"""


def test_no_descriptor_at_all_tells_what_helps(tmp_path):
    # In a checkpoint of more than 64 shards, no shard is open before its first read.
    wanted = {str(number): np.ones(50, np.uint8) for number in range(65)}
    fastckpt.save(wanted, tmp_path / "c", files=fastckpt.Files(shard_size=1))
    command = [sys.executable, "-c", NONE, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    number, text = json.loads(done.stdout)
    assert number == errno.EMFILE
    assert "cannot open `" in text
    assert "ulimit -n" in text


# Leases

HOLDER = """
import fcntl, os, signal, sys, time

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
fd = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as error:
    sys.exit(f"no lease: {error}")
print("held", flush=True)
signal.sigwait([signal.SIGIO])
# By now, each process that opened the file has been refused or waits.
time.sleep(0.3)
print("asked", flush=True)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
"""


@pytest.mark.parametrize("file", ["fastckpt.json", "model.safetensors"])
def test_a_lease_is_waited_for(tmp_path, engine, file):
    """Samba and the kernel's NFS server hold leases, and return them when another process opens the file."""
    wanted = state(16 * MIB)
    fastckpt.save(wanted, tmp_path / "c")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "c" / file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        try:
            if holder.stdout.readline() != "held\n":
                needs.missing(f"a file system with leases ({holder.stderr.read().strip()})")
            loaded = fastckpt.load(tmp_path / "c", io=engine)
            assert holder.stdout.readline() == "asked\n"
        finally:
            holder.kill()
    assert all(np.array_equal(loaded[key], array) for key, array in wanted.items())
