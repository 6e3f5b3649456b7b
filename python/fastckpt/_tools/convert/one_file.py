"""Exports a checkpoint to one file: of safetensors, or of torch.save."""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

import fastckpt
from fastckpt._durable import sync
from fastckpt._safetensors_header import text_of
from fastckpt._state.flatten import flatten
from fastckpt._state.key_paths import part_of, place_of
from fastckpt._tools.scratch import scratch
from fastckpt.exceptions import CheckpointError, UnsupportedTypeError

from .needs import HEADER, first_line, refuse_growth, safetensors_for, torch_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType


def load(source: Path, destination: Path, keys: Sequence[str] | None) -> Any:
    """The verified and mapped state to write, if ``destination`` is valid; it need not fit into memory."""
    if destination.is_dir():
        raise FileExistsError(errno.EEXIST, "it is a directory, and a file cannot replace it", str(destination))
    # The writers of torch and safetensors raise one exception for everything, without an errno.
    parent = destination.parent
    if not parent.is_dir():
        parent.stat()  # raises if nothing is there
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))
    plain = fastckpt.Registry(undeclared="plain")
    return fastckpt.load(source, keys=keys, framework="torch", registry=plain, io=fastckpt.IO(mmap=True))


@contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Yield a name beside ``destination``: a file written there replaces it durably, or is removed after an error."""
    with scratch(destination.parent, "export") as (directory, _):
        temporary = directory / destination.name
        try:
            yield temporary
            sync(temporary)
        except Exception as error:
            cause = system_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, f"cannot write it: {cause.strerror}", str(destination)) from error
        temporary.replace(destination)
    sync(destination.parent)


def system_error(error: BaseException | None) -> OSError | None:
    """The system's error behind an error of torch, whose archives fail again when they are closed."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def write_torch(source: Path, destination: Path, keys: Sequence[str] | None) -> tuple[int, ...]:
    """Write the state of a checkpoint with ``torch.save``."""
    torch = torch_for("export", source)
    state = load(source, destination, keys)
    flat = flatten(state, operation="export")
    sizes = [tensor.capacity for tensor in flat.tensors]
    flat.keep.clear()
    with replacing(destination) as temporary, temporary.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return len(sizes), sum(sizes)


def write_safetensors(
    source: Path, destination: Path, keys: Sequence[str] | None, *, expand: bool = False
) -> tuple[int, ...]:
    """Write the tensors of a checkpoint to one safetensors file."""
    library, torch = safetensors_for("export", source), torch_for("export", source)
    state = load(source, destination, keys)
    tensors: dict[str, Any] = {}
    dtypes: dict[Any, tuple[str, int]] = {}
    names = 0
    for path, leaf in leaves(state):
        # The patterns also match values, which a file of tensors cannot hold.
        if keys is not None and not isinstance(leaf, (np.ndarray, torch.Tensor)) and not flatten(leaf).tensors:
            continue
        tensor = _storable(leaf, path, source, library, torch, dtypes)
        name = (".".join(filter(None, map(part_of, path))) or "tensor").encode("utf-8", "replace").decode()
        name = _unused(name, tensors)
        # This only bounds memory: `_header` checks the exact limit.
        names += len(name)
        if names > HEADER:
            raise _too_many_names(source)
        tensors[name] = tensor
    if keys is not None and not tensors:
        raise CheckpointError(f"cannot export {source}: --keys {' '.join(map(repr, keys))} chooses no tensor")
    if not expand:
        check_growth(source, sum(tensor.nbytes for tensor in tensors.values()))
    # By falling element size, so that each tensor begins at a multiple of its own element size.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = _header(order, dtypes, source)
    with replacing(destination) as temporary:
        _write_safetensors(temporary, header, [tensor for _, tensor in order], torch)
        _open(temporary, source, library)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def check_growth(source: Path, written: int) -> None:
    """Refuse to write many times the bytes that a checkpoint stores."""
    with fastckpt.open(source) as checkpoint:
        refuse_growth("export", source, written, sum(checkpoint.info(name).bytes for name in checkpoint))


def _header(order: Sequence[tuple[str, Any]], dtypes: Mapping[Any, tuple[str, int]], source: Path) -> bytes:
    """Return the header of a safetensors file that holds these tensors in this order, padded to 8 bytes."""
    described = []
    for name, tensor in order:
        dtype, values = dtypes[tensor.dtype]
        shape = [*tensor.shape]
        if values != 1:
            shape[-1] *= values
        described.append((name, dtype, shape, tensor.nbytes))
    text = text_of(described, {"format": "pt"})
    if len(text) > HEADER:
        raise _too_many_names(source)
    return text


def _too_many_names(source: Path) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"cannot export {source}: its names and shapes take more than the {HEADER} bytes that a safetensors file has "
        "for them; choose tensors with --keys, such as --keys 'model.*'"
    )


def _write_safetensors(path: Path, header: bytes, tensors: Sequence[Any], torch: Any) -> None:
    """Write one safetensors file and sync it.

    Tied tensors are written under each of their names, because the format cannot express ties; the library, which
    refuses tensors that share memory, would need a copy of each.
    """
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            if tensor.nbytes:
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path, source: Path, library: ModuleType) -> None:
    """Open the written file as readers do: a file that they refuse must not replace another."""
    try:
        with library.safe_open(path, framework="pt"):
            pass
    except library.SafetensorError as error:
        raise CheckpointError(
            f"cannot export {source}: the package safetensors refuses the file made of it, which is a defect of "
            f"fastckpt; report it with this message of safetensors: {first_line(error)}"
        ) from error


def _storable(
    leaf: Any,
    path: tuple[Any, ...],
    source: Path,
    library: ModuleType,
    torch: Any,
    dtypes: dict[Any, tuple[str, int]],
) -> Any:
    """Return ``leaf`` as a tensor that safetensors holds, or refuse it by its place.

    ``dtypes`` collects, for each dtype, the format's name for it and the number of the format's values per element.
    """
    if isinstance(leaf, np.ndarray):
        with suppress(TypeError):
            leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, torch.Tensor):
        what = f"{type(leaf).__qualname__}"
    elif leaf.layout is not torch.strided:
        what = f"a tensor of layout {leaf.layout}"
    elif leaf.is_nested:
        what = "a nested tensor"
    else:
        try:
            if leaf.dtype not in dtypes:
                # The library names the dtype; an element of torch can be several values of the format (FP4: two).
                raw = library.torch.save({"": torch.empty(1, dtype=leaf.dtype)})
                entry = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])[""]
                dtypes[leaf.dtype] = entry["dtype"], entry["shape"][0]
        except (KeyError, RuntimeError, library.SafetensorError):
            what = f"a tensor of {leaf.dtype}"
        else:
            if leaf.ndim or dtypes[leaf.dtype][1] == 1:
                return leaf.detach()
            what = f"a tensor of {leaf.dtype} without dimensions"
    raise UnsupportedTypeError(
        f"cannot export {source}: {place_of(path) or 'the state itself'} is {what}, which a safetensors file cannot "
        "hold; choose the tensors to export with --keys, such as --keys 'model.*'"
    )


def leaves(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and value of every leaf, in order; a loop, because states nest deeper than Python recurses."""
    rest: list[tuple[tuple[Any, ...], Any]] = [((), state)]
    while rest:
        path, value = rest.pop()
        if isinstance(value, dict):
            rest.extend(((*path, key), value[key]) for key in reversed(value))
        elif type(value) in (list, tuple):
            rest.extend(((*path, position), value[position]) for position in reversed(range(len(value))))
        else:
            yield path, value


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    """Return ``name`` with the suffix that the checkpoint's format gives to a name already taken."""
    if name not in taken and name != "__metadata__":
        return name
    number = 1
    while f"{name}~{number}" in taken:
        number += 1
    return f"{name}~{number}"
