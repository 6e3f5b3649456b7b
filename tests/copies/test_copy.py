"""``fastckpt.copy`` between directories: what it copies, what it refuses, and what it says."""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

import fastckpt
from copies.conftest import value_at
from fastckpt._copy import directory, moves, pace, shares, sources
from fastckpt._copy.copy import copy_checkpoint
from fastckpt._copy.pace import Pace
from fastckpt._copy.plan import Plan
from fastckpt._tools import cli


def names(path: str | Path) -> list[str]:
    inside = [file.relative_to(path).as_posix() for file in Path(path, "training").glob("*")]
    return sorted([*(file.name for file in Path(path).iterdir() if not inside or file.name != "training"), *inside])


def damage(path: str, file: str, at: int = 5000) -> None:
    with Path(path, file).open("r+b") as shard:
        shard.seek(at)
        byte = shard.read(1)[0]
        shard.seek(at)
        shard.write(bytes([byte ^ 1]))


SHARDS = [*(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)), "training/training.safetensors"]
FILES = sorted(["config.json", "fastckpt.json", "model.safetensors.index.json", *SHARDS])


def test_a_copy_is_the_same_byte_for_byte(saved, tmp_path):
    source = saved("a", 1)
    Path(source, ".DS_Store").write_text("not ours", encoding="utf-8")
    report = fastckpt.copy(Path(source), tmp_path / "new" / "archive" / "b")
    target = str(tmp_path / "new" / "archive" / "b")
    assert names(target) == FILES
    assert all(Path(target, file).read_bytes() == Path(source, file).read_bytes() for file in FILES)
    assert value_at(target) == 1
    assert names(tmp_path / "new" / "archive") == ["b"]
    # A copy of its own: what happens to the bytes of one does not happen to the other.
    assert all(Path(target, file).stat().st_nlink == 1 for file in FILES)
    total = sum(Path(source, file).stat().st_size for file in FILES)
    assert (report.source, report.target, report.files) == (source, target, 6)
    assert report.bytes == total - Path(source, "fastckpt.json").stat().st_size
    assert (report.reused_bytes, report.was_there, report.warnings) == (0, False, ())
    assert str(report).startswith("copied 3.6")
    assert str(report).endswith(f": 6 files: {source} -> {target}")


def test_a_second_copy_does_nothing_and_says_so(saved, tmp_path):
    source, target = saved("a", 1), str(tmp_path / "b")
    fastckpt.copy(source, target)
    before = {file: Path(target, file).stat().st_ino for file in FILES}
    report = fastckpt.copy(source, target, overwrite=True)
    assert report.was_there
    assert report.bytes == 0
    assert str(report) == f"nothing to copy: {target} holds the checkpoint of {source} already"
    assert {file: Path(target, file).stat().st_ino for file in FILES} == before
    # What lacks a file is not the same.
    Path(target, SHARDS[1]).unlink()
    assert not fastckpt.copy(source, target, overwrite=True).was_there
    assert value_at(target) == 1


def test_an_overwrite_is_asked_for_and_keeps_what_others_put_there(saved, tmp_path):
    source, target = saved("a", 1), saved("b", 2)
    Path(target, "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"^\[Errno 17\] cannot copy to .*overwrite=False"):
        fastckpt.copy(source, target)
    assert value_at(target) == 2
    fastckpt.copy(source, target, overwrite=True)
    assert value_at(target) == 1
    assert Path(target, "notes.txt").read_text(encoding="utf-8") == "mine"
    assert json.loads(Path(target, "config.json").read_text(encoding="utf-8")) == {"value": 1}
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("file", [*SHARDS, "fastckpt.json"])
def test_damage_is_named_and_nothing_becomes_visible(saved, tmp_path, file):
    source = saved("a", 1)
    damage(source, file, at=100)
    with pytest.raises(fastckpt.CorruptCheckpointError, match=re.escape(str(Path(source, file)))):
        fastckpt.copy(source, tmp_path / "b")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["missing", "short", "long", "link", "pipe"])
def test_a_shard_that_is_not_what_was_written_is_damage(saved, tmp_path, kind):
    source = saved("a", 1)
    shard = Path(source, SHARDS[1])
    if kind in ("short", "long"):
        os.truncate(shard, shard.stat().st_size + (1 if kind == "long" else -1))
    else:
        shard.rename(tmp_path / "moved")
    if kind == "link":
        shard.symlink_to(tmp_path / "moved")
    if kind == "pipe":
        os.mkfifo(shard)
    with pytest.raises(fastckpt.CorruptCheckpointError, match=re.escape(SHARDS[1])):
        fastckpt.copy(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_what_is_no_file_beside_the_shards_is_refused(saved, tmp_path, kind):
    source = saved("a", 1)
    other = Path(source, "other")
    {"link": lambda: other.symlink_to("config.json"), "directory": other.mkdir, "pipe": lambda: os.mkfifo(other)}[
        kind
    ]()
    with pytest.raises(ValueError, match=r"other.*is not a regular file"):
        fastckpt.copy(source, tmp_path / "b")
    assert names(tmp_path) == ["a"]


def test_what_is_no_checkpoint_or_no_place_is_refused(saved, tmp_path):
    source = saved("a", 1)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ValueError, match="the same place"):
        fastckpt.copy(source, f"{source}/../a")
    with pytest.raises(FileNotFoundError):
        fastckpt.copy(tmp_path / "none", tmp_path / "b")
    with pytest.raises(fastckpt.NotACheckpointError):
        fastckpt.copy(tmp_path / "weights", tmp_path / "b")
    with pytest.raises(FileExistsError, match="not a checkpoint of fastckpt"):
        fastckpt.copy(source, tmp_path / "weights", overwrite=True)
    with pytest.raises(ValueError, match="bandwidth_limit"):
        fastckpt.copy(source, tmp_path / "b", bandwidth_limit="fast")
    assert names(tmp_path) == ["a", "weights"]


@pytest.mark.parametrize("to", ["c", "memory://changed/c"])
def test_a_file_beside_the_shards_that_grows_meanwhile_is_no_damage(saved, tmp_path, monkeypatch, to):
    """Mutant: only another manifest is a change."""
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
    fastckpt.remove(source, everything=True)
    with pytest.raises(FileNotFoundError):
        fastckpt.copy(source, tmp_path / "c")


def test_a_checkpoint_without_tensors_is_copied(tmp_path):
    fastckpt.save({"step": 7}, tmp_path / "a")
    fastckpt.copy(tmp_path / "a", tmp_path / "b")
    assert fastckpt.load(tmp_path / "b") == {"step": 7}


# --- repair ----------------------------------------------------------------------------------------------------------


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


# --- how it moves bytes ----------------------------------------------------------------------------------------------


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
    # Three threads at once wait one after another.
    assert [round(paced.book(10_000_000, 100.0), 3) for _ in range(3)] == [0.0, 0.1, 0.2]
    # After a stall, a tenth of a second is made up for, and no more.
    assert paced.book(10_000_000, 200.0) == pytest.approx(0.0)
    assert paced.book(10_000_000, 200.0) == pytest.approx(0.1)
    assert Pace(None, None, None).book(1 << 40, 0.0) == 0.0


def test_a_limit_is_kept(saved, tmp_path):
    copied = copy_checkpoint([saved("a", 1)], str(tmp_path / "b"), limit=12e6)
    assert copied.seconds >= copied.bytes / 12e6 - 0.11
    assert value_at(str(tmp_path / "b")) == 1


# --- cut short -------------------------------------------------------------------------------------------------------


class Gathering:
    """The core's, with a call in front of some of its methods."""

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
    """Have these called in front of the methods of the gatherings to be made, each until it is dropped."""
    real = directory._core.Gathering
    core = type("Core", (), {"Gathering": staticmethod(lambda *arguments: Gathering(real(*arguments), before))})
    monkeypatch.setattr(directory, "_core", core)
    return before


def test_a_copy_that_is_stopped_keeps_what_is_whole_and_the_next_one_goes_on(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")
    kept = []
    before = wrap(monkeypatch, keep=lambda _, name: kept.append(name))
    monkeypatch.setattr(moves, "THREADS", 1)
    with pytest.raises(CancelledError):
        copy_checkpoint([source], target, stop=lambda: len(kept) >= 2)
    before.clear()
    assert not Path(target).exists()
    (left,) = fastckpt.leftovers(tmp_path)
    assert (left.checkpoint, left.host, left.state) == ("b", "", "dead")
    whole = [file for file in SHARDS if (tmp_path / left.name / file).exists()]
    assert len(whole) >= 2
    assert not [file for file in names(tmp_path / left.name) if file.endswith(".part")]
    # Neither a save nor the copy of another checkpoint touches it.
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
        (one,) = fastckpt.leftovers(tmp_path)
        states.append((one.state, fastckpt.remove_leftover(tmp_path, one.name, force=True)))
        raise KeyboardInterrupt

    before = wrap(monkeypatch, keep=keep)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint([source], target)
    before.clear()
    assert set(states) == {("alive", False)}
    assert cli.main(["clean", str(tmp_path), "--remove"]) == 0
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
    assert len(fastckpt.leftovers(tmp_path)) == (1 if number == 5 else 0)


def test_what_another_copy_left_of_a_file_beside_the_shards_is_not_taken(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")

    def publish(*_):
        raise KeyboardInterrupt

    before = wrap(monkeypatch, publish=publish)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint([source], target)
    before.clear()
    Path(source, "config.json").write_text('{"value": 7}', encoding="utf-8")
    copied = copy_checkpoint([source], target)
    assert Path(target, "config.json").read_text(encoding="utf-8") == '{"value": 7}'
    assert copied.reused_bytes == sum(Path(source, file).stat().st_size for file in SHARDS)


def test_what_a_copy_leaves_that_ends_right_after_its_commit_goes_with_the_next_save(saved, tmp_path, monkeypatch):
    source, target = saved("a", 1), str(tmp_path / "b")

    def give_up(*_):
        raise KeyboardInterrupt

    before = wrap(monkeypatch, give_up=give_up)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint([source], target)
    before.clear()
    assert value_at(target) == 1
    assert len(fastckpt.leftovers(tmp_path)) == 1
    saved("c", 2)
    assert names(tmp_path) == ["a", "b", "c"]


# --- several at once -------------------------------------------------------------------------------------------------


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
        # Once before its own files, then again and again.
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
    # The other one never comes.
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


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(saved, tmp_path, capsys):
    source, target = saved("a", 1), str(tmp_path / "b")
    assert cli.main(["copy", source, target, "--limit", "500MB/s"]) == 0
    assert capsys.readouterr().out.startswith("copied 3.6")
    assert value_at(target) == 1
    assert cli.main(["copy", source, target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["was_there"], document["source"], document["target"]) == (True, source, target)
    saved("a", 2)
    assert cli.main(["copy", source, target]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert cli.main(["copy", source, target, "--overwrite"]) == 0
    damage(source, SHARDS[0])
    assert cli.main(["copy", source, str(tmp_path / "c")]) == 1
    assert SHARDS[0] in capsys.readouterr().err
    assert cli.main(["copy", str(tmp_path / "none"), target]) == 2
    assert cli.main(["copy", source, target, "--limit", "x"]) == 2
    # Mutant: a pathlib.Path, which folds the slashes of a URL, so that the host becomes a part of the path.
    assert cli.main(["copy", f"file://elsewhere{source}", str(tmp_path / "d")]) == 2
    assert "another machine" in capsys.readouterr().err
