"""A tensor of one rank that is a part of a larger one, without a DTensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .spread import Box


_LARGEST = 2**63


class Part:
    """A tensor that is a part of a larger one; other ranks have the rest.

    It describes which elements of which tensor a plain tensor has, as a DTensor does for itself. In the state of
    :func:`fastckpt.distributed.save`, it takes the place of the whole tensor, which the checkpoint holds. In ``into=``
    of :func:`fastckpt.distributed.load`, its tensor is filled with these elements, however the tensor was sharded when
    it was saved.

    All ranks together must have every element. Elements that several ranks have must be equal (see
    :class:`fastckpt.distributed.Ranks`). A rank without elements may leave it out, or give an empty tensor, which saves
    the ranks a comparison of names.

    Args:
        tensor: the elements that this rank has: a dense ``torch.Tensor`` on any device, not a DTensor. Its dtype, and
            whether it is a ``Parameter``, must be the same on all ranks, even if it is empty.
        of: the shape of the whole tensor.
        at: for each dimension the index in the whole tensor at which ``tensor`` begins.

    Attributes:
        tensor: the tensor that was passed.
        shape: the shape of the whole tensor.
        boxes: the elements of the whole tensor: for each box and dimension the first index, and one past the last.
            ``tensor`` has the boxes in this order, each in row-major order.

    Raises:
        TypeError: ``of`` or ``at`` holds something other than integers, or ``tensor`` is not a tensor.
        ValueError: the tensor is not inside the whole one.

    Example:
        >>> import fastckpt.distributed as together, torch
        >>> rows = together.Part(torch.ones(2, 3), of=(4, 3), at=(2, 0))  # of this rank; another has rows 0 and 1
        >>> rows.boxes
        (((2, 4), (0, 3)),)
    """

    __slots__ = ("boxes", "shape", "tensor")

    def __init__(self, tensor: Any, *, of: Iterable[int], at: Iterable[int]) -> None:
        self.tensor = tensor
        self.shape = _shape("Part", tensor, of)
        begins = _integers("Part", "at", at)
        local = tuple(tensor.shape)
        if not len(local) == len(begins) == len(self.shape):
            raise ValueError(
                f"Part: a tensor of {len(local)} dimensions, at= with {len(begins)} and of= with {len(self.shape)}: "
                "give one number for each dimension of the tensor"
            )
        if any(begin + size > whole for begin, size, whole in zip(begins, local, self.shape, strict=True)):
            raise ValueError(
                f"Part: a tensor of the shape {list(local)} at {list(begins)} does not lie in one of the shape "
                f"{list(self.shape)}"
            )
        box = tuple((begin, begin + size) for begin, size in zip(begins, local, strict=True))
        self.boxes: tuple[Box, ...] = (box,) if math.prod(local) else ()

    @classmethod
    def flat(cls, tensor: Any, *, of: Iterable[int], start: int) -> Part:
        """A range of the elements of a tensor, in row-major order, like the flattened parameters of ZeRO and FSDP1.

        Args:
            tensor: the elements, one-dimensional and contiguous.
            of: the shape of the whole tensor.
            start: the number of the first one among all elements of the whole tensor.

        Returns:
            The part.

        Raises:
            TypeError: ``of`` or ``start`` holds something other than integers, or ``tensor`` is not a tensor.
            ValueError: the tensor is not one-dimensional and contiguous, or not inside the whole one.

        Example:
            >>> import fastckpt.distributed as together, torch
            >>> together.Part.flat(torch.ones(5), of=(4, 3), start=2).boxes
            (((0, 1), (2, 3)), ((1, 2), (0, 3)), ((2, 3), (0, 1)))
        """
        shape = _shape("Part.flat", tensor, of)
        (first,) = _integers("Part.flat", "start", (start,))
        if len(tensor.shape) != 1 or not tensor.is_contiguous():
            raise ValueError(
                "Part.flat: the tensor must be one-dimensional and contiguous: give a view of the flat memory, or "
                "use Part(tensor, of=, at=)"
            )
        size = tensor.shape[0]
        if first + size > math.prod(shape):
            raise ValueError(
                f"Part.flat: {size} elements with start={first} do not lie in a tensor of the shape {list(shape)}, "
                f"which has {math.prod(shape)} elements"
            )
        self = cls.__new__(cls)
        self.tensor, self.shape, self.boxes = tensor, shape, tuple(_boxes(shape, first, first + size))
        return self

    def __repr__(self) -> str:
        boxes = ", ".join(f"[{', '.join(f'{begin}:{end}' for begin, end in box)}]" for box in self.boxes)
        return f"<Part {boxes or 'without elements'} of a tensor of the shape {list(self.shape)}>"


def _shape(what: str, tensor: Any, of: Iterable[int]) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    if not hasattr(tensor, "untyped_storage"):
        raise TypeError(f"{what}: the first argument must be a torch.Tensor, not {type(tensor).__name__}")
    shape = _integers(what, "of", of)
    if math.prod(shape) >= _LARGEST:
        raise ValueError(f"{what}: a tensor of the shape {list(shape)} is too large")
    return shape


def _integers(what: str, name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, values))
    except TypeError as error:
        raise TypeError(f"{what}: {name} must hold integers, not {values!r}") from error
    if any(value < 0 for value in found):
        raise ValueError(f"{what}: {name} must hold integers of at least 0, not {list(found)}")
    return found


def _boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``[start, stop)`` of a tensor, in row-major order, as boxes."""
    if start == stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _under(first, _boxes(shape[1:], start - first * row, stop - first * row))
    head = _under(first, _boxes(shape[1:], start % row, row)) if start % row else []
    tail = _under(last, _boxes(shape[1:], 0, stop - last * row)) if stop % row else []
    low, high = first + bool(head), last + (not tail)
    middle: list[Box] = [((low, high), *((0, size) for size in shape[1:]))] if low < high else []
    return head + middle + tail


def _under(index: int, boxes: Iterable[Box]) -> list[Box]:
    return [((index, index + 1), *box) for box in boxes]
