"""The header of a safetensors file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def text_of(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None) -> bytes:
    """The text of a header, padded to 8 bytes.

    Args:
        tensors: name, dtype, shape and bytes of each, in the order of their data.
        metadata: strings by name, or None.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)
