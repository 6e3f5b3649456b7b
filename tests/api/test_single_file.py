"""Files in any format: a closed file of ``open_write`` is whole and durable, and ``open_read`` verifies it."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastckpt
from harness import mounts, needs, strace, zygote
from harness.draws import one_in
from harness.rot import rot

ENGINES = ["auto", "uring", "threads", "direct", "buffered"]
#: The bytes that one thread writes at a time.
BLOCK = 8 << 20
CHECKSUM = "user.fastckpt.crc64nvme"


@pytest.fixture
def parent(tmp_path):
    """An empty directory for the file."""
    directory = tmp_path / "parent"
    directory.mkdir()
    return directory


@pytest.fixture(scope="module")
def data():
    """Bytes for more than five blocks, and not a whole number of pages."""
    return np.random.default_rng(7).integers(0, 256, 5 * BLOCK + 4097, np.uint8).tobytes()


def names(directory):
    return sorted(one.name for one in directory.iterdir())


def write(path, content, **options):
    with fastckpt.open_write(path, **options) as file:
        assert file.write(content) == len(content)


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("threads", [None, 1])
def test_what_was_written_in_pieces_is_read(parent, data, engine, threads):
    """Mutant: the block in which a write ends is written twice, or not at all."""
    draw = random.Random(f"{engine} {threads}")
    with fastckpt.open_write(parent / "file", io=fastckpt.IO(engine, threads=threads)) as file:
        at = 0
        while at < len(data):
            size = min(draw.choice([0, 1, 4095, 4096, 100_000, BLOCK - 1, BLOCK, 2 * BLOCK + 5]), len(data) - at)
            assert file.tell() == at
            assert file.write(memoryview(data)[at : at + size]) == size
            at += size
    assert (parent / "file").read_bytes() == data
    with fastckpt.open_read(parent / "file") as file:
        assert file.read() == data
    assert names(parent) == ["file"]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1])
def test_every_length(parent, data, nbytes):
    write(parent / "file", data[:nbytes])
    assert (parent / "file").read_bytes() == data[:nbytes]
    assert (parent / "file").stat().st_blocks * 512 <= nbytes + BLOCK, "the close frees space that was allocated ahead"
    fastckpt.open_read(parent / "file").close()


def test_memory_may_change_once_a_write_returns(parent, data):
    """Mutant: a write returns before the threads have copied its bytes."""
    memory = bytearray(data)
    with fastckpt.open_write(parent / "file", io=fastckpt.IO(threads=1)) as file:
        file.write(memory)
        memory[:] = bytes(len(memory))
    assert (parent / "file").read_bytes() == data


def test_all_that_has_bytes(parent):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    with fastckpt.open_write(parent / "file") as file:
        file.writelines([b"one", bytearray(b"two"), array, array.T, array[:, ::2]])
        with pytest.raises(TypeError, match="bytes-like"):
            file.write("text")
    expected = b"onetwo" + array.tobytes() + array.T.tobytes() + array[:, ::2].tobytes()
    assert (parent / "file").read_bytes() == expected


def test_it_is_a_file_object_that_cannot_seek(parent):
    with fastckpt.open_write(parent / "file") as file:
        assert (file.writable(), file.readable(), file.seekable(), file.mode) == (True, False, False, "wb")
        for call in (lambda: file.seek(0), file.fileno, file.read):
            with pytest.raises(io.UnsupportedOperation):
                call()
        np.savez(file, a=np.arange(5))
    with zipfile.ZipFile(parent / "file") as archive:
        assert archive.testzip() is None
    assert np.load(parent / "file")["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_limit_of_the_bandwidth_holds(parent, data):
    with fastckpt.open_write(parent / "file", io=fastckpt.IO(bandwidth_limit="500MB")) as file:
        file.write(data)
    assert (parent / "file").read_bytes() == data


def test_memory_is_the_callers_again_once_a_write_returns(parent, data):
    """Mutant: a block keeps a view of the caller's memory."""
    memory = bytearray(data)
    with fastckpt.open_write(parent / "file") as file:
        file.write(memory)
        memory.clear()
    assert (parent / "file").read_bytes() == data


# --- whole or not at all -------------------------------------------------------------------------------------------


def test_the_path_stays_as_it_is_until_the_file_is_closed(parent, data):
    path = parent / "file"
    path.write_text("old")
    path.chmod(0o640)
    with fastckpt.open_write(path) as file:
        file.write(data)
        assert path.read_text() == "old"
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "the new file has the mode of the replaced file"
    with contextlib.suppress(ZeroDivisionError), fastckpt.open_write(path) as file:
        file.write(data + data)
        raise ZeroDivisionError
    file = fastckpt.open_write(path)
    file.write(b"new")
    file.discard()
    for call in (file.close, file.discard):
        call()  # a second call does nothing
    assert path.read_bytes() == data
    assert names(parent) == ["file"]
    with pytest.raises(ValueError, match="closed"):
        file.write(b"late")


def test_nobody_sees_more_of_a_file_while_it_is_replaced(parent):
    path = parent / "file"
    path.touch()
    path.chmod(0o4640)
    with fastckpt.open_write(path) as file:
        file.write(b"secret")
        (hidden,) = parent.glob(".*")
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o640, "the setuid bit is cleared, as by any write"


@pytest.mark.root
def test_the_group_stays(parent):
    """The file gets the group of a setgid directory, or that of the file it replaces."""
    needs.root()
    os.chown(parent, -1, 1234)
    parent.chmod(0o2775)
    for number in range(2):
        write(parent / "file", b"%d" % number)
        assert (parent / "file").stat().st_gid == 1234
    os.chown(parent / "file", -1, 4321)
    write(parent / "file", b"more")
    assert (parent / "file").stat().st_gid == 4321


@pytest.mark.root
def test_a_write_protected_file_stays(children):
    needs.root()
    with mounts.public_directory() as directory:
        path = directory / "file"
        path.write_text("old")
        os.chown(path, 65534, 65534)
        path.chmod(0o444)
        child = children.start("write_file", path=str(path), fill=1, nbytes=5, user=True)
        child.next()
        child.go()
        end = child.outcome()
        assert isinstance(end, zygote.Raised)
        assert (end.kind, end.errno) == ("PermissionError", errno.EACCES)
        assert path.read_text() == "old"
        assert names(directory) == ["file"]


def test_a_write_that_fails_is_the_end_of_the_file(parent, data, monkeypatch):
    """Mutant: a program that ignores the error closes a file with a hole."""
    file = fastckpt.open_write(parent / "file")
    real = np.copyto

    def fail(*args):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(np, "copyto", fail)
    with pytest.raises(KeyboardInterrupt):
        file.write(data)
    monkeypatch.undo()
    for call in (lambda: file.write(b"more"), file.close):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert names(parent) == []
    file.close()  # a second call does nothing


@pytest.mark.parametrize("message", ["can't start new thread", "cannot schedule new futures after shutdown"])
def test_without_threads_the_caller_writes(parent, data, monkeypatch, message):
    """No thread can start while the interpreter exits. Mutant: a block still queued is written twice, or never."""
    queued = []

    def submit(pool, *call):
        if message.startswith("can't"):
            queued.append(call)
        raise RuntimeError(message)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with fastckpt.open_write(parent / "file", io=fastckpt.IO(threads=1)) as file:
        file.write(data)
        for move, block in queued:
            move(block)
    assert (parent / "file").read_bytes() == data
    fastckpt.open_read(parent / "file").close()


def test_a_file_is_written_while_the_interpreter_ends(parent):
    program = """
import atexit, sys, fastckpt

def late():
    with fastckpt.open_write(sys.argv[1]) as file:
        file.write(bytes(20_000_000))
    fastckpt.open_read(sys.argv[1]).close()

atexit.register(late)
fastckpt.open_write(sys.argv[1]).discard()
"""
    subprocess.run([sys.executable, "-c", program, parent / "file"], check=True, timeout=60)
    assert (parent / "file").stat().st_size == 20_000_000


def test_a_discard_ends_a_write(parent, data):
    """A thread or a signal handler discards the file. Mutant: the write waits for blocks that no thread copies."""
    for nbytes in (3 << 16, len(data)):  # as many blocks as fit into memory, and more
        file = fastckpt.open_write(parent / "file", io=fastckpt.IO(threads=1, bandwidth_limit="100kB"))
        ended = []

        def work(file=file, nbytes=nbytes, ended=ended):
            with pytest.raises(ValueError, match="was discarded"):
                file.write(data[:nbytes])
            ended.append(True)

        writer = threading.Thread(target=work, daemon=True)
        writer.start()
        time.sleep(0.3)
        file.discard()
        writer.join(30)
        assert ended == [True]
    assert names(parent) == []


def test_a_new_file_has_the_mode_of_others(parent):
    write(parent / "file", b"new")
    (parent / "other").touch()
    assert (parent / "file").stat().st_mode == (parent / "other").stat().st_mode


def test_a_file_that_nobody_closes_is_nothing_and_says_so(parent):
    for nbytes in (3, 3 * BLOCK):
        with pytest.warns(RuntimeWarning, match="was not closed") as caught:  # noqa: PT031 - once it warns
            fastckpt.open_write(parent / "file").write(bytes(nbytes))
            while not caught:  # the last block may be in flight
                time.sleep(0.01)
        while names(parent):
            time.sleep(0.01)


def test_where_it_lies(parent):
    write(parent / "a" / "b" / "file", b"deep")
    assert (parent / "a" / "b" / "file").read_bytes() == b"deep"
    (parent / "link").symlink_to("a/b/file")
    write(parent / "link", b"followed")
    assert (parent / "link").is_symlink()
    assert (parent / "a" / "b" / "file").read_bytes() == b"followed"
    (parent / "a" / "c").mkdir()
    (parent / "up").symlink_to("a/c")
    write(parent / "up" / ".." / "b" / "file", b"above what it points to")
    assert (parent / "a" / "b" / "file").read_bytes() == b"above what it points to"
    fastckpt.open_read(f"{parent}/up/../b/file").close()
    (parent / "up").unlink()
    os.mkfifo(parent / "pipe")
    for name, why in (("a", "a directory"), ("pipe", "not a regular file")):
        with pytest.raises(FileExistsError, match=why):
            fastckpt.open_write(parent / name)
    with pytest.raises(ValueError, match="URL"):
        fastckpt.open_write("s3://bucket/file")
    with pytest.raises(FileNotFoundError):
        fastckpt.open_read(parent / "nothing")
    assert names(parent) == ["a", "link", "pipe"]


def test_the_environment_has_its_engine(parent, monkeypatch):
    monkeypatch.setenv("FASTCKPT_IO", "bufered")
    with pytest.raises(ValueError, match=r"FASTCKPT_IO: io must be one of .*, not 'bufered'"):
        fastckpt.open_write(parent / "file")
    fastckpt.open_write(parent / "file", io="threads").discard()


def test_a_child_of_the_process_writes_nothing_of_it(parent):
    with fastckpt.open_write(parent / "file") as file:
        file.write(b"mine")
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(ValueError):
                file.write(b"theirs")
                code = 2
            del file
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (parent / "file").read_bytes() == b"mine"
    assert names(parent) == ["file"]


@pytest.mark.root
def test_a_full_disk_is_an_error_and_the_old_file_stands(data):
    with mounts.mount("ext4") as point:
        write(point / "file", b"old")
        with pytest.raises(OSError, match="No space left") as raised:
            write(point / "file", data * 3)
        assert raised.value.errno == errno.ENOSPC
        assert (point / "file").read_bytes() == b"old"
        assert [name for name in names(point) if name != "lost+found"] == ["file"]
        # The file fits, although the preallocation would not.
        write(point / "file", data[:BLOCK])
        assert (point / "file").read_bytes() == data[:BLOCK]


def test_the_order_of_durability(children, parent, tmp_path):
    """Mutants: the file is not synced, or only after the rename; its directory is not synced."""
    path = parent / "file"
    child = children.start("write_file", path=str(path), fill=1, nbytes=2 * BLOCK + 5)
    child.next()
    with strace.attached(child.pid, tmp_path / "log", "pwrite64,pwritev2,fdatasync,fsync,renameat") as trace:
        child.go()
        assert child.outcome() is None
        calls = trace.calls()
    named = next(call for call in calls if call.name == "renameat" and call.ok)
    written, given = named.paths()
    assert given == str(path)
    writes = [call for call in calls if call.name.startswith("pwrite") and call.fd_paths() == [written]]
    syncs = [call for call in calls if call.name == "fdatasync" and call.fd_paths() == [written]]
    assert len(writes) >= 3
    assert max(call.end for call in writes) < syncs[-1].start <= syncs[-1].end < named.start
    assert any(call.fd_paths() == [str(parent)] and call.start > named.end for call in calls if call.name == "fsync")


def test_killed_at_every_call(children, parent, tmp_path):
    """Mutant: the file has its final name while it is being written."""
    path = parent / "file"
    write(path, bytes([0]) * BLOCK)
    kills = {}
    old = 0
    for call in (
        "mkdirat",
        "openat",
        "fallocate",
        "pwrite64",
        "ftruncate",
        "fdatasync",
        "renameat",
        "fsync",
        "unlinkat",
    ):
        for when in itertools.count(1, one_in(2)):
            child = children.start("write_file", path=str(path), fill=old + 1, nbytes=2 * BLOCK, io="threads")
            child.next()
            with strace.attached(child.pid, tmp_path / "log", call, strace.injection(call, "signal=SIGKILL", when)):
                child.go()
                try:
                    killed = child.outcome() is not None
                except zygote.DiedError:
                    killed = True
            found = set(path.read_bytes())
            assert found in ({old}, {old + 1}) if killed else found == {old + 1}, (call, when)
            (old,) = found
            fastckpt.open_read(path).close()
            if not killed:
                assert names(parent) == ["file"], "a later write removes the leftovers of killed ones"
                break
            kills[call] = when
    assert {"openat", "pwrite64", "fdatasync", "renameat", "fsync"} <= kills.keys(), kills


def test_a_killed_one_is_a_leftover_that_clean_knows(children, parent, tmp_path):
    child = children.start("write_file", path=str(parent / "file"), fill=1, nbytes=BLOCK)
    child.next()
    with strace.stopping(child.pid, tmp_path / "log", "fdatasync") as stop:
        child.go()
        stop.wait()
        child.signal(signal.SIGKILL)
    child.wait()
    (left,) = fastckpt.clean(parent, dry_run=False)
    assert left.checkpoint == "file"
    assert names(parent) == []


# --- the checksum --------------------------------------------------------------------------------------------------


def test_damage_is_found(parent, data):
    path = parent / "file"
    for nbytes in (len(data), 1):
        write(path, data[:nbytes])
        for at in {0, nbytes // 2, nbytes - 1}:
            rot(path, at)
            with pytest.raises(fastckpt.CorruptCheckpointError, match=f"{path} is damaged"):
                fastckpt.open_read(path)
            with fastckpt.open_read(path, verify=False) as file:
                assert file.read() != data[:nbytes]
            rot(path, at)
            fastckpt.open_read(path).close()


def test_another_writer_makes_the_checksum_void(parent):
    path = parent / "file"
    write(path, b"ours")
    about = path.stat()
    for content in (b"theirs", b"Ours"):
        path.write_bytes(content)
        if len(content) == len(b"ours"):
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
        assert os.getxattr(path, CHECKSUM), "the checksum stays with the file"
        with fastckpt.open_read(path) as file:
            assert file.read() == content
    os.setxattr(path, CHECKSUM, b"nonsense")
    fastckpt.open_read(path).close()


@pytest.mark.root
def test_a_file_system_without_attributes_keeps_no_checksum():
    with mounts.mount("ramfs") as point:
        write(point / "file", b"ours")
        with pytest.raises(OSError, match="not supported"):
            os.getxattr(point / "file", CHECKSUM)
        with fastckpt.open_read(point / "file") as file:
            assert file.read() == b"ours"
