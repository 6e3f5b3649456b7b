"""The options of loads. A new option is added twice: to the record, and to the TypedDict that type checkers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from fastckpt._state.registry import Registry, Types, check_registry
from fastckpt._state.rename import Renaming, check_rename

from .io import IO, Engine, check_io
from .options import Framework, check_framework
from .selection import Selection, texts_of
from .settings import Settings, as_bool, as_given, option


class LoadOptions(TypedDict, total=False):
    """The options of every load."""

    keys: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    strict: bool
    dtype: Any
    rename: Mapping[str, str] | Callable[[str], str] | None
    framework: Framework
    device: Any
    registry: Registry | None
    io: Engine | IO


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(Settings):
    """How a checkpoint is loaded: checked options. The objects that count matches are made for each load."""

    given = LoadOptions

    keys: tuple[str, ...] | None = option(
        None,
        texts_of("keys"),
        "a glob pattern, or several, over names: the keys on the way to a tensor or value, joined with dots "
        '(``"model.*"``, ``"optimizer.param_groups.0.lr"``; ``*`` matches dots, too). A pattern without ``*``, ``?`` '
        'and ``[`` also chooses everything below that name (``"model"``). Only matching tensors are read, and the '
        "result holds only matching tensors and values, and the containers that lead there; lists close their gaps. "
        "With ``into``, everything else in it stays unchanged, and items chosen from a list keep their positions. "
        "An empty container is a value. A value made of several parts (a sparse tensor, a registered object) comes "
        "whole when it or one of its parts matches; types of other parts need not be registered. A tied tensor has a "
        "name at each of its places, and comes back at those that match.",
    )
    exclude: tuple[str, ...] | None = option(
        None,
        texts_of("exclude"),
        "patterns of values to leave out, even if they match ``keys``. A value made of several parts stays out whole "
        "when it or one of its parts matches.",
    )
    strict: bool = option(
        True,
        as_bool,
        "False allows differences, as ``load_state_dict`` does: tensors that only the checkpoint has are not read and "
        "are not in the result; tensors, values and ends of lists that only ``into`` has stay unchanged; a pattern "
        "that matches nothing is no error, nor is the state of another class of optimizer or scheduler. The report "
        "lists the differences (``missing``, ``unexpected``). Shapes and dtypes must fit in any case.",
    )
    dtype: Any = option(
        None,
        as_given,
        'cast floating-point tensors and arrays while they are read, in pieces: a dtype or its name (``"bfloat16"``); '
        'a dict of patterns over names, such as ``{"*.norm.*": "float32", "*": "bfloat16"}``, where the first match '
        "decides; a function of the :class:`TensorInfo`. None, also in a dict or from a function, is the dtype that "
        "was saved. A single dtype leaves the ``step`` of optimizers unchanged; patterns and functions are obeyed to "
        "the letter. Integers, complex numbers, quantised tensors and wrapper subclasses stay unchanged. With "
        "``into``, the dtype is that of the tensor in it.",
    )
    rename: Mapping[str, str] | Callable[[str], str] | None = option(
        None,
        check_rename,
        "other keys: a dict of new keys by old ones, or a function of the key, such as "
        '``fastckpt.strip_prefix("module.")``. It changes every dict key that is a string, after the names in the file '
        "have been selected, and before the comparison with ``into``.",
    )
    framework: str = option(
        "auto",
        check_framework,
        "``auto`` returns each tensor as it was saved; ``torch`` returns arrays as tensors, too; ``numpy`` returns "
        "tensors as arrays, ``torch.Size`` as tuple, ``torch.dtype`` and ``torch.device`` as str, without torch.",
    )
    device: Any = option(
        None,
        as_given,
        "where new torch tensors go; None for the CPU. A ``torch.device`` or its name, such as ``cuda:0``: all go "
        "there except tensors that were saved from the CPU and have to be there, the states of random generators and "
        'the ``step`` of optimizers. ``"saved"``: each goes to the device that it was saved from. A dict of patterns '
        'over names, such as ``{"model.*": "cuda:0"}``: the first match decides, and a tensor without a match goes to '
        "the CPU; or a function of the :class:`TensorInfo`: these apply to all tensors. Tensors are read into "
        "pinned staging memory and copied from there while more is read; the copies have ended when this returns, for "
        "any stream.",
    )
    registry: Registry | None = option(
        None,
        check_registry,
        "types that this call knows before those of :func:`fastckpt.register_type`, and how others are treated: a "
        ':class:`Registry`, such as ``Registry(undeclared="plain")``.',
    )
    io: IO = option(
        "auto",
        check_io,
        "how bytes move: an engine (``auto``, ``uring``, ``threads``, ``direct``, ``buffered``) or an :class:`IO`, "
        "with threads, mapping of files, verification, a progress bar, a function that gets the report.",
    )

    def __post_init__(self) -> None:
        if self.device is not None and self.framework == "numpy":
            raise ValueError('load: framework="numpy" loads NumPy arrays, which have no device: leave out device=')

    def selection(self) -> Selection:
        """The choice of ``keys`` and ``exclude``."""
        return Selection(self.keys, self.exclude)

    def renaming(self) -> Renaming:
        """The new keys that ``rename`` gives."""
        return Renaming(self.rename)

    def types(self) -> Types:
        """The types known to a load."""
        return Types("load", self.registry, framework=self.framework)
