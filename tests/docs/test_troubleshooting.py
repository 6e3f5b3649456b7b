"""docs/troubleshooting.md has every error class, and fastckpt raises each message that the page names."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import exceptions
from harness import mounts

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: Sections that are not about a message.
OTHERS = {"By class", "Timeouts to set", "Reporting a bug"}
STATE = {"w": np.arange(4.0)}


def saved(path, state=STATE, **options):
    fastckpt.save(state, path / "step", **options)
    return path / "step"


def foreign(path):
    torch.save(STATE, path / "model.pt")
    fastckpt.load(path / "model.pt")


def occupied(path):
    (path / "step").mkdir()
    (path / "step" / "zero_to_fp32.py").touch()
    saved(path)


def damaged(path):
    file = saved(path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fastckpt.load(path / "step")


def later(path):
    file = saved(path) / "fastckpt.json"
    text = file.read_text(encoding="utf-8")
    number = re.match(r'(\{"fastckpt":)1,', text)
    file.write_text(number[1] + "2," + text[number.end() :], encoding="utf-8")
    fastckpt.load(path / "step")


def spread(path):
    from torch.distributed.tensor import DTensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        saved(path, {"w": DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))})
    finally:
        torch.distributed.destroy_process_group()


def undeclared(path):
    registry = fastckpt.Registry(Undeclared)
    fastckpt.load(saved(path, {"at": Undeclared(3)}, registry=registry))


class Undeclared(str):
    __slots__ = ()


def other(path):
    fastckpt.load(saved(path), into={"v": np.zeros(4)})


def replaced(path):
    state = {f"t{number}": np.zeros(1) for number in range(65)}
    with fastckpt.open(saved(path, state, files=fastckpt.Files(shard_size=1))) as checkpoint:
        shutil.rmtree(path / "step")
        checkpoint["t64"]


def silent(path):
    """Make a group of two ranks, one of which never arrives."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend

    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=2)
    try:
        fastckpt.distributed.save(STATE, path / "step", ranks=fastckpt.distributed.Ranks(timeout=0.2))
    finally:
        torch.distributed.destroy_process_group()


def full(_):
    with mounts.mount("tmpfs", size=1 << 20) as point:
        saved(point, {"w": np.zeros(1 << 20)})


def astray(path):
    (path / "latest").write_text("step-00000007\n")
    fastckpt.Manager(path).restore()


#: How to cause each message, and its class.
MESSAGES = {
    "is not a checkpoint of fastckpt": (foreign, exceptions.NotACheckpointError),
    "choose another name": (occupied, FileExistsError),
    "checksum is": (damaged, exceptions.CorruptCheckpointError),
    "this fastckpt reads version": (later, exceptions.FormatVersionError),
    "cannot store": (lambda path: saved(path, {"lock": threading.Lock()}), exceptions.UnsupportedTypeError),
    "is spread over processes": (spread, exceptions.UnsupportedTypeError),
    "which this program does not know": (undeclared, exceptions.UnsupportedTypeError),
    "into= does not fit": (other, exceptions.StructureMismatchError),
    "was replaced or removed while it was read": (replaced, exceptions.ReplacedCheckpointError),
    "has not answered for": (silent, exceptions.RanksError),
    "No space left on device": (full, OSError),
    "but a run was here": (astray, exceptions.CheckpointError),
}
#: A message in the log, not an exception.
LOGGED = "blocked by a seccomp profile"


def test_the_page_has_each_message():
    headings = set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert headings - OTHERS == {*MESSAGES, LOGGED}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if section.partition("\n")[0] not in OTHERS:
            assert section.count("- **Cause.**") == section.count("- **Remedy.**") == 1, section


@pytest.mark.filterwarnings("ignore:fastckpt. .*declare:RuntimeWarning")
@pytest.mark.parametrize("words", MESSAGES)
def test_each_message_is_what_fastckpt_says(tmp_path, words):
    provoke, kind = MESSAGES[words]
    with pytest.raises(kind, match=re.escape(words)) as caught:
        provoke(tmp_path)
    assert not kind.__module__.startswith("fastckpt") or type(caught.value) is kind


def test_a_refused_ring_is_logged(children, tmp_path):
    said = children.run("round_trips", directory=str(tmp_path), saves=1, blocked="EPERM")
    assert any(LOGGED in line for line in said["warnings"])


def test_each_public_error_class_is_on_the_page():
    table = PAGE.partition("\n## is not")[0]
    public = [name for name in exceptions.__all__ if name in dir(exceptions)]
    assert [name for name in public if f"\n| `{name}` |" not in table] == []
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(public)


def test_each_class_leads_to_its_messages():
    table = PAGE.partition("\n## is not")[0]
    for words, (_, kind) in MESSAGES.items():
        if kind.__module__.startswith("fastckpt") and kind is not exceptions.CheckpointError:
            (row,) = re.findall(rf"^\| `{kind.__name__}` .*$", table, re.MULTILINE)
            anchor = re.sub(r"[^\w -]", "", words).replace(" ", "-")
            if words != "is spread over processes":
                assert f"(#{anchor})" in row
