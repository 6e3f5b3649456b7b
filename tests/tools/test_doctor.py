"""``fastckpt doctor`` in real environments: it names the right cause, and leaves nothing behind.

The refusals are real: seccomp filters, resource limits of an ordinary user, the kernel's setting, file systems.
"""

# ruff: noqa: PTH208, ARG005 - names as the directory has them; a lambda stands in for a function

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from harness import cli, mounts, needs, strace, zygote
from harness.draws import pairs

SETTING = Path("/proc/sys/kernel/io_uring_disabled")


def diagnosed(children, directory, **how):
    result = children.run("diagnose", directory=str(directory), **how)
    assert not isinstance(result, zygote.Raised), result.trace
    return result


def codes(result, *levels):
    return [found["code"] for found in result["findings"] if found["level"] in (levels or ("error", "warning"))]


def of(result, code):
    return next(found for found in result["findings"] if found["code"] == code)


# -- io_uring ----------------------------------------------------------------------------------------------------------


def test_where_nothing_stands_in_the_way_all_is_well(children, tmp_path):
    """This is the control: here, the findings of the tests below do not occur."""
    result = diagnosed(children, tmp_path, probe=True)
    assert result["ring"] == 0
    assert codes(result) == []
    assert (result["status"], result["engine"]) == (0, "uring")
    assert "all well" in result["verdict"]
    assert result["facts"]["io_uring"]["answer"] == "ok"
    assert result["facts"]["measured"]["save"]["engine"] == "uring"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("probe", [False, True], ids=["asked", "measured"])
@pytest.mark.parametrize("refusal", ["EPERM", "EPERM:all", "ENOSYS", "ENOSYS:all"])
def test_a_seccomp_filter_is_named(children, tmp_path, refusal, probe):
    """A filter blocks all three calls, as in containers, or one call, which needs other evidence."""
    result = diagnosed(children, tmp_path, blocked=refusal, probe=probe)
    name = refusal.partition(":")[0]
    assert result["ring"] == getattr(errno, name), "the refusal is not real"
    assert codes(result) == ["io_uring-seccomp"]
    assert (result["status"], result["engine"]) == (1, "threads")
    found = of(result, "io_uring-seccomp")
    assert name in found["text"]
    assert any("Seccomp 2" in line for line in found["evidence"])
    assert "--security-opt seccomp=" in found["remedies"]["docker"]
    assert "SCMP_ACT_ALLOW" in found["remedies"]["docker"]
    assert "seccompProfile" in found["remedies"]["kubernetes"]
    assert "io_uring" in result["why"]
    facts = result["facts"]["io_uring"]
    answers = [facts["enter"], facts["register"]]
    assert answers == [name, name] if refusal.endswith("all") else name not in answers


@pytest.mark.root
@pytest.mark.parametrize("memlock", [0, 4096])
def test_locked_memory_is_named(children, memlock):
    needs.root()
    with mounts.public_directory() as directory:
        result = diagnosed(children, directory, user=True, memlock=memlock)
    assert result["ring"] == errno.ENOMEM, "the refusal is not real"
    assert codes(result) == ["io_uring-memlock"]
    assert (result["status"], result["engine"]) == (1, "threads")
    found = of(result, "io_uring-memlock")
    assert f"soft {memlock} bytes" in " ".join(found["evidence"])
    assert "--ulimit memlock=-1" in found["remedies"]["docker"]
    assert "ulimit -l" in found["remedies"]["host"]


@pytest.mark.root
def test_little_locked_memory_is_a_note_while_a_ring_can_be_had(children):
    needs.root()
    with mounts.public_directory() as directory:
        # The zygote's directory for the live counters belongs to root.
        off = {"FASTCKPT_TOP": "0"}
        result = diagnosed(children, directory, user=True, memlock=64 << 10, env=off)
        assert (result["ring"], result["status"], result["engine"]) == (0, 0, "uring")
        assert codes(result, "note") == ["little-memlock"]
        # Root has the capability that lifts the limit.
        assert codes(diagnosed(children, directory, memlock=64 << 10), "note") == []


@contextlib.contextmanager
def setting(value, group=None):
    """Change the kernel's setting for the whole machine: for a very short time, and always restore it."""
    needs.root()
    if not SETTING.exists():
        needs.missing("needs /proc/sys/kernel/io_uring_disabled (Linux 6.6)")
    which = SETTING.with_name("io_uring_group")
    before, group_before = SETTING.read_text(), which.read_text()
    try:
        if group is not None:
            which.write_text(str(group))
        SETTING.write_text(str(value))
        yield
    finally:
        SETTING.write_text(before)
        which.write_text(group_before)


@pytest.mark.exclusive
@pytest.mark.root
@pytest.mark.parametrize(("value", "user"), [(1, True), (2, True), (2, False)])
def test_the_kernels_setting_is_named(children, value, user):
    with mounts.public_directory() as directory, setting(value):
        result = diagnosed(children, directory, user=user)
    assert result["ring"] == errno.EPERM, "the refusal is not real"
    assert codes(result) == ["io_uring-sysctl"]
    found = of(result, "io_uring-sysctl")
    assert f"kernel.io_uring_disabled={value}" in found["text"]
    assert "sysctl -w kernel.io_uring_disabled=0" in found["remedies"]["host"]
    assert ("io_uring_group" in found["remedies"]["host"]) == (value == 1)
    assert (result["status"], result["engine"]) == (1, "threads")


@pytest.mark.exclusive
@pytest.mark.root
def test_the_kernels_setting_is_not_blamed_for_those_it_lets_pass(children):
    """The value 1 still allows root and a group: for them, the filter refuses."""
    with mounts.public_directory() as directory, setting(1, group=4242):
        assert codes(diagnosed(children, directory)) == []
        assert codes(diagnosed(children, directory, user=True, groups=[4242])) == []
        assert codes(diagnosed(children, directory, blocked="EPERM")) == ["io_uring-seccomp"]
        member = diagnosed(children, directory, user=True, groups=[4242], blocked="EPERM")
        assert codes(member) == ["io_uring-seccomp"]
        assert "change both" not in of(member, "io_uring-seccomp")["text"]
        both = diagnosed(children, directory, user=True, blocked="EPERM:all")
    assert codes(both) == ["io_uring-seccomp"]
    assert "change both" in of(both, "io_uring-seccomp")["text"]


def test_a_choice_by_the_environment_is_told(children, tmp_path):
    result = diagnosed(children, tmp_path, env={"FASTCKPT_IO": "threads"}, blocked="EPERM")
    assert (result["status"], result["engine"], codes(result, "note")) == (0, "threads", ["engine-chosen"])
    result = diagnosed(children, tmp_path, env={"FASTCKPT_IO": "buffered"}, probe=True)
    assert (result["status"], result["engine"]) == (1, "buffered")
    assert codes(result) == ["engine-chosen"]


# -- users and directories ---------------------------------------------------------------------------------------------


@pytest.mark.root
def test_an_ordinary_user_in_a_directory_of_others(children, tmp_path):
    needs.root()
    with mounts.public_directory() as directory:
        well = diagnosed(children, directory, user=True, probe=True)
        assert (well["status"], well["facts"]["process"]["uid"]) == (0, 65534)
        assert well["facts"]["measured"]["save"]
        assert os.listdir(directory) == []
        directory.chmod(0o755)
        result = diagnosed(children, directory, user=True, probe=True)
        assert os.listdir(directory) == []
    assert (result["status"], codes(result, "error")) == (2, ["not-writable"])
    assert result["facts"]["measured"] is None


@pytest.mark.root
@pytest.mark.parametrize("probe", [False, True])
def test_read_only_full_and_without_inodes(children, probe):
    with mounts.mount("ext4") as point, mounts.read_only(point):
        assert codes(diagnosed(children, point, probe=probe), "error") == ["read-only"]
    for kind in ("tmpfs", "ext4"):
        with mounts.mount(kind, size=32 << 20) as point:
            with (point / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(65536)):
                    pass
            result = diagnosed(children, point, probe=probe)
            assert (result["status"], codes(result, "error")) == (2, ["no-space"])
            assert sorted(set(os.listdir(point)) - {"lost+found"}) == ["fill"]
    with mounts.mount("tmpfs", options="nr_inodes=2") as point:
        (point / "last").touch()
        result = diagnosed(children, point, probe=probe)
        assert (result["status"], codes(result, "error")) == (2, ["no-inodes"])


@pytest.mark.root
def test_an_immutable_directory(children):
    with mounts.mount("ext4") as point:
        (point / "held").mkdir()
        subprocess.run(["chattr", "+i", str(point / "held")], check=True)
        try:
            result = diagnosed(children, point / "held")
        finally:
            subprocess.run(["chattr", "-i", str(point / "held")], check=True)
    assert (result["status"], codes(result, "error")) == (2, ["not-writable"])


def test_missing_directories_and_files(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, code in (("missing", "directory-missing"), ("file", "not-a-directory")):
        found = fastckpt.tools.doctor(tmp_path / name)
        assert (found.status, [finding.code for finding in found.findings]) == (2, [code])
        assert str(tmp_path / name) in found.verdict
    assert os.listdir(tmp_path) == ["file"]


# -- file systems ------------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "worse", "notes", "bypasses"),
    [
        ("ext4", [], [], True),
        ("xfs", [], [], True),
        ("btrfs", ["direct-buffered"], [], False),
        ("tmpfs", ["memory-file-system"], [], False),
        ("ramfs", ["memory-file-system"], ["no-fallocate"], None),
        ("overlay", [], ["overlay"], None),
        ("fuse", ["fuse"], ["rename-flags", "no-locks", "no-fallocate"], True),
    ],
)
def test_every_file_system_for_what_it_is(children, kind, worse, notes, bypasses):
    size = None if kind in ("ramfs", "overlay", "fuse") else 2 << 30
    with mounts.mount(kind, size=size) as point:
        before = sorted(os.listdir(point))
        result = diagnosed(children, point, probe=True)
        assert sorted(os.listdir(point)) == before
    assert codes(result) == worse
    assert codes(result, "note") == notes
    assert result["status"] == (1 if worse else 0)
    facts = result["facts"]
    assert facts["directory"]["type"] == kind
    assert facts["directory"]["mount"] == str(point)
    io = facts["io"]
    assert io["direct_bypasses"] is bypasses
    assert result["engine"] == ("buffered" if kind == "ramfs" else "uring")
    assert (io["rename_exchange"], io["fallocate"]) == (
        ("EINVAL", "EOPNOTSUPP") if kind == "fuse" else ("ok", "EOPNOTSUPP" if kind == "ramfs" else "ok")
    )
    assert (io["reflink"] == "ok") == (kind in ("xfs", "btrfs"))
    measured = facts["measured"]
    assert measured["error"] is None
    for step in ("raw_write", "raw_read", "save", "load"):
        assert measured[step]["gigabytes_per_second"] > 0
        assert 0 < measured[step]["bytes"] <= 256 << 20
        if facts["directory"]["free_bytes"]:
            assert measured[step]["bytes"] <= facts["directory"]["free_bytes"] / 10


@pytest.mark.root
def test_what_is_advised_for_btrfs_helps(children):
    with mounts.mount("btrfs", size=2 << 30) as point:
        assert "chattr +C" in of(diagnosed(children, point), "direct-buffered")["remedies"]["any"]
        (point / "free").mkdir()
        subprocess.run(["chattr", "+C", str(point / "free")], check=True)
        result = diagnosed(children, point / "free")
    assert (codes(result), result["facts"]["io"]["direct_bypasses"]) == ([], True)


@pytest.mark.root
def test_the_engine_foretold_is_the_engine_that_runs(children):
    """Without measurements, findings rest only on the probe; a save must agree."""
    for kind in ("ext4", "ramfs"):
        for how in ({}, {"blocked": "EPERM"}):
            with mounts.mount(kind) as point:
                foretold = diagnosed(children, point, **how)
                saved = children.run("round_trips", directory=str(point), saves=1, **how)
            assert saved["reports"][0]["engine"] == foretold["engine"]


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments, prefix=(), **more):
    command = [*prefix, sys.executable, "-m", "fastckpt", "doctor", *map(str, arguments)]
    more.setdefault("env", zygote.environment())
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def test_exit_status_screen_and_json(tmp_path):
    counters = tmp_path / "counters"
    (tmp_path / "here").mkdir()
    environment = {**zygote.environment(), "FASTCKPT_TOP_DIR": str(counters)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(cwd=tmp_path / "here", env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    for topic in ("kernel", "io_uring", "engine", "directory", "direct I/O", "memory", "cores", "plain", "fastckpt"):
        assert any(line.startswith(topic) for line in done.stdout.splitlines()), topic
    assert done.stdout.splitlines()[-1].startswith("all well")
    # The command takes 3 s here, and more on a busy machine. Only its CPU time has a limit; `run` ends a hang.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert os.listdir(tmp_path / "here") == []
    assert not counters.exists(), "a command that is over leaves no counters"

    seccomp = (sys.executable, "-m", "harness.seccomp", "EPERM:all", "--")
    done = run("--no-probe", "--json", tmp_path / "here", prefix=seccomp)
    document = json.loads(done.stdout)
    assert (done.returncode, document["status"], done.stderr) == (1, 1, "")
    assert document["findings"][0]["code"] == "io_uring-seccomp"
    assert document["facts"]["measured"] is None
    done = run("--no-probe", tmp_path / "here", prefix=seccomp)
    assert done.returncode == 1
    assert "[io_uring-seccomp]" in done.stdout
    assert "SCMP_ACT_ALLOW" in done.stdout

    done = run(tmp_path / "missing", "--json")
    assert (done.returncode, json.loads(done.stdout)["findings"][0]["code"]) == (2, "directory-missing")


def test_a_bad_engine_in_the_environment_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTCKPT_IO", "fast")
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    assert "FASTCKPT_IO" in json.loads(capsys.readouterr().out)["error"]


# Runs `fastckpt` after a line of input, so that a tracer has time to attach, even if Yama allows only ancestors.
HELD = """
import ctypes, runpy, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
print("ready", flush=True)
sys.stdin.readline()
runpy.run_module("fastckpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "moment"), pairs([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ["made", "saving"])
)
def test_interrupted_it_leaves_nothing(tmp_path, number, moment):
    """The signal comes right after the directory is made, or in the middle of the saves."""
    directory = tmp_path / "here"
    directory.mkdir()
    command = [sys.executable, "-c", HELD, "doctor", str(directory)]
    # A test run in the background ignores SIGINT; restore the default of users' programs.
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    child = subprocess.Popen(
        command,
        env=zygote.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restore,  # noqa: PLW1509 - this process has no thread that holds a lock
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        # fallocate comes first after the directory is made. The second fsync is in a save, which first syncs the name
        # of the empty directory in which it begins, and then its own files.
        call, when = {"made": ("fallocate", 1), "saving": ("fsync", 2)}[moment]
        with strace.stopping(child.pid, tmp_path / "log", call, when) as stop:
            child.stdin.write(b"\n")
            child.stdin.flush()
            stop.wait()
            assert list(directory.glob(".fastckpt-doctor-*"))
            assert moment == "made" or list(directory.glob(".fastckpt-doctor-*/.round-*"))
            stop.signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == (130 if number == signal.SIGINT else -number), (out, err)
    assert os.listdir(directory) == []


def test_torch_is_not_imported(tmp_path):
    code = f"""
import sys, fastckpt
found = fastckpt.tools.doctor({str(tmp_path)!r})
assert found.facts["versions"]["numpy"], found
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60, env=zygote.environment())


def test_without_torch(tmp_path, monkeypatch):
    import importlib.metadata
    import importlib.util

    true = importlib.metadata.version

    def version(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return true(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = fastckpt.tools.doctor(tmp_path, probe=False)
    assert (found.facts["versions"]["torch"], found.facts["versions"]["torch_cuda"]) == (None, None)
    assert found.status == 0
