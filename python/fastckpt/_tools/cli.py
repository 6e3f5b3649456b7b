"""The command ``fastckpt``: inspect, verify, compare, copy, import, export, plan, measure and clean up checkpoints.

Exit status: 0 for success, 1 for a damaged checkpoint (in ``doctor`` for warnings, in ``bench --check`` for storage
slower than its target), 2 for any other error. With ``--json``, standard output holds one JSON document, also for an
error; with ``--quiet``, nothing. Everything else goes to standard error. docs/command-line.md has the schemas.
"""

from __future__ import annotations

import argparse
import datetime as dt
import errno
import fnmatch
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

import fastckpt
from fastckpt import _namesake
from fastckpt._text import count, shortened, size, suggest, table, visible
from fastckpt._tools.bench import command as _bench
from fastckpt._tools.convert import command as _convert
from fastckpt._tools.doctor import command as _doctor
from fastckpt._tools.plan import command as _plan
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, NotACheckpointError, UnsupportedTypeError

from . import clean as _clean
from . import completion as _completion
from . import copy as _copy
from . import diff as _diff
from . import launch as _launch
from . import manage as _manage
from . import runs as _runs
from .places import place

OK, DAMAGED, FAILED = 0, 1, 2
#: Options that may stand anywhere.
_EVERYWHERE = ("--json", "--quiet")

_PLACE = "the checkpoint: its directory or URL"

#: The most lines that fit on a screen; the rest are only counted.
_LINES = 12
#: Levels of metadata that are shown: Python's JSON encoder recurses.
_DEPTH = 100
_WIDTH = 100

_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EACCES: "check the permissions of it and of the directories above it",
    errno.EPERM: "check the permissions of it and of the directories above it",
    errno.ENOSPC: "free space there, or choose another destination",
    errno.EROFS: "choose a destination that can be written",
}


class UsageError(Exception):
    """The command line cannot be parsed."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises, so that ``--json`` applies to errors in the command line, too.

    Args:
        page: the text of ``--help``, if argparse's would not fit on a screen.
    """

    def __init__(self, *, page: str = "", **others: Any) -> None:
        # Abbreviations of options are refused: an abbreviation could mean another option in a later version.
        super().__init__(**others, allow_abbrev=False)
        self.page = page
        # Declared only for the help: `main` removes both options, wherever they stand.
        self.add_argument("--json", action="store_true", help="print one JSON document")
        self.add_argument("--quiet", action="store_true", help="print nothing but errors")

    def format_help(self) -> str:
        return f"{self.page}\n" if self.page else super().format_help()

    def arguments(self) -> list[argparse.Action]:
        """All options and other arguments."""
        return self._actions

    def flags(self) -> dict[str, str]:
        """The options, by their names as arguments of Python."""
        return {action.dest: action.option_strings[-1] for action in self._actions if action.option_strings}

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="fastckpt")
    parser.add_argument("--version", action="version", version=f"fastckpt {fastckpt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.set_defaults(whole=parser, every=commands.choices)
    texts: list[tuple[str, str]] = []

    def command(name: str, text: str, more: str = "", page: str = "") -> argparse.ArgumentParser:
        about = f"{text[0].upper()}{text[1:]}. {more}".strip()
        sub = commands.add_parser(name, help=text, description=about, page=page)
        sub.set_defaults(parser=sub)
        texts.append((f"  {name}", text))
        return sub

    info = command("info", "show what a checkpoint holds, and when and how it was written")
    info.add_argument("path", metavar="PATH", type=place, help=_PLACE)

    ls = command("ls", "list tensors, or the checkpoints in a directory", "Of a run: size, speed, metrics, why kept.")
    ls.add_argument("path", metavar="PATH", type=place, help=f"{_PLACE}; or a directory that holds several checkpoints")
    _runs.add_options(ls)
    ls.add_argument("pattern", metavar="PATTERN", nargs="?", help="only names that match, as in 'model.*.weight'")

    verify = command("verify", "compare every byte of a checkpoint with its checksum", "Exits with 1 on damage.")
    verify.add_argument("path", metavar="PATH", type=place, help=_PLACE)
    verify.add_argument("--all", action="store_true", help="PATH is a directory: verify every checkpoint in it")

    for tool in (_copy, _convert, _diff, _runs, _clean, _manage, _plan, _bench, _doctor, _launch, _completion):
        tool.register(command)
    options = [("  --json", "print one JSON document"), ("  --quiet", "print nothing but errors")]
    head = ["usage: fastckpt [--help] [--version] [--json] [--quiet] COMMAND ...", ""]
    parser.page = "\n".join([*head, *table(texts), "", *table(options)])
    return parser


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value of a checkpoint's metadata for JSON: values that JSON cannot hold become text."""
    kind = type(value)
    if value is None or kind in {bool, int, str}:
        return value
    if kind is float and value - value == 0:  # a nan or an infinity has no form in JSON
        return value
    if depth == _DEPTH:
        return f"nested deeper than {_DEPTH} levels"
    if isinstance(value, Mapping):
        return {key if type(key) is str else _str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return _str(value)


def _str(value: Any) -> str:
    try:
        return str(value)
    except RecursionError:
        return f"a deep {type(value).__qualname__}"


def _tensors(checkpoint: fastckpt.types.Checkpoint) -> list[dict[str, Any]]:
    """Return name, dtype, shape, bytes and shard of every tensor, in the order of the state."""
    return [
        {"name": name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.bytes, "shard": info.shard}
        for name in checkpoint
        for info in [checkpoint.info(name)]
    ]


def _metadata(checkpoint: fastckpt.types.Checkpoint) -> Any:
    """Return the caller's metadata as JSON values, or the reason if only the saving program can read it."""
    try:
        return _plain(checkpoint.metadata)
    except UnsupportedTypeError as error:
        return str(error)


def _info(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """The contents of a checkpoint, on one screen."""
    with fastckpt.open(options.path) as checkpoint:
        tensors, metadata = _tensors(checkpoint), _metadata(checkpoint)
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        numbers[tensor["dtype"]] += 1
        sizes[tensor["dtype"]] += tensor["bytes"]
    document = {
        "path": checkpoint.path,
        **asdict(checkpoint.origin),
        "bytes": sum(sizes.values()),
        "tensors": len(tensors),
        "dtypes": {dtype: {"tensors": numbers[dtype], "bytes": size} for dtype, size in sizes.most_common()},
        "shards": [{"file": file, "bytes": size} for file, size in checkpoint.shards.items()],
        "metadata": metadata,
    }
    return OK, document, _info_lines(document)


def _info_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen for the result of :func:`_info`."""
    shards = document["shards"]
    speed = f"{document['seconds']:.3f} s, {document['gigabytes_per_second']:.2f} GB/s"
    rows = [
        ("path", document["path"]),
        ("format", f"version {document['format_version']}, written by {document['writer']}"),
        ("created", _when(document["created"])),
        ("saved", f"{speed}, engine {document['engine']}, {count(document['threads'], 'thread')}"),
    ]
    if document["fallback"]:
        rows.append(("fallback", document["fallback"]))
    rows.extend(document["options"].items())
    tensors, in_shards = count(document["tensors"], "tensor"), count(len(shards), "shard")
    rows.append(("size", f"{size(document['bytes'])} in {tensors}, {in_shards}"))
    lines = table(rows)

    def section(head: str, cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
        if cells:
            lines.extend(["", f"{head}:", *(f"  {line}" for line in table(cells[:_LINES], right))])
        if len(cells) > _LINES:
            lines.append(f"  and {len(cells) - _LINES} more")

    dtypes = document["dtypes"].items()
    section("dtypes", [(dtype, count(of["tensors"], "tensor"), size(of["bytes"])) for dtype, of in dtypes], (1, 2))
    section("shards", [(shard["file"], size(shard["bytes"])) for shard in shards], (1,))
    metadata = document["metadata"]
    items = metadata.items() if isinstance(metadata, dict) else [("", metadata)] if metadata is not None else []
    section("metadata", [(key, shortened(json.dumps(value, ensure_ascii=False), _WIDTH)) for key, value in items])
    return lines


def _ls(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Name, dtype, shape, size and shard of each tensor; or the checkpoints in a directory."""
    if _runs.is_run(options):
        return _runs.run(options)
    try:
        with fastckpt.open(options.path) as checkpoint:
            tensors = _tensors(checkpoint)
    except NotACheckpointError:
        found = fastckpt.list(options.path) if options.pattern is None else []
        if not found:
            raise
        return _listed(os.fspath(options.path), found)
    if options.pattern is not None:
        names = [tensor["name"] for tensor in tensors]
        tensors = [tensor for tensor in tensors if fnmatch.fnmatchcase(tensor["name"], options.pattern)]
        if not tensors:
            raise CheckpointError(
                f"ls {options.path}: {options.pattern!r} matches no tensor{suggest(options.pattern, names)}"
            )
    total = sum(tensor["bytes"] for tensor in tensors)
    head = ("name", "dtype", "shape", "bytes", "shard")
    rows = [
        (tensor["name"], tensor["dtype"], str(tensor["shape"]), str(tensor["bytes"]), tensor["shard"])
        for tensor in tensors
    ]
    lines = table([head, *rows], right=(3,))
    lines.append(f"{count(len(tensors), 'tensor')}, {total} bytes ({size(total)})")
    document = {"path": checkpoint.path, "tensors": tensors, "bytes": total}
    return OK, document, lines


def _listed(path: str, found: Sequence[fastckpt.types.ListedCheckpoint]) -> tuple[int, dict[str, Any], list[str]]:
    """The checkpoints in a directory."""
    entries = [
        {"name": one.name, "path": one.path, "created": one.created, "bytes": one.bytes, "damage": one.damage}
        for one in found
    ]
    rows = [
        (one.name, _when(one.created) if one.created is not None else "", size(one.bytes), one.damage or "")
        for one in found
    ]
    total = sum(one.bytes for one in found)
    lines = [*table([("name", "created", "size", ""), *rows], right=(2,))]
    lines.append(f"{count(len(found), 'checkpoint')}, {total} bytes ({size(total)})")
    return OK, {"path": path, "checkpoints": entries, "bytes": total}, lines


def _when(created: float) -> str:
    return dt.datetime.fromtimestamp(created).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _verify(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Compare every byte with its checksum."""
    if options.all:
        return _verify_all(options)
    report = fastckpt.verify(options.path, io=fastckpt.IO(progress=options.progress))
    lines = [*map(str, report.damage), *report.warnings, str(report)]
    return OK if report.ok else DAMAGED, _verified(report), lines


def _verified(report: fastckpt.types.VerifyReport) -> dict[str, Any]:
    return {**asdict(report), "gigabytes_per_second": report.gigabytes_per_second, "ok": report.ok}


def _verify_all(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Verify every checkpoint in a directory; an unreadable one does not stop the rest."""
    found, lines, statuses = fastckpt.list(options.path), [], []
    if not found:
        raise NotACheckpointError(
            f"verify --all {options.path}: no checkpoint is in it: give a directory with checkpoints"
        )
    checkpoints: list[dict[str, Any]] = []
    for one in found:
        try:
            report = fastckpt.verify(one.path, io=fastckpt.IO(progress=options.progress))
        except (CheckpointError, OSError) as error:
            statuses.append(_status(error))
            text = _message(error, "verify", one.path)
            checkpoints.append({"path": one.path, "ok": False, "error": text})
        else:
            statuses.append(OK if report.ok else DAMAGED)
            text = str(report)
            checkpoints.append({**_verified(report), "error": None})
        lines.append(f"{one.name}: {text}")
    damaged = statuses.count(DAMAGED)
    lines.append(f"{count(len(found), 'checkpoint')}, {damaged} damaged")
    document = {"path": os.fspath(options.path), "ok": not any(statuses), "checkpoints": checkpoints}
    return DAMAGED if damaged else max(statuses), document, lines


_COMMANDS = {
    "info": _info,
    "ls": _ls,
    "verify": _verify,
    "copy": _copy.run,
    "import": _convert.import_,
    "export": _convert.export,
    "diff": _diff.run,
    "prune": _runs.prune,
    "clean": _clean.run,
    "rm": _manage.remove,
    "pin": _manage.pin,
    "plan": _plan.run,
    "bench": _bench.run,
    "doctor": _doctor.run,
    "run": _launch.run,
    "completion": _completion.run,
}


def _status(error: Exception) -> int:
    return DAMAGED if isinstance(error, CorruptCheckpointError) else FAILED


def _message(error: Exception, operation: str, path: str | os.PathLike[str]) -> str:
    """Return the operation that failed, its place, cause and remedy."""
    if isinstance(error, KeyError):
        return str(error.args[0]) if error.args else type(error).__name__
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    where = os.fsdecode(path if error.filename is None else error.filename)
    cause = error.strerror or str(error)
    # The core's messages already name operation and path. A cause that says more than the system's text already has a
    # remedy, and one remedy is enough.
    message = cause if f"`{where}`" in cause else f"cannot {operation} {where}: {cause}"
    remedy = _REMEDIES.get(error.errno)
    plain = cause.rpartition(": ")[2].partition(" (os error")[0] == os.strerror(error.errno)
    return f"{message}; {remedy}" if remedy and plain else message


#: Quoted names and values in messages, which stay unchanged.
_QUOTED = r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]"


def _with_flags(message: str, operation: str, flags: Mapping[str, str], path: str) -> str:
    """``message`` with Python's argument names replaced by options of the command."""
    message = re.sub("^IO: ", f"{operation}: ", message)
    every = message.startswith(f"{operation}: give ")
    parts = re.split(f"({re.escape(path)}|{_QUOTED})" if len(path) > 1 else f"({_QUOTED})", message)
    for at in range(0, len(parts), 2):
        text = parts[at]
        # A value in quotes belongs to the name before it.
        bare = r"(?!\w)" if at == len(parts) - 1 else r"(?!\w|$)"
        for name, flag in flags.items():
            whole = rf"(?<![\w/.-]){name}(?![\w/.-])"
            text = re.sub(rf"{whole}=False\b", f"no {flag}", text)
            text = re.sub(rf"{whole}=(?:True\b|{bare})", flag, text)
            if every:
                text = re.sub(rf"(?<!\ba ){whole}", flag, text)
            text = re.sub(rf"(^|: ){name}(?=:| must| \d| $)", rf"\1{flag}", text)
        parts[at] = text
    message = "".join(parts)
    return f"{operation}: {message}" if message.startswith("--") else message


def _open_streams() -> None:
    """Replace standard output or standard error by a null device if the caller has closed it."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the end


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options that may stand anywhere, and the other arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = [one for one in arguments[:end] if one in _EVERYWHERE]
    return found, [*(one for one in arguments[:end] if one not in _EVERYWHERE), *arguments[end:]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _open_streams()
    found, arguments = _apart(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["top"]:
        return _manage.top([*found, *arguments[1:]])
    quiet = "--quiet" in found
    as_json = "--json" in found and not quiet
    operation, path, flags = "run", Path(), {}
    document: dict[str, Any]
    try:
        _namesake.check_own(fastckpt)
        options = _parser().parse_args(arguments)
        flags = options.parser.flags()
        options.progress = sys.stderr.isatty() and not quiet
        operation = {"info": "open", "ls": "open"}.get(options.command, options.command)
        path = getattr(options, "path", None) or getattr(options, "checkpoint", None) or path
        status, document, lines = _COMMANDS[options.command](options)
        document = {"schema": f"fastckpt/{options.command}/1", **document}
    except Exception as error:  # noqa: BLE001 - users need to know what is wrong, not where in our code
        status = _status(error)
        message = _with_flags(_message(error, operation, path), operation, flags, os.fspath(path))
        document, lines = {"schema": "fastckpt/error/1", "error": message, "type": type(error).__name__}, []
        if not as_json:
            _print(f"fastckpt: {visible(message)}", sys.stderr)
    except KeyboardInterrupt:
        return 130
    try:
        if as_json:
            # DEL is the only control character that `json.dumps` does not escape.
            _print(json.dumps(document, indent=2).replace("\x7f", "\\u007f"), sys.stdout)
        elif lines and not quiet:
            _print("\n".join(map(visible, lines)), sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has stopped reading; Python's own flush at exit must not fail on it again.
        _discard_output()
    except OSError as error:
        _discard_output()
        print(f"fastckpt: cannot write to standard output: {error.strerror}; free space there", file=sys.stderr)
        return FAILED
    return status


def _print(text: str, stream: TextIO) -> None:
    """Print ``text``; characters that the locale cannot encode are escaped."""
    encoding = stream.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
