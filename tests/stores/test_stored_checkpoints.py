"""Checkpoints in an object store: loaded, opened, verified, listed and removed."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError
from fastckpt._stores import checkpoints, files
from fastckpt._stores.objects import PART, Objects
from fastckpt.exceptions import NotACheckpointError
from harness import cli, manifest
from harness import s3 as harness
from harness.reports import with_report
from harness.same import same


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "step-00000007"
    dice = torch.Generator().manual_seed(0)
    tied = torch.randn(700, 300, generator=dice)
    state = {
        "model": {"w": torch.randn(3000, 1100, generator=dice), "tied": tied, "b": torch.randn(7, generator=dice)},
        "head": tied,
        "small": [torch.full((number,), number) for number in range(40)],
        "half": torch.randn(1 << 20, generator=dice).bfloat16(),
        "array": np.arange(1_200_000),
        "step": 7,
    }
    fastckpt.save(state, path, metadata={"metrics": {"loss": 0.5}}, files=fastckpt.Files(shard_size=12_000_000))
    return path, state


@pytest.fixture
def run():
    """A URL below which a test may write objects."""
    return f"memory://{uuid.uuid4()}/run"


@pytest.fixture
def url(run, saved):
    harness.put(saved[0], f"{run}/step-00000007")
    return f"{run}/step-00000007"


def objects_at(url):
    return Objects.at("test", url)


def changed(url, name, change):
    """Change the content of an object, and write it without a checksum."""
    objects = objects_at(url)
    content = bytearray(objects.read_all(name, 1 << 30))
    change(content)
    objects.write(name, [content], len(content), None)


def shards_of(url):
    return [name for name in objects_at(url).sizes() if name.endswith(".safetensors")]


def test_all_that_a_load_can_do(url, saved, monkeypatch):
    _, state = saved
    loaded = with_report(fastckpt.load, url)
    same(loaded.state, state)
    assert loaded.state["head"] is loaded.state["model"]["tied"]
    report = loaded.report
    assert report.path == url
    assert report.engine == "buffered"
    assert set(report.paths) == {"buffered: object store"}
    assert report.shards == len(shards_of(url)) > 1
    into = {"w": torch.zeros(3000, 1100), "tied": torch.zeros(700, 300), "b": torch.zeros(7)}
    given = into["w"]
    fastckpt.load(url, into={"model": into}, keys="model.*")
    assert torch.equal(given, state["model"]["w"])
    assert fastckpt.load(url, keys="step", io=fastckpt.IO(verify=False)) == {"step": 7}
    assert fastckpt.load(url, keys="half", dtype="float32")["half"].dtype == torch.float32
    assert with_report(fastckpt.load, url, io="uring", threads=1, keys="model").report.fallback == (
        "an object store is read over the network"
    )
    assert isinstance(fastckpt.load(url, framework="numpy", keys="head")["head"], np.ndarray)
    with pytest.raises(OSError, match=r'direct I/O.*over the network.*use io="auto"') as caught:
        fastckpt.load(url, io="direct")
    assert caught.value.errno == errno.EINVAL
    monkeypatch.setenv("FASTCKPT_IO", "direct")  # the variable applies only to disks
    assert fastckpt.verify(url).ok


def test_single_tensors_and_parts_of_them(url, saved):
    _, state = saved
    with fastckpt.open(url) as checkpoint:
        assert checkpoint.path == url
        assert checkpoint.metadata == {"metrics": {"loss": 0.5}}
        assert torch.equal(checkpoint["model.w"], state["model"]["w"])
        part = checkpoint.tensor("model.w")[(slice(5, 2000, 7), slice(None, None, -3))]
        assert torch.equal(part, state["model"]["w"][5:2000:7].flip(1)[:, ::3])
        assert checkpoint.tensor("array")[77] == 77
        assert checkpoint.report.bytes == 8


def test_small_ranges_are_read_together_and_large_ones_in_parts(url, saved, monkeypatch):
    asked = []
    read = Objects.read

    def noted(self, name, start, length):
        asked.append((name, length))
        return read(self, name, start, length)

    monkeypatch.setattr(Objects, "read", noted)
    fastckpt.load(url, io=fastckpt.IO(verify=False))
    # A request may get more than a block of the format, but no more than the largest request.
    assert 4 << 20 < max(length for _, length in asked) <= PART
    total = sum(length for _, length in asked)
    assert len(asked) <= total // PART + 3 * len(shards_of(url))
    assert total < sum(path.stat().st_size for path in saved[0].rglob("*")) + (1 << 20)


def test_no_more_than_so_much_is_on_its_way(run, tmp_path, monkeypatch):
    """The memory of requests is limited, unless the caller gives a number of threads."""
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(64 << 20))
    state = {"large": np.zeros(64 << 20, np.uint8), **{f"{number}": np.ones(5000) for number in range(20)}}
    fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(shard_size=10_000))
    harness.put(tmp_path / "c", f"{run}/c")
    assert with_report(fastckpt.load, f"{run}/c", keys="?*", exclude="large").report.threads == 16
    assert 1 < with_report(fastckpt.load, f"{run}/c").report.threads <= 4
    assert with_report(fastckpt.load, f"{run}/c", io=fastckpt.IO(threads=9)).report.threads == 9
    with pytest.raises(ValueError, match="staging"):
        fastckpt.load(f"{run}/c", io=fastckpt.IO(threads=9, staging="128MiB"))


def test_verify_finds_what_is_wrong(url):
    assert fastckpt.verify(url).ok
    first, second, *_ = shards_of(url)

    def flip(content):
        content[len(content) // 2] ^= 1

    changed(url, first, flip)
    report = fastckpt.verify(url)
    assert [one.file for one in report.damage] == [first]
    with pytest.raises(CorruptCheckpointError, match=f"`{url}/{first}`: bytes .* checksum is"):
        fastckpt.load(url)
    changed(url, first, flip)
    changed(url, second, lambda content: content.__delitem__(slice(-1000, None)))
    assert {one.file for one in fastckpt.verify(url).damage} == {second}
    with pytest.raises(CorruptCheckpointError, match=f"`{url}/{second}`: it has .* bytes, expected"):
        fastckpt.load(url)
    objects_at(url).remove([second])
    assert "missing" in str(fastckpt.verify(url).damage[0])
    with pytest.raises(CorruptCheckpointError, match=f"`{url}/{second}`: the file is missing"):
        fastckpt.load(url)
    (listed,) = fastckpt.list(url.rpartition("/")[0])
    assert listed.damage == f"shard `{second}` cannot be found"


def test_an_object_that_became_shorter_since_it_was_listed(url):
    checkpoint = fastckpt.open(url)
    name = checkpoint.info("array").shard
    assert checkpoint.tensor("array")[0] == 0
    changed(url, name, lambda content: content.__delitem__(slice(content.__len__() // 2, None)))
    with pytest.raises(CorruptCheckpointError, match="too short"):
        checkpoint["array"]


@pytest.mark.parametrize("forgery", ["another file", "outside", "cover", "garbage", "large"])
def test_a_manifest_is_not_trusted(url, saved, tmp_path, forgery, monkeypatch):
    import shutil

    shutil.copytree(saved[0], tmp_path / "c")
    if forgery == "garbage":
        (tmp_path / "c" / "fastckpt.json").write_bytes(b'{"fastckpt":1,"crc64nvme":"0000000000000000",\n' + b"[" * 99)
    elif forgery == "large":
        monkeypatch.setattr(files, "MAX_MANIFEST", 1000)
    else:
        body = manifest.body_of(tmp_path / "c")
        if forgery == "another file":
            body["shards"][0]["file"] = "../other/model.safetensors"
        elif forgery == "outside":
            body["tensors"][0]["offset"] = 1 << 50
        else:
            body["tensors"][1]["offset"] = body["tensors"][0]["offset"]
        manifest.forge(tmp_path / "c", body)
    content = (tmp_path / "c" / "fastckpt.json").read_bytes()
    objects_at(url).write("fastckpt.json", [content], len(content), None)
    for call in (fastckpt.load, fastckpt.open, fastckpt.verify):
        with pytest.raises(CorruptCheckpointError, match=f"{url}/fastckpt.json"):
            call(url)


def test_what_is_no_checkpoint(run, url):
    for call in (fastckpt.load, fastckpt.open, fastckpt.verify):
        with pytest.raises(NotACheckpointError, match="below it are step-00000007: give the URL of a checkpoint"):
            call(run)
        with pytest.raises(FileNotFoundError, match=f"`{run}/nothing`: nothing is there"):
            call(f"{run}/nothing")
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        fastckpt.list(f"{run}/nothing")
    with pytest.raises(FileNotFoundError, match="nothing is there"):
        fastckpt.remove(f"{run}/nothing")


def test_a_checkpoint_that_is_replaced_while_it_is_read(url, saved, tmp_path, monkeypatch):
    other = {"model": {"w": torch.ones(5)}}
    fastckpt.save(other, tmp_path / "other")
    read = Objects.read
    once = threading.Lock()

    def replaced_first(self, name, start, length):
        if name.endswith(".safetensors") and once.acquire(blocking=False):
            objects = objects_at(url)
            objects.remove(objects.sizes())
            harness.put(tmp_path / "other", url)
        return read(self, name, start, length)

    with fastckpt.open(url) as opened:
        monkeypatch.setattr(Objects, "read", replaced_first)
        same(fastckpt.load(url), other)
        with pytest.raises(fastckpt.exceptions.ReplacedCheckpointError):
            opened["model.w"]
    harness.put(saved[0], url)
    once.release()
    assert fastckpt.verify(url).ok
    assert once.locked()
    same(fastckpt.load(url), other)


@pytest.fixture
def answer(monkeypatch):
    """Makes a function answer all reads of tensors, except those of headers, in place of the store."""
    read = Objects.read

    def set_to(function):
        def answered(self, name, start, length):
            is_data = name.endswith(".safetensors") and start
            return function(lambda: read(self, name, start, length)) if is_data else read(self, name, start, length)

        monkeypatch.setattr(Objects, "read", answered)

    return set_to


def test_a_network_that_fails_is_no_damage(url, answer):
    """The client's exception is raised unchanged, as the same object."""
    failure = type("OddError", (Exception,), {})("the network is down")

    def fail(_):
        raise failure

    answer(fail)
    for call in (fastckpt.load, fastckpt.verify):
        with pytest.raises(type(failure)) as caught:
            call(url)
        assert caught.value is failure


def test_an_answer_that_is_short_is_damage(url, answer):
    answer(lambda read: bytes(read())[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"`{url}/.*too short"):
        fastckpt.load(url)
    assert {one.file for one in fastckpt.verify(url).damage} == set(shards_of(url))


def test_an_address_of_nothing_is_an_answer_of_nothing(url, monkeypatch):
    monkeypatch.setattr(files.StoredFiles, "read", lambda _self, _name, _start, nbytes: (0, nbytes, None))
    with pytest.raises(CorruptCheckpointError, match=f"`{url}/.*"):
        fastckpt.load(url)


def test_an_object_that_is_gone_since_it_was_listed_is_missing(url, answer):
    def gone(_):
        raise FileNotFoundError(errno.ENOENT, "cannot read it: there is no such object", "it")

    answer(gone)
    report = fastckpt.verify(url)
    assert {one.file for one in report.damage} == set(shards_of(url))
    assert all("FileNotFoundError" not in one.reason for one in report.damage)


def test_a_load_can_be_interrupted(url, answer):
    """An interrupted load ends when the requests in flight have ended."""
    answered, asked = threading.Event(), []

    class RungError(Exception):
        pass

    def ring(*_):
        # Otherwise the worker would begin another request before the load notices the signal.
        threading.Timer(0.5, answered.set).start()
        raise RungError

    def wait(read):
        asked.append(None)
        answered.wait(60)
        return read()

    answer(wait)
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(RungError):
            fastckpt.load(url, io=fastckpt.IO(threads=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(asked) == 1


def test_what_a_signal_raises_is_not_lost(url, monkeypatch):
    """A handler may run wherever the core calls Python, even when it only gets a file's name, and cannot raise."""
    rung = []

    def ring(_, name):
        rung.append(name)
        raise InterruptedError

    monkeypatch.setattr(files.StoredFiles, "path_of", ring)
    for call in (fastckpt.load, fastckpt.verify):
        with contextlib.suppress(InterruptedError):
            call(url)
            assert not rung
        rung.clear()


def test_listing(run, saved):
    for step in (3, 20, 100):
        harness.put(saved[0], f"{run}/step-{step}")
    content = b"{}"
    objects_at(f"{run}/notes").write("todo.txt", [content], 2, None)
    objects_at(f"{run}/deep/step-1").write("fastckpt.json", [content], 2, None)
    objects_at(f"{run}/bad").write("fastckpt.json", [content], 2, None)
    bad, *good = fastckpt.list(run)
    assert bad.name == "bad"
    assert "does not begin as a manifest" in bad.damage
    assert [one.name for one in good] == ["step-3", "step-20", "step-100"]
    (local,) = fastckpt.list(saved[0].parent)
    for one in good:
        assert (one.path, one.bytes, one.damage) == (f"{run}/{one.name}", local.bytes, None)
        assert one.created == pytest.approx(local.created)
        assert not one.aside


def test_removal(run, url, monkeypatch):
    objects = objects_at(url)
    objects.write("config.json", [b"{}"], 2, None)
    with pytest.raises(OSError, match=r"holds `config\.json`.*force=True") as caught:
        fastckpt.remove(url)
    assert caught.value.errno == errno.ENOTEMPTY
    assert fastckpt.verify(url).ok
    removals = []
    remove = Objects.remove

    def noted(self, names):
        removals.append(list(names))
        remove(self, removals[-1])

    monkeypatch.setattr(Objects, "remove", noted)
    fastckpt.remove(url, force=True)
    assert removals[0] == ["fastckpt.json"]
    assert objects_at(run).sizes() == {}


@pytest.mark.parametrize(
    ("beside", "stays"), [("notes.txt", ["notes.txt"]), ("__0_0.distcp", [".metadata", "__0_0.distcp"])]
)
def test_torchs_file_goes_unless_it_lists_files_of_torchs_own_writer(url, beside, stays):
    """Mutants: ``.metadata`` always stays; it is always removed; that in the folder of the save stays."""
    for name in (".metadata", "0123456789abcdef/.metadata", beside):
        objects_at(url).write(name, [b"1"], 1, None)
    assert sorted(checkpoints.remove(url, force=False, leave=True)) == stays
    assert sorted(objects_at(url).sizes()) == stays


def test_a_removal_that_was_killed_is_finished_and_nothing_else_is_taken_for_one(run, url):
    objects_at(url).remove(["fastckpt.json"])
    fastckpt.remove(url)
    assert objects_at(run).sizes() == {}
    # A model of another program may have these names, too.
    objects_at(f"{run}/model").write("model.safetensors", [b"1"], 1, None)
    objects_at(f"{run}/deep").write("model.safetensors", [b"1"], 1, "0" * 16)
    objects_at(f"{run}/deep").write("x/model.safetensors", [b"1"], 1, "0" * 16)
    for name in ("model", "deep"):
        with pytest.raises(OSError, match=f"`{run}/{name}`") as caught:
            fastckpt.remove(f"{run}/{name}", force=True)
        assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(OSError, match=r"no fastckpt\.json"):
        fastckpt.remove(run, force=True)
    assert len(objects_at(run).sizes()) == 3


def test_on_s3(s3, saved):
    path, state = saved
    url = "s3://bucket/run/step-00000007"
    harness.put(path, url)
    same(fastckpt.load(url), state)
    assert fastckpt.verify(url).ok
    assert [one.path for one in fastckpt.list("s3://bucket/run")] == [url]
    shard = shards_of(url)[-1]
    changed(url, shard, lambda content: content.__setitem__(-1, content[-1] ^ 1))
    with pytest.raises(CorruptCheckpointError, match=shard):
        fastckpt.load(url)
    s3.refuse = lambda _, path: "403 Access Denied" if path.endswith(shard) else None
    with pytest.raises(PermissionError, match=shard):
        fastckpt.load(url)
    s3.forget()
    fastckpt.remove(url)
    with pytest.raises(FileNotFoundError):
        fastckpt.load(url)


def test_the_states_of_ranks(run, tmp_path):
    with pytest.raises(FileNotFoundError):
        fastckpt.distributed.load_per_rank(f"{run}/nothing", rank=0)
    fastckpt.distributed.save({"w": torch.ones(3)}, tmp_path / "c", per_rank={"rank": 0, "t": torch.arange(4)})
    harness.put(tmp_path / "c", f"{run}/c")
    same(fastckpt.distributed.load_per_rank(f"{run}/c", rank=0), {"rank": 0, "t": torch.arange(4)})


def test_the_command_line(run, url, saved, capsys, tmp_path):
    def said(*arguments, status=0):
        assert cli.main([*arguments, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    assert said("info", url)["path"] == url
    assert said("ls", url, "model.*")["path"] == url
    assert said("verify", url)["ok"]
    assert said("diff", str(saved[0]), url)["changed"] == []
    assert [one["name"] for one in said("ls", run)["checkpoints"]] == ["step-00000007"]
    assert said("verify", "--all", run)["ok"]
    found = said("ls", run, "--name", "step-{step:08d}")
    ((one,), total) = found["checkpoints"], found["bytes"]
    assert (one["step"], one["path"], one["metrics"], one["bytes"]) == (7, url, {"loss": 0.5}, total)
    assert cli.main(["ls", run]) == 0
    assert "1 checkpoint" in capsys.readouterr().out
    assert said("ls", run, "--name", "other-{step}")["checkpoints"] == []
    assert "--keep" in said("ls", run, "--keep", "last=3", status=2)["error"]
    assert "format" in said("ls", run, "--name", "{nothing}", status=2)["error"]
    assert f"{run}/x" in said("info", f"{run}/x", status=2)["error"]
    assert "is a URL" in said("prune", run, status=2)["error"]
    assert "is a URL" in said("clean", run, status=2)["error"]
    local = Path(saved[0])
    assert said("ls", f"file://{local.parent}", "--keep", "last=1")["path"] == str(local.parent)
    assert said("copy", f"file://{local}", f"file://{tmp_path}/b")["target"] == f"{tmp_path}/b"
    assert "another machine" in said("info", f"file://host{local}", status=2)["error"]
    changed(url, shards_of(url)[0], lambda content: content.__setitem__(-1, content[-1] ^ 1))
    assert not said("verify", url, status=1)["ok"]
