"""The states that the tests save."""

from __future__ import annotations

from typing import Any

import torch

from harness.devices import DEVICE


def host_state() -> dict[str, Any]:
    """Return tensors in host memory: larger and smaller than a block, small ones, and many dtypes."""
    torch.manual_seed(1)
    large = torch.randint(-(2**31), 2**31 - 1, (1500, 1100), dtype=torch.int32)
    return {
        "large": large,
        "half": torch.randn(100_001).bfloat16(),
        "bytes": torch.randint(0, 255, (200_003,), dtype=torch.uint8),
        "double": torch.randn(3, 5, 7001, dtype=torch.float64),
        "wide": torch.randn(5000, dtype=torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "float8": torch.randn(70_000).to(torch.float8_e4m3fn),
        "grad": torch.randn(10, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(300, 300)),
    }


def training() -> dict[str, Any]:
    """Return a training state that is partly on the host."""
    return {
        "model": {"w": torch.randn(300, 300).to(DEVICE), "b": torch.nn.Parameter(torch.randn(7).to(DEVICE))},
        "optimizer": {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.randn(300, 300)}}},
        "fused": {"step": torch.tensor(6.0).to(DEVICE)},
        "rng": {"cpu": torch.get_rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)]},
        "kept": torch.zeros(17, dtype=torch.uint8),
        "steps": torch.tensor(3.0),
        "vector": {"step": torch.ones(2)},
        "array": torch.ones(3).numpy(),
    }
