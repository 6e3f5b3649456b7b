"""CRC-64/NVME (docs/format.md, 3.3) of bytes in a device's memory, made there by plain operations of torch.

A CRC is linear over GF(2): but for a constant that depends on the length alone, each of its 64 bits is the parity of
some of the message's bits. So it is the product of a vector of bits and a matrix of bits, in which sums count modulo 2.
Rows of 256 bytes are multiplied by one matrix; then 32 neighbouring results at a time, 2048 bits again, by a matrix
that moves each to its place; and so on, until one result is left of each chunk. Zeros in front change nothing, so what
does not fill a row is filled up there.

Every count is exact in any type that devices multiply in: a product is 0 or 1, and a sum is at most 2048, which half
precision still has, in whatever order and precision of accumulation.

The operations: 1024 multiplications and additions for a byte. The memory traffic: about 34 bytes for a byte, most of
it the bits as numbers of half precision, 16 bytes, written once and read once.

This file does not import torch: its callers hand it over.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _crc64

from . import device as _device

if TYPE_CHECKING:
    from types import ModuleType

#: The polynomial. As in a CRC, the highest bit is the coefficient of x^0.
_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_ONE = 1 << 63
_ALL = (1 << 64) - 1
_BITS = 64
#: Bits that are summed at a time. Half precision has every integer up to this one.
_WIDTH = 2048
#: Bytes whose bits are taken apart at a time: these make temporary memory of 16 bytes each.
STEP = 4 << 20
#: Bytes that are asked for at a time, to have one sum.
_STRETCH = 64 << 20
#: What :func:`refusal` has found, by device.
_checked: dict[str, str | None] = {}
#: The checksum of ``index % 251`` for so many bytes.
_PROBE = 20_000
_PROBE_SUM = 0xAAD68E38D896CE68


def _times_x(value: int) -> int:
    return value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial."""
    product = 0
    for power in range(_BITS):
        if a >> (_BITS - 1 - power) & 1:
            product ^= b
        b = _times_x(b)
    return product


@cache
def _following(nbytes: int) -> int:
    """The factor by which so many following bytes multiply a CRC: x to the power of eight times as many."""
    power, square = _ONE, 1 << (_BITS - 1 - 8)
    while nbytes:
        if nbytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        nbytes >>= 1
    return power


def _bits_of(values: list[int]) -> Any:
    """A row of 64 numbers, 0 or 1, for each value, the lowest bit first."""
    return np.unpackbits(np.array(values, "<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")


def _bytes_matrix() -> Any:
    """What each bit of a row of bytes adds to its CRC: the bits of each byte, the lowest first, byte after byte.

    Bit ``i`` of a byte comes as ``2**i``: its row is divided by that.
    """
    values, value = [], _POLYNOMIAL
    for _ in range(_WIDTH):
        values.append(value)
        value = _times_x(value)
    # The lowest bit of the first byte has the highest power.
    return _bits_of(values[::-1]) / np.tile(2.0 ** np.arange(8), _WIDTH // 8)[:, None]


def _sums_matrix(nbytes: int) -> Any:
    """What each bit of neighbouring CRCs, of ``nbytes`` each, adds to the CRC of all of them."""
    values = []
    for following in reversed(range(_WIDTH // _BITS)):
        value, powers = _following(following * nbytes), []
        for _ in range(_BITS):
            powers.append(value)
            value = _times_x(value)
        values += powers[::-1]
    return _bits_of(values) * 1.0


#: By device and length of what the inputs are of: the matrices, about half a megabyte for a device.
_matrices: dict[tuple[str, int], Any] = {}


def _matrix(torch: ModuleType, device: Any, nbytes: int) -> Any:
    """The matrix for CRCs of ``nbytes`` each, or with 0 for bytes."""
    key = str(device), nbytes
    found = _matrices.get(key)
    if found is None:
        made = _sums_matrix(nbytes) if nbytes else _bytes_matrix()
        found = _matrices[key] = torch.from_numpy(made).to(_number(torch, device)).to(device)
    return found


def _number(torch: ModuleType, device: Any) -> Any:
    """The type to multiply in: processors are slow at half precision."""
    return torch.float32 if device.type == "cpu" else torch.float16


def enqueue(torch: ModuleType, data: Any, length: int) -> Any:
    """Ask the current stream of a device for the checksums of chunks.

    Temporary memory: 16 bytes for each byte of :data:`STEP` (32 on the processor), half a byte for each of ``data``,
    and, if ``length`` is not a multiple of 256, once the bytes of ``data``.

    Args:
        torch: the module.
        data: a contiguous vector of bytes (uint8) on any device: chunks, one after another.
        length: bytes of a chunk, at least 1. It divides those of ``data``.

    Returns:
        What :func:`collect` takes: a tensor on the device.
    """
    device = data.device
    # It multiplies in a type of its own choice. Not every kind of device knows it.
    cast = torch.is_autocast_enabled(device.type)
    exact = torch.autocast(device.type, enabled=False) if cast else nullcontext()
    with torch.no_grad(), exact:
        chunks = data.view(-1, length)
        bits = _of_bytes(torch, _padded(torch, chunks, _WIDTH // 8))
        bits = bits.view(len(chunks), -1)
        nbytes = _WIDTH // 8
        while bits.shape[1] > _BITS:
            bits = _padded(torch, bits, _WIDTH)
            width = min(bits.shape[1], _WIDTH)
            summed = bits.view(-1, width) @ _matrix(torch, device, nbytes)[-width:]
            bits = _parities(torch, summed).view(len(chunks), -1)
            nbytes *= _WIDTH // _BITS
        return bits.to(torch.uint8)


def _padded(torch: ModuleType, rows: Any, width: int) -> Any:
    """Zeros in front of each row that is longer than ``width``, to a multiple of it."""
    length = rows.shape[1]
    short = -length % width if length > width else 0
    return torch.nn.functional.pad(rows, (short, 0)) if short else rows


def _of_bytes(torch: ModuleType, chunks: Any) -> Any:
    """The bits of the CRCs of rows of bytes, but for the constant."""
    device = chunks.device
    width = min(chunks.shape[1], _WIDTH // 8)
    rows = chunks.reshape(-1, width)
    matrix = _matrix(torch, device, 0)[-8 * width :]
    masks = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8).to(device)
    out = torch.empty((len(rows), _BITS), dtype=matrix.dtype, device=device)
    step = max(1, STEP // width)
    room = torch.empty((min(step, len(rows)), width, 8), dtype=matrix.dtype, device=device)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        bits = torch.bitwise_and(part[:, :, None], masks, out=room[: len(part)])
        torch.mm(bits.view(len(part), -1), matrix, out=out[first : first + step])
    return _parities(torch, out)


def _parities(torch: ModuleType, counts: Any) -> Any:
    return counts.remainder_(torch.tensor(2.0, device="cpu"))


def collect(bits: Any, length: int) -> list[int]:
    """Wait for what :func:`enqueue` has asked for, of chunks of ``length`` bytes, and return their checksums.

    Call it in the same stream.
    """
    values = np.packbits(bits.cpu().numpy(), axis=1, bitorder="little").view("<u8")
    # A CRC begins with ones, which the following bytes multiply, and all its bits are inverted in the end.
    constant = _times(_ALL, _following(length)) ^ _ALL
    return [int(value) ^ constant for value in values[:, 0]]


def of(torch: ModuleType, data: Any) -> int:
    """The checksum of all of a contiguous vector of bytes on a device, at least one; in the current stream."""
    parts = []
    for part in data.split(_STRETCH):
        (found,) = collect(enqueue(torch, part, len(part)), len(part))
        parts.append((found, len(part)))
    return _crc64.joined(parts[0][0], parts[1:])


def refusal(torch: ModuleType, device: Any) -> str | None:
    """Why checksums cannot be made on this device, or None: some are made, and compared with what they must be."""
    if str(device) in _checked:
        return _checked[str(device)]
    link = _device.Link(torch, device)
    with link.selected():
        try:
            data = (torch.arange(2 * _PROBE, device="cpu") % _PROBE % 251).to(torch.uint8).to(device)
            found = collect(enqueue(torch, data, _PROBE), _PROBE)
        except Exception as error:  # noqa: BLE001 - the usual path needs none of it
            # A device that is full may have room next time.
            return f"checksums cannot be made on {device}: {str(error).splitlines()[0]}"
    why = _checked[str(device)] = None if found == [_PROBE_SUM] * 2 else f"checksums made on {device} are wrong"
    return why
