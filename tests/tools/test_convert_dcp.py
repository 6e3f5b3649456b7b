"""``fastckpt import`` of directories of torch.distributed.checkpoint: whole, checked, no pickle executed."""

from __future__ import annotations

import datetime as dt
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import fastckpt
from harness import cli, limits
from harness.parallel import dist

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


def some_state():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 5,
        "pair": (1, torch.ones(3)),
        "parameter": [{"p": (torch.nn.Parameter(torch.ones(2)),)}],
        "numbers": [1, 2.5, None],
        "array": np.arange(3),
        "number": np.float64(2.5),
        "bytes": b"x\xff",
        "set": {1, 2},
        "time": dt.timedelta(3),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
        "view": torch.arange(12).view(3, 4)[:, 1:3],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
    }


def test_all_of_a_state_is_imported(tmp_path, capsys):
    state = some_state()
    dcp.save(state, checkpoint_id=tmp_path / "torchs")
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 0
    assert "imported" in capsys.readouterr().out
    assert fastckpt.verify(tmp_path / "c").ok
    loaded = fastckpt.load(tmp_path / "c")
    assert list(loaded) == list(state)
    for key in ("half", "eight", "view", "empty", "scalar"):
        assert loaded[key].dtype is state[key].dtype
        assert torch.equal(loaded[key].double(), state[key].double()), key
    for key in ("step", "numbers", "number", "bytes", "set", "time", "dtype", "device", "size"):
        assert loaded[key] == state[key], key
    assert np.array_equal(loaded["array"], state["array"])
    assert isinstance(loaded["parameter"][0]["p"][0], torch.nn.Parameter)
    assert torch.equal(loaded["pair"][1], torch.ones(3))
    for key, value in state["model"].items():
        assert torch.equal(loaded["model"][key], value)
    assert list(loaded["optimizer"]["state"]) == [0, 1, 2, 3]
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_values_may_lie_in_files_that_are_larger_than_what_a_look_may_take(tmp_path, import_, monkeypatch):
    """A mapping counts as memory, even if none of its pages is read."""
    limits.lower(monkeypatch, "bytes of a look", 32 << 20)
    dcp.save({"weight": torch.zeros(24 << 20), "step": 5}, checkpoint_id=tmp_path / "torchs")
    done = import_(tmp_path / "torchs", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert fastckpt.load(tmp_path / "c", keys="step") == {"step": 5}


def save_in_pieces(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3)
    parts = {
        f"dim{dim}": DTensor.from_local(part, mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride())
        for dim in range(3)
        for part in [whole.tensor_split(_cuts(whole.shape[dim]), dim)[dist.get_rank()]]
    }
    dcp.save(parts, checkpoint_id=path)


def _cuts(size):
    """The cuts of a dimension by torch: all parts except the last have the same size."""
    step = -(-size // dist.get_world_size())
    return [min(size, step * rank) for rank in range(1, dist.get_world_size())]


def test_tensors_in_pieces_are_put_together(forge, tmp_path):
    with forge.group(3) as group:
        group.run(save_in_pieces, tmp_path / "torchs")
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 0
    loaded = fastckpt.load(tmp_path / "c")
    for dim in range(3):
        assert torch.equal(loaded[f"dim{dim}"], torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3))


class Evil:
    def __reduce__(self):
        return (print, ("pwned",))


def test_what_a_pickle_names_is_not_called(tmp_path, capfd):
    dcp.save({"w": torch.ones(3), "evil": 1}, checkpoint_id=tmp_path / "torchs")
    (file,) = (tmp_path / "torchs").glob("*.distcp")
    table = pickle.loads((tmp_path / "torchs" / ".metadata").read_bytes())
    made = io.BytesIO()
    torch.save(Evil(), made)
    index = next(index for index in table.storage_data if index.fqn == "evil")
    table.storage_data[index].offset = file.stat().st_size
    table.storage_data[index].length = len(made.getbuffer())
    with file.open("ab") as appended:
        appended.write(made.getbuffer())
    (tmp_path / "torchs" / ".metadata").write_bytes(pickle.dumps(table))
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 2
    told = capfd.readouterr()
    assert "print is not among the classes that are read" in told.err
    assert "pwned" not in told.out + told.err
    (tmp_path / "torchs" / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 2
    told = capfd.readouterr()
    assert "print is not among the classes that are read" in told.err
    assert "pwned" not in told.out + told.err
    assert not (tmp_path / "c").exists()


def spoiled(path, how):
    dcp.save({"w": torch.ones(3000), "step": 5}, checkpoint_id=path)
    (file,) = path.glob("*.distcp")
    table = path / ".metadata"
    content = bytearray(file.read_bytes())
    metadata = pickle.loads(table.read_bytes())
    info = {index.fqn: info for index, info in metadata.storage_data.items()}
    if how == "a byte of a tensor":
        content[info["w"].offset + info["w"].length // 2] ^= 1
    elif how == "a file that is cut":
        content = content[: info["w"].offset + 100]
    elif how == "a file elsewhere":
        info["w"].relative_path = "../" + info["w"].relative_path
    elif how == "a piece that is missing":
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2999])
    elif how == "another tensor in its place":
        info["w"].offset, info["w"].length = info["step"].offset, info["step"].length
    elif how == "extensions":
        info["w"].transform_descriptors = ["stream.zstd/1"]
    elif how == "a list without an end":
        metadata.planner_data["step"] = ("list", 1 << 40)
    elif how == "a place before a list":
        metadata.planner_data["step"] = ("list", -1)
    elif how == "keys without an end":
        metadata.planner_data["step"] = ("a",) * 5000
    elif how == "a table that is cut":
        table.write_bytes(pickle.dumps(metadata)[:100])
        return
    file.write_bytes(content)
    table.write_bytes(pickle.dumps(metadata))


SPOILED = {
    "a byte of a tensor": (1, "do not match their checksum"),
    "a file that is cut": (1, "is damaged"),
    "a file elsewhere": (1, "not a file beside it"),
    "a piece that is missing": (1, "are not the whole tensor"),
    "another tensor in its place": (1, "it is not the piece that the table lists"),
    "a list without an end": (1, "lists with nearly all of their members missing"),
    "a place before a list": (1, "the path of keys to 'step' is invalid"),
    "keys without an end": (1, "the path of keys to 'step' is invalid"),
    "extensions": (2, "written with extensions"),
    "a table that is cut": (2, ".metadata is damaged"),
}


@pytest.mark.usefixtures("quick_look")
@pytest.mark.parametrize("how", SPOILED)
def test_damage_is_found_and_nothing_is_left(tmp_path, capsys, how):
    spoiled(tmp_path / "torchs", how)
    status, text = SPOILED[how]
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == status
    assert text in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["torchs"]


def test_what_is_there_is_replaced_only_when_asked(tmp_path, capsys):
    dcp.save({"step": 5}, checkpoint_id=tmp_path / "torchs")
    fastckpt.save({"step": 1}, tmp_path / "c")
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "torchs"), str(tmp_path / "c"), "--overwrite"]) == 0
    assert fastckpt.load(tmp_path / "c") == {"step": 5}


def test_the_files_are_archives_as_expected(tmp_path):
    """The reader of pieces relies on this: torch stores tensors in archives without compression."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "torchs")
    (file,) = (tmp_path / "torchs").glob("*.distcp")
    with zipfile.ZipFile(file) as archive:
        assert {each.compress_type for each in archive.infolist()} == {zipfile.ZIP_STORED}
