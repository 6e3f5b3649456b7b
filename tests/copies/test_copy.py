"""``fastckpt.copy`` between directories: copies, refusals and reports."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import fastckpt
from copies.conftest import FILES, SHARDS, damage, names, value_at
from harness import cli


def test_a_copy_is_the_same_byte_for_byte(saved, tmp_path):
    source = saved("a", 1)
    Path(source, ".DS_Store").write_text("not ours", encoding="utf-8")
    report = fastckpt.copy(Path(source), tmp_path / "new" / "archive" / "b")
    target = str(tmp_path / "new" / "archive" / "b")
    assert names(target) == FILES
    assert all(Path(target, file).read_bytes() == Path(source, file).read_bytes() for file in FILES)
    assert value_at(target) == 1
    assert names(tmp_path / "new" / "archive") == ["b"]
    # The copy is separate: damage to one does not affect the other.
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
    # A copy that lacks a file is not the same checkpoint.
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
    with pytest.raises(fastckpt.exceptions.NotACheckpointError):
        fastckpt.copy(tmp_path / "weights", tmp_path / "b")
    with pytest.raises(FileExistsError, match="not a checkpoint of fastckpt"):
        fastckpt.copy(source, tmp_path / "weights", overwrite=True)
    with pytest.raises(ValueError, match="copy: io must be one of auto, uring, threads, direct, buffered, not 'fast'"):
        fastckpt.copy(source, tmp_path / "b", io="fast")
    assert names(tmp_path) == ["a", "weights"]


def test_a_checkpoint_without_tensors_is_copied(tmp_path):
    fastckpt.save({"step": 7}, tmp_path / "a")
    fastckpt.copy(tmp_path / "a", tmp_path / "b")
    assert fastckpt.load(tmp_path / "b") == {"step": 7}


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(saved, tmp_path, capsys):
    source, target = saved("a", 1), str(tmp_path / "b")
    assert cli.main(["copy", source, target, "--bandwidth-limit", "500MB/s"]) == 0
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
    assert cli.main(["copy", source, target, "--bandwidth-limit", "x"]) == 2
    # Mutant: a pathlib.Path, which folds the slashes of a URL, so that the host becomes a part of the path.
    assert cli.main(["copy", f"file://elsewhere{source}", str(tmp_path / "d")]) == 2
    assert "another machine" in capsys.readouterr().err
