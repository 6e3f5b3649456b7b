"""Other formats to a checkpoint, and a checkpoint to one safetensors file. No pickle is ever executed."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import fastckpt
from fastckpt._foreign import file_format
from fastckpt._paths import refuse_url
from fastckpt._state.flatten import flatten
from fastckpt._state.key_paths import part_of, place_of
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, UnsupportedTypeError

from . import pickled as _pickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

MANIFEST = "fastckpt.json"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
#: Bytes that a safetensors header may have, by its format; an index names no more tensors.
_HEADER = 100_000_000
PICKLED = (".pt", ".pth", ".ckpt", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion did: tensors and bytes written, and seconds for all of it."""

    source: str
    destination: str
    tensors: int
    bytes: int
    seconds: float


def convert(source: Path, destination: Path, *, keys: Sequence[str] | None, overwrite: bool) -> Converted:
    """Convert ``source`` to ``destination``; the kind of each follows from what it is and from its name.

    Args:
        source: a checkpoint, a file of ``torch.save``, a safetensors file, or a directory as Hugging Face lays it out.
        destination: a new checkpoint; where the source is a checkpoint, a ``.safetensors`` file.
        keys: glob patterns over tensor names; only for a checkpoint as the source, None takes everything.
        overwrite: whether ``destination`` may exist.

    Raises:
        FileExistsError: ``destination`` exists, and ``overwrite`` is not set.
        FileNotFoundError: there is no ``source``.
        UnsupportedTypeError: the source holds what the destination cannot.
        CheckpointError: the source cannot be read, or the two do not go together.
    """
    begin = time.perf_counter()
    refuse_url("convert", str(source))
    refuse_url("convert", str(destination))
    if not os.path.lexists(source):
        raise FileNotFoundError(errno.ENOENT, "there is no such file or directory", str(source))
    if os.path.lexists(destination) and not overwrite:
        raise FileExistsError(
            errno.EEXIST, "it exists; choose another name, or add --overwrite to replace it", str(destination)
        )
    if (source / MANIFEST).exists():
        if destination.suffix != ".safetensors":
            raise CheckpointError(
                f"cannot convert the checkpoint {source} to {destination}: a checkpoint is converted to one "
                "safetensors file; give a name that ends in .safetensors"
            )
        tensors, size = _to_safetensors(source, destination, keys)
    else:
        if keys is not None:
            raise CheckpointError(f"cannot choose tensors of {source}: only a checkpoint is converted in part")
        if destination.suffix in (".safetensors", *PICKLED):
            raise CheckpointError(
                f"cannot convert {source} to {destination}: the result is a checkpoint, which is a "
                f"directory; give a name without {destination.suffix}"
            )
        if sys.platform != "linux":
            raise NotImplementedError(
                f"cannot convert {source} to a checkpoint: fastckpt saves on Linux; convert it there"
            )
        state, metadata = _read(source)
        report = fastckpt.save(state, destination, overwrite=overwrite, metadata=metadata)
        tensors, size = report.tensors, report.bytes
    return Converted(
        source=str(source),
        destination=str(destination),
        tensors=tensors,
        bytes=size,
        seconds=time.perf_counter() - begin,
    )


def _read(source: Path) -> tuple[Any, Mapping[str, Any] | None]:
    """Return the state that lies in ``source`` and the metadata that came with it."""
    if source.is_dir():
        return _read_hugging_face(source)
    _regular(source)
    written_by = file_format(source)
    if written_by == "safetensors" or (written_by is None and source.suffix == ".safetensors"):
        return _read_safetensors(source)
    if written_by == "torch.save" or source.suffix in PICKLED:
        return _read_pickled(source), None
    known = ", ".join((".safetensors", *PICKLED))
    raise CheckpointError(
        f"cannot convert {source}: its kind is unknown; it neither begins like a file of torch.save or safetensors, "
        f"nor has one of the endings {known}, and a checkpoint is a directory with {MANIFEST}"
    )


def _regular(source: Path) -> None:
    """Refuse what is not a file: a pipe would be waited for, and a device may have no end."""
    if not source.is_file():
        source.stat()  # where there is nothing, that is the error
        raise CheckpointError(f"cannot convert {source}: it is not a regular file; give a file or a directory")


def _read_pickled(source: Path) -> Any:
    """Return what ``torch.save`` wrote, if it is made of tensors and plain containers alone."""
    torch = _torch(source)
    try:
        _pickled.check(source)
        return _pickled.load(torch, source)
    except _pickled.RefusedError as error:
        if error.kind == "UnpicklingError":
            raise UnsupportedTypeError(
                f"cannot convert {source}: it is damaged, or holds more than tensors and plain containers, and "
                "fastckpt never executes what a pickle names; if you trust the file, load it with "
                "torch.load(weights_only=False) and give the state to fastckpt.save. "
                f"torch says: {_refusal(error)}"
            ) from error
        if error.kind is None:
            raise CheckpointError(
                f"cannot convert {source}: {error}; if you trust the file, load it with torch.load and give the state "
                "to fastckpt.save"
            ) from error
        # An archive that is cut short is EINVAL to torch.
        if error.errno is not None and error.errno != errno.EINVAL:
            raise OSError(error.errno, os.strerror(error.errno), str(source)) from error
        raise CorruptCheckpointError(
            f"cannot convert {source}: it is damaged or was not written by torch.save: {_first_line(error)}"
        ) from error


def _read_safetensors(
    source: Path, names: Sequence[str] | None = None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the tensors of one safetensors file, mapped and not copied, and the metadata in its header."""
    library = _safetensors(source)
    _regular(source)
    state = {}
    try:
        with library.safe_open(source, framework="pt") as file:
            for name in file.keys() if names is None else names:
                state[name] = file.get_tensor(name)
            metadata = file.metadata()
    except library.SafetensorError as error:
        raise CorruptCheckpointError(
            f"cannot convert {source}: it is damaged or not a safetensors file: {_first_line(error)}"
        ) from error
    return state, metadata


def _read_hugging_face(source: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the tensors of a model that Hugging Face has laid out in one or in several safetensors files."""
    index = source / HUGGING_FACE_INDEX
    if not index.exists():
        files = sorted(source.glob("*.safetensors"))
        if len(files) == 1:
            return _read_safetensors(files[0])
        found = f"{len(files)} safetensors files" if files else "no safetensors file"
        raise CheckpointError(
            f"cannot convert the directory {source}: it has neither {MANIFEST} nor {HUGGING_FACE_INDEX}, and {found}; "
            "give one file, or a directory that has an index"
        )
    _regular(index)
    if index.stat().st_size > _HEADER:
        raise CorruptCheckpointError(
            f"cannot convert {source}: {HUGGING_FACE_INDEX} has more than {_HEADER} bytes, so it is not an index"
        )
    try:
        content = json.loads(index.read_bytes())
        shards: dict[str, list[str]] = {}
        for name, file in content["weight_map"].items():
            shards.setdefault(file, []).append(name)
        metadata = content.get("metadata")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"cannot convert {source}: {HUGGING_FACE_INDEX} is not an index of Hugging Face: {_first_line(error)}"
        ) from error
    read: dict[str, Any] = {}
    for file, names in shards.items():
        # The index is input: it may not lead out of the directory.
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):  # noqa: PTH119 - the name as text
            raise CorruptCheckpointError(
                f"cannot convert {source}: {HUGGING_FACE_INDEX} names {file!r}, not a safetensors file beside it"
            )
        read.update(_read_safetensors(source / file, names)[0])
    return {name: read[name] for name in content["weight_map"]}, metadata if isinstance(metadata, dict) else None


def _to_safetensors(source: Path, destination: Path, keys: Sequence[str] | None) -> tuple[int, int]:
    """Write the tensors of a checkpoint to one file, durable and whole or not at all."""
    library, torch = _safetensors(source), _torch(source)
    if destination.is_dir():
        raise FileExistsError(errno.EEXIST, "it is a directory, which a file does not replace", str(destination))
    # The writer of safetensors has one exception for everything, without an errno.
    parent = destination.parent
    if not parent.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(parent))
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))
    state = fastckpt.load(source, keys=keys, framework="torch")
    tensors: dict[str, Any] = {}
    dtypes: dict[Any, tuple[str, int]] = {}
    names = 0
    for path, leaf in _leaves(state):
        # The patterns choose other values, too, which a file of tensors has no place for.
        if keys is not None and not isinstance(leaf, (np.ndarray, torch.Tensor)) and not flatten(leaf).tensors:
            continue
        tensor = _storable(leaf, path, source, library, torch, dtypes)
        name = (".".join(filter(None, map(part_of, path))) or "tensor").encode("utf-8", "replace").decode()
        name = _unused(name, tensors)
        # A bound on memory: `_header` decides.
        names += len(name)
        if names > _HEADER:
            raise _too_many_names(source)
        tensors[name] = tensor
    if keys is not None and not tensors:
        raise CheckpointError(f"cannot convert {source}: --keys {' '.join(map(repr, keys))} chooses no tensor")
    # By falling element size, so that each begins at a multiple of its own.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header = _header(order, dtypes, source)
    temporary = destination.with_name(f".{destination.name}.tmp-{os.getpid()}")
    try:
        try:
            _write_safetensors(temporary, header, [tensor for _, tensor in order], torch)
        except OSError as error:
            raise OSError(error.errno, f"cannot write it: {error.strerror}", str(destination)) from error
        _open(temporary, source, library)
        temporary.replace(destination)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    _fsync(destination.parent)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _header(order: Sequence[tuple[str, Any]], dtypes: Mapping[Any, tuple[str, int]], source: Path) -> bytes:
    """Return the header of a safetensors file that holds these tensors in this order, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in order:
        dtype, values = dtypes[tensor.dtype]
        shape = list(tensor.shape)
        if values != 1:
            shape[-1] *= values
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER:
        raise _too_many_names(source)
    return text


def _too_many_names(source: Path) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"cannot convert {source}: its names and shapes take more than the {_HEADER} bytes that a safetensors file has "
        "for them; choose tensors with --keys, such as --keys 'model.*'"
    )


def _write_safetensors(path: Path, header: bytes, tensors: Sequence[Any], torch: Any) -> None:
    """Write one safetensors file and sync it.

    Tied tensors are written under each of their names, because the format has no word for them; the library, which
    refuses tensors that share memory, would need a copy of each.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            if tensor.nbytes:
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path, source: Path, library: ModuleType) -> None:
    """Open what was written as its readers will: a file that they refuse must replace nothing."""
    try:
        with library.safe_open(path, framework="pt"):
            pass
    except library.SafetensorError as error:
        raise CheckpointError(
            f"cannot convert {source}: the package safetensors refuses the file made of it, which is a defect of "
            f"fastckpt; report it, with what safetensors says: {_first_line(error)}"
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

    Notes what the format calls its dtype, and how many values of the format one element is.
    """
    if isinstance(leaf, np.ndarray):
        with suppress(TypeError):
            leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, torch.Tensor):
        what = f"{type(leaf).__qualname__}"
    elif leaf.layout is not torch.strided:
        what = f"a tensor of layout {leaf.layout}"
    else:
        try:
            if leaf.dtype not in dtypes:
                # The library knows; an element of torch can be several values of the format (FP4: two).
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
        f"cannot convert {source}: {place_of(path) or 'the state itself'} is {what}, which a safetensors file cannot "
        "hold; choose the tensors to convert with --keys, such as --keys 'model.*'"
    )


def _leaves(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
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


def _torch(source: Path) -> Any:
    """Return the module torch, or say that it is needed."""
    try:
        from fastckpt._tensors import torch as ours  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise CheckpointError(f"cannot convert {source}: this needs PyTorch; pip install torch ({error})") from error
    module: Any = ours
    return module.torch


def _safetensors(source: Path) -> ModuleType:
    """Return the module safetensors with its part for torch, or say that it is needed."""
    _torch(source)
    try:
        import safetensors.torch  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise CheckpointError(
            f"cannot convert {source}: this needs the package safetensors; pip install safetensors ({error})"
        ) from error
    return safetensors


def _first_line(error: Exception) -> str:
    """Return the gist of an exception whose message is a page."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _refusal(error: Exception) -> str:
    """Return the line of torch's page of advice that names what was refused."""
    telling = (line for line in str(error).splitlines() if "GLOBAL" in line or line.startswith("Unsupported"))
    # What follows in the line is how to allow it after all.
    return re.split(r"(?<=[^.]{3})\. |,? (?:Please )?use `torch", next(telling, _first_line(error)).strip())[0]


def _fsync(path: Path) -> None:
    """Make one file or directory durable; Windows opens no directories, and journals their changes."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
