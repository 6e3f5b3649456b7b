"""The engine of copies: from several sources, in shares, stopped at any step, between directories and object stores in
memory.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import fastckpt
from copies.conftest import FILES, SHARDS, damage, names, value_at
from fastckpt._copy import directory, moves, pace, shares, sources
from fastckpt._copy import objects as to_objects
from fastckpt._copy.copy import copy_checkpoint
from fastckpt._copy.pace import Pace
from fastckpt._copy.plan import Plan
from fastckpt._portable.manifest import own_checksum
from fastckpt._stores.layout import file_of
from fastckpt._stores.objects import Objects
from harness import cli

pytest.importorskip("obstore")

_stores = itertools.count()


@pytest.fixture
def url() -> Iterator[str]:
    """A separate store, which is emptied at the end."""
    store = f"memory://copies-{os.getpid()}-{next(_stores)}"
    yield f"{store}/run"
    objects = Objects.at("test", store)
    objects.remove(objects.sizes())


def total(path: str) -> int:
    return sum(Path(path, file).stat().st_size for file in FILES if file != "fastckpt.json")


def folder_of(source: str) -> str:
    """Return the folder of a checkpoint's files below a URL."""
    return own_checksum(Path(source, "fastckpt.json").read_bytes())


def objects_of(source: str) -> list[str]:
    """Return the names of the objects of a copy of a checkpoint."""
    return sorted(file if file == "fastckpt.json" else f"{folder_of(source)}/{file}" for file in FILES)


def spoil(place: str, file: str) -> None:
    """Change a byte of an object, but not its recorded checksum."""
    objects = Objects.at("test", place)
    data = bytearray(objects.read_all(file, 1 << 30))
    data[100] ^= 1
    objects.write(file, [data], len(data), objects.sum_of(file))


def test_there_and_back_again(saved, tmp_path, url):
    source = saved("a", 1)
    report = fastckpt.copy(source, f"{url}/b")
    assert (report.bytes, report.reused_bytes, report.files) == (total(source), 0, 6)
    assert value_at(f"{url}/b") == 1
    assert sorted(Objects.at("test", f"{url}/b").sizes()) == objects_of(source)
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
    objects, folder = Objects.at("test", f"{url}/b"), folder_of(source)
    shards = fastckpt._core.Reader(source).shards()
    assert {one.file: objects.sum_of(f"{folder}/{one.file}") for one in shards} == {one.file: one.crc for one in shards}
    assert all(objects.sum_of(name) for name in objects_of(source))


@pytest.mark.parametrize("file", ["fastckpt.json", SHARDS[1]])
def test_damage_is_named_and_nothing_becomes_visible(saved, tmp_path, url, file):
    source = saved("a", 1)
    fastckpt.copy(source, f"{url}/b")
    spoiled = file if file == "fastckpt.json" else f"{folder_of(source)}/{file}"
    spoil(f"{url}/b", spoiled)
    for target in (str(tmp_path / "c"), f"{url}/c"):
        with pytest.raises(fastckpt.CorruptCheckpointError, match=f"{url}/b/{spoiled}"):
            fastckpt.copy(f"{url}/b", target)
        assert visible(target) is None
    # Copy a damaged directory to a store.
    if file != "fastckpt.json":
        with Path(source, file).open("r+b") as shard:
            shard.seek(5000)
            shard.write(b"damage")
        with pytest.raises(fastckpt.CorruptCheckpointError, match=file):
            fastckpt.copy(source, f"{url}/d")
        assert "fastckpt.json" not in Objects.at("test", f"{url}/d").sizes()


def test_an_object_that_is_missing_is_damage(saved, tmp_path, url):
    fastckpt.copy(saved("a", 1), f"{url}/b")
    Objects.at("test", f"{url}/b").remove([f"{folder_of(str(tmp_path / 'a'))}/{SHARDS[2]}"])
    with pytest.raises(fastckpt.CorruptCheckpointError, match=SHARDS[2]):
        fastckpt.copy(f"{url}/b", tmp_path / "c")
    # The target has the manifest but lacks files, which are copied.
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
    spoil(f"{url}/b", f"{folder_of(source)}/{SHARDS[1]}")
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
    # The copy has a file with this name, but in a different folder.
    Objects.at("test", f"{url}/config").write("config.json", [b"mine"], 4, None)
    fastckpt.copy(source, f"{url}/config", overwrite=True)
    assert Objects.at("test", f"{url}/config").read_all("config.json", 9) == b"mine"
    assert value_at(f"{url}/b") == 2
    assert value_at(f"{url}/notes") == 1


class CutError(BaseException):
    """Stands for the end of the process."""


class Steps:
    """Counts changes of the store; ``look`` is called before each, and the change number ``cut`` never happens."""

    def __init__(self, monkeypatch, cut: int | None, look) -> None:
        self.count = 0
        self._cut = cut
        self._look = look
        for name in ("write", "replace", "remove"):
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
    """Return what a reader finds: None, or the value of a whole checkpoint."""
    try:
        fastckpt.open(place).close()
    except (FileNotFoundError, fastckpt.exceptions.NotACheckpointError):
        return None
    return value_at(place)


@pytest.mark.parametrize("over", [False, True])
def test_a_copy_that_is_killed_at_any_step_is_not_half_visible_and_goes_on(saved, url, over):
    """Mutants: the manifest is first; old objects are removed before it; existing objects are sent again."""
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
        # Readers see the old checkpoint, then the new one, never none in between, nor a mixture (`visible` refuses it).
        order = [2, 1] if over else [None, 1]
        assert [order.index(value) for value in seen] == sorted(order.index(value) for value in seen)
        there = {file for file, size in zip(SHARDS, sizes, strict=True) if _has(objects, file, source)}
        is_there = visible(target) == 1
        again = copy_checkpoint([source], target, overwrite=True)
        assert visible(target) == 1
        assert sorted(objects.sizes()) == objects_of(source)
        assert again.was_there == is_there
        if not is_there:
            assert again.reused_bytes == sum(size for file, size in zip(SHARDS, sizes, strict=True) if file in there)
        cut += 1
    assert cut > 6


def _has(objects: Objects, file: str, source: str) -> bool:
    sums = {one.file: one.crc for one in fastckpt._core.Reader(source).shards()}
    try:
        return objects.sum_of(f"{folder_of(source)}/{file}") == sums[file]
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
    # The old checkpoint stays until all processes have copied their files.
    fresh = saved("c", 2)
    assert copy_checkpoint([fresh], target, share=(1, 2), overwrite=True).bytes == other.bytes
    assert value_at(target) == 1
    monkeypatch.setattr(shares, "PATIENCE", 0.0)
    monkeypatch.setattr(shares, "TIMES", 0)
    assert copy_checkpoint([fresh], target, share=(0, 2), overwrite=True).bytes == total(fresh) - other.bytes
    assert value_at(target) == 2


def test_shards_of_the_one_before_go(saved, tmp_path, url):
    fastckpt.copy(saved("a", 1), f"{url}/b")
    fastckpt.save({"x": np.ones(3)}, tmp_path / "small")
    fastckpt.copy(tmp_path / "small", f"{url}/b", overwrite=True)
    folder = folder_of(tmp_path / "small")
    files = (f"{folder}/{name}" for name in ("model.safetensors", "model.safetensors.index.json"))
    assert sorted(Objects.at("test", f"{url}/b").sizes()) == sorted(["fastckpt.json", *files])
    assert fastckpt.verify(f"{url}/b").ok


def test_several_files_are_sent_at_once(saved, url, monkeypatch):
    """Mutant: files are sent in sequence, with one wait per file for a slow store."""
    real, all_of_them = Objects.write, threading.Barrier(len(SHARDS))

    def write(objects, name, *arguments):
        if file_of(name) in SHARDS:
            all_of_them.wait(60)
        real(objects, name, *arguments)

    monkeypatch.setattr(Objects, "write", write)
    done = []
    fastckpt.copy(saved("a", 1), f"{url}/b")
    copy_checkpoint([f"{url}/b"], f"{url}/c", tick=lambda now, all_: done.append((now, all_)))
    assert value_at(f"{url}/c") == 1
    assert done[-1][0] <= done[-1][1]


def test_a_half_copy_is_removed_whatever_of_it_is_there(saved, url):
    """Mutant: only shards prove that the leftovers are fastckpt's."""
    fastckpt.copy(saved("a", 1), f"{url}/b")
    objects = Objects.at("test", f"{url}/b")
    shards = [f"{folder_of(saved('a', 1))}/{file}" for file in SHARDS]
    objects.remove(["fastckpt.json", *shards[:2]])
    objects.write("notes.txt", [b"mine"], 4, None)
    with pytest.raises(OSError, match="is not part of the checkpoint"):
        fastckpt.remove(f"{url}/b")
    objects.remove(["notes.txt", *shards])
    fastckpt.remove(f"{url}/b", force=True)
    assert objects.sizes() == {}


class Turns:
    """Two copies to one URL take steps that change the store, one at a time, in a drawn order."""

    def __init__(self, patch: pytest.MonkeyPatch, draw: random.Random, look: Callable[[], None]) -> None:
        self._draw = draw
        self._look = look
        self._changed = threading.Condition()
        #: The number of the copy that a thread makes; the objects of the copy have the same number.
        self._local = threading.local()
        self._waits: set[int] = set()
        self._goes: set[int] = set()
        self._busy = 0
        made = Objects.__init__

        def make(objects, *arguments):
            made(objects, *arguments)
            objects.number = getattr(self._local, "number", None)

        patch.setattr(Objects, "__init__", make)
        for name in ("write", "replace", "remove"):
            patch.setattr(Objects, name, self._in_turn(getattr(Objects, name)))

    def _in_turn(self, real):
        def call(objects, *arguments):
            with self._changed:
                self._waits.add(objects.number)
                self._busy -= 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: objects.number in self._goes, 60)
                self._goes.remove(objects.number)
            return real(objects, *arguments)

        return call

    def run(self, copies: list[Callable[[], object]]) -> list[Exception | None]:
        """Run all copies to their ends; return the exception of each."""
        raised: list[Exception | None] = [None] * len(copies)

        def work(number: int) -> None:
            self._local.number = number
            try:
                copies[number]()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                raised[number] = error
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

        self._busy = len(copies)
        threads = [threading.Thread(target=work, args=[number]) for number in range(len(copies))]
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                assert self._changed.wait_for(lambda: not self._busy, 60)
            self._look()
            with self._changed:
                if not self._waits:
                    break
                chosen = self._draw.choice(sorted(self._waits))
                self._waits.remove(chosen)
                self._goes.add(chosen)
                self._busy += 1
                self._changed.notify_all()
        for thread in threads:
            thread.join()
        return raised


@pytest.mark.parametrize("seed", range(24))
def test_of_two_copies_at_once_to_one_url_one_wins_whole(saved, url, monkeypatch, seed):
    """Mutants: objects are right below the URL; the manifest replaces any other; old objects go before it."""
    monkeypatch.setattr(to_objects, "_LARGE", 1)
    monkeypatch.setattr(to_objects, "_SMALL", 1)
    target, values = f"{url}/b", {"a": 1.0, "c": 2.0}
    sources = {value: saved(name, value) for name, value in values.items()}
    fastckpt.copy(saved("old", 3), target)
    seen = []

    with pytest.MonkeyPatch.context() as patch:
        turns = Turns(patch, random.Random(seed), lambda: seen.append(visible(target)))
        raised = turns.run(
            [
                lambda source=source: copy_checkpoint([source], target, overwrite=True)  # type: ignore[misc]
                for source in sources.values()
            ]
        )
    assert all(isinstance(error, OSError) and error.errno == errno.EBUSY for error in raised if error is not None)
    assert None in raised
    # Readers see the old checkpoint, and then one of the new ones, or both in sequence.
    assert set(seen) <= {3, *sources}
    assert seen[0] == 3
    won = seen[-1]
    assert won in [value for value, error in zip(sources, raised, strict=True) if error is None]
    # The next copy removes the leftovers of the copy that lost.
    copy_checkpoint([sources[won]], target)
    assert sorted(Objects.at("test", target).sizes()) == objects_of(sources[won])
    assert value_at(target) == won


def test_a_copy_that_another_one_has_overtaken_says_so(saved, url, monkeypatch):
    """Mutant: the manifest replaces any other."""
    source, other, target = saved("a", 1), saved("c", 2), f"{url}/b"
    real = Objects.replace

    def replace(objects, *arguments):
        monkeypatch.setattr(Objects, "replace", real)
        copy_checkpoint([other], target, overwrite=True)
        real(objects, *arguments)

    for before in (None, 3):
        if before:
            copy_checkpoint([saved("old", before)], target, overwrite=True)
        monkeypatch.setattr(Objects, "replace", replace)
        with pytest.raises(OSError, match="another copy to it is running") as raised:
            copy_checkpoint([source], target, overwrite=True)
        assert raised.value.errno == errno.EBUSY
        assert value_at(target) == 2


def test_what_another_copy_removes_is_brought_again(saved, url, monkeypatch):
    """Mutants: the objects are not checked before the manifest, or not after it."""
    source, target = saved("a", 1), f"{url}/b"
    spoiled = f"{folder_of(source)}/{SHARDS[0]}"
    commit = Objects.replace

    def committed(objects, *arguments):
        assert spoiled in objects.sizes()
        commit(objects, *arguments)

    monkeypatch.setattr(Objects, "replace", committed)
    for name in ("write", "replace"):
        with pytest.MonkeyPatch.context() as patch:
            real = getattr(Objects, name)

            def change(objects, what, *arguments, real=real, patch=patch):
                real(objects, what, *arguments)
                if what in (spoiled, "fastckpt.json"):
                    patch.undo()
                    objects.remove([spoiled])

            patch.setattr(Objects, name, change)
            copy_checkpoint([source], target)
        assert value_at(target) == 1
        fastckpt.remove(target, force=True)
    remove = Objects.remove

    def write(objects, what, *arguments, real=Objects.write):
        real(objects, what, *arguments)
        remove(objects, [spoiled])

    monkeypatch.setattr(Objects, "write", write)
    with pytest.raises(OSError, match="another copy to it is running"):
        copy_checkpoint([source], target)


def test_what_another_tool_has_brought_is_replaced_and_what_is_not_ours_stays(saved, url):
    """Mutants: shards directly below the URL stay; all objects are removed; a foreign folder is removed."""
    plain, source, target = saved("a", 1), saved("c", 2), f"{url}/b"
    objects = Objects.at("test", target)
    for file in FILES:
        content = Path(plain, file).read_bytes()
        objects.write(file, [content], len(content), None)
    assert value_at(target) == 1
    theirs = ["notes.txt", f"{'0' * 16}/notes.txt", f"{folder_of(plain)}/notes.txt"]
    for name in theirs:
        objects.write(name, [b"mine"], 4, None)
    copy_checkpoint([source], target, overwrite=True)
    assert sorted(objects.sizes()) == sorted([*objects_of(source), "config.json", *theirs])
    # This is the config.json of the copy, not the one beside its manifest.
    fastckpt.copy(target, f"{url}/c")
    assert Objects.at("test", f"{url}/c").read_all(f"{folder_of(source)}/config.json", 99) == b'{"value": 2}'
    assert value_at(target) == 2


def test_a_checkpoint_below_a_name_like_that_of_a_folder_is_not_copied_over(saved, url):
    source, name = saved("a", 1), "0123456789abcdef"
    fastckpt.copy(source, f"{url}/{name}")
    for call in (
        lambda: fastckpt.copy(source, url, overwrite=True),
        lambda: fastckpt.remove(url, force=True),
    ):
        with pytest.raises(OSError, match=f"`{name}/|holds no"):
            call()
    assert value_at(f"{url}/{name}") == 1


# --- copies between directories ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["c", "memory://changed/c"])
def test_a_file_beside_the_shards_that_grows_meanwhile_is_no_damage(saved, tmp_path, monkeypatch, to):
    """Mutant: only a different manifest counts as a change."""
    source, target = saved("a", 1), to if "://" in to else str(tmp_path / to)
    real, calls = Plan.bring, []

    def bring(*arguments):
        if not calls:
            Path(source, "config.json").write_text('{"value": 1, "more": 2}')
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(Plan, "bring", bring)
    fastckpt.copy(source, target)
    assert len(calls) == 2
    fastckpt.copy(target, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_text() == '{"value": 1, "more": 2}'


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_copied_again(saved, tmp_path, monkeypatch):
    source = saved("a", 1)
    real, times = directory.move, []

    def move(*arguments):
        if not times:
            saved("a", 2)
        times.append(1)
        return real(*arguments)

    monkeypatch.setattr(directory, "move", move)
    fastckpt.copy(source, tmp_path / "b")
    assert len(times) == 2
    assert value_at(str(tmp_path / "b")) == 2
    assert names(tmp_path) == ["a", "b"]
    fastckpt.remove(source, force=True)
    with pytest.raises(FileNotFoundError):
        fastckpt.copy(source, tmp_path / "c")


def test_each_file_comes_from_the_first_place_where_it_is_whole(saved, tmp_path):
    source = saved("a", 1)
    first, second = (str(tmp_path / name) for name in ("b", "c"))
    for target in (first, second):
        fastckpt.copy(source, target)
    damage(first, SHARDS[0])
    damage(second, SHARDS[1])
    Path(second, SHARDS[2]).unlink()
    copied = copy_checkpoint([first, second], str(tmp_path / "d"))
    assert value_at(str(tmp_path / "d")) == 1
    assert copied.bytes == sum(Path(source, file).stat().st_size for file in FILES if file != "fastckpt.json")
    damage(second, SHARDS[0])
    with pytest.raises(fastckpt.CorruptCheckpointError, match=re.escape(str(Path(first, SHARDS[0])))):
        copy_checkpoint([first, second], str(tmp_path / "e"))
    assert not (tmp_path / "e").exists()


def test_a_repair_replaces_what_is_damaged_and_links_the_rest(saved, tmp_path):
    source, target = saved("a", 1), str(tmp_path / "b")
    fastckpt.copy(source, target)
    damage(target, SHARDS[1])
    before = {file: Path(target, file).stat().st_ino for file in FILES}
    with pytest.raises(fastckpt.CorruptCheckpointError):
        copy_checkpoint([target], target, overwrite=True)
    copied = copy_checkpoint([target, source], target, overwrite=True)
    after = {file: Path(target, file).stat().st_ino for file in FILES}
    assert {file for file in FILES if after[file] != before[file]} == {SHARDS[1], "fastckpt.json"}
    assert copied.bytes == Path(target, SHARDS[1]).stat().st_size
    assert value_at(target) == 1


def test_a_repair_without_links_copies(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    fastckpt.copy(source, target)
    damage(target, SHARDS[1])
    before = {file: Path(target, file).stat().st_ino for file in FILES}

    def link(*_):
        raise PermissionError(1, "no links here")

    wrap(monkeypatch, link=link)
    copy_checkpoint([target, source], target, overwrite=True)
    assert value_at(target) == 1
    assert all(Path(target, file).stat().st_ino != before[file] for file in SHARDS)


def test_a_manifest_that_is_damaged_comes_from_elsewhere_and_the_files_need_not(saved, tmp_path):
    source, near = saved("a", 1), str(tmp_path / "b")
    fastckpt.copy(source, near)
    damage(near, "fastckpt.json", at=100)
    for file in SHARDS:
        damage(source, file)
    copy_checkpoint([near, source], str(tmp_path / "c"))
    assert value_at(str(tmp_path / "c")) == 1


def test_another_checkpoint_is_no_source(saved, tmp_path):
    sources_ = [saved("a", 1), saved("b", 2)]
    Path(sources_[1], "notes.txt").touch()
    copy_checkpoint(sources_, str(tmp_path / "c"))
    assert names(tmp_path / "c") == FILES
    assert value_at(str(tmp_path / "c")) == 1
    damage(str(tmp_path / "a"), SHARDS[0])
    with pytest.raises(fastckpt.CorruptCheckpointError):
        copy_checkpoint([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "d"))


@pytest.mark.parametrize("block", [4096, 1 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_of_any_size_with_and_without_direct_io(saved, tmp_path, monkeypatch, block, direct):
    monkeypatch.setattr(pace, "BLOCK", block)
    if not direct:
        monkeypatch.setattr(sources, "_DIRECT", 0)
    seen = []
    copied = copy_checkpoint([saved("a", 1)], str(tmp_path / "b"), tick=lambda *now: seen.append(now))
    assert value_at(str(tmp_path / "b")) == 1
    assert seen[-1] == (copied.bytes, copied.bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_limit_spreads_the_bytes_evenly():
    paced = Pace(100e6, None, None)
    assert paced.block == 100e6 * 0.1 // 4096 * 4096 or paced.block == pace.BLOCK
    assert Pace(10e6, None, None).block == 999_424
    assert Pace(1, None, None).block == 64 << 10
    # Three threads that start at once wait one after another.
    assert [round(paced.book(10_000_000, 100.0), 3) for _ in range(3)] == [0.0, 0.1, 0.2]
    # After a stall, at most a tenth of a second is caught up.
    assert paced.book(10_000_000, 200.0) == pytest.approx(0.0)
    assert paced.book(10_000_000, 200.0) == pytest.approx(0.1)
    assert Pace(None, None, None).book(1 << 40, 0.0) == 0.0


def test_a_limit_is_kept(saved, tmp_path):
    copied = copy_checkpoint([saved("a", 1)], str(tmp_path / "b"), limit=12e6)
    assert copied.seconds >= copied.bytes / 12e6 - 0.11
    assert value_at(str(tmp_path / "b")) == 1


class Gathering:
    """Wraps the core's gathering and calls functions before some of its methods."""

    def __init__(self, real, before):
        self._real = real
        self._before = before

    def __getattr__(self, name):
        real = getattr(self._real, name)

        def call(*arguments):
            if name in self._before:
                self._before[name](*arguments)
            return real(*arguments)

        return call


def wrap(monkeypatch, **before):
    """Have these functions called before methods of future gatherings, each until it is removed from the result."""
    real = directory._core.Gathering
    core = type("Core", (), {"Gathering": staticmethod(lambda *arguments: Gathering(real(*arguments), before))})
    monkeypatch.setattr(directory, "_core", core)
    return before


def interrupt(monkeypatch, step, source, target):
    """Copy, and interrupt the copy before a step."""

    def interrupted(*_):
        raise KeyboardInterrupt

    before = wrap(monkeypatch, **{step: interrupted})
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint([source], target)
    before.clear()


def test_a_copy_that_is_stopped_keeps_what_is_whole_and_the_next_one_goes_on(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    kept = []
    before = wrap(monkeypatch, keep=lambda _, name: kept.append(name))
    monkeypatch.setattr(moves, "THREADS", 1)
    with pytest.raises(CancelledError):
        copy_checkpoint([source], target, stop=lambda: len(kept) >= 2)
    before.clear()
    assert not Path(target).exists()
    (left,) = fastckpt.clean(tmp_path)
    assert (left.checkpoint, left.host, left.state) == ("b", "", "dead")
    whole = [file for file in SHARDS if (tmp_path / left.name / file).exists()]
    assert len(whole) >= 2
    assert not [file for file in names(tmp_path / left.name) if file.endswith(".part")]
    # Neither a save nor the copy of another checkpoint changes what is left.
    saved("c", 2)
    with pytest.raises(CancelledError):
        copy_checkpoint([str(tmp_path / "c")], target, stop=lambda: True)
    assert (tmp_path / left.name).exists()
    again = copy_checkpoint([source], target)
    assert again.reused_bytes == sum(Path(source, file).stat().st_size for file in whole)
    assert value_at(target) == 1
    assert names(tmp_path) == ["a", "b", "c"]


def test_what_is_left_is_cleaned_on_request_and_not_while_it_is_in_use(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    states = []

    def keep(*_):
        (one,) = fastckpt.clean(tmp_path, older_than=0, dry_run=False)
        states.append((one.state, one.removed))
        raise KeyboardInterrupt

    before = wrap(monkeypatch, keep=keep)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint([source], target)
    before.clear()
    assert set(states) == {("alive", False)}
    assert cli.main(["clean", str(tmp_path), "--yes"]) == 0
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [28, 17, 5])
def test_no_room_gives_back_what_was_taken_and_another_failure_does_not(saved, tmp_path, monkeypatch, number):
    source, target = saved("a", 1), str(tmp_path / "b")

    def keep(_, name):
        if name == SHARDS[2]:
            raise OSError(number, os.strerror(number))

    before = wrap(monkeypatch, keep=keep)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        copy_checkpoint([source], target)
    before.clear()
    assert not Path(target).exists()
    assert len(fastckpt.clean(tmp_path)) == (1 if number == 5 else 0)


def test_a_copy_that_cannot_be_made_durable_is_no_success(saved, tmp_path, monkeypatch):
    """The copy has its name, but the sync after that fails. Mutant: it counts as the copy of another process."""
    source, target = saved("a", 1), str(tmp_path / "b")

    def publish(*_):
        shutil.copytree(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = wrap(monkeypatch, publish=publish)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.EIO))):
        copy_checkpoint([source], target)
    before.clear()
    # The next copy finds everything, and returns once that is durable. Mutant: the next copy does not sync.
    failing = OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(directory, "sync", mock.Mock(side_effect=failing))
        with pytest.raises(OSError, match=re.escape(os.strerror(errno.EIO))):
            copy_checkpoint([source], target)
    assert copy_checkpoint([source], target).was_there


def test_what_another_copy_left_of_a_file_beside_the_shards_is_not_taken(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    interrupt(monkeypatch, "publish", source, target)
    Path(source, "config.json").write_text('{"value": 7}', encoding="utf-8")
    copied = copy_checkpoint([source], target)
    assert Path(target, "config.json").read_text(encoding="utf-8") == '{"value": 7}'
    assert copied.reused_bytes == sum(Path(source, file).stat().st_size for file in SHARDS)


def test_what_a_copy_leaves_that_ends_right_after_its_commit_goes_with_the_next_save(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    interrupt(monkeypatch, "give_up", source, target)
    assert value_at(target) == 1
    assert len(fastckpt.clean(tmp_path)) == 1
    saved("c", 2)
    assert names(tmp_path) == ["a", "b", "c"]


def test_two_processes_share_a_copy(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    other = copy_checkpoint([source], target, share=(1, 2))
    assert not Path(target).exists()
    assert other.bytes == Path(source, SHARDS[1]).stat().st_size
    first = copy_checkpoint([source], target, share=(0, 2))
    assert first.bytes + other.bytes == sum(
        Path(source, file).stat().st_size for file in FILES if file != "fastckpt.json"
    )
    assert value_at(target) == 1
    assert copy_checkpoint([source], target, share=(1, 2)).was_there
    assert names(tmp_path) == ["a", "b"]


def test_the_first_waits_for_the_others_and_not_for_ever(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    waits = threading.Event()
    held = []

    def counted(*_):
        held.append(1)
        # The function is called once before the copy of the process's own files, and repeatedly after it.
        if len(held) == 3:
            waits.set()

    wrap(monkeypatch, held=counted)
    monkeypatch.setattr(shares, "PATIENCE", 600.0)
    done = []
    first = threading.Thread(target=lambda: done.append(copy_checkpoint([source], target, share=(0, 2))))
    first.start()
    assert waits.wait(60)
    copy_checkpoint([source], target, share=(1, 2))
    first.join(60)
    assert done[0].bytes == sum(
        Path(source, file).stat().st_size for file in FILES if file not in ("fastckpt.json", SHARDS[1])
    )
    assert value_at(target) == 1
    # The other process never comes.
    monkeypatch.setattr(shares, "PATIENCE", 0.0)
    monkeypatch.setattr(shares, "TIMES", 0)
    alone = copy_checkpoint([source], str(tmp_path / "c"), share=(0, 2))
    assert alone.bytes > done[0].bytes
    assert value_at(str(tmp_path / "c")) == 1
    assert names(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("where", ["begin", "keep", "publish"])
def test_of_two_copies_of_one_checkpoint_both_succeed(saved, tmp_path, monkeypatch, where):
    source, target = saved("a", 1), str(tmp_path / "b")
    real = directory._core
    once = threading.Lock()

    def rival(*_):
        if once.acquire(blocking=False):
            monkeypatch.setattr(directory, "_core", real)
            copy_checkpoint([source], target)

    wrap(monkeypatch, **{where: rival})
    copy_checkpoint([source], target)
    assert value_at(target) == 1
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_of_two_copies_of_different_checkpoints_the_last_wins_where_it_may(saved, tmp_path, monkeypatch, overwrite):
    source, other, target = saved("a", 1), saved("c", 2), str(tmp_path / "b")
    real = directory._core

    def rival(*_):
        monkeypatch.setattr(directory, "_core", real)
        copy_checkpoint([other], target)
        assert value_at(target) == 2

    wrap(monkeypatch, publish=rival)
    if overwrite:
        copy_checkpoint([source], target, overwrite=True)
        assert value_at(target) == 1
    else:
        with pytest.raises(FileExistsError):
            copy_checkpoint([source], target)
        assert value_at(target) == 2
    assert names(tmp_path) == ["a", "b", "c"]
