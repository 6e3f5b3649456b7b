"""Moves loaded values into existing containers, which stay the objects that the program holds."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from .structural import is_record, own_dict, slots_of

if TYPE_CHECKING:
    from collections.abc import Generator

    #: Yields the existing value, the new value, and whether the new one is complete; receives what replaces the
    #: existing value, and returns what replaces its own.
    Steps: TypeAlias = Generator[tuple[Any, Any, bool], Any, Any]

#: Placeholder in lists and tuples for items that were not loaded.
HOLE: Any = type("Hole", (), {})()
_NOTHING: Any = type("Nothing", (), {})()


def update(given: Any, built: Any, *, exact: bool) -> Any:
    """Move newly built values into existing containers.

    Dicts, lists and their subclasses, dataclasses that are not frozen and namespaces are updated if both are of one
    class; a container at several places gets the new values of each place. A tuple is rebuilt if an item is another
    object. Everything else is replaced by the new value.

    Args:
        given: the existing value.
        built: the new value, which must not be used afterwards.
        exact: whether a list becomes as long as the new one, if that has no holes.

    Returns:
        The replacement for ``given``: ``given`` itself if it was updated.
    """
    walk = _Update(exact=exact)
    # An explicit stack: states may be nested deeper than Python can recurse.
    stack = [walk.steps(given, built, whole=False)]
    sent = None
    while stack:
        try:
            exists, new, whole = stack[-1].send(sent)
        except StopIteration as done:  # noqa: PERF203 - this is how a generator returns
            stack.pop()
            sent = done.value
        else:
            stack.append(walk.steps(exists, new, whole=whole))
            sent = None
    return sent


class _Update:
    def __init__(self, *, exact: bool) -> None:
        self.exact = exact

    def steps(self, given: Any, built: Any, *, whole: bool) -> Steps:
        """Update one value; ``whole`` if it is part of an instance, which keeps no other items."""
        kind = type(built)
        if built is given:
            return given
        if type(given) is not kind:
            given = _NOTHING
        if issubclass(kind, dict):
            return (yield from self.mapping(given, built, whole or kind not in _PLAIN))
        if issubclass(kind, list):
            return (yield from self.sequence(given, built, whole or kind is not list))
        if kind is tuple or (issubclass(kind, tuple) and type(getattr(kind, "_fields", None)) is tuple):
            return (yield from self.immutable(given, built, whole or kind is not tuple))
        if given is not _NOTHING and is_record(kind):
            yield from _attributes(given, built)
            return given
        return built

    def mapping(self, given: Any, built: Any, whole: bool) -> Steps:  # noqa: FBT001 - its callers are above
        """Update a mapping; keys that only ``given`` has stay, unless ``whole``."""
        kind = type(built)  # `isinstance` would call code of the value
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        target, own = (built, {}) if given is _NOTHING else (given, dict(base.items(given)))
        parts = {}
        for key, value in list(base.items(built)):
            parts[key] = value if type(value) in _LEAVES else (yield own.get(key, _NOTHING), value, whole)
        for key, value in parts.items():
            base.__setitem__(target, key, value)
        if target is given:
            for key in own if whole else ():
                if key not in parts:
                    base.__delitem__(given, key)
            _arrange(base, given, parts)
            if issubclass(kind, defaultdict):
                given.default_factory = built.default_factory
            if kind is OrderedDict:
                vars(given).update(vars(built))
            elif kind not in _PLAIN:
                yield from _attributes(given, built)
        return target

    def sequence(self, given: Any, built: Any, whole: bool) -> Steps:  # noqa: FBT001 - its callers are above
        """Update a sequence; items keep their positions."""
        target, own = (built, []) if given is _NOTHING else (given, list(list.__iter__(given)))
        target_items = yield from self.items(own, list(list.__iter__(built)), whole)
        list.__setitem__(target, slice(None), target_items)
        if target is given and type(built) is not list:
            yield from _attributes(given, built)
        return target

    def immutable(self, given: Any, built: Any, whole: bool) -> Steps:  # noqa: FBT001 - its callers are above
        """The same tuple if each of its items is the same object, else a new one."""
        own = [] if given is _NOTHING else list(tuple.__iter__(given))
        items = yield from self.items(own, list(tuple.__iter__(built)), whole)
        for same in (given, built):
            if (
                same is not _NOTHING
                and tuple.__len__(same) == len(items)
                and all(map(_is, tuple.__iter__(same), items))
            ):
                return same
        made = tuple.__new__(type(built), items)
        if type(built) is not tuple:
            yield from _attributes(made, built)
        return made

    def items(self, own: list[Any], built: list[Any], whole: bool) -> Steps:  # noqa: FBT001 - its callers are above
        """The new items of a list or tuple."""
        made: list[Any] = []
        holes = False
        # Most long lists hold only plain values: their items need not be examined one by one.
        plain = _LEAVES.issuperset(map(type, built))
        for number, value in () if plain else enumerate(built):
            if type(value) in _LEAVES:
                made.append(value)
                continue
            exists = own[number] if number < len(own) else _NOTHING
            if value is not HOLE:
                made.append((yield exists, value, whole))
                continue
            holes = True
            if exists is not _NOTHING:
                made.append(exists)
        rest = own[len(built) :] if holes or not (whole or self.exact) else []
        return (built if plain else made) + rest


#: The types of most values. The new value replaces a value of such a type.
_LEAVES = frozenset((int, float, str, bool, type(None)))
_PLAIN = frozenset((dict, OrderedDict, defaultdict))


def _arrange(base: Any, mapping: Any, like: dict[Any, Any]) -> None:
    """Put the keys into the order of another mapping with the same keys."""
    if len(mapping) == len(like) and any(map(_is_not, base.__iter__(mapping), like)):
        for key in like:
            if base is OrderedDict:
                base.move_to_end(mapping, key)
            else:
                dict.__setitem__(mapping, key, dict.pop(mapping, key))


def _is_not(one: Any, other: Any) -> bool:
    return one is not other


def _is(one: Any, other: Any) -> bool:
    return one is other


def _attributes(given: Any, built: Any) -> Steps:
    """Give ``given`` the attributes of ``built``, and no others."""
    for slot in slots_of(type(built)):
        there, new = (_slot_of(one, slot) for one in (given, built))
        if new is not _NOTHING:
            slot.__set__(given, (yield there, new, True))
        elif there is not _NOTHING:
            slot.__delete__(given)
    there, new = own_dict(given), own_dict(built)
    # A dict may be its own attribute dictionary.
    if there is None or new is None or there is given:
        return
    made = {}
    for name, value in list(new.items()):
        made[name] = yield there.get(name, _NOTHING), value, True
    there.clear()
    there.update(made)


def _slot_of(value: Any, slot: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not set
        return _NOTHING
