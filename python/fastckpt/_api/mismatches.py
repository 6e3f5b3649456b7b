"""Where ``into=`` does not fit the checkpoint: the mismatches, and the error that lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._text import count
from fastckpt.exceptions import StructureMismatchError

if TYPE_CHECKING:
    from fastckpt._state.flat import Flat

#: Beyond this number, mismatches are counted, not listed.
_LISTED = 20
#: Number of values that are searched for a hint in an error message.
_SEARCHED = 100_000


class Mismatches:
    """The mismatches found so far.

    Attributes:
        castable: whether another dtype would make a tensor fit.
        into_lacks: whether ``into`` lacks tensors of the checkpoint.
        checkpoint_lacks: whether the checkpoint lacks tensors of ``into``.
    """

    def __init__(self) -> None:
        self.castable = False
        self.into_lacks = False
        self.checkpoint_lacks = False
        self._found: list[tuple[int, str]] = []

    def add(self, position: int, text: str) -> None:
        """Add a mismatch at a position of the structure."""
        self._found.append((position, text))

    def check(self, path: str, into: Any, flat: Flat) -> None:
        """Raise :class:`StructureMismatchError` for ``into``, flattened as ``flat``, if any mismatch was added."""
        if not self._found:
            return
        # The error lists mismatches in the order of the structure.
        found = [text for _, text in sorted(self._found, key=lambda one: one[0])]
        shown = found[:_LISTED]
        if len(found) > _LISTED:
            shown.append(f"and {len(found) - _LISTED} more")
        lines = "\n  ".join(shown)
        error = StructureMismatchError(
            f"load: into= does not fit {path}; nothing was changed: {self._remedy(into, flat)}; "
            f"{count(len(found), 'difference')}:\n  {lines}"
        )
        error.differences = tuple(found)
        raise error

    def _remedy(self, into: Any, flat: Flat) -> str:
        # Only a root that is neither a container nor an array is reported at the root itself.
        if any(place is flat.places.root for place, _ in flat.problems):
            return f"into= is a {type(into).__qualname__}: pass a state of containers, tensors and objects"
        if _holds_fresh_optimizer(into):
            return (
                "an optimizer that has not stepped has no tensors yet: pass the optimizer itself, not its state_dict()"
            )
        return (
            'pass a state with the same keys, tensors and values (one part: into={"model": model} with keys="model"), '
            "or pass strict=False to skip what only one side has"
            + (", or make keys the same with rename=" * (self.into_lacks and self.checkpoint_lacks))
            + (", or cast floating-point tensors with dtype=" * self.castable)
        )


def _holds_fresh_optimizer(into: Any) -> bool:
    """Whether ``into`` holds the state of an optimizer without any tensor."""
    todo, seen = [into], 0
    while todo and seen < _SEARCHED:
        value = todo.pop()
        seen += 1
        if isinstance(value, dict):
            if "param_groups" in value and value.get("state") == {}:
                return True
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)
    return False
