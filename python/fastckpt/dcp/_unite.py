"""The tables of all ranks as one: what is stored under which name, who has which boxes of it, and the structure."""

from __future__ import annotations

import itertools
import json
from json.encoder import encode_basestring_ascii as quote
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._state.flatten import Flat, canonical
from fastckpt._state.groups import split_model
from fastckpt._state.key_paths import RESERVED, unique
from fastckpt._tensors.described import Tensor

from ._take import shown
from ._values import Box, renumbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._take import Path, Taken
    from ._values import Memory


class Holding(NamedTuple):
    """A rank that has a box of a tensor, and the number of the mesh by which it has it: 0 without a mesh.

    A box of two meshes is of two tensors that have one name, unless their bytes are equal.
    """

    rank: int
    box: Box
    mesh: int


class _Stored:
    """A tensor, and who has which boxes of it."""

    __slots__ = ("about", "boxes", "have", "number")

    def __init__(self, number: int, about: list[Any]) -> None:
        self.number = number
        #: Stored dtype and shape, logical dtype and shape, the sizes that the user sees.
        self.about = about
        self.boxes: list[Holding] = []
        self.have: set[tuple[int, Box]] = set()


class About(NamedTuple):
    """An entry that is one tensor: stored dtype, logical dtype and shape, or None, and the sizes that the user sees."""

    dtype: str
    logical: tuple[str, tuple[int, ...]] | None
    sizes: tuple[int, ...]
    requires_grad: bool


class United:
    """All of a save but the bytes.

    Attributes:
        entries: by dotted keys, what leads to each entry, and what it is if it is one tensor; where it was united.
        tensors: name, dtype, stored shape, and logical dtype and shape or None, of each.
        boxes: for each tensor, who has which boxes of it, in order.
        numbers: the number of each tensor by the name that the ranks gave it.
        structure: the structure, JSON.
        prefix: what the names of the model's tensors begin with.
        page: bytes of the largest memory page that a rank's kernel has.
    """

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Path, About | None]] = {}
        self.tensors: list[tuple[str, str, tuple[int, ...], tuple[str, tuple[int, ...]] | None]] = []
        self.boxes: list[list[Holding]] = []
        self.numbers: dict[str, int] = {}
        self.structure = ""
        self.prefix = ""
        self.page = 0


def unite(texts: Sequence[str], model_key: str | None) -> United:
    """Make one of the tables of all ranks, in the order of the ranks.

    Raises:
        ValueError: they do not fit together, or ``model_key`` leads to no mapping; the message names key and ranks.
    """
    tables = [json.loads(text) for text in texts]
    _check_numbers(tables)
    ties = _ties(tables)
    entries: dict[str, tuple[tuple[int, int], Path, list[Any], list[_Stored], int]] = {}
    stored: dict[str, _Stored] = {}
    first = {table["order"]: rank for rank, table in reversed(list(enumerate(tables)))}
    numbers: dict[tuple[int, ...], int] = {(): 0}
    for table in tables:
        table["meshes"] = [numbers.setdefault(tuple(ranks), len(numbers)) for ranks in table["meshes"]]
    for rank, table in enumerate(tables):
        meshes = table["meshes"]
        for key, place, path, tokens, tensors in table["entries"]:
            held = [_hold(stored, (rank, meshes[mesh]), ties.get(key, key) if name == key else name, about, boxes)
                    for name, *about, boxes, mesh in tensors]  # fmt: skip
            where = (first[table["order"]], place)
            known = entries.get(key)
            if known is None:
                entries[key] = (where, tuple(path), tokens, held, rank)
            elif known[2] != tokens or [one.number for one in known[3]] != [one.number for one in held]:
                raise ValueError(
                    f"dcp.save: {key!r} is another value on rank {rank} than on rank {known[4]}, and the plan has both"
                )
            else:
                entries[key] = (min(where, known[0]), *known[1:])
    for rank, table in enumerate(tables):
        for own, *about, boxes, mesh in table["copies"]:
            name = ties.get(own, own)
            if name in stored:
                _hold(stored, (rank, table["meshes"][mesh]), name, about, boxes)
    united = _finish(entries, stored, ties, model_key)
    united.page = max(table["page"] for table in tables)
    return united


def _hold(
    stored: dict[str, _Stored], of: tuple[int, int], name: str, about: list[Any], boxes: Sequence[Any]
) -> _Stored:
    """The tensor ``name``, of which a rank, by a mesh, has more boxes."""
    rank, mesh = of
    known = stored.get(name)
    if known is None:
        known = stored[name] = _Stored(len(stored), about)
    elif known.about != about:
        raise ValueError(
            f"dcp.save: rank {rank} has {name!r} with another dtype or shape ({about[0]} {list(about[3])}) than rank "
            f"{known.boxes[0][0]} ({known.about[0]} {list(known.about[3])})"
        )
    for bounds in boxes:
        box = tuple((start, stop) for start, stop in bounds)
        if (rank, box) not in known.have:
            known.have.add((rank, box))
            known.boxes.append(Holding(rank, box, mesh))
    return known


def _ties(tables: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The key under which each tied tensor is stored."""
    ties: dict[str, str] = {}
    apart: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for key, *_ in table["entries"]:
            if key not in table["ties"]:
                apart.setdefault(key, rank)
        for key, target in table["ties"].items():
            if ties.setdefault(key, target) != target:
                raise ValueError(
                    f"dcp.save: {key!r} is tied to {target!r} on rank {rank}, and to {ties[key]!r} on another"
                )
    for key, target in ties.items():
        if key in apart:
            raise ValueError(
                f"dcp.save: {key!r} is the same tensor as {target!r} on some ranks, and not on rank {apart[key]}: "
                "tie them on all ranks, or on none"
            )
    return ties


def _check_numbers(tables: Sequence[dict[str, Any]]) -> None:
    """Refuse optimizer states whose numbers of parameters stand for other parameters on other ranks."""
    for outer in {outer: None for table in tables for outer in table["ids"]}:
        digests = [table["ids"].get(outer) for table in tables]
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"dcp.save: the parameters of the optimizer state {outer!r} are numbers, which stand for "
                f"other parameters on the ranks {shown(others)} than on rank 0: give the state that "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns, which has their names"
            )


def _finish(entries: dict[str, Any], stored: dict[str, _Stored], ties: dict[str, str], model_key: str | None) -> United:
    ordered = sorted(entries.items(), key=lambda one: one[1][0])
    united = United()
    flat = Flat()
    # Tensors are numbered in the order of the structure.
    numbers: dict[int, int] = {}
    names = {one.number: name for name, one in stored.items()}
    taken = dict(RESERVED)
    root: dict[Any, Any] = {}
    for key, (_, path, tokens, held, _) in ordered:
        mine = []
        for one in held:
            if one.number not in numbers:
                numbers[one.number] = len(numbers)
                about = one.about
                logical = None if about[2] is None else (about[2][0], tuple(about[2][1]))
                name = unique(taken, names[one.number].encode("utf-8", "replace").decode())
                flat.tensors.append(Tensor(name, about[0], tuple(about[1]), 0, 0, logical))
                united.boxes.append(one.boxes)
                united.numbers[names[one.number]] = numbers[one.number]
            elif len(held) == 1:
                flat.ties.append((numbers[one.number], key))
            mine.append(numbers[one.number])
        united.entries[key] = (path, _about(tokens, held))
        _insert(root, path, _Tokens(renumbered(tokens, mine)), key)
    _restore_numbers(root)
    flat.outer = {key: isinstance(value, dict) for key, value in root.items()}
    united.numbers.update({key: united.numbers[target] for key, target in ties.items() if target in united.numbers})
    united.prefix = split_model("dcp.save", flat, model_key)
    united.tensors = [(tensor.name, tensor.dtype, tuple(tensor.shape), _logical(tensor)) for tensor in flat.tensors]
    out: list[str] = []
    _emit(root, out)
    united.structure = f"[{','.join(out)}]"
    return united


def _logical(tensor: Tensor) -> tuple[str, tuple[int, ...]] | None:
    return None if tensor.logical is None else (tensor.logical[0], tuple(tensor.logical[1]))


def _about(tokens: list[Any], held: Sequence[_Stored]) -> About | None:
    """What an entry is, if it is one tensor."""
    if len(tokens) != 1 or not held or tokens[0][0] != "tensor":
        return None
    dtype, _, logical, sizes = held[0].about
    return About(dtype, logical, tuple(sizes), requires_grad="g" in "".join(tokens[0][2:3]))


class _Positions(dict[int, Any]):
    """A list, by positions, as long as not all of them are known."""


class _Tokens:
    """An entry in the structure."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: list[Any]) -> None:
        self.tokens = tokens

    def integers(self) -> list[int] | None:
        """The members, if it is a list of integers."""
        head, *rest = self.tokens
        is_list = type(head) is list and head[0] == "list"
        return rest if is_list and all(type(token) is int for token in rest) else None


def _insert(root: dict[Any, Any], path: Path, leaf: _Tokens, key: str) -> None:
    """Put an entry where its keys lead."""
    node: Any = root
    for step, following in itertools.pairwise(path):
        node = node.setdefault(step, _Positions() if type(following) is int else {})
        if type(node) is not (_Positions if type(following) is int else dict):
            break
    if not isinstance(node, dict) or path[-1] in node:
        raise ValueError(
            f"dcp.save: {key!r} is an entry on one rank, and leads to others on another: give the ranks' states "
            "different keys"
        )
    node[path[-1]] = leaf


def _restore_numbers(root: dict[Any, Any]) -> None:
    """Give optimizer states the numbers of parameters back that torch made strings, and the empty state that it lost.

    Else ``load_state_dict`` of an optimizer would find no state for its parameters, and say nothing.
    """
    todo: list[dict[Any, Any]] = [root]
    while todo:
        node = todo.pop()
        todo.extend(value for value in node.values() if isinstance(value, dict))
        groups = node.get("param_groups")
        if not isinstance(groups, _Positions):
            continue
        every = [value.get("params") if isinstance(value, dict) else None for value in groups.values()]
        params = [params.integers() if isinstance(params, _Tokens) else None for params in every]
        if any(params is None for params in params):
            continue
        ids = {str(number): number for numbers in params for number in numbers or ()}
        state = node.setdefault("state", {})
        if type(state) is dict:
            items = [(ids.get(key, key), value) for key, value in state.items()]
            state.clear()
            state.update(items)
            # An optimizer's own order.
            node["param_groups"] = node.pop("param_groups")


def _emit(node: Any, out: list[str]) -> None:
    """The tokens of a value."""
    if isinstance(node, _Tokens):
        out.extend(map(canonical, node.tokens))
    elif isinstance(node, _Positions):
        size = max(node) + 1
        out.append(f'["list",{size}]')
        for position in range(size):
            # What torch leaves out of a list is an empty mapping.
            _emit(node.get(position, {}), out)
    else:
        out.append(f'["dict",{len(node)}]')
        for key, value in node.items():
            out.append(quote(key) if type(key) is str else str(key))
            _emit(value, out)


def memories_of(taken: Taken, united: United) -> dict[int, list[Memory]]:
    """A rank's memory of each tensor that it has boxes of, by number: each box once."""
    found: dict[int, dict[Any, Memory]] = {}
    for name, memories in taken.memories().items():
        # What a planner has left out of all plans is not saved.
        for memory in memories if name in united.numbers else ():
            found.setdefault(united.numbers[name], {}).setdefault(memory.box, memory)
    return {number: list(boxes.values()) for number, boxes in found.items()}
