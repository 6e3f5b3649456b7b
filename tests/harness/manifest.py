"""A second implementation of docs/format.md, in plain Python and only from the document.

It serves as an oracle (``read``: every byte of a checkpoint against every checksum, sharing no code with the core) and
as a forger (``seal``: any body under a correct prefix, so that a test reaches the code behind the checksum). The
checksum of much data comes from a library, which a test compares with the definition.
"""

# ruff: noqa: PTH208, TC003 - names as the directory has them

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import anycrc  # type: ignore[import-untyped]
except ImportError:  # scripts/gpu installs no packages
    anycrc = None

NAME = "fastckpt.json"
PREFIX = len(b'{"fastckpt":1,"crc64nvme":"0123456789abcdef",\n')
POLYNOMIAL_REFLECTED = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)
ALL_ONES = (1 << 64) - 1

# Section 2.3: the dtypes of safetensors, with bits per element (F4 and both F6 types are smaller than a byte).
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL_REFLECTED if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


TABLE = _table()
#: Above this many bytes, a sum of one byte at a time (10 MB/s) takes too long for a test.
MUCH = 4096
_library = anycrc and anycrc.Model("CRC64-NVME")


def crc64(data: bytes, value: int = 0) -> int:
    """CRC-64/NVME of ``data`` after bytes whose checksum is ``value``."""
    if _library is None or len(data) < MUCH:
        return crc64_by_definition(data, value)
    return int(_library.calc(data, value))


def crc64_by_definition(data: bytes, value: int = 0) -> int:
    """CRC-64/NVME by its definition, one byte at a time, and slow."""
    table = TABLE
    value ^= ALL_ONES
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ ALL_ONES


def digits(value: int) -> str:
    return f"{value:016x}"


# --- forging -------------------------------------------------------------------------------------------------------


def seal(body: dict[str, Any] | bytes, *, version: str = "1", crc: str | None = None) -> bytes:
    """A whole manifest around ``body`` (the members, or raw bytes after the prefix) with a correct checksum."""
    if not isinstance(body, bytes):
        body = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")[1:] + b"\n"
    return f'{{"fastckpt":{version},"crc64nvme":"{crc or digits(crc64(body))}",\n'.encode() + body


def body_of(checkpoint: Path) -> dict[str, Any]:
    """The members of a checkpoint's manifest, without checks."""
    loaded = json.loads((checkpoint / NAME).read_bytes())
    return {key: value for key, value in loaded.items() if key not in ("fastckpt", "crc64nvme")}


def own_checksum(checkpoint: Path) -> str:
    """The checksum of a checkpoint's manifest, from its first line."""
    return str(json.loads((checkpoint / NAME).read_bytes())["crc64nvme"])


def forge(checkpoint: Path, body: dict[str, Any] | bytes, *, version: str = "1", crc: str | None = None) -> None:
    """Replace a checkpoint's manifest by one with this body and a correct checksum."""
    (checkpoint / NAME).write_bytes(seal(body, version=version, crc=crc))


def shard_bytes(tensors: list[tuple[str, str, list[int], bytes]], *, pad_to: int = 4096) -> tuple[bytes, int]:
    """A safetensors file according to section 2, and where its data begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % pad_to)
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors), 8 + len(text)


def extents(offset: int, length: int, block_size: int) -> list[tuple[int, int]]:
    """The byte ranges in the file of a tensor's extents, by section 2.2."""
    ranges = []
    end = offset + length
    while offset < end:
        stop = min(end, (offset // block_size + 1) * block_size)
        ranges.append((offset, stop))
        offset = stop
    return ranges


def minimal(
    directory: Path, tensors: list[tuple[str, str, list[int], bytes]], *, block_size: int = 4096
) -> dict[str, Any]:
    """Write a whole checkpoint by hand, with a dict of arrays as its state; return the manifest's body."""
    directory.mkdir()
    data, begin = shard_bytes(tensors)
    (directory / "model.safetensors").write_bytes(data)
    entries: list[dict[str, Any]] = []
    structure: list[Any] = [["dict", len(tensors)]]
    at = begin
    for index, (name, dtype, shape, payload) in enumerate(tensors):
        parts = extents(at, len(payload), block_size)
        entries.append(
            {
                "name": name,
                "dtype": dtype,
                "shape": shape,
                "shard": 0,
                "offset": at,
                "crc": "".join(digits(crc64(data[start:stop])) for start, stop in parts),
            }
        )
        structure += [name, ["array", index]]
        at += len(payload)
    body = {
        "min_reader": 0,
        "writer": {"name": "fastckpt", "version": "0.1.0"},
        "created": 1_800_000_000.5,
        "saved": {"engine": "threads", "fallback": None, "threads": 1, "seconds": 0.5, "gigabytes_per_second": 1.25},
        "block_size": block_size,
        "shards": [
            {
                "file": "model.safetensors",
                "bytes": len(data),
                "data_offset": begin,
                "header_crc": digits(crc64(data[:begin])),
                "crc": digits(crc64(data)),
            }
        ],
        "tensors": entries,
        "structure": structure,
        "metadata": [None],
    }
    index = {
        "metadata": {"total_size": sum(len(payload) for *_, payload in tensors)},
        "weight_map": {name: "model.safetensors" for name, *_ in tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    forge(directory, body)
    return body


# --- the oracle ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One tensor in the files."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    shard: str
    offset: int


class WrongError(AssertionError):
    """The checkpoint violates docs/format.md."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise WrongError(what)


def _hex(text: Any, count: int, what: str) -> None:
    _need(isinstance(text, str) and len(text) == 16 * count and set(text) <= set("0123456789abcdef"), what)


def _count(value: Any, what: str) -> int:
    _need(type(value) is int and 0 <= value < 1 << 63, what)
    return int(value)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Sections 3 and 3.1: prefix, checksum, members."""
    raw = (checkpoint / NAME).read_bytes()
    body = raw[PREFIX:]
    want = f'{{"fastckpt":1,"crc64nvme":"{digits(crc64(body))}",\n'.encode()
    _need(raw[:PREFIX] == want, f"the prefix is {raw[:PREFIX]!r}, not {want!r}")
    _need(raw.endswith(b"}\n"), "the manifest does not end in a brace and a newline")
    body_members = json.loads(b"{" + body)
    _need(next(iter(body_members)) == "min_reader" and body_members["min_reader"] == 0, "min_reader")
    members = {
        "writer": dict,
        "created": (int, float),
        "saved": dict,
        "block_size": int,
        "shards": list,
        "tensors": list,
        "structure": list,
        "metadata": list,
    }
    for name, kind in members.items():
        _need(isinstance(body_members.get(name), kind), f"member {name}: {body_members.get(name)!r}")
    _need(body_members["writer"].get("name") == "fastckpt", "writer")
    _need(body_members["saved"].get("engine") in ("uring", "threads", "buffered"), "saved.engine")
    _need(isinstance(body_members["saved"].get("fallback"), (str, type(None))), "saved.fallback")
    for number in ("threads", "seconds", "gigabytes_per_second"):
        _need(isinstance(body_members["saved"].get(number), (int, float)), f"saved.{number}")
    return dict(body_members)


def read(checkpoint: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, after a check of every byte of every file against every checksum and rule."""
    body = read_manifest(checkpoint)
    block_size = body["block_size"]
    _need(block_size % 4096 == 0 and 4096 <= block_size <= 1 << 30, f"block_size {block_size}")
    files: list[tuple[str, bytes, int]] = []
    for shard in body["shards"]:
        name = shard["file"]
        plain = name.removeprefix("training/")
        _need(plain.endswith(".safetensors") and "/" not in plain, f"shard name {name!r}")
        path = checkpoint / name
        _need(path.is_file() and path.resolve() == checkpoint.resolve() / name, f"{name} is no regular file")
        data = path.read_bytes()
        begin = _count(shard["data_offset"], "data_offset")
        _need(len(data) == shard["bytes"], f"{name} has {len(data)} bytes, not {shard['bytes']}")
        _need(struct.unpack("<Q", data[:8])[0] == begin - 8, f"{name}: header length")
        _hex(shard["crc"], 1, f"{name}: crc")
        _hex(shard["header_crc"], 1, f"{name}: header_crc")
        _need(shard["header_crc"] == digits(crc64(data[:begin])), f"{name}: header_crc differs")
        _need(shard["crc"] == digits(crc64(data[begin:], crc64(data[:begin]))), f"{name}: crc differs")
        _need(type(shard.get("prefix", "")) is str and shard.get("prefix") != "", f"{name}: prefix")
        files.append((name, data, begin))
    _need(len({name for name, *_ in files}) == len(files), "two shards share a file")
    headers = [json.loads(data[8:begin]) for _, data, begin in files]
    for header in headers:
        _need(header.pop("__metadata__", None) == {"format": "pt"}, "the header's __metadata__")

    stored: dict[str, Stored] = {}
    claimed: list[list[tuple[int, int]]] = [[(0, begin)] for *_, begin in files]
    for tensor in body["tensors"]:
        name, shape, offset = tensor["name"], tensor["shape"], _count(tensor["offset"], "offset")
        file, data, begin = files[_count(tensor["shard"], "shard")]
        bits = DTYPE_BITS[tensor["dtype"]] * math.prod(_count(size, "shape") for size in shape)
        _need(bits % 8 == 0, f"{name} ends inside a byte")
        length = bits // 8
        _need(begin <= offset <= offset + length <= len(data), f"{name} lies outside its shard")
        parts = extents(offset, length, block_size)
        _hex(tensor["crc"], len(parts), f"{name}: crc {tensor['crc']!r} for {len(parts)} extents")
        got = "".join(digits(crc64(data[start:stop])) for start, stop in parts)
        _need(got == tensor["crc"], f"{name}: crc differs")
        _need(name not in stored, f"{name} twice")
        prefix = body["shards"][tensor["shard"]].get("prefix", "")
        _need(name.startswith(prefix), f"{name} in a shard of {prefix}")
        entry = headers[tensor["shard"]].pop(name[len(prefix) :], None)
        want = {
            "dtype": tensor["dtype"],
            "shape": shape,
            "data_offsets": [offset - begin, offset - begin + length],
        }
        _need(entry == want, f"{file}: header says {entry} of {name}, the manifest {want}")
        claimed[tensor["shard"]].append((offset, offset + length))
        stored[name] = Stored(tensor["dtype"], tuple(shape), data[offset : offset + length], file, offset)
    _need(not any(headers), f"only in a header: {headers}")
    for (name, data, _), ranges in zip(files, claimed, strict=True):
        at = 0
        for start, stop in sorted(ranges):
            _need(start in (at, stop), f"{name}: hole or overlap at {at}")
            at = max(at, stop)
        _need(at == len(data), f"{name}: bytes after {at} belong to no tensor")
    _read_index(checkpoint, stored, {shard["file"]: shard.get("prefix", "") for shard in body["shards"]})
    return stored


def _read_index(checkpoint: Path, stored: dict[str, Stored], prefixes: dict[str, str]) -> None:
    """Check that Hugging Face's index has the place of each tensor of the model."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())
    model = {name: entry for name, entry in stored.items() if not entry.shard.startswith("training/")}
    names = {name[len(prefixes[entry.shard]) :]: entry.shard for name, entry in model.items()}
    _need(index["weight_map"] == names, "weight_map")
    _need(index["metadata"]["total_size"] == sum(len(entry.data) for entry in model.values()), "total_size")


def listing(directory: Path) -> list[str]:
    """Everything in a directory, including hidden files, for tests that look for leftovers."""
    return sorted(os.listdir(directory))


def lock(directory: Path) -> int:
    """Hold the lock of a living writer, on one byte of the open file description, until the descriptor is closed."""
    fd = os.open(directory / NAME, os.O_WRONLY)
    # The fields of struct flock: type, whence, start, length, pid.
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 62, 1, 0))
    return fd
