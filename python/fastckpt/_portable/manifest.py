"""Reads a manifest without trusting it: version, checksum, JSON, and the rules beyond its types (docs/format.md, 3)."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastckpt import _crc64
from fastckpt._text import visible
from fastckpt.exceptions import CorruptCheckpointError, FormatVersionError

from .limits import (
    BITS,
    MAX_BLOCK,
    MAX_BYTES,
    MAX_DIMENSIONS,
    MAX_HEADER,
    MAX_OPTIONS,
    MAX_SHARDS,
    MAX_TENSORS,
    MINOR,
    PAGE,
    RESERVED_NAME,
    TRAINING,
    VERSION,
)
from .members import TWICE, check, check_tokens, count, members, parse
from .records import LogicalType, StoredShard, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_LINE = re.compile(rb'\{"fastckpt":([0-9]+)(?:(,"crc64nvme":")([0-9a-f]{16})",\n)?')
#: The beginning of the body; the number may be malformed.
_MIN_READER = re.compile(rb'"min_reader":([0-9]*)')
#: The beginning of the body before format version 1.
_EARLIER = b'"writer":'
#: Longest name of a file, and the smallest header of a shard with its length field.
_LONGEST_NAME, _SMALLEST_HEADER = 255, 10
_64_BITS = 1 << 64
#: More digits than a minor version of 64 bits has.
_MINOR_DIGITS = 21
_UPGRADE = "upgrade the package fastckpt-io"
_T = TypeVar("_T")
_MOST = {"shards": MAX_SHARDS, "tensors": MAX_TENSORS}
_TOKENS = {"structure", "metadata", "per_rank"}
_KNOWN = {"min_reader", "writer", "created", "saved", "block_size", *_MOST, *_TOKENS}
_SPACE = " \t\r\n"
_WINDOWS = sys.platform == "win32"


class Manifest(NamedTuple):
    """A checked manifest."""

    info: dict[str, Any]
    block_size: int
    shards: list[StoredShard]
    tensors: list[StoredTensor]
    structure: str
    metadata: str
    per_rank: str | None


def corrupt(path: str, what: object) -> CorruptCheckpointError:
    """The error for damage of the file at ``path``."""
    return CorruptCheckpointError(visible(f"corrupt checkpoint: `{path}`: {what}"))


def own_checksum(content: bytes) -> str | None:
    """The checksum in the first line of a manifest, as 16 hexadecimal digits; None if there is none."""
    line = _FIRST_LINE.match(content)
    return line[3].decode() if line is not None and line[3] is not None else None


def decode(content: bytes, path: str) -> Manifest:
    """Read and check the bytes of a manifest; ``path`` is for messages."""
    return _decode(content, path, _whole)


def decode_head(content: bytes, path: str) -> tuple[float, list[StoredShard]]:
    """When the save began, and the shards; only the checksum is checked."""
    return _decode(content, path, _head)


def _decode(content: bytes, path: str, make: Callable[[list[tuple[str, memoryview]]], _T]) -> _T:
    line = _FIRST_LINE.match(content)
    if line is None:
        raise corrupt(path, "it does not begin as a manifest of fastckpt does")
    version = line[1][:20].decode()
    if version != str(VERSION):
        raise _unread(path, f"has format version {version}, and this fastckpt reads version {VERSION}: {_UPGRADE}")
    if line[2] is None:
        raise corrupt(path, "its first line is damaged")
    # The first line opened the JSON object. A manifest may have 512 MiB, so nothing is copied before the check.
    text = memoryview(content)[line.end() :]
    found, written = _crc64.to_hex(_crc64.of(text)), line[3].decode()
    if found != written:
        raise corrupt(path, f"its checksum is {found}, expected {written}")
    needs = _MIN_READER.match(text)
    if needs is None:
        if text[: len(_EARLIER)] != _EARLIER:
            raise corrupt(path, "it does not begin with the reader version that it needs")
        raise _unread(
            path,
            "was written before format version 1 was released, when the training state lay beside the model: load it "
            "with the fastckpt that wrote it",
        )
    minor = int(needs[1].lstrip(b"0")[:_MINOR_DIGITS] or b"0")
    if MINOR < minor < _64_BITS:  # a larger number is not valid in this format, and is refused as such
        found = f"{VERSION}.{minor}"
        what = f"needs a reader of format version {found}, and this fastckpt reads up to {VERSION}.{MINOR}: {_UPGRADE}"
        raise _unread(path, what)
    try:
        return make(members(text))
    except (ValueError, RecursionError) as error:
        raise corrupt(path, error) from error


def _unread(path: str, why: str) -> FormatVersionError:
    return FormatVersionError(visible(f"`{path}` {why}"))


def _head(found: list[tuple[str, memoryview]]) -> tuple[float, list[StoredShard]]:
    values = _parsed([(name, text) for name, text in found if name in ("created", "shards")])
    return _number(_get(values, "created")), _shards(values)


def _whole(found: list[tuple[str, memoryview]]) -> Manifest:
    values = _parsed(found)
    _size(_get(values, "min_reader"))
    block_size = _size(_get(values, "block_size"))
    if block_size % PAGE or not PAGE <= block_size <= MAX_BLOCK:
        raise ValueError(f"block_size {block_size} is not a multiple of {PAGE} up to {MAX_BLOCK}")
    shards = _shards(values)
    tensors = [_tensor(entry, shards, block_size) for entry in _list(_get(values, "tensors"))]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors have the same name")
    _check_cover(tensors, shards)
    return Manifest(
        info=_info(values, block_size),
        block_size=block_size,
        shards=shards,
        tensors=tensors,
        structure=_get(values, "structure"),
        metadata=_get(values, "metadata"),
        per_rank=values.get("per_rank"),
    )


def _parsed(found: list[tuple[str, memoryview]]) -> dict[str, Any]:
    """The values of all known members, with tokens as text; the text of unknown members must be JSON."""
    values: dict[str, Any] = {}
    for name, text in found:
        if name in values:
            raise ValueError(f"it names the member {name!r} twice")
        if name in _TOKENS:
            check_tokens(name, text)
        if name in _MOST and count(text) > _MOST[name]:
            raise ValueError(f"it has more than {_MOST[name]} {name}")
        decoded = str(text, "utf-8")
        if name in _KNOWN - _TOKENS:
            values[name] = parse(decoded)
            continue
        check(decoded)
        if name in _TOKENS:
            values[name] = decoded.strip(_SPACE)
    return values


def _info(values: dict[str, Any], block_size: int) -> dict[str, Any]:
    writer, saved = _get(values, "writer"), _get(values, "saved")
    fallback = _get(saved, "fallback", None)
    # Only saves use these names, but all readers must agree on whether a manifest is valid.
    for file in _list(_get(saved, "files", []), MAX_SHARDS):
        _integer(_get(file, "modified"), -_64_BITS // 2, _64_BITS // 2)
        _size(_get(file, "links"))
        _size(_get(file, "inode", 0))
    return {
        "version": VERSION,
        "writer": {name: _text(_get(writer, name)) for name in ("name", "version")},
        "created": _number(_get(values, "created")),
        "saved": {
            "engine": _text(_get(saved, "engine")),
            "fallback": None if fallback is None else _text(fallback),
            "threads": _size(_get(saved, "threads")),
            "seconds": _number(_get(saved, "seconds")),
            "gigabytes_per_second": _number(_get(saved, "gigabytes_per_second")),
            "options": [_pair(pair) for pair in _list(_get(saved, "options", []), MAX_OPTIONS)],
        },
        "block_size": block_size,
    }


def _pair(value: Any) -> tuple[str, str]:
    name, words = _list(value)  # raises ValueError unless there are two members
    return _text(name), _text(words)


def _shards(values: dict[str, Any]) -> list[StoredShard]:
    shards = [_shard(entry) for entry in _list(_get(values, "shards"))]
    if len({shard.file for shard in shards}) != len(shards):
        raise ValueError("two shards have the same name")
    return shards


def _shard(entry: Any) -> StoredShard:
    file = _text(_get(entry, "file"))
    shard = StoredShard(
        file=file,
        nbytes=_size(_get(entry, "bytes")),
        prefix=_text(_get(entry, "prefix", "")),
        data_offset=_size(_get(entry, "data_offset")),
        header_crc=_text(_get(entry, "header_crc")),
        crc=_text(_get(entry, "crc")),
    )
    if not is_plain(file, windows=_WINDOWS):
        raise ValueError(f"shard name {file!r} is not a plain file name, nor one in `{TRAINING}`")
    most = min(shard.nbytes, MAX_HEADER + 8)
    if shard.nbytes > MAX_BYTES or not _SMALLEST_HEADER <= shard.data_offset <= most:
        raise ValueError(f"shard `{file}` has impossible sizes")
    if not (_crc64.are_digits(shard.header_crc, 1) and _crc64.are_digits(shard.crc, 1)):
        raise ValueError(f"shard `{file}` has no checksum")
    return shard


def is_plain(file: str, *, windows: bool) -> bool:
    """Whether ``file`` names a shard: in the checkpoint's directory, or in its directory ``training``.

    On Windows no colon is allowed: it leads elsewhere.
    """
    suffix = ".safetensors"
    file = file.removeprefix(f"{TRAINING}/")
    return (
        file.endswith(suffix)
        and file != suffix
        and len(file.encode()) <= _LONGEST_NAME
        and not file.startswith(".")
        and not any(mark in file for mark in ("/", "\\", "\0", *(":" if windows else "")))
    )


def _tensor(entry: Any, shards: list[StoredShard], block_size: int) -> StoredTensor:
    name = _text(_get(entry, "name"))
    try:
        return _tensor_called(name, entry, shards, block_size)
    except ValueError as error:
        raise ValueError(f"tensor `{name}`: {error}") from error


def _tensor_called(name: str, entry: Any, shards: list[StoredShard], block_size: int) -> StoredTensor:
    dtype, shape = _text(_get(entry, "dtype")), _shape(_get(entry, "shape"))
    number, offset = _size(_get(entry, "shard")), _size(_get(entry, "offset"))
    crc = _text(_get(entry, "crc"))
    _text(_get(entry, "crc64xz", ""))
    if dtype not in BITS:
        raise ValueError(f"there is no dtype {dtype}")
    if number >= len(shards):
        raise ValueError("its shard is not listed")
    shard = shards[number]
    nbytes = _bytes(dtype, shape)
    if offset + nbytes > shard.nbytes:
        raise ValueError(f"it ends beyond shard `{shard.file}`")
    if name == RESERVED_NAME or not name.startswith(shard.prefix) or name[len(shard.prefix) :] == RESERVED_NAME:
        raise ValueError(f"its name does not belong in shard `{shard.file}`")
    if offset < shard.data_offset:
        raise ValueError(f"it begins inside the header of shard `{shard.file}`")
    extents = extent_count(offset, nbytes, block_size)
    if not _crc64.are_digits(crc, extents):
        raise ValueError(f"it needs the checksums of {extents} extents")
    return StoredTensor(name, dtype, shape, number, offset, nbytes, _logical(entry, dtype, shape), crc)


def _logical(entry: Any, dtype: str, shape: tuple[int, ...]) -> LogicalType | None:
    found = _get(entry, "as", None)
    if found is None:
        return None
    logical = LogicalType(_text(_get(found, "dtype")), _shape(_get(found, "shape")))
    if dtype != "U8" or len(shape) != 1:
        raise ValueError("only a vector of bytes can stand for another type")
    if not all("!" <= char <= "~" for char in logical.dtype):
        raise ValueError("the name of its logical dtype is not printable ASCII")
    return logical


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    # A zero anywhere makes the tensor empty, however large the product of the other sizes.
    bits = math.prod(shape) * BITS[dtype]
    if bits >= _64_BITS or bits % 8 or bits // 8 > MAX_BYTES:
        raise ValueError("impossible shape")
    return bits // 8


def extent_count(offset: int, nbytes: int, block_size: int) -> int:
    """The number of blocks that a range of a file touches."""
    return (offset + nbytes - 1) // block_size - offset // block_size + 1 if nbytes else 0


def _check_cover(tensors: list[StoredTensor], shards: list[StoredShard]) -> None:
    """Raise ValueError unless the tensors of each shard are contiguous, from its header to its end."""
    ends = [shard.data_offset for shard in shards]
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        end = ends[tensor.shard]
        if tensor.offset != end:
            what = "overlap" if tensor.offset < end else "leave a hole"
            raise ValueError(f"tensors in shard `{shards[tensor.shard].file}` {what} at byte {min(tensor.offset, end)}")
        ends[tensor.shard] = end + tensor.nbytes
    for shard, end in zip(shards, ends, strict=True):
        if end != shard.nbytes:
            raise ValueError(f"tensors in shard `{shard.file}` end at byte {end}, not at its end, {shard.nbytes}")


# --- types ------------------------------------------------------------------------------------------------------------


def _list(value: Any, most: float = math.inf) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"expected an array, found {type(value).__name__}")
    if len(value) > most:
        raise ValueError(f"expected an array of at most {most} elements, found {len(value)}")
    return value


_REQUIRED = object()


def _get(holder: Any, name: str, default: Any = _REQUIRED) -> Any:
    if type(holder) is not dict:
        raise ValueError(f"expected an object, found {type(holder).__name__}")
    value = holder.get(name, default)
    if value is _REQUIRED:
        raise ValueError(f"it has no {name!r}")
    if value is TWICE:
        raise ValueError(f"it names the member {name!r} twice")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, found {type(value).__name__}")
    value.encode()  # raises for half of a surrogate pair, which is not a character
    return value


def _size(value: Any) -> int:
    return _integer(value, 0, _64_BITS)


def _integer(value: Any, least: int, beyond: int) -> int:
    if type(value) is not int or not least <= value < beyond:
        raise ValueError(f"expected an integer from {least} to {beyond - 1}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, found {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return float(value)


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"a shape is an array of at most {MAX_DIMENSIONS} sizes")
    return tuple(map(_size, value))
