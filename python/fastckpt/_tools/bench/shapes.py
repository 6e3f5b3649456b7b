"""The states of ranks: bytes, tensors and their sizes, in the shape of a training state under mixed-precision Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._tools.tiers import OPTIMIZER_BYTES, WEIGHT_BYTES, WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Tensors per rank, like those of a small Llama in four groups: enough that the cost per tensor shows.
TENSORS = 512

#: The kinds of tensors that are kept for each parameter: group, dtype. The weights are float16, because numpy has no
#: bfloat16.
_GROUPS = (("model", "float16"), ("master", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))

#: A layer of Llama 3 8B, elements of each tensor: query, key, value and output projections, the three of the
#: feed-forward network, two norms. Source: the model's published configuration (hidden 4096, key-value 1024,
#: intermediate 14336).
_LAYER = tuple(4096 * width for width in (4096, 1024, 1024, 4096, 14336, 14336, 14336, 1, 1))

_STAMP = 4096 // 8


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank.

    Attributes:
        weights: bytes of the weights, of two bytes each.
        optimizer: bytes of the optimizer's state: three values of four bytes for each parameter.
        tensors: the number of tensors.
    """

    weights: int
    optimizer: int
    tensors: int

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.weights + self.optimizer


def of_size(size: int, ranks: int, tensors: int) -> list[Share]:
    """``ranks`` shares of ``size`` bytes each, rounded down to whole parameters of 14 bytes."""
    parameters = size // (WEIGHT_BYTES + OPTIMIZER_BYTES)
    share = Share(WEIGHT_BYTES * parameters, OPTIMIZER_BYTES * parameters, tensors)
    _check(share)
    return [share] * ranks


def of_workload(name: str, scale: float, ranks: int, tensors: int) -> list[Share]:
    """The shares of the first ``ranks`` processes of a workload of MLPerf Storage, each times ``scale``.

    Raises:
        ValueError: there is no such workload, it has fewer processes, or a share is too small for its tensors.
    """
    if name not in WORKLOADS:
        raise ValueError(f"bench: --workload must be one of {', '.join(WORKLOADS)}, not {name!r}")
    workload = WORKLOADS[name]
    if ranks > workload.processes:
        raise ValueError(f"bench: workload {name} has {workload.processes} processes: give fewer --ranks")
    shares = []
    for rank in range(ranks):
        weights, optimizer = workload.share(rank)
        shares.append(Share(_even(weights * scale, 2), _even(optimizer * scale, 12), tensors))
        _check(shares[-1])
    return shares


def _even(value: float, unit: int) -> int:
    return int(value) // unit * unit


def _check(share: Share) -> None:
    layout(share)


def layout(share: Share) -> list[tuple[str, str, str, int]]:
    """Group, name, dtype and elements of every tensor of a share: ``share.tensors`` of them.

    The groups have equally many tensors, whose sizes cycle as in the layers of a Llama. With fewer tensors than groups,
    the last one gets the bytes of the later groups.

    Raises:
        ValueError: a tensor would get no element.
    """
    sizes = [share.weights] * (share.weights > 0) + [share.optimizer // 3] * 3
    groups = list(_GROUPS if share.weights else _GROUPS[1:])
    while len(groups) > share.tensors:
        groups.pop()
        sizes[-2:] = [sum(sizes[-2:])]
    tensors = []
    for number, ((group, dtype), size) in enumerate(zip(groups, sizes, strict=True)):
        count = (share.tensors + number) // len(groups)
        elements = size // np.dtype(dtype).itemsize
        if elements < count:
            raise ValueError(
                f"bench: {share.bytes} bytes per rank are too few for {share.tensors} tensors: "
                "give a larger --size or --scale, or fewer --tensors"
            )
        for index, part in enumerate(_cut(elements, count)):
            tensors.append((group, f"layers.{index // len(_LAYER)}.{index % len(_LAYER)}", dtype, part))
    return tensors


def _cut(elements: int, count: int) -> list[int]:
    """``elements``, cut into ``count`` parts in the proportions of the layers, none of them empty."""
    wanted = np.resize(np.asarray(_LAYER, np.float64), count)
    # Each part gets one element; running sums distribute the rest, so that rounding loses nothing.
    edges = np.floor(np.cumsum(wanted) / wanted.sum() * (elements - count)).astype(np.int64)
    edges[-1] = elements - count
    return [1 + int(part) for part in np.diff(edges, prepend=0)]


def make(share: Share) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """The state: new random bytes each time, so that compressing or deduplicating storage gains nothing.

    Each tensor has separate memory, like the tensors of a model.
    """
    random = np.random.SFC64()
    state: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for group, name, dtype, elements in layout(share):
        nbytes = elements * np.dtype(dtype).itemsize
        memory = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, 1 << 24):
            stop = min(nbytes, start + (1 << 24))
            memory[start:stop] = random.random_raw(-(-(stop - start) // 8)).view(np.uint8)[: stop - start]
        state.setdefault(group, {})[name] = memory.view(dtype)
    return state


def stamp(memory: np.ndarray[Any, Any]) -> None:
    """Change a word in every 4096 bytes of an array, so that no two saves write the same bytes."""
    flat = memory.reshape(-1).view(np.uint8)
    words = flat[: flat.nbytes // 8 * 8].view(np.uint64)
    words[::_STAMP] += np.uint64(0x9E3779B97F4A7C15)


def stamp_all(state: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]) -> None:
    """Change every tensor of a state in this way (:func:`stamp`)."""
    for group in state.values():
        for tensor in group.values():
            stamp(tensor)


def difference(saved: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], loaded: Any) -> str | None:
    """The first tensor that was not loaded as it was saved, or None."""
    for group, tensors in saved.items():
        for name, tensor in tensors.items():
            other = loaded.get(group, {}).get(name)
            # Compared as bytes, because random floats are often nan.
            if other is None or other.dtype != tensor.dtype or not np.array_equal(_bytes(other), _bytes(tensor)):
                return f"{group}.{name}"
    return None


def _bytes(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.reshape(-1).view(np.uint8)
