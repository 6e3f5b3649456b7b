"""With fastckpt installed, programs that name torch's writer and reader get fastckpt's."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem

import fastckpt
from fastckpt.dcp import Reader, Writer, install
from fastckpt.distributed import Ranks
from harness import needs, points

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]

STATE = {"model": {"w": torch.ones(3)}, "step": 5}


def load(path, reader=None):
    state = {"model": {"w": torch.zeros(3)}, "step": 0}
    dcp.load(state, checkpoint_id=path, storage_reader=reader)
    return state["step"], state["model"]["w"].tolist()


def test_a_save_without_a_writer_is_ours_and_what_torch_wrote_is_read_by_torch(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path / "torchs")
    with install():
        dcp.save(STATE, checkpoint_id=tmp_path / "ours")
        assert fastckpt.load(tmp_path / "ours")["step"] == 5
        for name in ("torchs", "ours"):
            assert load(tmp_path / name) == (5, [1.0] * 3)
            assert load(tmp_path / name, FileSystemReader(tmp_path / name)) == (5, [1.0] * 3)
        # A reader may read several checkpoints, one after another.
        reader = FileSystemReader(tmp_path / "none")
        for name in ("ours", "torchs", "ours"):
            assert load(tmp_path / name, reader) == (5, [1.0] * 3)
    dcp.save(STATE, checkpoint_id=tmp_path / "again")
    assert (tmp_path / "again" / ".metadata").exists()
    assert load(tmp_path / "again") == (5, [1.0] * 3)


def test_names_that_were_imported_before_are_ours_too(tmp_path):
    with install(files=fastckpt.Files(shard_size="1MB"), ranks=Ranks(timeout=5)):
        writer = FileSystemWriter(tmp_path / "c", single_file_per_rank=False, thread_count=3, overwrite=False)
        assert isinstance(writer, Writer)
        assert isinstance(writer, FileSystemWriter)
        assert isinstance(FileSystemReader(path=tmp_path / "c"), Reader)
        dcp.save(STATE, storage_writer=writer)
        with pytest.raises(dcp.api.CheckpointException, match="FileExistsError"):
            dcp.save(STATE, storage_writer=writer)
        dcp.async_save(STATE, storage_writer=FileSystemWriter(tmp_path / "a", cache_staged_state_dict=True)).result()
    assert fastckpt.load(tmp_path / "a")["step"] == 5
    assert type(FileSystemWriter(tmp_path / "c")) is FileSystemWriter
    assert type(FileSystemReader(tmp_path / "c")) is FileSystemReader


class Deferred(dcp.staging.AsyncStager if hasattr(dcp.staging, "StagingOptions") else object):
    """A stager that delivers the state when the test permits it."""

    _synchronize_after_execute = False

    def __init__(self):
        self.staged = Future()

    def stage(self, state_dict):
        self.state = state_dict
        return self.staged

    def synchronize_staging(self):
        pass

    def close(self):
        pass


def test_an_asynchronous_save_that_has_begun_is_ours_when_the_installation_ends(tmp_path):
    needs.of_torch(hasattr(dcp.staging, "StagingOptions"), "stagers that give a Future")
    stager = Deferred()
    with install():
        saving = dcp.async_save(STATE, checkpoint_id=tmp_path / "c", async_stager=stager)
    stager.staged.set_result(stager.state)
    saving.upload_completion.result()
    assert fastckpt.load(tmp_path / "c")["step"] == 5


def save_in_a_process(path):
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    with install(ranks=Ranks(timeout=60)):
        saving = dcp.async_save(STATE, checkpoint_id=path, async_checkpointer_type=kind)
    saving.result(timeout=100)


@pytest.mark.slow
def test_a_process_beside_training_saves_ours(forge, tmp_path):
    needs.of_torch(hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"), "AsyncCheckpointerType")
    with forge.group(2) as group:
        group.run(save_in_a_process, tmp_path / "c", timeout=200)
    assert fastckpt.load(tmp_path / "c")["step"] == 5
    assert not list((tmp_path / "c").glob("*.distcp"))


def save_in_half(path):
    half = dist.new_group([1, 2])
    if dist.get_rank():
        with install(ranks=Ranks(timeout=60)):
            dcp.async_save(STATE, checkpoint_id=path, process_group=half).result()


def test_a_part_of_the_ranks_saves_asynchronously(forge, tmp_path):
    """A save may have a process group, though the installation's options have none."""
    needs.of_torch(needs.torch_at_least(2, 7), "dcp.save in a group without rank 0")
    with forge.group(3) as group:
        group.run(save_in_half, tmp_path / "c")
    assert fastckpt.load(tmp_path / "c")["step"] == 5


def test_a_torch_that_saves_in_another_way_is_an_error(monkeypatch):
    needs.of_torch(hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"), "AsyncCheckpointerType")
    monkeypatch.delattr(dcp.state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor")
    with (
        points.replaced(points.PREPARED, lambda _: False),
        pytest.raises(RuntimeError, match=r"give dcp\.async_save a storage_writer"),
    ):
        install()


class Derived(FileSystemWriter):
    """A user's subclass of torch's writer."""

    def __init__(self, path, more):
        super().__init__(path)
        self.more = more


def test_what_is_not_torchs_own_stays(tmp_path):
    with install():
        assert type(Derived(tmp_path / "d", more=3)) is Derived
        dcp.save(STATE, storage_writer=Derived(tmp_path / "d", more=3))
    assert (tmp_path / "d" / ".metadata").exists()


def test_a_format_of_torchs_own_stays(tmp_path):
    needs.of_torch(hasattr(filesystem, "SerializationFormat"), "SerializationFormat")
    format_ = filesystem.SerializationFormat.SAFETENSORS
    with install():
        assert type(FileSystemWriter(tmp_path / "s", serialization_format=format_)) is FileSystemWriter


def test_the_last_installation_is_in_force_and_each_ends_once(tmp_path):
    outer = install(files=fastckpt.Files(model_key=None))
    inner = install(files=fastckpt.Files(model_key="model"))
    assert FileSystemWriter(tmp_path)._settings.files.model_key == "model"
    outer.uninstall()
    assert FileSystemWriter(tmp_path)._settings.files.model_key == "model"
    inner.uninstall()
    inner.uninstall()
    assert type(FileSystemWriter(tmp_path)) is FileSystemWriter


def test_options_are_checked_at_once():
    with pytest.raises(TypeError, match="leave out path="):
        install(path="c")
    with pytest.raises(TypeError, match="unexpected keyword"):
        install(nothing=1)
    with pytest.raises(TypeError, match=r"'timeout': it is an option of ranks=fastckpt\.distributed\.Ranks"):
        install(timeout=5)
    with pytest.raises(ValueError, match="io must be"):
        install(io="fast")
    with pytest.raises(TypeError, match="files must be"):
        install(files=3)
    assert type(FileSystemWriter("c")) is FileSystemWriter
