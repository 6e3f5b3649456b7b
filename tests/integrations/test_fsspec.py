"""fsspec's file system: files are whole and durable, even if fsspec closes them after an error."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter

import fastckpt
from fastckpt.integrations.fsspec import FileSystem

ENTRY = '[project.entry-points."fsspec.specs"]\nfastckpt = "fastckpt.integrations.fsspec:FileSystem"\n'


@pytest.fixture
def files():
    """The file system, under the name that the package declares."""
    assert ENTRY in Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    fsspec.register_implementation("fastckpt", FileSystem, clobber=True)
    return fsspec.filesystem("fastckpt", io="buffered")


@pytest.fixture
def old(tmp_path):
    """An existing file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def damage(path):
    """Change a byte, and restore the time of the file."""
    about = path.stat()
    with path.open("r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize("how", [{"mode": "wb"}, {"mode": "w"}, {"mode": "wb", "compression": "gzip"}])
@pytest.mark.parametrize("fails", [False, True])
def test_a_file_is_there_if_no_error_comes(files, old, how, fails):
    """Mutant: each close gives a file its path, and fsspec also closes it after an error."""
    data = "new" if how["mode"] == "w" else b"new"
    read = {**how, "mode": how["mode"].replace("w", "r")}
    try:
        with fsspec.open(f"fastckpt://{old}", **how) as file:
            file.write(data)
            assert old.read_bytes() == b"old"
            assert not fails
    except AssertionError:
        assert fails
    if fails:
        assert old.read_bytes() == b"old"
    else:
        with fsspec.open(f"fastckpt://{old}", **read) as file:
            assert file.read() == data
    assert [one.name for one in old.parent.iterdir()] == ["file"]


def test_a_file_that_a_handler_of_another_error_writes_is_there(files, old):
    """Mutant: any exception that is being handled counts as an error of the file."""
    try:
        int("nothing")
    except ValueError:
        with files.open(old, "wb") as file:
            file.write(b"new")
        kept = files.open(old.with_name("kept"), "wb")
        kept.write(b"new")
    kept.close()
    kept.close()
    assert (old.read_bytes(), old.with_name("kept").read_bytes()) == (b"new", b"new")


def test_what_nobody_closes_is_not_there(files, old):
    file = files.open(old, "wb")
    file.write(b"new")
    with pytest.warns(RuntimeWarning, match="was not closed"):
        del file
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("fails", [False, True])
def test_files_of_a_transaction_are_there_when_it_is_complete(files, old, fails):
    paths = [old, old.with_name("more")]
    try:
        with files.transaction:
            for path in paths:
                with files.open(path, "wb") as file:
                    file.write(b"new")
            assert old.read_bytes() == b"old"
            assert not fails
    except AssertionError:
        assert fails
    assert old.read_bytes() == (b"old" if fails else b"new")
    assert paths[1].exists() != fails


def test_a_whole_file_is_compared_and_a_range_is_not(files, tmp_path):
    path = tmp_path / "file"
    files.pipe(str(path), b"whole or not at all")
    assert files.cat_ranges([str(path)] * 2, [0, 9], [5, 12]) == [b"whole", b"not"]
    with files.open(path) as file:
        assert file.fileno() > 0
    damage(path)
    for read in (lambda: files.open(path), lambda: files.cat(str(path))):
        with pytest.raises(fastckpt.CorruptCheckpointError, match="is damaged"):
            read()
    assert files.cat_ranges([str(path)], [9], [12]) == [b"not"]
    assert FileSystem(verify=False).cat(str(path)) == b"Xhole or not at all"
    with files.open(path, verify=False) as file:
        assert file.read(5) == b"Xhole"


def test_copies_are_such_files_and_renames_replace(files, old, monkeypatch):
    target = old.with_name("sub") / "file"
    files.put(str(old), str(target))
    files.copy(str(target), str(old.with_name("copy")))
    damage(target)
    with pytest.raises(fastckpt.CorruptCheckpointError):
        files.cat(str(target))
    old.with_name("copy").write_bytes(b"new")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    files.mv(str(old.with_name("copy")), str(old))
    assert synced == [str(old.parent)]
    files.rename(str(target.parent), str(old.with_name("moved")))
    assert sorted(files.ls(str(old.parent), detail=False)) == [str(old), str(old.with_name("moved"))]
    assert old.read_bytes() == b"new"
    files.rm(str(old.with_name("moved")), recursive=True)
    assert [one.name for one in old.parent.iterdir()] == ["file"]


def test_changes_in_place_are_refused(files, old):
    for mode in ("ab", "r+b"):
        with pytest.raises(ValueError, match="write all of it, with mode 'wb'"):
            files.open(old, mode)
    with pytest.raises(ValueError, match="io must be one of"):
        FileSystem(io="fast")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_saves_through_it(files, tmp_path):
    """torch.save works, and so does torch.distributed.checkpoint, which commits files by a transaction and a rename."""
    state = {"weight": torch.arange(100.0)}
    with fsspec.open(f"fastckpt://{tmp_path}/state.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"fastckpt://{tmp_path}/state.pt") as file:
        assert torch.equal(torch.load(file)["weight"], state["weight"])
    dcp.save(state, storage_writer=FsspecWriter(f"fastckpt://{tmp_path}/dcp", sync_files=False), no_dist=True)
    into = {"weight": torch.zeros(100)}
    dcp.load(into, storage_reader=FsspecReader(f"fastckpt://{tmp_path}/dcp"), no_dist=True)
    assert torch.equal(into["weight"], state["weight"])
    damage(next(tmp_path.glob("dcp/*.distcp")))
    with pytest.raises(dcp.api.CheckpointException, match="is damaged"):
        dcp.load(into, storage_reader=FsspecReader(f"fastckpt://{tmp_path}/dcp"), no_dist=True)
