"""``fastckpt runs`` and ``fastckpt prune``: the checkpoints of a run, what is kept and why, and what is not."""

from __future__ import annotations

import datetime as dt
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._text import count, size, table
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from fastckpt.keep import Policy, Saved

_POLICIES = "last=3, best=2:loss:min, every=1000 (steps), every=6h, younger=2h or steps=100,200"


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands; ``command(name, text, more)`` makes their parsers."""
    runs = command(
        "runs",
        "list the checkpoints of a run: size, speed, metrics, why kept",
        "Bytes that several checkpoints share count once in the total.",
    )
    prune = command(
        "prune",
        "remove the checkpoints of a run that no policy keeps",
        "The newest checkpoint is verified first: it stays, and so do the pinned ones and damaged ones. Exits with 1 "
        "if something could not be removed.",
    )
    for parser in (runs, prune):
        parser.add_argument("path", metavar="DIR", type=Path, help="the directory that holds the checkpoints")
        parser.add_argument(
            "--keep",
            metavar="POLICY",
            action="append",
            help=f"what to keep, may be repeated: {_POLICIES}; by default what the run's manager keeps",
        )
        parser.add_argument(
            "--name", metavar="FORMAT", default="step-{step:08d}", help="the names of checkpoints (%(default)s)"
        )
    prune.add_argument("--dry-run", action="store_true", help="show what would go, and remove nothing")


@dataclass(frozen=True, slots=True)
class _Found:
    """A run, and why each of its checkpoints stays."""

    manager: fastckpt.Manager
    steps: list[int]
    saved: dict[int, Saved]
    why: dict[int, list[str]]
    policies: list[Policy]


def _find(options: argparse.Namespace, operation: str) -> _Found:
    path = os.fspath(options.path.absolute())
    if not options.path.is_dir():
        raise FileNotFoundError(2, os.strerror(2), path)
    try:
        keep = None if options.keep is None else [fastckpt.keep.parse(text) for text in options.keep]
        manager = fastckpt.Manager(path, keep=keep, name=options.name, read_only=True)
        saved = {one.step: one for one in manager.saved()}
        return _Found(manager, manager.steps(), saved, manager.kept(), manager.policies)
    except ValueError as error:
        raise ValueError(f"{operation} {path}: {error}") from None


def _files(path: str) -> dict[tuple[int, int], int]:
    """The files of a checkpoint, by what makes them the same file in several directories."""
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found[status.st_dev, status.st_ino] = status.st_size
    return found


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """List a run; return exit status, JSON document and lines."""
    found = _find(options, "runs")
    everything: dict[tuple[int, int], int] = {}
    listed: list[dict[str, Any]] = []
    for step in found.steps:
        path = found.manager.path(step)
        try:
            with fastckpt.open(path) as checkpoint:
                speed: float | None = checkpoint.origin.gigabytes_per_second
                damage = None
            files = _files(path)
        except (CheckpointError, OSError) as error:
            speed, damage, files = None, str(error), {}
        shared = sum(length for file, length in files.items() if file in everything)
        everything |= files
        one = found.saved.get(step)
        listed.append(
            {
                "step": step,
                "path": path,
                "created": None if one is None else one.created,
                "bytes": sum(files.values()),
                "shared_bytes": shared,
                "gigabytes_per_second": speed,
                "metrics": {} if one is None else dict(one.metrics),
                "kept": found.why.get(step, []),
                "damage": damage,
            }
        )
    document = {
        "path": found.manager.directory,
        "keep": [str(policy) for policy in found.policies],
        "checkpoints": listed,
        "bytes": sum(everything.values()),
    }
    lines = _lines(document)
    for entry in listed:
        # JSON has no nan and no infinity.
        metrics: dict[str, float] = entry["metrics"]
        entry["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
    return 0, document, lines


def _lines(document: dict[str, Any]) -> list[str]:
    if not document["checkpoints"]:
        return [f"there is no checkpoint in {document['path']}"]
    rows: list[tuple[str, ...]] = [("step", "created", "size", "shared", "GB/s", "metrics", "kept for")]
    for one in document["checkpoints"]:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in one["metrics"].items())
        why = f"damaged: {one['damage']}" if one["damage"] else ", ".join(one["kept"]) or "nothing"
        speed = "" if one["gigabytes_per_second"] is None else f"{one['gigabytes_per_second']:.2f}"
        shared = size(one["shared_bytes"]) if one["shared_bytes"] else ""
        rows.append((str(one["step"]), _when(one["created"]), size(one["bytes"]), shared, speed, metrics, why))
    lines = table(rows, right=(0, 2, 3, 4))
    return [*lines, f"{count(len(document['checkpoints']), 'checkpoint')}, {size(document['bytes'])}"]


def _when(created: float | None) -> str:
    return "" if created is None else dt.datetime.fromtimestamp(created).astimezone().strftime("%Y-%m-%d %H:%M")


def prune(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Remove what is not kept; return exit status, JSON document and lines."""
    found = _find(options, "prune")
    if not found.policies:
        raise ValueError(
            f"prune {found.manager.directory}: nothing says what to keep: no manager with policies has written here; "
            f"give --keep: {_POLICIES}"
        )
    newest = max(found.saved, default=None)
    go = [step for step, why in found.why.items() if not why]
    if go and newest is not None and not options.dry_run:
        report = fastckpt.verify(found.manager.path(newest))
        if not report.ok:
            raise CorruptCheckpointError(
                f"prune: the newest checkpoint, {report.path}, is damaged: {report.damage[0]}; nothing was removed"
            )
    removed, failures = [], []
    for step in go:
        try:
            if not options.dry_run:
                fastckpt.remove(found.manager.path(step), everything=True)
            removed.append(step)
        except OSError as error:  # noqa: PERF203 - one does not stop the rest
            failures.append(str(error))
    document = {
        "path": found.manager.directory,
        "keep": [str(policy) for policy in found.policies],
        "dry_run": options.dry_run,
        "kept": {str(step): why for step, why in found.why.items() if why},
        "removed": removed,
        "failures": failures,
    }
    word = "would be removed" if options.dry_run else "removed"
    lines = [*(f"{Path(found.manager.path(step)).name}: {word}" for step in removed), *failures]
    lines.append(f"{count(len(removed), 'checkpoint')} {word}, {len(found.steps) - len(removed)} stay")
    return 1 if failures else 0, document, lines
