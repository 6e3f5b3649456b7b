"""``fastckpt ls`` of a run, and ``fastckpt prune``: its checkpoints, which of them are kept, and why."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._text import count, natural, size, table, visible
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, NotACheckpointError

from .places import place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from fastckpt.keep import Policy

_POLICIES = "last=3, best=2:loss:min, every=1000 (steps), every=6h, younger=2h or steps=100,200"
#: The file that a manager writes beside its checkpoints.
_CACHE = ".fastckpt-run.json"
_IS_ONE = "it is a checkpoint itself: give the directory above it ('fastckpt info' shows one checkpoint)"


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    prune = command(
        "prune",
        "show what no policy of a run keeps; --yes removes it",
        "The newest checkpoint is verified first: it stays, and so do pinned and damaged ones, and those that hold "
        "files of others. Exits with 1 if something could not be removed.",
    )
    prune.add_argument("path", metavar="DIR", type=place, help="the directory that holds the checkpoints")
    add_options(prune)
    prune.add_argument(
        "--force", action="store_true", help="also remove checkpoints that hold files of others, including those files"
    )
    prune.add_argument("--yes", action="store_true", help="remove them; without this option nothing is changed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a run."""
    parser.add_argument(
        "--keep",
        metavar="POLICY",
        action="append",
        help=f"what to keep, may be repeated: {_POLICIES}; by default what the run's manager keeps",
    )
    parser.add_argument(
        "--name", metavar="FORMAT", help="the name format, such as step-{step:08d}; by default that of most checkpoints"
    )


def is_run(options: argparse.Namespace) -> bool:
    """Whether ``ls`` must list a run: a manager has saved in the directory, or an option for runs is given."""
    if options.keep is not None or options.name is not None:
        if options.pattern is not None:
            raise ValueError(f"ls {options.path}: --keep and --name are for a run, PATTERN is for one checkpoint")
        return True
    if options.pattern is not None:
        return False
    if not isinstance(options.path, str):
        return Path(options.path, _CACHE).exists()
    for one in fastckpt.list(options.path):
        with contextlib.suppress(CheckpointError), fastckpt.open(one.path) as checkpoint:
            return isinstance(checkpoint.metadata, dict) and "lineage" in checkpoint.metadata
    return False


@dataclass(frozen=True, slots=True)
class _Found:
    """A run, and why each of its checkpoints stays."""

    manager: fastckpt.Manager
    form: str
    others: list[str]
    saved: dict[int, fastckpt.types.ManagedCheckpoint]
    policies: list[Policy]


def _find(options: argparse.Namespace, operation: str) -> _Found:
    if isinstance(options.path, str):
        raise ValueError(f"prune: {options.path!r} is a URL: only the run's manager prunes there (remote_keep=)")  # noqa: TRY004
    path = os.fspath(options.path.absolute())
    if not options.path.is_dir():
        raise FileNotFoundError(2, os.strerror(2), path)
    names = [one.name for one in options.path.iterdir() if (one / "fastckpt.json").exists()]
    if not names and (options.path / "fastckpt.json").exists():
        raise ValueError(f"{operation} {path}: {_IS_ONE}")
    try:
        keep = None if options.keep is None else [fastckpt.keep.parse(text) for text in options.keep]
        form = options.name or form_of(names)
        manager = fastckpt.Manager(path, keep=keep, name=form, read_only=True)
        saved = {one.step: one for one in manager.checkpoints()}
        others = [name for name in names if not name.startswith(".") and step_of(name, form) is None]
        return _Found(manager, form, others, saved, manager.policies)
    except ValueError as error:
        raise ValueError(f"{operation} {path}: {error}") from None


def _files(path: str) -> dict[tuple[int, int], int]:
    """The sizes of a checkpoint's files, by device and inode, which hard links of one file share."""
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found[status.st_dev, status.st_ino] = status.st_size
    return found


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """List a run; return exit status, JSON document and lines."""
    if isinstance(options.path, str):
        return _run_in_store(options)
    found = _find(options, "ls")
    everything: dict[tuple[int, int], int] = {}
    listed: list[dict[str, Any]] = []
    for step, one in found.saved.items():
        path, speed, damage = one.path, None, None
        try:
            with fastckpt.open(path) as checkpoint:
                speed = checkpoint.origin.gigabytes_per_second
            files = _files(path)
        except (CheckpointError, OSError) as error:
            damage, files = str(error), {}
        listed.append(
            {
                "step": step,
                "path": path,
                "created": one.created,
                "bytes": sum(files.values()),
                "shared_bytes": sum(length for file, length in files.items() if file in everything),
                "gigabytes_per_second": speed,
                "metrics": dict(one.metrics),
                "changed": dict(one.changed),
                "kept": [] if damage else [*one.kept_for["local"]],
                "damage": damage,
            }
        )
        everything |= files
    document = {
        "path": found.manager.directory,
        "keep": [str(policy) for policy in found.policies],
        "checkpoints": listed,
        "others": sorted(found.others, key=natural),
        "bytes": sum(everything.values()),
    }
    return 0, document, _shown(document)


def _shown(document: dict[str, Any]) -> list[str]:
    """Return the lines, and change the document so that JSON can hold it."""
    lines = _lines(document)
    for entry in document["checkpoints"]:
        # JSON has no nan and no infinity.
        metrics: dict[str, float] = entry["metrics"]
        entry["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    return lines


def _run_in_store(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """List a run in an object store; only its own manager knows which of its checkpoints are kept."""
    if options.keep is not None:
        raise ValueError(f"ls {options.path}: --keep requires a directory, not a URL")
    listed: list[dict[str, Any]] = []
    found = fastckpt.list(options.path)
    if not found:
        with contextlib.suppress(NotACheckpointError), fastckpt.open(options.path):
            raise ValueError(f"ls {options.path}: {_IS_ONE}")
    form = options.name or form_of([one.name for one in found])
    others, changed = [], {}
    for one in found:
        step = step_of(one.name, form)
        if step is None:
            others.append(one.name)
            continue
        metrics, speed = {}, None
        if one.damage is None:
            with fastckpt.open(one.path) as checkpoint:
                speed, metadata = checkpoint.origin.gigabytes_per_second, checkpoint.metadata
            metrics = _numbers(metadata, "metrics")
            # Each checkpoint records how much an earlier one differs from the one before that.
            noted = metadata.get("lineage") if isinstance(metadata, dict) else None
            if isinstance(noted, dict):
                changed[noted.get("changed_of")] = _numbers(noted, "changed")
        listed.append(
            {
                "step": step,
                "path": one.path,
                "created": one.created,
                "bytes": one.bytes,
                "shared_bytes": 0,
                "gigabytes_per_second": speed,
                "metrics": metrics,
                "changed": {},
                "kept": [],
                "damage": one.damage,
            }
        )
    listed.sort(key=lambda one: int(one["step"]))
    for entry in listed:
        entry["changed"] = changed.get(entry["step"], {})
    total = sum(one["bytes"] for one in listed)
    document = {"path": options.path, "keep": None, "checkpoints": listed, "others": others, "bytes": total}
    return 0, document, _shown(document)


def _numbers(metadata: Any, name: str) -> dict[str, float]:
    given = metadata.get(name) if isinstance(metadata, dict) else None
    if not isinstance(given, dict):
        return {}
    return {str(name): float(value) for name, value in given.items() if isinstance(value, (int, float))}


def step_of(name: str, form: str) -> int | None:
    """The step of the checkpoint ``name``; None if the name is not that of a step."""
    try:
        steps = [int(digits) for digits in re.findall("[0-9]+", name)]
        return next((step for step in steps if form.format(step=step) == name), None)
    except (LookupError, ValueError):
        raise ValueError(f"ls: --name must be a format such as step-{{step:08d}}, not {form!r}") from None


def form_of(names: Sequence[str]) -> str:
    """The format that most of these names of checkpoints have, by the last number in each."""
    forms: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = re.fullmatch("(|[^.].*?)([0-9]+)([^0-9]*)", name)
        if found is not None:
            before, digits, after = found.groups()
            forms.setdefault((before, after), []).append(digits)
    if not forms:
        return "step-{step:08d}"
    (before, after), numbers = max(forms.items(), key=lambda one: len(one[1]))
    padded = [len(digits) for digits in numbers if digits.startswith("0") and digits != "0"]
    field = f"{{step:0{min(padded)}d}}" if padded else "{step}"
    before, after = (text.replace("{", "{{").replace("}", "}}") for text in (before, after))
    return f"{before}{field}{after}"


def _lines(document: dict[str, Any]) -> list[str]:
    others = document["others"]
    more = [f"under other names: {', '.join(map(visible, others))}"] if others else []
    if not document["checkpoints"]:
        return [f"there is no checkpoint in {document['path']}{' with the name of a step' if others else ''}", *more]
    rows: list[tuple[str, ...]] = [("step", "created", "size", "shared", "GB/s", "metrics", "changed", "kept for")]
    for one in document["checkpoints"]:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in one["metrics"].items())
        nothing = "nothing" if document["keep"] is not None else ""
        why = f"damaged: {one['damage']}" if one["damage"] else ", ".join(one["kept"]) or nothing
        speed = "" if one["gigabytes_per_second"] is None else f"{one['gigabytes_per_second']:.2f}"
        shared = size(one["shared_bytes"]) if one["shared_bytes"] else ""
        changed = ", ".join(f"{group} {_percent(share)}" for group, share in one["changed"].items())
        about = _when(one["created"]), size(one["bytes"]), shared, speed, metrics, changed
        rows.append((str(one["step"]), *about, why))
    lines = table(rows, right=(0, 2, 3, 4))
    return [*lines, f"{count(len(document['checkpoints']), 'checkpoint')}, {size(document['bytes'])}", *more]


def _percent(share: float) -> str:
    """Only 0 is shown as ``0 %``, because readers take that to mean no change."""
    return "< 0.1 %" if 0 < share < 0.001 else f"{100 * share:.3g} %"  # noqa: PLR2004 - of what is shown


def _when(created: float | None) -> str:
    return "" if created is None else dt.datetime.fromtimestamp(created).astimezone().strftime("%Y-%m-%d %H:%M")


def _files_of(path: str) -> list[str]:
    """The names of the files that a manager's ``files=`` added beside a checkpoint."""
    with fastckpt.open(path) as checkpoint:
        noted = checkpoint.metadata.get("lineage") if isinstance(checkpoint.metadata, dict) else None
    files = noted.get("files") if isinstance(noted, dict) else None
    return [*map(str, files)] if isinstance(files, list) else []


def prune(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Remove checkpoints that are not kept; returns exit status, JSON document and lines."""
    found = _find(options, "prune")
    if not found.policies:
        raise ValueError(
            f"prune {found.manager.directory}: no policy is known: no manager with policies has written here; "
            f"give --keep: {_POLICIES}"
        )
    if options.name is None and (odd := [name for name in found.others if re.search("[0-9]", name)]):
        raise ValueError(
            f"prune {found.manager.directory}: not all checkpoints have names of one format: give --name, such as "
            f"{found.form}, which leaves {', '.join(map(visible, sorted(odd, key=natural)[:3]))} alone"
        )
    newest = found.manager.latest()
    go = [step for step, one in found.saved.items() if not one.kept_for["local"]]
    if go and newest is not None and options.yes:
        report = fastckpt.verify(found.manager.path(newest))
        if not report.ok:
            raise CorruptCheckpointError(
                f"prune: the newest checkpoint, {report.path}, is damaged: {report.damage[0]}; nothing was removed"
            )
    removed, failures = [], []
    foreign: dict[int, str] = {}
    for step in go:
        path = found.manager.path(step)
        try:
            if options.yes:
                fastckpt.remove(path, files=_files_of(path), force=options.force)
            removed.append(step)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and not options.force:
                foreign[step] = re.findall("`(.*?)`", str(error.strerror))[-1]
            else:
                failures.append(str(error))
    document = {
        "path": found.manager.directory,
        "keep": [str(policy) for policy in found.policies],
        "dry_run": not options.yes,
        "kept": {str(step): [*one.kept_for["local"]] for step, one in found.saved.items() if one.kept_for["local"]},
        "removed": removed,
        "foreign": {str(step): name for step, name in foreign.items()},
        "failures": failures,
    }
    word = "removed" if options.yes else "would be removed"
    lines = [*(f"{Path(found.manager.path(step)).name}: {word}" for step in removed), *failures]
    for step, name in foreign.items():
        place_of_it = Path(found.manager.path(step)).name
        lines.append(
            f"{place_of_it}: stays: it holds {visible(name)}, which is not part of it: move it, or give --force"
        )
    then = "" if options.yes or not removed else ": add --yes to remove what would go"
    lines.append(f"{count(len(removed), 'checkpoint')} {word}, {len(found.saved) - len(removed)} stay{then}")
    return 1 if failures or foreign else 0, document, lines
