"""Registries of types beyond the plain ones, and the lookup that an operation makes in all of them.

Types are found by class for saving, and by name for loading. A file can name types, but never causes an import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from . import built_in
from .structural import Codec, Encoded, Undecodable, codec_of, name_of
from .values import PLAIN, path_encoder

#: Types of torch by module and name: the check does not import torch.
_TORCH = frozenset(
    {
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "Size"),
        ("torch", "dtype"),
        ("torch", "device"),
    }
)


class Registry:
    """The types for one call, which precede those of :func:`fastckpt.register_type`, and the treatment of others.

    A registry keeps the types that a library declares for its own checkpoints from affecting the rest of the process.

    Args:
        classes: classes that need no encode and decode, see :meth:`register`.
        encode: called in a save with a value that cannot be saved; returns a value that can, which is stored instead,
            or raises TypeError. (For a generator, for example: ``lambda value: list(value)``.)
        undeclared: how to load values of types that this program does not know: ``error``, or ``plain`` for their
            stored form (a dataclass is the dict of its fields, an enum its name, a subclass of a built-in type that
            type, without attributes; a tuple where the value must be hashable; None for a time zone), with a warning.

    Raises:
        TypeError: ``encode`` is not a function, or a class needs encode and decode.
        ValueError: ``undeclared`` is neither ``error`` nor ``plain``, or a class is supported without registration.

    Example:
        >>> import fastckpt, typing
        >>> class Position(typing.NamedTuple):
        ...     epoch: int
        ...     batch: int
        >>> _ = fastckpt.save({"at": Position(3, 7)}, "step-7")
        >>> fastckpt.load("step-7", registry=fastckpt.Registry(Position))
        {'at': Position(epoch=3, batch=7)}
    """

    def __init__(
        self,
        *classes: type,
        encode: Callable[[Any], Any] | None = None,
        undeclared: Literal["error", "plain"] = "error",
    ) -> None:
        if encode is not None and not callable(encode):
            raise TypeError(f"Registry: encode must be a function, not {encode!r}")
        if undeclared not in ("error", "plain"):
            raise ValueError(f"Registry: undeclared must be one of error, plain, not {undeclared!r}")
        self._encode = encode
        self._plain = undeclared == "plain"
        self._by_class: dict[type, Codec] = {}
        self._by_name: dict[str, Codec] = {}
        for cls in classes:
            self.register(cls)

    def register(
        self,
        cls: type,
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Declare a class, as :func:`fastckpt.register_type` does for the whole process.

        Args:
            cls: the class, matched exactly.
            encode: converts an instance to any value that can be saved; it may hold tensors. None, together with
                ``decode``, for a class that can be stored by its structure: a named tuple, a dataclass, an enum, a
                subclass of a built-in container, of ``str``, ``int``, ``float``, ``bytes`` or of a namespace, a tensor
                subclass that has ``__tensor_flatten__`` and ``__tensor_unflatten__``.
            decode: turns the result of ``encode`` back into an instance.
            name: the name in the file; by default the module's and the class's, joined with a dot.

        ``DictConfig`` and ``ListConfig`` of omegaconf are loaded as plain containers unless they are declared.

        Raises:
            TypeError: ``cls`` is not a class, it needs ``encode`` and ``decode``, or one of these is not callable.
            ValueError: the type is supported without registration, or another class has that name.
        """
        if not isinstance(cls, type):
            raise TypeError(f"register: {cls!r} is not a class")
        if _supported(cls):
            raise ValueError(f"register: {cls.__qualname__} can be saved without registration")
        on_demand = _on_demand(cls) if encode is None and decode is None and name is None else None
        if on_demand is not None:
            self._by_class[cls] = self._by_name[on_demand.name] = on_demand
            return
        name = _checked_name(cls, name)
        codec = codec_of(cls, name) if encode is None and decode is None else _given(cls, name, encode, decode)
        if codec is None:
            raise TypeError(
                f"register: {cls.__qualname__} is not a named tuple, dataclass, enum or subclass of a built-in type, "
                "and has no __tensor_flatten__ and __tensor_unflatten__: give encode and decode"
            )
        known = self._by_name.get(name)
        # A class that is defined again, as in notebooks, replaces its earlier definition.
        if known is not None and known.cls is not cls and name_of(known.cls) != name_of(cls):
            raise ValueError(f"register: the name {name!r} belongs to {name_of(known.cls)}: give another name")
        for former in (known, self._by_class.get(cls)):
            if former is not None:
                self._by_class.pop(former.cls, None)
                self._by_name.pop(former.name, None)
        self._by_class[cls] = self._by_name[name] = codec


def _supported(cls: type) -> bool:
    """Whether values of ``cls`` are part of the structure, and never registered."""
    return cls in PLAIN or path_encoder(cls) is not None or (cls.__module__, cls.__qualname__) in _TORCH


def _on_demand(cls: type) -> Codec | None:
    found = built_in.by_class(cls)
    return found if found is not None and found.name in built_in.ON_DEMAND else None


def _checked_name(cls: type, given: Any) -> str:
    """The name of a class in files: the given one, or its own."""
    if given is not None and not isinstance(given, str):
        raise TypeError(f"register: the name of {cls.__qualname__} must be a string, not {given!r}")
    name: str = name_of(cls) if given is None else given
    if name in built_in.RESERVED or (given is None and built_in.by_class(cls) is not None):
        raise ValueError(
            f"register: the name {name!r} is fastckpt's own, and {cls.__qualname__} can be saved without "
            "registration: to store it in another way, give another name"
        )
    return name


def _given(cls: type, name: str, encode: Any, decode: Any) -> Codec:
    """The codec of two functions of the user."""
    if not callable(encode) or not callable(decode):
        raise TypeError(f"register: encode and decode of {cls.__qualname__} must both be callable")

    def to(value: Any) -> Encoded:
        return encode(value), None

    def back(value: Any, attributes: Any) -> Any:
        if attributes is not None:
            raise Undecodable(
                f"it has attributes, which the decode registered for {name!r} does not accept: register the class "
                "without encode and decode"
            )
        try:
            return decode(value)
        except Exception as error:
            raise Undecodable(f"the decode registered for {name!r} raised {error!r}") from error

    return Codec(cls, name, to, back)


def _as_it_is(value: Any) -> Encoded:
    return value, None


#: The registry of :func:`fastckpt.register_type`.
PROCESS = Registry()


def check_registry(operation: str, registry: Any) -> Registry | None:
    """``registry=``."""
    if registry is not None and not isinstance(registry, Registry):
        raise TypeError(f"{operation}: registry must be a fastckpt.Registry, not {registry!r}")
    return registry


class Types:
    """The types known to one operation: from its registry, the process, fastckpt, and those declared to torch.

    Args:
        operation: for the error: ``save``.
        registry: the types of the call, or None.
        framework: ``numpy`` to return torch's types in their stored form.
        plain: whether to return values of unknown types in their stored form, whatever the registry's setting.
        on_demand: whether the types of :data:`.built_in.ON_DEMAND` may be made if they are declared.

    Raises:
        TypeError: ``registry`` has the wrong type.
    """

    def __init__(
        self,
        operation: str,
        registry: Any = None,
        *,
        framework: str = "auto",
        plain: bool = False,
        on_demand: bool = True,
    ) -> None:
        own = check_registry(operation, registry)
        self._registries = (PROCESS,) if own is None else (own, PROCESS)
        self._numpy = framework == "numpy"
        self.encode = None if own is None else own._encode  # noqa: SLF001 - its own module
        self.plain = plain or (own is not None and own._plain)  # noqa: SLF001
        self._on_demand = on_demand
        self._names: dict[str, Codec | None] = {}

    def by_class(self, cls: type) -> Codec | None:
        """The codec of exactly this class, if it is registered or built in."""
        for registry in self._registries:
            found = registry._by_class.get(cls)  # noqa: SLF001 - its own module
            if found is not None:
                return found
        return built_in.by_class(cls)

    def by_name(self, name: str) -> Codec | None:
        """The codec under this name, if this program knows it."""
        if name not in self._names:
            self._names[name] = self._look_up(name)
        return self._names[name]

    def remark(self, codec: Codec) -> str | None:
        """A warning to a user who saves a value of this type that a load may refuse it, or None."""
        cls, name = codec.cls, codec.name
        call = f"fastckpt.register_type({cls.__qualname__.rpartition('<locals>.')[2]}"
        if cls.__module__ == "__main__" and name == name_of(cls):
            return (
                f"the checkpoint holds values of {name}, a class of the main program, which other programs cannot find "
                f'by that name: give it a name, as in {call}, name="...")'
            )
        found = self.by_name(name)
        if name in built_in.ON_DEMAND:
            if found is not None and found.cls is object:
                return f"values of {name} come back as dicts and lists in a program that has not called {call})"
        elif found is None:
            return (
                f"the checkpoint holds values of {name}, which this program does not declare: call {call}) in each "
                "program that loads them, or load their plain contents with "
                'registry=fastckpt.Registry(undeclared="plain")'
            )
        return None

    def _look_up(self, name: str) -> Codec | None:
        if name in built_in.ON_DEMAND and not self._on_demand:
            return built_in.by_name(name)
        for registry in self._registries:
            found = registry._by_name.get(name)  # noqa: SLF001 - its own module
            if found is not None:
                return found
        if name in built_in.RESERVED:
            if self._numpy and name.startswith("torch."):
                return Codec(object, name, _as_it_is, lambda value, _: value)
            return (name in built_in.ON_DEMAND and _safe(name)) or built_in.by_name(name)
        return _safe(name)


def _safe(name: str) -> Codec | None:
    """The codec of a class that the program allows ``torch.load(weights_only=True)`` to build, and so fastckpt."""
    if "torch" not in sys.modules:
        return None
    from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch

    for cls in _torch.safe_types():
        ours = _on_demand(cls) if name in built_in.ON_DEMAND else None
        if (name_of(cls) if ours is None else ours.name) == name:
            return ours or codec_of(cls)
    return None
