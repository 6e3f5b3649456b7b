"""Tailoring of a saved state: what a save leaves out (``exclude=``), and what it casts (``dtype=``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt._state.builders import torch_for
from fastckpt._state.leave_out import leave_out
from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors.cast_out import Recast, recast_array
from fastckpt._text import count
from fastckpt.exceptions import UnsupportedTypeError

from .placement import Stock, dtypes_of, named_dtypes_of
from .selection import Patterns, Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastckpt._state.flat import Flat
    from fastckpt._state.registry import Types
    from fastckpt._state.unflatten import Token
    from fastckpt._tensors.cast_out import Loss
    from fastckpt._tensors.described import Tensor

#: How many tensors a warning names.
_NAMED = 3


class _Logical(NamedTuple):
    dtype: str
    shape: Sequence[int]


class _Given(NamedTuple):
    """A tensor of a state, as if it had been stored."""

    name: str
    dtype: str
    shape: Sequence[int]
    nbytes: int
    logical: _Logical | None
    shard: int = 0


class Tailor:
    """The values that one save leaves out, and the casts that it makes.

    Args:
        operation: the word that error messages begin with.
        exclude: as :func:`fastckpt.save` accepts it.
        dtype: as :func:`fastckpt.save` accepts it.

    Raises:
        TypeError: ``exclude`` is neither patterns nor None.

    Attributes:
        unused: in a job, the patterns that match nothing on this rank, with their argument.
    """

    def __init__(self, operation: str, exclude: Any, dtype: Any) -> None:
        self._operation = operation
        self._selection = None if exclude is None else Selection(None, exclude, operation)
        self._dtype = dtype
        self.unused: list[str] = []
        self._losses: list[tuple[str, str, Loss]] = []

    @property
    def excluded(self) -> Callable[[str], bool] | None:
        """A test for names that are left out, for :func:`.flatten.flatten`; None if nothing is."""
        selection = self._selection
        return None if selection is None else lambda name: not selection.takes(name)

    def fit(self, flat: Flat, types: Types, *, strict: bool = True) -> None:
        """Change a flattened state; no element is converted yet.

        Raises:
            KeyError: a pattern matches nothing, and ``strict`` is set.
            TypeError, ValueError: ``dtype`` is not a dtype, or nothing is left to save.
            UnsupportedTypeError: a tensor cannot be cast, or a remaining value cannot be saved.
        """
        if self._selection is None and self._dtype is None:
            return
        tokens = json.loads(flat.structure())
        dtypes = {} if self._dtype is None else self._dtypes(flat, tokens, types, strict=strict)
        if self._selection is not None:
            wanted, _ = self._selection.of(tokens, [tensor.name for tensor in flat.tensors], strict=strict)
            self._note_unused(self._selection.exclude)
            try:
                numbers = leave_out(flat, tokens, wanted)
            except ValueError as error:
                raise ValueError(f"{self._operation}: exclude= {error}") from error
            dtypes = {numbers[index]: name for index, name in dtypes.items() if index in numbers}
        for index, name in dtypes.items():
            self._cast(flat, index, name)
        # These may refer to functions of the program, which must not be kept until a background save ends.
        self._selection = self._dtype = None

    def _note_unused(self, patterns: Patterns | None) -> None:
        if patterns is not None:
            self.unused += [f"{patterns.argument}: {text!r}" for text in patterns.unused()]

    def _dtypes(self, flat: Flat, tokens: list[Token], types: Types, *, strict: bool) -> dict[int, str]:
        given: list[Any] = [_given(tensor) for tensor in flat.tensors]
        wanted = [token for token in tokens if type(token) is list and token[0] in {"tensor", "array"}]
        stock = Stock(tokens, given, [""], wanted, types, self._operation)
        dtypes = dtypes_of(stock, self._dtype, strict=strict)
        if not isinstance(self._dtype, Mapping):
            return dtypes
        patterns = Patterns("dtype", self._dtype)
        for _, name in stock.names():
            patterns.first(name)
        self._note_unused(patterns)
        return dtypes | named_dtypes_of(stock, self._dtype, flat.inner)

    def _cast(self, flat: Flat, index: int, name: str) -> None:
        value, tensor = flat.keep[index], flat.tensors[index]
        found: Recast | None = None
        try:
            if not isinstance(value, np.ndarray):
                found = torch_for("a torch tensor").recast(value, name)
            elif (dtype := _numpy.dtype_of_torch(name)) is not None and dtype.kind == "f":
                found = recast_array(value, dtype)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise UnsupportedTypeError(
                f"{self._operation}: tensor {tensor.name!r} cannot be cast to {name} ({error}): leave it out of dtype="
            ) from error
        if found is None:
            lacking = "numpy" if isinstance(value, np.ndarray) else "this version of torch"
            raise UnsupportedTypeError(
                f"{self._operation}: tensor {tensor.name!r} cannot be cast to {name}, which {lacking} does not have: "
                "give another dtype="
            )
        flat.tensors[index] = found.of(tensor, value.size if isinstance(value, np.ndarray) else value.numel())
        if value.nbytes:
            flat.movers[index] = found.mover
        self._losses.append((tensor.name, name, found.loss))

    @property
    def warnings(self) -> list[str]:
        """Warnings about casts, for the report; complete once everything is written."""
        names: dict[str, list[str]] = {}
        for tensor, dtype, loss in self._losses:
            if loss.happened():
                names.setdefault(dtype, []).append(tensor)
        return [
            f"{count(len(found), 'tensor')} cast to {dtype} had numbers outside its range, which are stored as inf, "
            f"nan or its nearest number: "
            f"{', '.join(map(repr, found[:_NAMED]))}{', ...' if len(found) > _NAMED else ''}; give them another dtype="
            for dtype, found in names.items()
        ]


def _given(tensor: Tensor) -> _Given:
    logical = None if tensor.logical is None else _Logical(*tensor.logical)
    return _Given(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.capacity, logical)
