"""Bytes at an address, and strided arrays copied from and to them in pieces."""

from __future__ import annotations

import contextlib
import errno
import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from .pieces import Index, elements, pieces

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
#: Copies between the sub-array under an index and the same number of contiguous bytes.
Copy: TypeAlias = "Callable[[Index, Bytes], Any]"
#: ``(start, address, nbytes)``: move the bytes ``[start, start + nbytes)`` of one array to or from ``address``.
Mover: TypeAlias = Callable[[int, int, int], None]

#: A new buffer of at least this size is aligned so that direct I/O can fill it without a copy.
CONGRUENT = 1 << 20
_PAGE = 4096
#: The kernel's page size: two tensors must not share a page, so that the memory of one can be released.
_GRANULE = max(mmap.PAGESIZE, _PAGE)
_HUGE_PAGE = 2 << 20
#: A new buffer of at least the first size is in huge pages, and in memory new to the process; a buffer of at least the
#: second size has a separate mapping.
LARGE, _ALONE = 4 << 20, 32 << 20
#: Address space that is mapped at a time for buffers of sizes between these two.
_REGION = 256 << 20
#: Only Linux can advise and release individual pages.
_LINUX = sys.platform == "linux"
_DONTNEED = mmap.MADV_DONTNEED if sys.platform == "linux" else 0
_DONTNEED_LOCKED = 24  # Linux 5.18; the mmap module does not name it
#: Columns that are copied together: their cache lines fit the smallest caches.
_STRIP = 256
_OVERLAP_WORK = 1_000_000

_split_elements = Lock()


class _At:
    """Memory that another object owns, for ``numpy.asarray``."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self, address: int, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None, owner: object = None
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            # numpy before 2 accepts no null pointer, the address of an empty torch tensor.
            "data": (address or (_PAGE if 0 in shape else 0), False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


def at(address: int, nbytes: int, owner: object = None) -> Bytes:
    """The ``nbytes`` of writable memory at ``address``: valid as long as ``owner``, which the array keeps alive."""
    return np.asarray(_At(address, (nbytes,), "|u1", None, owner))


def laid_out(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> np.ndarray[Any, Any]:
    """An array at the positions of elements in memory, perhaps of a device: it must not be used to read."""
    return np.asarray(_At(address, shape, f"|V{size}", strides))


def span(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The first byte of a non-empty array, and one past the last."""
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    first = address_of(array)
    return first + sum(step for step in reach if step < 0), first + sum(
        step for step in reach if step > 0
    ) + array.itemsize


def is_nested(array: np.ndarray[Any, Any]) -> bool:
    """Whether each stride of an array exceeds the extent of all smaller ones: then no two elements overlap."""
    reach = array.itemsize if array.size else 0  # numpy gives an empty array strides of zero
    for step, length in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if length > 1:
            if step < reach:
                return False
            reach += step * (length - 1)
    return True


def overlap(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays share a byte; if that takes too long to compute, whether their spans overlap."""
    try:
        return np.shares_memory(left, right, _OVERLAP_WORK)  # type: ignore[arg-type] # numpy's stub knows two limits
    except RuntimeError:  # numpy's TooHardError, which moved between its versions
        return True


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def buffer(nbytes: int, offset: int, itemsize: int) -> Bytes:
    """New memory for ``nbytes > 0`` at ``offset`` of a file: if large, it has the file's residue modulo a page.

    Elements of ``itemsize`` bytes are aligned in it, even if they are not in the file.
    """
    if nbytes < CONGRUENT or offset % itemsize:
        return np.empty(nbytes, np.uint8)
    residue = offset % _PAGE
    if _LINUX and nbytes >= LARGE:
        # If no region can be mapped, malloc may have memory for the tensor.
        with contextlib.suppress(OSError):
            return _carve(nbytes, residue)
    memory: Bytes = np.empty(nbytes + _PAGE, np.uint8)
    skip = (residue - address_of(memory)) % _PAGE
    return memory[skip : skip + nbytes]


class _Pages:
    """Pages of a region.

    Dropping this returns their memory to the system; the address range is released with the last tensor in the region.
    """

    __slots__ = ("mapping", "nbytes", "start")

    def __init__(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        self.mapping = mapping
        self.start = start
        self.nbytes = nbytes

    # Module globals may be gone when the interpreter ends, so needed values are bound here.
    def __del__(self, *, advices: tuple[int, ...] = (_DONTNEED, _DONTNEED_LOCKED), refused: int = errno.EINVAL) -> None:
        for advice in advices:
            try:
                self.mapping.madvise(advice, self.start, self.nbytes)
            except OSError as error:  # noqa: PERF203 - the loop usually has one turn
                # Only locked pages are refused: the second advice works on them, except in an old kernel.
                if error.errno != refused:
                    raise
            else:
                return


#: The region that the last buffer was carved from, its address, and its used size. ``_carve`` pops it and puts it
#: back, so no lock is needed: signal handlers may load, too, and a forked child never waits.
_regions: deque[tuple[mmap.mmap, int, int]] = deque(maxlen=1)


def _carve(nbytes: int, residue: int) -> Bytes:
    """Memory in huge pages, at ``residue`` modulo 4096, that shares no page of the kernel with a neighbour.

    A process may have 65,530 mappings, and neighbours in huge and in small pages count as two. So smaller tensors share
    regions of huge pages: none has an end that would need a huge page for a few bytes.
    """
    size = -(-(residue + nbytes) // _GRANULE) * _GRANULE
    if size >= _ALONE:
        mapping, address, start = _map(size)
    else:
        try:
            mapping, address, start = _regions.pop()
        except IndexError:
            mapping, address, start = _map(_REGION)
        if start + size > len(mapping):
            mapping, address, start = _map(_REGION)
        _regions.append((mapping, address, start + size))
    return at(address + start + residue, nbytes, _Pages(mapping, start, size))


def _map(nbytes: int) -> tuple[mmap.mmap, int, int]:
    """A new mapping in huge pages, its address, and the start of its last ``nbytes``, at a huge page.

    Raises:
        OSError: there is no room, or the mapping would be locked, and so resident at once.
    """
    if _locked():
        raise OSError(errno.EAGAIN, "new mappings are locked in memory")
    mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -address_of(np.frombuffer(mapping, np.uint8)) % _HUGE_PAGE
    # The mapping's end is not in a huge page, unless the next mapping is adjacent. Shrinking does not move a mapping.
    mapping.resize(start + nbytes)
    with contextlib.suppress(OSError):  # advice only: a kernel may be without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, address_of(np.frombuffer(mapping, np.uint8)), start


def _locked() -> bool:
    """Whether new mappings are locked in memory (``mlockall``): the kernel does not release such pages."""
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        try:
            page.madvise(mmap.MADV_DONTNEED)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return True
    return False


def copy_out(shape: Sequence[int], itemsize: int, copy: Copy, start: int, address: int, nbytes: int) -> None:
    """Copy the logical bytes ``[start, start + nbytes)`` of an array to ``address``.

    ``copy`` fills contiguous, aligned bytes from the sub-array under an index.
    """
    first, last, whole = elements(start, nbytes, itemsize)
    target = at(address, nbytes)
    # If a block boundary cuts an element, whole elements go through a temporary buffer.
    detour = not whole or bool(address % itemsize)
    filled = np.empty((last - first) * itemsize, np.uint8) if detour else target
    _copy_each(shape, itemsize, copy, first, last, filled)
    if detour:
        skip = start - first * itemsize
        target[:] = filled[skip : skip + nbytes]


def copy_in(shape: Sequence[int], itemsize: int, copy: Copy, back: Copy, start: int, address: int, nbytes: int) -> None:
    """The reverse of :func:`copy_out`: ``copy`` writes bytes into the sub-array under an index, ``back`` reads it."""
    first, last, whole = elements(start, nbytes, itemsize)
    source = at(address, nbytes)
    if whole:
        # The caller's bytes must not be changed, and may be unaligned.
        _copy_each(shape, itemsize, copy, first, last, source.copy() if address % itemsize else source)
        return
    skip = start - first * itemsize
    whole_elements = np.empty((last - first) * itemsize, np.uint8)
    # Two blocks, in two threads, may hold the two halves of one element.
    with _split_elements:
        _copy_each(shape, itemsize, back, first, last, whole_elements)
        whole_elements[skip : skip + nbytes] = source
        _copy_each(shape, itemsize, copy, first, last, whole_elements)


def mover_in(layout: np.ndarray[Any, Any]) -> Mover:
    """Copies ranges to the positions of their elements in host memory (:func:`laid_out`)."""

    def copy(index: Index, contiguous: Bytes) -> None:
        part = layout[(*index, ...)]
        np.copyto(part, contiguous.view(layout.dtype).reshape(part.shape))

    def back(index: Index, contiguous: Bytes) -> None:
        part = layout[(*index, ...)]
        np.copyto(contiguous.view(layout.dtype).reshape(part.shape), part)

    return partial(copy_in, layout.shape, layout.itemsize, copy, back)


def copy_strided(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy a strided array into a contiguous one, in the calling thread and without the GIL.

    A matrix stored by columns is copied in strips: their cache lines stay until each row has its element.
    """
    if source.ndim == 2 and abs(source.strides[0]) < abs(source.strides[1]):  # noqa: PLR2004
        for start in range(0, source.shape[1], _STRIP):
            np.copyto(target[:, start : start + _STRIP], source[:, start : start + _STRIP])
    else:
        np.copyto(target, source)


def _copy_each(shape: Sequence[int], itemsize: int, copy: Copy, first: int, last: int, contiguous: Bytes) -> None:
    done = 0
    for index, count in pieces(shape, first, last):
        copy(index, contiguous[done : done + count * itemsize])
        done += count * itemsize
