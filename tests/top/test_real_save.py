"""The monitor on real saves: another program reads the core's counters while the save runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from looking import once

import fastckpt
from harness import mounts, needs

MB = 10**6

# Reports that it is ready, saves after an input line, prints the report, and exits after the next line.
TRAINER = """
import json, os, sys
import numpy as np
import fastckpt
path, size, limit, fork = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
state = {"weights": np.random.default_rng(0).integers(0, 256, size, np.uint8)}
fastckpt.save({}, path + "-first")
if fork == ["sleeper"] and os.fork() == 0:
    import time
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
fastckpt.tools.set_target("high")
io, files = fastckpt.IO(bandwidth_limit=limit or None), fastckpt.Files(shard_size=size // 3)
report = fastckpt.save(state, path, io=io, files=files, metadata={"step": 7})
told = {"engine": report.engine, "seconds": report.seconds, "bytes": report.bytes, "phases": dict(report.phases)}
print(json.dumps(told), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def trainer(place, tmp_path):
    """Starts processes that really save, and kills them at the end."""
    children = []

    def start(size, limit, *arguments, directory=place):
        environment = {**os.environ, "FASTCKPT_TOP_DIR": str(directory), "FASTCKPT_JOB": "trainer"}
        command = [sys.executable, "-c", TRAINER, str(tmp_path / "step-7"), str(size), str(limit), *arguments]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True)
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        # Forked children are killed, too: each trainer leads a process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.stdin.close()
        child.stdout.close()
        child.wait()


def tell(child):
    child.stdin.write("\n")
    child.stdin.flush()


def rank_of(tick, child):
    return next(rank for rank in tick["ranks"] if rank["pid"] == child.pid)


def wait_for(place, child, condition, seconds=60):
    deadline = time.monotonic() + seconds
    rank = None
    while time.monotonic() < deadline:
        rank = next((rank for rank in once(place)["ranks"] if rank["pid"] == child.pid), None)
        if rank is not None and condition(rank):
            return rank
    raise AssertionError(f"the expected state was not seen within {seconds} s; the last one is {rank}")


def is_writing(rank):
    """Whether the throttled save has begun: until then, the row shows the empty save before it."""
    return rank["state"] == "write" and rank["label"] == "step-7" and rank["done"] > 0


def wait_for_any(place, seconds=60):
    deadline = time.monotonic() + seconds
    while not list(place.glob("*.seg")) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_throttled_save_is_watched_from_begin_to_end(trainer, place, tmp_path):
    child = trainer(200 * MB, 40 * MB)
    command = [sys.executable, "-m", "fastckpt_top", "--dir", str(place), "--json", "--interval", "0.1"]
    saves = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as monitor:
        assert json.loads(monitor.stdout.readline())["kind"] == "header"
        tell(child)
        while not saves or saves[-1]["state"] != "done":
            tick = json.loads(monitor.stdout.readline())
            rank = rank_of(tick, child) if tick["ranks"] else {"label": ""}
            saves += [rank] if rank["label"] == "step-7" else []
        report = json.loads(child.stdout.readline())
        monitor.send_signal(signal.SIGINT)
        monitor.stdout.read()
        assert monitor.wait() == 0

    done = [rank["done"] for rank in saves]
    assert done == sorted(done)
    assert len({rank["done"] for rank in saves}) > 10
    shards = list((tmp_path / "step-7").glob("*.safetensors"))
    assert done[-1] == sum(shard.stat().st_size for shard in shards)
    assert sum(thread["bytes"] for thread in saves[-1]["threads"]) == done[-1]

    order = ["plan", "write", "fsync", "commit", "done"]
    seen = [order.index(rank["state"]) for rank in saves if rank["state"] in order]
    assert seen == sorted(seen)
    assert {"write", "done"} <= {rank["state"] for rank in saves}
    assert saves[-1]["engine"] == report["engine"]
    assert saves[-1]["step"] == 7

    middle = [rank["Bps"] for rank in saves if rank["state"] == "write" and 0.3 < rank["progress"] < 0.95]
    assert middle
    # A busy machine may be slower than the limit, and pause now and then.
    assert max(middle) > 0.8 * report["bytes"] / report["phases"]["write"]
    assert sorted(middle)[len(middle) // 2] < 40 * MB * 1.2


def test_the_history_has_the_record(trainer, place):
    child = trainer(30 * MB, 0)
    tell(child)
    report = json.loads(child.stdout.readline())
    tick = once(place)
    (proc,) = [proc for proc in tick["procs"] if f"/{child.pid}-" in proc["path"]]
    assert len(proc["history"]) == 2
    rank = rank_of(tick, child)
    assert rank["state"] == "done"
    least = report["phases"]["write"] + report["phases"]["fsync"]
    assert least - 0.001 <= rank["elapsed_s"] <= report["seconds"] + 0.001


def test_bandwidth_limit_is_kept_within_a_tenth(tmp_path):
    import numpy as np

    state = {"weights": np.zeros(100 * MB, np.uint8)}
    for io in ("uring", "threads", "buffered"):
        rates = []
        # The save is never faster than the limit, and reaches it in one of five attempts if the machine permits.
        while not rates or (max(rates) < 45 * MB and len(rates) < 5):
            report = fastckpt.save(state, tmp_path / "limited", io=fastckpt.IO(io, bandwidth_limit=50 * MB))
            rates.append(report.bytes / report.phases["write"])
        assert 45 * MB < max(rates) < 51 * MB, (io, rates)


def test_a_killed_save_is_seen_as_dead(trainer, place):
    child = trainer(200 * MB, 4 * MB)
    tell(child)
    wait_for(place, child, lambda rank: is_writing(rank) and rank["done"] > 4 * MB)
    child.kill()
    child.wait()
    rank = wait_for(place, child, lambda rank: not rank["alive"])
    assert 4 * MB < rank["done"] < 200 * MB


def test_a_stopped_save_is_stalled_and_alive(trainer, place):
    child = trainer(200 * MB, 4 * MB)
    tell(child)
    wait_for(place, child, is_writing)
    os.kill(child.pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "fastckpt_top", "--dir", str(place), "--json", "--interval", "0.5"]
    lines = subprocess.run([*command, "--duration", "6"], capture_output=True, text=True, check=True).stdout
    rank = rank_of(json.loads(lines.splitlines()[-1]), child)
    assert rank["alive"]
    assert rank["stalled_s"] > 1
    os.kill(child.pid, signal.SIGCONT)
    wait_for(place, child, lambda rank: not rank["stalled_s"])


def test_a_forked_child_does_not_keep_a_dead_parent_alive(trainer, place):
    child = trainer(200 * MB, 4 * MB, "sleeper")
    tell(child)
    wait_for(place, child, is_writing)
    child.kill()
    child.wait()
    wait_for(place, child, lambda rank: not rank["alive"])


def test_a_forked_child_that_saves_has_a_segment_of_its_own(place, tmp_path):
    code = """
import os, sys
import numpy as np
import fastckpt
state = {"a": np.arange(1000)}
fastckpt.save(state, sys.argv[1] + "/parent")
child = os.fork()
if child == 0:
    fastckpt.save(state, sys.argv[1] + "/child")
    fastckpt.save(state, sys.argv[1] + "/child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
fastckpt.save(state, sys.argv[1] + "/parent")
"""
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert len(list(place.glob("*.seg"))) == 2
    procs = once(place)["procs"]
    saved = sorted([record[-2] for record in proc["history"]] for proc in procs)
    assert saved == [["child", "child"], ["parent", "parent"]]
    assert not any(proc["alive"] for proc in procs)


STILL = """
import sys
import numpy as np
import fastckpt
with fastckpt.Manager(sys.argv[1]) as manager:
    for step in (1, 2, 3):
        model = {"w": np.full(100, min(step, 2), np.float32), "frozen": np.zeros(300, np.float32)}
        manager.save(step, {"model": model, "optim": {"m": np.full(10, step, np.float32)}})
        manager.wait()
        print(step, flush=True)
        sys.stdin.readline()
"""


def test_a_manager_publishes_what_has_changed(place, tmp_path):
    command = [sys.executable, "-c", STILL, str(tmp_path / "run")]
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        for shares in ({}, {"model": 0.25, "optimizer": 1.0}, {"model": 0.0, "optimizer": 1.0}):
            step = int(child.stdout.readline())
            newest = max(once(place)["ops"], key=lambda op: op["t_start"])
            assert (newest["step"], newest["changed"]) == (step, shares)
            child.stdin.write("\n")
            child.stdin.flush()
    assert newest["sentence"]["text"].endswith("no tensor of the model has changed since the save before")


def test_counters_can_be_turned_off(place, tmp_path):
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place), "FASTCKPT_TOP": "0"}
    code = "import fastckpt, sys; fastckpt.save({}, sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, env=environment)
    assert list(place.iterdir()) == []


def save_with_counters_in(directory, tmp_path):
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(directory)}
    code = (
        "import fastckpt, sys, numpy as np; state = {'a': np.arange(10**6)}; fastckpt.save(state, sys.argv[1]);"
        "assert (fastckpt.load(sys.argv[1])['a'] == state['a']).all()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.root
def test_a_full_file_system_costs_the_counters_and_nothing_else(tmp_path):
    needs.root()
    with mounts.mount("tmpfs", size=16 << 10) as small:
        (small / "own").mkdir(mode=0o700)
        save_with_counters_in(small / "own", tmp_path)
        assert list((small / "own").iterdir()) == []


@pytest.mark.root
def test_a_directory_on_a_mount_that_does_not_answer_is_not_even_looked_at(tmp_path):
    """Mutant: the save calls stat on the directory once, and hangs until the mount answers."""
    with mounts.mount("fuse") as point, mounts.unanswering(point):
        (tmp_path / "link").symlink_to(point)
        for place in (point, point / "own", tmp_path / "link" / "own"):
            environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place)}
            code = (
                "import fastckpt, logging, sys; logging.basicConfig(format='%(message)s');"
                "[fastckpt.save({}, sys.argv[1]) for _ in range(3)]"
            )
            command = [sys.executable, "-c", code, str(tmp_path / "c")]
            done = subprocess.run(command, env=environment, check=True, stderr=subprocess.PIPE, text=True, timeout=60)
            (line,) = done.stderr.splitlines()
            assert f"`{point}` is on a file system that may block on a server (fuse" in line
            assert "FASTCKPT_TOP_DIR" in line


@pytest.mark.parametrize("kind", ["missing parent", "open to others", "link", "file", "read-only"])
def test_a_directory_that_cannot_be_used_costs_the_counters_and_nothing_else(kind, tmp_path):
    place = tmp_path / "place"
    if kind == "missing parent":
        place = tmp_path / "no" / "place"
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "real")
    elif kind == "file":
        place.write_text("mine")
    else:
        place.mkdir(mode=0o700)
        place.chmod(0o777 if kind == "open to others" else 0o500)
    if kind == "read-only" and os.geteuid() == 0:
        # Root ignores the mode.
        with mounts.mount("tmpfs", size=1 << 20, options="mode=700") as point, mounts.read_only(point):
            save_with_counters_in(point, tmp_path)
        return
    save_with_counters_in(place, tmp_path)
    assert kind == "file" or not place.is_dir() or list(place.iterdir()) == []


@pytest.mark.root
def test_liveness_across_pid_namespaces(trainer, place):
    needs.root()
    child = trainer(200 * MB, 4 * MB)
    tell(child)
    wait_for(place, child, lambda rank: rank["done"] > 0)
    inside = ["unshare", "-pf", "--mount-proc"]
    assert rank_of(once(place, wrap=inside), child)["alive"]
    child.kill()
    child.wait()
    assert not rank_of(once(place, wrap=inside), child)["alive"]


def test_targets_reach_the_monitor(trainer, place):
    child = trainer(MB, 0)
    assert rank_of(once(place), child)["target_Bps"] == 0.75e9
    tell(child)
    child.stdout.readline()
    assert rank_of(once(place), child)["target_Bps"] == 3e9
    with pytest.raises(ValueError, match="is not a target"):
        fastckpt.tools.set_target("fast")


def test_the_environment_gives_the_target_too(place, tmp_path):
    code = "import fastckpt, sys; fastckpt.save({}, sys.argv[1]); fastckpt.load(sys.argv[1]); sys.stdin.read()"
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place), "FASTCKPT_TOP_TARGET": "medium"}
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as child:
        wait_for_any(place)
        rank = wait_for(place, child, lambda rank: rank["op"] == "load" and rank["state"] == "done")
        assert rank["target_Bps"] == 2e9
        child.stdin.close()
