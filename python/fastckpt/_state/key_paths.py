"""Places in a state: as Python subscripts in messages, joined with dots in tensor names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fastckpt._tensors.described import THROUGH, Part, Through

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Longer places are cut in the middle when they are shown.
_SHOWN = 400
#: Integers of at least this many bits are shown in hexadecimal digits.
_DECIMAL = 14_000


class KeyText:
    """A dictionary key that is neither a string nor a number: its form in the file, and its name."""

    __slots__ = ("name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text


def step_of(key: Any) -> str:
    """The text of ``key`` at the end of a place."""
    kind = type(key)
    if kind is Part:
        return f".{key.name}"
    if kind is KeyText:
        return f"[{key.text}]"
    return "" if kind is Through else f"[{_digits(key) if kind is int else repr(key)}]"


class Place:
    """A place in a state, as a step from its parent, so that deep places take no more memory than shallow ones."""

    __slots__ = ("above", "key", "shown", "step")

    def __init__(self, above: Place | None, step: str, key: Any = THROUGH) -> None:
        self.above = above
        self.step = step
        self.key = key
        #: The text of the place in a message, once computed.
        self.shown: str | None = None if above is not None else step

    def __str__(self) -> str:
        """The place, for a message: the root by its name, the middle of a very long one left out."""
        missing: list[Place] = []
        at: Place = self
        while at.shown is None:
            missing.append(at)
            assert at.above is not None  # noqa: S101 - the root is shown
            at = at.above
        shown = at.shown
        for place in reversed(missing):
            # The middle is cut, and both ends stay.
            shown = place.shown = _cut(shown + place.step)
        return show(shown)

    @property
    def name(self) -> str:
        """The name of a tensor at this place, unless another tensor has that name."""
        keys = []
        at: Place | None = self
        while at is not None:
            keys.append(at.key)
            at = at.above
        return name_of(prefix_of(reversed(keys[1:])), keys[0])


_UNKNOWN = Place(None, "")


class Places:
    """The places of one state, or of several that are compared: an equal place is the same object."""

    def __init__(self) -> None:
        self.root = Place(None, "")
        self._known: dict[tuple[Place, str], Place] = {}

    def below(self, above: Place, key: Any) -> Place:
        """The place of ``key`` below ``above``."""
        step = step_of(key)
        if not step:
            return above
        known = self._known.get((above, step))
        if known is None:
            known = self._known[above, step] = Place(above, step, key)
        return known

    def at(self, stack: Sequence[Frame], depth: int | None = None) -> Place:
        """The place of the current keys in ``stack``, the root first. Each frame caches its place: the keys above stay.

        With ``depth``, only that many frames count.
        """
        last = len(stack) if depth is None else depth
        first = last - 1
        above = stack[first].place
        if above is not None:
            return self.below(above, stack[first].key)
        while first and stack[first].place is None:
            first -= 1
        place = stack[first].place or self.root
        for number in range(first, last):
            frame = stack[number]
            frame.place = place
            place = self.below(place, frame.key)
        return place

    def known(self, stack: Sequence[Frame]) -> Place | None:
        """Like :meth:`at`; None if that place was not requested. Use a stack for this or for :meth:`at`, not both."""
        first = len(stack) - 1
        while first and stack[first].place is None:
            first -= 1
        place = stack[first].place or self.root
        for frame in stack[first:]:
            frame.place = place
            step = step_of(frame.key)
            if step and place is not _UNKNOWN:
                place = self._known.get((place, step), _UNKNOWN)
        return None if place is _UNKNOWN else place


class Frame(Protocol):
    """A value whose parts are being walked: the current key, and its own place once it is known."""

    key: Any
    place: Place | None


def place_of(keys: Iterable[Any]) -> str:
    """The whole place, such as ``['model'].indices``; empty for the root."""
    return "".join(map(step_of, keys))


def show(place: str) -> str:
    """``place`` for a message: the root by its name, the middle of a very long one left out."""
    if not place:
        return "the state itself"
    return _cut(place)


def _cut(place: str) -> str:
    if len(place) <= _SHOWN:
        return place
    half = _SHOWN // 2
    return f"{place[:half]} ... {place[-half:]}"


def part_of(key: Any) -> str | None:
    """The part of a tensor's name for ``key``; None if the key adds nothing."""
    kind = type(key)
    if kind is str:
        part: str = key
    elif kind is Through:
        return None
    elif kind is Part or kind is KeyText:
        part = key.name
    else:
        part = _digits(key) if kind is int else str(key)
    return part if part.isascii() else part.encode("utf-8", "replace").decode()


def prefix_of(keys: Iterable[Any]) -> str:
    """The prefix of the names of all tensors below the key path ``keys``."""
    return "".join(f"{part}." for key in keys if (part := part_of(key)) is not None)


def name_of(prefix: str, key: Any) -> str:
    """The name of the tensor under ``key`` at the place with the prefix ``prefix`` (docs/format.md, section 5)."""
    part = part_of(key)
    if part is not None:
        return prefix + part
    return prefix[:-1] if prefix else "tensor"


#: Names that no tensor can have, in the form for :func:`unique`.
RESERVED = {"__metadata__": 1}


def unique(taken: dict[str, int], name: str) -> str:
    """``name``, with a number appended if it is in ``taken``, to which the result is added."""
    count = taken.get(name)
    if count is None:
        taken[name] = 1
        return name
    # The count keeps the time for many clashes linear. The resulting name may be that of another tensor.
    while f"{name}~{count}" in taken:
        count += 1
    taken[name] = count + 1
    taken[f"{name}~{count}"] = 1
    return f"{name}~{count}"


def _digits(value: int) -> str:
    """An integer's digits, in hexadecimal if Python refuses to convert that many decimal digits."""
    return str(value) if value.bit_length() < _DECIMAL else hex(value)
