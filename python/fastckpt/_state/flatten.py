"""Converts a state to structure tokens and the tensors to store (docs/format.md, sections 4 and 5).

One loop with an explicit stack: the state may be nested deeper than Python can recurse.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _core
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.described import THROUGH, Describe, Parts, Stored, Tensor, Unsupported
from fastckpt._tensors.rank_part import Part
from fastckpt._tensors.spreads import refuse_part
from fastckpt.exceptions import UnsupportedTypeError

from . import hashes as _hashes
from . import values as _values
from .by_type import ATTRIBUTED_TOKEN, DESCRIBE, Attributed, Bare, has_state, other, stateful, torch_kind, typed
from .collector import paused
from .flat import Flat, Occurrence
from .key_paths import RESERVED, KeyText, Place, name_of, place_of, prefix_of, show, unique
from .registry import Types
from .structural import Codec, codec_of, is_updated
from .structural import name_of as name_of_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fastckpt._tensors.described import OwnPart
    from fastckpt._tensors.spreads import Spreads

#: Nesting and size of a structure (docs/format.md, section 3.4).
DEPTH_LIMIT = 10_000
TOKEN_LIMIT = _core.MAX_TOKENS
_DIMENSIONS = _core.MAX_DIMENSIONS
_KEYS_IN_KEYS = 32


#: Tokens of tensors that are stored in parts, each of them in full.
_MADE = ('["coo"', '["compressed"', '["quantized"', '["type","torch.nested.nested_tensor"')
#: Tokens that a user sees as one tensor.
_COMPOSED = ('["coo"', '["compressed"', '["quantized"', '["expanded"')
_SEQUENCES = ('["list"', '["tuple"', '["set"', '["fset"')


def reuse_limit(stored: int) -> int:
    """The most bytes of tensors as parts of others, beyond the first use of each, for ``stored`` bytes in all."""
    return 64 * stored + (64 << 20)


class _Frame:
    """A value whose children are being flattened. ``key`` leads to the current child; ``hold`` keeps its identity."""

    __slots__ = ("depth", "hold", "items", "key", "keyed", "made", "members", "noted", "place", "prefix")

    def __init__(
        self, hold: Any, items: Iterator[tuple[Any, Any]], *, keyed: bool, made: bool = False, depth: int | None = None
    ) -> None:
        self.hold = hold
        #: With ``observe``: the number of frames that lead to the key under which the children are values, 0 without
        #: such a key; None in keys and inside a value that counts as a whole.
        self.depth = depth
        #: Whether that key has been recorded, or must not be.
        self.noted = not depth
        #: Whether this is, or is in, a tensor that is stored in parts.
        self.made = made
        self.items = items
        self.keyed = keyed
        self.key: Any = THROUGH
        self.prefix: str | None = None
        self.place: Place | None = None
        #: A set is sorted when all of its members are known.
        self.members: _Members | None = None


class _Members:
    """The members of a set, and the position of the tokens of each."""

    __slots__ = ("starts", "stored", "values")

    def __init__(self, flat: Flat, values: Iterable[Any]) -> None:
        self.values = list(values)
        self.starts: list[int] = []
        self.stored = len(flat.tensors) + len(flat.ties)

    def iterate(self, tokens: list[str]) -> Iterator[tuple[int, Any]]:
        """Yield the members with their numbers, and record where each begins."""
        for item in enumerate(self.values):
            self.starts.append(len(tokens))
            yield item

    def arrange(self, flat: Flat) -> None:
        """Put the tokens in the order of their texts, which is the same in every process.

        Tensors and long bytes keep their order, which determines their numbers and names.
        """
        tokens, starts = flat.tokens, self.starts
        if len(starts) > 1 and self.stored == len(flat.tensors) + len(flat.ties):
            ends = [*starts[1:], len(tokens)]
            texts = [",".join(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]
            order = sorted(range(len(starts)), key=texts.__getitem__)
            tokens[starts[0] :] = [token for index in order for token in tokens[starts[index] : ends[index]]]
            self.values = [self.values[index] for index in order]
        if _hashes.too_deep(self.values):
            raise Unsupported(_hashes.TOO_DEEP)
        if _hashes.crowds(self.values, in_set=True):
            raise Unsupported(_hashes.WHY)


class _Flattener:
    def __init__(
        self,
        operation: str,
        refuse_tensors: str | None,
        types: Types,
        *,
        observe: bool,
        spreads: Spreads | None,
        excluded: Callable[[str], bool] | None,
    ) -> None:
        self.operation = operation
        self.refuse_tensors = refuse_tensors
        self.types = types
        self.encode = None if observe else types.encode
        self.observe = observe
        self.spreads = spreads
        self.excluded = excluded
        self.flat = Flat()
        # Facts about a type are valid for this walk only: it may be registered before the next one.
        self.describe = dict(DESCRIBE)
        self.stack: list[_Frame] = []
        self.active: set[int] = set()
        #: With ``observe``, each container that a load updates in place, by identity, with its first place.
        self.updated: dict[int, tuple[Place, Any]] = {}
        self.ties: dict[Any, int] = {}
        self.names = dict(RESERVED)
        self.keys_in_keys = 0
        #: Bytes of tensors that are parts of others, counted again for each use after the first.
        self.again = 0
        #: The outermost tensor on the stack whose parts are being flattened.
        self.tensor: _Frame | None = None

    def walk(self, state: Any) -> None:
        """Flatten ``state``, below the current stack."""
        floor = len(self.stack)
        depth = 0 if self.observe and not self.keys_in_keys else None
        self.stack.append(_Frame(None, iter(((THROUGH, state),)), keyed=False, depth=depth))
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
                if frame is self.tensor:
                    self.tensor = None
            else:
                self.stack.append(deeper)

    def children(self, frame: _Frame) -> _Frame | None:  # noqa: C901, PLR0912 - one hot loop
        """Emit the children that are leaves, up to a child with children; return its frame, or None at the end."""
        emit = self.flat.tokens.append
        leaf_of = _values.ENCODERS.get
        describe_of = self.describe.get
        keyed = frame.keyed
        for key, value in frame.items:
            kind = type(value)
            frame.key = key
            if keyed:
                if type(key) is str:
                    emit(_values.encode_text(key))
                else:
                    # The key is stored in the form for places and names.
                    frame.key = self.key(key)
            encode = leaf_of(kind)
            if encode is not None:
                emit(encode(value))
                if not frame.noted:
                    self.note_value()
                continue
            try:
                found = (describe_of(kind) or self.describe_type(kind))(value)
            except Unsupported as refusal:
                found = self.replace(value, refusal)
            if frame.made and type(found) is Parts and found.token.startswith('["expanded"') and not self.observe:
                value = value.contiguous()  # noqa: PLW2901 - a part is stored in full
                found = (describe_of(kind) or self.describe_type(kind))(value)
            if type(found) is Stored:
                self.store(frame, value, found)
                # Long bytes are a value that is stored as a tensor.
                if kind in _EXPORTED and not frame.noted:
                    self.note_value()
            elif type(found) is str:
                emit(found)
                if not frame.noted:
                    self.note_value()
            else:
                return self.open(value, found)  # type: ignore[arg-type]
        if frame.members is not None:
            members, frame.members, frame.key = frame.members, None, THROUGH
            members.arrange(self.flat)
        return None

    def observed(self, value: Any) -> Parts | str:
        """Record an object with a ``state_dict``."""
        flat = self.flat
        flat.objects.append((flat.places.at(self.stack), value))
        # A call of state_dict may change an object: a data loader starts its workers. A scheduler has no tensors.
        return stateful(value) if torch_kind(value) in {"module", "optimizer"} else "null"

    def describe_type(self, kind: type) -> Describe:
        """How to describe a type that is neither Python's nor numpy's."""
        found = self.look_up(kind)
        if found is None:
            return other
        self.describe[kind] = found
        return found

    def look_up(self, kind: type) -> Describe | None:
        if issubclass(kind, Part):
            return (self.spreads and self.spreads.describe_of(kind)) or refuse_part
        # A registration by the program or by fastckpt has priority over the structure of the type.
        codec = self.types.by_class(kind)
        if codec is None:
            path = _values.path_encoder(kind)
            if path is not None:
                return path
            # A state can hold a tensor only if torch has been imported.
            if "torch" in sys.modules:
                from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch

                found = None if self.spreads is None else self.spreads.describe_of(kind)
                if found is None:
                    found = _torch.describe_of(kind)
                if found is not None:
                    return found
            if has_state(kind):
                return self.observed if self.observe else stateful
            codec = codec_of(kind)
            if codec is None:
                return None
        remark = self.types.remark(codec)
        if remark is not None:
            self.flat.remarks.append((codec.name, remark))
        return typed(codec, self.spared if codec.spares else None)

    def spared(self, codec: Codec, attributes: dict[str, Any]) -> dict[str, Any] | None:
        """The attributes besides a dataclass's fields whose types can be stored."""
        stored = {}
        for name, value in attributes.items():
            kind = type(value)
            if (
                self.encode is None
                and kind not in _values.ENCODERS
                and (self.describe.get(kind) or self.describe_type(kind)) is other
                and (isinstance(value, type) or not callable(getattr(value, "state_dict", None)))
            ):
                remark = f"the attribute {name!r} of {codec.name} is not a field, and its type cannot be stored"
                self.flat.remarks.append((codec.name, f"{remark} ({name_of_class(kind)}): it is left out"))
            else:
                stored[name] = value
        return stored or None

    def replace(self, value: Any, refusal: Unsupported) -> Parts:
        """The result of ``encode`` for a value that cannot be saved; Unsupported if there is none or it fails."""
        if self.encode is None:
            raise refusal
        try:
            return Parts("", ((THROUGH, self.encode(value)),))
        except TypeError as error:
            raise Unsupported(f"{refusal}; encode raised TypeError: {error}") from error
        except Exception as error:
            raise Unsupported(f"{refusal}; encode raised {error!r}") from error

    def store(self, frame: _Frame, value: Any, stored: Stored) -> None:
        """Emit the token of a tensor, and add the tensor unless it is tied to a known one."""
        flat = self.flat
        tie, head, tail = stored.tie, stored.head, stored.tail
        if self.refuse_tensors is not None:
            raise Unsupported(self.refuse_tensors)
        if self.observe:
            flat.occurrences.append(self.occurrence(value, stored, f"{head}{tail}"))
        if self.spreads is not None:
            tail = self.check_spread(tail, stored.local)
        index = self.ties.get(tie)
        if index is None:
            index = self.ties[tie] = self.add(frame, value, stored)
        elif not self.keys_in_keys:
            flat.ties.append((index, self.place_name(frame)))
        if frame.made and index in flat.inner:
            self.again += flat.tensors[index].capacity
        if self.tensor is not None:
            flat.inner.add(index)
        flat.tokens.append(f"{head}{index}{tail}")

    def add(self, frame: _Frame, value: Any, stored: Stored) -> int:
        """Add a new tensor; returns its number."""
        flat = self.flat
        index = len(flat.tensors)
        _, dtype, shape, address, logical, _, _, mover, local = stored
        if len(shape if logical is None else logical[1]) > _DIMENSIONS:
            raise Unsupported(f"a tensor of more than {_DIMENSIONS} dimensions cannot be stored")
        if not address and type(value) in _EXPORTED:
            # The array exports the buffer: as long as it is kept, a bytearray cannot be resized.
            value = np.frombuffer(value, np.uint8)
            shape, address = value.shape, _memory.address_of(value)
        if local is None:
            nbytes = value.nbytes
        else:
            flat.spreads[index], value, nbytes, whole = local
            if whole is not None:
                flat.wholes[index] = whole
        name = unique(self.names, self.place_name(frame))
        flat.tensors.append(Tensor(name, dtype, shape, address, nbytes, logical))
        flat.keep.append(value)
        if mover is not None:
            flat.movers[index] = mover
        return index

    def check_spread(self, tail: str, local: OwnPart | None) -> str:
        """Refuse spread tensors inside another tensor; returns the end of the token, common to all ranks."""
        if local is not None and self.tensor is not None:
            raise Unsupported("a DTensor inside another tensor cannot be saved: save the parts by themselves")
        head, colon, _ = tail.partition(":")
        return f'{head}"]' if colon and self.spreads is not None and not self.spreads.device_numbers else tail

    def occurrence(self, value: Any, stored: Stored | None, token: str) -> Occurrence:
        """Describe and record the current value."""
        return Occurrence(self.flat.places.at(self.stack), value, stored, token)

    def check_size(self) -> None:
        """At the end of a structure, refuse it if it is too large."""
        if len(self.flat.tokens) > TOKEN_LIMIT:
            raise UnsupportedTypeError(f"{self.operation}: the state has more than {TOKEN_LIMIT} values")
        if self.again > reuse_limit(sum(tensor.capacity for tensor in self.flat.tensors)):
            raise UnsupportedTypeError(
                f"{self.operation}: the state has the same sparse, quantised or nested tensors at so many places that "
                "a load would refuse to build them: keep each at one place"
            )

    def place_name(self, frame: _Frame) -> str:
        """The name made of the key path of the current child."""
        if frame.prefix is None:
            frame.prefix = prefix_of(parent.key for parent in self.stack[:-1])
        return name_of(frame.prefix, frame.key)

    def open(self, value: Any, parts: Parts) -> _Frame:
        """Begin a value with children."""
        if id(value) in self.active:
            raise Unsupported("it contains itself: a cycle cannot be stored")
        if len(self.stack) >= DEPTH_LIMIT:
            raise Unsupported(f"it is nested deeper than {DEPTH_LIMIT} levels")
        if len(self.flat.tokens) > TOKEN_LIMIT:
            raise Unsupported(f"the state has more than {TOKEN_LIMIT} values")
        token, children, keyed = parts
        flat = self.flat
        if token.startswith('["type","omegaconf.') and self.is_hashed():
            raise Unsupported("a configuration can be neither a key nor a member of a set: it comes back as a dict")
        if token:
            flat.tokens.append(token)
        if keyed and len(self.stack) <= _OUTER and not self.keys_in_keys:
            self.note_outer(value)
        depth = None
        if self.observe:
            self.note_place(value, token)
            depth = self.note_parts(value, token, keyed=keyed)
        self.active.add(id(value))
        kind = type(value)
        if kind is set or kind is frozenset:
            members = _Members(flat, value)
            opened = _Frame(value, members.iterate(flat.tokens), keyed=False, depth=depth)
            opened.members = members
            return opened
        made = self.stack[-1].made or token.startswith(_MADE)
        opened = _Frame(value, iter(children), keyed=keyed, made=made, depth=depth)
        if self.tensor is None and hasattr(kind, "untyped_storage"):
            self.tensor = opened
        return opened

    def note_place(self, value: Any, token: str) -> None:
        """Record a composed tensor, or a container that is at another place, too."""
        if token.startswith(_COMPOSED):
            self.flat.occurrences.append(self.occurrence(value, None, token))
        elif token and is_updated(type(value)):
            place = self.flat.places.at(self.stack)
            first, _ = self.updated.setdefault(id(value), (place, value))
            if first is not place:
                self.flat.again.append((first, place))

    def note_value(self) -> None:
        """Record the key of the current value."""
        frame = self.stack[-1]
        self.flat.values[self.flat.places.at(self.stack, frame.depth)] = None
        frame.noted = not frame.keyed

    def note_parts(self, value: Any, token: str, *, keyed: bool) -> int | None:
        """Record a value with parts, unless the parts are recorded themselves; returns the depth of its frame."""
        parent = self.stack[-1]
        if parent.depth is None or (type(parent.hold) is Attributed and type(value) is not Bare):
            return None
        if not token or token == ATTRIBUTED_TOKEN:
            return parent.depth
        container = keyed or token.startswith(_SEQUENCES)
        if not parent.noted and (",0]" in token if container else not token.startswith(_COMPOSED)):
            self.note_value()
        if not container:
            return None
        return len(self.stack) + 1 if keyed else parent.depth

    def is_hashed(self) -> bool:
        """Whether the current value is in a key or in a member of a set."""
        return self.keys_in_keys > 0 or any(type(frame.hold) in _SETS for frame in self.stack)

    def note_outer(self, value: Any) -> None:
        """Record the outer mapping of the state, and which of its keys lead to mappings: one of them is the model."""
        keys = [frame.key for frame in self.stack if frame.key is not THROUGH]
        flat = self.flat
        if not keys and flat.outer is None:
            flat.outer = dict.fromkeys(value if type(value) is not Bare else value.value, False)
        elif len(keys) == 1 and flat.outer is not None and type(keys[0]) is not KeyText and keys[0] in flat.outer:
            flat.outer[keys[0]] = True

    def key(self, key: Any) -> Any:
        """Emit a dictionary key that is not a string; returns its form for places and names."""
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
            name = kind.__qualname__
            if kind is tuple and all(type(item) in _PLAIN_KEYS for item in key):
                with suppress(ValueError):  # an integer of too many digits
                    name = str(key)
        return KeyText(name, ",".join(tokens[start:]))

    def unsupported(self, reason: str, cause: BaseException | None) -> None:
        """Raise, or with ``observe`` record the reason: values in ``into=`` other than tensors do not matter."""
        if not self.observe:
            place = show(place_of(frame.key for frame in self.stack))
            reason = f"{self.operation}: cannot store {place}: {reason}"
            if not self.is_excluded():
                raise UnsupportedTypeError(reason) from cause
            self.flat.tokens.append(canonical([EXCLUDED, reason]))
            return
        self.flat.problems.append((self.flat.places.at(self.stack), reason))
        if not self.stack[-1].noted:
            self.note_value()
        self.flat.tokens.append("null")

    def is_excluded(self) -> bool:
        """Whether the current value, of which no token has been emitted, will be left out of the state."""
        frame = self.stack[-1]
        # A set is refused as a whole, after its members.
        if self.excluded is None or self.keys_in_keys or type(frame.hold) in _SETS:
            return False
        return self.excluded(self.place_name(frame))


#: The tag of a placeholder for a value that cannot be stored and will be left out, with the error.
EXCLUDED = "excluded"
_SETS = frozenset((set, frozenset))
#: The most frames around a mapping that may be the model's: the outer mapping of the state, or a mapping in it.
_OUTER = 16
_EXPORTED = frozenset((bytes, bytearray))
_PLAIN_KEYS = frozenset((str, int, float, bool, type(None)))


def flatten(
    state: Any,
    *,
    operation: str = "save",
    refuse_tensors: str | None = None,
    observe: bool = False,
    types: Types | None = None,
    spreads: Spreads | None = None,
    excluded: Callable[[str], bool] | None = None,
) -> Flat:
    """Flatten ``state``.

    Args:
        state: any state.
        operation: the word that error messages begin with.
        refuse_tensors: the reason why tensors are refused, if they are.
        observe: also record each tensor by its place, and record values that cannot be flattened instead of raising.
        types: the known types with names; by default those of the process.
        spreads: describes tensors that are spread over ranks; without it they are refused. Tokens of tensors on devices
            then lack the index of the device, which differs by rank, unless it must be kept.
        excluded: whether a name will be left out. If so, a token :data:`EXCLUDED` may represent its value.

    Raises:
        UnsupportedTypeError: something in the state cannot be saved; the message names its place.
    """
    flattener = _Flattener(
        operation,
        refuse_tensors,
        types or Types(operation),
        observe=observe,
        spreads=spreads,
        excluded=excluded,
    )
    flat = flattener.flat
    try:
        with paused():
            flattener.walk(state)
        flattener.check_size()
    except BaseException:
        # The traceback keeps this frame alive, and with it exports of the caller's buffers.
        flat.keep.clear()
        raise
    return flat


def canonical(token: Any) -> str:
    """A parsed token as the text that :func:`flatten` emits for it."""
    return json.dumps(token, separators=(",", ":"))
