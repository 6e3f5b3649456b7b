"""Objects with a ``state_dict`` in ``into=``: modules, optimizers, schedulers, and the like."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from fastckpt._state.builders import StateBuilder, torch_for
from fastckpt._state.built_in import ATTRIBUTED
from fastckpt._state.by_type import torch_kind
from fastckpt._state.flatten import flatten
from fastckpt._state.in_place import HOLE
from fastckpt._state.unflatten import unflatten
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastckpt._state.key_paths import Place
    from fastckpt._state.registry import Types
    from fastckpt._state.unflatten import Token
    from fastckpt._tensors.spreads import Spreads

#: The placeholder for an item of a list that was not chosen, and the tensor number in the token of the first object
#: (lower by 1 for each further object). No checkpoint has these tensor numbers.
HOLE_TOKEN: list[Any] = ["tensor", -1]
_NUMBER = -2


#: Keys that torch's schedulers add to the groups of an optimizer.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})


def _is_of_the_class(key: str) -> bool:
    """Whether a key of a state identifies its class."""
    return not key.startswith("_") and key not in _OF_SCHEDULERS


class Owner:
    """An object in ``into``, and the facts about its state.

    Attributes:
        place: the place of the object.
        value: the object.
        kind: ``module``, ``optimizer``, ``scheduler`` or None.
    """

    def __init__(self, place: Place, value: Any, spreads: Spreads | None = None) -> None:
        self.place = place
        self.value = value
        self.kind = torch_kind(value)
        #: By the id of each tensor that was filled in place: the module's own Parameter or buffer; None if it has none.
        self._filled: dict[int, Any] = {}
        #: The Parameters and buffers of a module by their ties.
        self._own: dict[Any, Any] = {}
        if self.kind == "module":
            own = torch_for("a module").own_tensors(value)
            tensors = flatten(own, operation="load: into", observe=True, spreads=spreads)
            self._own = {item.stored.tie: item.value for item in tensors.occurrences if item.stored is not None}

    def describe(self) -> str:
        """The class and the place of the object, for a message."""
        return f"the {type(self.value).__qualname__} at {self.place}"

    def is_fillable(self, entry: Place, tie: Any | None) -> bool:
        """Whether a tensor in this entry of the state is a part of the object, which must fit and can be filled.

        Tensors that a module makes on each request (its extra state, a packed quantised weight) are not fillable:
        filling them would change nothing.
        """
        if self.kind == "optimizer":
            return tie is not None
        if self.kind != "module" or entry.step.endswith(f"{torch_for('a module').EXTRA_STATE}']"):
            return False
        return tie is None or tie in self._own

    def parameter_of(self, place: Place) -> Any | None:
        """The parameter of an optimizer whose state has a tensor at ``place``; None if it is unknown."""
        entry = place.above
        above = None if entry is None else entry.above
        if entry is None or above is None or above.above is not self.place or above.step != "['state']":
            return None
        parameters = [one for group in self.value.param_groups for one in group["params"]]
        number = entry.step[1:-1]
        return parameters[int(number)] if number.isdecimal() and int(number) < len(parameters) else None

    def unlike(self, tokens: Sequence[Token], *, strict: bool, whole: bool) -> str | None:
        """Why a state of these tokens does not fit this object, or None; called before anything is changed.

        Args:
            tokens: the state.
            strict: whether an optimizer or a scheduler refuses the state of another class.
            whole: whether it must be exactly the state of a module. Tensors are compared one by one elsewhere.
        """
        if self.kind is None:
            return None
        state = unflatten(tokens, _Outline("numpy"))
        if not isinstance(state, dict):
            return f"a {type(state).__qualname__} in the checkpoint, {self._article()} in into="
        if self.kind == "optimizer":
            return self._unlike_optimizer(state, strict=strict)
        if self.kind == "scheduler":
            return self._of_another_class(state, self.value.state_dict()) if strict else None
        if whole:
            torch = torch_for("a module")
            extra = torch.extra_states(self.value)
            stored = {key for key in state if isinstance(key, str) and key.endswith(torch.EXTRA_STATE)}
            if extra is not None and extra != stored:
                return f"extra state {sorted(stored)} in the checkpoint, {sorted(extra)} in into="
        return None

    def _unlike_optimizer(self, state: dict[Any, Any], *, strict: bool) -> str | None:
        groups = state.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return f"not an optimizer state in the checkpoint, {self._article()} in into="
        if not isinstance(state.get("state"), dict):
            return "part of an optimizer state, which can only be loaded whole"
        theirs = [len(group.get("params", ())) for group in groups]
        mine = [len(group["params"]) for group in self.value.param_groups]
        if theirs != mine:
            return f"groups of {theirs} parameters in the checkpoint, of {mine} in into="
        others = (self._of_another_class(*pair) for pair in zip(groups, self.value.param_groups, strict=True))
        return next(filter(None, others), None) if strict else None

    def _of_another_class(self, theirs: dict[Any, Any], mine: dict[Any, Any]) -> str | None:
        """Why ``theirs`` is not a state of this object's class, or None.

        torch accepts it silently, or raises after tensors have been filled. Two classes each have public keys that the
        other lacks; of two versions of one class, only one version has such keys.
        """
        theirs_only, mine_only = (
            sorted(key for key in there.keys() - here.keys() if isinstance(key, str) and _is_of_the_class(key))
            for there, here in ((theirs, mine), (mine, theirs))
        )
        if not (theirs_only and mine_only):
            return None
        return (
            f"the state of another class in the checkpoint, with {', '.join(theirs_only)}; "
            f"{self._article()} of class {type(self.value).__qualname__} in into=, with {', '.join(mine_only)}"
        )

    def _article(self) -> str:
        return "an optimizer" if self.kind == "optimizer" else f"a {self.kind}"

    def fills(self, value: Any, tie: Any | None) -> None:
        """Record that ``value``, from the state of a module, was filled in place."""
        self._filled[id(value)] = None if tie is None else self._own.get(tie)

    def give(self, state: Any) -> None:
        """Give the object its state; a module gets it only if filling its tensors was not enough.

        Raises:
            CheckpointError: its ``load_state_dict`` raised.
        """
        try:
            if self.kind != "module":
                self.value.load_state_dict(state)
                return
            if all(id(value) in self._filled for value in state.values()) and not torch_for("a module").reacts(
                self.value
            ):
                return
            # Filled tensors are passed as themselves: hooks may inspect them, and torch skips copies onto itself.
            whole = OrderedDict(
                (key, one) for key, value in state.items() if (one := self._filled.get(id(value), value)) is not None
            )
            # The attributes of the state hold the saved versions of the modules.
            vars(whole).update(getattr(state, "__dict__", {}))
            self.value.load_state_dict(whole, strict=False)
        except Exception as error:
            raise CheckpointError(
                f"load: into=: load_state_dict of {self.describe()} raised {error!r}: tensors in into= are already "
                "filled, and objects before this one have their new states"
            ) from error


class _Unmade:
    """A placeholder for a value that is not made. It can be a key."""


class _Outline(StateBuilder):
    """Makes a state with placeholders for its tensors and registered objects."""

    def tensor(self, _: list[Any]) -> Any:
        return _Unmade()

    def composed(self, _: list[Any], __: list[Any]) -> Any:
        return _Unmade()

    def typed(self, _: str, __: Any, ___: Any) -> Any:
        return _Unmade()

    def zone(self, _: Any) -> None:
        return None


class _Trial(_Outline):
    """Like :class:`_Outline`, with values of classes that are stored by their structure."""

    def typed(self, name: str, value: Any, attributes: Any) -> Any:
        codec = self.types.by_name(name)
        # In a subclass of deque or bytes, the value may be a registered type or a tensor.
        if codec is None or not codec.shallow or type(value) is _Unmade:
            return _Unmade()
        return StateBuilder.typed(self, name, value, attributes)


def try_classes(tokens: Sequence[Token], framework: str, types: Types) -> None:
    """Try to build the parts, except tensors, of values of this program's classes, before anything is changed.

    Args:
        tokens: the state.
        framework: the framework of the load. It decides the decoded form of dtypes, which may be keys.
        types: the types that are known.

    Raises:
        CheckpointError: a class differs from the saved one.
    """
    if any(type(token) is list and token[0] == "type" and token[1] != ATTRIBUTED for token in tokens):
        unflatten(tokens, _Trial(framework, types=types))


class WithObjects(StateBuilder):
    """Makes the state, with objects in their places, and collects the state of each.

    Args:
        framework: see :class:`.StateBuilder`.
        tensors: see :class:`.StateBuilder`.
        composed: see :class:`.StateBuilder`.
        types: see :class:`.StateBuilder`.
        tokens: all tokens.
        regions: for each object in order: the first token of its state, one past its last token, and the object.
    """

    def __init__(
        self,
        framework: str,
        tensors: Iterable[Any],
        composed: Iterable[Any],
        types: Types,
        tokens: Sequence[Token],
        regions: Sequence[tuple[int, int, Owner]],
    ) -> None:
        super().__init__(framework, tensors, composed, types=types)
        self.states: list[tuple[Owner, Any]] = []
        self._inside = [(tokens[start:end], owner) for start, end, owner in regions]
        #: The structure without the objects' states: a token for each object.
        self.tokens: list[Token] = []
        at = 0
        for number, (start, end, _) in enumerate(regions):
            self.tokens += [*tokens[at:start], ["tensor", _NUMBER - number]]
            at = end
        self.tokens += tokens[at:]

    def tensor(self, token: list[Any]) -> Any:
        if token[1] >= 0:
            return super().tensor(token)
        if token is HOLE_TOKEN:
            return HOLE
        tokens, owner = self._inside[_NUMBER - token[1]]
        # This builder takes its tensors from the same iterator, in the order of the whole structure.
        builder = StateBuilder(self.framework, self._tensors, self._composed, types=self.types)
        self.states.append((owner, unflatten(tokens, builder)))
        return owner.value
