"""Built-in types of fastckpt with fixed names: this table maps a name in a file to its class."""

from __future__ import annotations

import enum
import importlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt._tensors import generators as _generators
from fastckpt._tensors import records as _records
from fastckpt._tensors.described import Unsupported, exact, members, text

from .structural import Codec, Encoded, Undecodable, codec_of, without

if TYPE_CHECKING:
    from collections.abc import Callable

#: Represents an OrderedDict with attributes, such as the ``_metadata`` of a module's state. It is not a codec but part
#: of the structure: partial loads descend into it.
ATTRIBUTED = "collections.OrderedDict"

#: The most bits of a Fraction: making one reduces it, in time quadratic in its digits.
_FRACTION_BITS = 1 << 16


class Own(NamedTuple):
    """Two conversions: of a value, and from its result back to the class.

    ``spelled`` is the module and the name of the class, if its name in the file differs.
    """

    encode: Callable[[Any], Encoded]
    decode: Callable[[Any, Any, Any], Any]
    spelled: str | None = None


def plain(encode: Callable[[Any], Any], decode: Callable[[Any, Any], Any], spelled: str | None = None) -> Own:
    """The conversions of a type that has no attributes: to a value, and back from the class and that value."""

    def back(cls: Any, value: Any, attributes: Any) -> Any:
        without(attributes)
        return decode(cls, value)

    return Own(lambda value: (encode(value), None), back, spelled)


def _of_text(cls: Any, value: Any) -> Any:
    return cls(text(value))


def _buffer(cls: Any, value: Any) -> Any:
    if type(value) is not bytes:
        raise ValueError("not the bytes of a buffer")
    return cls(value)


def _deque(value: Any) -> Encoded:
    return list(value), None if value.maxlen is None else {"maxlen": value.maxlen}


def _decode_deque(cls: Any, value: Any, attributes: Any) -> Any:
    if type(value) is not list:
        raise ValueError("not the members of a deque")
    if attributes is None:
        return cls(value)
    (longest,) = members(attributes, "maxlen")
    if type(longest) is not int or longest < len(value):
        raise ValueError("not the attributes of a deque")
    return cls(value, longest)


def _fraction(value: Any) -> Any:
    parts = value.numerator, value.denominator
    if any(part.bit_length() > _FRACTION_BITS for part in parts):
        raise Unsupported(f"a Fraction of more than {_FRACTION_BITS} bits cannot be stored: store its two integers")
    return parts


def _decode_fraction(cls: Any, value: Any) -> Any:
    numerator, denominator = exact(value, tuple, 2)
    if any(type(part) is not int or part.bit_length() > _FRACTION_BITS for part in value) or denominator <= 0:
        raise ValueError("not a fraction")
    made = cls(numerator, denominator)
    if made.denominator != denominator:
        raise ValueError("a fraction that is not in lowest terms")
    return made


def _zone(value: Any) -> Any:
    if value.key is None:
        raise Unsupported("a time zone without a key cannot be stored: make it with zoneinfo.ZoneInfo(key)")
    return value.key


def _decode_zone(cls: Any, value: Any) -> Any:
    from zoneinfo import ZoneInfoNotFoundError  # noqa: PLC0415 - the module of the class

    # No dots: a key may be interpreted as the name of a package of tzdata.
    if re.fullmatch(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,9}", text(value)) is None:
        raise ValueError("not the key of a time zone")
    try:
        return cls(value)
    except (ZoneInfoNotFoundError, OSError) as error:
        raise Undecodable(f"this machine has no time zone {value!r}: pip install tzdata"[:200]) from error


def _decode_random(cls: Any, value: Any) -> Any:
    version, numbers, gauss = exact(value, tuple, 3)
    if (
        exact(version, int) != cls.VERSION
        or any(type(number) is not int or not 0 <= number < 1 << 32 for number in exact(numbers, tuple))
        or not (gauss is None or type(gauss) is float)
    ):
        raise ValueError("not the state of a random generator")
    made = cls(0)
    made.setstate((version, numbers, gauss))
    return made


# A DictConfig or ListConfig is stored as its container; interpolations stay text. Its flags (read-only, struct) are
# attributes: for each configuration in it with flags, the keys that lead there, and the flags.


def _configured(value: Any) -> Encoded:
    from omegaconf import OmegaConf  # noqa: PLC0415 - the module of the class

    flags: list[Any] = []
    rest: list[tuple[list[Any], Any]] = [([], value)]
    while rest:
        path, node = rest.pop()
        own = {name: flag for name, flag in (node._metadata.flags or {}).items() if flag is not None}  # noqa: SLF001
        if own:
            flags.append((path, own))
        content = node._content  # noqa: SLF001 - the stored content, without resolving references
        if isinstance(content, dict):
            rest.extend(([*path, key], child) for key, child in content.items() if OmegaConf.is_config(child))
        elif isinstance(content, list):
            rest.extend(([*path, key], child) for key, child in enumerate(content) if OmegaConf.is_config(child))
    return OmegaConf.to_container(value, resolve=False), {"flags": flags} if flags else None


#: omegaconf parses interpolations when they are set, and deep ones slowly.
_INTERPOLATIONS = 256


#: Values that a configuration may hold besides dicts and lists if it must be restored as one. omegaconf would call
#: methods of any other object.
_IN_CONFIGURATIONS = frozenset({type(None), bool, int, float, str, bytes})


def _check_configured(value: Any) -> None:
    import pathlib  # noqa: PLC0415 - its import is not cheap, and few states hold paths

    rest = [value]
    while rest:
        item = rest.pop()
        kind = type(item)
        if kind is str and item.count("${") > _INTERPOLATIONS:
            raise ValueError(f"more than {_INTERPOLATIONS} interpolations in one text")
        if kind is list:
            rest.extend(item)
        elif kind is dict:
            rest.extend(item.keys())
            rest.extend(item.values())
        elif kind not in _IN_CONFIGURATIONS and not issubclass(kind, (enum.Enum, pathlib.PurePath)):
            raise Undecodable(
                f"a configuration that holds a {kind.__qualname__} is not rebuilt: where the program does not "
                "declare the classes of omegaconf, it comes back as plain containers"
            )


def _decode_configured(cls: Any, value: Any, attributes: Any) -> Any:
    _check_configured(value)
    flags = [] if attributes is None else exact(members(attributes, "flags")[0], list)
    # The configuration may hold objects.
    made = cls(value, flags={"allow_objects": True})
    made._set_flag("allow_objects", None)
    for pair in flags:
        path, own = exact(pair, tuple, 2)
        node = made
        for key in exact(path, list):
            if type(key) not in _IN_CONFIGURATIONS and not issubclass(type(key), enum.Enum):
                raise ValueError("not a key of a configuration")
            node = node._get_node(key)  # noqa: SLF001 - the stored content, without resolving references
        for name, flag in exact(own, dict).items():
            if type(flag) is not bool:
                raise ValueError("a flag that is neither true nor false")
            node._set_flag(text(name), flag)  # noqa: SLF001
    return made


def _bits(spelled: str) -> Own:
    """The conversions of a bit generator of numpy."""
    return plain(
        _generators.encode_bit_generator,
        lambda cls, value: _generators.decode_bit_generator(cls.__name__, value),
        spelled,
    )


def _of_torch(function: str) -> Callable[..., Any]:
    """A function of the module that imports torch; the import happens when it is called."""

    def call(*arguments: Any) -> Any:
        from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch

        return getattr(_torch, function)(*arguments)

    return call


_CONFIGURED = Own(_configured, _decode_configured)

#: By the name in files, which is also the location of the class: its module and its name there.
TABLE: dict[str, Own] = {
    "collections.deque": Own(_deque, _decode_deque),
    "decimal.Decimal": plain(str, _of_text),
    "fractions.Fraction": plain(_fraction, _decode_fraction),
    "io.BytesIO": plain(lambda value: value.getvalue(), _buffer, "_io.BytesIO"),
    "numpy.dtype": plain(_records.encode_dtype, lambda _, value: _records.decode_dtype(value)),
    "numpy.ndarray": plain(_records.encode_array, lambda _, value: _records.decode_array(value)),
    "numpy.random.Generator": plain(
        _generators.encode_generator,
        lambda _, value: _generators.decode_generator(value),
        "numpy.random._generator.Generator",
    ),
    "numpy.random.MT19937": _bits("numpy.random._mt19937.MT19937"),
    "numpy.random.PCG64": _bits("numpy.random._pcg64.PCG64"),
    "numpy.random.PCG64DXSM": _bits("numpy.random._pcg64.PCG64DXSM"),
    "numpy.random.Philox": _bits("numpy.random._philox.Philox"),
    "numpy.random.RandomState": plain(
        _generators.encode_random_state,
        lambda _, value: _generators.decode_random_state(value),
        "numpy.random.mtrand.RandomState",
    ),
    "numpy.random.SFC64": _bits("numpy.random._sfc64.SFC64"),
    "numpy.recarray": plain(
        _records.encode_array,
        lambda _, value: _records.decode_records(value),
        f"{np.recarray.__module__}.{np.recarray.__qualname__}",  # it has moved between numpy's versions
    ),
    "omegaconf.DictConfig": _CONFIGURED._replace(spelled="omegaconf.dictconfig.DictConfig"),
    "omegaconf.ListConfig": _CONFIGURED._replace(spelled="omegaconf.listconfig.ListConfig"),
    "random.Random": plain(lambda value: value.getstate(), _decode_random),
    "torch.Generator": plain(_of_torch("encode_generator"), _of_torch("decode_generator"), "torch._C.Generator"),
    "torch.layout": plain(_of_torch("encode_named"), _of_torch("decode_named")),
    "torch.memory_format": plain(_of_torch("encode_named"), _of_torch("decode_named")),
    "torch.nested.nested_tensor": plain(_of_torch("encode_nested"), _of_torch("decode_nested")),
    "torch.torch_version.TorchVersion": plain(str, _of_text),
    "uuid.UUID": plain(str, _of_text),
    "zoneinfo.ZoneInfo": plain(_zone, _decode_zone),
}
#: Types that are stored structurally, like classes of a program, and that every reader knows.
_STRUCTURAL = ("argparse.Namespace", "collections.Counter", "types.SimpleNamespace")

RESERVED = frozenset({ATTRIBUTED, *TABLE, *_STRUCTURAL})
#: fastckpt's own types that are built only at a program's request. A configuration resolves the references in its
#: strings on each access, with any function that the program gave omegaconf: so a file must not be able to create one.
ON_DEMAND = frozenset({"omegaconf.DictConfig", "omegaconf.ListConfig"})
_SPELLED = {own.spelled or name: name for name, own in TABLE.items()} | {name: name for name in _STRUCTURAL}


def _known(codec: Codec | None) -> Codec | None:
    """A codec whose class is the same everywhere: a value that does not fit the class is malformed."""
    if codec is None:
        return None
    back = codec.decode

    def decode(value: Any, attributes: Any) -> Any:
        try:
            return back(value, attributes)
        except Undecodable as error:
            raise ValueError(str(error)) from error

    return codec._replace(decode=decode)


def by_class(cls: type) -> Codec | None:
    """The codec of a class, if it is one of these."""
    name = _SPELLED.get(f"{cls.__module__}.{cls.__qualname__}")
    found = None if name is None else _codec(name)
    return found if found is not None and found.cls is cls else None


def by_name(name: str) -> Codec | None:
    """The codec under a name; None for any other name, or if its module cannot be imported.

    A type that is made only on demand is returned in its stored form.
    """
    if name in ON_DEMAND:
        return Codec(object, name, lambda value: (value, None), lambda value, _: value)
    return _codec(name)


def _codec(name: str) -> Codec | None:
    own = TABLE.get(name)
    if own is None and name not in _STRUCTURAL:
        return None
    module, _, attribute = name.rpartition(".")
    try:
        if module.startswith("torch"):
            from fastckpt._tensors import torch as _torch  # noqa: F401, PLC0415 - it alone imports torch
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return None
    if own is None:
        return _known(codec_of(cls, name))
    decode = own.decode
    return Codec(cls, name, own.encode, lambda value, attributes: decode(cls, value, attributes))
