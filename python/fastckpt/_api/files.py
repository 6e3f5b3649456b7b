"""The files of a checkpoint: ``files=``, how a state is divided into them, and further files beside the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from fastckpt._files import Contents, check_names, contents_of
from fastckpt._units import bytes_of

from .selection import texts_of
from .settings import record_of


@record_of("files", "fastckpt.Files")
@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint: the ``files=`` of every save.

    A dict of further files is short for a ``Files``: ``files={"config.json": text}`` is ``files=Files({...})``. In a
    job, the coordinator's ``beside`` is written; the other arguments must be equal on all ranks.

    Args:
        beside: further files for the directory, by name: a str is the text of the file (UTF-8), bytes are its content,
            and an ``os.PathLike`` names a file to copy: ``{"config.json": json.dumps(config)}``. They appear together
            with the checkpoint. Later saves to its path carry them over, unless they give a file of the same name. Each
            save reads them into memory when it is called; a :class:`fastckpt.dcp.Writer` does so when it is made.
        shard_size: approximate bytes per file: an int, or a string with a unit (``"500MB"``, ``"2GiB"``). A tensor is
            never split.
        model_key: the key of the outer dict whose mapping is the model. Its tensors go to ``model*.safetensors`` under
            the names that they have inside it, everything else to files in ``training/``, so that Hugging Face's
            readers open the directory directly (``adapter_model*.safetensors`` for the key ``adapter_model``, for
            PEFT's readers). ``auto`` takes the first of ``model``, ``module``, ``state_dict`` and ``model_state_dict``
            whose value is a mapping with tensors, unless another outer key gives names with its prefix (``model.ema``
            beside ``model``). If none does, or with None, the whole state is the model.
        frozen: one or more patterns (like ``keys`` of :func:`fastckpt.load`) of tensors that will not change in later
            saves: the first save writes them to separate files. Without it, the second save finds them
            (docs/unchanged.md).

    Raises:
        TypeError: ``beside`` is not a dict of names and contents, or a pattern is not a string.
        ValueError: ``shard_size`` is out of range, or a name is not a plain file name, or one of fastckpt's own.

    Example:
        >>> import fastckpt, numpy, pathlib
        >>> files = fastckpt.Files({"config.json": "{}"}, shard_size="2GB")
        >>> _ = fastckpt.save({"w": numpy.ones(3)}, "step-7", files=files)
        >>> pathlib.Path("step-7/config.json").read_text()
        '{}'
    """

    beside: Contents | None = None
    _: KW_ONLY
    shard_size: int | str = "5GB"
    model_key: str | None = "auto"
    frozen: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.beside is not None:
            check_names("Files", self.beside)
            object.__setattr__(self, "beside", dict(self.beside))  # the caller may change its dict later
        bytes_of("Files: shard_size", self.shard_size)
        # An iterator yields its patterns once, but the record serves any number of saves.
        object.__setattr__(self, "frozen", texts_of("frozen")("Files", self.frozen))


class Taken(NamedTuple):
    """The files of one save: like :class:`Files`, with the contents of the further files as bytes, by name."""

    beside: list[tuple[str, bytes]]
    shard_size: int
    model_key: str | None
    frozen: tuple[str, ...]


def check_files(operation: str, files: Any) -> Files:
    """``files=``: a record, or a dict of further files."""
    if files is None or isinstance(files, Files):
        return files or Files()
    if not isinstance(files, Mapping):
        raise TypeError(f"{operation}: files must be a dict of names and contents or a fastckpt.Files, not {files!r}")
    check_names(operation, files)
    return Files(files)


def take_files(operation: str, files: Any) -> Taken:
    """Resolve ``files=`` of a save that begins: read the further files.

    Raises:
        OSError: a file to copy cannot be read.
    """
    given = check_files(operation, files)
    return Taken(
        contents_of(operation, given.beside),
        bytes_of("shard_size", given.shard_size),
        given.model_key,
        tuple(given.frozen or ()),
    )
