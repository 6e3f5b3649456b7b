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


def add(registered: Registered) -> None:
    """Add a registration; it takes the place of what had its class or its name."""
    for former in (_by_name.get(registered.name), _by_class.get(registered.cls)):
        if former is not None:
            _by_class.pop(former.cls, None)
            _by_name.pop(former.name, None)
    _by_class[registered.cls] = _by_name[registered.name] = registered
