"""Files of safetensors, saved whole and durable, and verified if fastckpt has their checksums (docs/files.md).

    from fastckpt.integrations.safetensors import load_file, safe_open, save_file

Or, for programs that call the package itself: ``fastckpt.integrations.safetensors.install()``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors as _package
from safetensors import SafetensorError, TensorSpec
from safetensors import numpy as _numpy
from safetensors import safe_open as _open

import fastckpt
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed
from fastckpt._portable.limits import BITS, MAX_HEADER, RESERVED_NAME
from fastckpt._safetensors_header import text_of
from fastckpt._stores.reader import open_reader

from ._directory import is_ours

__all__ = ["install", "load_file", "safe_open", "save_file"]

_installed = Installed()


def install(*, io: Any = "auto", verify: bool = True) -> Installation:
    """Make the package safetensors use the functions of this module.

    It replaces ``save_file`` and ``load_file``, however a program calls them (``save_pretrained``), and
    ``safetensors.safe_open`` for later imports; that name is then a function, not a class.

    Args:
        io: how bytes are written: a :class:`fastckpt.IO`, or the name of an engine.
        verify: as for :func:`safe_open`.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt, numpy, safetensors.numpy
        >>> with fastckpt.integrations.safetensors.install():
        ...     safetensors.numpy.save_file({"w": numpy.ones(3)}, "model.safetensors")
    """
    parts = [one for one in vars(_package).values() if isinstance(one, ModuleType) and "._" not in one.__name__]
    places = ((owner, one.__name__[1:], one) for owner in (_package, *parts) for one in (_serialize_file, _safe_open))
    ours = (place for place in places if hasattr(*place[:2]))
    return _installed.begin({"io": check_io("install", io), "verify": bool(verify)}, ours)


def _safe_open(options: Any, _: Any, *given: Any, **more: Any) -> Any:
    return safe_open(*given, verify=options["verify"], **more)


def _serialize_file(options: Any, theirs: Any, tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
    specs = isinstance(tensor_dict, dict) and all(isinstance(one, TensorSpec) for one in tensor_dict.values())
    # Otherwise safetensors raises the error, or replaces a link by a file: the link's target may belong to others.
    if specs and not os.path.islink(filename):  # noqa: PTH114 - safetensors has other words for what is not a path
        _write(tensor_dict, filename, metadata, options["io"])
    else:
        theirs(tensor_dict, filename, metadata)


def _write(specs: dict[str, TensorSpec], filename: Any, metadata: dict[str, str] | None, io: Any) -> None:
    empty = TensorSpec(dtype="uint8", shape=[0], data_ptr=1, data_len=0)
    _package.serialize(dict.fromkeys(specs, empty), metadata)  # refuses values that are not strings
    # Tensors with wider elements come first, so that each tensor is aligned.
    order = sorted(specs.items(), key=lambda item: (-BITS.get(item[1].dtype, 0), item[0]))
    for name, spec in order:
        if name == RESERVED_NAME or prod(spec.shape) * BITS.get(spec.dtype, 0) != 8 * spec.data_len:
            raise SafetensorError(f"save_file: {filename}: the format cannot hold {name!r}: {spec}")
    header = text_of(((name, spec.dtype, spec.shape, spec.data_len) for name, spec in order), metadata)
    if len(header) > MAX_HEADER:
        raise SafetensorError(f"save_file: {filename}: names, shapes and metadata take more than {MAX_HEADER} bytes")
    with fastckpt.open_write(filename, io=io) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, spec in order:
            file.write((ctypes.c_char * spec.data_len).from_address(spec.data_ptr))


def save_file(tensors: Any, filename: Any, metadata: dict[str, str] | None = None, *, io: Any = "auto") -> None:
    """Save tensors to a file of safetensors, by :func:`fastckpt.open_write`: whole and durable, or not at all.

    Args:
        tensors: a dict of torch tensors or of numpy arrays. They must not change until this returns.
        filename: the path of the file.
        metadata: strings by name, for the header.
        io: as for :func:`fastckpt.open_write`.

    Raises:
        OSError: the storage failed.
        RuntimeError: tensors share memory.
        safetensors.SafetensorError: the format has no such dtype or name.
        TypeError: ``metadata`` holds another type.
        ValueError: a tensor is sparse or not contiguous, or ``tensors`` is not a dict of tensors.

    Example:
        >>> import numpy
        >>> from fastckpt.integrations.safetensors import save_file
        >>> save_file({"w": numpy.ones((2, 3))}, "model.safetensors")
    """
    keep: list[Any] = []  # keeps the memory at the addresses alive
    if isinstance(tensors, dict) and all(isinstance(one, np.ndarray) for one in tensors.values()):
        arrays = {name: np.asarray(one, order="C") for name, one in tensors.items()}
        specs: Any = _numpy._flatten(arrays, keep)
    else:
        from safetensors import torch as _torch  # noqa: PLC0415 - torch is optional

        specs = _torch._flatten_as_ptr(tensors, keep)
    _write(specs, filename, metadata, check_io("save_file", io))


class _File(AbstractContextManager["_File"]):
    """The result of :func:`safe_open`, with all methods of a file of safetensors."""

    def __init__(self, filename: Any, framework: str, device: Any, backend: str, *, verify: bool) -> None:
        self._framework, self._device = framework, device
        self._path = Path(filename).resolve() if verify else None
        self._reader, self._numbers = _checksums_of(self._path)
        self._sound: set[int | None] = {None}
        self._theirs: Any = _open(filename, framework, device, backend=backend)
        # If another file got the path after the manifest was read, the check finds that its bytes differ.
        self._mappings = self._reader and self._reader.map([*self._numbers.values()])

    def __getattr__(self, name: str) -> Any:
        if name == "_theirs":
            raise SafetensorError("File is closed")
        return getattr(self._theirs, name)

    def __exit__(self, *_: object) -> None:
        self.__dict__.pop("_theirs", None)  # a loader may still use this object

    def get_tensor(self, name: str) -> Any:
        self._check(name)
        return self._theirs.get_tensor(name)

    def get_tensors(self) -> Any:
        if self._path and not self._reader:
            fastckpt.open_read(self._path).close()
        self._check(*self._theirs.keys())
        return self._theirs.get_tensors()

    def get_slice(self, name: str) -> Any:
        return _Slice(self._theirs.get_slice(name), lambda: self._check(name))

    def prefetch(self, plan: Any = None, *, device: Any = None, threads: int = 8) -> Any:
        theirs = self._theirs
        plan = dict.fromkeys(theirs.offset_keys()) if plan is None else {**plan}
        target = next(one for one in (device, self._device, "cpu") if one is not None)
        if str(target) != "cpu" and hasattr(theirs, "prefetch"):
            self._check(*plan)
            return theirs.prefetch(plan, device=target, threads=threads)
        if self._framework not in ("pt", "torch", "pytorch"):
            raise SafetensorError('prefetch returns torch tensors: open the file with framework="pt"')

        def read(name: str) -> Any:
            self._check(name, threads=1)
            tensor, rows = theirs.get_tensor(name), plan[name]
            return (tensor if rows is None else tensor[rows]).to(target, copy=True)

        return _Loader([*plan], read, threads)

    def _check(self, *names: str, threads: int | None = None) -> None:
        """Verify these tensors and the header, as far as there are checksums, unless they were verified before."""
        least = next(iter(self._numbers.values()), None)  # stands in for tensors without bytes or not in the manifest
        numbers = {self._numbers.get(name, least) for name in names} - self._sound
        if numbers:
            self._reader.check(self._mappings, [*numbers], threads=threads, tick=None)
            self._sound |= numbers


def _checksums_of(path: Path | None) -> tuple[Any, dict[str, int]]:
    """The checkpoint that lists the file at ``path``, and its tensors' numbers by their names, the smallest first."""
    for root in filter(is_ours, path.parents[:2] if path else ()):
        reader = open_reader("safe_open", str(root))
        for here, shard in enumerate(reader.shards()):
            if path == root / shard.file:
                own = sorted((one.nbytes, at, one.name) for at, one in enumerate(reader.tensors()) if one.shard == here)
                return reader, {name.removeprefix(shard.prefix): at for nbytes, at, name in own if nbytes}
    return None, {}


class _Slice:
    """A tensor that is verified before a part of it is first read."""

    def __init__(self, theirs: Any, check: Callable[[], None]) -> None:
        self._theirs, self._check = theirs, check
        self.get_shape, self.get_dtype = theirs.get_shape, theirs.get_dtype

    def __getitem__(self, index: Any) -> Any:
        self._check()
        return self._theirs[index]


class _Loader(AbstractContextManager["_Loader"]):
    """The result of ``prefetch``: threads read ahead. Unused tensors stay in memory until ``close``."""

    def __init__(self, names: list[str], read: Callable[[str], Any], threads: int) -> None:
        self.names, self._closed, self._process = names.copy, False, os.getpid()
        self._pool = ThreadPoolExecutor(threads, "fastckpt-prefetch")
        self._futures = {name: self._pool.submit(read, name) for name in names}

    def __len__(self) -> int:
        return len(self.names())

    def take(self, name: str) -> Any:
        if os.getpid() != self._process or (future := self._futures.pop(name, None)) is None:
            raise SafetensorError(f"prefetch: {name!r} is not in the plan, was taken, or prefetch was closed or forked")
        return future.result()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name in self.names():
            if self._closed or name in self._futures:
                yield name, self.take(name)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._futures.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


def safe_open(filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap", verify: bool = True) -> Any:
    """Open a file as ``safetensors.safe_open`` does.

    A tensor in a shard of a checkpoint is compared with its checksums before it is first returned, sliced or
    prefetched. A file that :func:`fastckpt.open_write` wrote is verified as a whole, and only by ``get_tensors``.

    Args:
        filename: the path of the file.
        framework: ``pt`` for torch tensors, ``np`` for numpy arrays, and others.
        device: where tensors go.
        backend: ``mmap`` or ``pread``.
        verify: whether bytes are compared.

    Returns:
        The object of safetensors, with the ``prefetch`` of safetensors 0.9, even to the CPU (docs/files.md). If bytes
        are not those that were written, it raises ``CorruptCheckpointError``.

    Raises:
        CorruptCheckpointError: the manifest of the checkpoint is damaged.
        FileNotFoundError: there is no such file.
        safetensors.SafetensorError: the file is not a safetensors file, or an argument is wrong.

    Example:
        >>> import fastckpt, numpy
        >>> _ = fastckpt.save({"w": numpy.arange(6)}, "step-7")
        >>> with fastckpt.integrations.safetensors.safe_open("step-7/model.safetensors", "np") as file:
        ...     file.get_slice("w")[2:4]
        array([2, 3])
    """
    return _File(filename, framework, device, backend, verify=verify)


def load_file(
    filename: Any, device: Any = "cpu", *, backend: str = "mmap", framework: str = "pt", verify: bool = True
) -> Any:
    """Load all tensors of a file of safetensors; errors are those of :func:`safe_open`.

    Args:
        filename: the path of the file.
        device: where torch tensors go.
        backend: ``mmap`` or ``pread``.
        framework: ``pt`` for torch tensors, ``np`` for numpy arrays.
        verify: as for :func:`safe_open`.

    Returns:
        A dict of the tensors.

    Raises:
        CorruptCheckpointError: bytes are not those that were written.

    Example:
        >>> import numpy
        >>> from fastckpt.integrations.safetensors import load_file, save_file
        >>> save_file({"w": numpy.ones(3)}, "model.safetensors")
        >>> load_file("model.safetensors", framework="np")
        {'w': array([1., 1., 1.])}
    """
    with safe_open(filename, framework, device, backend=backend, verify=verify) as file:
        return file.get_tensors()
