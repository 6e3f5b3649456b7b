"""A flattened state: its structure tokens, and the tensors to store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .key_paths import Place, Places

if TYPE_CHECKING:
    from fastckpt._tensors import memory as _memory
    from fastckpt._tensors.described import Stored, Tensor


class Occurrence(NamedTuple):
    """A tensor, or a value made of tensors, at its place in the state."""

    place: Place
    value: Any
    stored: Stored | None
    token: str


class Flat:
    """A flattened state.

    Attributes:
        tokens: JSON text of each structure token.
        tensors: the tensors for ``_core.save``.
        ties: number and name of each further place of a tensor.
        movers: by tensor number, the movers of tensors without an address.
        keep: everything that addresses point into; for bytes an array over them. Clear it when the addresses are no
            longer used.
        occurrences: with ``observe``, each tensor by its place, tied ones too.
        objects: with ``observe``, objects with ``state_dict`` and ``load_state_dict``, and their places; the state of
            modules and optimizers is flattened, too.
        values: with ``observe``, the places under a key of a mapping that hold neither a tensor nor a mapping with
            items. A list of these values counts as one, and so does a composed value (a registered object). Attributes
            of a mapping do not count.
        problems: with ``observe``, values that could not be flattened, by place.
        again: with ``observe``, containers at several places that a load updates in place: the first place and each
            further one.
        places: with ``observe``, the places of all of these.
        outer: the keys of the outer mapping, and whether each leads to a mapping; None without an outer mapping.
        inner: numbers of the tensors that are parts of another, such as those of a sparse tensor.
        remarks: warnings about types: the name of a type, and the text.
        spreads: by tensor number, the number of the spread of tensors that are spread over ranks.
        wholes: by tensor number, the DTensor whose local tensor is in ``keep``: torch counts the changes of both.
    """

    __slots__ = (
        *("again", "inner", "keep", "movers", "objects", "occurrences", "outer", "places", "problems"),
        *("remarks", "spreads", "tensors", "ties", "tokens", "values", "wholes"),
    )

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.tensors: list[Tensor] = []
        self.ties: list[tuple[int, str]] = []
        self.movers: dict[int, _memory.Mover] = {}
        self.keep: list[Any] = []
        self.inner: set[int] = set()
        self.occurrences: list[Occurrence] = []
        self.objects: list[tuple[Place, Any]] = []
        #: The places in order, without repetition.
        self.values: dict[Place, None] = {}
        self.problems: list[tuple[Place, str]] = []
        self.again: list[tuple[Place, Place]] = []
        self.places = Places()
        self.outer: dict[Any, bool] | None = None
        self.remarks: list[tuple[str, str]] = []
        self.spreads: dict[int, int] = {}
        self.wholes: dict[int, Any] = {}

    def structure(self) -> str:
        """The tokens as one JSON array."""
        return f"[{','.join(self.tokens)}]"

    @property
    def pulled(self) -> int:
        """Bytes of the tensors without an address."""
        return sum(self.tensors[index].capacity for index in self.movers)
