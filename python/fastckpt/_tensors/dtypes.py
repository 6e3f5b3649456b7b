"""The dtypes that safetensors can name and its Python reader can read: their names there and in torch."""

from __future__ import annotations

#: safetensors' name: torch's, without ``torch.``
PLAIN_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}

TORCH_PREFIX = "torch."
NUMPY_PREFIX = "numpy."


def plain_name(dtype: str, logical: str | None) -> str:
    """A stored tensor's logical dtype, for messages: ``bfloat16``, ``complex128``, ``>f8``."""
    if logical is None:
        return PLAIN_NAMES.get(dtype, dtype)
    name = logical.removeprefix(TORCH_PREFIX).removeprefix(NUMPY_PREFIX)
    return "complex128" if name == "<c16" else name
