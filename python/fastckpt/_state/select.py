"""Well-formed structure tokens as a tree: finds the tensors in it, and the containers that lead to chosen ones."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._tensors.described import THROUGH, Part

from .flatten import canonical
from .key_paths import KeyText, name_of, part_of, prefix_of
from .structural import wraps_tensors
from .unflatten import Token, arity, is_attributed, is_tensor
from .values import DECODERS

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from .key_paths import Place, Places
    from .registry import Types
    from .structural import Codec

_COMPOSED = {
    "coo": ("indices", "values"),
    "compressed": ("compressed_indices", "plain_indices", "values"),
    "quantized": ("stored", "scale", "zero_point", "axis"),
}
#: Tensors that are stored in parts, and expanded tensors, whose base has the same place as the tensor itself.
_MADE = frozenset((*_COMPOSED, "expanded"))
MAPPINGS = frozenset({"dict", "odict", "ddict"})
_SEQUENCES = frozenset({"list", "tuple", "set", "fset"})
#: Containers whose items have positions.
_ORDERED = frozenset({"list", "tuple"})
_HOLE = -1
_SLICE = ("start", "stop", "step")
#: The name of a key that only the saving program could name; compared by identity.
_NAMELESS = str(object())
#: The most characters of all names of ties, and how many more for each token (docs/format.md, section 3.4).
_NAMES = 1 << 20
_NAMES_OF_TOKEN = 64


def _is_made(token: Token) -> bool:
    return type(token) is list and token[0] in _MADE


def _tag(token: Token) -> str | None:
    return token[0] if type(token) is list else None


def ends_of(tokens: list[Token]) -> list[int]:
    """For each token, the position after the last token of its value."""
    ends = [0] * len(tokens)
    stack: list[list[int]] = []
    for position, token in enumerate(tokens):
        count = arity(token) if type(token) is list else 0
        if count:
            stack.append([position, count])
            continue
        ends[position] = position + 1
        while stack:
            stack[-1][1] -= 1
            if stack[-1][1]:
                break
            ends[stack.pop()[0]] = position + 1
    return ends


class Found(NamedTuple):
    """A tensor, perhaps composed, in the structure."""

    position: int
    place: Place
    token: list[Any]


class _Frame:
    """A value whose parts are being walked: their keys, and the current one."""

    __slots__ = ("key", "keys", "left", "place")

    def __init__(self, left: int, keys: Iterator[Any] | None) -> None:
        self.left = left
        #: None for a mapping, whose keys are tokens.
        self.keys = keys
        self.key: Any = THROUGH
        self.place: Place | None = None


def _walk(tokens: list[Token], *, items: bool = True) -> Iterator[tuple[int, list[_Frame], bool]]:  # noqa: C901 - one hot loop
    """The positions of all values (composed values before their parts) and of all tensors in keys, in order.

    Composed tensors are included. Each comes with the enclosing values, with their current keys, and whether the tensor
    is in that key. Without ``items``, plain values are skipped, except those of mappings.
    """
    ends: list[int] = []
    stack = [_Frame(1, iter((THROUGH,)))]
    position = 0
    while position < len(tokens):
        frame = stack[-1]
        if not frame.left:
            stack.pop()
            continue
        if frame.keys is None:
            frame.key = tokens[position]
            value = position + 1
            if type(frame.key) is list:
                ends = ends or ends_of(tokens)
                value = ends[position]
                frame.key = _key(tokens, position, value)
                for at in range(position, value):
                    if _is_made(tokens[at]) or is_tensor(tokens[at]):
                        yield at, stack, True
            position = value
            frame.left -= 1
        else:
            if not items and type(tokens[position]) is not list:
                first, last = position, position + frame.left
                while position < last and type(tokens[position]) is not list:
                    position += 1
                frame.left -= position - first
                deque(islice(frame.keys, position - first), maxlen=0)
                continue
            frame.key = next(frame.keys)
        frame.left -= 1
        token = tokens[position]
        tag = _tag(token)
        yield position, stack, False
        count = arity(token) if tag is not None else 0
        position += 1
        if tag == "type" and is_attributed(token):
            # The pair of items and attributes does not appear in places.
            position += 1
            stack.append(_Frame(2, iter((THROUGH, THROUGH))))
            continue
        if tag == "ddict":  # the factory is not an item
            position += 1
            count -= 1
        if count:
            stack.append(_Frame(count, _keys(tag, count)))


def locate(tokens: list[Token], places: Places, wanted: Container[Place]) -> dict[Place, int]:
    """The positions of the values at the places ``wanted``, as far as they exist."""
    found: dict[Place, int] = {}
    for position, stack, in_key in _walk(tokens):
        place = None if in_key else places.known(stack)
        if place is not None and place in wanted:
            # Tokens that do not appear in places come after the one that contains them.
            found.setdefault(place, position)
    return found


def find(tokens: list[Token], places: Places) -> tuple[list[Found], set[Place]]:
    """Every tensor of a structure, in order, and the places of all values of mappings.

    A composed tensor comes before its parts.
    """
    found = []
    keyed = set()
    for position, stack, in_key in _walk(tokens, items=False):
        token = tokens[position]
        tensor = _is_made(token) or is_tensor(token)
        under_key = stack[-1].keys is None and not in_key
        if tensor or under_key:
            place = places.at(stack)
            if tensor:
                found.append(Found(position, place, token))
            if under_key:
                keyed.add(place)
    return found, keyed


def _key(tokens: list[Token], start: int, stop: int) -> Any:
    """A mapping's key that is not a plain token, in the form of a flattened state."""
    if _tag(tokens[start]) in {"int", "float"}:
        return DECODERS[tokens[start][0]](tokens[start])
    text = ",".join(map(canonical, tokens[start:stop]))
    members = [_plain(token) for token in tokens[start + 1 : stop]]
    if _tag(tokens[start]) == "tuple" and KeyText not in map(type, members):
        with suppress(ValueError):  # an integer of too many digits
            return KeyText(str(tuple(members)), text)
    return KeyText(_NAMELESS, text)


def _plain(token: Token) -> Any:
    """A token that is a plain dictionary key, or a KeyText."""
    if type(token) is not list:
        return token
    return DECODERS[token[0]](token) if token[0] in {"int", "float"} else KeyText(_NAMELESS, "")


def _name(stack: Sequence[_Frame], most: int) -> str | None:
    """The name that :func:`.flatten.flatten` would give a tensor here; None if the keys do not determine it.

    The name is also None if names and keys down to the tensor have more than ``most`` characters.
    """
    for frame in stack:
        part = part_of(frame.key)
        most -= 1 if part is None else 1 + len(part)
        if part is _NAMELESS or most < 0:
            return None
    return name_of(prefix_of(frame.key for frame in stack[:-1]), stack[-1].key)


def aliases(tokens: list[Token], stored: Sequence[str]) -> list[tuple[int, int, str]]:
    """Position, number and name of each place of a tensor.

    A place of a tied tensor has the name of its key path, unless a tensor is stored under that, or the keys do not
    determine it: then it has the stored name. So do places beyond the limit of docs/format.md, section 3.4. If no place
    has the stored name, the first place gets it; so does the only place of a tensor.
    """
    uses = Counter(token[1] for token in tokens if is_tensor(token))
    taken = set(stored)
    out: list[tuple[int, int, str]] = []
    # By tensor, the index in `out` of its first place, or -1 once one of its places has the stored name.
    without: dict[int, int] = {}
    left = _NAMES + _NAMES_OF_TOKEN * len(tokens)
    for position, stack, in_key in _walk(tokens):
        if not is_tensor(tokens[position]):
            continue
        index = tokens[position][1]
        name = None
        if uses[index] > 1 and not in_key:
            name = _name(stack, left)
            left -= len(stack) if name is None else len(stack) + len(name)
        if name is None or name in taken:
            name = stored[index]
        if name == stored[index]:
            without[index] = -1
        else:
            without.setdefault(index, len(out))
        out.append((position, index, name))
    for first in without.values():
        if first >= 0:
            position, index, _ = out[first]
            out[first] = (position, index, stored[index])
    return out


def tensor_names(tokens: list[Token]) -> Iterator[tuple[int, str | None, bool]]:
    """Position of each place of a tensor, the name that its key path makes, and whether it is in a key.

    The name is None in a key, and if the keys do not determine it.
    """
    for position, stack, in_key in _walk(tokens):
        if is_tensor(tokens[position]):
            yield position, None if in_key else _name(stack, _NAMES), in_key


def outer_values(tokens: list[Token]) -> list[range]:
    """The positions of each value of the outer mapping, in order; empty without one."""
    ends = ends_of(tokens)
    for position, stack, in_key in _walk(tokens):
        if in_key or any(frame.key is not THROUGH for frame in stack):
            break
        tag = _tag(tokens[position])
        if tag in MAPPINGS:
            first = position + 1 + (tag == "ddict")
            values = []
            while first < ends[position]:
                values.append(range(ends[first], ends[ends[first]]))
                first = ends[ends[first]]
            return values
    return []


def named(tokens: list[Token], stored: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Position and name of everything that can be chosen: tensors by :func:`aliases`, then values by their places.

    A value has the name that a tensor in its place would have. Containers are chosen by their contents, empty ones as
    values. A composed value (a sparse tensor, a registered object) has a name, too, and so does each of its parts.
    """
    for position, _, name in aliases(tokens, stored):
        yield position, name
    # The path to the current container, and how much of it leads to each container around it. Names are joined one at a
    # time: in deep nesting, all prefixes together would fill the memory.
    path: list[str] = []
    lengths = [0]
    for position, stack, in_key in _walk(tokens):
        if in_key:
            continue
        # Every container is visited before its contents, so at most one has been entered since the previous turn.
        while len(lengths) > len(stack):
            del path[lengths.pop() :]
        if len(lengths) < len(stack):
            lengths.append(len(path))
            path.append(prefix_of((_shown(stack[-2].key),)))
        token = tokens[position]
        if not is_tensor(token) and not _filled(token):
            yield position, name_of("".join(path), _shown(stack[-1].key))


def _filled(token: Token) -> bool:
    """Whether this is a container that is not empty, or an expanded tensor, whose base has its name."""
    tag = _tag(token)
    if tag == "expanded":
        return True
    if tag == "type":
        return is_attributed(token)
    return (tag in MAPPINGS or tag in _SEQUENCES) and arity(token) > (tag == "ddict")


def _shown(key: Any) -> Any:
    """A key; one that only the saving program could name is shown as in the file."""
    return key.text if type(key) is KeyText and key.name is _NAMELESS else key


def leaves(tokens: list[Token]) -> set[int]:
    """The positions that :func:`named` yields: with all of them, :func:`prune` leaves the structure unchanged."""
    return {position for position, _, in_key in _walk(tokens) if not in_key and not _filled(tokens[position])}


def without(tokens: list[Token], wanted: set[int], unwanted: set[int]) -> set[int]:
    """The positions ``wanted`` without ``unwanted``; a composed value is removed whole if any of its parts is."""
    left = wanted - unwanted
    ends = ends_of(tokens)
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if is_tensor(token) or type(token) is not list or _is_container(token):
            position += 1
            continue
        whole = range(position, ends[position])
        if not unwanted.isdisjoint(whole):
            left.difference_update(whole)
        position = ends[position]
    return left


def bound(tokens: list[Token], types: Types) -> set[int]:
    """The numbers of tensors whose dtype belongs to a larger value: a quantised tensor, a wrapper subclass."""
    ends = ends_of(tokens)
    out: set[int] = set()
    position = 0
    while position < len(tokens):
        token = tokens[position]
        tag = _tag(token)
        if tag == "quantized" or (
            tag == "type" and not _is_container(token) and _keeps_dtypes(types.by_name(token[1]))
        ):
            out.update(part[1] for part in tokens[position : ends[position]] if is_tensor(part))
            position = ends[position]
        else:
            position += 1
    return out


def _keeps_dtypes(codec: Codec | None) -> bool:
    """Whether tensors inside a value of this type are parts of a tensor; those of an unknown type may be."""
    return codec is None or wraps_tensors(codec.cls)


def _is_container(token: list[Any]) -> bool:
    """Whether items can be left out of the value."""
    tag = token[0]
    return tag in MAPPINGS or tag in _SEQUENCES or (tag == "type" and is_attributed(token))


def _keys(tag: str | None, count: int) -> Iterator[Any] | None:
    if tag in MAPPINGS:
        return None
    if tag in _SEQUENCES:
        return iter(range(count))
    if tag in {"datetime", "time"}:
        return iter((Part("tzinfo"),))
    if tag == "slice":
        return map(Part, _SLICE)
    if tag in _COMPOSED:
        return map(Part, _COMPOSED[tag])
    return iter((THROUGH,) * count)


def prune(
    tokens: list[Token],
    wanted: Container[int],
    hole: Token = None,
    closed: Sequence[tuple[int, int]] = (),
) -> tuple[list[Token], list[int]]:
    """Keep only the values at the positions ``wanted``, which :func:`named` yields, and their parents.

    Containers lose every item that does not lead there; a composed value (a sparse tensor, a registered object) stays
    whole.

    Args:
        tokens: the structure.
        wanted: the positions.
        hole: replaces the items that a list or tuple loses, so that the rest keeps its position; None to close gaps.
        closed: the ranges of ``tokens`` in which lists close up even with ``hole``.

    Returns:
        The tokens left, and for each its position in ``tokens``: -1 for a hole.
    """
    ends = ends_of(tokens)
    before = [0, *accumulate(position in wanted for position in range(len(tokens)))]
    out: list[Token] = []
    origin: list[int] = []

    def leads(position: int) -> bool:
        return before[ends[position]] > before[position]

    # Positions yet to be visited, the next one last; the second member keeps a value whole.
    todo = [(0, False)]
    while todo:
        position, whole = todo.pop()
        if position == _HOLE:
            out.append(hole)
            origin.append(_HOLE)
            continue
        token = tokens[position]
        tag = _tag(token)
        if not whole and tag == "type" and is_attributed(token):
            items, attributes = position + 2, ends[position + 2]
            if leads(attributes):
                out.extend(tokens[position:items])
                origin.extend(range(position, items))
                todo.append((attributes, False))
            todo.append((items, False))
            continue
        if whole or (tag not in MAPPINGS and tag not in _SEQUENCES):
            out.extend(tokens[position : ends[position]])
            origin.extend(range(position, ends[position]))
            continue
        first = position + 1 + (tag == "ddict")
        children = []
        while first < ends[position]:
            children.append(first)
            first = ends[first]
        if tag in MAPPINGS:
            pairs = [pair for pair in zip(children[::2], children[1::2], strict=True) if leads(pair[1])]
            kept = [item for key, value in pairs for item in ((key, True), (value, False))]
            out.append([tag, len(pairs)])
        else:
            holes = hole is not None and tag in _ORDERED and not any(low <= position < high for low, high in closed)
            kept = [(child if leads(child) else _HOLE, False) for child in children if holes or leads(child)]
            out.append([tag, len(kept)])
        origin.append(position)
        if tag == "ddict":
            out.append(tokens[position + 1])
            origin.append(position + 1)
        todo.extend(reversed(kept))
    return out, origin
