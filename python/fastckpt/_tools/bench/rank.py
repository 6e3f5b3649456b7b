"""One rank: a separate process that holds a state, and saves and loads it on request."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import fastckpt

from . import caches, raw, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from .shapes import Share

#: The operations of a round, in order.
OPERATIONS = ("raw_write", "raw_read", "save", "load", "hot")


@dataclass(frozen=True, slots=True)
class Spec:
    """The definition of a rank.

    Attributes:
        rank: its number.
        directory: its directory, made by the parent.
        share: the tensors that it saves.
        io: how it reads and writes.
        target: for the live counters, as for :func:`fastckpt.tools.set_target`.
        environment: its environment variables.
    """

    rank: int
    directory: Path
    share: Share
    io: fastckpt.IO
    target: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """The next step, as the parent requests it.

    Attributes:
        operation: one of ``OPERATIONS``, or ``remove``.
        round: counted from 1.
        forget: whether the files must be dropped from the page cache one by one.
    """

    operation: str
    round: int
    forget: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank stopped."""

    reason: str


class _Rank:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.device = raw.Device()
        self.state = shapes.make(spec.share)
        fastckpt.tools.set_target(spec.target)

    def prepare(self, request: Request) -> Callable[[float], dict[str, Any]]:
        """Prepare everything that is not measured; returns the measured step, whose argument is its start time."""
        plain = self.spec.directory / "plain"
        checkpoint = self.spec.directory / f"step-{request.round}"
        if request.operation == "raw_write":
            return self.device.write(plain, self.spec.share.bytes).run
        if request.operation == "save":
            shapes.stamp_all(self.state)
            return lambda began: self._save(checkpoint, request.round, began)
        if request.forget:
            caches.forget(self.spec.directory)
        if request.operation == "raw_read":
            return self.device.read(plain).run
        if request.operation == "hot":
            caches.warm(checkpoint)
        resident = caches.resident(checkpoint)
        return lambda began: self._load(checkpoint, began, resident, compare=request.round == 1)

    def _save(self, path: Path, step: int, began: float) -> dict[str, Any]:
        report = fastckpt.save(self.state, path, metadata={"step": step}, io=self.spec.io)
        return _sample(report, time.monotonic() - began)

    def _load(self, path: Path, began: float, resident: float | None, *, compare: bool) -> dict[str, Any]:
        reports: list[fastckpt.types.LoadReport] = []
        loaded = fastckpt.load(path, framework="numpy", io=replace(self.spec.io, on_report=reports.append))
        seconds = time.monotonic() - began
        sample = {**_sample(reports[0], seconds), "resident": resident}
        if compare and (wrong := shapes.difference(self.state, loaded)):
            raise ValueError(f"load {path}: {wrong} is not what was saved: run 'fastckpt verify' on a checkpoint there")
        return sample

    def remove(self) -> None:
        """Remove the files of the round."""
        for path in self.spec.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _sample(report: fastckpt.types.SaveReport | fastckpt.types.LoadReport, seconds: float) -> dict[str, Any]:
    return {
        "bytes": report.bytes,
        "seconds": seconds,
        "phases": dict(report.phases),
        "engine": report.engine,
        "fallback": report.fallback,
        "threads": report.threads,
        "thread_bytes": list(report.thread_bytes),
        "blocks": dict(report.blocks),
        "paths": dict(report.paths),
        "copied": report.copied,
    }


def serve(connection: Connection, spec: Spec) -> None:
    """Answer the parent until it closes the pipe.

    Each request is prepared and answered with None; then the common start time (``time.monotonic``) arrives, and the
    sample is sent back. Any error is sent back as a :class:`Failure`.
    """
    # Ctrl-C reaches the whole process group, but only the parent acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(spec.environment)
    doing = "starting"
    try:
        rank = _Rank(spec)
        connection.send(None)
        while True:
            request = connection.recv()
            doing = f"{request.operation.replace('_', ' ')} in round {request.round}"
            if request.operation == "remove":
                rank.remove()
                connection.send(None)
                continue
            run = rank.prepare(request)
            connection.send(None)
            began = connection.recv()
            time.sleep(max(0.0, began - time.monotonic()))
            connection.send(run(began))
    except (EOFError, ConnectionError):
        # The parent is gone, or has stopped reading.
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        with contextlib.suppress(OSError):
            connection.send(Failure(f"{doing}: {type(error).__name__}: {error}"))
        sys.exit(1)
