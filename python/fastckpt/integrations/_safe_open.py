"""A file of safetensors, open; its tensors are verified where fastckpt has their checksums."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors import safe_open as _open

import fastckpt
from fastckpt.exceptions import ReplacedCheckpointError

from ._shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _identity(file: Any) -> tuple[int, int] | None:
    """What tells a file from another one that takes its path, while it is open; None if there is none."""
    try:
        about = os.stat(file)  # noqa: PTH116 - or its descriptor
    except (OSError, TypeError, ValueError):  # safetensors says it in its own words
        return None
    return about.st_dev, about.st_ino


class safe_open:  # noqa: N801 - its name in safetensors
    """Open a file as ``safetensors.safe_open`` does: what that has (``keys``, ``metadata``), this has, too.

    A tensor in a shard of a checkpoint is compared with its checksums before it is first given, sliced or fetched.
    Another file that :func:`fastckpt.open_write` wrote is compared, as a whole, by ``get_tensors`` alone.

    Args:
        filename: the path of the file.
        framework: ``pt`` for torch tensors, ``np`` for numpy arrays, and others.
        device: where tensors go.
        backend: ``mmap`` or ``pread``.
        verify: whether bytes are compared.

    Raises:
        CorruptCheckpointError: the manifest of the checkpoint is damaged, or the shard is cut off.
        FileNotFoundError: there is no such file.
        safetensors.SafetensorError: it is no file of safetensors, or an argument is wrong.

    Example:
        >>> import fastckpt, numpy
        >>> _ = fastckpt.save({"w": numpy.arange(6)}, "step-7")
        >>> with fastckpt.integrations.safetensors.safe_open("step-7/model.safetensors", "np") as file:
        ...     file.get_slice("w")[2:4]
        array([2, 3])
    """

    def __init__(
        self, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap", verify: bool = True
    ) -> None:
        self._framework, self._device, self._verify = framework, device, verify
        self._file = None
        # Until safetensors and we have opened the same file: another one may take its path meanwhile.
        while self._file is None:
            before = _identity(filename)
            self._theirs: Any = _open(filename, framework, device, backend=backend)
            self._path = str(Path(filename).resolve())
            self._shard = Shard.at(Path(self._path)) if verify else None
            self._file = before if _identity(filename) == before else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._theirs, name)

    def __enter__(self) -> safe_open:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(self, *error: object) -> None:
        self._theirs.__exit__(*error)  # fails while another thread reads
        self._shard = None

    def get_tensor(self, name: str) -> Any:
        """A tensor.

        Args:
            name: its name.

        Returns:
            The tensor, in the framework for which the file was opened.

        Raises:
            CorruptCheckpointError: its bytes are not those that were written.
            ReplacedCheckpointError: the checkpoint was replaced before the tensor was compared.
            safetensors.SafetensorError: there is no such tensor, or the file is closed.
        """
        self._check([name])
        return self._theirs.get_tensor(name)

    def get_tensors(self) -> Any:
        """All tensors.

        Returns:
            A dict of them.

        Raises:
            CorruptCheckpointError: bytes are not those that were written.
            ReplacedCheckpointError: another file has taken the path of this one, which was to be compared as a whole.
        """
        names, shard = self._theirs.keys(), self._shard
        if shard is not None:
            shard.check(names)
        elif self._verify:
            try:
                file = fastckpt.open_read(self._path)
            except FileNotFoundError:  # it has no name any more
                file = None
            if file is not None:
                with file:
                    self._check_identity(file.fileno())
        return self._theirs.get_tensors()

    def get_slice(self, name: str) -> Any:
        """A tensor of which an index reads a part; before the first one, all of it is verified.

        Args:
            name: its name.

        Returns:
            What safetensors returns: it has ``get_shape`` and ``get_dtype``, which read nothing.

        Raises:
            safetensors.SafetensorError: there is no such tensor, or the file is closed.
        """
        found, shard = self._theirs.get_slice(name), self._shard
        return found if shard is None else _Slice(found, partial(shard.check, [name]))

    def prefetch(self, plan: Any = None, *, device: Any = None, threads: int = 8) -> Any:
        """Begin to read torch tensors in the background.

        On the CPU, each comes into memory of its own, and is there until it is taken and no longer used. To a CUDA
        device, safetensors itself reads, from 0.9 on.

        Args:
            plan: a dict of the names, each with the rows to read, a slice of step 1, or None for all rows; by default
                all tensors.
            device: where tensors go; by default where the file was opened for.
            threads: the most threads that read.

        Returns:
            A context manager with ``names()``, ``take(name)``, which waits for a tensor and gives it once, and
            ``close()``. Iterating over it gives names and tensors as they arrive, but for those that were taken.

        Raises:
            CorruptCheckpointError: the bytes of a tensor are not those that were written; ``take`` and the iteration
                raise that.
            ReplacedCheckpointError: another file has taken the path of this one.
            safetensors.SafetensorError: the plan does not fit the file.
            TypeError: ``plan`` is no dict.
            ValueError: ``threads`` is less than 1.
        """
        names = self._theirs.offset_keys()
        if plan is not None and not isinstance(plan, dict):
            raise TypeError(f"prefetch: plan must be a dict of names and slices, not {type(plan).__name__}")
        if plan == {}:
            raise SafetensorError("prefetch: the plan selects no tensors")
        if self._framework not in ("pt", "torch", "pytorch"):
            raise SafetensorError(f'prefetch: it gives torch tensors: open {self._path} with framework="pt"')
        from . import _prefetch  # noqa: PLC0415 - torch is optional

        plan = dict.fromkeys(names) if plan is None else plan
        target = next(one for one in (device, self._device, "cpu") if one is not None)
        if _prefetch.is_cuda(target) and hasattr(self._theirs, "prefetch"):
            self._check(plan)
            return self._theirs.prefetch(plan, device=target, threads=threads)
        # The handle may be closed before all has been read.
        shard = self._shard
        check = None if shard is None else partial(shard.check, threads=1)
        lazy = _open(self._path, "pt")
        self._check_identity(self._path)
        return _prefetch.begin(lazy, plan, check, target, threads)

    def _check(self, names: Iterable[str]) -> None:
        shard = self._shard
        if shard is not None:
            shard.check(names)

    def _check_identity(self, file: str | int) -> None:
        if _identity(file) != self._file:
            raise ReplacedCheckpointError(f"safe_open: another file has taken the path {self._path}: open it again")


class _Slice:
    """A tensor that is verified before the first part of it is read."""

    def __init__(self, found: Any, check: Callable[[], None]) -> None:
        self._found = found
        self._check = check

    def __getitem__(self, index: Any) -> Any:
        self._check()
        return self._found[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._found, name)
