"""Writes the golden checkpoints of format version 1: ``python tests/data/make_golden.py`` from the root.

Run it once per format version. Its files are never written again: every later release must read them unchanged.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import random
import sys
import types as types_module
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch

import fastckpt

HERE = pathlib.Path(__file__).parent
DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
]


def state() -> dict[str, Any]:
    """Return a state with every kind of token of version 1. A reader's test builds it again and compares."""
    tied = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    attributed = OrderedDict(weight=torch.ones(2))
    attributed._metadata = {"": {"version": 1}}  # type: ignore[attr-defined] # as torch.nn.Module.state_dict() has it
    return {
        "module": attributed,
        "model": OrderedDict(weight=tied, head=tied, bias=torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        "dtypes": [torch.arange(4).to(dtype) for dtype in DTYPES],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "gradient": torch.zeros(2, requires_grad=True),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "coo": torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.0, 2.0]), (3, 2)).coalesce(),
        "csr": torch.eye(3).to_sparse_csr(),
        "numpy": {
            "array": np.arange(5, dtype=np.int16),
            "big-endian": np.array([1.0, 2.0], dtype=">f8"),
            "text": np.array(["a", "bcd"]),
            "when": np.array(["2026-01-02T03:04:05"], dtype="datetime64[s]"),
            "scalar": np.float32(0.1),
        },
        "leaves": [None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**100), 0.1, 1.0, -0.0, 1e300],
        "more leaves": [float("inf"), float("-inf"), 1 + 2j, "text \u00e4\u4e2d\U0001f600", ""],
        "bytes": [b"bytes", b"x" * 5000, bytearray(b"ba")],
        "containers": ((), (1, (2,)), [], {}, {1: "int", 2.5: "float", None: "none", False: "bool"}),
        "sets": [{1, 2}, frozenset({"a"})],
        "default": defaultdict(list, a=[1]),
        "torch": [torch.Size([2, 3]), torch.float8_e5m2, torch.device("cuda:1")],
        "python": [range(1, 10, 2), slice(1, None, 2), pathlib.Path("a/b"), pathlib.PurePosixPath("/c")],
        "times": [
            dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.timezone.utc),
            dt.datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 - a naive one is the point
            dt.date(2026, 1, 2),
            dt.time(1, 2, 3, 4),
            dt.timedelta(days=1, microseconds=5),
            dt.timezone(dt.timedelta(hours=2), "CEST"),
        ],
        "keys": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "sl/ash": torch.ones(1), "": torch.ones(1)},
    }


class Position(NamedTuple):
    """A type that the reading program registers."""

    epoch: int
    weight: torch.Tensor


def register() -> None:
    """Register the types of :func:`types` and :func:`classes`."""
    fastckpt.register_type(Position, tuple, lambda parts: Position(*parts), "golden.Position")
    for cls in (Schedule, Settings, Plan):
        fastckpt.register_type(cls, name=f"golden.{cls.__name__}")


def types() -> dict[str, Any]:
    """Return the tokens that :func:`state` lacks: quantised tensors, and types by name, one of them defined here."""
    values = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -0.5]])
    return {
        "per tensor": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        "per channel": torch.quantize_per_channel(
            values, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        ),
        "position": Position(3, torch.arange(3.0)),
        "milestones": Counter({30: 1, 60: 2}),
    }


class Schedule(enum.Enum):
    """A type that is stored by its kind: an enum."""

    COSINE = 1


class Settings(dict):  # type: ignore[type-arg]
    """A type that is stored by its kind: a dict with attributes."""


@dataclasses.dataclass
class Plan:
    """A type that is stored by its kind: a dataclass."""

    schedule: Schedule
    window: Any = None


def classes() -> dict[str, Any]:
    """Return types that are stored by their kind, and types that fastckpt names itself."""
    settings = Settings(lr=0.1)
    settings.version = 3  # type: ignore[attr-defined]
    return {
        "plan": Plan(Schedule.COSINE, collections.deque([1.5, torch.ones(2)], maxlen=4)),
        "settings": settings,
        "own": [decimal.Decimal("1.10"), uuid.UUID(int=7), fractions.Fraction(1, 3), zoneinfo.ZoneInfo("UTC")],
        "namespaces": [argparse.Namespace(a=1), types_module.SimpleNamespace(b=[2])],
        "random": random.Random(3),
        "buffer": io.BytesIO(b"bytes"),
        "set": {"b", "a", 1, (2, "c")},
    }


def training() -> dict[str, Any]:
    """Return the state of a training run, whose model is a separate group of files, with all tensors that it shares."""
    embedding = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    bias = torch.tensor([0.5, -0.5], dtype=torch.bfloat16)
    return {
        "average": {"embed.weight": embedding, "bias": bias + 1},
        "model": OrderedDict(
            {
                "embed.weight": embedding,
                "head.weight": embedding,
                "bias": bias,
                "layers": [torch.ones(3), torch.ones(3)],
            }
        ),
        "note": torch.zeros(1, dtype=torch.complex128),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(30.0)}}, "lr": 1e-3},
        "step": 3,
    }


def expanded() -> dict[str, Any]:
    """Return tensors and an array that repeat a base; only the base is stored."""
    base = torch.arange(3, dtype=torch.float32).reshape(3, 1)
    return {
        "mask": torch.ones(1, dtype=torch.bool).expand(1000),
        "base": base,
        "columns": base.expand(3, 4),
        "parameter": torch.nn.Parameter(base.expand(3, 2)),
        "array": np.broadcast_to(np.arange(3), (2, 3)),
    }


def named() -> dict[str, Any]:
    """Return types of numpy and torch that are stored by name, apart from plain tensors and arrays."""
    row = np.dtype([("key", "<i4"), (("title", "value"), ">f8", (2,))])
    rows = np.array([(1, (2.0, 3.0)), (4, (5.0, 6.0))], row)
    kinds = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    return {
        "dtypes": [row, np.dtype([("a", "u1"), ("b", "<f8")], align=True), np.dtype("<M8[ns]"), np.dtype("O")],
        "rows": rows,
        "records": rows.view(np.recarray),
        "objects": np.array([[1, None], ["a", (2,)]], object),
        "generators": [np.random.Generator(getattr(np.random, kind)(3)) for kind in kinds],
        "bits": np.random.PCG64(4),
        "legacy": np.random.RandomState(5),
        "torch": torch.Generator().manual_seed(6),
        "layouts": [torch.sparse_csr, torch.channels_last],
        "strided": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    }


METADATA = {"step": 1000, "note": "golden", "loss": 2.5}

if __name__ == "__main__":
    version = sys.argv[1] if len(sys.argv) > 1 else "v1"
    register()
    kinds = (
        ("", state, 10**9),
        ("-sharded", state, 5000),
        ("-types", types, 10**9),
        ("-groups", training, 100),
        ("-expanded", expanded, 10**9),
        ("-classes", classes, 10**9),
        ("-named", named, 10**9),
    )
    for name, make, shard_size in kinds:
        if not (HERE / f"{version}{name}").exists():
            files = fastckpt.Files(shard_size=shard_size, model_key=None if name == "-sharded" else "auto")
            fastckpt.save(make(), HERE / f"{version}{name}", metadata=METADATA, files=files)
