"""Updating an existing state: ``load(path, into=state)`` compares it with the checkpoint before anything changes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from fastckpt._state.builders import torch_for
from fastckpt._state.collector import paused
from fastckpt._state.flat import Occurrence
from fastckpt._state.flatten import canonical, flatten
from fastckpt._state.in_place import update
from fastckpt._state.select import Found, ends_of, find, leaves, locate, prune, without
from fastckpt._state.unflatten import is_tensor, unflatten
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.dtypes import NUMPY_PREFIX, plain_name
from fastckpt._tensors.overlap import layout_of, overlapping

from .destinations import Whole
from .mismatches import Mismatches
from .objects import HOLE_TOKEN, Owner, WithObjects, try_classes
from .placement import can_cast
from .tensor_info import are_equal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from fastckpt import _core
    from fastckpt._state.key_paths import Place
    from fastckpt._state.registry import Types
    from fastckpt._state.unflatten import Token
    from fastckpt._tensors.described import Describe
    from fastckpt._tensors.spreads import Spreads

    from .destinations import Targets
    from .selection import Selection

_FILLABLE = frozenset({"tensor", "array"})


def _is_torch(item: Occurrence) -> bool:
    return item.token.startswith('["tensor"')


def _memory_of(item: Occurrence) -> Any:
    """The tensor or array to fill: for a spread tensor, the part that this rank has."""
    local = None if item.stored is None else item.stored.local
    return item.value if local is None else local.memory


def _inverse(origin: Sequence[int]) -> Mapping[int, int] | range:
    """The position in the selected part for each position of the whole structure; the same if all is selected."""
    return origin if isinstance(origin, range) else {position: index for index, position in enumerate(origin)}


class _Entry:
    """A tensor of the checkpoint, and the tensor that it fills: None if a new one is made."""

    __slots__ = ("given", "item")

    def __init__(self, item: Found, given: Occurrence | None) -> None:
        self.item = item
        self.given = given


class Into:
    """The tensors of ``into=``, matched with the tensors of the checkpoint.

    Args:
        reader: the checkpoint.
        path: the path of the checkpoint, for messages.
        into: the state.
        targets: the requests of the read.
        types: the known types.
        strict: whether each side must have all tensors of the other side.
        spreads: describes tensors that are spread over ranks; without it they are refused.
        shared: whether other ranks load, too. If so, ``into`` need not have all tensors, whatever ``strict`` is.

    Attributes:
        missing: with ``strict`` unset, the names of tensors and values that the checkpoint lacks.
        unexpected: with ``strict`` unset or with ``shared``, the names of tensors that ``into`` lacks.
        unwanted: the numbers of the ``unexpected`` tensors.
    """

    def __init__(
        self,
        reader: _core.Reader,
        path: str,
        into: Any,
        targets: Targets,
        types: Types,
        *,
        strict: bool,
        spreads: Spreads | None = None,
        shared: bool = False,
    ) -> None:
        self.reader = reader
        self.path = path
        self.into = into
        self.targets = targets
        self.types = types
        self.strict = strict
        self.spreads = spreads
        self.shared = shared
        # Keeps alive the objects that addresses point into.
        self.flat = flatten(into, operation="load: into", observe=True, types=types, spreads=spreads)
        # Values other than tensors come from the checkpoint, and so do long bytes.
        self.given = {
            item.place: item
            for item in self.flat.occurrences
            if item.stored is None or item.token.startswith(('["tensor"', '["array"'))
        }
        # For an expanded tensor, `given` has its base at the same place.
        self._expanded = {item.place: item for item in self.flat.occurrences if item.token.startswith('["expanded"')}
        self._bases: set[int] = set()
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.unwanted: set[int] = set()
        self._problems = dict(self.flat.problems)
        self._owners = self._objects()
        self._mismatches = Mismatches()
        self._entries: list[_Entry] = []
        #: By position, for each tensor made of others (such as a sparse one): the value to fill, or None to make one.
        self._composed: dict[int, Any] = {}
        #: For each tensor of into, by its tie: the number of the stored tensor that fills it.
        self._ties: dict[Any, int] = {}
        #: The layout in memory of each tensor of into, by its tie.
        self._layouts: dict[Any, tuple[str, np.ndarray[Any, Any]]] = {}
        #: Positions of tensors that into lacks.
        self._dropped: set[int] = set()
        #: Places of values that do not fit: their parts are not reported again.
        self._unfit: set[Place | None] = set()
        self._regions: list[tuple[int, int, Owner]] = []
        self.filled: list[Any] = []

    def _objects(self) -> dict[Place, Owner]:
        """The objects in ``into``, except those in the states of other objects."""
        owners: dict[Place, Owner] = {}
        for place, value in self.flat.objects:
            if self._owner(owners, place)[0] is None:
                owners[place] = Owner(place, value, self.spreads)
        return owners

    @staticmethod
    def _owner(owners: dict[Place, Owner], place: Place) -> tuple[Owner | None, Place]:
        """The object whose state contains ``place``, and the entry of that state that contains it."""
        entry, at = place, place if owners else None
        while at is not None:
            owner = owners.get(at)
            if owner is not None:
                return owner, entry
            entry, at = at, at.above
        return None, place

    @property
    def has_objects(self) -> bool:
        """Whether ``into`` has objects: new tensors may be made for them."""
        return bool(self._owners)

    @paused()
    def match(
        self,
        tokens: list[Token],
        left: list[Token],
        origin: Sequence[int],
        chosen: set[int] | None,
        selection: Selection,
        *,
        renamed: bool,
    ) -> list[Token]:
        """Match every chosen tensor of a structure, and request their bytes.

        Args:
            tokens: the whole structure.
            left: the chosen part of it.
            origin: the position of each token of ``left`` in ``tokens``.
            chosen: the positions that were chosen, or None for all.
            selection: the patterns that chose them.
            renamed: whether the names in the structure differ from those that the selection saw.

        Returns:
            The tokens that are left.

        Raises:
            StructureMismatchError: ``into`` and the checkpoint do not match. The error lists all differences.
            CheckpointError: a class in this program differs from the saved one.
        """
        at = _inverse(origin)
        every, keyed = find(tokens, self.flat.places)
        self._find(every if chosen is None else [item for item in every if item.position in at])
        starts = locate(tokens, self.flat.places, self._owners) if self._owners else {}
        begins = {place: at[start] if start in at else None for place, start in starts.items()}  # noqa: SIM401 - a range has no get
        self._states(left, begins, selection)
        if selection.all or not renamed:
            self._extra({item.place for item in every}, selection)
            self._extra_values(tokens, keyed, selection)
        self._again(tokens, left, at)
        self._clashes()
        self._mismatches.check(self.path, self.into, self.flat)
        if chosen is not None or self._dropped:
            wanted = leaves(tokens) if chosen is None else chosen
            if self._dropped:
                wanted = without(tokens, wanted, self._dropped)
            # The selected items of a list keep their positions, because they go to the same positions in into.
            ends = ends_of(tokens) if starts else []
            left, origin = prune(tokens, wanted, HOLE_TOKEN, [(start, ends[start]) for start in starts.values()])
            before, at = at, _inverse(origin)
            gone = [tokens[position] for position in before if position not in at]
            numbers = dict.fromkeys(token[1] for token in gone if is_tensor(token))
            self.unexpected = tuple(dict.fromkeys(self.targets.stored[number].name for number in numbers))
            self.unwanted = set(numbers).difference(token[1] for token in left if is_tensor(token))
        try_classes(left, self.targets.framework, self.types)
        ends = ends_of(left) if starts or self._composed else []
        self._composed = {at[position]: value for position, value in self._composed.items() if position in at}
        # Values are sorted in the order in which they are finished: an inner container before the outer one.
        self._composed = dict(sorted(self._composed.items(), key=lambda one: (ends[one[0]], -one[0])))
        self._regions = sorted(
            ((at[start], ends[at[start]], self._owners[place]) for place, start in starts.items() if start in at),
            key=lambda region: region[0],
        )
        self._ask([entry for entry in self._entries if entry.item.position in at])
        return left

    def _find(self, found: Sequence[Found]) -> None:
        """Match each tensor of the checkpoint with the tensor that it fills, or report why it does not fit."""
        lacking: list[_Entry] = []
        for item in found:
            tensor = is_tensor(item.token)
            if item.place.above in self._unfit or item.place in self._unfit:
                self._make(item)
                continue
            entry = _Entry(item, self.given.get(item.place))
            if tensor:
                self._entries.append(entry)
            if (tensor and item.token[0] not in _FILLABLE) or (self._owners and self._is_new(entry)):
                entry.given = None
                if not tensor:
                    self._composed[item.position] = None
                continue
            reason = self._reason(entry, lacking)
            if reason is not None:
                self._mismatch(item, reason)
                self._unfit.add(item.place)
        self._without_place(lacking)

    def _make(self, item: Found) -> None:
        """Record that a tensor will be new, if it is chosen: a tensor in a key may be chosen."""
        if is_tensor(item.token):
            self._entries.append(_Entry(item, None))
        else:
            self._composed[item.position] = None

    def _reason(self, entry: _Entry, lacking: list[_Entry]) -> str | None:
        """Why a tensor does not fit the value in its place, or None; add it to ``lacking`` if it has no place."""
        item, given = entry.item, entry.given
        if given is not None:
            return self._fit(item, given)
        why = self._problems.get(item.place)
        if why is not None:
            return f"cannot be filled: {why}"
        lacking.append(entry)
        if not is_tensor(item.token):
            self._unfit.add(item.place)
        return None

    def _fit(self, item: Found, given: Occurrence) -> str | None:
        """Why a tensor of any kind does not fit, or None."""
        whole = self._expanded.get(item.place)
        if item.token[0] == "expanded":
            self._bases.add(item.position + 1)
            sizes = item.token[1]
            if whole is None:
                return f"expanded to the shape {sizes} in the checkpoint, not in into="
            self._composed[item.position] = whole.value
            mine = list(whole.value.shape)
            return None if mine == sizes else f"shape {sizes} in the checkpoint, {mine} in into=, both expanded"
        if whole is not None and item.position not in self._bases:
            return (
                "expanded in into=, not in the checkpoint: its elements share memory and cannot be filled: give a "
                "contiguous copy of it"
            )
        return self._tensor(item, given) if is_tensor(item.token) else self._whole(item, given)

    def _is_new(self, entry: _Entry) -> bool:
        """Whether a new tensor is made for an object, which then receives it."""
        item, given = entry.item, entry.given
        owner, part = self._owner(self._owners, item.place)
        if owner is None:
            return False
        tie = None if given is None or given.stored is None else given.stored.tie
        new = not owner.is_fillable(part, tie)
        local = None if given is None or given.stored is None else given.stored.local
        if new and owner.kind == "module" and local is not None and local.whole is None:
            self._mismatch(item, "a part of a tensor that its module makes anew: give its state_dict() in its place")
        if owner.kind == "optimizer" and not new:
            assert given is not None  # noqa: S101 - it has a tie
            # A tensor that does not fit is not filled: the optimizer gets a new tensor.
            new = not is_tensor(item.token) or self._fit(item, given) is not None
        whole = self._expanded.get(item.place)
        if not new and whole is not None:
            owner.fills(whole.value, None)
        elif not new and given is not None:
            owner.fills(given.value, tie)
        return new

    def _without_place(self, lacking: Sequence[_Entry]) -> None:
        """Report what ``into`` lacks; a place of a tied tensor does not matter if ``into`` has another."""
        filled = {
            entry.item.token[1]: entry.given
            for entry in self._entries
            if entry.given is not None and entry.item.token[0] == "tensor"
        }
        for entry in lacking:
            item = entry.item
            if is_tensor(item.token) and item.token[1] in filled:
                entry.given = filled[item.token[1]]
            elif self.strict and not self.shared:
                self._mismatches.into_lacks = True
                self._mismatch(item, "missing from into=")
            else:
                self._dropped.add(item.position)
                if not is_tensor(item.token):
                    self._composed[item.position] = None

    def _states(self, left: list[Token], starts: dict[Place, int | None], selection: Selection) -> None:
        """Check that each object has a state of its kind; ``starts`` are the positions of the states in the tokens."""
        ends = ends_of(left) if starts else []
        missing = []
        for place, owner in self._owners.items():
            start = starts.get(place)
            if start is not None:
                whole = self.strict and selection.all and not self.shared
                reason = owner.unlike(left[start : ends[start]], strict=self.strict, whole=whole)
                if reason is not None:
                    self._mismatches.add(start, f"{place}: {reason}")
            # Tensors of a module are reported one by one.
            elif place not in starts and selection.all and owner.kind != "module":
                missing.append(place.name)
                if self.strict:
                    self._mismatches.add(len(left), f"{place}: not in the checkpoint")
        self.missing = tuple(missing)

    def _extra(self, known: set[Place], selection: Selection) -> None:
        """Report what the checkpoint lacks; a tensor that is tied to a filled one does not matter."""
        filled = {entry.given.stored.tie for entry in self._entries if entry.given and entry.given.stored}
        missing = list(self.missing)
        last = self._entries[-1].item.position + 1 if self._entries else 0
        unknown = set(self._unfit)
        for place, item in self.given.items():
            if place in known or place.above in unknown or not selection.takes(place.name):
                continue
            owner, _ = self._owner(self._owners, place)
            if (owner is not None and owner.kind != "module") or (item.stored and item.stored.tie in filled):
                continue
            unknown.add(place)
            missing.append(place.name)
            if self.strict:
                self._mismatches.checkpoint_lacks = True
                self._mismatches.add(last, f"{place}: not in the checkpoint")
        self.missing = tuple(missing)

    def _extra_values(self, tokens: list[Token], keyed: set[Place], selection: Selection) -> None:
        """Report the values that the checkpoint lacks; ``keyed`` are the places under its keys."""
        lacking = [place for place in self.flat.values if place not in keyed and place not in self.given]
        # The checkpoint may have a list where into has a mapping with integer keys.
        there = locate(tokens, self.flat.places, lacking) if lacking else ()
        for place in lacking:
            if place not in there and self._owner(self._owners, place)[0] is None and selection.takes(place.name):
                self.missing = (*self.missing, place.name)
                if self.strict:
                    self._mismatches.add(len(tokens), f"{place}: not in the checkpoint")

    def _again(self, tokens: list[Token], left: list[Token], at: Mapping[int, int] | range) -> None:
        """Report containers at several places of ``into`` if the checkpoint has different values there."""
        again = [pair for pair in self.flat.again if all(self._owner(self._owners, place)[0] is None for place in pair)]
        starts = locate(tokens, self.flat.places, {place for pair in again for place in pair}) if again else {}
        starts = {place: start for place, start in starts.items() if start in at}
        every, wanted = _values(tokens, starts), _values(left, {place: at[start] for place, start in starts.items()})
        # The first chosen place of each container, by its first place.
        chosen: dict[Place, Place] = {}
        for first, further in again:
            for place in (first, further):
                if place not in starts:
                    continue
                known = chosen.setdefault(first, place)
                # The values may differ in parts that were not chosen.
                if every[known] != every[place] and wanted[known] != wanted[place]:
                    why = f"{place}: not the same value as at {known} in the checkpoint, but the same object in into="
                    self._mismatches.add(starts[place], why)

    def _mismatch(self, item: Found, reason: str) -> None:
        self._mismatches.add(item.position, f"{item.place}: {reason}")

    def _tensor(self, item: Found, given: Occurrence) -> str | None:
        """Why a tensor does not fit, or None."""
        if given.stored is None:
            return "a dense tensor in the checkpoint, a sparse or quantised one in into="
        index = item.token[1]
        stored = self.targets.stored
        theirs, logical = stored[index], stored[index].logical
        framework = self.targets.framework
        wants_torch = item.token[0] == "tensor" if framework == "auto" else framework == "torch"
        if wants_torch != _is_torch(given):
            kinds = ("a numpy array", "a torch tensor")
            return f"{kinds[wants_torch]} in the checkpoint, {kinds[not wants_torch]} in into="
        reasons = []
        mine = given.stored
        cast = self.targets.dtypes.get(index)
        name = plain_name(theirs.dtype, logical and logical.dtype)
        for what, there, here in (
            ("dtype", cast or name, plain_name(mine.dtype, mine.logical and mine.logical[0])),
            ("shape", list((logical or theirs).shape), list(mine.logical[1] if mine.logical else mine.shape)),
        ):
            if there != here:
                whence = f"{there} in the checkpoint" if there != cast else f"{there} by dtype="
                reasons.append(f"{what} {whence}, {here} in into=")
                self._mismatches.castable |= cast is None and can_cast(str(there), str(here))
        if wants_torch and logical is not None and logical.dtype.startswith(NUMPY_PREFIX):
            self._mismatches.castable = False
            if cast is not None:
                reasons.append(f"dtype {name} in the checkpoint, which torch does not have: load it without into=")
        if not _is_torch(given) and not given.value.flags.writeable:
            reasons.append("the array in into= is read-only")
        if not _memory.is_nested(self._layout(given)[1]):
            reasons.append("elements of the tensor in into= share memory or interleave (it is expanded)")
        other = self._ties.setdefault(mine.tie, index)
        if other != index and not are_equal(self.reader, stored, other, index):
            reasons.append(
                f"tied in into= to {stored[other].name!r}, a different tensor in the checkpoint: "
                "leave one of them out with exclude="
            )
        return "; ".join(reasons) or None

    def _clashes(self) -> None:
        """Report targets that overlap: reading one would destroy the other. A tie is one target."""
        spans: dict[Any, tuple[str, np.ndarray[Any, Any], Found]] = {}
        for entry in self._entries:
            given = entry.given
            if given is None or given.stored is None or 0 in _memory_of(given).shape:
                continue
            spans.setdefault(given.stored.tie, (*self._layout(given), entry.item))
        first: dict[int, tuple[Found, Found]] = {}
        for item, other in overlapping(spans.values()):
            first.setdefault(item.position, (item, other))
        for item, other in first.values():
            self._mismatch(item, f"overlaps in memory with {other.place} in into=, without a tie")

    def _layout(self, given: Occurrence) -> tuple[str, np.ndarray[Any, Any]]:
        """The layout of a tensor; if it is spread over ranks, the layout of the part that this rank has."""
        tie = given.stored and given.stored.tie
        known = self._layouts.get(tie)
        if known is None:
            known = self._layouts[tie] = layout_of(_memory_of(given))
        return known

    def _whole(self, item: Found, given: Occurrence) -> str | None:
        """Why a composed tensor does not fit, or None."""
        self._composed[item.position] = given.value
        if item.token[0] == "quantized":
            return "a quantised tensor cannot be filled in place: load it without into="
        if given.stored is not None or given.token != canonical(item.token):
            return f"{canonical(item.token)} in the checkpoint, {given.token} in into="
        return None

    def _ask(self, entries: Sequence[_Entry]) -> None:
        targets = self.targets
        asked: set[Any] = set()
        for entry in entries:
            given = entry.given
            if given is None and self.spreads is not None:
                given = self._like_parameter(entry.item)
            if given is None or given.stored is None:
                targets.make([entry.item.token])
                continue
            targets.take(given.value)
            mine = given.stored
            if mine.tie in asked:
                continue
            asked.add(mine.tie)
            self._fill(entry.item.token[1], given)
            if _is_torch(given):
                found = (given.value,) if mine.local is None else (mine.local.whole, mine.local.memory)
                self.filled += [one for one in found if one is not None]

    def _like_parameter(self, item: Found) -> Occurrence | None:
        """For the state of an optimizer: a new tensor that is spread like the parameter that it belongs to.

        None if its shape differs from the parameter's, or the parameter is not spread: the rank has the whole tensor.
        """
        owner, _ = self._owner(self._owners, item.place)
        if owner is None or owner.kind != "optimizer" or item.token[0] != "tensor" or self.targets.framework == "numpy":
            return None
        parameter = owner.parameter_of(item.place)
        describe = self.spreads_of(parameter)
        if parameter is None or describe is None:
            return None
        index = item.token[1]
        stored = self.targets.stored[index]
        if tuple(parameter.shape) != (stored.logical or stored).shape:
            return None
        torch = torch_for("a torch tensor")
        cast = index in self.targets.dtypes
        dtype = self.targets.wanted_dtype(index, torch=True) if cast else self.targets.tensor_dtype(index)
        made = torch.empty_like(parameter, dtype)
        return Occurrence(item.place, made, describe(made), '["tensor",]')  # type: ignore[arg-type]

    def spreads_of(self, value: Any) -> Describe | None:
        """The description of a tensor that is spread over ranks; None for any other."""
        return None if self.spreads is None else self.spreads.describe_of(type(value))

    def _fill(self, index: int, given: Occurrence) -> None:
        """Request the bytes of one tensor."""
        value = _memory_of(given)
        assert given.stored is not None  # noqa: S101 - it is a tensor
        address, local = given.stored.address, given.stored.local
        whole = None if local is None else Whole(local.spread, prod(given.value.shape) * value.itemsize)
        torch = _is_torch(given)
        mover = torch_for("a torch tensor").mover_in(value) if torch and not address else None
        if index in self.targets.dtypes:
            if mover is None and not address and value.nbytes:
                mover = _memory.mover_in(self._layout(given)[1])
            self.targets.ask_cast(index, value, address, mover, whole, torch=torch)
        elif address or mover is not None:
            self.targets.ask(index, value, address, mover, whole)
        else:
            self.targets.ask_strided(index, value, self._layout(given)[1], whole)

    def build(self, tokens: list[Token]) -> Any:
        """Once everything has been read, return ``into`` with the state of ``tokens``, the result of :meth:`match`.

        Raises:
            CheckpointError: an object refused its state.
        """
        if self.filled:
            # Autograd must see the change.
            torch_for("a torch tensor").changed(self.filled)
        framework, values, composed = self.targets.framework, self.targets.values(), self._composed.values()
        builder = WithObjects(framework, values, composed, self.types, tokens, self._regions)
        state = unflatten(builder.tokens, builder)
        for owner, own in builder.states:
            owner.give(own)
        return update(self.into, state, exact=self.strict)


def _values(tokens: list[Token], starts: Mapping[Place, int]) -> dict[Place, list[Any]]:
    """The tokens of each of these values. Their tensors are compared one by one."""
    ends = ends_of(tokens) if starts else []
    return {
        place: [token[0] if is_tensor(token) else token for token in tokens[start : ends[start]]]
        for place, start in starts.items()
    }
