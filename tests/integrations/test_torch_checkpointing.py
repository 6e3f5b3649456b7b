"""torch_checkpointing on fastckpt's files: its saves are durable and checked, and a kill loses no older checkpoint."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastckpt
from harness import needs, points
from harness.groups import Strike
from harness.rot import rot

needs.package("torch_checkpointing")
from torch_checkpointing import (  # noqa: E402
    AsyncCheckpointSaverConfig,
    CheckpointLoaderConfig,
    CheckpointManager,
    ItemSpec,
)
from torch_checkpointing.default_resharder import DefaultResharder  # noqa: E402
from torch_checkpointing.staging import CheckpointStagerConfig  # noqa: E402
from torch_checkpointing.storage.base_storage import ReadArgs  # noqa: E402

from fastckpt.integrations.torch_checkpointing import StorageConfig  # noqa: E402

CHECKSUM = "user.fastckpt.crc64nvme"
#: The staging of a process without a device.
STAGING = CheckpointStagerConfig(use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False)


def manager_of(io="auto", *, mmap=True, reshards=False, **config):
    made = CheckpointManager.Config.with_sync_save()
    made.storage_config = StorageConfig(io)
    made.load = CheckpointLoaderConfig(use_mmap=mmap)
    made.items = {"model": ItemSpec(resharder=DefaultResharder())} if reshards else {}
    for name, value in config.items():
        setattr(made, name, value)
    return made.build()


def state(step):
    """Return a rank's part of a state."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    weight = torch.arange(24.0).reshape(8, 3) + step + rank
    return {"model": {"weight": weight}, "own": {"big": torch.full((300_000,), float(step)), "step": step}}


def save(folder, step):
    manager = manager_of()
    manager.save(f"{folder}/step-{step}", state(step))
    manager.close()


def load(folder, step, **config):
    """Load into another state; return whether all values belong to the step."""
    manager = manager_of(**config)
    found, saved = manager.load(f"{folder}/step-{step}", state(-7)), state(step)
    manager.close()
    same = torch.equal(found["model"]["weight"], saved["model"]["weight"])
    return same and torch.equal(found["own"]["big"], saved["own"]["big"]) and found["own"]["step"] == step


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_save_load_and_no_place_is_taken_twice(tmp_path):
    save(tmp_path, 1)
    before = files(tmp_path)
    assert {len(os.listxattr(tmp_path / name)) for name in before} == {1}
    assert [load(tmp_path, 1, mmap=mmap) for mmap in (True, False)] == [True, True]
    with zipfile.ZipFile(tmp_path / "step-1" / "own_0.pt") as archive:
        assert archive.testzip() is not None, "torch wrote checksums"
    manager = manager_of()
    with pytest.raises(FileExistsError, match=r"rename .*tmp_step-1: a file can .* only an empty directory.*step-1'$"):
        manager.save(f"{tmp_path}/step-1", state(2))
    manager.close()
    assert {name: content for name, content in files(tmp_path).items() if "tmp_step-1" not in str(name)} == before
    assert load(tmp_path, 1)
    # The files of a failed save are overwritten.
    (tmp_path / "step-1").rename(tmp_path / "step-0")
    save(tmp_path, 1)
    assert load(tmp_path, 1)


def test_a_file_that_cannot_be_written_to_its_end_is_not_there(tmp_path):
    """Mutant: a stream is closed after an error as after success."""
    manager = manager_of()
    with pytest.raises((AttributeError, TypeError), match=r"lambda|pickle"):
        manager.save(f"{tmp_path}/step-1", {"own": [torch.ones(3), lambda: 0]})
    manager.close()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["tmp_step-1"]


def test_damage_is_noticed_unless_nobody_wants_to_know(tmp_path):
    save(tmp_path, 1)
    for name in ("model_0.pt", "own_0.pt"):
        rot(tmp_path / "step-1" / name, (tmp_path / "step-1" / name).stat().st_size // 2)
    for mmap in (True, False):
        with pytest.raises(fastckpt.CorruptCheckpointError, match=r"_0\.pt is damaged"):
            load(tmp_path, 1, mmap=mmap)
    load(tmp_path, 1, io=fastckpt.IO(verify=False))


def test_a_file_is_compared_once_in_a_load(tmp_path, monkeypatch):
    """Mutant: several threads read a file, each with its own stream."""
    save(tmp_path, 1)
    monkeypatch.setenv("TORCH_CKPT_PARALLEL_FILL_CHUNK_MB", "1")
    opened = []

    def noted(real):
        def open_read(path, **options):
            opened.append(Path(path).name)
            return real(path, **options)

        return open_read

    with points.replaced("fastckpt:open_read", noted):
        assert load(tmp_path, 1)
    assert sorted(opened) == ["model_0.pt", "own_0.pt"]


def test_all_that_a_checkpoint_consists_of_is_synced(tmp_path):
    """Mutant: ``mkdir`` and ``rename`` of torch_checkpointing's own storage are used."""
    synced = []

    def noted(real):
        def fsync(descriptor):
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            real(descriptor)

        return fsync

    # The files themselves are synced by the core.
    with points.replaced("os:fsync", noted):
        save(tmp_path / "runs" / "one", 1)
    runs = tmp_path / "runs"
    assert synced == [runs / "one", runs, tmp_path, runs / "one"]


def test_the_table_of_renames(tmp_path):
    """The table has torch_checkpointing's requirements for each storage."""
    storage = StorageConfig().create_storage()

    def make(name, kind):
        path = tmp_path / name
        if kind == "file":
            path.write_text(name)
        elif kind != "absent":
            path.mkdir()
            if kind == "populated":
                (path / "inside").write_text(name)
        return path

    allowed = {("populated", "absent"), ("populated", "empty"), ("file", "absent"), ("file", "file")}
    for one in ("populated", "file"):
        for other in ("absent", "empty", "populated", "file"):
            source, target = make(f"{one}-{other}", one), make(f"{one}-to-{other}", other)
            before = files(tmp_path)
            if (one, other) in allowed:
                storage.rename(source, target, is_directory=one == "populated", background_cleanup=True)
                assert (target / "inside" if one == "populated" else target).read_text() == source.name
                assert not source.exists()
            else:
                with pytest.raises(OSError, match="rename") as raised:
                    storage.rename(source, target)
                assert raised.value.filename == str(target)
                assert files(tmp_path) == before


def test_its_interface_by_keywords(tmp_path):
    storage = StorageConfig("buffered").create_storage()
    storage.mkdir(path=str(tmp_path / "a" / "b"), recursive=True)
    path = tmp_path / "a" / "b" / "file"
    storage.write(path=path, data=bytearray(b"one"))
    with storage.get_write_stream(path=path, data=None) as file:
        file.write(b"two")
    with storage.stream_read(path=path, read_args=ReadArgs(pre_read_full_file=False, direct_io=True)) as file:
        assert file.seek(1) == 1
        assert file.readinto(memory := bytearray(5)) == 2
    assert bytes(memory[:2]) == b"wo"
    assert storage.read(path) == b"two"
    with pytest.raises(ValueError, match="StorageConfig: io must be one of"):
        StorageConfig("fast")


@pytest.mark.slow
def save_in_the_background(folder):
    io = fastckpt.IO("buffered", threads=2)
    manager = manager_of(io, save=AsyncCheckpointSaverConfig(staging_config=STAGING))
    manager.save(f"{folder}/step-1", state(1)).result(timeout=120)
    manager.close()


def test_its_process_in_the_background_writes_so_too(forge, tmp_path):
    """The test uses a process in which no other test has set up a device."""
    with forge.group(1) as group:
        group.run(save_in_the_background, str(tmp_path), timeout=150)
    assert all(CHECKSUM in os.listxattr(tmp_path / name) for name in files(tmp_path))
    assert load(tmp_path, 1)


def reshard(folder):
    """Save sharded tensors, and load them into whole tensors, by slices of the file."""
    mesh = init_device_mesh("cpu", (1,))
    saved = distribute_tensor(torch.arange(24.0).reshape(8, 3), mesh, [Shard(0)])
    manager = manager_of(reshards=True)
    manager.save(folder, {"model": {"weight": saved}})
    into = distribute_tensor(torch.zeros(8, 3), mesh, [Replicate()])
    found = manager.load(folder, {"model": {"weight": into}})
    manager.close()
    return torch.equal(found["model"]["weight"].to_local(), saved.to_local())


def test_what_is_spread_otherwise_is_read_in_slices(forge, tmp_path):
    """The test uses one rank: several ranks gather their parts only through CUDA."""
    with forge.group(1) as group:
        assert group.run(reshard, str(tmp_path / "step-1")) == [True]
    assert all(CHECKSUM in os.listxattr(tmp_path / name) for name in files(tmp_path))
    assert sorted(map(str, files(tmp_path))) == ["step-1/metadata.pkl", "step-1/model_0.pt"]


def test_two_ranks(forge, tmp_path):
    with forge.group(2) as group:
        for step in (1, 2):
            group.run(save, str(tmp_path), step)
        assert group.run(load, str(tmp_path), 1) == group.run(load, str(tmp_path), 2) == [True, True]
        with pytest.raises(AssertionError, match=r"(?s)rank 0 raised.*rename .*only an empty directory"):
            group.run(save, str(tmp_path), 2)
        assert group.run(load, str(tmp_path), 2) == [True, True]


#: The points of a save at which a rank is killed, and whether the checkpoint exists after that.
KILLS = {
    "before its first file": (Strike(1, "fastckpt:open_write"), False),
    "in its first file": (Strike(1, "torch:save", when="after"), False),
    "after its first file": (Strike(1, "fastckpt:open_write", nth=2), False),
    "before the rename": (Strike(0, "os:replace"), False),
    "after the rename": (Strike(0, "os:replace", when="after"), True),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_leaves_what_was_there(forge, tmp_path, kill):
    strike, is_there = KILLS[kill]
    with forge.group(2) as group:
        group.run(save, str(tmp_path), 1)
        before = files(tmp_path)
        group.start(save, str(tmp_path), 2, strike=strike)
        assert [one.kind for one in group.outcomes(60, ranks=[strike.rank])] == ["died"]
    assert {name: content for name, content in files(tmp_path).items() if name.parts[0] == "step-1"} == before
    assert (tmp_path / "step-2").exists() == is_there
    with forge.group(2) as group:
        assert group.run(load, str(tmp_path), 1) == [True, True]
        if not is_there:
            group.run(save, str(tmp_path), 2)
        assert group.run(load, str(tmp_path), 2) == [True, True]
