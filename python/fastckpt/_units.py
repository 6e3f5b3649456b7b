"""Quantities with units, parsed from arguments and formatted for output. The API and the tools share it."""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*")

_SECONDS = {
    **dict.fromkeys(("ms",), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86400.0),
    **dict.fromkeys(("y", "year", "years"), 365.25 * 86400.0),
}
_COUNTS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_BYTES = {
    "": 1,
    "B": 1,
    **{prefix + "B": 1000 ** (power + 1) for power, prefix in enumerate(("k", "M", "G", "T", "P"))},
    **{prefix + "iB": 1024 ** (power + 1) for power, prefix in enumerate(("K", "M", "G", "T", "P"))},
    "KB": 1000,
}

#: A rate below this, without a unit, is taken as a mistake: another unit is meant.
LEAST_RATE = 1e4
_DIGITS = 3
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def _split(what: str, value: float | str) -> tuple[float, str]:
    """A number and the unit after it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{what} must be a number or a string, not {type(value).__name__}")
    if not isinstance(value, str):
        unit = ""
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    else:
        found = _NUMBER.fullmatch(value)
        if found is None:
            raise ValueError(f"{what} {value!r} is not a number with a unit")
        number, unit = float(found[1].replace(",", "").replace("_", "")), found[2]
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {value!r}")
    return number, unit


def _scaled(what: str, value: float | str, units: dict[str, float], default: str, *, least: float = 0.0) -> float:
    number, unit = _split(what, value)
    if (unit or default) not in units:
        known = ", ".join(name for name in units if name)
        raise ValueError(f"{what} {value!r}: unit {unit!r} is not one of {known}")
    result = number * units[unit or default]
    if result < least or (least == 0 and result == 0):
        raise ValueError(f"{what} must be {'more than 0' if least == 0 else f'at least {least:g}'}, not {value!r}")
    return result


def seconds(what: str, value: float | str, least_bare: float = 0.0) -> float:
    """A duration, as in ``124min`` or ``50000h``, in seconds.

    Args:
        what: the name of the quantity, for the error.
        value: a number, or a string of a number and a unit: ms, s, min, h, d, w, y.
        least_bare: a number below this, without a unit, is an error, because another unit is meant.

    Raises:
        ValueError: ``value`` is not a duration, or not more than 0.
    """
    result = _scaled(what, value, _SECONDS, "s")
    if result < least_bare and not _split(what, value)[1]:
        raise ValueError(f"{what} {value!r} would be seconds: give it a unit, as in '{value}h'")
    return result


#: An age below this, without a unit, is an error: hours are probably meant.
LEAST_AGE = 60.0


def parameters(what: str, value: float | str) -> int:
    """A number of parameters, as in ``405B`` or ``1.2e12``; K, M, B and T are 10^3, 10^6, 10^9 and 10^12."""
    return round(_scaled(what, value, _COUNTS, "", least=1))


def bytes_of(what: str, value: Any) -> int:
    """A number of bytes: a number, or a string of a number and a unit, as in ``13.8TB`` (10^12) or ``105GiB`` (2^30).

    Args:
        what: the name of the quantity, for the error.
        value: the caller's argument.

    Raises:
        ValueError: ``value`` is not a number of bytes, or not from 1 to 2**63 - 1.
    """
    try:
        number, unit = _split(what, value)
        result = value if type(value) is int else round(number * _BYTES[unit])
    except (TypeError, ValueError, LookupError, OverflowError):
        result = 0
    if not 1 <= result < 2**63:
        raise ValueError(
            f"{what} must be a number of bytes from 1 to 2**63 - 1, or a string such as '500MB', '2GB' or '1GiB' "
            f"(units: {', '.join(filter(None, _BYTES))}), not {value!r}"
        )
    return result


def rate(what: str, value: float | str) -> float:
    """A throughput in bytes per second: a number, or a string with a unit, as in ``273GB/s``.

    Raises:
        ValueError: ``value`` is not a throughput, or is so small without a unit that another unit is meant.
    """
    result = _scaled(what, value, {"": 1.0, **{f"{unit}/s": scale for unit, scale in _BYTES.items() if unit}}, "")
    if result < LEAST_RATE and not _split(what, value)[1]:
        raise ValueError(f"{what} {value!r} would be bytes per second: give it a unit, as in '{value}GB/s'")
    return result


def fraction(what: str, value: float | str) -> float:
    """A share between 0 and 1, as in ``0.95`` or ``95%``, ends excluded."""
    hundredths = isinstance(value, str) and value.rstrip().endswith("%")
    result = _scaled(what, value, {"": 1.0, "%": 1.0}, "") / (100 if hundredths else 1)
    if result >= 1:
        raise ValueError(f"{what} must be between 0 and 1 (or 0% and 100%), not {value!r}")
    return result


def digits(value: float) -> str:
    """``value`` with three significant digits, without an exponent; whole digits are all kept."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "never"
    rounded = float(f"{value:.{_DIGITS}g}")
    return f"{value:,.{max(0, _DIGITS - 1 - math.floor(math.log10(abs(rounded))))}f}"


def show_bytes(count: float) -> str:
    """``count`` bytes in the largest decimal unit that keeps a leading digit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:  # noqa: PLR2004 - a number that rounds to 1000 needs the next unit
            return f"{digits(value)} {unit}"
        value /= 1000
    return f"{digits(value)} PB"


def show_seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    if not math.isfinite(value):
        return "never"
    for limit, unit, name in ((100 * 1.0, 1.0, "s"), (100 * _MINUTE, _MINUTE, "min"), (100 * _HOUR, _HOUR, "h")):
        if value < limit:
            return f"{digits(value / unit)} {name}"
    return f"{digits(value / _DAY)} days"


def show_rate(value: float) -> str:
    """Bytes per second, as GB/s."""
    return f"{digits(value / 1e9)} GB/s"


def show_share(value: float) -> str:
    """A share as a percentage."""
    return f"{digits(100 * value)} %"
