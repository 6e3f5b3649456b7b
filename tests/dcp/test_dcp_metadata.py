"""The ``.metadata`` beside the manifest: other tools find the checkpoint by it, but read no values through it."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fastckpt
from fastckpt.dcp import Reader, Writer, install
from fastckpt.distributed import Ranks
from harness import cli, parallel

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


class Evil:
    def __reduce__(self):
        return pytest.fail, ("executed",)


def some_state(fill=1.0):
    weight = torch.full((3, 4), fill)
    return {
        "model": {"w": weight, "tied": weight, "half": torch.full((2,), fill, dtype=torch.bfloat16)},
        "float8": torch.full((4,), fill).to(torch.float8_e5m2),  # stored as bytes
        "complex": torch.full((2, 1), fill, dtype=torch.complex64),
        "scalar": torch.tensor(fill),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.full((2,), fill)),
        "list": [int(fill), torch.full((2,), fill), {"deep": [torch.full((1,), fill)]}],
        "pair": (fill, torch.full((1,), fill)),
        "step": int(fill),
    }


@pytest.fixture
def saved(tmp_path):
    dcp.save(some_state(), storage_writer=Writer(tmp_path / "c"))
    return tmp_path / "c"


def about(metadata):
    """What tools use of an entry; since 2.10, torch adds strides, from the tensors in memory."""
    if isinstance(metadata, dcp.metadata.BytesStorageMetadata):
        return "bytes"
    properties = metadata.properties
    return metadata.size, metadata.chunks, properties.dtype, properties.layout, properties.requires_grad


def test_it_says_what_torchs_own_would(saved, tmp_path):
    dcp.save(some_state(), checkpoint_id=tmp_path / "torchs")
    ours, torchs = (FileSystemReader(path).read_metadata() for path in (saved, tmp_path / "torchs"))
    assert ours.state_dict_metadata.keys() == torchs.state_dict_metadata.keys()
    for key, entry in torchs.state_dict_metadata.items():
        assert about(ours.state_dict_metadata[key]) == about(entry), key
    assert ours.planner_data == torchs.planner_data
    assert ours.storage_data.keys() == torchs.storage_data.keys()


def test_it_has_torchs_own_classes_alone(saved):
    """A machine without fastckpt can read ``.metadata``."""
    found = {
        argument.partition(" ")[0] if operation.name == "GLOBAL" else argument
        for operation, argument, _ in pickletools.genops((saved / ".metadata").read_bytes())
        if operation.name in {"GLOBAL", "SHORT_BINUNICODE"}
    }
    assert any(text.startswith("torch.distributed.checkpoint") for text in found)
    assert not [text for text in found if text.startswith("fastckpt")]


@pytest.mark.parametrize("partial", [True, False])
# An empty tensor has no value that could be wrong, and torch requests none.
@pytest.mark.parametrize("key", [*(key for key in some_state() if key != "empty"), None])
def test_torchs_own_reader_gives_an_error_that_names_ours_and_no_value(saved, partial, key):
    state = some_state(9.0) if key is None else {key: some_state(9.0)[key]}
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    with pytest.raises(dcp.api.CheckpointException, match=r"FileNotFoundError: (?s:.)*fastckpt\.dcp\.Reader"):
        dcp.load(state, storage_reader=FileSystemReader(saved), planner=planner)
    before = some_state(9.0)
    for name, value in state.items():
        assert flat(value) == flat(before[name])


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.to(torch.complex64).tolist()
    if isinstance(value, dict):
        return {key: flat(one) for key, one in value.items()}
    return [flat(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_a_conversion_to_torch_save_is_the_same_error(saved, tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match=r"fastckpt\.dcp\.Reader"):
        dcp_to_torch_save(saved, tmp_path / "file.pt")
    assert not (tmp_path / "file.pt").exists()


def test_the_name_of_the_remedy_is_no_file_of_ours(saved):
    (storage,) = {info.relative_path for info in FileSystemReader(saved).read_metadata().storage_data.values()}
    assert "/" not in storage
    assert len(storage.encode()) <= 255
    assert not (saved / storage).exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(Evil())])
def test_fastckpt_never_reads_it(saved, tmp_path, content):
    (saved / ".metadata").write_bytes(content)
    assert fastckpt.verify(saved).ok
    assert fastckpt.load(saved)["step"] == 1
    for installed in (False, True):
        state = {"step": 0, "scalar": torch.tensor(0.0)}
        if installed:
            with install():
                dcp.load(state, checkpoint_id=saved)
        else:
            dcp.load(state, storage_reader=Reader(saved))
        assert (state["step"], float(state["scalar"])) == (1, 1.0)
    fastckpt.copy(saved, tmp_path / "copy")
    assert fastckpt.load(tmp_path / "copy")["step"] == 1


def test_it_lives_and_goes_with_its_checkpoint(saved, tmp_path):
    (listed,) = fastckpt.list(tmp_path)
    assert listed.bytes == sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    fastckpt.copy(saved, tmp_path / "copy")
    assert (tmp_path / "copy" / ".metadata").read_bytes() == (saved / ".metadata").read_bytes()
    # A save over the checkpoint replaces its table: an old table would lead tools to keys that no longer exist.
    dcp.save({"other": torch.ones(1)}, storage_writer=Writer(saved))
    assert list(FileSystemReader(saved).read_metadata().state_dict_metadata) == ["other"]
    fastckpt.save({"other": torch.ones(1)}, saved)
    assert not (saved / ".metadata").exists()
    # A removal needs no force=True.
    fastckpt.remove(tmp_path / "copy")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_run_lets_it_go_with_its_checkpoint(tmp_path):
    """Retention and ``prune`` remove ``.metadata``, even beside ``files=``. Mutant: a second list of our files."""
    for name in ("step-1", "step-2"):
        about = {"lineage": {"order": int(name[-1]), "forks": [], "files": ["config.json"]}}
        writer = Writer(tmp_path / name, files={"config.json": "{}"}, metadata=about)
        dcp.save(some_state(), storage_writer=writer)
    assert cli.main(["prune", str(tmp_path), "--keep", "last=1", "--yes"]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["step-2"]
    with fastckpt.Manager(tmp_path, keep=1, name="step-{step}", async_save=False) as manager:
        manager.save(3, some_state())
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["step-3"]


def test_a_save_that_fails_leaves_the_old_one(saved):
    before = (saved / ".metadata").read_bytes()
    with pytest.raises(dcp.api.CheckpointException, match="is not supported"):
        dcp.save({"other": object()}, storage_writer=Writer(saved))
    assert (saved / ".metadata").read_bytes() == before
    assert fastckpt.load(saved)["step"] == 1


@pytest.mark.parametrize("save", [fastckpt.save, lambda state, path: dcp.save(state, storage_writer=Writer(path))])
def test_nothing_is_saved_beside_what_torch_wrote(tmp_path, save):
    dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    with pytest.raises((FileExistsError, dcp.api.CheckpointException), match=r"which torch\.distributed\.checkpoint"):
        save(some_state(), tmp_path / "c")
    # A directory with both checkpoints, as torch's writer leaves it when it saves over fastckpt's.
    save(some_state(), tmp_path / "d")
    dcp.save(some_state(), checkpoint_id=tmp_path / "d")
    with pytest.raises((FileExistsError, dcp.api.CheckpointException), match=r"which torch\.distributed\.checkpoint"):
        save(some_state(), tmp_path / "d")


def test_it_is_the_same_for_any_number_of_ranks(forge, tmp_path):
    for size in (1, 2, 3):
        with forge.group(size) as group:
            group.run(save_and_load_by_torch, tmp_path / str(size))
    one, *others = [(tmp_path / str(size) / ".metadata").read_bytes() for size in (1, 2, 3)]
    assert others == [one] * 2
    entry = FileSystemReader(tmp_path / "2").read_metadata().state_dict_metadata["model.embed.weight"]
    assert (entry.size, len(entry.chunks)) == (parallel.Model().embed.weight.shape, 1)


def save_and_load_by_torch(path):
    dcp.save(parallel.state("fsdp"), storage_writer=Writer(path, ranks=Ranks(timeout=60)))
    with pytest.raises(dcp.api.CheckpointException, match=r"fastckpt\.dcp\.Reader"):
        dcp.load(parallel.state("fsdp"), storage_reader=FileSystemReader(path))
