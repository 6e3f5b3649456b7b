"""Unites the different tables of all ranks: of pipeline and expert stages, and of separate meshes.

Structures are walked together. Mappings are united by their keys, in the order of the ranks; so are the lists of names
under ``param_groups.*.params``, as ``get_optimizer_state_dict`` makes them. Everything else must be equal on all ranks
that have it. Tensors in one place are one tensor: their dtype and global shape must be equal, and their spreads add up.
"""

from __future__ import annotations

import json
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._state.collector import paused
from fastckpt._state.flat import Flat
from fastckpt._state.key_paths import KeyText, unique
from fastckpt._state.select import MAPPINGS, ends_of
from fastckpt._state.unflatten import arity, is_tensor
from fastckpt._tensors.described import THROUGH, Tensor
from fastckpt._tensors.spread import Spread

from .describe import outer_of
from .differences import Differences, Path, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .table import Kind, Table

_SEQUENCES = frozenset({"list", "tuple", "set", "fset"})
_EQUAL = "make values equal on all ranks that have them"
_TENSORS = (
    "make plain tensors equal on all ranks that have them (BatchNorm's statistics: use SyncBatchNorm, or broadcast "
    "them from one rank before the save; pipeline stages: give separate names, for optimizers with torch's "
    "get_optimizer_state_dict)"
)
_DTENSORS = (
    "give DTensors and Parts the same dtype and global shape on all ranks, even if they are empty there (for uneven "
    "parts, from_local needs shape= and stride=)"
)
_PER_RANK = "pass values that belong to one rank as per_rank= of fastckpt.distributed.save"


class Variant(NamedTuple):
    """Ranks with equal main tables: their spreads, by the numbers in the table, with the ranks of each."""

    table: Table
    spreads: list[tuple[list[Spread], list[int]]]

    @property
    def ranks(self) -> list[int]:
        """All of these ranks."""
        return sorted(rank for _, ranks in self.spreads for rank in ranks)


class Holder(NamedTuple):
    """The parts of a tensor that ``ranks`` hold: those that ``spread`` describes, or with None the whole tensor.

    ``before`` is the number of earlier memories of this kind, of the same tensor.
    """

    spread: Spread | None
    before: int
    ranks: Sequence[int]


class United(NamedTuple):
    """The union.

    Attributes:
        flat: names, dtypes, global shapes and ties, without memory, for :func:`.groups.split_model`.
        structure: the tokens, JSON text.
        lists: for each tensor, the number of its list of parts.
        spread_lists: by the number of a list, the numbers of its spreads.
        spreads: the spreads.
        numbers: for each variant and each of its tensors, the numbers of the tensor in the union.
    """

    flat: Flat
    structure: str
    lists: list[int]
    spread_lists: list[tuple[int, ...]]
    spreads: list[Spread]
    numbers: list[list[list[int]]]


class SpreadLists:
    """The parts of tensors that ranks hold, as lists of spreads; equal lists are stored once.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.spreads: list[Spread] = []
        self.lists: list[tuple[int, ...]] = []
        self._spreads: dict[Spread, int] = {}
        self._lists: dict[tuple[int, ...], int] = {}
        #: By the number of a list: a spread, and the ranks in its mesh that do not have the tensor.
        self.without: dict[int, tuple[Spread, list[int]]] = {}

    def add(self, holders: Iterable[Holder]) -> int:
        """The number of the list of these parts."""
        whole: dict[int, set[int]] = {}
        said: dict[tuple[Spread, int], set[int]] = {}
        boxed: list[Spread] = []
        for spread, before, ranks in holders:
            if spread is None:
                whole.setdefault(before, set()).update(ranks)
            elif spread.boxes is not None:
                boxed.append(spread)
            else:
                said.setdefault((spread, before), set()).update(ranks)
        for before, ranks_ in whole.items():
            said.setdefault((Spread(tuple(sorted(ranks_))), before), ranks_)
        numbers = []
        missing = None
        for (spread, _), sayers in said.items():
            absent = [rank for rank in spread.ranks if rank not in sayers]
            if absent and missing is None:
                missing = (spread, sorted(absent))
            numbers.append(self._number(spread))
        if boxed:
            # Equal boxes of several ranks in one spread are copies; the boxes of one rank keep their order.
            pairs = [pair for one in boxed for pair in zip(one.ranks, one.boxes or (), strict=True)]
            pairs.sort(key=itemgetter(0))
            numbers.append(self._number(Spread(tuple(rank for rank, _ in pairs), boxes=tuple(box for _, box in pairs))))
        key = tuple(numbers)
        known = self._lists.get(key)
        if known is None or missing is not None:
            known = len(self.lists)
            self.lists.append(key)
            if missing is None:
                self._lists[key] = known
            else:
                self.without[known] = missing
        return known

    def _number(self, spread: Spread) -> int:
        number = self._spreads.get(spread)
        if number is None:
            number = self._spreads[spread] = len(self.spreads)
            self.spreads.append(spread)
        return number


def holders_of(variant: Variant, number: int) -> list[Holder]:
    """The parts that the ranks of a variant hold of a tensor whose spread has this number."""
    if not number:
        return [Holder(None, 0, variant.ranks)]
    return [Holder(spreads[number - 1], 0, ranks) for spreads, ranks in variant.spreads]


def unite(variants: Sequence[Variant], size: int, *, operation: str = "save") -> United:
    """The union of different main tables.

    Args:
        variants: the variants, in the order of their first ranks.
        size: the number of ranks.
        operation: the word that error messages begin with.

    Raises:
        ValueError: values of several ranks differ. All differences are in the message.
    """
    with paused():
        union = _Union(variants, size, operation)
        return union.finish(union.walk([json.loads(variant.table.structure) for variant in variants]))


class _Union:
    def __init__(self, variants: Sequence[Variant], size: int, operation: str) -> None:
        self.variants = variants
        self.tables = [variant.table for variant in variants]
        self.ranks = [variant.ranks for variant in variants]
        self.differences = Differences(operation)
        self.lists = SpreadLists(size)
        self.numbers: list[list[list[int]]] = [[[] for _ in table.names] for table in self.tables]
        #: The origins of each tensor of the union, by variant.
        self.sources: list[dict[int, int]] = []
        self.paths: list[Path] = []
        self.flat = Flat()
        self._taken: dict[str, int] = {}
        #: The kinds of all variants, without their spreads.
        kinds: dict[tuple[Any, ...], int] = {}
        self._kinds = [
            [kinds.setdefault(table.kinds[kind][:3], len(kinds)) for kind in table.kind.tolist()]
            for table in self.tables
        ]

    # The walk.

    def walk(self, tokens: list[list[Any]]) -> list[Any]:
        """The tokens of the union of structures."""
        self.tokens = tokens
        self.ends = [ends_of(each) for each in tokens]
        #: For tensors with several places: the name of each place, by its position.
        self.names = [_names_of_places(table, each) for table, each in zip(self.tables, tokens, strict=True)]
        self.out: list[Any] = []
        root = Path(None, THROUGH)
        everyone = [(variant, 0) for variant in range(len(tokens))]
        # The places and known tokens that remain to be emitted, the next one last.
        todo: list[tuple[Path, list[tuple[int, int]]] | list[Any]] = [(root, everyone)]
        while todo:
            item = todo.pop()
            if type(item) is list:
                self.out += item
                continue
            path, places = item
            if len(places) == 1:
                self.copy(path, *places[0])
            else:
                self.merge(path, places, todo)
        return self.out

    def merge(self, path: Path, places: list[tuple[int, int]], todo: list[Any]) -> None:
        """Emit the tokens at ``places``; their children are put on ``todo``."""
        variant, position = places[0]
        first = self.tokens[variant][position]
        tag = first[0] if type(first) is list else None
        names = tag == "list" and self.are_names(path, places)
        for other, at in places[1:]:
            token = self.tokens[other][at]
            if not (self.alike(first, token) or (names and type(token) is list and token[0] == "list")):
                self.differ(path, places[0], (other, at))
                return
        if tag is None:
            self.out.append(first)
        elif is_tensor(first):
            self.tensor(path, places)
        elif tag in MAPPINGS:
            self.mapping(path, places, todo)
        elif names:
            self.unite_names(places)
        else:
            self.out.append(first)
            below = []
            at_each = [(which, start + 1) for which, start in places]
            for index in range(arity(first)):
                below.append((Path(path, index if tag in _SEQUENCES else THROUGH), at_each))
                at_each = [(which, self.ends[which][start]) for which, start in at_each]
            todo.extend(reversed(below))

    @staticmethod
    def alike(first: Any, token: Any) -> bool:
        """Whether two tokens can be united, apart from their contents."""
        if type(first) is not type(token):
            return False
        if type(first) is not list:
            # Compare their texts, because 0.0 equals -0.0.
            return bool(first == token and (first or repr(first) == repr(token)))
        if first[0] != token[0] or is_tensor(first) != is_tensor(token):
            return False
        return is_tensor(first) or first[0] in MAPPINGS or first == token

    def mapping(self, path: Path, places: list[tuple[int, int]], todo: list[Any]) -> None:
        """Unite mappings by their keys."""
        variant, position = places[0]
        tag = self.tokens[variant][position][0]
        below: dict[Any, tuple[Any, list[tuple[int, int]]]] = {}
        factories = []
        for which, start in places:
            tokens, ends = self.tokens[which], self.ends[which]
            at = start + 1
            if tag == "ddict":
                factories.append(tokens[at])
                at += 1
            for _ in range(tokens[start][1]):
                value = ends[at]
                key: Any = tokens[at]
                if type(key) is not str:
                    shown = json.dumps(tokens[at:value], separators=(",", ":"))
                    key = KeyText("", shown[1:-1])
                    same: Any = (shown,)
                else:
                    same = key
                known = below.get(same)
                if known is None:
                    below[same] = key, [(which, value)]
                    # The tokens of the key are emitted with the first value.
                else:
                    known[1].append((which, value))
                at = ends[value]
        if any(factory != factories[0] for factory in factories):
            other = next(index for index, factory in enumerate(factories) if factory != factories[0])
            self.differ(path, (places[0][0], places[0][1] + 1), (places[other][0], places[other][1] + 1))
        self.out += [[tag, len(below)], *factories[:1]]
        for key, values in reversed(below.values()):
            todo.append((Path(path, key), values))
            if type(key) is str:
                todo.append([key])
            else:
                todo.append(self.key_tokens(key, values[0]))

    def key_tokens(self, key: KeyText, value: tuple[int, int]) -> list[Any]:
        """The tokens of a key that is not a string."""
        tokens: list[Any] = json.loads(f"[{key.text}]")
        for token in tokens:
            if is_tensor(token):
                token[1] = self.number(Path(None, key), [(value[0], -1, token[1])])
        return tokens

    def are_names(self, path: Path, places: list[tuple[int, int]]) -> bool:
        """Whether a list holds the names of the parameters of an optimizer, on all ranks."""
        groups = path.above.above if path.key == "params" and path.above is not None else None
        if groups is None or groups.key != "param_groups":
            return False
        return all(
            type(token) is str
            for which, position in places
            for token in self.tokens[which][position + 1 : self.ends[which][position]]
        )

    def unite_names(self, places: list[tuple[int, int]]) -> None:
        names: dict[str, None] = {}
        for which, position in places:
            names.update(dict.fromkeys(self.tokens[which][position + 1 : self.ends[which][position]]))
        self.out += [["list", len(names)], *names]

    def copy(self, path: Path, which: int, start: int) -> None:
        """Emit tokens that only one variant has."""
        tokens = self.tokens[which][start : self.ends[which][start]]
        for index, token in enumerate(tokens):
            if type(token) is list and is_tensor(token):
                tokens[index] = [token[0], self.number(path, [(which, start + index, token[1])]), *token[2:]]
        self.out += tokens

    # Tensors.

    def tensor(self, path: Path, places: list[tuple[int, int]]) -> None:
        """Emit a tensor that several variants have."""
        token = self.tokens[places[0][0]][places[0][1]]
        found = [(which, position, self.tokens[which][position][1]) for which, position in places]
        first, _, own = found[0]
        kind = self._kinds[first][own]
        for which, _, index in found:
            if self._kinds[which][index] != kind:
                sides = [
                    (self.ranks[one], _described(self.tables[one], at)) for one, at in ((first, own), (which, index))
                ]
                spread = self.kind(first, own).spread or self.kind(which, index).spread
                self.differences.texts(path, sides, _DTENSORS if spread else _TENSORS, _PER_RANK)
                break
        self.out.append([token[0], self.number(path, found), *token[2:]])

    def number(self, path: Path, found: list[tuple[int, int, int]]) -> int:
        """The number in the union of the tensor in one place, given by variant, position and number there.

        Places are tied if all ranks that have both agree.
        """
        candidates = {number for which, _, index in found for number in self.numbers[which][index]}
        which, position, index = found[0]
        name = self.names[which].get(position) or self.tables[which].names[index]
        for number in sorted(candidates):
            sources = self.sources[number]
            if all(sources.get(which, index) == index for which, _, index in found):
                self.flat.ties.append((number, name))
                break
        else:
            number = len(self.sources)
            sources = {}
            self.sources.append(sources)
            self.paths.append(path)
            kind = self.kind(which, index)
            self.flat.tensors.append(Tensor(unique(self._taken, name), kind.dtype, kind.shape, 0, 0, kind.logical))
        for which, _, index in found:
            if which not in sources:
                sources[which] = index
                self.numbers[which][index].append(number)
        return number

    def kind(self, which: int, index: int) -> Kind:
        table = self.tables[which]
        return table.kinds[int(table.kind[index])]

    def differ(self, path: Path, one: tuple[int, int], other: tuple[int, int]) -> None:
        sides = []
        for which, position in (one, other):
            token = self.tokens[which][position]
            text = _described(self.tables[which], token[1]) if is_tensor(token) else short(token)
            sides.append((self.ranks[which], text))
        self.differences.texts(path, sides, _EQUAL, _PER_RANK)

    def finish(self, structure: list[Any]) -> United:
        """The union, once everything has been walked."""
        known: dict[tuple[Any, ...], int] = {}
        lists = []
        spread_numbers = [[table.kinds[kind].spread for kind in table.kind.tolist()] for table in self.tables]
        for number, sources in enumerate(self.sources):
            key = tuple((which, spread_numbers[which][index]) for which, index in sources.items())
            found = known.get(key)
            if found is None:
                found = known[key] = self.lists.add(
                    holder for which, spread in key for holder in holders_of(self.variants[which], spread)
                )
            missing = self.lists.without.get(found)
            if missing is not None:
                spread, absent = missing
                self.differences.absent(
                    self.paths[number], spread.ranks, absent, "on every rank of a mesh, save all its tensors"
                )
            lists.append(found)
        self.differences.raise_any()
        outer: dict[Any, bool] = {}
        for table in self.tables:
            for key, leads in (outer_of(table.outer) or {}).items():
                outer[key] = outer.get(key, False) or leads
        if any(table.outer is not None for table in self.tables):
            self.flat.outer = outer
        return United(
            self.flat,
            json.dumps(structure, separators=(",", ":")),
            lists,
            self.lists.lists,
            self.lists.spreads,
            self.numbers,
        )


def _names_of_places(table: Table, tokens: list[Any]) -> dict[int, str]:
    """The name of each place of a tensor that has several, by the position of its token."""
    out: dict[int, str] = {}
    names: dict[int, list[str]] = {}
    for index, name in table.ties:
        names.setdefault(index, [table.names[index]]).append(name)
    if names:
        for position, token in enumerate(tokens):
            if type(token) is list and is_tensor(token) and names.get(token[1]):
                out[position] = names[token[1]].pop(0)
    return out


def _described(table: Table, index: int) -> str:
    kind = table.kinds[table.kind[index]]
    dtype, shape = kind.logical or (kind.dtype, kind.shape)
    return f"a tensor of {dtype} {list(shape)}"
