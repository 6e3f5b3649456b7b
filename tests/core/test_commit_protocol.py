"""The rules of a commit (docs/format.md, 6) on one machine: a saver is stopped before a
chosen system call while another process acts. See test_nfs.py and test_fuse.py for two machines."""

# ruff: noqa: PTH208 - names as the kernel has them

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from harness import machines, manifest, mounts, needs, strace, two_machines, zygote
from harness.jobs import SMALL
from harness.states import numbered, which

# The ioctl makes ext4 and XFS act as if the disk were gone. With 2 (NOLOGFLUSH), the unwritten log is lost.
GOING_DOWN, WITHOUT_LOG = 0x8004587D, 2


@pytest.fixture(scope="module")
def children():
    # The monitor's counters would add system calls to those at which savers are stopped.
    with zygote.running(env={"FASTCKPT_TOP": "0"}) as running:
        yield running


@pytest.fixture
def parent(tmp_path):
    directory = tmp_path / "parent"
    directory.mkdir()
    return directory


def there(path):
    return which(fastckpt.load(path), SMALL)


# --- a false success --------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("kind", ["xfs", "ext4"])
def test_file_system_that_shuts_down_before_the_parent_is_synced(children, tmp_path, kind):
    """XFS then syncs a directory without an error and loses the checkpoint: the save must not succeed."""
    with mounts.mount(kind) as point:
        path = point / "step"
        fastckpt.save(numbered(0, SMALL), path)
        os.sync()
        before = path.stat().st_ino
        with machines.stopped_save(children, path, tmp_path / "log", "fsync", at=point) as child:
            assert path.stat().st_ino != before, "the save was stopped before its rename"
            descriptor = os.open(point, os.O_RDONLY)
            fcntl.ioctl(descriptor, GOING_DOWN, struct.pack("I", WITHOUT_LOG))
            os.close(descriptor)
        end = child.outcome()
        assert isinstance(end, zygote.Raised), "the save succeeded on a file system that is gone"
        assert end.errno in (errno.EIO, 117), end
        assert str(point) in (end.filename or ""), end


@pytest.mark.root
def test_power_cut_between_two_shards_on_btrfs(children, tmp_path):
    """On btrfs, a sync makes one file and its name durable, but no earlier files. The leftovers must be recognised as
    a workspace, and the next save removes it."""
    image = tmp_path / "image"
    with mounts.mount("btrfs") as point:
        options = {"shard_size": SMALL // 2, "io": "threads"}
        path = point / "step"
        with machines.stopped_save(children, path, tmp_path / "log", "fdatasync", 2, **options) as child:
            # The copy is sparse, because its holes would be 160 MB of writes that delay the syncs of other tests.
            subprocess.run(["cp", "--sparse=always", point.parent / "image", image], check=True)
            child.signal(signal.SIGKILL)
        child.wait()
    with mounts.mount("btrfs", image=image) as point:
        (workspace,) = point.glob(".step.tmp-*")
        assert any(name.startswith("model-0") for name in manifest.listing(workspace))
        fastckpt.save(numbered(2, SMALL), point / "step")
        assert manifest.listing(point) == ["step"]


_BECOMES_ANOTHER_PROGRAM = """
import os, pathlib, sys, threading, time, numpy, fastckpt
parent = pathlib.Path(sys.argv[1])
state = {"w": numpy.zeros(1 << 22, dtype=numpy.uint8)}
options = {"path": parent / "step", "io": fastckpt.IO(bandwidth_limit=1 << 16)}
threading.Thread(target=fastckpt.save, args=(state,), kwargs=options, daemon=True).start()
while not any(one.stat().st_size for one in parent.glob(".step.tmp-*/model.safetensors")):
    time.sleep(0.01)
os.execvp("sleep", ["sleep", "1000"])
"""


def test_process_that_becomes_another_program(parent):
    """The saver's process runs, but the lock on its workspace is free."""
    with subprocess.Popen([sys.executable, "-c", _BECOMES_ANOTHER_PROGRAM, str(parent)]) as child:
        try:
            name = Path(f"/proc/{child.pid}/comm")
            machines.wait_until(lambda: name.read_text() == "sleep\n")
            # The kernel gives the process its new name before it releases the lock.
            machines.wait_until(lambda: [one.state for one in fastckpt.clean(parent)] == ["dead"])
            fastckpt.save(numbered(1, SMALL), parent / "other")
            assert manifest.listing(parent) == ["other"]
            assert child.poll() is None
        finally:
            child.kill()


# --- rivals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["renameat2", "linkat"])
def test_file_laid_into_a_rivals_checkpoint(children, parent, tmp_path, call):
    """Another saver commits between a saver's check of the old checkpoint, or its list of files, and its rename."""
    path = parent / "step"
    fastckpt.save(numbered(0, SMALL), path)
    (path / "config.json").write_text("mine")
    with machines.stopped_save(children, path, tmp_path / "log", call, index=2) as child:
        fastckpt.save(numbered(3, SMALL), path)
        (path / "late.json").write_text("mine too")
    end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert there(path) == 2
    assert [(path / name).read_text() for name in ("config.json", "late.json")] == ["mine", "mine too"]
    assert manifest.listing(parent) == ["step"]


@pytest.mark.parametrize("flags", [True, False], ids=["exchange", "two renames"])
def test_directory_of_somebody_that_takes_the_name(children, parent, tmp_path, flags):
    """A directory appears between check and rename; it is not a checkpoint, and its contents stay."""
    path = parent / "step"
    fastckpt.save(numbered(0, SMALL), path)
    # Without flags, the exchange is refused, and the save is stopped at the plain rename.
    refused = () if flags else (strace.injection("renameat2", "error=EINVAL", "1"),)
    call = ("renameat2", 1) if flags else ("renameat", 1)
    with machines.stopped_save(children, path, tmp_path / "log", *call, *refused, index=2) as child:
        path.rename(parent / "moved")
        (path / "chapters").mkdir(parents=True)
        (path / "chapters" / "thesis.txt").write_text("the only copy")
    end = child.outcome()
    assert (path / "chapters" / "thesis.txt").read_text() == "the only copy", end
    assert isinstance(end, zygote.Raised)
    assert end.kind == "FileExistsError", end
    assert there(parent / "moved") == 0
    assert manifest.listing(parent) == ["moved", "step"]


@pytest.mark.parametrize("scenario", ["directory_meanwhile", "moved_meanwhile"])
def test_what_takes_the_name_meanwhile(children, parent, tmp_path, scenario):
    getattr(two_machines, scenario)((children, parent), (children, parent), tmp_path)


def test_overwrite_keeps_the_mode(parent):
    """A checkpoint with restricted permissions has them after the next save, too."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    path.chmod(0o700)
    fastckpt.save(numbered(2, SMALL), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert there(path) == 2


def test_mode_is_kept_while_it_is_written(children, parent, tmp_path):
    """Even the workspace has the mode, because it has the same bytes."""
    path = parent / "step"
    fastckpt.save(numbered(1, SMALL), path)
    path.chmod(0o700)
    with machines.stopped_save(children, path, tmp_path / "log", "fdatasync", index=2):
        (workspace,) = parent.glob(".step.tmp-*")
        assert stat.S_IMODE(workspace.stat().st_mode) == 0o700


# --- directories that cannot be synced -------------------------------------------------------------------------------


def test_directories_that_cannot_be_synced(children, parent, tmp_path):
    """vboxsf, 9p and old CIFS return EINVAL for a directory: the save succeeds, and its report shows it."""
    path = parent / "step"
    fastckpt.save(numbered(0, SMALL), path)
    child = children.start("save_held", path=str(path), index=1, nbytes=SMALL, threads=1)
    child.next()
    with strace.attached(child.pid, tmp_path / "log", "fsync") as trace:
        child.go()
        end = child.outcome()
        calls = [call for call in trace.calls() if call.name == "fsync"]
    assert end["warnings"] == []
    turns = [
        number
        for number, call in enumerate(calls, 1)
        if call.fd_paths() == [str(parent)] or call.fd_paths()[0].rpartition("/")[2].startswith(".step.tmp-")
    ]
    assert len(turns) >= 2, calls
    for index, when in enumerate(turns, 2):
        child = children.start("save_held", path=str(path), index=index, nbytes=SMALL, threads=1)
        child.next()
        fault = strace.injection("fsync", "error=EINVAL", when)
        with strace.attached(child.pid, tmp_path / "log", "fsync", fault) as trace:
            child.go()
            end = child.outcome()
            assert any(call.injected for call in trace.calls()), when
        assert not isinstance(end, zygote.Raised), end
        assert any("does not sync directories" in warning for warning in end["warnings"]), end
        assert there(path) == index
    assert manifest.listing(parent) == ["step"]


# --- a layer below ---------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_checkpoint_of_an_overlays_lower_layer(tmp_path):
    """A directory of a lower layer cannot be renamed: the error names the layer, and the old checkpoint stays."""
    needs.root()
    for part in ("upper", "work", "merged"):
        (tmp_path / "layers" / part).mkdir(parents=True)
    with mounts.mount("tmpfs") as top:
        layers = {part: top / part for part in ("lower", "upper", "work", "merged")}
        for directory in layers.values():
            directory.mkdir()
        fastckpt.save(numbered(1, SMALL), layers["lower"] / "step")
        options = ",".join(f"{part}dir={layers[part]}" for part in ("lower", "upper", "work"))
        subprocess.run(
            ["mount", "-t", "overlay", "-o", f"{options},redirect_dir=off", "overlay", layers["merged"]], check=True
        )
        try:
            path = layers["merged"] / "step"
            with pytest.raises(OSError, match="layer") as caught:
                fastckpt.save(numbered(2, SMALL), path)
            assert caught.value.errno == errno.EXDEV
            assert there(path) == 1
            assert manifest.listing(layers["merged"]) == ["step"]
        finally:
            subprocess.run(["umount", layers["merged"]], check=True)


# --- who is dead -----------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("pids", [False, True], ids=["host name", "PID namespace"])
def test_leftovers_of_another_container_of_this_machine(children, parent, tmp_path, pids):
    """A container has its own host name, and its processes may be invisible here, but the kernel is the same."""
    path = parent / "step"
    fastckpt.save(numbered(0, SMALL), path)
    for host in ("trainer-a", "trainer-b"):
        with machines.machine(tmp_path, host, boot=False, pids=pids) as container:
            with machines.stopped_save(container, path, tmp_path / "log", "fdatasync") as child:
                child.signal(signal.SIGKILL)
            child.wait()
    left = [name for name in os.listdir(parent) if ".tmp-" in name]
    assert len(left) >= 1, "the killed saves left nothing"
    fastckpt.save(numbered(2, SMALL), path)
    assert manifest.listing(parent) == ["step"]
    assert there(path) == 2


@pytest.mark.root
@pytest.mark.parametrize("host", ["trainer", None], ids=["equal names", "other name"])
@pytest.mark.parametrize("pids", [False, True], ids=["host name", "PID namespace"])
def test_living_saver_of_another_container_of_this_machine(parent, tmp_path, host, pids):
    """Neither this machine nor a container of the same name removes the workspace of a stopped saver."""
    path = parent / "step"
    with (
        machines.machine(tmp_path, "trainer", boot=False, pids=pids) as container,
        machines.machine(tmp_path, host or "other", boot=False, pids=pids) as second,
    ):
        with machines.stopped_save(container, path, tmp_path / "log", "fdatasync", index=5) as child:
            fastckpt.save(numbered(2, SMALL), parent / "other")
            two_machines.save(second, path, 3)
            assert len([name for name in os.listdir(parent) if ".tmp-" in name]) == 1
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert there(path) == 5
    assert manifest.listing(parent) == ["other", "step"]


@pytest.mark.root
def test_saver_of_a_container_that_has_not_locked_its_manifest(children, parent, tmp_path):
    """From outside the container, the saver looks dead, and its files are removed: it makes them again."""
    with machines.machine(tmp_path, "trainer", boot=False) as container:
        two_machines.swept_before_its_lock((container, parent), (children, parent), tmp_path)


# --- the old one aside -----------------------------------------------------------------------------------------------


def without_exchange():
    return strace.injection("renameat2", "error=EINVAL", "1+")


def test_old_one_does_not_come_back_when_the_user_removes_the_new_one(children, parent, tmp_path):
    """A saver dies while it removes the replaced checkpoint; then the new one is removed, and nothing comes back."""
    path = parent / "step"
    committed = 0
    for when in range(1, 10):
        fastckpt.save(numbered(1, SMALL), path)
        child = children.start("save_held", path=str(path), index=2, nbytes=SMALL, threads=1)
        child.next()
        with strace.stopping(child.pid, tmp_path / "log", "unlinkat", when, without_exchange()) as stop:
            child.go()
            machines.wait_until(lambda stop=stop, child=child: stop.reached() or child.ended())
            hit = stop.reached()
            child.signal(signal.SIGKILL)
        child.wait()
        committed += hit and there(path) == 2
        shutil.rmtree(path)
        for look in (fastckpt.load, fastckpt.open, fastckpt.verify):
            with pytest.raises(FileNotFoundError):
                look(path)
        fastckpt.save(numbered(3, SMALL), path)
        assert there(path) == 3
        fastckpt.save(numbered(4, SMALL), path)
        assert manifest.listing(parent) == ["step"]
        if not hit:
            break
    assert committed >= 2, committed


def test_reader_overtaken_at_any_open(children, parent, tmp_path):
    two_machines.reader_overtaken((children, parent), (children, parent), tmp_path)


def test_load_that_is_overtaken_again_and_again(children, parent, tmp_path):
    """The reader gives up after a time, not after a number of saves."""
    path = parent / "step"
    fastckpt.save(numbered(0, SMALL), path)
    turns, index, stops = 25, 0, 0
    reader = children.start("look", path=str(path), held=True)
    reader.next()
    log = tmp_path / "log"

    def logged(text):
        return log.read_text(encoding="utf-8", errors="replace").count(text)

    # The reader stops after each open, and before its next open the checkpoint is replaced.
    with strace.attached(reader.pid, log, "openat2", strace.injection("openat2", "signal=SIGSTOP", "1+")):
        reader.go()
        while logged('"model.safetensors"') < turns:
            machines.wait_until(lambda seen=stops: logged("--- stopped by SIGSTOP ---") > seen or reader.ended())
            assert not reader.ended(), f"the reader ended after {stops} replacements: {reader.outcome()}"
            stops = logged("--- stopped by SIGSTOP ---")
            index += 1
            fastckpt.save(numbered(index, SMALL), path)
            reader.signal(signal.SIGCONT)
    reader.signal(signal.SIGCONT)
    found = reader.outcome()
    assert isinstance(found, int), f"overtaken {turns} times: {found}"
    assert found in (index, index - 1)
