"""Pickles of torch.distributed.checkpoint, read with a fixed list of what may be in them. Nothing else is imported.

Tensors are not read: they become views of the mapped file.
"""

from __future__ import annotations

import datetime as dt
import io
import math
import pickle
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Of torch's file format of a zip archive, the length of an entry's header without its name and extras.
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
    """Stands for an object of torch's: it has the attributes, and does nothing."""

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
    return type(name, (Record,), {"__slots__": ()})


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
    """What stands for ``torch.Size``."""
    made = tuple(values) if isinstance(values, (tuple, list)) and len(values) <= _DIMENSIONS else None
    if made is None or any(type(one) is not int or one < 0 for one in made):
        raise pickle.UnpicklingError("a torch.Size that is none")
    return made


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _layout(name: Any) -> str:
    return str(name)


def _encode(text: Any, encoding: Any) -> bytes:
    """What the second protocol of pickles makes bytes of."""
    if encoding != "latin1" or type(text) is not str:
        raise pickle.UnpicklingError("bytes in another encoding")
    return text.encode("latin1")


#: What may be in either pickle, by module and name.
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): size,
    ("torch.serialization", "_get_layout"): _layout,
    ("_codecs", "encode"): _encode,
}
_BUILT_IN = {
    one.__name__: one for one in (set, frozenset, complex, bytearray, slice, dict, list, tuple, int, float, str)
}
_VALUES: dict[tuple[str, str], Any] = {
    **{("collections", one.__name__): one for one in (defaultdict, Counter, deque)},
    **{(module, name): one for module in ("builtins", "__builtin__") for name, one in _BUILT_IN.items()},
    **{("datetime", one.__name__): one for one in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone)},
}
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"})


def _refuse(module: str, name: str) -> NoReturn:
    raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not among the classes that are read")


def _dtype(torch: Any, name: str) -> Any:
    found = getattr(torch, name, None) if name.isidentifier() else None
    return found if isinstance(found, torch.dtype) else None


class MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``: dtypes as dtypes, sizes as tuples, torch's records as :class:`Record`."""

    def __init__(self, torch: Any, file: Any) -> None:
        super().__init__(file)
        self._torch = torch

    def find_class(self, module: str, name: str) -> Any:
        """One of the fixed list."""
        known = KINDS.get((module, name)) or _PLAIN.get((module, name))
        if known is None and module.partition(".")[0] == "pathlib" and name in _PATHS:
            known = _path
        if known is None and module == "torch":
            known = _dtype(self._torch, name)
        return known if known is not None else _refuse(module, name)


class Archive:
    """What ``torch.save`` wrote, at a place of a file that is mapped.

    Args:
        torch: the module.
        content: the bytes of it, as an array over the mapping.

    Raises:
        zipfile.BadZipFile: it is none.
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
            UnpicklingError: there is more in it than plain values and tensors.
        """
        return _ItemUnpickler(self._torch, self, io.BytesIO(self._zip.read(self._name))).load()

    def storage(self, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a storage, compared with the checksum of the archive."""
        info = self._zip.getinfo(f"{self._root}/data/{key}")
        at = info.header_offset
        header = self._content[at : at + _LOCAL_HEADER]
        begin = at + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        found = self._content[begin : begin + info.file_size]
        if info.compress_type or len(found) != info.file_size or zlib.crc32(found.data) != info.CRC:
            raise zipfile.BadZipFile(f"the bytes of the storage {key!r} are not what their checksum says")
        return found


class _ItemUnpickler(pickle.Unpickler):
    def __init__(self, torch: Any, archive: Archive, file: Any) -> None:
        super().__init__(file, encoding="utf-8")
        self._torch = torch
        self._archive = archive
        self._storages: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._rebuild: Mapping[str, Callable[..., Any]] = {
            "_rebuild_tensor_v2": self._tensor,
            "_rebuild_tensor_v3": self._tensor_of_dtype,
            "_rebuild_parameter": self._parameter,
        }

    def find_class(self, module: str, name: str) -> Any:
        known = _PLAIN.get((module, name)) or _VALUES.get((module, name))
        if known is None and module == "torch._utils":
            known = self._rebuild.get(name)
        if known is None and module in {"torch", "torch.storage"} and name in _DTYPE_OF_STORAGE:
            known = _dtype(self._torch, _DTYPE_OF_STORAGE[name])
        if known is None and module == "torch":
            known = self._torch.device if name == "device" else _dtype(self._torch, name)
        if known is None:
            known = _numpys(module, name)
        return known if known is not None else _refuse(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or type(key) is not str or not isinstance(dtype, self._torch.dtype):
            raise pickle.UnpicklingError("a reference that is no storage")
        if key not in self._storages:
            self._storages[key] = self._archive.storage(key)
        return dtype, self._storages[key]

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, *_: Any) -> Any:
        dtype, content = storage
        return self._view(content, dtype, offset, shape, strides, grad)

    def _tensor_of_dtype(
        self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, _: Any, dtype: Any, *__: Any
    ) -> Any:
        return self._view(storage[1], dtype, offset, shape, strides, grad)

    def _view(self, content: Any, dtype: Any, offset: Any, shape: Any, strides: Any, grad: Any) -> Any:
        shape, strides = size(shape), size(strides)
        if not isinstance(dtype, self._torch.dtype) or len(shape) != len(strides) or type(offset) is not int:
            raise pickle.UnpicklingError("a tensor that is none")
        reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1
        elements = len(content) // dtype.itemsize
        if not math.prod(shape):
            return self._torch.empty(shape, dtype=dtype)
        if offset < 0 or offset + reach > elements:
            raise pickle.UnpicklingError("a tensor outside its storage")
        whole = self._torch.from_numpy(content[: elements * dtype.itemsize]).view(dtype)
        return whole.as_strided(shape, strides, offset).requires_grad_(bool(grad))

    def _parameter(self, data: Any, grad: Any, *_: Any) -> Any:
        return self._torch.nn.Parameter(data, requires_grad=bool(grad))


def _numpys(module: str, name: str) -> Any:
    """What pickled arrays and scalars of numpy name, under its old and its new modules."""
    if module == "numpy" and name in {"ndarray", "dtype"}:
        return getattr(np, name)
    if module in {"numpy.core.multiarray", "numpy._core.multiarray"}:
        if name == "_reconstruct":
            return _array
        if name == "scalar":
            return _scalar
    return None


def _array(kind: Any, shape: Any, dtype: Any) -> Any:
    """An empty array, which the state that follows fills."""
    if kind is not np.ndarray or shape != (0,) or dtype not in (b"b", "b"):
        raise pickle.UnpicklingError("an array that is none")
    return np.ndarray((0,), np.int8)


def _scalar(dtype: Any, content: Any) -> Any:
    """A scalar of numpy from its bytes."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(content) is not bytes:
        raise pickle.UnpicklingError("a scalar that is none")
    return np.frombuffer(content, dtype, 1)[0]


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
