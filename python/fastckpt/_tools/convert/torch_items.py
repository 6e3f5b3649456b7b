"""Pickles of torch.distributed.checkpoint, read with a fixed list of allowed names. Nothing else is imported.

A name in a pickle resolves to a recorder, which accepts checked arguments, and on which no attribute can be set.
Classes of numpy are never found, because numpy trusts the states that it gets. Tensors are not read: they become views
of the mapped file.
"""

from __future__ import annotations

import datetime as dt
import io
import math
import pickle
import re
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: The length of an entry's header in a zip archive, without its name and extras.
_LOCAL_HEADER = 30
_DIMENSIONS = 64
_DTYPE_OF_STORAGE = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}


class Record:
    """A stand-in for an object of torch, which has its attributes and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.attributes: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.values = ()
        self.attributes = state

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__.get("attributes")
        if isinstance(attributes, dict) and name in attributes:
            return attributes[name]
        raise AttributeError(name)


def _kind(name: str) -> type[Record]:
    # A pickle can set nothing on the class: its __setstate__ is found, but lacks an argument.
    return type(name, (Record,), {"__slots__": ()})


class Recorder:
    """A stand-in for a function or a class that a pickle calls.

    Args:
        make: the function that is called with checked arguments.
        kind: for a built-in class, that class.
    """

    __slots__ = ("kind", "make")

    def __init__(self, make: Callable[..., Any], kind: Any = None) -> None:
        self.make = make
        self.kind = kind

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)

    def __setstate__(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError("a state for an object that has none")


METADATA = "torch.distributed.checkpoint.metadata"
KINDS: dict[tuple[str, str], type[Record]] = {
    (module, name): _kind(name)
    for module, names in {
        METADATA: (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    }.items()
    for name in names
}


def size(values: Any = ()) -> tuple[int, ...]:
    """Replaces ``torch.Size``."""
    made = tuple(values) if isinstance(values, (tuple, list)) and len(values) <= _DIMENSIONS else None
    if made is None or any(type(one) is not int or one < 0 for one in made):
        raise pickle.UnpicklingError("an invalid torch.Size")
    return made


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _layout(name: Any) -> str:
    return str(name)


def _encode(text: Any, encoding: Any) -> bytes:
    """The function with which the second pickle protocol makes bytes."""
    if encoding != "latin1" or type(text) is not str:
        raise pickle.UnpicklingError("bytes that are not latin1 text")
    return text.encode("latin1")


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(_plain(items, list, tuple))


def _default(factory: Any = None, items: Any = ()) -> defaultdict[Any, Any]:
    known = None if factory is None else _plain(factory, Recorder).kind
    if factory is not None and known not in _FACTORIES:
        raise pickle.UnpicklingError("an invalid factory of a defaultdict")
    return defaultdict(known, _plain(items, tuple, dict))


def _plain(value: Any, *kinds: type) -> Any:
    """``value``, which is of one of these types and not of a subclass: no method of a subclass is called."""
    if type(value) not in kinds:
        raise pickle.UnpicklingError(f"{type(value).__name__} instead of {kinds[0].__name__}")
    return value


def _taking(kind: Any, *kinds: type, most: int = 1) -> Recorder:
    """A built-in class whose arguments are only of these types."""

    def make(*arguments: Any) -> Any:
        if len(arguments) > most:
            raise pickle.UnpicklingError(f"too many arguments of {kind.__name__}")
        return kind(*(_plain(argument, *kinds) for argument in arguments))

    return Recorder(make, kind)


#: The names that may occur in either pickle, by module.
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Recorder(_ordered),
    ("torch", "Size"): Recorder(size),
    ("torch.serialization", "_get_layout"): Recorder(_layout),
    ("_codecs", "encode"): Recorder(_encode),
}
_NUMBERS = (int, float)
#: A number is not a valid argument of ``bytes``: it would be the length of the result.
_BUILT_IN = {
    "set": _taking(set, list, tuple),
    "frozenset": _taking(frozenset, list, tuple),
    "complex": _taking(complex, *_NUMBERS, most=2),
    "bytearray": _taking(bytearray, bytes),
    "slice": _taking(slice, int, type(None), most=3),
    **{one.__name__: _taking(one, one) for one in (dict, list, tuple, int, float, str, bool)},
}
_FACTORIES = frozenset((set, dict, list, tuple, int, float, str, bool))
_VALUES: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): Recorder(_default),
    ("collections", "Counter"): _taking(Counter, dict),
    ("collections", "deque"): _taking(deque, tuple, list, int, type(None), most=2),
    **{(module, name): one for module in ("builtins", "__builtin__") for name, one in _BUILT_IN.items()},
    ("datetime", "datetime"): _taking(dt.datetime, bytes, dt.timezone, most=2),
    ("datetime", "date"): _taking(dt.date, bytes),
    ("datetime", "time"): _taking(dt.time, bytes, dt.timezone, most=2),
    ("datetime", "timedelta"): _taking(dt.timedelta, int, most=3),
    ("datetime", "timezone"): _taking(dt.timezone, dt.timedelta, str, most=2),
}
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"})


def _refuse(module: str, name: str) -> NoReturn:
    raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not among the classes that are read")


def _dtype(torch: Any, name: str) -> Any:
    # `getattr` is not used, because it makes torch import further modules.
    found = vars(torch).get(name)
    return found if type(found) is torch.dtype else None


class MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``: dtypes as dtypes, sizes as tuples, torch's records as :class:`Record`."""

    def __init__(self, torch: Any, file: Any) -> None:
        super().__init__(file)
        self._torch = torch

    def find_class(self, module: str, name: str) -> Any:
        """A name from the fixed list."""
        known = KINDS.get((module, name)) or _PLAIN.get((module, name))
        if known is None and module.partition(".")[0] == "pathlib" and name in _PATHS:
            known = Recorder(_path)
        if known is None and module == "torch":
            known = _dtype(self._torch, name)
        return known if known is not None else _refuse(module, name)


class Archive:
    """A file of ``torch.save`` at an offset of a mapped file.

    Args:
        torch: the module.
        content: its bytes, as an array over the mapping.

    Raises:
        zipfile.BadZipFile: the content is not a zip file.
    """

    def __init__(self, torch: Any, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._torch = torch
        self._content = content
        self._zip = zipfile.ZipFile(_View(content))
        names = [name for name in self._zip.namelist() if name.rpartition("/")[2] == "data.pkl"]
        if len(names) != 1:
            raise zipfile.BadZipFile("it has no data.pkl")
        self._name = names[0]
        self._root = names[0].rpartition("/")[0]

    def read(self) -> Any:
        """The value, its tensors as views of the mapping.

        Raises:
            UnpicklingError: the file holds more than plain values and tensors.
        """
        if self._zip.getinfo(self._name).compress_type:
            raise zipfile.BadZipFile("its data.pkl is compressed, which torch does not do")
        return _ItemUnpickler(self._torch, self, io.BytesIO(self._zip.read(self._name))).load()

    def storage(self, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a storage, compared with the checksum of the archive."""
        info = self._zip.getinfo(f"{self._root}/data/{key}")
        at = info.header_offset
        header = self._content[at : at + _LOCAL_HEADER]
        begin = at + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        found = self._content[begin : begin + info.file_size]
        if info.compress_type or len(found) != info.file_size or zlib.crc32(found.data) != info.CRC:
            raise zipfile.BadZipFile(f"the bytes of the storage {key!r} do not match their checksum")
        return found


#: Interprets pickles in Python: each opcode can be limited, and none allocates more than the size of the pickle.
_Unpickler: Any = pickle._Unpickler  # noqa: SLF001 - the module's own other reader
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.LONG4, pickle.FLOAT, pickle.BINFLOAT, pickle.UNICODE, pickle.BINUNICODE),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
    *(pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1),
    *(pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_DICT, pickle.DICT),
    *(pickle.EMPTY_SET, pickle.FROZENSET, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.ADDITEMS, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.BINPERSID),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.GET, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE),
)


def _on(opcode: bytes, *kinds: type, marked: bool) -> Callable[[Any], None]:
    """The effect of an opcode that adds to a container, only for these types."""
    add = _Unpickler.dispatch[opcode[0]]

    def checked(reader: Any) -> None:
        stack = reader.metastack[-1] if marked else reader.stack[: -2 if opcode == pickle.SETITEM else -1]
        _plain(stack[-1], *kinds)
        add(reader)

    return checked


def _build(reader: Any) -> None:
    """Set a state: the elements of an array, or the attributes of an OrderedDict; refuse any other."""
    state = reader.stack.pop()
    made = reader.stack[-1]
    if type(made) is _Dtype:
        made.read(state)
    elif type(made) is np.ndarray:
        _fill(made, state)
    elif type(made) is OrderedDict and all(type(name) is str for name in _plain(state, dict)):
        vars(made).update(state)
    else:
        raise pickle.UnpicklingError(f"a state that a {type(made).__name__} cannot have")


_MAPPINGS = (dict, OrderedDict, defaultdict)


class _ItemUnpickler(_Unpickler):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = {
        **{opcode[0]: _Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},
        pickle.APPEND[0]: _on(pickle.APPEND, list, deque, marked=False),
        pickle.APPENDS[0]: _on(pickle.APPENDS, list, deque, marked=True),
        pickle.SETITEM[0]: _on(pickle.SETITEM, *_MAPPINGS, marked=False),
        pickle.SETITEMS[0]: _on(pickle.SETITEMS, *_MAPPINGS, marked=True),
        pickle.ADDITEMS[0]: _on(pickle.ADDITEMS, set, marked=True),
        pickle.BUILD[0]: _build,
    }

    def __init__(self, torch: Any, archive: Archive, file: Any) -> None:
        super().__init__(file, encoding="utf-8")
        self._torch = torch
        self._archive = archive
        self._storages: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._rebuild: Mapping[str, Recorder] = {
            "_rebuild_tensor_v2": Recorder(self._tensor),
            "_rebuild_tensor_v3": Recorder(self._tensor_of_dtype),
            "_rebuild_parameter": Recorder(self._parameter),
        }

    def find_class(self, module: str, name: str) -> Any:
        known = _PLAIN.get((module, name)) or _VALUES.get((module, name))
        if known is None and module == "torch._utils":
            known = self._rebuild.get(name)
        if known is None and module in {"torch", "torch.storage"} and name in _DTYPE_OF_STORAGE:
            known = _dtype(self._torch, _DTYPE_OF_STORAGE[name])
        if known is None and module == "torch":
            known = Recorder(self._device) if name == "device" else _dtype(self._torch, name)
        if known is None:
            known = _numpys(module, name)
        return known if known is not None else _refuse(module, name)

    def _device(self, name: Any, *index: Any) -> Any:
        return self._torch.device(_plain(name, str), *(_plain(one, int) for one in index))

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = _plain(pid, tuple)
        if type(kind) is not str or kind != "storage" or type(key) is not str or type(dtype) is not self._torch.dtype:
            raise pickle.UnpicklingError("a reference to something other than a storage")
        if key not in self._storages:
            self._storages[key] = self._archive.storage(key)
        return dtype, self._storages[key]

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, *_: Any) -> Any:
        dtype, content = _plain(storage, tuple)
        return self._view(content, dtype, offset, shape, strides, grad)

    def _tensor_of_dtype(
        self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, _: Any, dtype: Any, *__: Any
    ) -> Any:
        return self._view(_plain(storage, tuple)[1], dtype, offset, shape, strides, grad)

    def _view(self, content: Any, dtype: Any, offset: Any, shape: Any, strides: Any, grad: Any) -> Any:
        shape, strides = size(shape), size(strides)
        if type(dtype) is not self._torch.dtype or len(shape) != len(strides) or type(offset) is not int:
            raise pickle.UnpicklingError("an invalid tensor")
        if type(content) is not np.ndarray or content.dtype != np.uint8 or content.ndim != 1:
            raise pickle.UnpicklingError("an invalid tensor")
        reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1
        elements = len(content) // dtype.itemsize
        if not math.prod(shape):
            return self._torch.empty(shape, dtype=dtype)
        if offset < 0 or offset + reach > elements:
            raise pickle.UnpicklingError("a tensor outside its storage")
        whole = self._torch.from_numpy(content[: elements * dtype.itemsize]).view(dtype)
        return whole.as_strided(shape, strides, offset).requires_grad_(_plain(grad, bool))

    def _parameter(self, data: Any, grad: Any, *_: Any) -> Any:
        _plain(data, self._torch.Tensor)
        return self._torch.nn.Parameter(data, requires_grad=_plain(grad, bool))


#: Supported elements of numpy, by the codes of pickled dtypes: numbers, strings, bytes; times; objects.
_CODE = r"b1|[iu][1248]|f[248]|c(8|16)|[SU][0-9]{1,6}"
_TIMES, _OBJECTS = ("m8", "M8"), "O8"
_UNITS = frozenset({b"generic", *(unit.encode() for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns"))})


class _Dtype:
    """A stand-in for a plain dtype of numpy: its code, its byte order and the unit of a time."""

    __slots__ = ("code", "order", "unit")

    def __init__(self, code: Any, *_: Any) -> None:
        if re.fullmatch(rf"{_CODE}|[mM]8|{_OBJECTS}", _plain(code, str)) is None:
            raise pickle.UnpicklingError("an invalid dtype")
        self.code, self.order, self.unit = code, "|", ""

    def read(self, state: Any) -> None:
        """Take byte order and unit from the state of a pickled dtype."""
        _, order, *parts, _, _, _ = _plain(state, tuple)[:8]
        if type(order) is not str or order not in {"<", ">", "|", "="} or any(part is not None for part in parts):
            raise pickle.UnpicklingError("a dtype that is not plain")
        self.order = order
        if self.code in _TIMES:
            unit, number, *_ = _plain(_plain(state[8], tuple)[1], tuple)
            if _plain(unit, bytes) not in _UNITS or not 0 < _plain(number, int) < 1 << 31:
                raise pickle.UnpicklingError("an invalid unit of time")
            self.unit = "" if unit == b"generic" else f"[{number}{unit.decode()}]"

    def plain(self) -> np.dtype[Any]:
        """The numpy dtype."""
        made: np.dtype[Any] = np.dtype("O" if self.code == _OBJECTS else f"{self.order}{self.code}{self.unit}")
        return made


#: Replaces ``numpy.ndarray`` when a pickle makes an array.
_ARRAY = Recorder(lambda *_: _refuse("numpy", "ndarray"))


def _numpys(module: str, name: str) -> Any:
    """The names that pickled arrays and scalars of numpy use, under its old and its new modules."""
    if module == "numpy":
        return {"ndarray": _ARRAY, "dtype": Recorder(_Dtype)}.get(name)
    if module in {"numpy.core.multiarray", "numpy._core.multiarray"}:
        return {"_reconstruct": Recorder(_array), "scalar": Recorder(_scalar)}.get(name)
    return None


def _array(kind: Any, shape: Any, dtype: Any) -> Any:
    """An empty array, which the state that follows fills."""
    if kind is not _ARRAY or _plain(shape, tuple) != (0,) or _plain(dtype, bytes, str) not in (b"b", "b"):
        raise pickle.UnpicklingError("an invalid array")
    return np.ndarray((0,), np.int8)


def _fill(made: Any, state: Any) -> None:
    """Give an empty array its shape, dtype and elements, whose number is checked."""
    _, shape, dtype, fortran, content = _plain(state, tuple)
    shape, found = size(shape), _plain(dtype, _Dtype).plain()
    if made.shape != (0,) or made.dtype != np.int8 or type(fortran) is not bool:
        raise pickle.UnpicklingError("an invalid array")
    expected = math.prod(shape) * (1 if found.hasobject else found.itemsize)
    if len(_plain(content, list if found.hasobject else bytes)) != expected:
        raise pickle.UnpicklingError("an array whose content does not fit its shape and dtype")
    made.__setstate__((1, shape, found, fortran, content))


def _scalar(dtype: Any, content: Any) -> Any:
    """A scalar of numpy from its bytes."""
    found = _plain(dtype, _Dtype).plain()
    if found.hasobject or len(_plain(content, bytes)) != found.itemsize:
        raise pickle.UnpicklingError("an invalid scalar")
    return np.frombuffer(content, found, 1)[0]


class _View(io.RawIOBase):
    """An array as a file."""

    def __init__(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        super().__init__()
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part.tobytes()
        self._at += len(part)
        return len(part)
