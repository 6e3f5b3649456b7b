"""Names and limits of the format (docs/format.md, 2.3 and 3.4)."""

from __future__ import annotations

MANIFEST = "fastckpt.json"
#: The format's version, and the newest known minor version.
VERSION, MINOR = 1, 0
#: The directory of all shards except the model's.
TRAINING = "training"
MAX_MANIFEST = 512 << 20
MAX_HEADER = 100_000_000
MAX_SHARDS = 100_000
MAX_TENSORS = 1 << 22
MAX_OPTIONS = 1024
MAX_DIMENSIONS = 64
MAX_TOKENS = 1 << 25
MAX_VALUES = 1 << 27
MAX_BYTES = (1 << 63) - 1
PAGE = 4096
MAX_BLOCK = 64 << 20
#: The name that safetensors reserves for itself.
RESERVED_NAME = "__metadata__"

#: Bits of an element of each dtype that safetensors can name.
BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
