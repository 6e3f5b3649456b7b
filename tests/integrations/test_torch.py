"""``torch.save`` and ``torch.load`` on file objects of fastckpt: torch's own format, whole, durable and checked."""

from __future__ import annotations

import collections
import io
import os
import zipfile

import pytest
import torch

import fastckpt
from fastckpt.integrations import torch as door
from harness.rot import rot


@pytest.fixture
def state():
    torch.manual_seed(3)
    weight = torch.randn(3000, 1000)
    return {
        "weight": weight,
        "tied": weight.t(),
        "half": torch.randn(1_000_001).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(5))]).state_dict(),
        "step": 7,
    }


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("weight", "tied", "half", "empty")) and (
        one["optimizer"] == other["optimizer"] and one["step"] == other["step"]
    )


@pytest.mark.parametrize("new", [True, False])
def test_by_hand(state, tmp_path, new):
    """``torch.save`` needs only ``write``, in both of its formats."""
    path = tmp_path / "state.pt"
    with fastckpt.open_write(path) as file:
        torch.save(state, file, _use_new_zipfile_serialization=new)
    loads = [torch.load(path), torch.load(path, weights_only=True, map_location="cpu")]
    if new:
        loads.append(torch.load(path, mmap=True))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, "torch computes checksums unless the integration is installed"
    with fastckpt.open_read(path) as file:
        loads.append(torch.load(file))
    assert all(same(state, loaded) for loaded in loads)


def test_installed(state, tmp_path):
    path = tmp_path / "state.pt"
    theirs = tmp_path / "theirs.pt"
    torch.save(state, theirs)
    with door.install():
        for f in (path, str(path)):
            torch.save(state, f)
        torch.serialization.save(state, tmp_path / "other.pt")
        loads = [torch.load(path, mmap=mmap) for mmap in (False, True)]
        loads += [torch.load(theirs), torch.serialization.load(tmp_path / "other.pt")]
        assert all(same(state, loaded) for loaded in loads)
        assert torch.serialization.get_crc32_options()
        del loads  # one of them maps the file
        rot(path, path.stat().st_size // 2)
        for mmap in (False, True):
            with pytest.raises(fastckpt.CorruptCheckpointError, match=f"{path} is damaged"):
                torch.load(path, mmap=mmap)
    torch.load(path)  # torch itself does not notice
    with door.install(verify=False):
        torch.load(path)
    before = path.read_bytes()
    torch.save(state, path)
    assert path.read_bytes() != before, "torch wrote it, with checksums"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_save_that_fails_leaves_the_old_file(state, tmp_path):
    path = tmp_path / "state.pt"
    with door.install():
        torch.save(state, path)
        with pytest.raises((AttributeError, TypeError), match=r"lambda|pickle"):
            torch.save({**state, "loss": lambda: 0}, path)
        assert same(state, torch.load(path))
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]
    assert torch.serialization.get_crc32_options()


def test_what_is_no_path_of_a_file_goes_to_torch(state, tmp_path):
    with door.install():
        memory = io.BytesIO()
        torch.save(state, memory)
        memory.seek(0)
        assert same(state, torch.load(memory))
        with pytest.raises(RuntimeError, match="Parent directory"):
            torch.save(state, tmp_path / "missing" / "state.pt")
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "nothing.pt")
        with pytest.raises((RuntimeError, IsADirectoryError)):
            torch.save(state, tmp_path)
        torch.save(state, os.devnull)
    assert [*tmp_path.iterdir()] == []


def test_what_a_new_file_would_not_be_is_torchs(state, tmp_path):
    """A file with two names keeps both; a save without data seeks back in its file."""
    path, other = tmp_path / "state.pt", tmp_path / "other.pt"
    path.write_text("old")
    os.link(path, other)
    with door.install():
        torch.save(state, path)
        assert same(state, torch.load(other))
        with torch.serialization.skip_data():
            torch.save(state, tmp_path / "plan.pt")
        torch.save(state, tmp_path / "new.pt")
    kept = [one.name for one in tmp_path.iterdir() if "user.fastckpt.crc64nvme" in os.listxattr(one)]
    assert kept == ["new.pt"]


def test_a_save_inside_of_another_leaves_its_sums_off(tmp_path):
    """A save in another thread does so, too. Mutant: each save switches torch's checksums on again at its end."""
    seen = []

    class Outer:
        def __reduce__(self):
            torch.save({}, tmp_path / "inner.pt")
            seen.append(torch.serialization.get_crc32_options())
            return collections.OrderedDict, ()

    with door.install():
        torch.save(Outer(), tmp_path / "outer.pt")
        assert (torch.load(tmp_path / "inner.pt"), torch.load(tmp_path / "outer.pt")) == ({}, {})
    assert seen == [False]
    assert torch.serialization.get_crc32_options()


def test_options_are_checked():
    with pytest.raises(ValueError, match="install: io must be one of"):
        door.install(io="fast")
