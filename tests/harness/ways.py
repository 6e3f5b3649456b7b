"""Every way to read a checkpoint: no way may accept what another one refuses."""

from __future__ import annotations

import importlib
import sys
from math import prod
from typing import Any

import numpy as np

import fastckpt
from harness.options import grouped

#: ``strided`` is ``into`` with arrays that are not contiguous.
WAYS = ("load", "into", "strided", "keys", "mmap", "device", "open", "slice", "verify")
#: Ways of more than one operation, because they read the structure first.
OPERATIONS = {"into": 2, "strided": 2}
#: Guard bytes before and after each target, which show a write beyond it.
GUARD = 64 << 10
_FILL = 0x5A
#: Bytes of this length or more are stored like tensors.
_LONG = 4096
#: Targets larger than this, or nested more deeply, are not made.
_LARGEST = 64 << 20
_DEEPEST = 50


def prepare() -> None:
    """Set up the stand-in device in this process. Its stream is a thread, which a fork does not inherit."""
    importlib.import_module("harness.standin")


def through(way: str, path: str, *, framework: str = "auto", **options: Any) -> Any:
    """Load everything in the checkpoint ``path``; ``options`` are those of ``load``, flat."""
    options = grouped(options)
    if way == "load":
        return fastckpt.load(path, framework=framework, **options)
    if way in {"into", "strided"}:
        return _into(path, framework, options, strided=way == "strided")
    if way == "keys":
        return fastckpt.load(path, keys="*", framework=framework, **options)
    if way == "mmap":
        return fastckpt.load(path, io=fastckpt.IO(mmap=True), framework=framework)
    if way == "device":
        prepare()
        return fastckpt.load(path, device="standin:0", framework="torch", **options)
    if way == "verify":
        return fastckpt.verify(path, **options)
    with fastckpt.open(path) as checkpoint:
        read = checkpoint.__getitem__ if way == "open" else lambda name: checkpoint.tensor(name)[...]
        return [read(name) for name in checkpoint]


def _into(path: str, framework: str, options: dict[str, Any], *, strided: bool) -> Any:
    """Load into targets that match the manifest, as in a program that trusts the manifest."""
    try:
        shown = fastckpt.open(path).structure
    except Exception:  # noqa: BLE001 - loading is to say so itself
        shown = {}
    guards: list[np.ndarray] = []
    state = _targets(shown, framework, guards, strided=strided, depth=0)
    try:
        return fastckpt.load(path, into=state, framework=framework, **options)
    finally:
        if any((guard != _FILL).any() for guard in guards):
            raise AssertionError("the load wrote beyond a target")


def _targets(shown: Any, framework: str, guards: list[np.ndarray], *, strided: bool, depth: int) -> Any:
    """The structure ``shown`` with a target in place of each tensor."""
    if type(shown) is fastckpt.types.TensorInfo:
        return _target(shown, framework, guards, strided=strided)
    if depth == _DEEPEST:
        return None

    def inner(value: Any) -> Any:
        return _targets(value, framework, guards, strided=strided, depth=depth + 1)

    if isinstance(shown, dict):
        return {key: inner(value) for key, value in shown.items()}
    return [inner(value) for value in shown] if type(shown) in (list, tuple) else shown


def _target(info: fastckpt.types.TensorInfo, framework: str, guards: list[np.ndarray], *, strided: bool) -> Any:
    as_torch = info.kind == "tensor" if framework == "auto" else framework == "torch"
    torch = sys.modules.get("torch")
    try:
        dtype = getattr(torch, info.dtype) if as_torch else np.dtype(info.dtype)
        nbytes = prod(info.shape) * dtype.itemsize
        if not 0 < nbytes <= _LARGEST:
            return torch.empty(info.shape, dtype=dtype) if as_torch else np.empty(info.shape, dtype)  # type: ignore[union-attr]
        apart = 2 if strided and info.shape else 1
        memory = np.full(2 * GUARD + apart * nbytes, _FILL, np.uint8)
        inside = memory[GUARD:-GUARD]
        guards += [memory[:GUARD], memory[-GUARD:]]
        shape = (*info.shape[:-1], info.shape[-1] * apart) if apart > 1 else info.shape
        flat = torch.from_numpy(inside).view(dtype) if as_torch else inside.view(dtype)  # type: ignore[union-attr]
        whole = flat.reshape(shape)
    except Exception:  # noqa: BLE001 - there is no such target
        return None
    return whole[..., ::2] if apart > 1 else whole


def contents(state: Any) -> list[bytes]:
    """The bytes of all that a state stores as tensors. The walk is a loop, because mutants may nest deeply."""
    found = []
    todo = [state]
    torch = sys.modules.get("torch")
    while todo:
        item = todo.pop()
        if isinstance(item, np.ndarray) and item.dtype.hasobject:
            todo += item.ravel().tolist()
        elif isinstance(item, np.ndarray):
            # An array that repeats its base counts as the base; an array with fields includes the bytes between them.
            item = item[tuple(slice(None if step else 1) for step in item.strides)]
            found.append(item.view(f"V{item.itemsize}").tobytes() if item.dtype.names else item.tobytes())
        elif torch is not None and isinstance(item, torch.Tensor):
            if item.layout is torch.strided and not item.is_quantized:
                if not item.is_cpu:
                    item = sys.modules["harness.standin"].on_host(item)
                found.append(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, (bytes, bytearray)) and len(item) >= _LONG:
            found.append(bytes(item))
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += list(item)
    return found


def forget() -> None:
    """Free all memory of the stand-in device; no tensor on it may be in use."""
    standin = sys.modules.get("harness.standin")
    if standin is not None:
        standin._memory.clear()
