"""Distinguishable states: a number determines every value of a state, so that tests need not keep saved states."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

ROWS = 257  # odd, so that only the large tensors end on a page


def congruent(array: np.ndarray) -> np.ndarray:
    """A copy of the array at an address for zero-copy: 64 bytes after a page's start, like data in the file."""
    memory = np.empty(array.nbytes + 8192, np.uint8)
    skip = (64 - memory.ctypes.data) % 4096
    moved = memory[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def numbered(index: int, nbytes: int = 1 << 20) -> dict[str, Any]:
    """State ``index``: a few large arrays, many small ones, and Python leaves; no two states have an equal array."""
    rng = np.random.default_rng(index)
    third = max(8, nbytes // 3)
    return {
        "step": index,
        "model": {
            "big": congruent(rng.integers(0, 256, third // 4096 * 4096 + 4096, dtype=np.uint8)),
            "odd": rng.integers(0, 256, third + 13, dtype=np.uint8),
            "rows": rng.standard_normal((ROWS, max(1, third // 8 // ROWS))),
            "small": [np.full(3, index, dtype=np.int64), np.array(index, dtype=np.int32), np.zeros((0, 4), np.float32)],
        },
        "lr": 0.1 * index,
        "note": f"state {index}",
        "seen": [True, None, b"\x00\xff", index],
    }


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal in type, structure and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray) and left.dtype.hasobject:
        return left.shape == right.shape and same(left.ravel().tolist(), right.ravel().tolist())
    if isinstance(left, np.random.Generator):
        return same(left.bit_generator.state, right.bit_generator.state)
    if isinstance(left, io.BytesIO):
        return left.getvalue() == right.getvalue()
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def which(state: Any, nbytes: int = 1 << 20) -> int:
    """The index of a loaded state, after a check that it is exactly this state and no mixture."""
    index = state["step"]
    if not same(state, numbered(index, nbytes)):
        raise AssertionError(f"a mixture: the step is {index}, but other values are not those of state {index}")
    return int(index)


def trained(step: int, *, weights: bool = True, moments: bool = True) -> dict[str, Any]:
    """A model and an optimizer that counts its steps, each perhaps frozen, and values that change in every run."""
    return {
        "model": {"w": np.full(100, step if weights else 0, np.float32), "frozen": np.zeros(300, np.float32)},
        "optimizer": {"exp_avg": np.full(50, step if moments else 0, np.float32), "step": np.float32(step)},
        "rng": np.full(16, step, np.uint8),
        "step": step,
    }
