"""The same plan for many values of one of its arguments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fastckpt._tools.places import option

from .plan import plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .record import Plan

#: The arguments that can be swept, and the options of `plan` that each replaces.
SWEPT = {
    "gpus": (),
    "dp": ("gpus",),
    "params": ("size", "config", "checkpoint"),
    "size": ("params", "config", "checkpoint"),
    "mttf_gpu": ("mttf_cluster",),
    "mttf_cluster": ("mttf_gpu",),
    "goodput": ("overhead", "interval"),
    "overhead": ("goodput", "interval"),
    "interval": ("goodput", "overhead"),
    "write": ("tier",),
    "node_write": ("tier",),
    "stall": (),
    "restart": (),
}
_WHOLE = ("gpus", "dp")
_MOST = 10_000


def parse(text: str) -> tuple[str, list[str]]:
    """Read ``gpus=1000,2000,4000``, ``gpus=1000:8000:1000`` (a step) or ``gpus=1000:64000:x2`` (a factor).

    A range includes both ends.

    Returns:
        The argument of :func:`plan` and its values.

    Raises:
        ValueError: ``text`` has none of these forms.
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in SWEPT:
        raise ValueError(f"plan: --sweep {text!r}: expected NAME=VALUES, where NAME is one of {', '.join(SWEPT)}")
    if ":" not in values:
        listed = [value.strip() for value in values.split(",")]
        if not all(listed):
            raise ValueError(f"plan: --sweep {text!r}: a value is missing")
        return name, listed
    parts = values.split(":")
    if len(parts) != 3:  # noqa: PLR2004 - start, stop, step
        raise ValueError(f"plan: --sweep {text!r}: a range is START:STOP:STEP, or START:STOP:xFACTOR")
    return name, _range(text, parts)


def _range(text: str, parts: Sequence[str]) -> list[str]:
    """The values of a range, both ends included."""
    factor = parts[2].strip().startswith("x")
    try:
        start, stop, step = (float(part.strip().removeprefix("x")) for part in parts)
    except ValueError:
        raise ValueError(
            f"plan: --sweep {text!r}: the parts of a range are numbers without units, of bytes, bytes per second or "
            "seconds (100e9:400e9:x2); those of a list have units (100GB/s,200GB/s)"
        ) from None
    grows = start > 0 and step > 1 if factor else step > 0
    if not (grows and start <= stop and all(map(math.isfinite, (start, stop, step)))):
        raise ValueError(f"plan: --sweep {text!r}: a range must be finite and rise from its start to its stop")
    # The small constants absorb rounding: 0.9:0.99:0.01 has ten values.
    number = math.log(stop / start, step) if factor else (stop - start) / step
    if number > _MOST:
        raise ValueError(f"plan: --sweep {text!r}: more than {_MOST:,} values")
    return [
        f"{start * step**index if factor else start + step * index:.12g}" for index in range(int(number + 1e-9) + 1)
    ]


def sweep(name: str, values: Sequence[str], known: Mapping[str, Any]) -> list[Plan]:
    """A plan for each value.

    Args:
        name: an argument of :func:`plan`.
        values: its values.
        known: the other arguments.

    Raises:
        ValueError: an argument that this one replaces is given, or a plan is impossible.
    """
    for other in (name, *SWEPT[name]):
        if known.get(other) is not None:
            raise ValueError(f"plan: --sweep {name}: leave out {option(other)}, which the sweep replaces")
    return [plan(**{**known, name: _whole(name, value) if name in _WHOLE else value}) for value in values]


def _whole(name: str, value: str) -> int:
    number = float(value) if value.replace(".", "", 1).replace("e", "", 1).replace("+", "", 1).isdigit() else math.nan
    if number != number // 1:
        raise ValueError(f"plan: --sweep {name}: {value!r} is not a whole number")
    return int(number)
