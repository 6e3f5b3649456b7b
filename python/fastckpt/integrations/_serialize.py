"""A file of safetensors, written whole and durable."""

from __future__ import annotations

import ctypes
import re
from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, TensorSpec, serialize

import fastckpt
from fastckpt._safetensors_header import LONGEST, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The dtypes of one width, in the order in which their tensors lie in a file.
_ORDER = " U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 "


def _bits(dtype: str) -> int:
    """Of an element, as far as the name of its dtype says."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 0


def write(specs: Mapping[str, TensorSpec], filename: Any, metadata: dict[str, str] | None, io: Any) -> None:
    """Write the bytes that ``safetensors.serialize_file`` writes, by :func:`fastckpt.open_write`."""
    for name in specs:
        if not isinstance(name, str):
            raise TypeError(f"save_file: {filename}: the name of a tensor must be a str, not {name!r}")

    def place(item: tuple[str, TensorSpec]) -> tuple[int, int, str]:
        # Tensors of wide elements come first, so that each is aligned.
        name, spec = item
        return -_bits(spec.dtype), _ORDER.find(f" {spec.dtype} "), name

    order = sorted(specs.items(), key=place)
    for name, spec in order:
        if name == "__metadata__" or prod(spec.shape) * (_bits(spec.dtype) or 8) != 8 * spec.data_len:
            what = f"{spec.data_len} bytes as {spec.dtype} of shape {spec.shape}"
            raise SafetensorError(f"save_file: {filename}: the format cannot hold {name!r}, {what}")
    serialize({}, metadata)  # refuses what is no dict of texts
    head = {} if metadata is None else {"__metadata__": metadata}
    header = text_of(((name, spec.dtype, spec.shape, spec.data_len) for name, spec in order), head)
    if len(header) > LONGEST:
        raise SafetensorError(f"save_file: {filename}: names, shapes and metadata take more than {LONGEST} bytes")
    with fastckpt.open_write(filename, io=io) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, spec in order:
            file.write((ctypes.c_char * spec.data_len).from_address(spec.data_ptr))
