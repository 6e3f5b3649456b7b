"""A path that exists is a whole checkpoint: order, kills, faults, rival savers and leftovers (docs/format.md, 6).

Tests name the mutants of the commit that they must detect.
"""

# ruff: noqa: PTH115, PTH118, PTH208 - names as the kernel has them; a rival may fail at any time

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import manifest, mounts, needs, points, strace, zygote
from harness.draws import one_in
from harness.states import numbered, same, which

ENGINES = ["uring", "threads", "buffered"]
SEED = int(os.environ.get("FASTCKPT_TEST_SEED", "20260101"))
SMALL = 1 << 18
# Several shards make a mixture of old and new shards possible, which must never exist.
SHARDS = {"nbytes": 3 << 20, "shard_size": 1 << 20}
FILES = fastckpt.Files(shard_size=SHARDS["shard_size"])
# With a tensor outside the model, a save makes the inner directory, too.
GROUPS = {**SHARDS, "constant": SMALL}
RENAMES = ("rename", "renameat", "renameat2")
SYNCS = ("fsync", "fdatasync")


@pytest.fixture
def parent(tmp_path):
    """The parent directory of the checkpoint, with nothing else in it; traces are elsewhere."""
    directory = tmp_path / "parent"
    directory.mkdir()
    return directory


def whole(path, nbytes):
    """The index of the state at a path, read by fastckpt and by the independent reader."""
    index = which(fastckpt.load(path, io="threads"), nbytes)
    report = fastckpt.verify(path)
    assert report.ok, str(report)
    return index


# --- order ---------------------------------------------------------------------------------------------------------


TRACED = (
    "open,openat,openat2,creat,mkdir,mkdirat,link,linkat,unlink,unlinkat,rmdir,rename,renameat,renameat2,"
    "write,writev,pwrite64,pwritev,pwritev2,fallocate,ftruncate,fchmod,fchmodat,chmod,"
    "fsync,fdatasync,sync_file_range"
)


def traced_save(children, path, log, *, index, inject=(), **options):
    child = children.start("save_held", path=str(path), index=index, **options)
    assert child.next() == "ready"
    with strace.attached(child.pid, log, TRACED, *inject) as trace:
        child.go()
        end = child.outcome()
        return end, trace.calls()


def check_order(calls, path, *, exchanged, files=()):
    parent, name = str(path.parent), path.name
    work = re.compile(rf"{re.escape(parent)}/\.{re.escape(name)}\.tmp-[^/]+")
    # The commit is the rename whose target is the final name.
    commits = [call for call in calls if call.name in RENAMES and call.ok and call.paths()[1:] == [str(path)]]
    assert len(commits) == 1, "the final name must appear by one rename"
    commit = commits[0]
    temporary = commit.paths()[0]
    assert work.fullmatch(temporary), temporary
    # Without the flag, a directory can replace only an empty directory.
    assert ("RENAME_EXCHANGE" in commit.arguments) == exchanged

    def synced(target):
        return [call for call in calls if call.name in SYNCS and call.ok and call.fd_paths() == [target]]

    shards = {f"{temporary}/{file.relative_to(path)}" for file in path.rglob("*.safetensors")}
    assert len(shards) >= 2
    shard_syncs = []
    for shard in shards:
        assert synced(shard), f"the shard was never synced: {shard}"
        shard_syncs.append(synced(shard)[-1])
        # Nothing may touch a shard between its sync and the commit. An open ring cannot hide a write, because the file
        # is closed or idle.
        later = [
            call
            for call in calls
            if call.start > shard_syncs[-1].start
            and shard in (*call.fd_paths(), *call.paths())
            and call.name not in SYNCS
        ]
        assert not [call for call in later if call.start < commit.start], later
    target = f"{temporary}/{manifest.NAME}"
    touches = [call for call in calls if target in (*call.fd_paths(), *call.paths(), call.opened())]
    # The manifest is written last: it is created empty, for its lock, and nothing is written to it before every shard
    # is durable.
    writes = [call for call in touches if "write" in call.name]
    assert min(call.start for call in writes) > max(call.end for call in shard_syncs)
    manifest_sync = synced(target)[-1]
    assert any(call.name == "fsync" for call in synced(target)), "a file that has grown needs fsync, not fdatasync"
    assert max(call.end for call in writes) < manifest_sync.start
    for file in ("model.safetensors.index.json", *files):
        assert synced(f"{temporary}/{file}")[-1].end < commit.start
    directory_sync = next(call for call in synced(temporary) if call.start > manifest_sync.end)
    # The names in the inner directory become durable before the name of that directory.
    assert any("/training/" in shard for shard in shards)
    assert any(
        max(call.end for call in shard_syncs) < call.end < directory_sync.start
        for call in synced(f"{temporary}/training")
    )
    made = [call for call in calls if call.name.startswith("open") and call.opened().startswith(f"{temporary}/")]
    assert all(
        call.end < directory_sync.start for call in made if call.start < commit.start and "O_CREAT" in call.arguments
    )
    assert directory_sync.end < commit.start
    parent_syncs = [call for call in synced(parent) if call.start > commit.end]
    assert parent_syncs, "the rename itself was never made durable"
    removals = [
        call for call in calls if call.name in ("unlink", "unlinkat", "rmdir") and call.ok and call.start > commit.start
    ]
    if exchanged:
        assert removals
        assert min(call.start for call in removals) > parent_syncs[0].end, (
            "the old checkpoint is removed only after the new one is durable"
        )
    # Nothing under the final name is ever opened for writing.
    for call in calls:
        if call.name.startswith("open") and re.search(r"O_WRONLY|O_RDWR", call.arguments):
            assert not call.opened().startswith(f"{path}/"), call


@pytest.mark.parametrize("engine", ENGINES)
def test_order_of_a_first_save_and_of_an_overwrite(children, parent, tmp_path, engine):
    """Mutants: no sync of a shard, the manifest or a directory; manifest first; remove before rename."""
    path = parent / "step"
    end, calls = traced_save(children, path, tmp_path / "first.log", index=1, io=engine, **GROUPS)
    assert not isinstance(end, zygote.Raised), end
    assert end["engine"] == engine
    check_order(calls, path, exchanged=False)
    files = {"config.json": "{}"}
    end, calls = traced_save(children, path, tmp_path / "second.log", index=2, io=engine, files=files, **GROUPS)
    assert not isinstance(end, zygote.Raised), end
    check_order(calls, path, exchanged=True, files=files)
    state = fastckpt.load(path)
    assert not state.pop("constant").any()
    assert which(state, SHARDS["nbytes"]) == 2
    assert fastckpt.verify(path).ok
    assert manifest.listing(parent) == ["step"]


def test_parents_that_a_save_makes_are_durable_with_it(children, parent, tmp_path):
    """Mutants: no sync of a new directory's parent; a sync of the lowest only; no sync of an empty one's name."""
    path = parent / "a" / "b" / "step"
    end, calls = traced_save(children, path, tmp_path / "log", index=1, **GROUPS)
    assert not isinstance(end, zygote.Raised), end
    check_order(calls, path, exchanged=False)
    commit = next(call for call in calls if call.name in RENAMES and call.ok and call.paths()[1:] == [str(path)])
    for made in (parent / "a", parent / "a" / "b"):
        making = [call for call in calls if call.name.startswith("mkdir") and call.ok and call.paths() == [str(made)]]
        assert len(making) == 1, made
        synced = [
            call
            for call in calls
            if call.name in SYNCS
            and call.ok
            and call.fd_paths() == [str(made.parent)]
            and making[0].end < call.start
            and call.end < commit.start
        ]
        assert synced, f"{made} may not survive a power cut"
    # A killed save may have made the empty directory in which this save begins.
    first = next(call.start for call in calls if call.name.startswith("mkdir") and call.paths() == [str(parent / "a")])
    above = [call for call in calls if call.name in SYNCS and call.ok and call.fd_paths() == [str(parent.parent)]]
    assert [call.end < first for call in above] == [True]


def test_the_name_of_a_directory_that_holds_something_is_not_synced_again(children, parent, tmp_path):
    """Mutant: each save syncs the directory above its parent."""
    (parent / "config.json").touch()
    end, calls = traced_save(children, parent / "step", tmp_path / "log", index=1, **GROUPS)
    assert not isinstance(end, zygote.Raised), end
    assert not [call for call in calls if call.name in SYNCS and call.fd_paths() == [str(parent.parent)]]


@pytest.mark.root
def test_a_directory_above_that_cannot_be_read_hinders_no_save(children):
    """Mutant: a failure to open the directory above is an error."""
    needs.root()
    with mounts.public_directory() as closed:
        run = closed / "run"
        run.mkdir()
        run.chmod(0o777)
        closed.chmod(0o711)
        child = children.start("write_file", path=str(run / "file"), fill=1, nbytes=5, user=True)
        child.next()
        child.go()
        end = child.outcome()
        assert not isinstance(end, zygote.Raised), end


def test_parents_that_others_make_at_the_same_time(children, parent):
    """Mutant: a directory that another process has just made is an error."""
    for turn in range(10):
        savers = [
            children.start("save_held", path=str(parent / f"{turn}" / "a" / "b" / str(rank)), index=rank, nbytes=SMALL)
            for rank in range(4)
        ]
        for saver in savers:
            assert saver.next() == "ready"
        for saver in savers:
            saver.go()
        for rank, saver in enumerate(savers):
            end = saver.outcome()
            assert not isinstance(end, zygote.Raised), end
            assert whole(parent / f"{turn}" / "a" / "b" / str(rank), SMALL) == rank


@pytest.mark.parametrize(("call", "nth"), [("mkdirat", 1), ("fsync", 1), ("fsync", 2)])
def test_parent_that_cannot_be_made_or_synced(children, parent, tmp_path, call, nth):
    """Mutants: a failed sync of a new directory's parent is ignored, or that of the directory above it."""
    path = parent / "a" / "step"
    child = children.start("save_held", path=str(path), index=1, nbytes=SMALL, env={"FASTCKPT_TOP": "0"})
    child.next()
    with strace.attached(child.pid, tmp_path / "log", call, strace.injection(call, "error=EIO", nth)):
        child.go()
        end = child.outcome()
    assert isinstance(end, zygote.Raised)
    assert (end.kind, end.errno) == ("OSError", errno.EIO)
    assert end.filename == str(parent / "a")
    assert manifest.listing(parent) == (["a"] if nth == 2 else []), "a failed save may leave empty parents"
    assert not path.exists()


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_a_workspace_that_another_machine_sweeps_as_it_is_made_is_made_again(children, parent, tmp_path, error):
    """Mutant: only if the directory exists does a save try another name for its workspace."""
    child = children.start("save_held", path=str(parent / "step"), index=1, nbytes=SMALL, env={"FASTCKPT_TOP": "0"})
    child.next()
    fault = strace.injection("mkdirat", f"error={errno.errorcode[error]}", 1)
    with strace.attached(child.pid, tmp_path / "log", "mkdirat", fault) as trace:
        child.go()
        end = child.outcome()
        assert not isinstance(end, zygote.Raised), end
        assert [call.injected for call in trace.calls()] == [True, False]
    assert whole(parent / "step", SMALL) == 1
    assert manifest.listing(parent) == ["step"]


# --- kills ---------------------------------------------------------------------------------------------------------


FIRST_KILLS, OVERWRITE_KILLS = 20, 26  # with each of three engines: 138 in total


def kill_in_save(child, log, seconds):
    """Kill a child ``seconds`` after the start of its save, or with None before its commit."""
    if seconds is None:
        with strace.stopping(child.pid, log, "renameat2") as stop:
            child.go()
            stop.wait()
            child.signal(signal.SIGKILL)
        child.wait()
        return
    child.go()
    assert child.next()[0] == "begin"
    time.sleep(seconds)
    child.kill()


@pytest.mark.parametrize("engine", ENGINES)
def test_kill_during_a_first_save(children, parent, tmp_path, engine):
    """Mutants: the final name exists too early; a leftover is never swept; a lock outlives its holder."""
    dice = random.Random(f"{SEED} first {engine}")
    path = parent / "step"
    seconds = 0.02
    absent = 0
    for trial in range(FIRST_KILLS):
        child = children.start("save_loop", hold=True, path=str(path), first=trial, count=1, io=engine, **SHARDS)
        kill_in_save(child, tmp_path / "log", dice.uniform(0, 1.5 * seconds) if trial else None)
        done = ["done", trial] in child.drain()
        if path.exists():
            assert whole(path, SHARDS["nbytes"]) == trial
        else:
            assert not done, "the save was acknowledged, but is gone"
            absent += 1
            with pytest.raises(FileNotFoundError):
                fastckpt.load(path)
        began = time.monotonic()
        fastckpt.save(numbered(trial + 1000, SHARDS["nbytes"]), path, io=engine, files=FILES)
        seconds = time.monotonic() - began
        assert manifest.listing(parent) == ["step"]
        if trial == 0:
            manifest.read(path)
        shutil.rmtree(path)
        assert trial or absent, "the first save was killed before the commit"


@pytest.mark.parametrize("engine", ENGINES)
def test_kill_during_an_overwrite(children, parent, tmp_path, engine):
    """Mutants: remove before rename; files exchanged one by one; a lost config.json."""
    dice = random.Random(f"{SEED} overwrite {engine}")
    path = parent / "step"
    fastckpt.save(numbered(0, SHARDS["nbytes"]), path, io=engine)
    (path / "config.json").write_text('{"kept": true}')
    began = time.monotonic()
    fastckpt.save(numbered(0, SHARDS["nbytes"]), path, io=engine, files=FILES)
    seconds = time.monotonic() - began
    acknowledged, survived = 0, {"old": 0, "new": 0}
    for trial in range(OVERWRITE_KILLS):
        child = children.start("save_loop", hold=True, path=str(path), first=acknowledged + 1, io=engine, **SHARDS)
        kill_in_save(child, tmp_path / "log", dice.uniform(0, 3 * seconds) if trial else None)
        done = [index for kind, index in child.drain() if kind == "done"]
        acknowledged = max([acknowledged, *done])
        index = whole(path, SHARDS["nbytes"])
        # The path has the acknowledged state, or the next state, which was being written.
        assert index in (acknowledged, acknowledged + 1), (index, acknowledged)
        survived["old" if index == acknowledged else "new"] += 1
        acknowledged = index
        assert (path / "config.json").read_text() == '{"kept": true}'
        if trial % 2:
            # Every second time, the next saver is the next child, which finds the leftovers of two kills.
            acknowledged += 1
            fastckpt.save(numbered(acknowledged, SHARDS["nbytes"]), path, io=engine, files=FILES)
            assert manifest.listing(parent) == ["step"]
        assert trial or survived == {"old": 1, "new": 0}, "the first save was killed before the commit"
    manifest.read(path)


KILL_POINTS = [
    "openat",
    "openat2",
    "mkdirat",
    "mkdir",
    "fallocate",
    "ftruncate",
    "fdatasync",
    "fsync",
    "renameat2",
    "unlinkat",
    "unlink",
    "rmdir",
    "pwrite64",
    "pwritev2",
    "io_uring_enter",
    "flock",
    "fchmod",
    "close",
]


def kill_at(children, path, log, call, when, index, **options):
    """Kill a save as a thread enters its ``when``-th ``call``; return whether it was killed."""
    child = children.start("save_held", path=str(path), index=index, nbytes=SMALL, **options)
    child.next()
    with strace.attached(child.pid, log, call, strace.injection(call, "signal=SIGKILL", when)):
        child.go()
        try:
            end = child.outcome()
        except zygote.DiedError:
            return True
    assert not isinstance(end, zygote.Raised), end
    return False


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_kill_at_every_system_call(children, parent, tmp_path, engine):
    """Kills between any two calls, which random times miss: for each k, or every second k, until a save survives."""
    path = parent / "step"
    options = {"io": engine, "threads": 1, "shard_size": SMALL // 2}
    index = 0
    fastckpt.save(numbered(index, SMALL), path, io=engine)
    kills = {}
    for call in KILL_POINTS:
        for when in itertools.count(1, one_in(2)):
            index += 1
            killed = kill_at(children, path, tmp_path / "kill.log", call, when, index, **options)
            found = whole(path, SMALL)
            assert found in ((index - 1, index) if killed else (index,)), (call, when, found, index)
            index = found
            if not killed:
                # This save survived, so it must have swept the leftovers of the killed saves.
                assert manifest.listing(parent) == ["step"], (call, when)
                break
            kills[call] = kills.get(call, 0) + 1
            assert when < 120, f"{call} is called without end"
    assert {"openat", "fsync", "fdatasync", "renameat2"} <= kills.keys(), kills
    assert {"unlink", "unlinkat"} & kills.keys(), kills
    print(f"{engine}: kills at system calls: {sum(kills.values())}: {kills}")
    # Now kill first saves, which have no old checkpoint.
    path = parent / "fresh"
    first_kills = 0
    for call in ("openat", "fdatasync", "fsync", "renameat2"):
        for when in itertools.count(1, one_in(2)):
            killed = kill_at(children, path, tmp_path / "kill.log", call, when, when, **options)
            assert path.exists() or killed
            if path.exists():
                assert whole(path, SMALL) == when
                shutil.rmtree(path)
            if not killed:
                break
            first_kills += 1
        assert manifest.listing(parent) == ["step"]
    print(f"{engine}: and {first_kills} of first saves")


def test_kill_during_a_removal_at_every_system_call(children, parent, tmp_path):
    """A checkpoint at the name is whole, with its ``files=``; the next save sweeps one that has lost its name."""
    path = parent / "step"
    more = {"config.json": b"{}", "tokenizer.json": b"{}"}
    kills, named = {}, set()
    for call in ("openat", "renameat", "renameat2", "fsync", "unlink", "unlinkat"):
        for when in itertools.count(1):
            fastckpt.save(numbered(1, SMALL), path, files=more)
            assert manifest.listing(parent) == ["step"], (call, when)
            child = children.start("remove_held", path=str(path), files=[*more])
            child.next()
            with strace.attached(
                child.pid, tmp_path / "kill.log", call, strace.injection(call, "signal=SIGKILL", when)
            ):
                child.go()
                try:
                    child.outcome()
                except zygote.DiedError:
                    pass
                else:
                    assert not path.exists()
                    break
            if path.exists():
                named.add(call)
                assert {name: (path / name).read_bytes() for name in more} == more, (call, when)
                assert which(fastckpt.load(path), SMALL) == 1
            kills[call] = when
    assert sum(kills.values()) > 5, kills
    assert {"renameat", "renameat2"} & named, named
    assert "unlinkat" in kills.keys() - named, (kills, named)


def test_kill_with_a_base_at_every_system_call(children, parent, tmp_path):
    """Mutants: a link has its final name too early; a write goes through a link; a removal empties files."""
    path, other = parent / "step", parent / "other"
    constant = {"constant": np.zeros(SMALL, dtype=np.uint8)}
    fastckpt.save(numbered(0, SMALL) | constant, path)
    fastckpt.save(numbered(0, SMALL) | constant, other, base=path)
    linked = other / "training" / "training.safetensors"

    def found_at(place):
        state = fastckpt.load(place, io="threads")
        assert fastckpt.verify(place).ok
        assert same(state.pop("constant"), constant["constant"])
        return which(state, SMALL)

    # Each checkpoint is the base of the one that replaces it.
    options = {"io": "threads", "threads": 1, "base": str(path), "constant": SMALL}
    index, kills = 0, {}
    for call in ("linkat", "renameat", "renameat2", "fsync", "unlinkat", "openat"):
        for when in itertools.count(1, one_in(2)):
            index += 1
            killed = kill_at(children, path, tmp_path / "kill.log", call, when, index, **options)
            found = found_at(path)
            assert found in ((index - 1, index) if killed else (index,)), (call, when, found, index)
            assert found_at(other) == 0, (call, when)
            index = found
            assert (path / linked.relative_to(other)).samefile(linked), (call, when)
            if not killed:
                assert manifest.listing(parent) == ["other", "step"], (call, when)
                assert linked.stat().st_nlink == 2, (call, when)
                break
            kills[call] = when
            assert when < 120, f"{call} is called without end"
    assert kills.keys() >= {"linkat", "renameat", "renameat2", "fsync", "unlinkat", "openat"}, kills
    print(f"kills at system calls: {sum(kills.values())}: {kills}")


def test_kill_with_files_at_every_system_call(children, parent, tmp_path):
    """Mutants: a file is written after the commit, or under the final name; an old file is carried over a new one."""
    path = parent / "step"

    def files(index):
        return {"config.json": f"{index}" * 9000, f"note-{index % 2}": str(index)}

    options = {"io": "threads", "threads": 1}
    fastckpt.save(numbered(0, SMALL), path, files=files(0))
    index, notes = 0, {"note-0": "0"}
    kills = 0
    for call in ("openat", "write", "linkat", "fsync", "renameat", "renameat2", "unlinkat"):
        for when in itertools.count(1):
            index += 1
            more = options | {"files": files(index)}
            killed = kill_at(children, path, tmp_path / "kill.log", call, when, index, **more)
            found = whole(path, SMALL)
            assert found in ((index - 1, index) if killed else (index,)), (call, when)
            if found == index:
                notes[f"note-{index % 2}"] = str(index)
            index = found
            # Given and carried-over files are committed together with the tensors.
            assert (path / "config.json").read_text() == files(index)["config.json"], (call, when)
            assert {name: (path / name).read_text() for name in notes} == notes, (call, when)
            if not killed:
                assert manifest.listing(parent) == ["step"], (call, when)
                break
            kills += 1
            assert when < 120, f"{call} is called without end"
    assert kills > 20
    assert set(notes) == {"note-0", "note-1"}


# --- faults --------------------------------------------------------------------------------------------------------

FAULTS = [
    "mkdir",
    "mkdirat",
    "openat",
    "openat2",
    "fallocate",
    "ftruncate",
    "fchmod",
    "pwrite64",
    "pwritev2",
    "write",
    "fdatasync",
    "fsync",
    "renameat2",
    "unlinkat",
]


def faulted_save(children, path, log, inject, **options):
    """Save with an injected fault; return the end, the calls, and the calls that really got the fault."""
    end, calls = traced_save(
        children, path, log, nbytes=SMALL, threads=1, shard_size=SMALL // 2, inject=[inject], **options
    )
    return end, calls, [call for call in calls if call.injected]


@pytest.mark.parametrize(("engine", "error"), [("uring", "ENOSPC"), ("threads", "EIO")])
def test_every_system_call_failing_once(children, parent, tmp_path, engine, error):
    """Mutants: a result is ignored; a failed fsync is repeated; the wrong directory is cleaned up."""
    path = parent / "step"
    index = 0
    fastckpt.save(numbered(index, SMALL), path, io=engine)
    (path / "config.json").write_text("{}")
    raised = {}
    for call in FAULTS:
        for when in itertools.count(1):
            index += 1
            inject = strace.injection(call, f"error={error}", when)
            end, calls, injected = faulted_save(children, path, tmp_path / "fault.log", inject, io=engine, index=index)
            where = f"{call} {when} {error}: {injected and injected[0]}"
            found = whole(path, SMALL)
            assert (path / "config.json").read_text() == "{}", where
            commits = [c for c in calls if c.name in RENAMES and c.ok and c.paths()[1:] == [str(path)]]
            # A displaced directory that cannot be read gets its name back by a second exchange.
            commit = commits[0] if len(commits) % 2 else None
            if isinstance(end, zygote.Raised):
                assert injected, f"{where}: the save failed without a fault: {end}"
                assert "OSError" in end.bases, f"{where}: {end}\n{end.trace}"
                assert end.errno == getattr(errno, error), f"{where}: {end}"
                assert end.filename, f"{where}: the error names no file: {end}"
                assert str(parent) in end.filename, f"{where}: {end}"
                raised[call] = raised.get(call, 0) + 1
                if commit is None:
                    assert found == index - 1, f"{where}: the save failed, but its checkpoint is visible"
                    assert manifest.listing(parent) == ["step"], f"{where}: leftovers"
                else:
                    assert found == index, where
            else:
                # The save succeeded despite the fault, or the fault did not happen.
                assert found == index, f"{where}: the save succeeded, but its checkpoint is not there"
                for fatal in injected:
                    shard_or_manifest = any(".tmp-" in named for named in fatal.fd_paths())
                    assert not (fatal.name in SYNCS and shard_or_manifest), f"{where}: a failed sync taken for success"
            index = found
            if not injected:
                assert manifest.listing(parent) == ["step"], where
                break
            assert when < 120, f"{call} is called without end"
    assert {"fdatasync", "fsync", "openat", "renameat2"} <= raised.keys(), raised
    assert raised["fsync"] >= 3, raised  # manifest, directory, parent
    if engine == "threads":
        assert raised.get("pwrite64", 0) >= 2, raised
    print(f"{engine} {error}: raised {raised}")
    manifest.read(path)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("fallocate", "EOPNOTSUPP"),
        ("fallocate", "ENOSYS"),
        ("pwrite64", "EINTR"),
        ("pwritev2", "EINTR"),
        ("fdatasync", "EINTR"),
        ("io_uring_enter", "EINTR"),
        ("io_uring_enter", "EAGAIN"),
        ("io_uring_enter", "EBUSY"),
    ],
)
def test_what_is_no_failure_is_invisible(children, parent, tmp_path, call, error):
    """The caller does not notice a signal, or a file system without fallocate.
    A save tries a busy ring again, and does not hang."""
    engine = "uring" if call.startswith("io_uring") else "threads"
    for number, when in enumerate(("1", "2", "1..3"), start=1):
        child = children.start("save_held", path=str(parent / "step"), index=number, io=engine)
        child.next()
        with strace.attached(
            child.pid, tmp_path / "log", call, strace.injection(call, f"error={error}", when)
        ) as trace:
            child.go()
            end = child.outcome()
            assert not isinstance(end, zygote.Raised), (when, end)
            assert when == "2" or any(seen.injected for seen in trace.calls()), "the fault did not happen"
        assert end["engine"] == engine
        assert whole(parent / "step", 1 << 20) == number
        assert manifest.listing(parent) == ["step"]


@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS"])
def test_without_flags_of_rename(children, parent, tmp_path, error):
    """NFS, Lustre and FUSE lack RENAME_EXCHANGE; there, plain renames have the same result."""
    path = parent / "step"
    inject = strace.injection("renameat2", f"error={error}", "1+")
    for index in (1, 2, 3):
        end, calls = traced_save(children, path, tmp_path / "log", index=index, inject=[inject], **SHARDS)
        assert not isinstance(end, zygote.Raised), end
        assert any(call.injected for call in calls)
        assert whole(path, SHARDS["nbytes"]) == index
        assert manifest.listing(parent) == ["step"]
        if index == 1:
            (path / "config.json").write_text("{}")
    assert (path / "config.json").exists()
    # The old checkpoint got its recoverable name before the new one took its place, and both renames became durable.
    renames = [call for call in calls if call.name in ("rename", "renameat") and call.ok]
    moved, placed = [call for call in renames if str(path) in call.paths()][:2]
    assert moved.paths()[0] == str(path)
    assert re.fullmatch(r"\.step\.old-\w+-[0-9a-f]{16}-\d+-\d+-\d+-[0-9a-f]{10}", Path(moved.paths()[1]).name)
    assert placed.paths()[1] == str(path)
    after = [
        call for call in calls if call.name in SYNCS and call.fd_paths() == [str(parent)] and call.start > placed.end
    ]
    assert after


@pytest.mark.parametrize("recovery", ["load", "save", "open", "verify"])
def test_killed_between_the_two_plain_renames(children, parent, tmp_path, recovery):
    """Only between these renames is the final name missing; the next reader or writer restores the old checkpoint."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    (path / "config.json").write_text("{}")
    gaps = 0
    for call, when in (
        # A sweep and the carrying over of files need renames, too.
        *itertools.product(("rename", "renameat"), range(1, 9)),
        *((name, when) for name in ("fsync", "unlinkat") for when in range(1, 5)),
    ):
        child = children.start("save_held", path=str(path), index=2, nbytes=SMALL)
        child.next()
        flags = strace.injection("renameat2", "error=EINVAL", "1+")
        kill = strace.injection(call, "signal=SIGKILL", when)
        with strace.attached(child.pid, tmp_path / "log", f"renameat2,{call}", flags, kill):
            child.go()
            with contextlib.suppress(zygote.DiedError):
                child.outcome()
        gap = not path.exists()
        gaps += gap
        if recovery == "save":
            fastckpt.save(numbered(3, SMALL), path)
            assert whole(path, SMALL) == 3
        elif recovery == "open":
            assert len(fastckpt.open(path)) > 0
        elif recovery == "verify":
            assert fastckpt.verify(path).ok
        found = whole(path, SMALL)
        assert found == 3 if recovery == "save" else found == 1 if gap else found in (1, 2), (call, when)
        assert (path / "config.json").exists()
        fastckpt.save(numbered(1, SMALL), path)
        assert manifest.listing(parent) == ["step"], (call, when)
    assert gaps >= 1, "no kill fell between the two renames"


@pytest.mark.parametrize("error", ["EACCES", "ENOLCK", "ENOSYS"])
def test_without_locks(children, parent, tmp_path, error):
    """A save works without locks, on a file system that lacks them or under a security module that forbids them."""
    inject = [strace.injection("fcntl", f"error={error}", "1+")]
    log = tmp_path / "log"
    child = children.start("save_held", path=str(parent / "step"), index=1, nbytes=SMALL)
    child.next()
    with strace.attached(child.pid, log, "fcntl", *inject) as trace:
        child.go()
        end = child.outcome()
        assert any(call.injected for call in trace.calls())
    assert not isinstance(end, zygote.Raised), end
    assert whole(parent / "step", SMALL) == 1
    assert manifest.listing(parent) == ["step"]


def test_unknown_rename_error_is_an_error(children, parent, tmp_path):
    """EACCES, unlike EINVAL, must not lead to a fallback, which would hide a real refusal."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    end, _, injected = faulted_save(
        children, path, tmp_path / "log", strace.injection("renameat2", "error=EACCES", "1+"), index=2
    )
    assert injected
    assert end.kind == "PermissionError"
    assert whole(path, SMALL) == 1
    assert manifest.listing(parent) == ["step"]


# --- rivals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("existing", [False, True])
def test_who_replaces_a_rival_is_told(parent, caplog, existing):
    """If ranks all save to one path, the last save wins, and its report and the log mention the replaced checkpoint."""
    path = parent / "step"
    if existing:
        fastckpt.save(numbered(1, SMALL), path)
    rivals = []

    def late(copy_out):
        def copy(*arguments):
            # In the middle of this save, another save begins and ends.
            if not rivals:
                rivals.append(threading.Thread(target=fastckpt.save, args=(numbered(2, SMALL), path)))
                rivals[0].start()
                rivals[0].join()
            return copy_out(*arguments)

        return copy

    with points.replaced(points.COPY_OUT, late):
        # The array is strided, so this function copies it.
        report = fastckpt.save({"a": np.arange(20_000)[::2]}, path)
    assert [re.search("another save to this path", warning) is not None for warning in report.warnings] == [True]
    told = [record for record in caplog.records if "another save to this path" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
    assert fastckpt.load(path)["a"][-1] == 19_998
    assert fastckpt.save(numbered(3, SMALL), path).warnings == ()
    assert manifest.listing(parent) == ["step"]


@pytest.mark.parametrize("existing", [False, True])
def test_two_savers_on_one_path(children, parent, existing):
    """The checkpoint is whole, failed saves raise clear errors, and no saver sweeps a living saver's workspace."""
    path = parent / "step"
    nbytes = 1 << 19
    if existing:
        fastckpt.save(numbered(0, nbytes), path)
    rivals = [
        children.start(
            "contend",
            path=str(path),
            first=1 + number,
            step=2,
            count=15,
            nbytes=nbytes,
            shard_size=nbytes // 2,
            io=engine,
        )
        for number, engine in enumerate(("uring", "threads"))
    ]
    for rival in rivals:
        rival.next()
    for rival in rivals:
        rival.go()
    seen = {"whole": 0, "changed under us": 0}
    # Load while they save, and once more: at the end, the path has a whole checkpoint.
    while not (seen["whole"] and all(rival.ended() for rival in rivals)):
        over = all(rival.ended() for rival in rivals)
        try:
            which(fastckpt.load(path, io="threads"), nbytes)
        except (FileNotFoundError, fastckpt.CheckpointError):
            assert not over, "the load failed although no process saves any more"
            seen["changed under us"] += 1
        else:
            seen["whole"] += 1
    ends = [rival.outcome() for rival in rivals]
    for end in ends:
        assert not isinstance(end, zygote.Raised), end
        saved = [index for index, kind, _ in end if kind == "saved"]
        assert saved, end
        for _, kind, text in end:
            assert kind in (
                "saved",
                "FileExistsError",
                "FileNotFoundError",
                "CheckpointError",
                "OSError",
                "BlockingIOError",
            ), end
            assert kind == "saved" or str(path) in text, end
    assert whole(path, nbytes) in [index for end in ends for index, kind, _ in end if kind == "saved"]
    assert seen["whole"] > 0
    fastckpt.save(numbered(99, nbytes), path)
    assert manifest.listing(parent) == ["step"]


def test_savers_of_different_paths_in_one_parent_do_not_meet(children, parent):
    """Mutant: a sweep takes a living neighbour's workspace for a leftover."""
    rivals = [
        children.start("contend", path=str(parent / f"step-{number}"), first=number, step=1, count=10, nbytes=SMALL)
        for number in range(4)
    ]
    for rival in rivals:
        rival.next()
    for rival in rivals:
        rival.go()
    for rival in rivals:
        assert [kind for _, kind, _ in rival.outcome()] == ["saved"] * 10
    assert manifest.listing(parent) == [f"step-{number}" for number in range(4)]
    assert [whole(parent / f"step-{number}", SMALL) for number in range(4)] == [9, 10, 11, 12]


# --- leftovers ----------------------------------------------------------------------------------------------------

HOST = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:16]
SPACE = Path("/proc/self/ns/pid").stat().st_ino
HERE = f"{HOST}-{BOOT}-{SPACE}"
START = Path("/proc/1/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2].split()[19]
DEAD = 4_194_303  # the largest possible pid, which is not in use (checked below)


def leave(parent, name):
    directory = parent / name
    directory.mkdir()
    (directory / manifest.NAME).touch()
    (directory / "model.safetensors").write_bytes(b"half")
    return directory


def test_leftovers_of_the_dead_are_swept_and_nothing_else(children, parent, tmp_path):
    """Mutants: a save sweeps by age or name alone, follows a link, or never sweeps."""
    with pytest.raises(ProcessLookupError):
        os.kill(DEAD, 0)
    swept = [
        leave(parent, f".step.tmp-{HERE}-{DEAD}-7-0123abcd"),
        # The pid belongs to a process that started later, like the first process of a restarted container.
        leave(parent, f".step.tmp-{HERE}-1-{int(START) + 1}-0123abcd"),
        # A leftover of another checkpoint in the same parent.
        leave(parent, f".other.tmp-{HERE}-{DEAD}-7-0123abcd"),
        # Host names prove nothing: a container of this machine may have had another host name.
        leave(parent, f".step.tmp-elsewhere-{BOOT}-{SPACE}-{DEAD}-7-0123abcd"),
        # The PID namespace cannot be inspected, but the lock is proof.
        leave(parent, f".step.tmp-{HOST}-{BOOT}-1-1-1-0123abcd"),
        # The process with this pid and start time lives, but runs another program now: the lock is free.
        leave(parent, f".step.tmp-{HERE}-1-{START}-0123abcd"),
        # Garbage may be removed without proof, whoever made it.
        leave(parent, ".step.del-elsewhere-0000000000000001-1-1-1-0123abcd"),
    ]
    living = leave(parent, f".step.tmp-{HOST}-{BOOT}-1-1-1-89abcdef")
    same = leave(parent, f".step.tmp-{HERE}-1-{START}-89abcdef")
    held = [manifest.lock(directory) for directory in (living, same)]
    outside = leave(tmp_path, "outside")
    link = parent / f".step.tmp-{HERE}-{DEAD}-7-11111111"
    link.symlink_to(outside)
    foreign = leave(parent, f".step.tmp-{HERE}-{DEAD}-7-33333333")
    (foreign / manifest.NAME).unlink()
    kept = [
        living,
        # A foreign directory that a killed save had displaced.
        foreign,
        same,
        # Made in another boot, but changed since this boot: perhaps by a machine that mounts this file system remotely.
        leave(parent, f".step.tmp-{HOST}-0000000000000001-1-1-1-0123abcd"),
        leave(parent, ".step.tmp-notes"),
        leave(parent, f"step.tmp-{HERE}-{DEAD}-7-0123abcd"),
        leave(parent, f".step.tmp-{HERE}-{DEAD}-7-0123abcd.bak"),
        leave(parent, f".step.tmp-{HERE}-{DEAD}-7-xyz"),
        leave(parent, ".cache"),
    ]
    file = parent / f".step.tmp-{HERE}-{DEAD}-7-22222222"
    file.write_text("a file, so not ours")
    try:
        fastckpt.save(numbered(1, SMALL), parent / "step")
    finally:
        for one in held:
            os.close(one)
    assert [directory.name for directory in swept if directory.exists()] == []
    assert [directory.name for directory in kept if not (directory / "model.safetensors").exists()] == []
    assert (outside / "model.safetensors").read_bytes() == b"half"
    assert file.read_text() == "a file, so not ours"
    # The living process has since died.
    fastckpt.save(numbered(2, SMALL), parent / "step")
    assert not living.exists()


def test_old_one_aside_with_the_new_one_in_place_is_swept(parent):
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    shutil.copytree(path, parent / f".step.old-{HERE}-{DEAD}-7-0123abcd00")
    assert whole(path, SMALL) == 1
    fastckpt.save(numbered(2, SMALL), path)
    assert manifest.listing(parent) == ["step"]


def test_old_one_whose_saver_still_lives_is_read_and_not_taken_away(parent):
    """A reader must not interfere between the two renames of a living saver."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    aside = parent / f".step.old-{HOST}-{BOOT}-1-1-1-0123abcd00"
    path.rename(aside)
    held = manifest.lock(leave(parent, f".step.tmp-{HOST}-{BOOT}-1-1-1-0123abcd"))
    try:
        assert whole(path, SMALL) == 1
        assert aside.exists()
        assert not path.exists()
    finally:
        os.close(held)
    assert whole(path, SMALL) == 1
    assert path.exists()


def test_a_link_leads_to_what_was_taken_aside(parent):
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    (parent / "latest").symlink_to("step")
    leave(parent, f".step.tmp-{HERE}-{DEAD}-7-0123abcd")
    path.rename(parent / f".step.old-{HERE}-{DEAD}-7-0123abcd00")
    assert whole(parent / "latest", SMALL) == 1
    assert path.exists()


def test_what_was_replaced_does_not_come_back(parent):
    """The saver died before it removed the old checkpoint, and the new one was removed: the old one stays gone."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    path.rename(parent / f".step.old-{HERE}-{DEAD}-7-0123abcd00")
    with pytest.raises(FileNotFoundError):
        fastckpt.load(path)
    fastckpt.save(numbered(2, SMALL), path)
    fastckpt.save(numbered(3, SMALL), path)
    assert manifest.listing(parent) == ["step"]


def test_name_as_long_as_the_file_system_takes(parent):
    for name in ("n" * 255, "ä" * 127, "n" * 121, "n" * 120):
        path = parent / name
        fastckpt.save(numbered(1, SMALL), path)
        fastckpt.save(numbered(2, SMALL), path)
        assert whole(path, SMALL) == 2
        assert manifest.listing(parent) == [name]
        shutil.rmtree(path)


# --- modes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_the_umask(children, parent, umask):
    """Mutant: mode 0600, as for temporary files (safetensors#782), so that no other user can read the model."""
    for index in (1, 2):  # the second save replaces the first
        found = children.run("modes", path=str(parent / "step"), umask=umask, index=index)
        assert not isinstance(found, zygote.Raised), found
        assert {manifest.NAME, "model.safetensors.index.json", ".", "training"} < set(found)
        for name, (mode, _) in found.items():
            assert mode == (0o777 if name in {".", "training"} else 0o666) & ~umask, name


@pytest.mark.root
def test_group_of_a_setgid_directory_is_inherited(children, parent):
    needs.root()
    os.chown(parent, -1, 12345)
    parent.chmod(0o2775)
    (parent / "plain").mkdir()
    want = stat.S_IMODE((parent / "plain").stat().st_mode) & stat.S_ISGID
    for index in (1, 2):
        found = children.run("modes", path=str(parent / "step"), umask=0o022, index=index)
        assert not isinstance(found, zygote.Raised), found
        assert {group for _, group in found.values()} == {12345}
        assert found["."][0] == 0o755 | want, "the directory has the mode that mkdir gives"


# --- what an overwrite may take --------------------------------------------------------------------------------------


def test_saving_over_the_source_of_the_state(parent):
    """In safetensors#762, such a save wrote zeros, because it truncated the file from which the state was mapped."""
    path = parent / "step"
    state = numbered(1)
    fastckpt.save(state, path)
    for io in (*ENGINES, "auto"):
        loaded = fastckpt.load(path, io=io)
        fastckpt.save(loaded, path, io=io)
        assert same(loaded, state)
        assert same(fastckpt.load(path), state)
    assert manifest.listing(parent) == ["step"]


def test_open_reader_of_a_replaced_checkpoint(parent):
    """Open files stay readable. If a file system removes them, the error says that the checkpoint was replaced, not
    that it is corrupt."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path, files=fastckpt.Files(shard_size=SMALL // 2))
    lazy = fastckpt.open(path)
    fastckpt.save(numbered(2, SMALL), path, files=fastckpt.Files(shard_size=SMALL // 2))
    want = {"model.big": "big", "model.odd": "odd", "model.rows": "rows"}
    for name, key in want.items():
        refusal = None
        try:
            read = lazy[name]
        except (OSError, fastckpt.CheckpointError) as error:
            refusal = str(error)
        else:
            assert same(read, numbered(1, SMALL)["model"][key]), "the reader returned bytes of another checkpoint"
        assert refusal is None or re.search("replaced|meanwhile", refusal), refusal
    assert fastckpt.open(path)["model.small.1"] == 2


def obstacles(parent):
    def foreign_weights(path):
        path.mkdir()
        (path / "model.safetensors").write_text("the only copy")

    def file(path):
        path.write_text("the only copy")

    def link(path):
        fastckpt.save(numbered(1, SMALL), parent / "elsewhere")
        path.symlink_to("elsewhere")

    def dangling(path):
        path.symlink_to("nowhere")

    def fifo(path):
        os.mkfifo(path)

    def nested(path):
        fastckpt.save(numbered(1, SMALL), path)
        (path / "sub").mkdir()
        (path / "sub" / "thesis.txt").write_text("the only copy")

    def other_manifest(path):
        path.mkdir()
        (path / manifest.NAME).write_text('{"some": "other program of that name"}')

    def linked_inside(path):
        fastckpt.save(numbered(1, SMALL), path)
        (path / "link").symlink_to("/etc/passwd")

    return {
        made.__name__: made
        for made in (foreign_weights, file, link, dangling, fifo, nested, other_manifest, linked_inside)
    }


def snapshot(directory):
    """All entries below a directory, with names, kinds, contents and link targets."""
    found = {}
    for base, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = os.path.join(base, name)
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            content = (
                Path(path).read_bytes() if kind == stat.S_IFREG else os.readlink(path) if kind == stat.S_IFLNK else b""
            )
            found[path] = (kind, content)
    return found


@pytest.mark.parametrize("kind", sorted(obstacles(Path())))
def test_overwrites_nothing_but_checkpoints(parent, kind):
    path = parent / "step"
    obstacles(parent)[kind](path)
    before = snapshot(parent)
    with pytest.raises(FileExistsError) as caught:
        fastckpt.save(numbered(2, SMALL), path)
    assert caught.value.filename is not None
    assert str(path) in os.fsdecode(caught.value.filename)
    assert snapshot(parent) == before


def test_directory_that_loses_nothing_is_filled(parent):
    """A save fills a directory that os.makedirs(path, exist_ok=True) made, or that has only a config.json."""
    path = parent / "step"
    path.mkdir(mode=0o700)
    fastckpt.save(numbered(1, SMALL), path, overwrite=False)
    assert whole(path, SMALL) == 1
    other = parent / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(FileExistsError):
        fastckpt.save(numbered(2, SMALL), other, overwrite=False)
    fastckpt.save(numbered(2, SMALL), other)
    assert whole(other, SMALL) == 2
    assert (other / "config.json").read_text() == "{}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert manifest.listing(parent) == ["other", "step"]


def test_overwrite_refused_by_the_caller(parent):
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path, overwrite=False)
    before = snapshot(parent)
    with pytest.raises(FileExistsError) as caught:
        fastckpt.save(numbered(2, SMALL), path, overwrite=False)
    assert str(path) in os.fsdecode(caught.value.filename)
    assert snapshot(parent) == before
    assert whole(path, SMALL) == 1


@pytest.mark.parametrize("call", ["fdatasync", "renameat"])
def test_target_that_appears_during_the_save_is_not_overwritten(children, parent, tmp_path, call):
    """With overwrite=False, a save checks before it writes, and its rename replaces only an empty directory."""
    path = parent / "step"
    # The counters are off, because their page needs a separate rename.
    options = {"index": 1, "nbytes": SMALL, "overwrite": False, "env": {"FASTCKPT_TOP": "0"}}
    child = children.start("save_held", path=str(path), **options)
    child.next()
    with strace.stopping(child.pid, tmp_path / "log", call) as stop:
        child.go()
        stop.wait()
        path.mkdir()
        (path / "thesis.txt").write_text("the only copy")
    end = child.outcome()
    assert isinstance(end, zygote.Raised)
    assert end.kind == "FileExistsError", end
    assert manifest.listing(path) == ["thesis.txt"]
    assert manifest.listing(parent) == ["step"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("call", ["fdatasync", "renames"])
def test_workspace_that_somebody_removes_during_the_save(children, parent, tmp_path, call, existing):
    """If a cleaning job removes `.*.tmp-*`, the save raises, and does not wait for files that never come back."""
    path = parent / "step"
    if existing:
        fastckpt.save(numbered(1, SMALL), path)
    child = children.start("save_held", path=str(path), index=2, nbytes=SMALL, env={"FASTCKPT_TOP": "0"})
    child.next()
    if call == "renames":
        call = "renameat2" if existing else "renameat"
    with strace.stopping(child.pid, tmp_path / "log", call) as stop:
        child.go()
        stop.wait()
        # At this call the save stops, after the previous file has been created and filled.
        latest = "model.safetensors" if call == "fdatasync" else manifest.NAME
        (found,) = parent.glob(f".step.tmp-*/{latest}")
        assert found.stat().st_size
        shutil.rmtree(found.parent)
    end = child.outcome()
    assert isinstance(end, zygote.Raised), "the save succeeded without its workspace"
    assert "OSError" in end.bases, end
    assert str(parent) in (end.filename or ""), end
    assert manifest.listing(parent) == (["step"] if existing else [])
    assert not existing or whole(path, SMALL) == 1


def test_other_files_are_carried_over(parent):
    path = parent / "step"
    fastckpt.save(numbered(1), path, files=fastckpt.Files(shard_size=1 << 19))
    assert len(list(path.glob("*.safetensors"))) > 1
    (path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (path / "README.md").write_text("# mine")
    (path / "README.md").chmod(0o640)
    (path / ".hidden").write_bytes(b"\x00" * 5000)
    for index in (2, 3):
        fastckpt.save(numbered(index), path)
        assert which(fastckpt.load(path)) == index
        assert (path / "config.json").read_text() == '{"architectures": ["GPT2LMHeadModel"]}'
        assert (path / "README.md").read_text() == "# mine"
        assert stat.S_IMODE((path / "README.md").stat().st_mode) == 0o640
        assert (path / ".hidden").read_bytes() == b"\x00" * 5000
        # The shards of the old checkpoint are fastckpt's, and are removed.
        ours = [manifest.NAME, "model.safetensors", "model.safetensors.index.json"]
        assert sorted(os.listdir(path)) == [".hidden", "README.md", "config.json", *ours]


# --- forks and signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "uring", "threads"])
def test_fork_after_use(children, parent, engine):
    """A child must not use an inherited ring, which delivers the child's completions to the parent (liburing#731)."""
    end = children.run("fork_and_save", directory=str(parent), io=engine)
    assert not isinstance(end, zygote.Raised), end
    assert end["statuses"] == [0, 0, 0]
    want = {
        "before": 1,
        "after": 30,
        **{f"child-{n}": 10 + n for n in range(3)},
        **{f"parent-{n}": 20 + n for n in range(3)},
    }
    assert manifest.listing(parent) == sorted(want)
    for name, index in want.items():
        assert whole(parent / name, 1 << 20) == index


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("call", ["fdatasync", "fallocate"])
def test_interrupt_in_the_middle_of_a_save(children, parent, tmp_path, engine, call):
    """Ctrl-C while a save waits for the disk raises KeyboardInterrupt, and leaves only the old checkpoint."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    child = children.start("save_held", path=str(path), index=2, nbytes=SMALL, io=engine, threads=1)
    child.next()
    with strace.stopping(child.pid, tmp_path / "log", call) as stop:
        child.go()
        stop.wait()
        stop.signal(signal.SIGINT)
    end = child.outcome()
    assert isinstance(end, zygote.Raised), "the interrupt was lost"
    assert end.kind == "KeyboardInterrupt", end
    assert whole(path, SMALL) == 1
    assert manifest.listing(parent) == ["step"]


def test_interrupt_at_any_moment(children, parent, tmp_path):
    """After Ctrl-C the old or the new checkpoint is whole, the save raises unless it had ended, and no leftovers
    stay, because the save had time to clean up."""
    dice = random.Random(f"{SEED} interrupt")
    path = parent / "step"
    nbytes = 24 << 20
    began = time.monotonic()
    fastckpt.save(numbered(0, nbytes), path)
    seconds = time.monotonic() - began
    index, interrupted = 0, 0
    for trial in range(12):
        child = children.start("save_held", path=str(path), index=index + 1, nbytes=nbytes)
        child.next()
        if trial:
            child.go()
            time.sleep(dice.uniform(0, 1.2 * seconds))
            child.signal(signal.SIGINT)
        else:
            with strace.stopping(child.pid, tmp_path / "log", "fdatasync") as stop:
                child.go()
                stop.wait()
                stop.signal(signal.SIGINT)
        try:
            end = child.outcome()
        except zygote.DiedError:
            end = None  # the signal came after the save, while the child was exiting
        if isinstance(end, zygote.Raised):
            assert end.kind == "KeyboardInterrupt", end
            interrupted += 1
        assert manifest.listing(parent) == ["step"]
        found = which(fastckpt.load(path), nbytes)
        assert found in (index, index + 1)
        assert found == index + 1 or end is None or isinstance(end, zygote.Raised), "acknowledged, but gone"
        index = found
        assert interrupted > 0, "the first save was interrupted before its commit"


@pytest.mark.root
@pytest.mark.parametrize("kind", ["xfs", "btrfs", "overlay", "tmpfs"])
def test_kills_on_other_file_systems(children, kind):
    """Kills during exchanges of names and sweeps, on file systems with special behaviour."""
    dice = random.Random(f"{SEED} {kind}")
    with mounts.mount(kind) as point:
        path = point / "step"
        fastckpt.save(numbered(0, SMALL), path)
        present = [name for name in manifest.listing(point) if name != "lost+found"]
        assert present == ["step"]
        acknowledged = 0
        for _ in range(8):
            child = children.start(
                "save_loop", path=str(path), first=acknowledged + 1, nbytes=SMALL, shard_size=SMALL // 2
            )
            child.next()
            time.sleep(dice.uniform(0, 0.05))
            child.kill()
            done = [index for state, index in child.drain() if state == "done"]
            acknowledged = max([acknowledged, *done])
            index = whole(path, SMALL)
            assert index in (acknowledged, acknowledged + 1)
            acknowledged = index + 1
            fastckpt.save(numbered(acknowledged, SMALL), path)
            assert manifest.listing(point) == ["step"]


@pytest.mark.root
@pytest.mark.parametrize("save", [fastckpt.save, fastckpt.save_async])
def test_a_mount_point_is_refused_before_a_byte_is_written(parent, save):
    """A rename cannot replace a mount point, and the shards would fill the file system around it."""
    path = parent / "step"
    path.mkdir()
    with mounts.mount("tmpfs") as elsewhere:
        subprocess.run(["mount", "--bind", elsewhere, path], check=True)
        try:
            with pytest.raises(FileExistsError, match=r"it is a mount point.*save to a path below it"):
                save({"w": np.zeros(8)}, path)
            assert os.listdir(parent) == ["step"]
            fastckpt.save({"w": np.zeros(8)}, path / "step")
        finally:
            subprocess.run(["umount", path], check=True)


@pytest.mark.root
def test_a_mount_point_is_refused_where_statx_does_not_tell(parent, children, tmp_path):
    path = parent / "step"
    path.mkdir()
    with mounts.mount("tmpfs") as elsewhere:
        subprocess.run(["mount", "--bind", elsewhere, path], check=True)
        try:
            child = children.start("save_held", path=str(path), index=1, nbytes=SMALL)
            child.next()
            refused = strace.injection("statx", "error=ENOSYS", "1+")
            with strace.attached(child.pid, tmp_path / "log", "statx", refused):
                child.go()
                end = child.outcome()
            assert end.kind == "FileExistsError"
            assert "it is a mount point" in end.text
            assert os.listdir(parent) == ["step"]
        finally:
            subprocess.run(["umount", path], check=True)
