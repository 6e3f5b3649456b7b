"""Names the formats found where a checkpoint was expected, for error messages.

It also lists the names that mark another program's checkpoint, so that no save replaces it.
"""

from __future__ import annotations

import itertools
import os
import shlex
import stat
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from fastckpt._files import TORCH_METADATA
from fastckpt._text import visible
from fastckpt.exceptions import NotACheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

#: Formats by names of their files. The core has the same table (rust ``commit/foreign.rs``), for directories.
_FORMATS = {
    "torch.distributed.checkpoint": ("*.distcp", TORCH_METADATA),
    "DeepSpeed": ("*_model_states.pt", "*_optim_states.pt", "zero_to_fp32.py"),
    "Orbax": ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"),
    "transformers": ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    "safetensors": ("*.safetensors", "*.safetensors.index.json"),
}
_MANIFEST = "fastckpt.json"
_INDEX = "model.safetensors.index.json"
#: The start of a zip archive of torch.save, and the number of first bytes that hold the name of its first entry.
_ZIP, _LOOK = b"PK\x03\x04", 256
#: The most entries of a directory that are examined: a remote directory of data may have millions.
_MOST = 1000
#: The start of files that torch.save wrote before torch 1.6: a pickled number.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def not_a_checkpoint(path: str | os.PathLike[str]) -> NotACheckpointError:
    """The error for ``path``, which exists and is not a checkpoint."""
    path = os.fspath(path)
    try:
        found = _directory(path) if os.path.isdir(path) else _file(path)  # noqa: PTH112 - bytes of a name as they are
    except OSError as error:
        found = f"it cannot be read: {error.strerror}"
    return NotACheckpointError(visible(f"{path} is not a checkpoint of fastckpt: {found}"))


def _file(path: str) -> str:
    about = os.stat(path)  # noqa: PTH116
    # Opening a pipe would block.
    if not stat.S_ISREG(about.st_mode):
        return "it is neither a directory nor a file"
    directory = os.path.dirname(path)  # noqa: PTH120
    if os.path.lexists(os.path.join(directory, _MANIFEST)):  # noqa: PTH118
        return f"it is a file inside a checkpoint: give its directory, {directory}"
    format_ = file_format(path)
    if format_ is None:
        return "it is a file, and a checkpoint is a directory"
    return f"it looks like a file of {format_}; {_convert(path)}"


def writer_of(name: str) -> str | None:
    """The program that writes files with this name; None if no known program does."""
    writers = (who for who, patterns in _FORMATS.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
    return next(writers, None)


def written_beside(path: str | os.PathLike[str]) -> str | None:
    """A warning if another program has written its checkpoint into the directory of a checkpoint of fastckpt."""
    try:
        names = sorted(_names(path))
    except OSError:  # another save is replacing it now
        return None
    # `fastckpt.dcp.Writer` also writes a `.metadata`.
    found = ((name, writer_of(name)) for name in names if name != TORCH_METADATA)
    for name, who in found:
        if who not in {None, "safetensors"}:
            return (
                f"{os.fspath(path)} also holds {name}, which {who} wrote: its readers load that, and fastckpt loads "
                "this checkpoint: move one of them elsewhere"
            )
    return None


def file_format(path: str | os.PathLike[str]) -> Literal["torch.save", "safetensors"] | None:
    """The program that wrote a regular file, by its first bytes."""
    with open(path, "rb") as file:  # noqa: PTH123
        begin = file.read(_LOOK)
        size = os.fstat(file.fileno()).st_size
    if (begin.startswith(_ZIP) and b"data.pkl" in begin) or begin.startswith(_LEGACY):
        return "torch.save"
    length = int.from_bytes(begin[:8], "little")
    return "safetensors" if begin[8:9] == b"{" and 8 + length <= size else None


def _names(path: str | os.PathLike[str]) -> set[str]:
    with os.scandir(path) as entries:
        return {entry.name for entry in itertools.islice(entries, _MOST)}


def _directory(path: str) -> str:
    names = _names(path)
    if not names:
        return "it is an empty directory"
    if distributed := of_distributed(path):
        return distributed
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    if _INDEX in names or shards:
        return _shards(path, names, shards)
    if found := next(((name, who) for name in sorted(names) if (who := writer_of(name))), None):
        return f"it holds {found[0]}, which {found[1]} wrote"
    if newest := _newest(path, names):
        return f"it holds checkpoints, of which {newest} is the newest: give the path of one"
    return f"it holds no {_MANIFEST}"


def of_distributed(path: str | os.PathLike[str]) -> str | None:
    """Advice for a directory of torch.distributed.checkpoint, if it is one."""
    if not os.path.lexists(os.path.join(path, TORCH_METADATA)):  # noqa: PTH118
        return None
    return f"it looks like a checkpoint of torch.distributed.checkpoint; {_convert(os.fspath(path))}"


def _shards(path: str, names: Collection[str], shards: Sequence[str]) -> str:
    ours = "training" in names
    what = f"it holds {shards[0] if shards else _INDEX}, and no {_MANIFEST}"
    if "config.json" in names and not ours:
        what = "it looks like a model of Hugging Face"
    elif ours:
        what += ": it has lost its manifest"
    # An index does not list the files of the group `training`.
    if (_INDEX in names or len(shards) == 1) and not ours:
        return f"{what}; {_convert(path)}"
    return f"{what}; 'fastckpt import' reads its files one by one"


def _newest(path: str, names: Collection[str]) -> str | None:
    """The directory below ``path`` whose manifest was written last."""
    found: list[tuple[int, str]] = []
    for name in names:
        try:
            about = os.lstat(os.path.join(path, name, _MANIFEST))  # noqa: PTH118
        except OSError:
            continue
        # A checkpoint that is still being written does not count yet.
        if about.st_size and not name.startswith("."):
            found.append((about.st_mtime_ns, name))
    return max(found)[1] if found else None


def _convert(path: str) -> str:
    return f"'fastckpt import {shlex.quote(path)} NEW_DIRECTORY' makes a checkpoint of it"
