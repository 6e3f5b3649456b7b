"""From a state to structure tokens and the tensors to store (docs/format.md, sections 4 and 5).

One loop with a stack of its own: the state may be nested deeper than Python can recurse.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from json.encoder import encode_basestring_ascii as quote
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt import _core
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors.described import THROUGH, Describe, Part, Parts, Stored, Tensor, Unsupported, expansion, steps
from fastckpt.exceptions import UnsupportedTypeError

from . import hashes as _hashes
from . import registry as _registry
from . import values as _values
from .collector import paused
from .key_paths import KeyText, Place, Places, name_of, place_of, prefix_of, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Nesting and size of a structure (docs/format.md, section 3.4).
DEPTH_LIMIT = 10_000
TOKEN_LIMIT = _core.MAX_TOKENS
_DIMENSIONS = _core.MAX_DIMENSIONS
_KEYS_IN_KEYS = 32


class Occurrence(NamedTuple):
    """A tensor, or a value made of tensors, where it stands in the state, and its name there."""

    place: Place
    value: Any
    stored: Stored | None
    token: str
    name: str


class Flat:
    """A flattened state.

    Attributes:
        tokens: JSON text of each structure token.
        tensors: what ``_core.save`` takes.
        ties: number and name of each further place of a tensor.
        movers: by tensor number, what brings the bytes of those without an address.
        keep: everything that addresses point into; for bytes an array over them. To be cleared when the
            addresses are no longer used.
        occurrences: with ``observe``, each tensor by its place, tied ones too.
        objects: with ``observe``, what has ``state_dict`` and ``load_state_dict``, with its place and name; of modules
            and optimizers the state is flattened, too.
        problems: with ``observe``, what could not be flattened, by place.
        places: with ``observe``, all of these places.
    """

    __slots__ = ("keep", "movers", "objects", "occurrences", "places", "problems", "tensors", "ties", "tokens")

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.tensors: list[Tensor] = []
        self.ties: list[tuple[int, str]] = []
        self.movers: dict[int, _memory.Mover] = {}
        self.keep: list[Any] = []
        self.occurrences: list[Occurrence] = []
        self.objects: list[tuple[Place, Any, str]] = []
        self.problems: list[tuple[Place, str]] = []
        self.places = Places()

    def structure(self) -> str:
        """The tokens as one JSON array."""
        return f"[{','.join(self.tokens)}]"

    def fill(self, index: int, start: int, address: int, nbytes: int) -> None:
        """The core's callback for tensors without an address."""
        self.movers[index](start, address, nbytes)


def _mapping(token: str, value: dict[Any, Any]) -> Parts:
    if _hashes.crowds(value):
        raise Unsupported(_hashes.WHY)
    return Parts(token, value.items(), keyed=True)


def _dict(value: dict[Any, Any]) -> Parts:
    return _mapping(f'["dict",{len(value)}]', value)


def _ordered(value: OrderedDict[Any, Any]) -> Parts:
    if vars(value):
        return Parts(f'["type","{_registry.ATTRIBUTED}"]', ((THROUGH, _Attributed(value)),))
    return _items(value)


def _items(value: OrderedDict[Any, Any]) -> Parts:
    return _mapping(f'["odict",{len(value)}]', value)


class _Attributed:
    """An OrderedDict that has attributes, as a module's state has ``_metadata``: stored as its items and these."""

    __slots__ = ("value",)

    def __init__(self, value: OrderedDict[Any, Any]) -> None:
        self.value = value


class _Bare(_Attributed):
    """The items of it."""

    __slots__ = ()


def _attributed(value: _Attributed) -> Parts:
    return Parts('["tuple",2]', ((THROUGH, _Bare(value.value)), (THROUGH, vars(value.value))))


def _counter(value: Counter[Any]) -> Parts:
    if vars(value):
        raise Unsupported("a Counter with attributes cannot be stored: convert it to a dict")
    return Parts(f'["type","{_registry.COUNTER}"]', ((THROUGH, dict(value)),))


def _default(value: defaultdict[Any, Any]) -> Parts:
    factory = value.default_factory
    name = "null"
    if factory is not None:
        known = _values.FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
        if known is None:
            raise Unsupported(
                f"a defaultdict can have the factories {', '.join(_values.FACTORIES)} and None, not {factory!r}"
            )
        name = f'"{known}"'
    return _mapping(f'["ddict",{len(value)}],{name}', value)


def _sequence(tag: str) -> Callable[[Any], Parts]:
    return lambda value: Parts(f'["{tag}",{len(value)}]', enumerate(value))


def _members(tag: str) -> Callable[[Any], Parts]:
    def describe(value: set[Any] | frozenset[Any]) -> Parts:
        if _hashes.crowds(value, in_set=True):
            raise Unsupported(_hashes.WHY)
        return Parts(f'["{tag}",{len(value)}]', enumerate(value))

    return describe


def _slice(value: slice) -> Parts:
    return Parts('["slice"]', ((Part("start"), value.start), (Part("stop"), value.stop), (Part("step"), value.step)))


def _datetime(value: dt.datetime) -> Parts:
    return Parts(_values.datetime_head(value), ((Part("tzinfo"), value.tzinfo),))


def _time(value: dt.time) -> Parts:
    return Parts(_values.time_head(value), ((Part("tzinfo"), value.tzinfo),))


_PARTS: dict[type, Callable[[Any], Parts]] = {
    dict: _dict,
    OrderedDict: _ordered,
    _Attributed: _attributed,
    _Bare: lambda value: _items(value.value),
    defaultdict: _default,
    Counter: _counter,
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    set: _members("set"),
    frozenset: _members("fset"),
    slice: _slice,
    dt.datetime: _datetime,
    dt.time: _time,
}


def _array(value: np.ndarray[Any, Any]) -> Stored | Parts:
    reason = _numpy.why_not(value)
    if reason is not None:
        raise Unsupported(reason)
    whole = value.flags.c_contiguous
    if not whole and 0 in value.strides:
        expanded = expansion(value.shape, value.strides, "")
        if expanded is not None:
            return Parts(expanded.token, ((THROUGH, value[expanded.base]),))
    dtype = value.dtype
    name, logical = _numpy.stored_dtype(dtype)
    shape: Sequence[int] = value.shape
    address = _memory.address_of(value)
    tie = (
        (np.ndarray, address, dtype.str, shape, not whole and steps(shape, value.strides))
        if value.nbytes
        else id(value)
    )
    return Stored(
        tie,
        name,
        shape if logical is None else (value.nbytes,),
        address if whole and value.nbytes else 0,
        None if logical is None else (logical, shape),
        '["array",',
        "]",
        None if whole else _numpy.mover_out(value),
    )


def _bytes(tag: str) -> Callable[[Any], Stored | str]:
    head = f'["{tag}",'

    def describe(value: bytes | bytearray) -> Stored | str:
        if len(value) < _values.LONG_BYTES:
            return _values.short_bytes(tag, value)
        return Stored((tag, id(value)), "U8", (len(value),), 0, None, head, ',"tensor"]', None)

    return describe


_DESCRIBE: dict[type, Describe] = {
    **dict.fromkeys(_numpy.ARRAYS, _array),
    bytes: _bytes("bytes"),
    bytearray: _bytes("bytearray"),
    **_PARTS,
}

BUILT_IN = frozenset((*_values.ENCODERS, *_DESCRIBE)) - {_Attributed, _Bare}


def _describe_of(kind: type) -> Describe:
    """How to describe a type that is none of Python's or numpy's own."""
    registered = _registry.by_class(kind)
    if registered is not None:
        return _registered(registered)
    # Only what can never be registered may be remembered: _DESCRIBE is asked before the registry.
    path = _values.path_encoder(kind)
    if path is not None:
        _DESCRIBE[kind] = path
        return path
    # A state can hold a tensor only where torch has been imported, by somebody.
    if "torch" in sys.modules:
        from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch

        found = _torch.describe_of(kind)
        if found is not None:
            _DESCRIBE[kind] = found
            return found
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise Unsupported(
        f"type {name} is not supported: convert it, leave it out, or register it with fastckpt.register_type"
    )


def is_stateful(kind: type) -> bool:
    """Whether instances give their state and take one."""
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def torch_kind(value: Any) -> str | None:
    """``module`` or ``optimizer`` for an object of torch's, or None. It can be one only if torch was imported."""
    if "torch" not in sys.modules:
        return None
    from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch

    return _torch.kind_of(value)


def _registered(registered: _registry.Registered) -> Describe:
    token = f'["type",{quote(registered.name)}]'

    def describe(value: Any) -> Parts:
        try:
            encoded = registered.encode(value)
        except Exception as error:
            raise Unsupported(f"the encode registered for {registered.name} raised {error!r}") from error
        return Parts(token, ((THROUGH, encoded),))

    return describe


class _Frame:
    """A value whose children are being flattened. ``key`` leads to the child at hand; ``hold`` keeps its identity."""

    __slots__ = ("hold", "items", "key", "keyed", "place", "prefix")

    def __init__(self, hold: Any, items: Iterator[tuple[Any, Any]], *, keyed: bool) -> None:
        self.hold = hold
        self.items = items
        self.keyed = keyed
        self.key: Any = THROUGH
        self.prefix: str | None = None
        self.place: Place | None = None


class _Flattener:
    def __init__(self, operation: str, refuse_tensors: str | None, *, observe: bool) -> None:
        self.operation = operation
        self.refuse_tensors = refuse_tensors
        self.observe = observe
        self.flat = Flat()
        self.stack: list[_Frame] = []
        self.active: set[int] = set()
        self.ties: dict[Any, int] = {}
        self.names: dict[str, int] = {"__metadata__": 1}
        self.keys_in_keys = 0

    def walk(self, state: Any) -> None:
        """Flatten ``state``, below whatever is on the stack."""
        floor = len(self.stack)
        self.stack.append(_Frame(None, iter(((THROUGH, state),)), keyed=False))
        while len(self.stack) > floor:
            frame = self.stack[-1]
            try:
                deeper = self.children(frame)
            except Unsupported as error:
                self.unsupported(str(error), error.__cause__)
                continue
            if deeper is None:
                self.stack.pop()
                self.active.discard(id(frame.hold))
            else:
                self.stack.append(deeper)

    def children(self, frame: _Frame) -> _Frame | None:
        """Emit the children that are leaves, up to one that has children itself: its frame, or None at the end."""
        emit = self.flat.tokens.append
        leaf_of = _values.ENCODERS.get
        describe_of = _DESCRIBE.get
        keyed = frame.keyed
        for key, value in frame.items:
            kind = type(value)
            if keyed:
                if type(key) is str:
                    emit(quote(key))
                else:
                    frame.key = key
                    key = self.key(key)  # noqa: PLW2901 - the key as places and names show it
            frame.key = key
            encode = leaf_of(kind)
            if encode is not None:
                emit(encode(value))
                continue
            describe = describe_of(kind)
            if describe is None:
                if self.observe and is_stateful(kind) and _registry.by_class(kind) is None:
                    describe = self.observed
                else:
                    describe = _describe_of(kind)
            found = describe(value)
            if type(found) is Stored:
                self.store(frame, value, found)
            elif type(found) is str:
                emit(found)
            else:
                return self.open(value, found)  # type: ignore[arg-type]
        return None

    def observed(self, value: Any) -> Parts | str:
        """Note an object with a state of its own."""
        flat = self.flat
        flat.objects.append((flat.places.at(self.stack), value, self.place_name(self.stack[-1])))
        # To ask for the state may change an object: a data loader starts its workers.
        return Parts("", ((THROUGH, value.state_dict()),)) if torch_kind(value) else "null"

    def store(self, frame: _Frame, value: Any, stored: Stored) -> None:
        """Emit the token of a tensor, and note the tensor unless it is tied to one that is known."""
        flat = self.flat
        tie, dtype, shape, address, logical, head, tail, mover = stored
        if self.refuse_tensors is not None:
            raise Unsupported(self.refuse_tensors)
        if self.observe:
            flat.occurrences.append(self.occurrence(value, stored, f"{head}{tail}"))
        index = self.ties.get(tie)
        if index is None:
            index = len(flat.tensors)
            if len(shape if logical is None else logical[1]) > _DIMENSIONS:
                raise Unsupported(f"a tensor of more than {_DIMENSIONS} dimensions cannot be stored")
            self.ties[tie] = index
            if not address and type(value) in _EXPORTED:
                # The array is an export: as long as it is kept, a bytearray refuses to be resized.
                value = np.frombuffer(value, np.uint8)
                shape, address = value.shape, _memory.address_of(value)
            flat.tensors.append(Tensor(self.name(frame), dtype, shape, address, value.nbytes, logical))
            flat.keep.append(value)
            if mover is not None:
                flat.movers[index] = mover
        elif not self.keys_in_keys:
            flat.ties.append((index, self.place_name(frame)))
        flat.tokens.append(f"{head}{index}{tail}")

    def occurrence(self, value: Any, stored: Stored | None, token: str) -> Occurrence:
        """The value at hand, noted."""
        return Occurrence(self.flat.places.at(self.stack), value, stored, token, self.place_name(self.stack[-1]))

    def check_size(self) -> None:
        """Refuse a structure that is too large at its end."""
        if len(self.flat.tokens) > TOKEN_LIMIT:
            raise UnsupportedTypeError(f"{self.operation}: the state has more than {TOKEN_LIMIT} values")

    def place_name(self, frame: _Frame) -> str:
        """The name that the key path of the child at hand makes."""
        if frame.prefix is None:
            frame.prefix = prefix_of(parent.key for parent in self.stack[:-1])
        return name_of(frame.prefix, frame.key)

    def name(self, frame: _Frame) -> str:
        """A tensor's name: that of its key path, made unique."""
        name = self.place_name(frame)
        taken = self.names.get(name)
        if taken is None:
            self.names[name] = 1
            return name
        # The count makes many clashes linear; what it leads to may be another tensor's own name.
        while f"{name}~{taken}" in self.names:
            taken += 1
        self.names[name] = taken + 1
        self.names[f"{name}~{taken}"] = 1
        return f"{name}~{taken}"

    def open(self, value: Any, parts: Parts) -> _Frame:
        """Begin a value with children."""
        if id(value) in self.active:
            raise Unsupported("it contains itself: a cycle cannot be stored")
        if len(self.stack) >= DEPTH_LIMIT:
            raise Unsupported(f"it is nested deeper than {DEPTH_LIMIT} levels")
        if len(self.flat.tokens) > TOKEN_LIMIT:
            raise Unsupported(f"the state has more than {TOKEN_LIMIT} values")
        token, children, keyed = parts
        if token:
            self.flat.tokens.append(token)
        if self.observe and token.startswith(('["coo"', '["compressed"', '["quantized"', '["expanded"')):
            self.flat.occurrences.append(self.occurrence(value, None, token))
        self.active.add(id(value))
        return _Frame(value, iter(children), keyed=keyed)

    def key(self, key: Any) -> Any:
        """Emit a dictionary key that is not a string; returns it as places and names show it."""
        tokens = self.flat.tokens
        kind = type(key)
        encode = _values.ENCODERS.get(kind) or _values.path_encoder(kind)
        start = len(tokens)
        if encode is not None:
            tokens.append(encode(key))
            if kind in _PLAIN_KEYS:
                return key
            name = str(key)
        else:
            if self.keys_in_keys == _KEYS_IN_KEYS:
                raise Unsupported("dictionary keys that hold dictionaries are nested too deep")
            self.keys_in_keys += 1
            self.walk(key)
            self.keys_in_keys -= 1
            plain = kind is tuple and all(type(item) in _PLAIN_KEYS for item in key)
            name = kind.__qualname__
            if plain:
                with suppress(ValueError):  # an integer of too many digits
                    name = str(key)
        return KeyText(name, ",".join(tokens[start:]))

    def unsupported(self, reason: str, cause: BaseException | None) -> None:
        """Raise, or with ``observe`` note it and go on: what ``into=`` holds beside tensors does not matter."""
        if not self.observe:
            place = show(place_of(frame.key for frame in self.stack))
            raise UnsupportedTypeError(f"{self.operation}: cannot store {place}: {reason}") from cause
        self.flat.problems.append((self.flat.places.at(self.stack), reason))
        self.flat.tokens.append("null")


_EXPORTED = frozenset((bytes, bytearray))
_PLAIN_KEYS = frozenset((str, int, float, bool, type(None)))


def flatten(state: Any, *, operation: str = "save", refuse_tensors: str | None = None, observe: bool = False) -> Flat:
    """Flatten ``state``.

    Args:
        state: any state.
        operation: the word that error messages begin with.
        refuse_tensors: why there may be no tensors, where there may be none.
        observe: also note each tensor by its place, and note what cannot be flattened instead of raising.

    Raises:
        UnsupportedTypeError: something in the state cannot be saved; the message names its place.
    """
    flattener = _Flattener(operation, refuse_tensors, observe=observe)
    flat = flattener.flat
    try:
        with paused():
            flattener.walk(state)
        flattener.check_size()
    except BaseException:
        # The traceback has this frame, and with it exports of the caller's buffers.
        flat.keep.clear()
        raise
    return flat


def canonical(token: Any) -> str:
    """A parsed token as the text that :func:`flatten` gives it."""
    return json.dumps(token, separators=(",", ":"))


__all__ = ["BUILT_IN", "Flat", "Occurrence", "Parts", "Stored", "Unsupported", "canonical", "flatten"]
