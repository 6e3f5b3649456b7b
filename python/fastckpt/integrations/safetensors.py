"""Files of safetensors, saved whole and durable, and verified where fastckpt has their checksums (docs/files.md).

    from fastckpt.integrations.safetensors import load_file, safe_open, save_file

Or, for programs that call the package itself: ``fastckpt.integrations.safetensors.install()``.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import numpy as np
import safetensors as _package
from safetensors import TensorSpec
from safetensors import numpy as _numpy

from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._safe_open import safe_open
from ._serialize import write

__all__ = ["install", "load_file", "safe_open", "save_file"]

_installed = Installed()


def install(*, io: Any = "auto", verify: bool = True) -> Installation:
    """Have the package safetensors save and open by the functions of this module.

    That goes for its ``save_file`` and ``load_file``, wherever a program has them from (``save_pretrained``), and for
    what imports ``safetensors.safe_open`` from now on; that name is a function then, not a class.

    Args:
        io: how bytes are written: a :class:`fastckpt.IO`, or the name of an engine.
        verify: as for :class:`safe_open`.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt, numpy, safetensors.numpy
        >>> with fastckpt.integrations.safetensors.install():
        ...     safetensors.numpy.save_file({"w": numpy.ones(3)}, "model.safetensors")
    """
    parts = [one for one in vars(_package).values() if isinstance(one, ModuleType) and "._" not in one.__name__]
    places = [(owner, one.__name__[1:], one) for owner in (_package, *parts) for one in (_serialize_file, _safe_open)]
    ours = [place for place in places if hasattr(*place[:2])]
    return _installed.begin({"io": check_io("install", io), "verify": bool(verify)}, ours)


def _safe_open(options: dict[str, Any], _: Any, *given: Any, **more: Any) -> safe_open:
    return safe_open(*given, verify=options["verify"], **more)


def _serialize_file(
    options: dict[str, Any], theirs: Any, tensor_dict: Any, filename: Any, metadata: Any = None
) -> None:
    specs = isinstance(tensor_dict, dict) and all(isinstance(one, TensorSpec) for one in tensor_dict.values())
    # safetensors itself says what is wrong, and puts a file in the place of a link: what that points to is others'.
    if specs and not os.path.islink(filename):  # noqa: PTH114 - safetensors has other words for what is no path
        write(tensor_dict, filename, metadata, options["io"])
    else:
        theirs(tensor_dict, filename, metadata)


def save_file(tensors: Any, filename: Any, metadata: dict[str, str] | None = None, *, io: Any = "auto") -> None:
    """Save tensors to a file of safetensors, by :func:`fastckpt.open_write`: whole and durable, or not at all.

    Args:
        tensors: a dict of torch tensors or of numpy arrays. They must not change until this returns.
        filename: the path of the file.
        metadata: texts by name, for the header.
        io: as for :func:`fastckpt.open_write`.

    Raises:
        OSError: the storage failed.
        RuntimeError: tensors share memory.
        safetensors.SafetensorError: the format has no such dtype or name.
        TypeError: ``metadata`` holds something else.
        ValueError: a tensor is sparse or not contiguous, or this is no dict of tensors.

    Example:
        >>> import numpy
        >>> from fastckpt.integrations.safetensors import save_file
        >>> save_file({"w": numpy.ones((2, 3))}, "model.safetensors")
    """
    keep: list[Any] = []  # the memory that the addresses are of
    if isinstance(tensors, dict) and all(isinstance(one, np.ndarray) for one in tensors.values()):
        arrays = {name: np.asarray(one, order="C") for name, one in tensors.items()}
        specs: Any = _numpy._flatten(arrays, keep)
    else:
        from safetensors import torch as _torch  # noqa: PLC0415 - torch is optional

        specs = _torch._flatten_as_ptr(tensors, keep)
    write(specs, filename, metadata, check_io("save_file", io))


def load_file(
    filename: Any, device: Any = "cpu", *, backend: str = "mmap", framework: str = "pt", verify: bool = True
) -> Any:
    """Load all tensors of a file of safetensors.

    Args:
        filename: the path of the file.
        device: where torch tensors go.
        backend: ``mmap`` or ``pread``.
        framework: ``pt`` for torch tensors, ``np`` for numpy arrays.
        verify: as for :class:`safe_open`.

    Returns:
        A dict of the tensors.

    Raises:
        CorruptCheckpointError: bytes are not those that were written.
        FileNotFoundError: there is no such file.
        safetensors.SafetensorError: it is no file of safetensors.

    Example:
        >>> import numpy
        >>> from fastckpt.integrations.safetensors import load_file, save_file
        >>> save_file({"w": numpy.ones(3)}, "model.safetensors")
        >>> load_file("model.safetensors", framework="np")
        {'w': array([1., 1., 1.])}
    """
    with safe_open(filename, framework, device, backend=backend, verify=verify) as file:
        return file.get_tensors()


def __dir__() -> list[str]:
    return sorted(__all__)
