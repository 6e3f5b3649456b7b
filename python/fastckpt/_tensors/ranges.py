"""Ranges for profilers."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def range_of(name: str) -> AbstractContextManager[None]:
    """A context that torch's profiler shows as a range ``name``, and so does NVTX if CUDA is in use.

    If torch is not imported, no profiler can show it. A range costs a few microseconds.
    """
    if sys.modules.get("torch") is None:
        return contextlib.nullcontext()
    from . import torch as _torch  # noqa: PLC0415 - the program has imported torch

    return _torch.range_of(name)
