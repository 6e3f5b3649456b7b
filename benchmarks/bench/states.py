"""The states to save and load (workloads), of random bytes that are the same in every run.

Random bytes give storage that compresses or deduplicates no advantage. ``make`` is a module's function, so each
contender's process can make its own state: a direct write that pins memory shared by fork() makes the kernel copy it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import GB, MB

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("model", "one", "huge", "many", "numpy", "optimizer", "small")
SMALL_SIZES = (1 * MB, 10 * MB, 100 * MB)


@dataclass(frozen=True)
class Workload:
    """A state's recipe.

    Attributes:
        kind: one of ``KINDS``; ``small`` is a model of one of ``SMALL_SIZES``.
        size: bytes of the state, roughly; for ``many`` the bytes of each tensor.
        count: number of tensors of ``many``.
    """

    kind: str
    size: int
    count: int = 0

    @property
    def name(self) -> str:
        """The workload's name in tables."""
        if self.kind == "many":
            return f"many: {self.count} tensors of {self.size} bytes"
        amount = f"{self.size / GB:g} GB" if self.size >= GB else f"{self.size / MB:g} MB"
        return f"{'model' if self.kind == 'small' else self.kind}: {amount}"

    @property
    def bytes(self) -> int:
        """The approximate bytes of the state."""
        return self.size * max(1, self.count)

    def make(self) -> Any:
        """Return the state."""
        if self.kind == "many":
            return many_state(self.count, self.size)
        makers = {"one": one_state, "huge": huge_state, "numpy": numpy_state, "optimizer": optimizer_state}
        return makers.get(self.kind, model_state)(self.size)

    def make_blank(self) -> Any:
        """Return a state of the same shape, of resident zeros: the destination of ``into=``."""
        import numpy as np

        state = self.make()
        for _, leaf in leaves(state):
            if isinstance(leaf, np.ndarray):
                leaf.fill(0)
            elif is_tensor(leaf):
                leaf.zero_()
        return state


# -- the kinds --------------------------------------------------------------------------------------------------------


def llama_shapes(size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a Llama-like model of about ``size`` bytes in bfloat16."""
    # A small state gets a narrow model, so that it still has layers.
    width = next(width for width in (2048, 1024, 256, 128, 64) if width == 64 or size >= 120 * width * width)
    hidden, key_value, vocabulary = width * 43 // 16, width // 4, 16 * width
    layer = [
        ("input_layernorm.weight", (width,)),
        ("self_attn.q_proj.weight", (width, width)),
        ("self_attn.k_proj.weight", (key_value, width)),
        ("self_attn.v_proj.weight", (key_value, width)),
        ("self_attn.o_proj.weight", (width, width)),
        ("post_attention_layernorm.weight", (width,)),
        ("mlp.gate_proj.weight", (hidden, width)),
        ("mlp.up_proj.weight", (hidden, width)),
        ("mlp.down_proj.weight", (width, hidden)),
    ]
    layer_bytes = 2 * (2 * width + 2 * width * width + 2 * key_value * width + 3 * hidden * width)
    layers = max(1, round((size - 4 * vocabulary * width) / layer_bytes))
    return [
        ("model.embed_tokens.weight", (vocabulary, width)),
        *((f"model.layers.{index}.{name}", shape) for index in range(layers) for name, shape in layer),
        ("model.norm.weight", (width,)),
        ("lm_head.weight", (vocabulary, width)),
    ]


def random_tensor(shape: tuple[int, ...], dtype: Any, random: Any) -> Any:
    """Return a torch tensor of random bits."""
    import numpy as np
    import torch

    tensor = torch.empty(shape, dtype=dtype)
    words = tensor.view(-1).view(torch.int16).numpy()
    words[:] = random.random_raw(-(-words.size // 4)).view(np.int16)[: words.size]
    return tensor


def model_state(size: int) -> dict[str, Any]:
    """Return a Llama-shaped model in bfloat16."""
    import numpy as np
    import torch

    random = np.random.SFC64(size)
    return {name: random_tensor(shape, torch.bfloat16, random) for name, shape in llama_shapes(size)}


def one_state(size: int) -> dict[str, Any]:
    """Return one tensor of float32."""
    import numpy as np
    import torch

    return {"weight": random_tensor((max(1, size // 4096), 1024), torch.float32, np.random.SFC64(size))}


def huge_state(size: int) -> dict[str, Any]:
    """Return one tensor of float32 in huge pages: NumPy asks the kernel for them for 4 MiB or more, torch does not."""
    import numpy as np
    import torch

    tensor = torch.from_numpy(np.empty((max(1, size // 4096), 1024), np.float32))
    tensor.copy_(one_state(size)["weight"])
    return {"weight": tensor}


def many_state(count: int, size: int) -> dict[str, Any]:
    """Return ``count`` tensors of ``size`` bytes, each with its own memory."""
    import torch

    elements = max(1, size // 4)
    return {f"parameter.{index:07d}": torch.full((elements,), index, dtype=torch.int32) for index in range(count)}


def numpy_state(size: int) -> dict[str, Any]:
    """Return the shapes of the model as NumPy arrays of float16."""
    import numpy as np

    random = np.random.SFC64(size)
    state = {}
    for name, shape in llama_shapes(size):
        elements = int(np.prod(shape))
        words = np.empty(elements, np.uint16)
        words[:] = random.random_raw(-(-elements // 4)).view(np.uint16)[:elements]
        state[name] = words.view(np.float16).reshape(shape)
    return state


def optimizer_state(size: int) -> dict[str, Any]:
    """Return a model in bfloat16 with AdamW's state: two moments in float32, steps, and the settings of its groups.

    It has ten bytes per parameter and the structure of ``torch.optim.AdamW.state_dict()``.
    """
    import numpy as np
    import torch

    random = np.random.SFC64(size)
    model = model_state(size // 5)
    moments = {
        index: {
            "step": torch.tensor(1000.0),
            "exp_avg": random_tensor(tuple(weight.shape), torch.float32, random),
            "exp_avg_sq": random_tensor(tuple(weight.shape), torch.float32, random),
        }
        for index, weight in enumerate(model.values())
    }
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{**group, "params": list(range(len(model)))}]},
        "scheduler": {"last_epoch": 1000, "base_lrs": [3e-4]},
        "step": 1000,
    }


# -- looking at a state ------------------------------------------------------------------------------------------------


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without an import of torch for a state that has none."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def leaves(state: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value that is not a dict, list or tuple, with its place."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*place, str(key)))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from leaves(value, (*place, str(index)))
    else:
        yield place, state


def as_bytes(leaf: Any) -> Any:
    """Return the bytes of a contiguous tensor or array as a NumPy vector, or None for another value.

    The bytes of a tensor on another device are a copy.
    """
    import numpy as np

    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1).view(np.uint8)
    if is_tensor(leaf):
        import torch

        return leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return None


def total_bytes(state: Any) -> int:
    """Return the bytes of all tensors and arrays."""
    return sum(leaf.nbytes for _, leaf in leaves(state) if hasattr(leaf, "nbytes"))


def largest(state: Any) -> int:
    """Return the bytes of the largest tensor or array."""
    return max((leaf.nbytes for _, leaf in leaves(state) if hasattr(leaf, "nbytes")), default=0)


def touch(state: Any, *, write: bool) -> None:
    """Read one byte of every page of the state; with ``write`` also write it, like an optimizer's step.

    Until then, a mapped file is not read, and is not the process's own memory.
    """
    for _, leaf in leaves(state):
        if getattr(leaf, "nbytes", 0) > mmap.PAGESIZE:
            view = as_bytes(leaf)[:: mmap.PAGESIZE]
            if write:
                view |= 0
            else:
                view.max()


def fill(target: Any, source: Any) -> None:
    """Copy every tensor of ``source`` over the tensor at the same place in ``target``."""
    places = dict(leaves(target))
    for place, leaf in leaves(source):
        if is_tensor(leaf):
            places[place].copy_(leaf)
        elif hasattr(leaf, "nbytes"):
            places[place][...] = leaf


def differences(expected: Any, loaded: Any) -> str | None:
    """Return where the two states differ, or None."""
    here, there = dict(leaves(expected)), dict(leaves(loaded))
    if here.keys() != there.keys():
        return f"the places {sorted(here.keys() ^ there.keys())[:5]} are in one of them only"
    for place, value in here.items():
        ours, theirs = as_bytes(value), as_bytes(there[place])
        if ours is None or theirs is None:
            same = ours is None and theirs is None and value == there[place]
        else:
            same = value.dtype == there[place].dtype and bool((ours == theirs).all())
        if not same:
            return f"{'.'.join(place)} differs"
    return None
