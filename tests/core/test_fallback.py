"""If io_uring or direct I/O is refused, everything still works, and reports show the fallback (docs/design.md).

The tests use real refusals: seccomp filters, resource limits of an ordinary user, and file systems without O_DIRECT.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import manifest, mounts, needs, strace, zygote

ENGINES = ["uring", "threads", "buffered"]
ROOT = Path(__file__).resolve().parents[2]

# The required parts of the message: the cause and the remedy.
CAUSES = {
    "EPERM": (errno.EPERM, r"(?i)io_uring.*(EPERM|not permitted)", r"(?i)seccomp"),
    "ENOSYS": (errno.ENOSYS, r"(?i)io_uring.*(ENOSYS|not implemented)", r"(?i)seccomp|kernel"),
    "memlock": (errno.ENOMEM, r"(?i)io_uring.*(ENOMEM|memory)", r"ulimit -l|RLIMIT_MEMLOCK"),
}


def outcome(children, **arguments):
    result = children.run("round_trips", **arguments)
    assert not isinstance(result, zygote.Raised), result.trace
    return result


def test_without_any_refusal_the_ring_runs(children, tmp_path):
    """If this machine always fell back, the tests below would prove nothing."""
    needs.ring()
    result = outcome(children, directory=str(tmp_path))
    assert result["ring"] == 0
    assert [report["engine"] for report in result["reports"]] == ["uring"] * 3
    assert [report["fallback"] for report in result["reports"]] == [None] * 3
    assert result["warnings"] == []


@pytest.mark.parametrize("cause", [pytest.param("memlock", marks=pytest.mark.root), "EPERM", "ENOSYS"])
def test_ring_refused(children, cause):
    number, why, remedy = CAUSES[cause]
    if cause == "memlock":
        # Root's CAP_IPC_LOCK lifts the limit, so the child becomes an ordinary user, and needs a directory to write to.
        needs.root()
        how = {"memlock": 0, "user": True}
    else:
        how = {"blocked": cause}
    with mounts.public_directory() as directory:
        result = outcome(children, directory=str(directory), **how)
        for index in (1, 2, 3):
            manifest.read(directory / f"step-{index}")
        recorded = manifest.read_manifest(directory / "step-1")["saved"]
    assert result["ring"] == number, "io_uring_setup did not fail as intended"
    assert result["user"] == (65534 if cause == "memlock" else os.getuid())
    for report in result["reports"]:
        assert report["engine"] == "threads"
        assert re.search(why, report["fallback"]), report["fallback"]
        assert re.search(remedy, report["fallback"]), report["fallback"]
    # A process warns once, not for each save, load or thread.
    assert len(result["warnings"]) == 1, result["warnings"]
    assert re.search(why, result["warnings"][0])
    assert re.search(remedy, result["warnings"][0])
    # The manifest shows the fallback to later readers, too.
    assert recorded["engine"] == "threads"
    assert re.search(why, recorded["fallback"])


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_chosen_by_hand(children, tmp_path, engine, how):
    if engine == "uring":
        needs.ring()
    arguments = {"io": engine} if how == "argument" else {"env": {"FASTCKPT_IO": engine}}
    result = outcome(children, directory=str(tmp_path), **arguments)
    assert [report["engine"] for report in result["reports"]] == [engine] * 3
    assert [report["fallback"] for report in result["reports"]] == [None] * 3
    assert result["warnings"] == []
    blocks = result["reports"][0]["blocks"]
    if engine == "buffered":
        assert blocks["buffered"] > 0
        assert blocks["zero-copy"] + blocks["staged"] == 0
    else:
        assert blocks["zero-copy"] + blocks["staged"] > 0


def test_the_engine_reported_is_the_engine_that_ran(children, tmp_path):
    """strace verifies the report: it sees io_uring_enter only with the engine uring."""
    needs.ring()
    for engine in ENGINES:
        child = children.start("save_held", path=str(tmp_path / engine), index=1, io=engine)
        child.next()
        with strace.attached(
            child.pid, tmp_path / f"{engine}.log", "io_uring_setup,io_uring_enter,pwrite64,pwritev,pwritev2"
        ) as trace:
            child.go()
            assert child.outcome()["engine"] == engine
            names = {call.name for call in trace.calls() if call.ok}
        if engine == "uring":
            assert {"io_uring_setup", "io_uring_enter"} <= names
        else:
            assert not {"io_uring_setup", "io_uring_enter"} & names
            assert {"pwrite64", "pwritev", "pwritev2"} & names


def test_argument_wins_over_environment(children, tmp_path):
    result = outcome(children, directory=str(tmp_path), io="buffered", env={"FASTCKPT_IO": "threads"}, saves=1)
    assert result["reports"][0]["engine"] == "buffered"


def test_ring_by_environment_refused_falls_back_too(children, tmp_path):
    """FASTCKPT_IO is set for a whole fleet; a node where the ring is blocked must still save."""
    result = outcome(children, directory=str(tmp_path), env={"FASTCKPT_IO": "uring"}, blocked="EPERM", saves=1)
    assert result["ring"] == errno.EPERM
    assert result["reports"][0]["engine"] == "threads"
    assert result["reports"][0]["fallback"]


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_unknown_engine_is_refused_by_name(children, tmp_path, how):
    arguments = {"io": "fast"} if how == "argument" else {"env": {"FASTCKPT_IO": "fast"}}
    raised = children.run("round_trips", directory=str(tmp_path), **arguments)
    assert isinstance(raised, zygote.Raised)
    assert "ValueError" in raised.bases, raised
    assert "fast" in raised.text
    assert "threads" in raised.text, "the message must name the choices"
    assert manifest.listing(tmp_path) == []


def test_a_refused_statx_does_not_refuse_direct(children, tmp_path):
    """Older profiles of containers refuse statx, which otherwise reports the alignment of direct I/O."""
    plain, filtered = (tmp_path / name for name in ("plain", "filtered"))
    plain.mkdir()
    filtered.mkdir()
    usual = outcome(children, directory=str(plain), io="threads")
    result = outcome(children, directory=str(filtered), io="threads", blocked="ENOSYS:statx")
    assert usual["reports"][0]["blocks"]["staged"] > 0
    assert [report["blocks"] for report in result["reports"]] == [report["blocks"] for report in usual["reports"]]


@pytest.mark.root
@pytest.mark.parametrize("engine", ENGINES)
def test_direct_refused_goes_buffered_and_counts_it(children, engine):
    """ramfs refuses O_DIRECT with EINVAL."""
    with mounts.mount("ramfs") as point:
        with pytest.raises(OSError, match=r"Invalid argument"):
            os.open(point / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        for leftover in point.iterdir():
            leftover.unlink()
        result = outcome(children, directory=str(point), io=engine)
        manifest.read(point / "step-1")
    for report in result["reports"]:
        assert report["blocks"]["zero-copy"] + report["blocks"]["staged"] == 0
        assert report["blocks"]["buffered"] > 0
        if engine != "buffered":
            assert report["fallback"], "direct I/O was refused, but the report has no fallback"
            assert re.search(r"O_DIRECT|direct", report["fallback"])
    assert len(result["warnings"]) == (0 if engine == "buffered" else 1), result["warnings"]


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "ext4", "xfs", "btrfs"])
def test_round_trip_on_every_file_system(children, kind):
    with mounts.mount(kind) as point:
        for engine in ENGINES:
            directory = point / engine
            directory.mkdir()
            result = outcome(children, directory=str(directory), io=engine)
            # Replace checkpoints as well, because the exchange of names depends on the file system, too.
            again = outcome(children, directory=str(directory), io=engine)
            assert manifest.listing(directory) == ["step-1", "step-2", "step-3"]
            manifest.read(directory / "step-3")
            for report in result["reports"] + again["reports"]:
                # tmpfs may refuse direct I/O (before Linux 6.6) or allow it; the report shows what happened.
                assert report["engine"] == engine or (report["fallback"] and report["engine"] == "buffered")
        if kind in ("ext4", "xfs"):
            assert result["warnings"] == []


def test_reader_without_ring_reads_what_the_ring_wrote(children, tmp_path):
    """Any engine reads files that another engine has written."""
    outcome(children, directory=str(tmp_path), io="uring", saves=1)
    for engine in ENGINES:
        end = children.run("load_timed", path=str(tmp_path / "step-1"), io=engine)
        assert end["kind"] == "loaded", end


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), [("EPERM", "uring"), ("ENOSYS", "uring and dtype")])
def test_suite_of_states_runs_without_io_uring(name, which):
    """Tests of states that use the ring pass in a process tree without a ring, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", which]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "harness.seccomp",
            name,
            "--",
            *command,
            str(ROOT / "tests" / "state" / "test_state.py"),
        ],
        cwd=ROOT,
        env=zygote.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > (100 if which == "uring" else 30), "the suite has lost its engines"


def test_this_process_can_have_a_ring():
    """A missing ring fails CI, and is reported elsewhere."""
    needs.ring()
