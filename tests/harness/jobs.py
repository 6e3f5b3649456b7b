"""What children do (see :mod:`harness.zygote`). Each function takes the channel to its parent and plain JSON
arguments."""

# ruff: noqa: BLE001, PERF203, PTH118, PTH208, TC001 - the parent judges every exception; paths are what the kernel is told

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import fastckpt
from harness import seccomp
from harness.states import numbered, same, which
from harness.zygote import Channel

if os.environ.get("FASTCKPT_TEST_TORCH"):
    importlib.import_module("torch")

# A child that has given up its privileges cannot read /root's interpreter any more: what is imported late is
# imported here.
for late in ("tqdm", "gzip", "fastckpt._doctor.facts", "fastckpt._doctor.findings"):
    importlib.import_module(late)
numbered(0, 4096)


class Records(logging.Handler):
    """All log records of fastckpt, as ``[level, message]``."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[list[str]] = []
        logger = logging.getLogger("fastckpt")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append([record.levelname, record.getMessage()])

    def warnings(self) -> list[str]:
        return [message for level, message in self.seen if level == "WARNING"]


def _report(report: Any) -> dict[str, Any]:
    plain = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    return {**plain, "phases": dict(report.phases), "blocks": dict(report.blocks)}


def drop_privileges() -> None:
    """Become user 65534 for good: no group, no capability (setuid from root drops them all)."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def round_trips(
    channel: Channel,
    *,
    directory: str,
    saves: int = 3,
    nbytes: int = 4 << 20,
    io: str = "auto",
    env: dict[str, str] | None = None,
    user: bool = False,
    memlock: int | None = None,
    blocked: str | None = None,
    trusted: bool = True,
) -> dict[str, Any]:
    """Save and load several times; what the reports and the log said, and what io_uring_setup answers here."""
    os.environ.update(env or {})
    if memlock is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    if user:
        drop_privileges()
    if blocked:
        seccomp.install(blocked)
    ring = seccomp.setup_errno()
    records = Records()
    reports = []
    for index in range(1, saves + 1):
        path = os.path.join(directory, f"step-{index}")
        reports.append(_report(fastckpt.save(numbered(index, nbytes), path, io=io)))
        loaded = fastckpt.load(path, io=io)
        if which(loaded, nbytes) != index:
            raise AssertionError("another step came back")
        verified = fastckpt.verify(path, io=io)
        if not verified.ok:
            raise AssertionError(str(verified))
    return {
        "ring": ring,
        "reports": reports,
        "warnings": records.warnings(),
        "log": records.seen,
        "user": os.getuid(),
    }


def diagnose(
    channel: Channel,
    *,
    directory: str,
    probe: bool = False,
    env: dict[str, str] | None = None,
    user: bool = False,
    groups: list[int] | None = None,
    memlock: int | None = None,
    blocked: str | None = None,
) -> dict[str, Any]:
    """What ``fastckpt.doctor`` says here, and what io_uring_setup answers."""
    os.environ.update(env or {})
    if memlock is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    if user:
        os.setgroups(groups or [])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    if blocked:
        seccomp.install(blocked)
    return {**fastckpt.doctor(directory, probe=probe).document(), "ring": seccomp.setup_errno()}


def save_held(
    channel: Channel,
    *,
    path: str,
    index: int,
    nbytes: int = 1 << 20,
    fsize: int | None = None,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """Prepare the state, say so, wait for the word, then save: so that a tracer sees the save alone."""
    os.environ.update(env or {})
    state = numbered(index, nbytes)
    if fsize is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fsize, fsize))
    channel.send({"report": "ready"})
    channel.receive()
    return _report(fastckpt.save(state, path, **options))


def save_loop(
    channel: Channel,
    *,
    path: str,
    first: int,
    step: int = 1,
    count: int = 1_000_000,
    nbytes: int = 1 << 20,
    **options: Any,
) -> None:
    """Save state after state to one path, telling each before it begins and after it is durable."""
    for index in range(first, first + step * count, step):
        state = numbered(index, nbytes)
        channel.send({"report": ["begin", index]})
        fastckpt.save(state, path, **options)
        channel.send({"report": ["done", index]})


def contend(channel: Channel, *, path: str, first: int, step: int, count: int, nbytes: int, **options: Any) -> Any:
    """Save to a path that others save to as well; how each save ended."""
    ends = []
    channel.send({"report": "ready"})
    channel.receive()
    for index in range(first, first + step * count, step):
        state = numbered(index, nbytes)
        try:
            fastckpt.save(state, path, **options)
        except (OSError, fastckpt.CheckpointError) as error:
            ends.append([index, type(error).__name__, str(error)])
        else:
            ends.append([index, "saved", ""])
    return ends


def load_timed(
    channel: Channel, *, path: str, headroom: int | None = None, operation: str = "load", **options: Any
) -> dict[str, Any]:
    """Load under a cap on address space; time, growth of resident memory, and how it ended."""
    if headroom is not None:
        _limit_address_space(headroom)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, processor = time.monotonic(), time.process_time()
    done = None
    try:
        done = getattr(fastckpt, operation)(path, **options)
        if operation == "open":
            # Shards are opened when they are first read from.
            for name in done.keys():  # noqa: SIM118 - the method is what users call
                _ = done[name]
    except Exception as error:
        end = {
            "kind": type(error).__name__,
            "ours": isinstance(error, fastckpt.CheckpointError),
            "os": isinstance(error, OSError),
            "errno": getattr(error, "errno", None),
            "text": str(error),
        }
    else:
        end = {"kind": "loaded", "ours": False, "os": False, "errno": None, "text": ""}
    seconds, processor = time.monotonic() - start, time.process_time() - processor
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {**end, "ok": getattr(done, "ok", None), "seconds": seconds, "processor": processor, "grown": grown}


def command_timed(channel: Channel, *, path: str, operation: str) -> dict[str, Any]:
    """Run a command of ``fastckpt`` on a checkpoint; its status, its time, and the growth of resident memory."""
    from fastckpt import cli

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processor = time.process_time()
    with Path(os.devnull).open("w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        status = cli.main([operation, path])
    processor = time.process_time() - processor
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"status": status, "processor": processor, "grown": grown}


def load_many(channel: Channel, *, paths: list[str]) -> list[str]:
    """Load several checkpoints, one after another, in one process, once told to; how each ended."""
    channel.send({"report": "ready"})
    channel.receive()
    ends = []
    for path in paths:
        try:
            fastckpt.load(path, io="threads", threads=1)
        except (OSError, fastckpt.CheckpointError) as error:
            ends.append(type(error).__name__)
        else:
            ends.append("loaded")
    return ends


def modes(channel: Channel, *, path: str, umask: int, index: int = 1) -> dict[str, list[int]]:
    """Save under a umask; mode and group of the directory and of every file."""
    os.umask(umask)
    fastckpt.save(numbered(index), path, shard_size=1 << 19)
    found = {".": os.lstat(path)}
    found.update({name: os.lstat(os.path.join(path, name)) for name in os.listdir(path)})
    return {name: [status.st_mode & 0o7777, status.st_gid] for name, status in found.items()}


def fork_and_save(channel: Channel, *, directory: str, io: str) -> dict[str, Any]:
    """Save, fork, save in the child (which leaves by os._exit) and in the parent at once, then again in the parent."""
    fastckpt.save(numbered(1), os.path.join(directory, "before"), io=io)
    children = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                report = fastckpt.save(numbered(10 + number), os.path.join(directory, f"child-{number}"), io=io)
                loaded = fastckpt.load(os.path.join(directory, f"child-{number}"), io=io)
                code = 0 if which(loaded) == 10 + number and (io == "auto" or report.engine == io) else 2
            finally:
                os._exit(code)
        children.append(pid)
        fastckpt.save(numbered(20 + number), os.path.join(directory, f"parent-{number}"), io=io)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    fastckpt.save(numbered(30), os.path.join(directory, "after"), io=io)
    return {"statuses": statuses}


def refused(channel: Channel, *, path: str, user: bool = False, index: int = 1, operation: str = "save") -> None:
    """Try to save (or load) as somebody who may not."""
    state = numbered(index)
    if user:
        drop_privileges()
    if operation == "save":
        fastckpt.save(state, path)
    else:
        fastckpt.load(path)


def mutations(
    channel: Channel,
    *,
    directory: str,
    mutants: str,
    original: str,
    headroom: int,
    seconds: float,
    framework: str = "numpy",
) -> dict[str, Any]:
    """Load under every mutant of a manifest (a JSON list in a file) in place; how each ended, and what must not be.

    A mutant under a correct checksum may be a legal checkpoint that says something else about the same bytes. What
    it may never do is
    bring back bytes that are no tensor's of the original, or raise anything but what is documented.
    """
    manifest = Path(directory) / "fastckpt.json"
    whole = fastckpt.load(original, framework=framework)
    genuine = {leaf.tobytes() for leaf in _arrays(whole)} | {b""}
    cases = json.loads(Path(mutants).read_text(encoding="ascii"))
    _limit_address_space(headroom)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends: list[str] = []
    bad: list[list[str]] = []
    slowest = 0.0
    for case in cases:
        manifest.write_bytes(bytes.fromhex(case["bytes"]))
        start = time.monotonic()
        try:
            loaded = fastckpt.load(directory, framework=framework, io="threads", threads=1)
        except (OSError, fastckpt.CheckpointError) as error:
            end = type(error).__name__
            if not str(error):
                bad.append([case["what"], "says nothing"])
        except BaseException as error:
            end = type(error).__name__
            bad.append([case["what"], f"{end}: {error}"[:300]])
        else:
            end = "loaded" if not same(loaded, whole) else "loaded equal"
            if end == "loaded" and not case["sealed"]:
                bad.append([case["what"], "loaded something else from under a wrong checksum"])
            elif not all(leaf.tobytes() in genuine for leaf in _arrays(loaded)):
                bad.append([case["what"], "loaded bytes that nobody saved"])
            del loaded
        ends.append(end)
        took = time.monotonic() - start
        slowest = max(slowest, took)
        if took > seconds:
            bad.append([case["what"], f"took {took:.1f} s"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"ends": ends, "bad": bad, "slowest": slowest, "grown": grown}


def metadata_of(channel: Channel, *, directory: str, mutants: str) -> list[str]:
    """Ask for the metadata under every mutant of a manifest; how each ended."""
    ends = []
    for case in json.loads(Path(mutants).read_text(encoding="ascii")):
        (Path(directory) / "fastckpt.json").write_bytes(bytes.fromhex(case["bytes"]))
        start = time.monotonic()
        try:
            _ = fastckpt.open(directory).metadata
        except Exception as error:
            ends.append(type(error).__name__)
        else:
            ends.append("loaded")
        if time.monotonic() - start > 2:
            ends[-1] += ", slowly"
    return ends


def _limit_address_space(headroom: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _arrays(state: Any) -> list[np.ndarray]:
    """All arrays of a state, however nested; no recursion, as a mutant may be nested deep."""
    found = []
    todo = [state]
    while todo:
        item = todo.pop()
        if isinstance(item, np.ndarray):
            found.append(item)
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += list(item)
    return found
