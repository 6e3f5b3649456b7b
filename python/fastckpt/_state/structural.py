"""Encodes values of classes as the plain values that they consist of, and decodes them.

A named tuple or a dataclass is stored as its fields and its other attributes, an enum as its name, a subclass of a
built-in type as the plain value and its attributes, a tensor subclass as the parts that its own protocol names.
Decoding runs no ``__init__`` and no other code of the class, except the ``__tensor_unflatten__`` of tensors, the
factories of a dataclass's defaults, the ``__set__`` of fields that are descriptors, and the ``_missing_`` of an enum
for unknown flags.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from fastckpt._tensors.described import Unsupported, exact, text

if TYPE_CHECKING:
    from collections.abc import Callable, Container

#: The stored value, and further attributes, if any.
Encoded: TypeAlias = "tuple[Any, dict[str, Any] | None]"


class Undecodable(Exception):  # noqa: N818 - it never leaves the package: the loop over the tokens adds the place
    """A value from which no instance of this program's class can be built, and why."""


class Codec(NamedTuple):
    """A class with its name in files and its two conversions.

    ``decode`` accepts the result of ``encode``: the value and the attributes. It raises Undecodable if the class does
    not fit, and any other error if the file is malformed. With ``spares`` a save leaves out attributes that cannot be
    stored, with a warning. With ``shallow``, the parts of the value are not examined.
    """

    cls: type
    name: str
    encode: Callable[[Any], Encoded]
    decode: Callable[[Any, Any], Any]
    spares: bool = False
    shallow: bool = False


def name_of(cls: type) -> str:
    """The name of a class in files, unless it is registered under another name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def codec_of(cls: type, name: str | None = None) -> Codec | None:
    """The codec of a class that can be stored by its structure; None for any other."""
    for kind in (_enum, _wrapper, _tensor, _named_tuple, _struct_sequence, _namespace, _derived, _dataclass):
        found = kind(cls)
        if found is not None:
            shallow = kind not in {_wrapper, _tensor}
            return Codec(cls, name or name_of(cls), *found, spares=kind is _dataclass, shallow=shallow)
    return None


_Pair: TypeAlias = "tuple[Callable[[Any], Encoded], Callable[[Any, Any], Any]] | None"


def without(attributes: Any) -> None:
    """Refuse attributes of a kind that has none."""
    if attributes is not None:
        raise ValueError("attributes for a type that has none")


# Enums.


def _enum(cls: Any) -> _Pair:
    if not issubclass(cls, enum.Enum):
        return None
    is_flag = issubclass(cls, enum.Flag)

    def encode(value: Any) -> Encoded:
        # The class may define its own ``name`` and ``value``.
        return (int(value._value_) if is_flag else value._name_), None

    def decode(value: Any, attributes: Any) -> Any:
        without(attributes)
        if type(value) is not (int if is_flag else str):
            raise ValueError("an enum member whose name is not a string, or whose flags are not an integer")
        if not is_flag:
            member = cls.__members__.get(value)
            if member is None:
                raise Undecodable(f"the class has no member {value!r}"[:200])
            return member
        try:
            return cls(value)
        except ValueError as error:
            raise Undecodable(f"the class has no such flags: {error}") from error

    return encode, decode


# Tensor subclasses that wrap others.


def wraps_tensors(cls: type) -> bool:
    """Whether a tensor subclass names its own parts."""
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def _wrapper(cls: Any) -> _Pair:
    if not wraps_tensors(cls):
        return None

    def encode(value: Any) -> Encoded:
        names, context = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        # torch itself recognises a Parameter this way.
        flags = ("p" if getattr(value, "_is_param", False) else "") + ("g" if value.requires_grad else "")
        outer = (inner, context, value.size(), tuple(value.stride()))
        return ((*outer, flags) if flags else outer), None

    def decode(value: Any, attributes: Any) -> Any:
        without(attributes)
        inner, context, size, stride, *flags = exact(value, tuple)
        if type(inner) is not dict or list(map(text, flags)) not in ([], ["p"], ["g"], ["pg"]):
            raise ValueError("not the parts of a tensor")
        try:
            tensor = cls.__tensor_unflatten__(inner, context, size, stride)
        except Exception as error:
            raise Undecodable(f"its __tensor_unflatten__ raised {error!r}") from error
        if flags:
            from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - it is there: the class is one of its tensors

            tensor = _torch.with_flags(tensor, flags[0])
        return tensor

    return encode, decode


def _tensor(cls: Any) -> _Pair:
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(cls, torch.Tensor):
        return None
    from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - it is there

    def encode(value: Any) -> Encoded:
        return _torch.without_class(value), _attributes(value)

    def decode(value: Any, attributes: Any) -> Any:
        return set_attributes(_torch.with_class(value, cls), attributes)

    return encode, decode


# Attributes.


def _classes(cls: type) -> list[type]:
    """The bases of a class, up to the first that is built in, or not made at run time."""
    # In Python 3.12 ``defaultdict`` is made at run time, too.
    return list(itertools.takewhile(lambda base: base not in _BASES and base.__flags__ & _HEAP, cls.__mro__))


#: The flag of types that are made at run time, as are all classes written in Python (``Py_TPFLAGS_HEAPTYPE``).
_HEAP = 1 << 9


def own_dict(value: Any) -> dict[Any, Any] | None:
    """The dictionary of an object's attributes, even if the class has a property of that name."""
    found = _dict_slot(type(value))
    return None if found is None else found.__get__(value)


def _dict_slot(cls: type) -> Any:
    for base in cls.__mro__:
        slot = base.__dict__.get("__dict__")
        if isinstance(slot, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return slot
    return None


def _attributes(value: Any, but: Container[Any] = ()) -> dict[str, Any] | None:
    """The attributes of an object, without its built-in value and those in ``but``; None if it has none."""
    found: dict[str, Any] = {}
    cls = type(value)
    for slot in slots_of(cls):
        if slot.__name__ not in but:
            with suppress(AttributeError):  # not set
                found[slot.__name__] = slot.__get__(value)
    own = own_dict(value)
    if own is value:
        # The value is a dict that is its own attribute dictionary, so that its keys are attributes.
        found[_ITSELF] = None
    elif own:
        found.update(_checked(cls, {name: part for name, part in own.items() if name not in but}))
    return found or None


def _checked(cls: type, own: dict[Any, Any]) -> dict[str, Any]:
    """The attributes in an object's dictionary; Unsupported for one that no load would set."""
    for name in own:
        if type(name) is not str:
            raise Unsupported(f"it has an attribute {name!r}, which is not a string: {_REMEDY}")
        if name != _PARAMETERS and _stands_in(cls, name):
            raise Unsupported(f"its attribute {name!r} stands in for a method or a property of the class: {_REMEDY}")
    return {name: attribute for name, attribute in own.items() if name != _PARAMETERS}


_REMEDY = "rename it, or convert the whole with Registry(encode=)"
_ITSELF = "__dict__"
#: The attribute in which typing stores the parameters of a generic class: not a value that can be stored.
_PARAMETERS = "__orig_class__"


def _stands_in(cls: type, name: str) -> bool:
    """Whether an attribute of that name would hide a member of the class."""
    if name.startswith("__") and name.endswith("__"):
        return True
    for base in cls.__mro__:
        if name in base.__dict__:
            there = base.__dict__[name]
            return callable(there) or isinstance(there, (property, classmethod, staticmethod))
    return False


def slots_of(cls: type) -> list[Any]:
    """The descriptors of the slots of a class that is made at run time."""
    return [
        slot for base in _classes(cls) for slot in base.__dict__.values() if type(slot) is types.MemberDescriptorType
    ]


def set_attributes(made: Any, attributes: Any) -> Any:
    """Give ``made`` the attributes that a file names; returns it."""
    if attributes is None:
        return made
    if type(attributes) is not dict:
        raise ValueError("attributes that are not a dict")
    cls = type(made)
    own: dict[Any, Any] | None = None
    for name, value in attributes.items():
        if type(name) is not str:
            raise ValueError("the name of an attribute is not a string")
        slot = _slot(cls, name)
        if slot is not None:
            slot.__set__(made, value)
            continue
        if name == _ITSELF and value is None and isinstance(made, dict) and _dict_slot(cls) is not None:
            _dict_slot(cls).__set__(made, made)
            continue
        if _stands_in(cls, name):
            raise Undecodable(f"its attribute {name!r} would hide a method or a property of the class"[:200])
        own = own_dict(made) if own is None else own
        if own is None:
            raise Undecodable(f"the class has no attribute {name!r}"[:200])
        own[name] = value
    return made


def _slot(cls: type, name: str) -> Any:
    for base in _classes(cls):
        slot: Any = base.__dict__.get(name)
        if type(slot) is types.MemberDescriptorType:
            return slot
    return None


# Named tuples.


def _named_tuple(cls: Any) -> _Pair:
    names = getattr(cls, "_fields", None)
    if not issubclass(cls, tuple) or type(names) is not tuple or not all(type(name) is str for name in names):
        return None

    def encode(value: Any) -> Encoded:
        return dict(zip(names, tuple.__iter__(value), strict=True)), _attributes(value)

    def decode(value: Any, attributes: Any) -> Any:
        _check_fields(value, names)
        defaults = getattr(cls, "_field_defaults", {})
        for name in names:
            if name not in value and name not in defaults:
                _missing(name)
        made = tuple.__new__(cls, [value[name] if name in value else defaults[name] for name in names])
        return set_attributes(made, attributes)

    return encode, decode


def _struct_sequence(cls: Any) -> _Pair:
    """Named tuples from C, as from ``torch.topk`` and ``time.localtime``: only their type can make them."""
    if not issubclass(cls, tuple) or not hasattr(cls, "n_sequence_fields"):
        return None

    def encode(value: Any) -> Encoded:
        _, (members, more) = value.__reduce__()
        return members, more or None

    def decode(value: Any, attributes: Any) -> Any:
        if type(value) is not tuple:
            raise ValueError("not the members of a tuple")
        try:
            return cls(value, attributes or {})
        except TypeError as error:
            raise Undecodable(str(error)) from error

    return encode, decode


def _check_fields(value: Any, known: Any) -> None:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise ValueError("not the fields of an object")
    for name in value:
        if name not in known:
            raise Undecodable(f"the class has no field {name!r}"[:200])


def _missing(name: str) -> NoReturn:
    raise Undecodable(f"the field {name!r} of the class is not in the checkpoint, and has no default")


# Dataclasses.


def _dataclass(cls: Any) -> _Pair:
    # Only an instance that ``object`` creates can be made without running code of the class.
    if not hasattr(cls, "__dataclass_fields__") or _classes(cls)[-1].__base__ is not object:
        return None
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(cls)}
    # A value cached by a property is computed again.
    caches = {
        name for base in _classes(cls) for name, it in vars(base).items() if type(it) is functools.cached_property
    }

    def encode(value: Any) -> Encoded:
        # A field that is not an argument of __init__ need not be set.
        parts = {name: getattr(value, name) for name in fields if hasattr(value, name)}
        return parts, _attributes(value, fields.keys() | caches)

    def decode(value: Any, attributes: Any) -> Any:
        _check_fields(value, fields)
        made: Any = object.__new__(cls)
        parts = {name: _default_of(field) for name, field in fields.items() if name not in value} | value
        for name, part in parts.items():
            if part is not dataclasses.MISSING:
                _set_field(made, name, part)
        return set_attributes(made, attributes)

    return encode, decode


def _default_of(field: Any) -> Any:
    """The default of a dataclass's field; MISSING if none is needed."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING and field.init:
        _missing(field.name)
    return field.default


def _set_field(made: Any, name: str, value: Any) -> None:
    try:
        object.__setattr__(made, name, value)
    except AttributeError as error:
        raise Undecodable(f"the field {name!r} of the class cannot be set: {error}") from error


# Namespaces, which have only attributes.


def _is_namespace(cls: type) -> bool:
    argparse: Any = sys.modules.get("argparse")
    return issubclass(cls, types.SimpleNamespace) or bool(argparse and issubclass(cls, argparse.Namespace))


def _namespace(cls: Any) -> _Pair:
    if not _is_namespace(cls):
        return None

    def encode(value: Any) -> Encoded:
        return _attributes(value) or {}, None

    def decode(value: Any, attributes: Any) -> Any:
        without(attributes)
        if type(value) is not dict:
            raise ValueError("not the attributes of a namespace")
        base = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
        return set_attributes(base.__new__(cls), value)

    return encode, decode


def is_record(cls: Any) -> bool:
    """Whether instances of a class consist only of attributes that may be set: dataclasses and namespaces."""
    if _is_namespace(cls):
        return True
    return _dataclass(cls) is not None and not cls.__dataclass_params__.frozen


def is_updated(cls: type) -> bool:
    """Whether a load moves new values into existing instances of a class."""
    return issubclass(cls, (dict, list)) or is_record(cls)


# Subclasses of built-in types.


def _ordered(value: Any) -> Any:
    return OrderedDict((key, dict.__getitem__(value, key)) for key in OrderedDict.__iter__(value))


def _make_ordered(cls: Any, value: Any) -> Any:
    made = OrderedDict.__new__(cls)
    for key, item in value.items():
        OrderedDict.__setitem__(made, key, item)
    return made


def _plain_dict(value: Any) -> Any:
    # ``dict.copy`` calls the ``__iter__`` of a class that overrides it.
    return dict(dict.items(value))


def _counter(value: Any) -> Any:
    return _make_dict(Counter, _plain_dict(value))


def _make_dict(cls: Any, value: Any) -> Any:
    made = dict.__new__(cls)
    dict.update(made, value)
    return made


def _default(value: Any) -> Any:
    return defaultdict(_FACTORY.__get__(value), _plain_dict(value))


def _make_default(cls: Any, value: Any) -> Any:
    made = defaultdict.__new__(cls)
    _FACTORY.__set__(made, value.default_factory)
    dict.update(made, value)
    return made


_FACTORY: Any = defaultdict.__dict__["default_factory"]


def _make_list(cls: Any, value: Any) -> Any:
    made = list.__new__(cls)
    list.extend(made, value)
    return made


def _make_set(cls: Any, value: Any) -> Any:
    made = set.__new__(cls)
    set.update(made, value)
    return made


def _make_deque(cls: Any, value: Any) -> Any:
    made = deque.__new__(cls)
    deque.__init__(made, value, value.maxlen)
    return made


def _make_bytearray(cls: Any, value: Any) -> Any:
    made = bytearray.__new__(cls)
    bytearray.extend(made, value)
    return made


_ALL = slice(None)
#: Built-in types: the function that makes a plain value from an instance of a subclass, without its methods, and its
#: inverse.
_BASES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    OrderedDict: (_ordered, _make_ordered),
    defaultdict: (_default, _make_default),
    Counter: (_counter, _make_dict),
    dict: (_plain_dict, _make_dict),
    deque: (lambda value: deque(deque.__iter__(value), value.maxlen), _make_deque),
    list: (list.copy, _make_list),
    tuple: (lambda value: tuple(tuple.__iter__(value)), tuple.__new__),
    set: (lambda value: set(set.__iter__(value)), _make_set),
    frozenset: (lambda value: frozenset(frozenset.__iter__(value)), frozenset.__new__),
    str: (str.__str__, str.__new__),
    int: (int.__int__, int.__new__),
    float: (float.__float__, float.__new__),
    complex: (complex.__pos__, complex.__new__),
    bytes: (lambda value: bytes.__getitem__(value, _ALL), bytes.__new__),
    bytearray: (lambda value: bytearray.__getitem__(value, _ALL), _make_bytearray),
}


def _derived(cls: Any) -> _Pair:
    base = next((base for base in cls.__mro__[1:] if base in _BASES), None)
    if base is None:
        return None
    take, make = _BASES[base]

    def encode(value: Any) -> Encoded:
        return take(value), _attributes(value)

    def decode(value: Any, attributes: Any) -> Any:
        if type(value) is not base:
            raise Undecodable(f"it was saved as a {type(value).__name__}, but the class is a {base.__name__}")
        try:
            made = make(cls, value)
        except TypeError as error:  # a type written in C may have its own way to be made
            raise Undecodable(str(error)) from error
        return set_attributes(made, attributes)

    return encode, decode
