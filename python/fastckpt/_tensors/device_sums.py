"""CRC-64/NVME (docs/format.md, 3.3) of bytes in device memory, computed there by plain operations of torch.

A CRC is linear over GF(2): apart from a constant that depends only on the length, each of its 64 bits is the parity of
some of the message's bits. So a CRC is the product of a vector of bits and a matrix of bits, with sums modulo 2. Rows
of 256 bytes are multiplied by one matrix; then 32 neighbouring results at a time, 2048 bits again, by a matrix that
moves each to its place; and so on, until one result is left. Leading zeros change nothing, so an incomplete row is
padded at its start.

Every count is exact in any type in which devices multiply: a product is 0 or 1, and a sum is at most 2048, which half
precision represents, in any order and precision of accumulation.

A CRC needs 1024 multiplications and additions per byte. The memory traffic is about 34 bytes per byte, most of it the
bits as numbers of half precision, 16 bytes, written once and read once. So memory bounds an H200 (about 4.8 TB/s, 800
TFLOP/s) to about 100 GB/s by this estimate. Tables of bytes instead of matrices would need as much traffic (41 bytes
per byte), and gathers, which run at a fraction of the bandwidth.

This file does not import torch: its callers pass it in.
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
#: Bits that are summed at a time. Half precision represents every integer up to this one.
_WIDTH = 2048
#: Bytes whose bits are expanded at a time: each needs temporary memory of 16 bytes.
STEP = 4 << 20
#: Bytes that are summed at a time.
_STRETCH = 64 << 20
#: The results of :func:`is_exact`, by device.
_checked: dict[str, bool] = {}
#: The checksum of ``index % 251`` for this many bytes.
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
    """The factor by which this many following bytes multiply a CRC: x to the power of eight times their number."""
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
    """The contribution of each bit of a row of bytes to its CRC: byte after byte, each from its lowest bit.

    Bit ``i`` of a byte has the value ``2**i``: its row is divided by that.
    """
    values, value = [], _POLYNOMIAL
    for _ in range(_WIDTH):
        values.append(value)
        value = _times_x(value)
    # The lowest bit of the first byte has the highest power.
    return _bits_of(values[::-1]) / np.tile(2.0 ** np.arange(8), _WIDTH // 8)[:, None]


def _sums_matrix(nbytes: int) -> Any:
    """The contribution of each bit of neighbouring CRCs, of ``nbytes`` each, to the CRC of all of them."""
    values = []
    for following in reversed(range(_WIDTH // _BITS)):
        value, powers = _following(following * nbytes), []
        for _ in range(_BITS):
            powers.append(value)
            value = _times_x(value)
        values += powers[::-1]
    return _bits_of(values) * 1.0


#: The matrices by device and length of the inputs: about half a megabyte per device.
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
    """The type for the multiplication: CPUs are slow at half precision."""
    return torch.float32 if device.type == "cpu" else torch.float16


def of(torch: ModuleType, data: Any) -> int:
    """The checksum of bytes on a device, computed in its current stream.

    Temporary memory: 16 bytes for each byte of :data:`STEP` (32 on the processor), half a byte for each of 64 MiB, and,
    if the length is not a multiple of 256, once the bytes of the last 64 MiB.

    Args:
        torch: the module.
        data: a contiguous vector of bytes (uint8) on any device, at least one.
    """
    # Autocast would choose the type of a multiplication, so it is off. Not every kind of device supports it.
    cast = torch.is_autocast_enabled(data.device.type)
    exact = torch.autocast(data.device.type, enabled=False) if cast else nullcontext()
    with torch.no_grad(), exact:
        parts = [(_of_stretch(torch, part), len(part)) for part in data.split(_STRETCH)]
    return _crc64.joined(parts[0][0], parts[1:])


def _of_stretch(torch: ModuleType, data: Any) -> int:
    bits = _of_rows(torch, _padded(torch, data, _WIDTH // 8)).view(-1)
    nbytes = _WIDTH // 8
    while len(bits) > _BITS:
        bits = _padded(torch, bits, _WIDTH)
        width = min(len(bits), _WIDTH)
        summed = bits.view(-1, width) @ _matrix(torch, data.device, nbytes)[-width:]
        bits = _parities(torch, summed).view(-1)
        nbytes *= _WIDTH // _BITS
    (value,) = np.packbits(bits.to(torch.uint8).cpu().numpy(), bitorder="little").view("<u8")
    # A CRC begins with ones, which the following bytes multiply, and all its bits are inverted at the end.
    return int(value) ^ _times(_ALL, _following(len(data))) ^ _ALL


def _padded(torch: ModuleType, vector: Any, width: int) -> Any:
    """Pad a vector that is longer than ``width`` with leading zeros, to a multiple of ``width``."""
    short = -len(vector) % width if len(vector) > width else 0
    return torch.nn.functional.pad(vector, (short, 0)) if short else vector


def _of_rows(torch: ModuleType, data: Any) -> Any:
    """The bits of the CRCs of rows of bytes, without the constant."""
    device = data.device
    width = min(len(data), _WIDTH // 8)
    rows = data.view(-1, width)
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


def is_exact(torch: ModuleType, device: Any) -> bool:
    """Whether this device computes correct checksums: one is computed and compared with the known value."""
    known = _checked.get(str(device))
    if known is not None:
        return known
    with _device.Link(torch, device).selected():
        try:
            found = of(torch, (torch.arange(_PROBE, device="cpu") % 251).to(torch.uint8).to(device))
        except Exception:  # noqa: BLE001 - the bytes are summed elsewhere
            # A full device may have room next time.
            return False
    _checked[str(device)] = found == _PROBE_SUM
    return found == _PROBE_SUM
