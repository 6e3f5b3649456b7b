"""Builds a state from structure tokens (docs/format.md, section 4): a loop with an explicit stack.

Tokens are untrusted until this loop has read them: any error in them is a CorruptCheckpointError.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from fastckpt._tensors.described import THROUGH, text
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, FormatVersionError

from . import hashes as _hashes
from . import values as _values
from .built_in import ATTRIBUTED
from .collector import paused
from .flatten import DEPTH_LIMIT
from .key_paths import KeyText, place_of, show
from .structural import Undecodable
from .values import MALFORMED

if TYPE_CHECKING:
    import datetime as dt

Token: TypeAlias = Any
#: Builds a value from its finished parts.
Finish: TypeAlias = Callable[[list[Any]], Any]

#: The most digits of an integer of 64 bits; fastckpt writes no longer integers.
_INTEGER_DIGITS = 20
_TENSORS = frozenset({"tensor", "array"})
_BYTES = frozenset({"bytes", "bytearray"})


class Builder(Protocol):
    """Builds the values of tokens for types beyond Python's own."""

    #: Whether values of unknown types become their stored form, which may be unhashable.
    plain: bool

    def tensor(self, token: list[Any]) -> Any:
        """A tensor, an array, or bytes that are stored as a tensor."""

    def leaf(self, token: list[Any]) -> Any:
        """A ``size``, ``dtype`` or ``device``."""

    def composed(self, token: list[Any], parts: list[Any]) -> Any:
        """A ``coo``, ``compressed``, ``quantized`` or ``expanded`` tensor."""

    def typed(self, name: str, value: Any, attributes: Any) -> Any:
        """A value of a named type, from its stored form and its attributes, if it has any."""

    def zone(self, value: Any) -> dt.tzinfo | None:
        """The time zone of a date and time or of a time of day; ValueError if ``value`` is not one."""


def parse(source: str) -> list[Token]:
    """The tokens of a structure's JSON text."""
    try:
        with paused():
            tokens = json.loads(source, parse_int=_parse_int, parse_constant=_parse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the structure is not what fastckpt writes: {error}") from error
    if type(tokens) is not list:
        raise CorruptCheckpointError("the structure is not what fastckpt writes: it is not an array")
    return tokens


def _parse_int(digits: str) -> int:
    if len(digits) > _INTEGER_DIGITS:
        raise ValueError("an integer of more than 64 bits")
    return int(digits)


def _parse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_tensor(token: Token) -> bool:
    """Whether a well-formed token represents a stored tensor."""
    if type(token) is not list:
        return False
    return token[0] in _TENSORS or (token[0] in _BYTES and len(token) == _LONG)


#: Members of a token of bytes that are stored as a tensor.
_LONG = 3


def arity(token: list[Any]) -> int:
    """The number of values that follow a well-formed token as its parts."""
    tag = token[0]
    if tag in {"dict", "odict"}:
        return 2 * token[1]  # type: ignore[no-any-return]
    if tag == "ddict":
        return 2 * token[1] + 1  # type: ignore[no-any-return]
    if tag in {"list", "tuple", "set", "fset"}:
        return token[1]  # type: ignore[no-any-return]
    if tag == "type" and len(token) == _WITH_ATTRIBUTES:
        return 2
    return _ARITIES.get(tag, 0)


#: Members of the token of a type whose value has attributes.
_WITH_ATTRIBUTES = 3
_ARITIES = {"slice": 3, "datetime": 1, "time": 1, "type": 1, "coo": 2, "compressed": 3, "quantized": 4, "expanded": 1}


def is_attributed(token: Token) -> bool:
    """Whether a mapping with attributes begins with this token. The pair of its items and its attributes comes next."""
    return bool(token == ["type", ATTRIBUTED])


def _dict(parts: list[Any]) -> dict[Any, Any]:
    keys = parts[::2]
    if _hashes.too_deep(keys):
        raise ValueError(_hashes.TOO_DEEP)
    if _hashes.crowds(keys):
        raise ValueError(_hashes.WHY)
    made = dict(zip(keys, parts[1::2], strict=True))
    if 2 * len(made) != len(parts):
        raise ValueError("a key that occurs twice")
    return made


def _ordered(parts: list[Any]) -> OrderedDict[Any, Any]:
    return OrderedDict(_dict(parts))


def _default(parts: list[Any]) -> defaultdict[Any, Any]:
    name, *items = parts
    return defaultdict(None if name is None else _values.FACTORIES[text(name)], _dict(items))


def _set(parts: list[Any]) -> set[Any]:
    if _hashes.too_deep(parts):
        raise ValueError(_hashes.TOO_DEEP)
    if _hashes.crowds(parts, in_set=True):
        raise ValueError(_hashes.WHY)
    made = _hashes.set_of(parts)
    if len(made) != len(parts):
        raise ValueError("a set member that occurs twice")
    return made


def _frozenset(parts: list[Any]) -> frozenset[Any]:
    return frozenset(_set(parts))


def _identity(parts: list[Any]) -> list[Any]:
    return parts


_FINISH: dict[str, Finish] = {
    "dict": _dict,
    "odict": _ordered,
    "list": _identity,
    "tuple": tuple,
    "set": _set,
    "fset": _frozenset,
    "ddict": _default,
    "slice": lambda parts: slice(*parts),
}


def _hashable(value: Any) -> Any:
    """A hashable replacement for a value of an unknown type that must be hashable: tuples and frozensets."""
    kind = type(value)
    if kind in {dict, OrderedDict, defaultdict}:
        return tuple((_hashable(key), _hashable(item)) for key, item in value.items())
    if kind is list or kind is tuple:
        return tuple(map(_hashable, value))
    return frozenset(map(_hashable, value)) if kind is set else value


def _with_plain(maker: Finish, every: int) -> Finish:
    """A variant of ``maker``: each ``every``-th part must be hashable, and may be of an unknown type."""

    def make(parts: list[Any]) -> Any:
        skipped = len(parts) % every
        parts[skipped::every] = list(map(_hashable, parts[skipped::every]))
        try:
            return maker(parts)
        except ValueError as error:  # the check would have refused anything except values that are equal by now
            raise CheckpointError(
                'load: Registry(undeclared="plain"): keys or members of types that this program does not know become '
                f"equal ({error}): declare the types, or leave these out with keys="
            ) from error

    return make


_PLAIN_FINISH = {
    "dict": _with_plain(_dict, 2),
    "odict": _with_plain(_ordered, 2),
    "ddict": _with_plain(_default, 2),
    "set": _with_plain(_set, 1),
    "fset": _with_plain(_frozenset, 1),
}
_MAKE_MAPPINGS = frozenset((_dict, _ordered, _default, *(_PLAIN_FINISH[tag] for tag in ("dict", "odict", "ddict"))))
_MAKE_SEQUENCES = frozenset((_identity, tuple, _set, _frozenset, _PLAIN_FINISH["set"], _PLAIN_FINISH["fset"]))


#: The types of keys that a message prints.
_SHOWN = frozenset((str, int, float, bool, bytes, type(None)))


def _key_of(frame: tuple[list[Any], int, Finish]) -> Any:
    """The key of the next part of an open value, for a place in a message."""
    parts, needed, finish = frame
    if finish in _MAKE_MAPPINGS:
        if not parts or (needed - len(parts)) % 2 == 0:
            return THROUGH
        # The ``repr`` of a key of the program's classes is not called: no code of the built values runs.
        kind = type(parts[-1])
        return parts[-1] if kind in _SHOWN else KeyText("", f"<{kind.__name__}>")
    return len(parts) if finish in _MAKE_SEQUENCES else THROUGH


def _attributed(parts: list[Any]) -> OrderedDict[Any, Any]:
    """An OrderedDict and its attributes, none of which may hide a method."""
    ((made, attributes),) = parts
    if type(made) is not OrderedDict or type(attributes) is not dict:
        raise ValueError("not an OrderedDict and its attributes")
    for name in attributes:
        if hasattr(OrderedDict, text(name)):
            raise ValueError(f"the attribute {name!r} would hide a method of an OrderedDict")
    vars(made).update(attributes)
    return made


def unflatten(tokens: Sequence[Token], builder: Builder, *, operation: str = "load") -> Any:
    """Make the state that ``tokens`` describe.

    Raises:
        CorruptCheckpointError: the tokens are malformed.
        CheckpointError: any other error of the builder.
    """
    with paused():
        return _unflatten(tokens, builder, operation)


def _unflatten(tokens: Sequence[Token], builder: Builder, operation: str) -> Any:  # noqa: C901, PLR0912 - one hot loop
    leaf_of = _leaves(builder).get
    stack: list[tuple[list[Any], int, Finish]] = []
    # The value that is being built: its parts so far, how many it needs, and the function that builds it.
    parts: list[Any] = []
    needed = 1
    finish: Finish = _identity
    position = -1
    try:
        for position, token in enumerate(tokens):
            kind = type(token)
            if kind is list:
                leaf = leaf_of(token[0])
                if leaf is not None:
                    value = leaf(token)
                else:
                    count, maker = _open(token, builder)
                    if count:
                        if count >= len(tokens) - position:
                            raise ValueError(f"a value of {count} parts, but fewer tokens follow")
                        if len(stack) > DEPTH_LIMIT:
                            raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")
                        stack.append((parts, needed, finish))
                        parts, needed, finish = [], count, maker
                        continue
                    value = maker([])
            elif kind is str:
                value = token
            else:
                value = _plain(token)
            parts.append(value)
            while len(parts) == needed and stack:
                value = finish(parts)
                parts, needed, finish = stack.pop()
                parts.append(value)
            if len(parts) == needed:
                break
        if len(parts) != needed or stack:
            raise ValueError("too few tokens")
        if position != len(tokens) - 1:
            raise ValueError("data follows its end")
    except CheckpointError:  # some CheckpointErrors are TypeErrors or ValueErrors, too
        raise
    except Undecodable as error:
        place = show(place_of(map(_key_of, stack[1:])))
        raise CheckpointError(f"{operation}: cannot make {place}: {error}"[:1000]) from error.__cause__
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
    except RuntimeError as error:  # torch's own checks of sizes and indices
        reason = str(error)
    else:
        return parts[0]
    raise CorruptCheckpointError(
        f"{operation}: the structure of the checkpoint is malformed at token {position}: {reason[:500]}"
    )


def _leaves(builder: Builder) -> dict[str, Callable[[list[Any]], Any]]:
    tensor = builder.tensor

    def some_bytes(token: list[Any]) -> Any:
        if len(token) == _LONG:
            return tensor(token)
        short = _values.decode_short_bytes(token)
        return bytearray(short) if token[0] == "bytearray" else short

    return {
        **_values.DECODERS,
        "tensor": tensor,
        "array": tensor,
        "bytes": some_bytes,
        "bytearray": some_bytes,
        "size": builder.leaf,
        "dtype": builder.leaf,
        "device": builder.leaf,
    }


def _plain(token: Any) -> Any:
    """A token that is its own value."""
    kind = type(token)
    if kind is int:
        if not -_values.EXACT <= token <= _values.EXACT:
            raise ValueError("an integer beyond 2^53")
    elif kind is float:
        if token - token != 0:
            raise ValueError("a number that is not finite")
    elif token is not None and kind is not bool:
        raise ValueError("a token that is a JSON object")
    return token


def _open(token: list[Any], builder: Builder) -> tuple[int, Finish]:  # noqa: PLR0911 - a table of tags
    """The number of parts of a value, and the function that builds it from them."""
    tag = token[0]
    maker = _FINISH.get(tag)
    if maker is not None:
        if builder.plain:
            maker = _PLAIN_FINISH.get(tag, maker)
        if tag == "slice":
            (_,) = token
            return 3, maker
        _, count = token
        if type(count) is not int or count < 0:
            raise ValueError("an invalid number of parts")
        return arity(token), maker
    if tag == "type":
        _, name, *more = token
        if text(name) == ATTRIBUTED and not more:
            return 1, _attributed
        if more and (len(more) > 1 or type(more[0]) is not int or more[0] != 2):  # noqa: PLR2004 - value and attributes
            raise ValueError("a type with neither one part (its value) nor two (its value and attributes)")
        return 1 + len(more), partial(_typed, builder, name)
    if tag == "datetime":
        return 1, partial(_values.decode_datetime, token, builder.zone)
    if tag == "time":
        return 1, partial(_values.decode_time, token, builder.zone)
    return _arity(tag), partial(builder.composed, token)


def _arity(tag: Any) -> int:
    """The number of values that follow a token as its parts."""
    if type(tag) is str and tag not in _ARITIES:
        raise FormatVersionError(
            f"the checkpoint has values of the kind {tag[:40]!r}, which this release does not know: upgrade fastckpt-io"
        )
    return _ARITIES[tag]


def _typed(builder: Builder, name: str, parts: list[Any]) -> Any:
    value, *attributes = parts
    if attributes and type(attributes[0]) is not dict:
        raise ValueError("attributes that are not a dict")
    return builder.typed(name, value, attributes[0] if attributes else None)
