"""vLLM serves the model in a checkpoint, every byte of which is verified (docs/guides/vllm.md).

vllm serve runs/gpt/step-00001000 --load-format fastckpt
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import fastckpt

__all__ = ["register"]


def register() -> None:
    """Register the load format ``fastckpt``; vLLM calls this in each of its processes, by an entry point.

    In a vLLM without these loaders it does nothing: an error would prevent vLLM from starting.

    Example:
        >>> from fastckpt.integrations.vllm import register  # of the group vllm.general_plugins
    """
    try:
        from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader  # noqa: PLC0415 - it calls
    except ImportError as error:
        logging.getLogger("fastckpt").info("fastckpt: no load format for this vLLM: %s", error)
        return

    @register_model_loader("fastckpt")
    class FastckptModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's own loader, with weights from fastckpt."""

        def download_model(self, model_config: Any) -> None:
            fastckpt.open(model_config.model).close()

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            if getattr(model, "secondary_weights", ()):
                raise ValueError(f"load format fastckpt: secondary weights of {type(model).__name__} are unsupported")
            self.counter_before_loading_weights = time.perf_counter()
            yield from _weights(model_config.model)


def _weights(path: str) -> Iterator[tuple[str, Any]]:
    """The weights of the model in a checkpoint, under Hugging Face's names, layer by layer as the model has them."""
    # The ranks of a node read the same bytes.
    with fastckpt.open(path, io="buffered") as checkpoint:
        prefixes = {shard.file: shard.prefix for shard in checkpoint._shards if "/" not in shard.file}
        names = [name for name in checkpoint if checkpoint.info(name).shard in prefixes]
        if not names:
            raise ValueError(
                f"load format fastckpt: {path} holds no tensors of a model: save with Files(model_key=...)"
            )
        for name in names:
            yield name.removeprefix(prefixes[checkpoint.info(name).shard]), checkpoint[name]
