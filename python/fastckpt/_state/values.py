"""Encodes and decodes Python's own leaf values as structure tokens (docs/format.md, section 4).

An encoder returns a token's JSON text; a decoder accepts the parsed token. Decoders get untrusted tokens: any exception
of the kinds in ``MALFORMED`` means a corrupt checkpoint.
"""

from __future__ import annotations

import binascii
import datetime as dt
import re
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as quote
from typing import TYPE_CHECKING, Any, TypeAlias

from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors import records as _records
from fastckpt._tensors.described import Unsupported, integers, text

if TYPE_CHECKING:
    import pathlib

    import numpy as np

#: Exceptions that decoding a malformed token may raise.
MALFORMED = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    struct.error,
)

#: Integers up to this, positive or negative, are JSON numbers.
EXACT = 2**53
#: Bytes of at least this length are stored as a tensor.
LONG_BYTES = 4096
#: Python refuses to convert more decimal digits than this to an integer.
_DIGITS = 4300
# Patterns are compiled at their first use, so that the import stays fast.
_DECIMAL = r"-?[0-9]{1,4300}"
_HEX = r"-?0x[0-9a-f]+"
_PAIR = r"[\ud800-\udbff][\udc00-\udfff]"
_BASE64 = r"[A-Za-z0-9+/]*={0,2}"

_INFINITY = float("inf")
_DOUBLE = struct.Struct(">d")

FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "set": set,
    "str": str,
    "bool": bool,
    "tuple": tuple,
}
FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


def encode_text(value: str) -> str:
    """A string as JSON. Two surrogates that form one character would be decoded from JSON as that character."""
    if not value.isascii() and re.search(_PAIR, value) is not None:
        raise Unsupported("a string with a surrogate pair cannot be stored: store the character that the pair encodes")
    return quote(value)


def _int(value: int) -> str:
    return repr(value) if -EXACT <= value <= EXACT else f'["int","{value:#x}"]'


def _float(value: float) -> str:
    if -_INFINITY < value < _INFINITY:
        return repr(value)
    return f'["float","{_DOUBLE.pack(value).hex()}"]'


def _complex(value: complex) -> str:
    return f'["complex","{_DOUBLE.pack(value.real).hex()}","{_DOUBLE.pack(value.imag).hex()}"]'


def _range(value: range) -> str:
    numbers = (value.start, value.stop, value.step)
    if any(number.bit_length() > 3 * _DIGITS for number in numbers):
        raise Unsupported(f"a range of integers beyond {3 * _DIGITS} bits cannot be stored")
    return '["range","{}","{}","{}"]'.format(*numbers)


def _date(value: dt.date) -> str:
    return f'["date",[{value.year},{value.month},{value.day}]]'


def _timedelta(value: dt.timedelta) -> str:
    return f'["timedelta",[{value.days},{value.seconds},{value.microseconds}]]'


def _timezone(value: dt.timezone) -> str:
    # No other public attribute distinguishes a fixed zone's own name from a generated one.
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    text = quote(name[0]) if name else "null"
    return f'["tz",[{offset.days},{offset.seconds},{offset.microseconds}],{text}]'


def datetime_head(value: dt.datetime) -> str:
    """The token of a date and time, to be followed by its time zone."""
    return (
        f'["datetime",[{value.year},{value.month},{value.day},{value.hour},{value.minute},{value.second},'
        f"{value.microsecond},{value.fold}]]"
    )


def time_head(value: dt.time) -> str:
    """The token of a time of day, to be followed by its time zone."""
    return f'["time",[{value.hour},{value.minute},{value.second},{value.microsecond},{value.fold}]]'


def short_bytes(tag: str, value: bytes | bytearray) -> str:
    """Bytes below ``LONG_BYTES``."""
    return f'["{tag}","{binascii.b2a_base64(value, newline=False).decode("ascii")}"]'


def _path(kind: str) -> Callable[[Any], str]:
    return lambda value: f'["path","{kind}",{quote(str(value))}]'


def path_encoder(kind: type) -> Callable[[Any], str] | None:
    """The encoder of a type of path, or None. A state can hold a path only if pathlib has been imported."""
    module: Any = sys.modules.get("pathlib")
    if module is None:
        return None
    return {
        type(module.Path()): _path("Path"),
        module.PurePosixPath: _path("PurePosixPath"),
        module.PureWindowsPath: _path("PureWindowsPath"),
    }.get(kind)


ENCODERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    str: encode_text,
    int: _int,
    float: _float,
    complex: _complex,
    range: _range,
    dt.date: _date,
    dt.timedelta: _timedelta,
    dt.timezone: _timezone,
    **dict.fromkeys(_numpy.SCALARS, _numpy.encode_scalar),
}


#: Every type in the structure itself, except torch's types and the types of paths.
PLAIN = frozenset(
    (
        *ENCODERS,
        *_numpy.ARRAYS,
        *_records.DTYPES,
        *(dict, OrderedDict, defaultdict, list, tuple, set, frozenset, slice),
        *(bytes, bytearray, dt.datetime, dt.time),
    )
)


def _unpack(token: list[Any], size: int) -> list[Any]:
    """The token's arguments; ValueError if there are not ``size`` of them."""
    if len(token) != size + 1:
        raise ValueError(f"{len(token) - 1} arguments instead of {size}")
    return token[1:]


def _argument(token: list[Any]) -> Any:
    """The token's only argument."""
    (argument,) = _unpack(token, 1)
    return argument


def _double(digits: str) -> float:
    if len(digits) != 2 * _DOUBLE.size:
        raise ValueError("a float of the wrong size")
    value: float = _DOUBLE.unpack(bytes.fromhex(digits))[0]
    return value


def _decode_int(token: list[Any]) -> int:
    digits = _argument(token)
    if re.fullmatch(_HEX, text(digits)) is None:
        raise ValueError("not a hexadecimal integer")
    return int(digits, 16)


def _decode_range(token: list[Any]) -> range:
    numbers = _unpack(token, 3)
    if any(re.fullmatch(_DECIMAL, text(number)) is None for number in numbers):
        raise ValueError("not a decimal integer")
    return range(*map(int, numbers))


def decode_short_bytes(token: list[Any]) -> bytes:
    """Decode the result of :func:`short_bytes`."""
    encoded = _argument(token)
    if len(text(encoded)) % 4 or re.fullmatch(_BASE64, encoded) is None:
        raise ValueError("not base64")
    return binascii.a2b_base64(encoded)


def _decode_timezone(token: list[Any]) -> dt.timezone:
    offset, name = _unpack(token, 2)
    delta = dt.timedelta(*integers(offset, 3))
    return dt.timezone(delta) if name is None else dt.timezone(delta, text(name))


def _decode_path(token: list[Any]) -> pathlib.PurePath:
    import pathlib as module  # noqa: PLC0415 - its import is not cheap, and few states hold paths

    kind, name = _unpack(token, 2)
    if kind not in {"Path", "PurePosixPath", "PureWindowsPath"}:
        raise ValueError("an unknown kind of path")
    path: pathlib.PurePath = getattr(module, kind)(text(name))
    return path


def _decode_float(token: list[Any]) -> float:
    return _double(_argument(token))


def _decode_complex(token: list[Any]) -> complex:
    real, imaginary = _unpack(token, 2)
    return complex(_double(real), _double(imaginary))


def _decode_scalar(token: list[Any]) -> np.generic:
    dtype, digits = _unpack(token, 2)
    return _numpy.decode_scalar(text(dtype), bytes.fromhex(digits))


DECODERS: dict[str, Callable[[list[Any]], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "range": _decode_range,
    "date": lambda token: dt.date(*integers(_argument(token), 3)),
    "timedelta": lambda token: dt.timedelta(*integers(_argument(token), 3)),
    "tz": _decode_timezone,
    "path": _decode_path,
    "scalar": _decode_scalar,
}


def zone(value: Any) -> dt.tzinfo | None:
    """``value``, which must be a time zone (of any type, if it is registered) or None."""
    # isinstance would call code of the value.
    kind: type = type(value)
    if value is not None and not issubclass(kind, dt.tzinfo):
        raise ValueError("not a time zone")
    found: dt.tzinfo | None = value
    return found


Zone: TypeAlias = Callable[[Any], "dt.tzinfo | None"]


def decode_datetime(token: list[Any], zone_of: Zone, parts: list[Any]) -> dt.datetime:
    """A date and time, with its time zone in ``parts``."""
    year, month, day, hour, minute, second, microsecond, fold = integers(_argument(token), 8)
    return dt.datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone_of(parts[0]), fold=fold)


def decode_time(token: list[Any], zone_of: Zone, parts: list[Any]) -> dt.time:
    """A time of day, with its time zone in ``parts``."""
    hour, minute, second, microsecond, fold = integers(_argument(token), 5)
    return dt.time(hour, minute, second, microsecond, tzinfo=zone_of(parts[0]), fold=fold)
