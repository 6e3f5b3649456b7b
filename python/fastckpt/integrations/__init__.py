"""Integrations: frameworks that save through fastckpt after one line. Each module serves the framework in its name.

    fastckpt.integrations.transformers.install()

An integration replaces how a framework writes and reads its checkpoints, not when it saves or what it keeps. Each
module is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastckpt.integrations import accelerate as accelerate
    from fastckpt.integrations import axolotl as axolotl
    from fastckpt.integrations import deepspeed as deepspeed
    from fastckpt.integrations import fsspec as fsspec
    from fastckpt.integrations import lightning as lightning
    from fastckpt.integrations import ray as ray
    from fastckpt.integrations import safetensors as safetensors
    from fastckpt.integrations import torch as torch
    from fastckpt.integrations import torch_checkpointing as torch_checkpointing
    from fastckpt.integrations import torchtitan as torchtitan
    from fastckpt.integrations import transformers as transformers
    from fastckpt.integrations import vllm as vllm

__all__ = [
    "accelerate",
    "axolotl",
    "deepspeed",
    "fsspec",
    "lightning",
    "ray",
    "safetensors",
    "torch",
    "torch_checkpointing",
    "torchtitan",
    "transformers",
    "vllm",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted(__all__)
