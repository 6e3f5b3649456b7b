"""Declaring types: values that the state may hold beyond the built-in ones."""

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
    """Declare a class, so that its instances can be saved and come back as instances of it.

    Named tuples, dataclasses, enums, subclasses of built-in types and tensor subclasses that wrap others are saved
    without registration. They come back as their class only if the loading program has declared it, under the same
    name: a checkpoint never triggers any other import or call. The class is matched exactly: declare a subclass
    separately.

    Without ``encode`` and ``decode``, an instance is stored and rebuilt from its fields: no ``__init__`` runs.
    Fields that the checkpoint lacks take their defaults; fields that the class lacks are an error.

    Args:
        cls: the class.
        encode: converts an instance to any value that can be saved; it may hold tensors. None, together with
            ``decode``, for a class of one of the kinds above.
        decode: turns the result of ``encode`` back into an instance.
        name: the name in the file; by default the module's and the class's, joined with a dot.

    Raises:
        TypeError: ``cls`` is not a class, it needs ``encode`` and ``decode``, or one of these is not callable.
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
