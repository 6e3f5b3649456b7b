"""Counts the parameters of a model from its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Count:
    """The parameters of a model.

    Attributes:
        parameters: all of them; tied embeddings count once.
        experts: the parameters of routed experts among them.
        notes: omissions and assumptions.
    """

    parameters: int
    experts: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties of a model type that its config does not mention.

    Attributes:
        tied: whether the output shares the embedding's weights by default.
        norms: normalisations per layer.
        qkv_bias: whether query, key and value projections have biases, whatever ``attention_bias`` is.
        qk_norm: whether queries and keys are normalised per head.
        experts: the field that holds the number of routed experts, if any; transformers 5 may write
            ``num_local_experts`` instead.
        expert_size: the field that holds their width.
    """

    tied: bool = False
    norms: int = 2
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: str = ""
    expert_size: str = "moe_intermediate_size"


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms=4),
    "mixtral": _Family(experts="num_local_experts", expert_size="intermediate_size"),
    "qwen2_moe": _Family(qkv_bias=True, experts="num_experts"),
    "qwen3_moe": _Family(qk_norm=True, experts="num_experts"),
    "deepseek_v2": _Family(experts="n_routed_experts"),
    "deepseek_v3": _Family(experts="n_routed_experts"),
}
_OTHERS = ("gpt2",)


class _Config:
    """The fields of a config, with errors that name the missing ones."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def number(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"plan {self.where}: the config has no {name}")
        if type(value) is not int or value < 0:
            raise ValueError(f"plan {self.where}: {name} must be an integer of at least 0, not {value!r}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.fields.get(name)
        return default if value is None else bool(value)


def read(path: str | os.PathLike[str]) -> Count:
    """Count the parameters of the model whose ``config.json`` this is.

    Args:
        path: the file, or the directory that holds it.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, or describes an unsupported model.
    """
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"plan {file}: not a JSON file: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"plan {file}: a config is a JSON object, not {type(fields).__name__}")  # noqa: TRY004
    return count(fields, str(file))


def count(fields: Mapping[str, Any], where: str = "config") -> Count:
    """Count the parameters of a decoder-only transformer.

    Source: the layers as Hugging Face's transformers builds them; the tests compare with its models. Buffers (rotary
    frequencies, DeepSeek's correction of expert scores) are not parameters.

    Args:
        fields: the config.
        where: the name of the config in errors.

    Raises:
        ValueError: a field is missing, or the kind of model is unsupported.
    """
    config = _Config(fields, where)
    kind = fields.get("model_type")
    notes = []
    if kind is None:
        kind = "llama"
        notes.append("the config has no model_type: counted as a Llama")
    nested = [name for name in ("text_config", "vision_config", "audio_config", "encoder", "decoder") if name in fields]
    if nested or kind not in (*_FAMILIES, *_OTHERS):
        why = f"has nested parts ({', '.join(nested)})" if nested else f"of type {kind!r}"
        raise ValueError(
            f"plan {where}: a model {why} is not supported: give the number of parameters instead; supported are "
            f"{', '.join((*_FAMILIES, *_OTHERS))}"
        )
    if fields.get("quantization_config") is not None:
        notes.append("quantization_config is not supported: its scales are not counted")
    if config.number("num_nextn_predict_layers", 0):
        notes.append(f"{fields['num_nextn_predict_layers']} layer(s) that predict further tokens are not counted")
    if kind == "gpt2":
        return Count(_gpt2(config), 0, tuple(notes))
    family = _FAMILIES[kind]
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    attention = _latent_attention(config) if kind.startswith("deepseek") else _attention(config, family)
    rest = attention + family.norms * hidden
    embedding = config.number("vocab_size") * hidden
    total = embedding + hidden + layers * rest
    if not config.flag("tie_word_embeddings", default=family.tied):
        total += embedding
    routed = config.number(family.experts, config.fields.get("num_local_experts")) if family.experts else 0
    sparse = _sparse_layers(config, kind, layers) if routed else 0
    total += (layers - sparse) * _feed_forward(config, config.number("intermediate_size")) if layers > sparse else 0
    if not sparse:
        return Count(total, 0, tuple(notes))
    experts = sparse * routed * 3 * hidden * config.number(family.expert_size)
    total += experts + sparse * (routed * hidden + _shared_experts(config, kind))
    return Count(total, experts, tuple(notes))


def _attention(config: _Config, family: _Family) -> int:
    """Query, key, value and output projections of a layer."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    if not heads:
        raise ValueError(f"plan {config.where}: num_attention_heads must be at least 1, not 0")
    head = config.number("head_dim", hidden // heads)
    queries, keys = heads * head, config.number("num_key_value_heads", heads) * head
    total = 2 * hidden * queries + 2 * hidden * keys
    bias = config.flag("attention_bias")
    if bias or family.qkv_bias:
        total += queries + 2 * keys
    if bias and not family.qkv_bias:
        total += hidden
    return total + (2 * head if family.qk_norm else 0)


def _latent_attention(config: _Config) -> int:
    """DeepSeek's attention, with projections through a smaller space."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    queries = heads * (nope + rope)
    through = config.number("q_lora_rank", 0)
    bias = config.flag("attention_bias")
    total = hidden * through + through + through * queries + bias * through if through else hidden * queries
    total += hidden * (latent + rope) + bias * (latent + rope) + latent + latent * heads * (nope + value)
    return total + heads * value * hidden + bias * hidden


def _feed_forward(config: _Config, width: int) -> int:
    """A gated feed-forward block: gate, up and down."""
    hidden = config.number("hidden_size")
    return 3 * hidden * width + (2 * width + hidden if config.flag("mlp_bias") else 0)


def _sparse_layers(config: _Config, kind: str, layers: int) -> int:
    """The number of layers with experts."""
    if kind == "mixtral":
        return layers
    if kind.startswith("deepseek"):
        every, first = config.number("moe_layer_freq", 1), config.number("first_k_dense_replace", 0)
        return sum(index >= first and index % max(1, every) == 0 for index in range(layers))
    dense, every = config.fields.get("mlp_only_layers") or (), config.number("decoder_sparse_step", 1)
    return sum(index not in dense and (index + 1) % max(1, every) == 0 for index in range(layers))


def _shared_experts(config: _Config, kind: str) -> int:
    """The parameters per layer that every token uses besides its routed experts."""
    hidden = config.number("hidden_size")
    if kind == "qwen2_moe":
        return 3 * hidden * config.number("shared_expert_intermediate_size") + hidden  # and its gate
    shared = config.number("n_shared_experts", 0) if kind.startswith("deepseek") else 0
    return 3 * hidden * config.number("moe_intermediate_size") * shared if shared else 0


def _gpt2(config: _Config) -> int:
    """GPT-2: tied embeddings, learned positions, biases everywhere."""
    hidden = config.number("n_embd")
    inner = config.number("n_inner", 4 * hidden)
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    return (
        (config.number("vocab_size") + config.number("n_positions")) * hidden
        + config.number("n_layer") * layer
        + 2 * hidden
    )
