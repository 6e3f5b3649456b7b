"""``fastckpt.copy`` to, from and between object stores: in memory, where every step can be stopped at."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from copies.conftest import value_at
from fastckpt._copy import objects as to_objects
from fastckpt._copy import shares
from fastckpt._copy.copy import copy_checkpoint
from fastckpt._stores.objects import Objects

pytest.importorskip("obstore")

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
FILES = sorted(["config.json", "fastckpt.json", "model.safetensors.index.json", *SHARDS])
_stores = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    """A store of its own, and what is left in it at the end goes."""
    store = f"memory://copies-{os.getpid()}-{next(_stores)}"
    yield f"{store}/run"
    objects = Objects.at("test", store)
    objects.remove(objects.sizes())


def total(path: str) -> int:
    return sum(Path(path, file).stat().st_size for file in FILES if file != "fastckpt.json")


def spoil(place: str, file: str) -> None:
    """Change a byte of an object, whatever is noted of it."""
    objects = Objects.at("test", place)
    data = bytearray(objects.read_all(file, 1 << 30))
    data[100] ^= 1
    objects.write(file, [data], len(data), objects.sum_of(file))


def test_there_and_back_again(saved, tmp_path, url):
    source = saved("a", 1)
    report = fastckpt.copy(source, f"{url}/b")
    assert (report.bytes, report.reused_bytes, report.files) == (total(source), 0, 6)
    assert value_at(f"{url}/b") == 1
    assert sorted(Objects.at("test", f"{url}/b").sizes()) == FILES
    assert fastckpt.copy(source, f"{url}/b").was_there
    assert fastckpt.copy(f"{url}/b", f"{url}/c").bytes == total(source)
    assert value_at(f"{url}/c") == 1
    fastckpt.copy(f"{url}/c", tmp_path / "d")
    assert all(Path(tmp_path, "d", file).read_bytes() == Path(source, file).read_bytes() for file in FILES)
    with pytest.raises(ValueError, match="the same place"):
        fastckpt.copy(f"{url}/c", f"{url}/c/")
    with pytest.raises(FileNotFoundError):
        fastckpt.copy(f"{url}/none", tmp_path / "e")


def test_each_object_has_the_sum_of_its_file(saved, url):
    source = saved("a", 1)
    fastckpt.copy(source, f"{url}/b")
    objects = Objects.at("test", f"{url}/b")
    shards = fastckpt._core.Reader(source).shards()
    assert {one.file: objects.sum_of(one.file) for one in shards} == {one.file: one.crc for one in shards}
    assert all(objects.sum_of(file) for file in FILES)


@pytest.mark.parametrize("file", ["fastckpt.json", SHARDS[1]])
def test_damage_is_named_and_nothing_becomes_visible(saved, tmp_path, url, file):
    source = saved("a", 1)
    fastckpt.copy(source, f"{url}/b")
    spoil(f"{url}/b", file)
    for target in (str(tmp_path / "c"), f"{url}/c"):
        with pytest.raises(fastckpt.CorruptCheckpointError, match=f"{url}/b/{file}"):
            fastckpt.copy(f"{url}/b", target)
        assert visible(target) is None
    # A directory that is damaged, to a store.
    if file != "fastckpt.json":
        with Path(source, file).open("r+b") as shard:
            shard.seek(5000)
            shard.write(b"damage")
        with pytest.raises(fastckpt.CorruptCheckpointError, match=file):
            fastckpt.copy(source, f"{url}/d")
        assert "fastckpt.json" not in Objects.at("test", f"{url}/d").sizes()


def test_an_object_that_is_missing_is_damage(saved, tmp_path, url):
    fastckpt.copy(saved("a", 1), f"{url}/b")
    Objects.at("test", f"{url}/b").remove([SHARDS[2]])
    with pytest.raises(fastckpt.CorruptCheckpointError, match=SHARDS[2]):
        fastckpt.copy(f"{url}/b", tmp_path / "c")
    # The target holds the manifest and not all files: they are brought.
    assert fastckpt.copy(str(tmp_path / "a"), f"{url}/b").bytes == sum(
        Path(tmp_path, "a", file).stat().st_size for file in (SHARDS[2], "config.json", "model.safetensors.index.json")
    )
    assert value_at(f"{url}/b") == 1


def test_a_repair_takes_from_a_store_what_is_damaged_here(saved, tmp_path, url):
    source = saved("a", 1)
    fastckpt.copy(source, f"{url}/b")
    with Path(source, SHARDS[0]).open("r+b") as shard:
        shard.seek(5000)
        shard.write(b"damage")
    spoil(f"{url}/b", SHARDS[1])
    copied = copy_checkpoint([source, f"{url}/b"], source, overwrite=True)
    assert copied.bytes == Path(source, SHARDS[0]).stat().st_size
    assert value_at(source) == 1


def test_what_is_in_the_way_is_refused(saved, url):
    source = saved("a", 1)
    fastckpt.copy(saved("c", 2), f"{url}/b")
    with pytest.raises(FileExistsError, match="overwrite=False"):
        fastckpt.copy(source, f"{url}/b")
    with pytest.raises(FileExistsError, match="it holds `b/`"):
        fastckpt.copy(source, url, overwrite=True)
    Objects.at("test", f"{url}/weights").write("model.safetensors", [b"mine"], 4, None)
    with pytest.raises(FileExistsError, match="not a checkpoint of fastckpt"):
        fastckpt.copy(source, f"{url}/weights", overwrite=True)
    Objects.at("test", f"{url}/notes").write("notes.txt", [b"mine"], 4, None)
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        fastckpt.copy(source, f"{url}/notes")
    fastckpt.copy(source, f"{url}/notes", overwrite=True)
    assert Objects.at("test", f"{url}/notes").read_all("notes.txt", 9) == b"mine"
    # The copy would bring one of that name, and no checkpoint is there to be replaced.
    Objects.at("test", f"{url}/config").write("config.json", [b"mine"], 4, None)
    with pytest.raises(FileExistsError, match=r"config\.json"):
        fastckpt.copy(source, f"{url}/config", overwrite=True)
    assert Objects.at("test", f"{url}/config").read_all("config.json", 9) == b"mine"
    assert value_at(f"{url}/b") == 2
    assert value_at(f"{url}/notes") == 1


class CutError(BaseException):
    """The process ends here."""


class Steps:
    """Counts what changes the store; ``look`` is called in front of each, and the one that is ``cut`` never comes."""

    def __init__(self, monkeypatch, cut: int | None, look) -> None:
        self.count = 0
        self._cut = cut
        self._look = look
        for name in ("write", "remove"):
            monkeypatch.setattr(Objects, name, self._counted(getattr(Objects, name)))

    def _counted(self, real):
        def call(objects, *arguments):
            self._look()
            if self.count == self._cut:
                raise CutError
            self.count += 1
            return real(objects, *arguments)

        return call


def visible(place: str) -> float | None:
    """What a reader finds: nothing, or a checkpoint that is whole."""
    try:
        fastckpt.open(place).close()
    except (FileNotFoundError, fastckpt.NotACheckpointError):
        return None
    return value_at(place)


@pytest.mark.parametrize("over", [False, True])
def test_a_copy_that_is_killed_at_any_step_is_not_half_visible_and_goes_on(saved, url, over):
    """Mutants: the manifest first; the old manifest removed last; objects sent again that are there."""
    source, target = saved("a", 1), f"{url}/b"
    other = saved("c", 2)
    sizes = [Path(source, file).stat().st_size for file in SHARDS]
    cut, ended = 0, False
    while not ended:
        objects = Objects.at("test", target)
        objects.remove(objects.sizes())
        if over:
            fastckpt.copy(other, target)
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, cut, lambda seen=seen: seen.append(visible(target)))
            try:
                copy_checkpoint([source], target, overwrite=True)
                ended = True
            except CutError:
                pass
        # Old, then nothing, then new; and never a mixture, which `visible` would not take.
        order = [2, None, 1] if over else [None, 1]
        assert [order.index(value) for value in seen] == sorted(order.index(value) for value in seen)
        there = {file for file, size in zip(SHARDS, sizes, strict=True) if _has(objects, file, source)}
        again = copy_checkpoint([source], target, overwrite=True)
        assert visible(target) == 1
        assert again.was_there == ended
        if not ended:
            assert again.reused_bytes == sum(size for file, size in zip(SHARDS, sizes, strict=True) if file in there)
        cut += 1
    assert cut > 6


def _has(objects: Objects, file: str, source: str) -> bool:
    sums = {one.file: one.crc for one in fastckpt._core.Reader(source).shards()}
    try:
        return objects.sum_of(file) == sums[file]
    except FileNotFoundError:
        return False


def test_a_copy_that_is_stopped_in_an_object_makes_none_of_it(saved, url):
    source, target = saved("a", 1), f"{url}/b"
    done = []

    def tick(now: int, _: int) -> None:
        done.append(now)

    with pytest.raises(CancelledError):
        copy_checkpoint([source], target, limit=2e6, tick=tick, stop=lambda: bool(done) and done[-1] > 500_000)
    assert "fastckpt.json" not in Objects.at("test", target).sizes()
    assert copy_checkpoint([source], target).bytes == total(source)
    assert value_at(target) == 1


def test_shares(saved, url, monkeypatch):
    monkeypatch.setattr(to_objects, "_EVERY", 0.0)
    source, target = saved("a", 1), f"{url}/b"
    other = copy_checkpoint([source], target, share=(1, 2))
    assert visible(target) is None
    assert other.bytes == Path(source, SHARDS[1]).stat().st_size
    first = copy_checkpoint([source], target, share=(0, 2))
    assert first.bytes == total(source) - other.bytes
    assert value_at(target) == 1
    # Where another checkpoint is to be replaced, the first process removes its manifest; the others must not begin.
    fresh = saved("c", 2)
    assert copy_checkpoint([fresh], target, share=(1, 2), overwrite=True).bytes == 0
    assert value_at(target) == 1
    monkeypatch.setattr(shares, "PATIENCE", 0.0)
    monkeypatch.setattr(shares, "TIMES", 0)
    assert copy_checkpoint([fresh], target, share=(0, 2), overwrite=True).bytes == total(fresh)
    assert value_at(target) == 2


def test_shards_of_the_one_before_go(saved, tmp_path, url):
    fastckpt.copy(saved("a", 1), f"{url}/b")
    fastckpt.save({"x": np.ones(3)}, tmp_path / "small")
    fastckpt.copy(tmp_path / "small", f"{url}/b", overwrite=True)
    assert sorted(Objects.at("test", f"{url}/b").sizes()) == ["config.json", "fastckpt.json", "model.safetensors"]
    assert fastckpt.verify(f"{url}/b").ok


def test_several_files_are_sent_at_once(saved, url, monkeypatch):
    """Mutant: one after another, so that a store that takes long to answer is waited for once for each file."""
    real, all_of_them = Objects.write, threading.Barrier(len(SHARDS))

    def write(objects, name, *arguments):
        if name in SHARDS:
            all_of_them.wait(60)
        real(objects, name, *arguments)

    monkeypatch.setattr(Objects, "write", write)
    done = []
    fastckpt.copy(saved("a", 1), f"{url}/b")
    copy_checkpoint([f"{url}/b"], f"{url}/c", tick=lambda now, all_: done.append((now, all_)))
    assert value_at(f"{url}/c") == 1
    assert done[-1][0] <= done[-1][1]


def test_a_half_copy_is_removed_whatever_of_it_is_there(saved, url):
    """Mutant: only shards prove whose it is."""
    fastckpt.copy(saved("a", 1), f"{url}/b")
    objects = Objects.at("test", f"{url}/b")
    objects.remove(["fastckpt.json", *SHARDS[:2]])
    objects.write("notes.txt", [b"mine"], 4, None)
    with pytest.raises(OSError, match="is not part of the checkpoint"):
        fastckpt.remove(f"{url}/b")
    objects.remove(["notes.txt", *SHARDS])
    fastckpt.remove(f"{url}/b", everything=True)
    assert objects.sizes() == {}


def test_two_copies_at_once_to_one_url_are_seen(saved, url):
    """Mutant: no look at all objects before the manifest."""
    source, other, target = saved("a", 1), saved("c", 2), f"{url}/b"
    with pytest.MonkeyPatch.context() as patch:
        real = Objects.write

        def write(objects, name, *arguments):
            real(objects, name, *arguments)
            if name == SHARDS[2]:
                patch.undo()
                copy_checkpoint([other], target, overwrite=True)
                objects.remove(["fastckpt.json"])

        patch.setattr(Objects, "write", write)
        with pytest.raises(OSError, match="another copy"):
            copy_checkpoint([source], target)
    assert visible(target) is None


def test_a_copy_that_another_one_spoils_at_the_last_moment_is_not_visible(saved, url, monkeypatch):
    """Mutant: no look at all objects after the manifest."""
    source, other, target = saved("a", 1), saved("c", 2), f"{url}/b"
    content = Path(other, SHARDS[0]).read_bytes()
    real = Objects.write

    def write(objects, name, *arguments):
        if name == "fastckpt.json":
            real(objects, SHARDS[0], [content], len(content), "0" * 16)
        real(objects, name, *arguments)

    monkeypatch.setattr(Objects, "write", write)
    with pytest.raises(OSError, match="another copy"):
        copy_checkpoint([source], target)
    assert visible(target) is None
    monkeypatch.setattr(Objects, "write", real)
    assert copy_checkpoint([source], target).bytes < total(source)
    assert value_at(target) == 1
