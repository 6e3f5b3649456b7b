"""``save(..., base=...)`` links unchanged files, and every directory is complete without the others."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import fastckpt
from harness import manifest, mounts, needs, strace
from harness.same import same

BLOCK = 4 << 20
DATA = Path(__file__).parents[1] / "data"


def fine_tune(rows=50):
    """A state of 4 kB for each row. Training changes one percent of the state."""
    frozen = {f"layers.{index}.weight": torch.full((rows, 100), float(index)) for index in range(10)}
    return {
        "model": {**frozen, "head.weight": torch.zeros(rows, 5)},
        "optimizer": {"exp_avg": torch.zeros(rows, 5)},
        "step": 0,
    }


def train(state):
    state["model"]["head.weight"] += 1
    state["optimizer"]["exp_avg"] += 2
    state["step"] += 1


def size(state):
    return sum(tensor.nbytes for part in (state["model"], state["optimizer"]) for tensor in part.values())


def check(path, state):
    """Check that the checkpoint is whole and has this state, and that readers of the model find only the model."""
    assert fastckpt.verify(path).ok
    assert same(fastckpt.load(path), state)
    found = {}
    for file in path.glob("model*.safetensors"):
        found |= safetensors.torch.load_file(file)
    assert same({name: found.pop(name) for name in state["model"]}, state["model"])
    assert not found
    manifest.read(path)
    files = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert set(files) == set(state["model"])
    for name, file in files.items():
        assert name in safetensors.torch.load_file(path / file)


def own_bytes(path):
    """Bytes of the files that no other directory shares."""
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file() and entry.stat().st_nlink == 1)


def test_a_fine_tune_writes_what_is_trained(tmp_path):
    state = fine_tune(rows=1000)
    reports = []
    for step in range(4):
        base = tmp_path / str(step - 1) if step else None
        reports.append(fastckpt.save(state, tmp_path / str(step), base=base))
        assert same(fastckpt.load(tmp_path / str(step)), state)
        train(state)
    assert [report.warnings for report in reports] == [()] * 4
    assert [report.bytes + report.linked_bytes for report in reports] == [size(state)] * 4
    assert [report.linked_files for report in reports] == [0, 0, 1, 1]
    assert own_bytes(tmp_path / "3") < 0.05 * size(state)
    assert str(reports[3]).endswith("(4.00 MB more in 1 file linked from the base)")
    assert list(reports[3].phases) == ["plan", "compare", "write", "fsync", "commit"]
    for step in (1, 0, 2):
        fastckpt.remove(tmp_path / str(step))
    assert fastckpt.verify(tmp_path / "3").ok


def test_what_is_named_frozen_is_linked_from_the_second_save_on(tmp_path):
    state = fine_tune()
    fastckpt.save(state, tmp_path / "0", files=fastckpt.Files(frozen="model.layers.*"))
    check(tmp_path / "0", state)
    train(state)
    report = fastckpt.save(state, tmp_path / "1", base=tmp_path / "0", files=fastckpt.Files(frozen=["model.layers.*"]))
    assert report.linked_bytes == 10 * 50 * 100 * 4
    assert report.bytes == 2 * 50 * 5 * 4
    check(tmp_path / "1", state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unchanged_state_is_linked_whole(tmp_path, asynchronous, engine):
    state = {**fine_tune(), "strided": torch.arange(3000.0).reshape(30, 100).t(), "array": np.arange(5), "none": []}
    state["large"] = torch.arange(2 << 20, dtype=torch.int32)
    assert state["large"].nbytes == 2 * BLOCK
    fastckpt.save(state, tmp_path / "0")
    if asynchronous:
        report = fastckpt.save_async(state, tmp_path / "1", base=tmp_path / "0", io=engine).result()
    else:
        report = fastckpt.save(state, tmp_path / "1", base=tmp_path / "0", io=engine)
    assert (report.bytes, report.linked_files, report.shards) == (0, 2, 2)
    assert same(fastckpt.load(tmp_path / "1"), state)
    # A later change of the state does not change pages of the base.
    state["array"][0] = 7
    report = fastckpt.save(state, tmp_path / "2", base=tmp_path / "1")
    assert (report.linked_files, report.bytes) == (
        1,
        size(state) - size_of_model(state) + 30 * 100 * 4 + 40 + 2 * BLOCK,
    )
    assert same(fastckpt.load(tmp_path / "2"), state)


def size_of_model(state):
    return sum(tensor.nbytes for tensor in state["model"].values())


def test_an_asynchronous_save_writes_what_changed(tmp_path):
    state = fine_tune()
    saves = []
    for step in range(4):
        base = tmp_path / str(step - 1) if step else None
        pending = fastckpt.save_async(state, tmp_path / str(step), base=base, io=fastckpt.IO(max_in_flight=4))
        saves.append((pending, {**state, "step": step}))
        train(state)
    # Each save has waited for its base, which was in flight at the call.
    reports = [pending.result() for pending, _ in saves]
    assert [report.linked_files for report in reports] == [0, 0, 1, 1]
    assert reports[3].staged == size(state)
    for step in range(4):
        loaded = fastckpt.load(tmp_path / str(step))
        assert float(loaded["model"]["head.weight"][0, 0]) == step == loaded["step"]
        assert fastckpt.verify(tmp_path / str(step)).ok


def test_a_save_that_waits_for_its_base_can_be_cancelled(tmp_path):
    slow = fastckpt.save_async(fine_tune(), tmp_path / "0", io=fastckpt.IO(bandwidth_limit="1kB", max_in_flight=2))
    waits = fastckpt.save_async(fine_tune(), tmp_path / "1", base=tmp_path / "0", io=fastckpt.IO(max_in_flight=2))
    try:
        assert waits.cancel()
        assert not slow.done()
    finally:
        slow.cancel()
    assert list(tmp_path.iterdir()) == []


def test_files_are_the_same_whoever_writes_them(tmp_path, engine):
    state = {**fine_tune(), "large": torch.arange(2 << 20, dtype=torch.int32)}
    frozen = fastckpt.Files(frozen=["model.layers.*", "large"])
    fastckpt.save(state, tmp_path / "base", files=frozen, io=fastckpt.IO(threads=1))
    train(state)
    for number, save in enumerate((fastckpt.save, lambda *given, **more: fastckpt.save_async(*given, **more).result())):
        report = save(state, tmp_path / str(number), base=tmp_path / "base", io=engine)
        assert report.linked_files == 2
    one, other = (manifest.body_of(tmp_path / name) for name in "01")
    assert (one["shards"], one["tensors"]) == (other["shards"], other["tensors"])
    assert [shard["file"] for shard in one["shards"]] == [
        f"{group}-{number:05}-of-00002.safetensors" for group in ("model", "training/training") for number in (1, 2)
    ]
    for shard in one["shards"]:
        assert (tmp_path / "0" / shard["file"]).read_bytes() == (tmp_path / "1" / shard["file"]).read_bytes()


def crc64xz(data):
    """CRC-64/XZ by its definition, bit by bit."""
    value = (1 << 64) - 1
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xC96C5795D7870F42 if value & 1 else 0)
    return value ^ (1 << 64) - 1


def test_both_checksums_of_a_tensor_decide(tmp_path):
    state = {"a": torch.arange(300, dtype=torch.uint8), "b": torch.ones(3), "empty": torch.ones(0)}
    fastckpt.save(state, tmp_path / "base")
    body = manifest.body_of(tmp_path / "base")
    found = {tensor["name"]: tensor.get("crc64xz") for tensor in body["tensors"]}
    assert found == {name: f"{crc64xz(tensor.numpy().tobytes()):016x}" for name, tensor in state.items()}

    def linked(change):
        altered = json.loads(json.dumps(body))
        change(altered["tensors"][1])
        manifest.forge(tmp_path / "base", altered)
        report = fastckpt.save(state, tmp_path / "c", base=tmp_path / "base")
        assert report.warnings == ()
        assert same(fastckpt.load(tmp_path / "c"), state)
        return report.linked_files

    assert linked(len) == 1
    # The first checksum still matches: only the second one shows another tensor.
    assert linked(lambda tensor: tensor.update(crc64xz="0" * 16)) == 0
    assert linked(lambda tensor: tensor.update(crc64xz="none")) == 0
    assert linked(lambda tensor: tensor.pop("crc64xz")) == 0


def test_a_base_whose_files_nobody_vouches_for_is_read(tmp_path):
    state = fine_tune()
    fastckpt.save(state, tmp_path / "base")
    # The times of the copy's files differ from those in the manifest.
    shutil.copytree(tmp_path / "base", tmp_path / "copy", copy_function=shutil.copyfile)
    body = manifest.body_of(tmp_path / "base")
    del body["saved"]["files"]
    manifest.forge(tmp_path / "base", body)
    for base in ("copy", "base"):
        assert fastckpt.save(state, tmp_path / "c", base=tmp_path / base).linked_files == 2
        file = tmp_path / base / "training" / "training.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        report = fastckpt.save(state, tmp_path / "c", base=tmp_path / base)
        assert report.linked_files == 1
        assert "training/training.safetensors" in report.warnings[0]
        check(tmp_path / "c", state)


def test_a_checkpoint_may_be_its_own_base(tmp_path):
    state = fine_tune()
    (tmp_path / "c").mkdir()
    for linked in (0, 0, 1, 1):
        (tmp_path / "c" / "config.json").write_text("{}", encoding="utf-8")
        assert fastckpt.save(state, tmp_path / "c", base=tmp_path / "c").linked_files == linked
        check(tmp_path / "c", state)
        train(state)
    assert (tmp_path / "c" / "config.json").exists()
    assert all(entry.stat().st_nlink == 1 for entry in (tmp_path / "c").rglob("*") if entry.is_file())
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_other_names_types_and_groups_are_other_tensors(tmp_path):
    state = {"model": {"a": torch.zeros(64), "b": torch.zeros(64)}, "x": torch.zeros(64)}
    fastckpt.save(state, tmp_path / "base")
    for change in (
        lambda: state["model"].update(b=torch.zeros(64, dtype=torch.int32)),
        lambda: state["model"].update(b=torch.zeros(8, 8)),
        lambda: state["model"].update(c=state["model"].pop("b")),
        lambda: state["model"].pop("a"),
    ):
        change()
        report = fastckpt.save(state, tmp_path / "new", base=tmp_path / "base")
        assert report.linked_files == 1, "only the file of x is linked"
        assert same(fastckpt.load(tmp_path / "new"), state)
    # Without a separate model, the names in the headers differ.
    state = {"model": {"a": torch.zeros(64), "b": torch.zeros(64)}}
    fastckpt.save(state, tmp_path / "base")
    report = fastckpt.save(state, tmp_path / "new", base=tmp_path / "base", files=fastckpt.Files(model_key=None))
    assert report.linked_files == 0
    assert set(safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")) == {"model.a", "model.b"}


def test_a_damaged_base_is_written_anew(tmp_path, caplog):
    state = fine_tune()
    for step in range(3):
        fastckpt.save(state, tmp_path / str(step), base=tmp_path / str(step - 1) if step else None)
        train(state)
    file = tmp_path / "2" / "model-00001-of-00002.safetensors"
    with file.open("r+b") as shard:
        shard.seek(-1000, os.SEEK_END)
        byte = shard.read(1)
        shard.seek(-1000, os.SEEK_END)
        shard.write(bytes([byte[0] ^ 1]))
    report = fastckpt.save(state, tmp_path / "3", base=tmp_path / "2")
    assert report.linked_files == 0
    [warning] = report.warnings
    assert str(file) in warning
    assert "written again" in warning
    assert warning in caplog.text
    check(tmp_path / "3", state)
    assert not fastckpt.verify(tmp_path / "2").ok


def test_what_cannot_be_a_base_costs_time_alone(tmp_path):
    state = fine_tune()
    golden = shutil.copytree(DATA / "v1", tmp_path / "golden")
    body = manifest.body_of(golden)
    for tensor in body["tensors"]:
        del tensor["crc64xz"]
    manifest.forge(golden, body)
    for base, why in (("missing", "No such file"), (golden, "no second checksums")):
        report = fastckpt.save(state, tmp_path / "c", base=tmp_path / base)
        assert report.linked_files == 0
        assert why in report.warnings[0]
        check(tmp_path / "c", state)
    for wrong, error in (("s3://bucket/c", ValueError), (3, TypeError), ("", ValueError)):
        for save in (fastckpt.save, fastckpt.save_async):
            with pytest.raises(error, match=f"{save.__name__}: base"):
                save(state, tmp_path / "c", base=wrong)
    with pytest.raises(KeyError, match=r"save: frozen: 'model\.layer\.\*' matches nothing"):
        fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(frozen="model.layer.*"))
    with pytest.raises(TypeError, match=r"^Files: frozen must be a pattern"):
        fastckpt.Files(frozen=3)


def test_a_base_on_another_file_system_is_written_anew(tmp_path):
    state = fine_tune()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        assert Path(other).stat().st_dev != tmp_path.stat().st_dev, "the test needs two file systems"
        fastckpt.save(state, Path(other) / "base")
        report = fastckpt.save(state, tmp_path / "c", base=Path(other) / "base")
    assert report.linked_files == 0
    assert "Invalid cross-device link: it is on another file system" in report.warnings[0]
    assert "and 1 more" in report.warnings[0]
    check(tmp_path / "c", state)
    assert fastckpt.save(state, tmp_path / "d", base=tmp_path / "c").linked_files == 2


@pytest.mark.root
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_blocks_are_shared_where_no_link_can_be_made(kind):
    state = fine_tune()
    needs.tool("chattr", "e2fsprogs")
    with mounts.mount(kind) as point:
        fastckpt.save(state, point / "base")
        files = sorted((point / "base").rglob("*.safetensors"))
        subprocess.run(["chattr", "+i", *files], check=True)
        try:
            report = fastckpt.save(state, point / "c", base=point / "base")
        finally:
            subprocess.run(["chattr", "-i", *files], check=True)
        assert (report.linked_files, report.warnings) == (2, ())
        assert all(entry.stat().st_nlink == 1 for entry in (point / "c").rglob("*") if entry.is_file())
        check(point / "c", state)
        # Each copy has the time of the base's file, so that the next save links it without reading it.
        assert [(point / "c" / file.relative_to(point / "base")).stat().st_mtime_ns for file in files] == [
            file.stat().st_mtime_ns for file in files
        ]
        files[0].write_bytes(b"gone")
        check(point / "c", state)


KILLED = """
import os, signal, sys
import fastckpt, tqdm.auto
state = fastckpt.load(sys.argv[1], framework="numpy")
state["optimizer"]["exp_avg"] += 1
class Killed(tqdm.auto.tqdm):
    def update(self, n):
        super().update(n)
        if self.n == self.total > 0:
            os.kill(os.getpid(), signal.SIGKILL)
tqdm.auto.tqdm = Killed
fastckpt.save(state, sys.argv[2], base=sys.argv[1], io=fastckpt.IO(progress=True))
"""


def test_a_kill_before_the_commit_leaves_the_base_as_it_was(tmp_path):
    state = fine_tune()
    fastckpt.save(state, tmp_path / "base")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "base"), str(tmp_path / "c")], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    [left] = [entry for entry in tmp_path.iterdir() if entry.name != "base"]
    linked = left / "model.safetensors"
    assert linked.stat().st_nlink == 2
    # The directory then looks as after a kill before the file got its name.
    linked.rename(left / ".fastckpt-linked-0")
    fastckpt.save({}, tmp_path / "d")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "d"]
    assert all(entry.stat().st_nlink == 1 for entry in (tmp_path / "base").rglob("*") if entry.is_file())
    check(tmp_path / "base", state)


@pytest.mark.parametrize("seed", range(2))
def test_any_history_of_changes(tmp_path, seed):
    """Tensors change, come and go at random; every checkpoint has its state and few files."""
    chance = random.Random(seed)
    changes = [chance.choice([0.0, 0.0, 0.02, 0.3, 1.0]) for _ in range(40)]
    state = {"model": {}, "more": {}}
    kept = []
    for step in range(30):
        for number, rate in enumerate(changes):
            part, name = state["model" if number % 3 else "more"], f"t{number}"
            if name not in part or chance.random() < rate:
                part[name] = torch.full((chance.choice([10, 1024]),), float(chance.getrandbits(20)))
            elif chance.random() < 0.005:
                del part[name]
        base = chance.choice(kept[-3:]) if kept and chance.random() < 0.9 else None
        path = tmp_path / f"c{chance.randrange(5)}"
        report = fastckpt.save(state, path, base=base, files=fastckpt.Files(shard_size=20_000))
        total = sum(tensor.nbytes for part in state.values() for tensor in part.values())
        assert report.bytes + report.linked_bytes == total
        assert report.warnings == ()
        assert report.shards <= 2 * (total // 10_000) + 20, step
        kept = [other for other in kept if other != path] + [path]
        assert same(fastckpt.load(path), state)
    assert all(fastckpt.verify(path).ok for path in kept)


SAVE_AGAIN = """
import sys, numpy, fastckpt
state = {f"w{index}": numpy.full(40_000, float(index)) for index in range(6)}
files = fastckpt.Files(shard_size=400_000)
if len(sys.argv) == 2:
    fastckpt.save(state, sys.argv[1], files=files)
else:
    report = fastckpt.save(state, sys.argv[2], base=sys.argv[1], files=files)
    assert report.linked_files == 6, report
"""


@pytest.mark.parametrize("vouched", [True, False])
def test_a_linked_file_is_synced_before_its_link_unless_the_base_vouches_for_it(tmp_path, vouched):
    base, log = tmp_path / "a", tmp_path / "log"
    program = [sys.executable, "-c", SAVE_AGAIN, base]
    subprocess.run(program, check=True)
    if not vouched:
        for file in base.glob("*.safetensors"):
            os.utime(file, (1, 1))
    calls = ["-e", "trace=linkat,fsync,fdatasync", "-f", "-y", "-o", log]
    subprocess.run([needs.tool("strace", "strace"), *calls, *program, tmp_path / "b"], check=True)
    found = strace.parse(log.read_text(encoding="utf-8"))
    links = {call.paths()[0]: call for call in found if call.name == "linkat"}
    files = {str(file) for file in base.glob("*.safetensors")}
    assert set(links) == files
    syncs = [call for call in found if call.name != "linkat" and set(call.fd_paths()) & files]
    assert {call.fd_paths()[0] for call in syncs} == (set() if vouched else files)
    assert all(call.end < links[call.fd_paths()[0]].start for call in syncs)
