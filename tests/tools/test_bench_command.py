"""``fastckpt bench DIR`` in real processes: its output, its leftovers, and its end after failures."""

# ruff: noqa: PTH208, PERF203 - names as the directory has them; loops of a few turns

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fastckpt
from harness import cli, mounts, needs, zygote
from harness.draws import pairs

SMALL = ("--ranks", "2", "--size", "4MB", "--tensors", "20", "--rounds", "1")
KEYS = {
    *("schema", "versions", "cores", "directory", "options", "ranks", "raw", "caches", "scores", "target"),
    *("how", "samples", "notes", "summary"),
}
OPERATIONS = ["raw_write", "raw_read", "save", "load", "hot"]


def command(*arguments):
    return [sys.executable, "-m", "fastckpt", "bench", *map(str, arguments)]


def environment(where, **more):
    return {**zygote.environment(), "FASTCKPT_TOP_DIR": str(where.parent / "counters"), **more}


def run(where, *arguments, prefix=(), **more):
    done = subprocess.run(
        [*prefix, *command(where, *arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(where, **more),
    )
    assert os.listdir(where) == [], "something was left"
    return done


def descendants(pid):
    """Return the processes whose ancestor is ``pid``."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def ranks_of(pid):
    """The descendants that are ranks: multiprocessing also starts a helper."""
    found = []
    for child in descendants(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"spawn_main" in words:
            found.append(child)
    return found


# -- the output --------------------------------------------------------------------------------------------------------


def test_two_ranks_as_json(where):
    done = run(where, *SMALL, "--json", "--rounds", "2", "--target", "high")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert set(document) == KEYS
    assert document["schema"] == "fastckpt/bench/1"
    assert list(document["scores"]) == list(document["samples"])
    assert sorted(document["scores"]) == sorted(OPERATIONS)
    share = 4 * 10**6 // 14 * 14
    assert document["ranks"] == [{"bytes": share, "weights": share // 7, "tensors": 20}] * 2
    for operation in OPERATIONS:
        samples = document["samples"][operation]
        assert [len(ranks) for ranks in samples] == [2, 2], operation
        assert all(one["seconds"] > 0 for ranks in samples for one in ranks)
        slowest = sorted(max(one["seconds"] for one in ranks) for ranks in samples)
        assert document["scores"][operation]["seconds"]["min"] == slowest[0]
        assert document["scores"][operation]["seconds"]["max"] == slowest[1]
    for operation in ("save", "load", "hot"):
        for one in (one for ranks in document["samples"][operation] for one in ranks):
            assert one["bytes"] == share
            assert share <= sum(one["thread_bytes"]) < 1.1 * share
            assert len(one["thread_bytes"]) <= one["threads"]
            assert one["engine"] in ("uring", "threads", "buffered")
            assert sum(one["paths"].values()) > 0
    assert all(0 <= one["bytes"] - share < 4096 for ranks in document["samples"]["raw_write"] for one in ranks)
    assert document["target"]["name"] == "high"
    assert document["target"]["gpus"] == 2
    assert document["directory"]["path"] == str(where)
    assert document["options"]["rounds"] == 2


def test_what_is_cold_is_cold_and_what_is_hot_is_hot(where):
    document = json.loads(run(where, *SMALL, "--json", "--io", "buffered").stdout)
    assert document["how"]["load"]["resident"]["max"] < 0.05
    assert document["how"]["hot"]["resident"]["min"] == 1.0
    assert "drop_caches" in document["caches"]


def test_the_screen(where):
    done = run(where, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    for row in ("raw write", "save", "raw read", "load, cold", "load, hot", "cold", "hot", "raw ", "slowest"):
        assert re.search(rf"^{row}", done.stdout, re.MULTILINE), row
    assert "2 ranks x 4.00 MB, 20 tensors each, incompressible, 1 round" in done.stdout
    assert re.search(r"^save +engine \w+, threads per rank \d+.*; blocks: \d+ \w+", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("saved 8.00 MB at ")
    assert "target light for 2 GPUs" in done.stdout.splitlines()[-1]


def test_a_workload_is_shrunk(where):
    done = run(where, "--workload", "llama3-8b", "--scale", "0.0003", "--ranks", "2", "--rounds", "1", "--json")
    document = json.loads(done.stdout)
    whole = 14 * 8_030_261_248 / 8
    assert [rank["bytes"] for rank in document["ranks"]] == [pytest.approx(whole * 0.0003, rel=1e-4)] * 2
    assert document["ranks"][0]["tensors"] == 512


def test_check_asks_for_the_target(where):
    """With ten thousand GPUs, the two ranks cannot reach the target."""
    slow = run(where, *SMALL, "--gpus", "10000", "--check")
    assert slow.returncode == 1
    assert "target light for 10000 GPUs not met" in slow.stdout
    assert run(where, *SMALL, "--gpus", "10000").returncode == 0


def test_the_engine_and_the_reason_are_told(where):
    done = run(where, *SMALL, "--json", prefix=(sys.executable, "-m", "harness.seccomp", "EPERM:all", "--"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["how"]["save"]["engines"]) == {"threads"}
    assert "io_uring" in document["how"]["save"]["fallbacks"][0]
    asked = json.loads(run(where, *SMALL, "--json", "--io", "buffered", "--threads", "1").stdout)
    assert set(asked["how"]["save"]["engines"]) == {"buffered"}
    assert asked["how"]["save"]["threads"] == [1]


def test_a_picture(where, tmp_path):
    assert run(where, *SMALL, "--plot", tmp_path / "b.svg").returncode == 0
    picture = (tmp_path / "b.svg").read_text()
    assert picture.startswith("<?xml")
    done = run(where, *SMALL, "--plot", tmp_path / "b.docx")
    assert (done.returncode, "suffix must be one of" in done.stderr) == (2, True)


def test_threads_are_counted_without_live_counters(where):
    document = json.loads(run(where, *SMALL, "--json", FASTCKPT_TOP="0").stdout)
    sample = document["samples"]["save"][0][0]
    assert sum(sample["thread_bytes"]) >= sample["bytes"] > 0
    assert document["scores"]["save"]["thread_gigabytes_per_second"]["median"] > 0


def test_on_a_file_system_in_memory(tmp_path):
    needs.root()
    with mounts.mount("tmpfs", size=400 << 20) as point:
        (point / "there").mkdir()
        done = subprocess.run(command(point / "there", *SMALL), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "no load is cold" in done.stdout


#: User 65534 with one capability, to read any file: the interpreter may be in a directory closed to that user.
CAPABILITY = "--inh-caps -all,+dac_read_search --ambient-caps +dac_read_search"
USER = f"setpriv --reuid 65534 --regid 65534 --clear-groups {CAPABILITY}"


def test_an_ordinary_user():
    """Without permission to drop the machine's caches, the command drops file by file, and reports that."""
    needs.root()
    needs.tool("setpriv", "util-linux")
    with mounts.public_directory() as directory:
        os.chown(directory, 65534, 65534)
        done = subprocess.run(
            [*USER.split(), *command(directory, *SMALL, "--json", "--io", "buffered")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=directory,
            env={**zygote.environment(), "FASTCKPT_TOP": "0"},
        )
        assert (done.returncode, done.stderr) == (0, "")
        document = json.loads(done.stdout)
        assert "posix_fadvise" in document["caches"]
        assert document["how"]["load"]["resident"]["max"] < 0.05
        assert os.listdir(directory) == []


def test_torch_is_imported_nowhere(where, tmp_path):
    """A broken torch is first on the path, even for the ranks: an import would fail."""
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text("raise SystemError('torch was imported')")
    path = os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])
    assert run(where, *SMALL, PYTHONPATH=path).returncode == 0


def test_importing_fastckpt_does_not_bring_it():
    code = "import sys, fastckpt; assert not [name for name in sys.modules if '_bench' in name]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- the monitor -------------------------------------------------------------------------------------------------------


def test_every_rank_shows_in_the_monitor_while_it_runs(where):
    counted = where.parent / "counters"
    top = [sys.executable, "-m", "fastckpt_top", "--dir", str(counted), "--json", "--interval", "0.1"]
    seen = []

    def all_seen():
        ranks = {rank["rank"] for rank in seen if rank["running"] and rank["alive"]}
        return ranks == {0, 1} and {"save", "load"} <= {rank["op"] for rank in seen}

    with subprocess.Popen(top, stdout=subprocess.PIPE, text=True) as monitor:
        bench = begun(where, *LONG, "--target", "medium")
        try:
            deadline = time.monotonic() + 120
            while not all_seen():
                assert time.monotonic() < deadline, seen[-2:]
                tick = json.loads(monitor.stdout.readline())
                if tick["kind"] == "tick" and tick["ranks"]:
                    assert tick["node"]["job"].startswith("fastckpt-bench")
                    seen += tick["ranks"]
        finally:
            monitor.kill()
            bench.send_signal(signal.SIGINT)
            bench.communicate(timeout=60)
    assert {(rank["rank"], rank["gpu"]) for rank in seen} == {(0, 0), (1, 1)}
    assert {rank["target_Bps"] for rank in seen if rank["op"] == "save"} == {1.5e9}


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "100PB"], "are free: give --size"),
        (["--size", "100"], "too few for 512 tensors: give a larger --size"),
        (["--size", "10 parsecs"], "--size must be a number of bytes"),
        (["--ranks", "0"], "--ranks must be from 1"),
        (["--rounds", "0"], "--rounds must be from 1"),
        (["--gpus", "0"], "--gpus must be from 1"),
        (["--tensors", "0"], "--tensors must be from 1"),
        (["--target", "best"], "give light, medium, high, a rate per GPU"),
        (["--target", "0"], "is not a target"),
        (["--io", "fast"], "--io: invalid choice: 'fast'"),
        (["--threads", "257"], "threads must be None or an int from 1 to 256, not 257"),
        (["--workload", "llama4"], "--workload must be one of llama3-8b"),
        (["--workload", "llama3-8b", "--ranks", "9"], "has 8 processes"),
        (["--workload", "llama3-8b", "--size", "1GB"], "give --size or --workload, not both"),
        (["--workload", "llama3-8b", "--scale", "2"], "--scale must be more than 0 and at most 1"),
        (["--scale", "0.5"], "without one, give --size"),
        (["--params", "1B", "--duration", "3d"], "unrecognized arguments: --params 1B --duration 3d"),
        (["--simulate"], "unrecognized arguments: --simulate"),
    ],
)
def test_what_cannot_be_measured_is_refused(where, capsys, arguments, message):
    assert cli.main(["bench", str(where), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert os.listdir(where) == []


def test_a_directory_that_is_none(where, capsys):
    assert cli.main(["bench", str(where / "missing")]) == 2
    assert "give one that exists" in capsys.readouterr().err
    (where / "file").touch()
    assert cli.main(["bench", str(where / "file"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["type"] == "NotADirectoryError"


def test_a_small_file_system_is_refused_before_anything_is_written(tmp_path, capsys):
    needs.root()
    with mounts.mount("tmpfs", size=400 << 20) as point:
        assert cli.main(["bench", str(point), "--size", "8GB"]) == 2
        err = capsys.readouterr().err
        assert re.search(r"need 8\.\d+ GB there, where .* are free: give --size \d+MB or less", err), err
        assert os.listdir(point) == []


# -- ends --------------------------------------------------------------------------------------------------------------


def begun(where, *arguments):
    """A run in the middle of its saves, in a process group of its own."""
    bench = subprocess.Popen(
        command(where, *arguments),
        env=environment(where),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 60
    while not list(where.glob(".fastckpt-bench-*/rank-*/*step-*")):
        assert bench.poll() is None, bench.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return bench


LONG = ("--ranks", "2", "--size", "40MB", "--rounds", "1000")


def gone(pids):
    """Wait until all processes have ended; return those that have not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if not left:
            return []
        time.sleep(0.02)
    return left


@pytest.mark.parametrize(("number", "to"), pairs([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ["process", "group"]))
def test_interrupted_it_leaves_nothing(where, number, to):
    """Ctrl-C and a closed terminal also reach the ranks; a scheduler's SIGTERM reaches one process or all."""
    whole = to == "group"
    bench = begun(where, *LONG)
    try:
        children = descendants(bench.pid)
        assert len(ranks_of(bench.pid)) == 2
        (os.killpg if whole else os.kill)(bench.pid, number)
        out, err = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert out == ""
    assert "Traceback" not in err
    # If the signal goes to the group, the ranks may die first, and then their death ends the run.
    allowed = {130 if number == signal.SIGINT else -number} | ({2} if whole and number != signal.SIGINT else set())
    assert bench.returncode in allowed, err
    assert os.listdir(where) == []
    assert gone(children) == []


def test_a_dead_rank_ends_the_run(where):
    bench = begun(where, *LONG)
    try:
        children = descendants(bench.pid)
        victim = ranks_of(bench.pid)[0]
        os.kill(victim, signal.SIGKILL)
        out, err = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert (bench.returncode, out) == (2, "")
    # A rank that is killed between two rounds is waiting for the next round.
    while_what = r"while (waiting|[\w ]+ in round \d+)"
    assert re.search(rf"bench \S+: rank \d \(process {victim}\) was ended by SIGKILL {while_what}", err), err
    assert "short of memory" in err
    assert os.listdir(where) == []
    assert gone(children) == []


def test_a_rank_that_fails_ends_the_run(tmp_path):
    """The file of another program fills the disk during the run."""
    needs.root()
    with mounts.mount("tmpfs", size=400 << 20) as point:
        (point / "there").mkdir()
        bench = begun_in(point / "there", *LONG)
        try:
            # The file grows repeatedly, because space that the ranks free after a round must not serve the next round.
            # Between two writes, the ranks wait for all disks of the machine, which may take minutes.
            with (point / "other").open("wb", buffering=0) as other:
                while bench.poll() is None:
                    try:
                        other.write(b"x" * (1 << 20))
                    except OSError:
                        time.sleep(0.001)
            _, err = bench.communicate()
        finally:
            bench.kill()
        assert bench.returncode == 2
        assert re.search(r"rank \d: (save|raw write) in round \d+: OSError: .*[Nn]o space left", err), err
        assert os.listdir(point / "there") == []


def begun_in(where, *arguments):
    (where.parent / "counters").mkdir(mode=0o700, exist_ok=True)
    return begun(where, *arguments)


# -- the raw device ----------------------------------------------------------------------------------------------------


def test_the_raw_figure_is_fios(tmp_path):
    """On an idle machine, both figures agree within 10 % in rounds of a gigabyte (benchmarks/raw.py). Here, in small
    rounds beside other tests, both only have to measure the same device."""
    needs.tool("fio", "fio")
    script = Path(__file__).parents[2] / "benchmarks" / "raw.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path, "--size", "128MiB", "--rounds", "3", "--within", "9"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=zygote.environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^write: ours [\d.]+ GB/s, fio [\d.]+ GB/s, ratio", done.stdout, re.MULTILINE)


# -- simulations from measurements -------------------------------------------------------------------------------------


def test_a_simulation_takes_what_was_measured(where, tmp_path, capsys):
    result = tmp_path / "node.json"
    result.write_text(run(where, *SMALL, "--json").stdout)
    scores = json.loads(result.read_text())["scores"]
    job = ["--params", "405B", "--gpus", "16384", "--tp", "8", "--pp", "16", "--restart", "5min"]
    assert cli.main(["plan", "--simulate", "--from", str(result), *job, "--runs", "10", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = fastckpt.tools.plan(
        params="405B",
        gpus=16384,
        tp=8,
        pp=16,
        restart="5min",
        node_write=1e9 * scores["save"]["gigabytes_per_second"]["median"],
        node_read=1e9 * scores["load"]["gigabytes_per_second"]["median"],
    )
    assert document["cost"] == pytest.approx(plan.stall)
    assert document["restart"] == pytest.approx(plan.restart + plan.restore_seconds)


def test_a_simulation_refuses_what_is_no_measurement(where, tmp_path, capsys):
    for content in ("{", "[]", '{"scores": {}}'):
        (tmp_path / "x.json").write_text(content)
        assert (
            cli.main(["plan", "--simulate", "--from", str(tmp_path / "x.json"), "--params", "1B", "--gpus", "8"]) == 2
        )
        assert "is not a result of 'fastckpt bench DIR --json'" in capsys.readouterr().err
    more = ["--params", "1B", "--gpus", "8", "--node-write", "4GB/s"]
    assert cli.main(["plan", "--simulate", "--from", str(tmp_path / "x.json"), *more]) == 2
    assert "leave out --node-write" in capsys.readouterr().err
    assert cli.main(["plan", "--simulate", "--from", str(tmp_path / "none.json"), "--params", "1B", "--gpus", "8"]) == 2
    assert "none.json" in capsys.readouterr().err
