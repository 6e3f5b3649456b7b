"""``Manager(local, remote=...)``: two tiers, the checkpoints kept on each, and restores from both."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import keep
from harness import limits, manifest, points, zygote
from harness.tiers import at_remote, kept

#: A deadline that only a hanging test reaches.
LONG = 60.0


def state(step):
    """Three files."""
    return {"model": {f"w{index}": np.full(5000, step + index) for index in range(3)}, "step": step}


KEEP = [keep.Last(1), keep.Best(1, "loss")]
OPTIONS = {"save_options": {"files": fastckpt.Files(shard_size=40_000)}}


@pytest.fixture(params=["path", "memory"])
def remote(tmp_path, request):
    return str(tmp_path / "remote") if request.param == "path" else f"memory://{tmp_path.name}/run"


@pytest.fixture
def local(tmp_path):
    return tmp_path / "local"


def fill(local, remote, steps, **options):
    with fastckpt.Manager(local, remote=remote, **OPTIONS, **options) as manager:
        for step in steps:
            assert manager.save(step, state(step), {"loss": abs(step - 3)})
            manager.wait()
    return manager


def is_of(found, step):
    return (
        found.step == found.state["step"] == step
        and all((found.state["model"][f"w{index}"] == step + index).all() for index in range(3))
        and found.metrics == {"loss": abs(step - 3)}
    )


def shards(path):
    return sorted(Path(path).rglob("*.safetensors"))


def damage(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    # The same file may have other names, in other checkpoints.
    file.unlink()
    file.write_bytes(content)


@pytest.fixture
def quiet():
    """Turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_is_saved_here_and_copied_there(local, remote, async_save, caplog, quiet):
    caplog.set_level(logging.INFO, "fastckpt")
    manager = fill(local, remote, range(1, 7), keep=2, remote_keep=KEEP, async_save=async_save)
    assert manager.steps() == [5, 6]
    assert at_remote(manager) == [3, 6]
    for step in (3, 6):
        there = f"{remote}/step-{step:08d}"
        assert fastckpt.verify(there).ok
        assert fastckpt.load(there)["step"] == step
    assert any("step 6 is at" in one.getMessage() and "GB/s" in one.getMessage() for one in caplog.records)
    assert is_of(fastckpt.Manager(local, remote=remote).restore(), 6)


def test_a_node_with_an_empty_disk_fetches_the_newest(local, remote, quiet):
    fill(local, remote, [1, 2, 3])
    shutil.rmtree(local)
    with fastckpt.Manager(local, remote=remote, keep=1, **OPTIONS) as manager:
        found = manager.restore()
        assert is_of(found, 3)
        assert found.path == str(local / "step-00000003")
        assert manager.steps() == [3]
        assert is_of(manager.restore(step=1), 1)
        manager.save(4, state(4), {"loss": 1})
        manager.wait()
        assert manager.steps() == [4]
    assert at_remote(manager) == [1, 2, 3, 4]
    with pytest.raises(FileNotFoundError):
        manager.restore(step=9)


def test_a_reader_loads_from_the_remote_and_writes_nothing(local, remote, quiet):
    fill(local, remote, [1, 2])
    shutil.rmtree(local)
    found = fastckpt.Manager(local, remote=remote, read_only=True).restore()
    assert is_of(found, 2)
    assert found.path == f"{remote}/step-00000002"
    assert not local.exists()


@pytest.mark.parametrize("name", ["fastckpt.json", "model-00001-of-00003.safetensors"])
@pytest.mark.parametrize("how", ["garbage", "missing", "link", "directory"])
def test_whatever_became_of_a_file_here_the_remote_has_it(local, tmp_path, name, how):
    remote = tmp_path / "remote"
    fill(local, remote, [1, 2])
    file = local / "step-00000002" / name
    content = file.read_bytes()
    file.unlink()
    if how == "garbage":
        file.write_bytes(b"x" * len(content))
    elif how == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    elif how == "directory":
        file.mkdir()
    with pytest.warns(RuntimeWarning, match="fetched"):
        found = fastckpt.Manager(local, remote=remote).restore()
    assert is_of(found, 2)
    assert found.skipped == ()
    healed = name != "fastckpt.json" and how in {"garbage", "missing"}
    assert found.path == str((local if healed else remote) / "step-00000002")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_without_room_is_passed_over(local, remote, number, caplog):
    fill(local, remote, [1, 2])
    shutil.rmtree(local)

    def full(*_arguments, **_options):
        raise OSError(number, os.strerror(number), str(local / "step-00000002"))

    manager = fastckpt.Manager(local, remote=remote)
    with points.replaced(points.FETCH, lambda _: full):
        found = manager.restore()
    assert is_of(found, 2)
    assert found.path == f"{remote}/step-00000002"
    assert "loading from" in caplog.text
    # The base of the next save is not in the local tier.
    manager.save(3, state(3), {"loss": 0})
    manager.wait()
    assert at_remote(manager) == [1, 2, 3]


def test_what_is_damaged_here_comes_from_there(local, remote):
    fill(local, remote, [1, 2])
    damage(shards(local / "step-00000002")[0])
    inodes = [file.stat().st_ino for file in shards(local / "step-00000002")]
    with pytest.warns(RuntimeWarning, match=r"step-00000002 cannot be loaded and is fetched from"):
        found = fastckpt.Manager(local, remote=remote).restore()
    assert is_of(found, 2)
    assert found.skipped == ()
    assert fastckpt.verify(local / "step-00000002").ok
    now = [file.stat().st_ino for file in shards(local / "step-00000002")]
    assert [one == other for one, other in zip(inodes, now, strict=True)] == [False, True, True]
    damage(shards(local / "step-00000002")[1])
    with pytest.warns(RuntimeWarning, match="fetched"):
        assert is_of(fastckpt.Manager(local, remote=remote).restore(step=2), 2)


def test_a_checkpoint_comes_back_if_each_file_is_good_somewhere(local, tmp_path):
    remote = tmp_path / "remote"
    fill(local, remote, [1, 2])
    damage(shards(local / "step-00000002")[0])
    damage(shards(remote / "step-00000002")[1])
    with pytest.warns(RuntimeWarning, match="fetched"):
        found = fastckpt.Manager(local, remote=remote).restore()
    assert is_of(found, 2)
    assert fastckpt.verify(local / "step-00000002").ok
    # One file is damaged on both tiers: the previous step is restored.
    damage(shards(local / "step-00000002")[1])
    with pytest.warns(RuntimeWarning) as told:
        found = fastckpt.Manager(local, remote=remote).restore()
    assert is_of(found, 1)
    assert [step for step, _ in found.skipped] == [2]
    assert [str(one.message).count("is skipped") for one in told] == [0, 1]


@pytest.mark.parametrize("read_only", [True, False])
def test_what_was_saved_again_and_is_damaged_here_comes_back_as_it_is_there(local, remote, read_only):
    fill(local, remote, [1, 2])
    fastckpt.save(state(9), local / "step-00000002", files=fastckpt.Files(shard_size=40_000))
    damage(shards(local / "step-00000002")[0])
    with pytest.warns(RuntimeWarning, match="fetched"):
        found = fastckpt.Manager(local, remote=remote, read_only=read_only).restore()
    assert is_of(found, 2)
    assert found.path == f"{remote}/step-00000002"
    # The remaining files of the checkpoint stay.
    assert len(shards(local / "step-00000002")) == 3


def test_a_reader_looks_again_where_the_remote_has_removed_what_it_reads(local, remote):
    fill(local, remote, [1], remote_keep=1)

    def late(load):
        def loads(path, **how):
            if path.endswith("1"):
                fill(local, remote, [2], remote_keep=1)
            return load(path, **how)

        return loads

    with points.replaced(points.LOAD_TO_RESTORE, late):
        found = fastckpt.Manager(local / "none", remote=remote, read_only=True).restore()
    assert is_of(found, 2)
    assert found.skipped == ()


def test_a_remote_that_does_not_answer_is_left_out(local, remote, monkeypatch):
    def silent():
        raise OSError(errno.ETIMEDOUT, "no route to the store")

    fill(local, remote, [1, 2])
    manager = fastckpt.Manager(local, remote=remote)
    monkeypatch.setattr(manager._remote.place, "look", silent)
    with pytest.warns(RuntimeWarning, match=r"does not answer and is skipped: .*no route"):
        assert is_of(manager.restore(), 2)
    shutil.rmtree(local)
    # The run does not begin anew.
    with pytest.raises(OSError, match="no route"):
        manager.restore()


def test_what_cannot_be_fetched_is_skipped(local, remote):
    def silent(*_arguments, **_options):
        raise OSError(errno.ECONNRESET, "the store has hung up")

    fill(local, remote, [1, 2])
    shutil.rmtree(local / "step-00000002")
    with points.replaced(points.FETCH, lambda _: silent):
        with pytest.warns(RuntimeWarning, match="hung up"):
            found = fastckpt.Manager(local, remote=remote).restore()
        assert is_of(found, 1)
        with pytest.raises(OSError, match="hung up"):
            fastckpt.Manager(local, remote=remote).restore(step=2)


def test_nothing_anywhere_is_a_new_beginning(local, remote, quiet):
    with fastckpt.Manager(local, remote=remote) as manager:
        assert manager.restore() is None
        assert at_remote(manager) == []


class Gate:
    """A gate before which copies wait."""

    def __init__(self, copy):
        self.open = threading.Event()
        self.began = threading.Event()
        self.end = time.monotonic() + LONG
        self.real = copy

    def __call__(self, sources, target, **options):
        self.began.set()
        while not self.open.wait(0.01):
            if options["stop"]():
                raise CancelledError
            assert time.monotonic() < self.end, "the gate was not opened"
        return self.real(sources, target, **options)


@pytest.fixture
def gate():
    """A gate before all further copies to the remote tier."""
    made = []
    with points.replaced(points.DRAIN, lambda copy: made.append(Gate(copy)) or made[0]):
        yield made[0]


@pytest.mark.parametrize("async_save", [True, False])
def test_copies_begin_by_themselves(local, tmp_path, gate, async_save):
    gate.open.set()
    with fastckpt.Manager(local, remote=tmp_path / "remote", async_save=async_save) as manager:
        manager.save(1, state(1))
        assert gate.began.wait(LONG)


def test_what_waits_is_not_removed_here(local, remote, gate):
    with fastckpt.Manager(local, remote=remote, keep=1, **OPTIONS) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), {"loss": abs(step - 3)})
            manager._saves.pending.result()
            manager._after_save.wait(time.monotonic() + LONG)
        assert manager.steps() == [1, 2, 3]
        assert kept(manager)[1] == ["not yet at the remote"]
        gate.open.set()
        manager.wait()
        assert manager.steps() == [3]
        assert at_remote(manager) == [1, 2, 3]
        assert kept(manager) == {3: ["last=1"]}


def test_a_pin_holds_on_both_tiers(local, remote):
    fill(local, remote, [1, 2])
    with fastckpt.Manager(local, remote=remote, keep=1, remote_keep=1, **OPTIONS) as manager:
        manager.pin(1)
        manager.save(3, state(3))
        manager.wait()
        assert manager.steps() == at_remote(manager) == [1, 3]
        manager.unpin(1)
        manager.save(4, state(4))
        manager.wait()
        assert manager.steps() == at_remote(manager) == [4]
        with pytest.raises(FileNotFoundError):
            manager.pin(1)
    shutil.rmtree(local)
    # A checkpoint that only the remote tier has can also be pinned.
    with fastckpt.Manager(local, remote=remote, remote_keep=1, **OPTIONS) as manager:
        manager.pin(4)
        manager.save(5, state(5))
        manager.wait()
        assert at_remote(manager) == [4, 5]


def test_what_is_pinned_later_is_copied_after_all(local, remote):
    fill(local, remote, [1, 2], remote_keep=1)
    with fastckpt.Manager(local, remote=remote, remote_keep=1, **OPTIONS) as manager:
        manager.wait()
        assert at_remote(manager) == [2]
        manager.pin(1)
        manager.wait()
        assert at_remote(manager) == [1, 2]
        manager.save(3, state(3))
        manager.wait()
        assert at_remote(manager) == [1, 3]


def test_a_forced_save_replaces_the_copy(local, remote):
    with fastckpt.Manager(local, remote=remote, **OPTIONS) as manager:
        manager.save(1, state(1))
        manager.wait()
        manager.save(1, state(7), force=True)
        manager.wait()
    assert fastckpt.load(f"{remote}/step-00000001")["step"] == 7


def test_wait_and_the_blocks_end_raise_what_keeps_a_step_from_the_remote(local, remote):
    def silent(*_arguments, **_options):
        raise OSError(errno.ECONNRESET, "the store has hung up")

    def run():
        with fastckpt.Manager(local, remote=remote, **OPTIONS) as manager:
            manager.save(1, state(1))
            with pytest.raises(OSError, match="hung up"):
                manager.wait()
            manager.save(2, state(2))

    with points.replaced(points.DRAIN, lambda _: silent):
        with pytest.raises(OSError, match="hung up"):
            run()
        with pytest.raises(ZeroDivisionError), fastckpt.Manager(local, remote=remote, **OPTIONS):
            raise ZeroDivisionError
    # The next run makes the missing copies.
    with fastckpt.Manager(local, remote=remote) as manager:
        pass
    assert at_remote(manager) == [1, 2]


def test_two_managers_use_one_remote(local, remote, tmp_path):
    with (
        fastckpt.Manager(local, remote=remote, remote_keep=2, **OPTIONS) as one,
        fastckpt.Manager(tmp_path / "other", remote=remote, remote_keep=2, **OPTIONS) as other,
    ):
        for step in range(1, 7):
            manager = (one, other)[step % 2]
            manager.save(step, state(step), {"loss": abs(step - 3)})
            manager.wait()
    assert at_remote(one) == [5, 6]
    assert is_of(fastckpt.Manager(tmp_path / "third", remote=remote).restore(), 6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"remote_keep": 3}, "remote_keep= requires remote="),
        ({"remote": "local"}, "is the manager's directory"),
        ({"remote": "ftp://host/run"}, "ftp"),
        ({"remote": "remote", "remote_keep": "last=3"}, "remote_keep: 'last=3' is not a policy"),
        ({"remote": "remote", "remote_bandwidth_limit": "fast"}, "remote_bandwidth_limit"),
    ],
)
def test_arguments_are_checked(tmp_path, monkeypatch, options, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=error):
        fastckpt.Manager("local", **options)


def test_a_link_to_the_directory_is_no_second_tier(local, tmp_path):
    local.mkdir()
    (tmp_path / "link").symlink_to(local)
    with pytest.raises(ValueError, match="is the manager's directory"):
        fastckpt.Manager(local, remote=tmp_path / "link")


PREEMPTED = """
import os, signal, sys, time
import numpy as np, fastckpt
from concurrent.futures import CancelledError
from harness import points
def slowed(real):
    def copy(sources, target, **options):
        while sys.argv[2] == "slow":
            if options["stop"]():
                raise CancelledError
            time.sleep(0.001)
        if sys.argv[3] == "end":
            time.sleep(0.5)
        return real(sources, target, **options)
    return copy
points.replace(points.DRAIN, slowed)
def run(manager):
    manager.save_on_signal(signal.SIGTERM, grace="4s" if sys.argv[2] == "slow" else "60s")
    manager.save(1, {"w": np.arange(10)})
    if sys.argv[3] == "idle":
        manager.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[3] == "end":
        return
    manager.save(2, {"w": np.arange(10)})
manager = fastckpt.Manager(sys.argv[1] + "/local", remote=sys.argv[1] + "/remote")
if sys.argv[3] in ("block", "end"):
    with manager:
        run(manager)
else:
    run(manager)
"""


@pytest.mark.parametrize(
    ("speed", "how"),
    [("slow", "block"), ("slow", "plain"), ("fast", "block"), ("fast", "plain"), ("fast", "idle"), ("fast", "end")],
)
def test_a_signal_leaves_the_drain_what_is_left_of_the_grace_period(tmp_path, speed, how):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PREEMPTED), str(tmp_path), speed, how],
        env=zygote.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    manager = fastckpt.Manager(tmp_path / "local", remote=tmp_path / "remote")
    steps = [1] if how == "end" else [1, 2]
    assert manager.steps() == steps
    if speed == "fast":
        assert (tmp_path / "remote" / "latest").read_text() == f"step-0000000{steps[-1]}\n"
    else:
        assert not list((tmp_path / "remote").glob("step-*"))
    with manager:
        pass
    assert at_remote(manager) == steps


def test_a_signal_ends_a_wait_for_copies(local, tmp_path, gate):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with fastckpt.Manager(local, remote=tmp_path / "remote", **OPTIONS) as manager:
            manager.save_on_signal(signal.SIGUSR1, grace=2 * LONG)
            manager.save(1, state(1))
            assert gate.began.wait(LONG)
            manager._saves.pending.result()
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            manager.wait()
            assert manager._signals.pending
            gate.open.set()
            manager.save(2, state(2))
            assert manager.preempted == signal.SIGUSR1
        assert at_remote(manager) == [1, 2]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_server_of_s3_is_a_remote_tier(local, s3, caplog, monkeypatch, quiet):
    limits.lower(monkeypatch, "seconds before a copy is tried again", 0.01)
    remote = "s3://bucket/runs/gpt"
    fill(local, remote, [1, 2, 3], remote_keep=2)
    # The store has verified the received bytes.
    sent = {path: headers for method, path, headers in s3.requests if method == "PUT"}
    folder = manifest.own_checksum(local / "step-00000003")
    for shard in shards(local / "step-00000003"):
        assert sent[f"/bucket/runs/gpt/step-00000003/{folder}/{shard.name}"]["x-amz-checksum-crc64nvme"]
    with fastckpt.Manager(local, remote=remote, remote_keep=2, **OPTIONS) as manager:
        # From here on, the store has an outage.
        s3.refuse = lambda method, _path: "403 Forbidden" if method in {"PUT", "POST"} else None
        manager.save(4, state(4), {"loss": 1})
        with pytest.raises(PermissionError):
            manager.wait()
        assert at_remote(manager) == [2, 3]
        s3.forget()
        manager.save(5, state(5), {"loss": 2})
        manager.wait()
        assert at_remote(manager) == [4, 5]
    assert "step 4 is not at s3://bucket/runs/gpt" in caplog.text
    shutil.rmtree(local)
    assert is_of(fastckpt.Manager(local, remote=remote, read_only=True).restore(), 5)
    assert is_of(fastckpt.Manager(local, remote=remote).restore(step=4), 4)
