"""Declaring types: what the state may hold beyond what is built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastckpt._state.registry import PROCESS, Registry


def register_type(
    cls: type,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> None:
    """Make instances of a class loadable as what they were, and saveable, where they are not by themselves.

    Named tuples, dataclasses, enums, subclasses of built-in types and tensor subclasses that wrap others are saved
    without registration. They come back as their class only where the program that loads them has declared it, under
    the same name: a checkpoint never causes an import or a call of anything else. The class is matched exactly: a
    subclass is declared by itself.

    A class without ``encode`` and ``decode`` is taken apart and put together by what it is: no ``__init__`` runs.
    Fields that the checkpoint lacks have their defaults; fields that the class lacks are an error.

    Args:
        cls: the class.
        encode: makes of an instance any value that can be saved; it may hold tensors. None, together with ``decode``,
            for a class of one of the kinds above.
        decode: makes of such a value an instance.
        name: the name in the file; by default the module's and the class's, joined with a dot.

    Raises:
        TypeError: ``cls`` is not a class, or is of none of these kinds and ``encode`` or ``decode`` cannot be called.
        ValueError: the type is supported without registration, or another class has that name.

    Example:
        >>> import dataclasses, fastckpt
        >>> @dataclasses.dataclass
        ... class Position:
        ...     epoch: int
        ...     batch: int
        >>> fastckpt.register_type(Position, name="position")
    """
    PROCESS.register(cls, encode, decode, name)


__all__ = ["Registry", "register_type"]
