"""Exports a checkpoint to a directory in Hugging Face's layout, without holding the state in memory.

Checkpoints written by a save already have this layout. An export writes another checkpoint, with only the model's
tensors, under the names that readers expect, and with the files that they look for.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api.selection import Patterns
from fastckpt._files import check_names, contents_of
from fastckpt._state.builders import Validator
from fastckpt._state.select import aliases, ends_of
from fastckpt._state.unflatten import is_tensor, parse, unflatten
from fastckpt._text import suggest
from fastckpt._units import bytes_of
from fastckpt.exceptions import CheckpointError, UnsupportedTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Files beside a model that belong to it. The user must name all others, because they may be private.
_BESIDE = (
    *("adapter_config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json"),
    *("generation_config.json", "merges.txt", "preprocessor_config.json", "processor_config.json"),
    *("sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "video_preprocessor_config.json", "vocab.json", "vocab.txt"),
)
#: A link may lead to a private file, and opening a pipe would block.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: Tokens whose parts are not separate tensors (docs/format.md, section 4).
_MADE = ("coo", "compressed", "quantized", "expanded")
#: Wrapper tensors are a tuple of a dict of the tensors in them, a context, sizes, strides, and at times flags.
_WRAPPERS = (["tuple", 4], ["tuple", 5])


def write(
    source: Path,
    destination: Path,
    keys: Sequence[str] | None,
    *,
    overwrite: bool = False,
    strip_prefix: Sequence[str] = (),
    files: Sequence[Path] = (),
    shard_size: str = "5GB",
) -> tuple[Any, ...]:
    """Write the model in the checkpoint ``source`` to ``destination``.

    Args:
        source: a checkpoint.
        destination: a new directory.
        keys: glob patterns over names; None selects the tensors of the model's files.
        overwrite: whether a checkpoint at ``destination`` may be replaced.
        strip_prefix: prefixes to remove from names.
        files: files to copy; a model's files in the checkpoint are copied, too, unless they are links.
        shard_size: approximate bytes per file.

    Returns:
        The number of tensors, their bytes, and the names of the further files.
    """
    size = bytes_of("export: --shard-size", shard_size)
    patterns = Patterns("--keys", keys or (), "export")
    reader = _core.Reader(str(source), keep=True)
    tokens, stored, shards = parse(reader.structure()), reader.tensors(), reader.shards()
    unflatten(tokens, Validator(stored, strangers=True), operation="export")
    parts = _parts(tokens)
    chosen: dict[int, str] = {}
    known = []
    for position, number, name in aliases(tokens, [tensor.name for tensor in stored]):
        if tokens[position][0] not in ("tensor", "array"):
            continue
        known.append(name)
        # The readers restore ties: a second name of a tensor would be a second copy of it.
        if number in chosen:
            continue
        shard = shards[stored[number].shard]
        if "/" not in shard.file if keys is None else patterns.first(name) is not None:
            _refuse_unfit(source, stored[number], part=number in parts)
            chosen[number] = name.removeprefix(shard.prefix)
    if not chosen and keys:
        given = " ".join(map(repr, keys))
        raise CheckpointError(f"cannot export {source}: --keys {given} chooses no tensor{suggest(keys[0], known)}")
    if not chosen:
        raise CheckpointError(f"cannot export {source}: it holds no tensors of a model; choose some with --keys")
    names = _stripped(source, chosen, strip_prefix)
    state: list[Any] = [["dict", len(names)]]
    for position, name in enumerate(names):
        state += [name, ["tensor", position]]
    more = _files(source, files)
    check_names("export", more)
    options = _core.SaveOptions(shard_size=size, overwrite=overwrite, files=contents_of("export", more))
    report = reader.save(str(destination), list(zip(chosen, names, strict=True)), json.dumps(state), options)
    return report["tensors"], report["bytes"], *sorted(more)


def _parts(tokens: list[Any]) -> set[int]:
    """The numbers of tensors that are meaningful only together with others."""
    found = set()
    ends = ends_of(tokens)
    for position, token in enumerate(tokens):
        if isinstance(token, list) and (token[0] in _MADE or (token[0] == "type" and _is_one(tokens, position))):
            found |= {part[1] for part in tokens[position + 1 : ends[position]] if is_tensor(part)}
    return found


def _is_one(tokens: Sequence[Any], position: int) -> bool:
    """Whether the value of a type is a tensor, an array or a random generator, and not a container."""
    # A library's container classes have names from other modules.
    return tokens[position][1].startswith(("torch.", "numpy.")) or (
        tokens[position + 1] in _WRAPPERS and tokens[position + 2][:1] == ["dict"]
    )


def _refuse_unfit(source: Path, tensor: _core.StoredTensor, *, part: bool) -> None:
    if part:
        what = "is part of a sparse, quantised, nested or expanded tensor, or of a random generator"
    elif tensor.logical is not None:
        what = f"is of {tensor.logical.dtype}"
    else:
        return
    raise UnsupportedTypeError(
        f"cannot export {source}: {tensor.name} {what}, which a safetensors file cannot hold; choose the tensors to "
        "export with --keys, such as --keys 'model.*'"
    )


def _stripped(source: Path, chosen: dict[int, str], strip: Sequence[str]) -> list[str]:
    """The names without the first of the prefixes that each begins with."""
    names: dict[str, int] = {}
    useless = set(strip)
    for number, name in chosen.items():
        prefix = next((prefix for prefix in strip if name.startswith(prefix)), "")
        useless.discard(prefix)
        short = name.removeprefix(prefix)
        if short in names or not short:
            what = "two tensors" if short else "a tensor"
            raise CheckpointError(f"cannot export {source}: --strip-prefix leaves {what} named {short!r}")
        names[short] = number
    if useless:
        raise CheckpointError(
            f"cannot export {source}: --strip-prefix {min(useless)}: no name begins with that: "
            f"the first name is {next(iter(chosen.values()))!r}"
        )
    return list(names)


def _files(source: Path, given: Sequence[Path]) -> dict[str, Any]:
    """The files to copy, by name: the user's, and a model's files in the checkpoint."""
    found: dict[str, Any] = {path.name: path for path in given}
    if len(found) < len(given):
        raise CheckpointError(f"cannot export {source}: --files gives two files of one name: rename one")
    for name in _BESIDE:
        content = None if name in found else _content(source / name)
        if content is not None:
            found[name] = content
    return found


def _content(path: Path) -> bytes | None:
    """The content of a regular file; None if it is something else, such as a link, or missing."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
