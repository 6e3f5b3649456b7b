"""``fastckpt diff``: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import fastckpt
from fastckpt._manager.stale import changed, sums_of
from fastckpt._text import count, table

from .places import place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

#: Bytes of a tensor in memory at a time per checkpoint; both in float64 need up to sixteen times as much.
_PIECE = 16 << 20
#: Kinds of dtypes whose elements can be subtracted: truth values, integers, floats and complex numbers.
_NUMBERS = "biufc"
#: The most lines on the screen; the JSON document lists all.
_LINES = 40
_WORD = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The change of one tensor from the first checkpoint to the second.

    Attributes:
        name: its name.
        dtype: its dtype in the first, and, if different, in the second: ``float32 -> bfloat16``.
        shape: its shape in the first, or in both.
        elements: the number of differing elements, or bytes if several elements share one; None if the shapes differ.
        max_abs: the largest absolute difference of two elements; nan if only one of them is a number; None if they are
            not numbers.
        relative: the Euclidean norm of the difference divided by the norm of the first tensor; inf if that is zero;
            None like ``max_abs``.
    """

    name: str
    dtype: str
    shape: str
    elements: int | None = None
    max_abs: float | None = None
    relative: float | None = None


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command(
        "diff",
        "show which tensors of two checkpoints differ, and by how much",
        "Tensors are compared by name and value: +0 and -0 are equal, and nan equals nan. Every byte that is read is "
        "verified. Exits with 0 whether they differ or not, unless one of these is given:",
    )
    parser.add_argument("path", metavar="A", type=place, help="a checkpoint: its directory or URL")
    parser.add_argument("other", metavar="B", type=place, help="another one")
    status = parser.add_mutually_exclusive_group()
    status.add_argument("--exit-code", action="store_true", help="exit with 1 if they differ, as diff does")
    status.add_argument(
        "--expect-change",
        action="store_true",
        help="exit with 1 if no weight has changed, or if no moment of the optimizer has: training stands still",
    )


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Compare; return exit status, JSON document and lines."""
    with fastckpt.open(options.path) as first, fastckpt.open(options.other) as second:
        # A tied tensor is listed once, and may be several tensors in the other checkpoint.
        names = dict.fromkeys((*first, *second))
        both = [name for name in names if name in first and name in second]
        found = [different for name in both if (different := compare(first, second, name)) is not None]
        document: dict[str, Any] = {
            "path": first.path,
            "other": second.path,
            "equal": len(both) - len(found),
            "changed": [_as_json(one) for one in sorted(found, key=_order)],
            "removed": [name for name in first if name not in second],
            "added": [name for name in second if name not in first],
            "values": [
                {"name": name, "before": before, "after": after}
                for name, before, after in _values(first.structure, second.structure)
            ],
        }
    lines = _lines(document)
    if options.expect_change:
        document["shares"] = shares = changed(*(sums_of(document[key], "diff") for key in ("path", "other")))
        still = [group for group, share in shares.items() if not share]
        if not shares and not document["changed"]:
            still = ["state"]
        return int(bool(still)), document, [*lines, *(f"no tensor of the {group} has changed" for group in still)]
    differ = any(document[key] for key in ("changed", "removed", "added", "values"))
    return int(options.exit_code and differ), document, lines


def compare(first: fastckpt.types.Checkpoint, second: fastckpt.types.Checkpoint, name: str) -> Difference | None:
    """Compare one tensor of two checkpoints; None if they are equal.

    Args:
        first: The first checkpoint.
        second: The second.
        name: A tensor that both have.

    Raises:
        CorruptCheckpointError: bytes of one differ from those that were written.
    """
    a, b = first.info(name), second.info(name)
    dtype = a.dtype if a.dtype == b.dtype else f"{a.dtype} -> {b.dtype}"
    shape = str(list(a.shape)) if a.shape == b.shape else f"{list(a.shape)} -> {list(b.shape)}"
    if a.shape != b.shape:
        return Difference(name=name, dtype=dtype, shape=shape)
    elements, largest, squares, whole = 0, 0.0, 0.0, 0.0
    numbers = True
    for part in _parts(a.shape, max(a.bytes, b.bytes)):
        x, y = _array(first.tensor(name)[part]), _array(second.tensor(name)[part])
        numbers = x.dtype.kind in _NUMBERS and y.dtype.kind in _NUMBERS
        if not numbers:
            elements += x.size if x.dtype != y.dtype else int(np.count_nonzero(x != y))
            continue
        x, y = _wide(x), _wide(y)
        with np.errstate(all="ignore"):
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            gap = np.where(same, 0, np.abs(x - y))
            elements += int(np.count_nonzero(~same))
            largest = float(np.maximum(largest, gap.max(initial=0.0)))
            squares += float(np.square(gap).sum())
            whole += float(np.square(np.abs(x)).sum())
    if not elements and a.dtype == b.dtype:
        return None
    if not numbers:
        return Difference(name=name, dtype=dtype, shape=shape, elements=elements)
    relative = math.sqrt(squares) / math.sqrt(whole) if whole else math.inf if squares else 0.0
    return Difference(name=name, dtype=dtype, shape=shape, elements=elements, max_abs=largest, relative=relative)


def _parts(shape: tuple[int, ...], nbytes: int) -> Iterator[Any]:
    """Indices of parts that cover a tensor of this shape, each part small if the first dimension permits."""
    if not shape or nbytes <= _PIECE:
        yield ...
        return
    rows = max(1, shape[0] * _PIECE // nbytes)
    for begin in range(0, shape[0], rows):
        yield slice(begin, begin + rows)


def _array(part: Any) -> np.ndarray[Any, Any]:
    """A tensor as the array that holds its values; as bytes if numpy and torch have no other form."""
    if isinstance(part, np.ndarray):
        return part
    try:
        return np.asarray(part.numpy())
    except TypeError:  # numpy has no such dtype
        pass
    try:
        return np.asarray((part.cfloat() if part.is_complex() else part.float()).numpy())
    except NotImplementedError:  # several elements in a byte
        return np.array(part.untyped_storage().tolist(), np.uint8)


def _wide(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers in the precision for their differences: at least float64 or complex128."""
    least = np.complex128 if part.dtype.kind == "c" else np.float64
    # An integer of 64 bits does not fit the 53 bits of a float64.
    return part.astype(np.longdouble if part.dtype.kind in "iu" else np.result_type(part.dtype, least))


def _values(a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """Name, old and new text of each different value that is not a tensor.

    A loop, because states nest deeper than Python recurses; names are joined only when shown.
    """
    rest: list[tuple[Any, Any, _Name | None]] = [(a, b, None)]
    while rest:
        x, y, at = rest.pop()
        # A tensor is listed by itself.
        if isinstance(x, fastckpt.types.TensorInfo) or isinstance(y, fastckpt.types.TensorInfo):
            continue
        if x is _NOTHING or y is _NOTHING:
            before, after = ("-" if one is _NOTHING else _cut(_text(one)) for one in (x, y))
            yield _joined(at), before, after
            continue
        left, right = _children(x), _children(y)
        if left is not None and right is not None and left[0] == right[0]:
            of_x, of_y = left[1], right[1]
            keys = dict.fromkeys((*of_x, *of_y))
            pairs = [(of_x.get(key, _NOTHING), of_y.get(key, _NOTHING), _Name(at, key)) for key in keys]
            rest.extend(reversed(pairs))
            continue
        texts = _text(x), _text(y)
        if texts[0] != texts[1]:
            yield (_joined(at), *_contrasted(*texts))


class _Name:
    """A step of a name, linked to the steps before it."""

    __slots__ = ("before", "step")

    def __init__(self, before: _Name | None, step: str) -> None:
        self.before = before
        self.step = step


def _joined(name: _Name | None) -> str:
    steps = []
    while name is not None:
        steps.append(name.step)
        name = name.before
    return ".".join(filter(None, reversed(steps)))


#: A placeholder for a key that only one of two mappings has.
_NOTHING: Any = object()
#: The names of the parts of composed tensors.
_PARTS = {
    "coo": ("indices", "values"),
    "compressed": ("compressed_indices", "plain_indices", "values"),
    "quantized": ("stored", "scale", "zero_point", "axis"),
}


def _children(value: Any) -> tuple[Any, dict[str, Any]] | None:
    """The properties that two values must share to be compared part by part; None for a leaf."""
    if isinstance(value, fastckpt.types.Composed):
        # The value of an object has the same name as the object, and so has the base of an expanded tensor.
        names = _PARTS.get(value.kind, ("", "__dict__"))
        return (value.kind, value.about), dict(zip(names, value.parts, strict=False))
    if isinstance(value, Mapping):
        return "mapping", {key if isinstance(key, str) else _text(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return ("sequence", len(value)), {str(index): item for index, item in enumerate(value)}
    return None


def _text(value: Any) -> str:
    """A value as text in which equal values are equal, wherever their tensors are stored."""
    out: list[str] = []
    rest: list[Any] = [value]
    while rest:
        item = rest.pop()
        if type(item) is _Literal:
            out.append(item)
        elif isinstance(item, fastckpt.types.TensorInfo):
            out.append(f"<{item.dtype} {list(item.shape)}>")
        elif isinstance(item, fastckpt.types.Composed):
            head = item.about[0] if item.kind == "type" else f"{item.kind} {item.about}"
            rest.extend(_enclosed(f"{head}(", item.parts, ")"))
        elif isinstance(item, Mapping):
            pairs = [part for key, one in item.items() for part in (key, _Literal(": "), one, _COMMA)]
            rest.extend(reversed([_Literal("{"), *pairs[:-1], _Literal("}")]))
        elif isinstance(item, (list, tuple)):
            rest.extend(_enclosed(*(("[", item, "]") if isinstance(item, list) else ("(", item, ")"))))
        elif isinstance(item, (set, frozenset)):
            # Members are nested no deeper than hashing allows.
            rest.extend(_enclosed("{", [_Literal(text) for text in sorted(map(_text, item))], "}"))
        elif isinstance(item, slice):
            rest.extend(_enclosed("slice(", (item.start, item.stop, item.step), ")"))
        else:
            out.append(repr(item))
    return "".join(out)


class _Literal(str):
    """A piece of the resulting text, which needs no conversion."""

    __slots__ = ()


_COMMA = _Literal(", ")


def _enclosed(before: str, parts: Iterable[Any], after: str) -> list[Any]:
    """Parts with commas between them, the last one first."""
    inner = [piece for part in parts for piece in (part, _COMMA)]
    return [_Literal(after), *reversed(inner[:-1]), _Literal(before)]


def _cut(text: str) -> str:
    return text if len(text) <= _WORD else f"{text[: _WORD - 3]}..."


def _contrasted(before: str, after: str) -> tuple[str, str]:
    """Two different texts, cut so that the difference shows."""
    pairs = enumerate(zip(before, after, strict=False))
    same = next((at for at, (x, y) in pairs if x != y), min(len(before), len(after)))
    if same < _WORD // 2:
        return _cut(before), _cut(after)
    begin = same - _WORD // 4
    return tuple(f"...{_cut(text[begin:])}" for text in (before, after))  # type: ignore[return-value]


def _order(one: Difference) -> tuple[bool, float, str]:
    """Sort key: tensors that cannot be measured first, then the most changed."""
    measured = one.relative is not None and not math.isnan(one.relative)
    return measured, -(one.relative or 0.0) if measured else 0.0, one.name


def _as_json(one: Difference) -> dict[str, Any]:
    """A number for JSON, which has neither nan nor infinity."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(one).items()
    }


def _lines(document: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    changed = document["changed"]
    if changed:
        rows = [("tensor", "dtype", "shape", "elements", "max abs", "relative")]
        rows += [
            (
                one["name"],
                one["dtype"],
                one["shape"],
                *(_figure(one[key]) for key in ("elements", "max_abs", "relative")),
            )
            for one in changed[:_LINES]
        ]
        lines += table(rows, right=(3, 4, 5))
    if len(changed) > _LINES:
        lines.append(f"and {len(changed) - _LINES} more; --json lists all")
    for word in ("removed", "added"):
        names = document[word]
        lines += [f"{word}: {name}" for name in names[:_LINES]]
        if len(names) > _LINES:
            lines.append(f"{word}: {len(names) - _LINES} more; --json lists all")
    values = document["values"]
    lines += [f"{one['name'] or 'the state'}: {one['before']} -> {one['after']}" for one in values[:_LINES]]
    if len(values) > _LINES:
        lines.append(f"and {len(values) - _LINES} more values; --json lists all")
    total = f"{count(document['equal'], 'tensor')} equal, {len(changed)} changed"
    return [*lines, f"{total}, {len(document['removed'])} removed, {len(document['added'])} added"]


def _figure(value: float | str | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, (int, str)) else f"{value:.3g}"
