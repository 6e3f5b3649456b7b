"""Tests of the harness: a check that cannot fail proves nothing."""

import errno
import json
import subprocess
import sys

import numpy as np
import pytest

from harness import manifest, seccomp, strace
from harness.zygote import TESTS


@pytest.mark.parametrize("crc64", [manifest.crc64, manifest.crc64_by_definition])
def test_crc_is_the_one_of_the_document(crc64):
    assert crc64(b"123456789") == 0xAE8B14860A799888
    assert crc64(b"6789", crc64(b"12345")) == 0xAE8B14860A799888
    assert crc64(b"") == 0


@pytest.mark.parametrize("size", [manifest.MUCH - 1, manifest.MUCH, manifest.MUCH + 1, 5 * manifest.MUCH + 3])
def test_crc_of_much_is_the_one_by_definition(size):
    data = np.random.default_rng(size).bytes(size)
    assert manifest._library is not None
    assert manifest.crc64(data) == manifest.crc64_by_definition(data)
    for before in (b"", b"12345", data):
        assert manifest.crc64(data, manifest.crc64_by_definition(before)) == manifest.crc64_by_definition(before + data)


def test_prefix_is_the_first_line():
    assert manifest.seal({}).index(b"\n") + 1 == manifest.PREFIX


@pytest.fixture
def checkpoint(tmp_path):
    data = np.arange(3000, dtype="<f4")
    manifest.minimal(
        tmp_path / "c", [("a", "F32", [3000], data.tobytes()), ("b", "U8", [3], b"xyz"), ("e", "U8", [0], b"")]
    )
    return tmp_path / "c"


def test_oracle_reads_what_was_forged(checkpoint):
    stored = manifest.read(checkpoint)
    assert stored["b"].data == b"xyz"
    assert stored["a"].offset == 4096


@pytest.mark.parametrize("name", [manifest.NAME, "model.safetensors"])
def test_oracle_sees_every_flipped_bit(checkpoint, name):
    raw = (checkpoint / name).read_bytes()
    for at in {0, 9, 20, 45, 46, len(raw) // 3, 4095, 4096, len(raw) - 2, len(raw) - 1} & set(range(len(raw))):
        changed = bytearray(raw)
        changed[at] ^= 1
        (checkpoint / name).write_bytes(changed)
        with pytest.raises((manifest.WrongError, ValueError)):
            manifest.read(checkpoint)
    (checkpoint / name).write_bytes(raw)
    manifest.read(checkpoint)


@pytest.mark.parametrize("member", ["shard", "offset", "shape", "dtype", "crc", "name"])
def test_oracle_sees_every_wrong_member(checkpoint, member):
    body = manifest.body_of(checkpoint)
    wrong = {"shard": 1, "offset": 4100, "shape": [2999], "dtype": "F64", "crc": "0" * 64, "name": "c"}[member]
    body["tensors"][0][member] = wrong
    manifest.forge(checkpoint, body)
    with pytest.raises((manifest.WrongError, IndexError)):
        manifest.read(checkpoint)


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS"])
def test_seccomp_really_blocks_io_uring_and_nothing_else(name):
    program = "from harness import seccomp; import os; os.sync(); print(seccomp.setup_errno())"
    command = [sys.executable, "-m", "harness.seccomp", name, "--", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    assert int(done.stdout) == getattr(errno, name)


def test_io_uring_works_without_the_filter():
    # Otherwise every test of the ring would silently test the fallback.
    assert seccomp.setup_errno() == 0


def test_strace_lines_are_put_together_in_order():
    text = """\
10 openat(AT_FDCWD</tmp/x>, "a b", O_RDONLY|O_CLOEXEC) = 5</tmp/x/a b>
10 fsync(5</tmp/x/a b> <unfinished ...>
11 fdatasync(6</tmp/y>)                 = -1 EIO (Input/output error) (INJECTED)
10 <... fsync resumed>)                 = 0
10 renameat2(7</tmp>, ".t", 7</tmp>, "n", RENAME_NOREPLACE) = 0
11 +++ exited with 0 +++
"""
    calls = strace.parse(text)
    assert [call.name for call in calls] == ["openat", "fdatasync", "fsync", "renameat2"]
    opened, failed, synced, renamed = calls
    assert opened.opened() == "/tmp/x/a b"
    assert opened.paths() == ["/tmp/x/a b"]
    assert failed.injected
    assert not failed.ok
    assert synced.ok
    assert synced.start < failed.end < synced.end
    assert synced.fd_paths() == ["/tmp/x/a b"]
    assert renamed.paths() == ["/tmp/.t", "/tmp/n"]


def test_forged_manifest_is_json(checkpoint):
    assert json.loads((checkpoint / manifest.NAME).read_bytes())["fastckpt"] == 1
