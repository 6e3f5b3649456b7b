"""The description of one value of a state: a token, a tensor to store, or parts (docs/format.md, section 4)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .memory import Mover

_LEAST = -(2**63)

Logical: TypeAlias = "tuple[str, Sequence[int]] | None"


class Unsupported(Exception):  # noqa: N818 - it never leaves the package: the walker adds the place
    """A value that cannot be saved, and why."""


class Part:
    """A step that is not a subscript: a part of a tensor (``.indices``) or of an object (``.tzinfo``)."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Through:
    """A step that leaves no trace: from a registered object to its encoding, from an expanded tensor to its base."""

    __slots__ = ()


THROUGH: Final = Through()


class OwnPart(NamedTuple):
    """The part of a tensor that a rank holds, if it is spread over several.

    Attributes:
        spread: the number of its spread, 1 or more.
        memory: the local tensor.
        nbytes: the size of the local tensor.
        whole: the DTensor of the local tensor, if any: torch counts changes on either of the two.
    """

    spread: int
    memory: Any
    nbytes: int
    whole: Any = None


class Stored(NamedTuple):
    """One tensor to store.

    The token is ``head``, its number, ``tail``. Two tensors with an equal ``tie`` are one. ``address`` is 0 if
    ``mover`` copies the bytes. If the tensor is spread over ranks, address and mover are those of ``local``.
    """

    tie: Any
    dtype: str
    shape: Sequence[int]
    address: int
    logical: Logical
    head: str
    tail: str
    mover: Mover | None
    local: OwnPart | None = None


class Tensor(NamedTuple):
    """A tensor in the core's form: ``address`` has ``capacity`` contiguous bytes, or is 0 if a mover copies them.

    ``dtype`` and ``shape`` are the stored ones; ``logical`` are those that the user sees, if they differ.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    address: int
    capacity: int
    logical: Logical = None


class Parts(NamedTuple):
    """A composed value: its token, then its children with their keys; ``keyed`` if the keys are tokens, too."""

    token: str
    children: Iterable[tuple[Any, Any]]
    keyed: bool = False


#: Makes a token, a tensor to store, or parts of a value: by exact type.
Describe: TypeAlias = "Callable[[Any], str | Stored | Parts]"


class Expansion(NamedTuple):
    """An array with strides of 0: the index that selects its base, and the token that precedes the base."""

    base: tuple[slice, ...]
    token: str


def expansion(sizes: Sequence[int], strides: Sequence[int], flags: str) -> Expansion | None:
    """How an array of these sizes and strides expands a base; None if every stride leads to another element."""
    repeats = [size > 1 and not step for size, step in zip(sizes, strides, strict=True)]
    if not any(repeats):
        return None
    base = tuple(slice(0, 1 if repeated else None) for repeated in repeats)
    return Expansion(base, f'["expanded",[{",".join(map(str, sizes))}],"{flags}"]')


def steps(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides, with 0 for sizes of 1, where the base of an expanded array may differ from an equal array."""
    if 1 not in sizes:
        return tuple(strides)
    return tuple(step if size > 1 else 0 for size, step in zip(sizes, strides, strict=True))


def expanded_sizes(value: Any, base: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """``value`` as the sizes to which an array of the sizes ``base`` can be expanded; ValueError if it cannot."""
    sizes = integers(value, len(base))
    if any(size < 1 or size != own != 1 for size, own in zip(sizes, base, strict=True)):
        raise ValueError(f"sizes {list(base)} cannot be expanded to {sizes}")
    if math.prod(sizes) * itemsize >= -_LEAST:
        raise ValueError("expanded sizes beyond 63 bits")
    return tuple(sizes)


def integers(value: Any, size: int | None = None) -> list[int]:
    """``value`` as a list of integers (no booleans), of ``size`` members if given."""
    if type(value) is not list or any(type(item) is not int or not _LEAST <= item < -_LEAST for item in value):
        raise ValueError("not a list of integers of 64 bits")
    if size is not None and len(value) != size:
        raise ValueError(f"{len(value)} integers instead of {size}")
    return value


def members(value: Any, *names: str) -> list[Any]:
    """The members of ``value``, which must be a dict with exactly these names, in this order."""
    if type(value) is not dict or len(value) != len(names) or any(type(name) is not str for name in value):
        raise ValueError(f"not a dict of {', '.join(names)}")
    return [value[name] for name in names]


def exact(value: Any, kind: Any, size: int | None = None) -> Any:
    """``value``, which must be of exactly this built-in type, and of that size if given."""
    if type(value) is not kind or (size is not None and len(value) != size):
        raise ValueError(f"not a {kind.__name__}" + ("" if size is None else f" of {size}"))
    return value


def text(value: Any) -> str:
    """``value``, which must be a string."""
    if type(value) is not str:
        raise ValueError("not a string")
    return value
