"""Types that the user added: by class for saving, by name for loading. A file can name them, and never import them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Registered(NamedTuple):
    """A class with its name in files and its two conversions."""

    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}


def _supported(cls: type) -> bool:
    """Whether values of ``cls`` are stored without any registration."""
    from ._flatten import BUILT_IN  # noqa: PLC0415 - the walker imports this module
    from ._values import path_encoder  # noqa: PLC0415

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


def register_type(  # noqa: C901 - a list of checks
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
        TypeError: ``cls`` is no class, or ``encode`` or ``decode`` cannot be called.
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
        raise TypeError(f"register_type: {cls!r} is no class")
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
    if name in RESERVED:
        raise ValueError(f"register_type: the name {name!r} is fastckpt's own: give another name")
    known = _by_name.get(name)
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
    if known is not None:
        _by_class.pop(known.cls, None)
    former = _by_class.pop(cls, None)
    if former is not None:
        _by_name.pop(former.name, None)
    _by_class[cls] = _by_name[name] = Registered(cls, name, encode, decode)


def by_class(cls: type) -> Registered | None:
    """The registration of exactly ``cls``."""
    return _by_class.get(cls)


def by_name(name: str) -> Registered | None:
    """The registration under ``name``."""
    return _by_name.get(name)


#: Stands in a file for an OrderedDict with attributes of its own, such as the ``_metadata`` of a module's state.
ATTRIBUTED = "collections.OrderedDict"
#: Stands in a file for a Counter, as MultiStepLR's state has one.
COUNTER = "collections.Counter"
RESERVED = frozenset({ATTRIBUTED, COUNTER})


def _flatten_wrapper(value: Any) -> tuple[Any, ...]:
    """The parts of a wrapper subclass by its own protocol, and what the protocol leaves out."""
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    # Exactly what torch itself asks to tell a Parameter.
    flags = ("p" if getattr(value, "_is_param", False) else "") + ("g" if value.requires_grad else "")
    outer = (inner, context, value.size(), tuple(value.stride()))
    return (*outer, flags) if flags else outer


def _wrapper_decoder(cls: Any) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        inner, context, size, stride, *flags = value
        tensor = cls.__tensor_unflatten__(inner, context, size, stride)
        if flags:
            from . import _torch  # noqa: PLC0415 - torch is there: the class is one of its tensors

            tensor = _torch.with_flags(tensor, flags[0])
        return tensor

    return decode
