"""Bytes of a checkpoint change on the storage."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fastckpt
from fastckpt.exceptions import CheckpointError
from faults.row import Row, Run
from harness.states import numbered, same

if TYPE_CHECKING:
    import random

PAGE = 4096
#: The changes of a file; flipped bits are more frequent than the others.
WAYS = ("a bit", "a bit", "a bit", "a byte", "cut short", "a page of zeros", "a page elsewhere", "longer")


def altered(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return a change that a disk may make to a file: its description, and the new bytes."""
    how = draw.choice(
        ("a bit", "a bit", "a bit", "a byte", "cut short", "a page of zeros", "a page elsewhere", "longer")
    )
    at = draw.randrange(len(data))
    page = at // PAGE * PAGE
    if how == "a bit":
        new = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    elif how == "a byte":
        new = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    elif how == "cut short":
        new = data[:at]
    elif how == "a page of zeros":
        new = data[:page] + bytes(len(data[page : page + PAGE])) + data[page + PAGE :]
    elif how == "a page elsewhere":
        other = draw.randrange(len(data)) // PAGE * PAGE
        new = data[:page] + data[other : other + PAGE] + data[page + PAGE :]
    else:
        new = data + draw.randbytes(draw.choice((1, 8, PAGE)))
    return f"{how} at {at}", new


def _wrong(path: Path, state: dict[str, object], engine: str) -> str:
    try:
        found = fastckpt.load(path, io=engine)
    except (CheckpointError, OSError):
        return ""
    except Exception as error:  # noqa: BLE001 - anything else is a crash
        return f"{type(error).__name__}: {error}"
    return "" if same(found, state) else "other values were loaded without a word"


def _flips(run: Run) -> None:
    draw = run.draw
    # The files are in memory, so that no trial waits for a disk.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "step")
        while run.made < run.trials:
            state = numbered(draw.randrange(1000), draw.choice((500, 9000, 40_000))) | {"constant": np.arange(50)}
            fastckpt.save(state, path, files=fastckpt.Files(shard_size=20_000))
            files = sorted(one for one in path.rglob("*") if one.is_file())
            whole = {file: file.read_bytes() for file in files}
            for _ in range(min(500, run.trials - run.made)):
                file, engine = draw.choice(files), draw.choice(("threads", "buffered", "uring"))
                how, new = altered(whole[file], draw)
                file.write_bytes(new)
                wrong = _wrong(path, state, engine)
                run.count("harmless" if new == whole[file] else file.suffix)
                file.write_bytes(whole[file])
                run.done(wrong and f"seed {run.seed}, {file.name}, {how}, {engine}: {wrong}")
            if not same(fastckpt.load(path), state):
                raise AssertionError("the restored checkpoint does not load")


ROWS = [
    Row(
        12,
        "changed bytes",
        "No load returns values other than those that were saved.",
        "random bits, bytes and pages of every file are changed, moved or removed",
        "the checkpoint loads again once its bytes are restored",
        run=_flips,
        fast=1000,
        nightly=100_000,
        part=10_000,
        mutants=("checksum",),
        tried=1000,
    ),
]
