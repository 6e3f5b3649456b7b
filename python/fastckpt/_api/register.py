"""Registering types: what the state may hold beyond what is built in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._state import registry
from fastckpt._state.flatten import BUILT_IN
from fastckpt._state.values import path_encoder

if TYPE_CHECKING:
    from collections.abc import Callable


def _supported(cls: type) -> bool:
    """Whether values of ``cls`` are stored without any registration."""
    if cls in BUILT_IN or path_encoder(cls) is not None:
        return True
    # By name, so that torch need not be imported to ask.
    return (cls.__module__, cls.__qualname__) in {
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "Size"),
        ("torch", "dtype"),
        ("torch", "device"),
    }


def register_type(
    cls: type,
    encode: Callable[[Any], Any] | None,
    decode: Callable[[Any], Any] | None,
    name: str | None = None,
) -> None:
    """Make instances of a class saveable and loadable.

    The class is matched exactly: a subclass needs its own registration. A program that loads a checkpoint must register
    the same names before; the checkpoint itself never causes an import or a call of anything else.

    Args:
        cls: the class: a dataclass, a named tuple, an enum, anything.
        encode: makes of an instance any value that can be saved; it may hold tensors. None, together with ``decode``,
            only for a tensor subclass that has ``__tensor_flatten__`` and ``__tensor_unflatten__``: these are used.
        decode: makes of such a value an instance.
        name: the name in the file; by default the module's and the class's, joined with a dot.

    Raises:
        TypeError: ``cls`` is not a class, or ``encode`` or ``decode`` cannot be called.
        ValueError: the type is supported without registration, or another class has that name.

    Example:
        >>> import dataclasses, fastckpt
        >>> @dataclasses.dataclass
        ... class Position:
        ...     epoch: int
        ...     batch: int
        >>> fastckpt.register_type(Position, dataclasses.asdict, lambda value: Position(**value), "position")
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type: {cls!r} is not a class")
    if _supported(cls):
        raise ValueError(f"register_type: {cls.__qualname__} can be saved without registration")
    if name is None:
        name = f"{cls.__module__}.{cls.__qualname__}"
    elif not isinstance(name, str):
        raise TypeError(f"register_type: the name of {cls.__qualname__} must be a string, not {name!r}")
    if encode is None and decode is None:
        if not (hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")):
            raise TypeError(
                f"register_type: {cls.__qualname__} has no __tensor_flatten__ and __tensor_unflatten__: "
                "give encode and decode"
            )
        encode, decode = _flatten_wrapper, _wrapper_decoder(cls)
    if not callable(encode) or not callable(decode):
        raise TypeError(f"register_type: encode and decode of {cls.__qualname__} must both be callable")
    if name in registry.RESERVED:
        raise ValueError(f"register_type: the name {name!r} is fastckpt's own: give another name")
    known = registry.by_name(name)
    # A class defined again, as notebooks do, takes the place of its former self.
    if (
        known is not None
        and known.cls is not cls
        and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__)
    ):
        raise ValueError(
            f"register_type: the name {name!r} belongs to {known.cls.__module__}.{known.cls.__qualname__}: "
            "give another name"
        )
    registry.add(registry.Registered(cls, name, encode, decode))


def _flatten_wrapper(value: Any) -> tuple[Any, ...]:
    """The parts of a wrapper subclass by its own protocol, and what the protocol leaves out."""
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    # torch itself recognises a Parameter by this.
    flags = ("p" if getattr(value, "_is_param", False) else "") + ("g" if value.requires_grad else "")
    outer = (inner, context, value.size(), tuple(value.stride()))
    return (*outer, flags) if flags else outer


def _wrapper_decoder(cls: Any) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        inner, context, size, stride, *flags = value
        tensor = cls.__tensor_unflatten__(inner, context, size, stride)
        if flags:
            from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - it is there: the class is one of its tensors

            tensor = _torch.with_flags(tensor, flags[0])
        return tensor

    return decode
