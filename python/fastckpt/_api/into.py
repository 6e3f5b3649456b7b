"""Filling tensors that exist: ``load(path, into=state)`` compared with the checkpoint before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._state.builders import torch_for
from fastckpt._state.flatten import Occurrence, canonical, flatten
from fastckpt._state.unflatten import is_tensor
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.dtypes import plain_name
from fastckpt._text import count
from fastckpt.exceptions import StructureMismatchError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from fastckpt._core import StoredTensor
    from fastckpt._state.key_paths import Place
    from fastckpt._state.select import Found

    from .destinations import Targets

#: More than these are counted, not listed.
_LISTED = 20
_FILLABLE = frozenset({"tensor", "array"})


def _is_torch(item: Occurrence) -> bool:
    return item.token.startswith('["tensor"')


class Into:
    """The tensors of ``into=``, and how they fit."""

    def __init__(self, path: str, into: Any, framework: str) -> None:
        self.path = path
        self.into = into
        self.framework = framework
        # It keeps alive what addresses point into.
        self.flat = flatten(into, operation="load: into", observe=True)
        # What is not a tensor comes from the checkpoint, and so do long bytes.
        self.given = {
            item.place: item
            for item in self.flat.occurrences
            if item.stored is None or item.token.startswith(('["tensor"', '["array"'))
        }
        # The base of an expanded tensor is given in its place.
        self.expanded = {item.place: item for item in self.flat.occurrences if item.token.startswith('["expanded"')}
        self.bases: set[int] = set()
        self.mismatches: list[str] = []
        self.filled: list[Any] = []

    def match(
        self, found: Sequence[Found], kept: Container[int] | None, stored: Sequence[StoredTensor], targets: Targets
    ) -> list[Any]:
        """Match every tensor of the checkpoint, or those at the positions ``kept``, and ask for their bytes.

        Returns:
            What each token of a tensor made of several stands for, in order.

        Raises:
            StructureMismatchError: they do not fit. It lists all differences.
        """
        problems = dict(self.flat.problems)
        composed: list[Any] = []
        fill: list[tuple[Found, Occurrence | None]] = []
        ties: dict[Any, int] = {}
        # Parts of what does not fit are not reported again.
        unfit: set[Place | None] = set()
        outer: Place | None = None
        for item in found:
            if kept is not None and item.position not in kept:
                continue
            tensor = is_tensor(item.token)
            if tensor and item.token[0] not in _FILLABLE:
                fill.append((item, None))
                continue
            if item.place.above in unfit or item.place in unfit:
                continue
            given = self.given.get(item.place)
            if given is None:
                why = problems.get(item.place)
                reason: str | None = "missing from into" if why is None else f"cannot be filled: {why}"
            else:
                reason = self._reason(item, given, stored, ties)
                if tensor:
                    fill.append((item, given))
                else:
                    # What is made of several comes after its parts, which may be expanded.
                    is_part = item.place.above is outer
                    composed.insert(len(composed) - is_part, self.expanded.get(item.place, given).value)
                    outer = outer if is_part else item.place
            if reason is not None:
                self.mismatches.append(f"{item.place}: {reason}")
                unfit.add(item.place)
        self._clashes(fill)
        if kept is None:
            known = {item.place for item in found}
            self.mismatches.extend(
                f"{place}: not in the checkpoint"
                for place in self.given
                if place not in known and place.above not in unfit
            )
        self._raise()
        self._ask(fill, targets)
        return composed

    def _reason(
        self, item: Found, given: Occurrence, stored: Sequence[StoredTensor], ties: dict[Any, int]
    ) -> str | None:
        """Why a tensor of any kind does not fit, or None."""
        whole = self.expanded.get(item.place)
        if item.token[0] == "expanded":
            self.bases.add(item.position + 1)
            sizes = item.token[1]
            if whole is None:
                return f"expanded to the shape {sizes} in the checkpoint, not in into"
            mine = list(whole.value.shape)
            return None if mine == sizes else f"shape {sizes} in the checkpoint, {mine} in into, both expanded"
        if whole is not None and item.position not in self.bases:
            return "expanded in into, not in the checkpoint"
        return self._tensor(item, given, stored, ties) if is_tensor(item.token) else self._composed(item, given)

    def _tensor(
        self, item: Found, given: Occurrence, stored: Sequence[StoredTensor], ties: dict[Any, int]
    ) -> str | None:
        """Why a tensor does not fit, or None."""
        if given.stored is None:
            return "a dense tensor in the checkpoint, a sparse or quantised one in into"
        index = item.token[1]
        theirs, logical = stored[index], stored[index].logical
        wants_torch = item.token[0] == "tensor" if self.framework == "auto" else self.framework == "torch"
        if wants_torch != _is_torch(given):
            kinds = ("a numpy array", "a torch tensor")
            return f"{kinds[wants_torch]} in the checkpoint, {kinds[not wants_torch]} in into"
        reasons = []
        mine = given.stored
        name = plain_name(theirs.dtype, logical and logical.dtype)
        for what, there, here in (
            ("dtype", name, plain_name(mine.dtype, mine.logical and mine.logical[0])),
            ("shape", list((logical or theirs).shape), list(mine.logical[1] if mine.logical else mine.shape)),
        ):
            if there != here:
                reasons.append(f"{what} {there} in the checkpoint, {here} in into")
        if not _is_torch(given) and not given.value.flags.writeable:
            reasons.append("the array in into is read-only")
        if not _memory.is_nested(self._layout(given.value)[1]):
            reasons.append("elements of the tensor in into share memory or interleave")
        if ties.setdefault(mine.tie, index) != index:
            reasons.append(f"tied in into with another tensor than {stored[ties[mine.tie]].name!r} in the checkpoint")
        return "; ".join(reasons) or None

    def _clashes(self, fill: Sequence[tuple[Found, Occurrence | None]]) -> None:
        """Note targets that overlap: what is read into one would destroy the other. A tie is one target."""
        spans: dict[Any, tuple[str, int, int, Place, np.ndarray[Any, Any]]] = {}
        for item, given in fill:
            if given is None or given.stored is None or 0 in given.value.shape:
                continue
            device, memory = self._layout(given.value)
            low, high = _memory.span(memory)
            spans.setdefault(given.stored.tie, (device, low, high, item.place, memory))
        # By device and beginning: those that reach into the next one stay open.
        active: list[tuple[str, int, int, Place, np.ndarray[Any, Any]]] = []
        for each in sorted(spans.values(), key=lambda one: one[:2]):
            device, low, _, place, memory = each
            active = [one for one in active if one[0] == device and one[2] > low]
            for *_, other, theirs in active:
                if _memory.overlap(memory, theirs):
                    self.mismatches.append(f"{place}: overlaps in memory with {other} in into, without a tie")
                    break
            active.append(each)

    @staticmethod
    def _layout(value: Any) -> tuple[str, np.ndarray[Any, Any]]:
        """The device of a tensor or array, and its addresses as an array of opaque elements, not to be read."""
        if isinstance(value, np.ndarray):
            return "cpu", _memory.laid_out(_memory.address_of(value), value.shape, value.strides, value.itemsize)
        size = value.element_size()
        strides = tuple(stride * size for stride in value.stride())
        return str(value.device), _memory.laid_out(value.data_ptr(), tuple(value.shape), strides, size)

    @staticmethod
    def _composed(item: Found, given: Occurrence) -> str | None:
        """Why a tensor made of several does not fit, or None."""
        if item.token[0] == "quantized":
            return "a quantised tensor cannot be filled in place: load it without into"
        if given.stored is not None or given.token != canonical(item.token):
            return f"{canonical(item.token)} in the checkpoint, {given.token} in into"
        return None

    def _raise(self) -> None:
        if not self.mismatches:
            return
        shown = self.mismatches[:_LISTED]
        if len(self.mismatches) > _LISTED:
            shown.append(f"and {len(self.mismatches) - _LISTED} more")
        lines = "\n  ".join(shown)
        error = StructureMismatchError(
            f"load: into does not fit {self.path}, and nothing was changed: {self._remedy()}; "
            f"{count(len(self.mismatches), 'difference')}:\n  {lines}"
        )
        error.differences = tuple(self.mismatches)
        raise error

    def _remedy(self) -> str:
        # Only a root that is neither a container nor an array is a problem at the place of the root.
        if any(place is self.flat.places.root for place, _ in self.flat.problems):
            kind = type(self.into).__qualname__
            if hasattr(self.into, "state_dict"):
                return f"into is a {kind}: pass its state_dict()"
            return f"into is a {kind}: pass a state of containers and tensors"
        return 'give a state with the same tensors, or choose those that it has, as in keys="model.*"'

    def _ask(self, fill: Sequence[tuple[Found, Occurrence | None]], targets: Targets) -> None:
        asked: set[tuple[int, Any]] = set()
        for item, given in fill:
            if given is None or given.stored is None:
                targets.make([item.token])
                continue
            targets.take(given.value)
            index = item.token[1]
            mine = given.stored
            if (index, mine.tie) in asked:
                continue
            asked.add((index, mine.tie))
            mover = torch_for("a torch tensor").mover_in(given.value) if _is_torch(given) and not mine.address else None
            if mine.address or mover is not None:
                targets.ask(index, given.value, mine.address, mover)
            else:
                targets.ask_strided(index, given.value, self._layout(given.value)[1])
            if _is_torch(given):
                self.filled.append(given.value)

    def changed(self) -> None:
        """After the last byte: tell autograd."""
        if self.filled:
            torch_for("a torch tensor").changed(self.filled)
