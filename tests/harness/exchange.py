"""Tries an installed fastckpt without torch: ``exchange.py save|load|golden DIRECTORY``, for ``scripts/aarch64``."""

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

import fastckpt


def arrays() -> dict[str, Any]:
    """Arrays of many sizes and types, the same on every machine."""
    count = 3 << 20
    words = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return {
        "large": words,
        "odd": words.view(np.uint8)[: (5 << 20) + 13],
        "strided": words.view(np.uint32).reshape(-1, 1024)[:, ::3],
        "signed": np.arange(-128, 128).astype(np.int8),
        "half": np.linspace(-1, 1, 4097).astype(np.float16),
        "empty": np.empty((0, 3), np.float32),
        "bool": np.arange(9) % 2 == 0,
    }


def state() -> dict[str, Any]:
    """A state of the arrays and of other values."""
    big = np.arange(5, dtype=">f8")
    return {
        "arrays": arrays(),
        "big": big,
        "text": np.array(["a", "bcd"]),
        "leaves": [None, -(2**100), 0.1, b"\xff" * 5000],
    }


def plain(value: Any) -> Any:
    """A form of a value; two forms are equal only if every bit of the values is equal."""
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, np.random.Generator):
        return plain(value.bit_generator)
    if isinstance(value, np.random.BitGenerator):
        return plain(value.state)
    if isinstance(value, np.random.RandomState):
        return plain(value.get_state(legacy=False))
    if isinstance(value, dict):
        return [[plain(key), plain(part)] for key, part in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return repr(value)


def main(what: str, directory: Path) -> None:
    """Run ``save``, ``load`` or ``golden``."""
    if what == "save":
        directory.mkdir()
        for engine in ("auto", "threads", "buffered"):
            fastckpt.save(state(), directory / "state", io=engine, overwrite=True)
        fastckpt.save(arrays(), directory / "tensors")
    elif what == "load":
        expected = plain(state())
        for options in ("auto", "threads", "buffered", fastckpt.IO(mmap=True)):
            assert plain(fastckpt.load(directory / "state", io=options)) == expected, options
        fastckpt.verify(directory / "tensors")
    else:
        for path in sorted(directory.glob("v1*")):
            fastckpt.verify(path)
            names, found = list(fastckpt.open(path)), {}
            for name in names:
                with contextlib.suppress(
                    fastckpt.exceptions.UnsupportedTypeError
                ):  # sparse and quantised tensors, which numpy lacks
                    found[name] = fastckpt.load(
                        path,
                        keys=[name],
                        framework="numpy",
                        registry=fastckpt.Registry(undeclared="plain"),
                    )
            digest = hashlib.sha256(repr(plain(found)).encode()).hexdigest()
            print(f"{path.name}: {len(names)} tensors, {len(names) - len(found)} of them only verified: {digest}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
