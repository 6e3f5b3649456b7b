"""Checkpoints to copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import fastckpt

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = [*(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)), "training/training.safetensors"]
FILES = sorted(["config.json", "fastckpt.json", "model.safetensors.index.json", *SHARDS])
#: This many numbers make two shards of the model, one shard beside it, an index and a config.json.
NUMBERS = 150_000


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, float], str]:
    """Save a checkpoint whose numbers are all equal; return its path."""

    def save(name: str, value: float) -> str:
        path = str(tmp_path / name)
        a, b, c = (np.full(NUMBERS, value) for _ in range(3))
        state = {"model": {"a": a, "b": b}, "c": c}
        fastckpt.save(state, path, files=fastckpt.Files({"config.json": f'{{"value": {value}}}'}, shard_size=1 << 20))
        return path

    return save


def value_at(place: str) -> float:
    """Return the number of the checkpoint at a place, after a check of every byte."""
    report = fastckpt.verify(place)
    assert report.ok, str(report)
    state = fastckpt.load(place)
    values = {
        float(number) for array in (*state["model"].values(), state["c"]) for number in (array.min(), array.max())
    }
    assert len(values) == 1
    return values.pop()


def names(path: str | Path) -> list[str]:
    inside = [file.relative_to(path).as_posix() for file in Path(path, "training").glob("*")]
    return sorted([*(file.name for file in Path(path).iterdir() if not inside or file.name != "training"), *inside])


def damage(path: str, file: str, at: int = 5000) -> None:
    with Path(path, file).open("r+b") as shard:
        shard.seek(at)
        byte = shard.read(1)[0]
        shard.seek(at)
        shard.write(bytes([byte ^ 1]))
