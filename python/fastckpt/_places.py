"""Where in a state something lies: as Python would index it for people, joined with dots for tensor names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Longer places are cut in the middle when they are shown.
_SHOWN = 400


class Part:
    """A step that is no subscript: a part of a tensor (``.indices``) or of an object (``.tzinfo``)."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class KeyText:
    """A dictionary key that is neither a string nor a number: how it looks in the file, and its name."""

    __slots__ = ("name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text


class _Through:
    """A step that leaves no trace: from a registered object to what encodes it."""

    __slots__ = ()


THROUGH: Final = _Through()


def place_of(keys: Iterable[Any]) -> str:
    """The whole place, such as ``['model'].indices``; empty for the root."""
    out = []
    for key in keys:
        kind = type(key)
        if kind is Part:
            out.append(f".{key.name}")
        elif kind is KeyText:
            out.append(f"[{key.text}]")
        elif kind is not _Through:
            out.append(f"[{key!r}]")
    return "".join(out)


def show(place: str) -> str:
    """``place`` for a message: the root by its name, the middle of a very long one left out."""
    if not place:
        return "the state itself"
    if len(place) > _SHOWN:
        half = _SHOWN // 2
        return f"{place[:half]} ... {place[-half:]}"
    return place


def part_of(key: Any) -> str | None:
    """What ``key`` adds to a tensor's name, or None for nothing."""
    kind = type(key)
    if kind is str:
        return key  # type: ignore[no-any-return]
    if kind is _Through:
        return None
    if kind is Part or kind is KeyText:
        return key.name  # type: ignore[no-any-return]
    return str(key)
