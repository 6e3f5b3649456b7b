"""The jobs of children (see :mod:`harness.zygote`). Each function takes the channel to its parent and plain JSON
arguments."""

# ruff: noqa: BLE001, PERF203, PTH118, PTH208, TC001 - the parent judges every exception; paths are what the kernel is told

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import io as text_io
import json
import logging
import os
import resource
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import fastckpt
from fastckpt._tensors.described import Tensor
from harness import cli, seccomp, ways
from harness.options import grouped
from harness.states import numbered, same, which
from harness.zygote import Channel

if os.environ.get("FASTCKPT_TEST_TORCH"):
    importlib.import_module("fastckpt._tensors.torch")

# A child that has given up its privileges can no longer read /root's interpreter, so late imports are done here.
for late in (
    "tqdm",
    "gzip",
    "fastckpt.tools",
    "fastckpt._manager.manager",
    "fastckpt._api.single_file",
    "fastckpt._tools.doctor.facts",
    "fastckpt._tools.doctor.findings",
):
    importlib.import_module(late)
numbered(0, 4096)
SMALL = 1 << 18


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
    """Become user 65534 permanently, without groups and capabilities (setuid from root drops all of these)."""
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
    """Save and load several times; return the reports, the log, and the result of io_uring_setup here."""
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
            raise AssertionError("the load returned another step")
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
    """The findings of ``fastckpt.tools.doctor`` here, and the result of io_uring_setup."""
    os.environ.update(env or {})
    if memlock is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    if user:
        os.setgroups(groups or [])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    if blocked:
        seccomp.install(blocked)
    return {**fastckpt.tools.doctor(directory, probe=probe).document(), "ring": seccomp.setup_errno()}


def remove_held(channel: Channel, *, path: str, files: list[str]) -> None:
    """Report, wait for the command, then remove."""
    channel.send({"report": "ready"})
    channel.receive()
    fastckpt.remove(path, files=files)


def save_held(
    channel: Channel,
    *,
    path: str,
    index: int,
    nbytes: int = 1 << 20,
    constant: int = 0,
    fsize: int | None = None,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """Prepare the state, report, wait for the command, then save, so that a tracer sees only the save.

    ``constant`` zeros are a part of the state that does not depend on the index.
    """
    import numpy as np

    os.environ.update(env or {})
    state = numbered(index, nbytes)
    if constant:
        state["constant"] = np.zeros(constant, dtype=np.uint8)
    if fsize is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fsize, fsize))
    channel.send({"report": "ready"})
    channel.receive()
    return _report(fastckpt.save(state, path, **grouped(options)))


def snapshot_of_floats(
    channel: Channel, *, path: str, count: int, strided: bool, lazy: bool, **options: Any
) -> dict[str, Any]:
    """Save one torch tensor of ``count`` elements asynchronously, on command, so that a tracer sees only that."""
    import torch

    state = {"w": torch.zeros(count, 2)[:, 0] if strided else torch.zeros(count)}
    # After this save, the trials of a process's first save are over.
    fastckpt.save_async({}, path).result(60)
    channel.send({"report": "ready"})
    channel.receive()
    return _report(fastckpt.save_async(state, path, **grouped({"lazy": lazy, **options})).result(60))


def save_changing(channel: Channel, *, path: str, io: str) -> dict[str, Any]:
    """Save a tensor that each tick of the progress changes. The limit makes the save wait, and tick, after summing."""
    import numpy as np

    os.environ["FASTCKPT_ZERO_COPY"] = "1"
    room = np.zeros((3 << 20) + 4096, np.uint8)
    first = room[(64 - room.ctypes.data) % 4096 :][: 3 << 20]
    first[:] = 1

    def tick(done: int, total: int) -> None:
        first[:] += 1

    tensors = [Tensor("a", "U8", [first.size], first.ctypes.data, first.nbytes)]
    options = fastckpt._core.SaveOptions(shard_size=1 << 40, io=io, threads=1, bandwidth_limit=3 << 20)
    channel.send({"report": "ready"})
    channel.receive()
    return dict(fastckpt._core.save(path, tensors, '[["dict",1],"a",["array",0]]', "[null]", options, None, tick))


def crowded(
    channel: Channel,
    *,
    directory: str,
    nbytes: int,
    asynchronous: bool = False,
    user: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Save and load while the process may start no threads: a tracer refuses them after the command to begin, or,
    with ``user``, a limit of that user's processes prevents them."""
    state = numbered(7, nbytes)
    path = os.path.join(directory, "step")
    given = grouped(options)
    records = Records()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    channel.send({"report": "ready"})
    channel.receive()
    saved = fastckpt.save_async(state, path, **given).result() if asynchronous else fastckpt.save(state, path, **given)
    return {
        **_report(saved),
        "loaded": which(fastckpt.load(path), nbytes),
        "warnings": records.warnings(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def snapshot_held(channel: Channel, *, path: str, nbytes: int, nice: int) -> dict[str, Any]:
    """Write a snapshot from the calling thread, with this niceness for the writing threads."""
    import numpy as np

    memory = np.ones(nbytes, np.uint8)
    core = fastckpt._core
    options = core.SaveOptions(shard_size=1 << 40, io="threads", nice=nice)
    tensor = Tensor("a", "U8", [nbytes], memory.ctypes.data, nbytes)
    snapshot = core.Snapshot([tensor], "[null]", "[null]", options, None)
    snapshot.attach(core.Memory(snapshot.nbytes))
    channel.send({"report": "ready"})
    channel.receive()
    snapshot.stage(b"\1", last=True, options=options)
    report = snapshot.save(path, options, None)
    return {**report, "nice": os.getpriority(os.PRIO_PROCESS, 0)}


def fork_in_save(channel: Channel, *, path: str, io: str) -> dict[str, Any]:
    """Fork while a save is held between two calls for bytes; returns the descriptors of a child and of the saver."""
    held, go_on = threading.Event(), threading.Event()

    def fill(ranges: list[tuple[int, int, int, int]]) -> None:
        for index, start, address, nbytes in ranges:
            ctypes.memset(address, index + 1, nbytes)
            if start:
                held.set()
                go_on.wait(60)

    def save() -> None:
        tensors = [Tensor("a", "U8", [40 << 20], 0, 40 << 20)]
        options = fastckpt._core.SaveOptions(shard_size=1 << 40, io=io, threads=1)
        fastckpt._core.save(path, tensors, "[null]", "[null]", options, fill, None)

    def descriptors() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the directory is closed
                found.append(str(Path("/proc/self/fd", name).readlink()))
        return found

    saver = threading.Thread(target=save)
    saver.start()
    held.wait(60)
    ours = descriptors()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(descriptors()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        theirs = json.loads(answer.read())
    os.waitpid(pid, 0)
    go_on.set()
    saver.join()
    return {"ours": ours, "theirs": theirs, "ok": fastckpt.verify(path).ok}


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
    """Save state after state to one path, and report each save before its start and after it is durable."""
    for index in range(first, first + step * count, step):
        state = numbered(index, nbytes)
        channel.send({"report": ["begin", index]})
        fastckpt.save(state, path, **grouped(options))
        channel.send({"report": ["done", index]})


def save_now(channel: Channel, *, path: str, index: int, nbytes: int, **options: Any) -> None:
    """Save once."""
    fastckpt.save(numbered(index, nbytes), path, **grouped(options))


def write_file(channel: Channel, *, path: str, fill: int, nbytes: int, io: str = "auto", user: bool = False) -> None:
    """Wait for the command, then write ``nbytes`` bytes ``fill`` by ``fastckpt.open_write``, optionally as ``user``."""
    if user:
        drop_privileges()
    channel.send({"report": "ready"})
    channel.receive()
    with fastckpt.open_write(path, io=io) as file:
        file.write(bytes([fill]) * nbytes)


def save_repeatedly(channel: Channel, *, path: str, count: int, nbytes: int, **options: Any) -> None:
    """Save the states from 1 to ``count`` to one path."""
    for index in range(1, count + 1):
        fastckpt.save(numbered(index, nbytes), path, **grouped(options))


def contend(channel: Channel, *, path: str, first: int, step: int, count: int, nbytes: int, **options: Any) -> Any:
    """Save to a path to which other processes save, too; return the end of each save."""
    ends = []
    channel.send({"report": "ready"})
    channel.receive()
    for index in range(first, first + step * count, step):
        state = numbered(index, nbytes)
        for _ in range(2):
            end = [index, "saved", ""]
            try:
                fastckpt.save(state, path, **grouped(options))
            except (OSError, fastckpt.CheckpointError) as error:
                end = [index, type(error).__name__, str(error)]
            # With FUSE, a client's cache may hide another saver's checkpoint: then the error asks to save again.
            if "save again" not in end[2]:
                break
        ends.append(end)
    return ends


def load_timed(
    channel: Channel, *, path: str, headroom: int | None = None, operation: str = "load", **options: Any
) -> dict[str, Any]:
    """Load in some way under a limit of address space; return the time, the growth of resident memory, and the end."""
    if operation == "device":
        ways.prepare()
    if headroom is not None:
        _limit_address_space(headroom)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, processor = time.monotonic(), time.process_time()
    done = None
    try:
        core = operation == "reader"
        done = fastckpt._core.Reader(path) if core else ways.through(operation, path, **options)
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
    """Run a ``fastckpt`` command on a checkpoint; return its status, its time, and the growth of resident memory."""
    from harness import cli

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processor = time.process_time()
    with Path(os.devnull).open("w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        status = cli.main([operation, path])
    processor = time.process_time() - processor
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"status": status, "processor": processor, "grown": grown}


def _look(operation: str, path: str, nbytes: int) -> Any:
    """Read a checkpoint in one way; return the index of its state, if that way reveals it."""
    if operation in ("load", "mmap"):
        return which(fastckpt.load(path, io=fastckpt.IO(mmap=operation == "mmap")), nbytes)
    if operation == "open":
        return len(fastckpt.open(path))
    if operation == "info":
        with contextlib.redirect_stdout(text_io.StringIO()), contextlib.redirect_stderr(text_io.StringIO()) as said:
            code = cli.main(["info", path])
        return f"exit {code}: {said.getvalue()}" if code else 0
    report = fastckpt.verify(path)
    return 0 if report.ok else str(report)


def look(channel: Channel, *, path: str, operation: str = "load", nbytes: int = SMALL, held: bool = False) -> Any:
    """Read a checkpoint once; with ``held``, wait for the command first."""
    if held:
        channel.send({"report": "ready"})
        channel.receive()
    return _look(operation, path, nbytes)


def look_until_told(
    channel: Channel, *, path: str, operations: list[str], nbytes: int = SMALL, least: int = 3
) -> dict[str, Any]:
    """Read in every way in turn until the parent's command; return the number of successes, and all failures."""
    channel.send({"report": "ready"})
    well = dict.fromkeys(operations, 0)
    ill: dict[str, int] = {}
    while min(well.values()) < least or not select.select([channel.sock], [], [], 0)[0]:
        for operation in operations:
            try:
                found = _look(operation, path, nbytes)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if isinstance(found, int):
                well[operation] += 1
            else:
                text = f"{operation}: {found.replace(path, 'PATH')}"
                ill[text] = ill.get(text, 0) + 1
                if sum(ill.values()) > 1000:
                    return {"well": well, "ill": ill}
    return {"well": well, "ill": ill}


def load_many(channel: Channel, *, paths: list[str], among: list[str]) -> list[list[str]]:
    """Load several checkpoints in one process, on command; return the end of each load in each way."""
    channel.send({"report": "ready"})
    channel.receive()
    ends = []
    for path in paths:
        ends.append([])
        for way in among:
            try:
                done = ways.through(way, path, io="threads", threads=1)
            except (OSError, fastckpt.CheckpointError) as error:
                ends[-1].append(type(error).__name__)
            else:
                ends[-1].append("loaded" if getattr(done, "ok", True) else "damage")
    return ends


def modes(channel: Channel, *, path: str, umask: int, index: int = 1) -> dict[str, list[int]]:
    """Save under a umask; return mode and group of the directory and of every file."""
    os.umask(umask)
    fastckpt.save(
        {"model": numbered(index), "optimizer": numbered(index)}, path, files=fastckpt.Files(shard_size=1 << 19)
    )
    found = {".": os.lstat(path)}
    for place, folders, names in os.walk(path):
        inside = (os.path.join(place, name) for name in (*folders, *names))
        found.update({os.path.relpath(each, path): os.lstat(each) for each in inside})
    return {name: [status.st_mode & 0o7777, status.st_gid] for name, status in found.items()}


def fork_and_save(channel: Channel, *, directory: str, io: str) -> dict[str, Any]:
    """Save, fork, save in the child (which ends by os._exit) and in the parent at once, then again in the parent."""
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
    """Try to save (or load) as a user without permission. An asynchronous save must fail at the call."""
    state = numbered(index)
    call = getattr(fastckpt, operation)
    if user:
        drop_privileges()
    if operation == "load":
        call(path)
    else:
        call(state, path)


def mutations(
    channel: Channel,
    *,
    directory: str,
    mutants: str,
    original: str,
    headroom: int,
    seconds: float,
    framework: str = "numpy",
    among: list[str],
    rotate: bool = False,
) -> dict[str, Any]:
    """Load under every mutant of a manifest (a JSON list in a file) in place, in each of the ways ``among``, or in the
    first way and, by turns, another; return the end of each load, by way, and every violation.

    A mutant under a correct checksum may be a legal checkpoint with another meaning of the same bytes. But
    a load may never return bytes that belong to no tensor of the original, change memory beside a target, or raise
    an undocumented exception.
    """
    manifest = Path(directory) / "fastckpt.json"
    whole = fastckpt.load(original, framework=framework)
    # Genuine bytes include those of tensors from which a value is made.
    genuine = {*ways.contents([whole, ways.through("open", original)]), b""}
    cases = json.loads(Path(mutants).read_text(encoding="ascii"))
    if "device" in among:
        # Torch converts arrays of another byte order to its own.
        genuine.update(ways.contents(ways.through("device", original)))
    _limit_address_space(headroom)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends: dict[str, list[str]] = {way: [] for way in among}
    bad: list[list[str]] = []
    slowest = 0.0
    for number, case in enumerate(cases):
        manifest.write_bytes(bytes.fromhex(case["bytes"]))
        first, *others = among
        for way in [first, others[number % len(others)]] if rotate else among:
            # CPU time is measured, because the CPU may be busy; the parent limits a hang.
            start = time.process_time()
            end, fault = _one(way, directory, framework, whole, genuine)
            ways.forget()
            took = (time.process_time() - start) / ways.OPERATIONS.get(way, 1)
            slowest = max(slowest, took)
            if end == "loaded" and not case["sealed"] and way == "load":
                fault = fault or "loaded another state despite a wrong checksum"
            if took > seconds:
                fault = fault or f"took {took:.1f} s"
            if fault:
                bad.append([case["what"], way, fault])
            ends[way].append(end)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"ends": ends, "bad": bad, "slowest": slowest, "grown": grown}


def _one(way: str, directory: str, framework: str, whole: Any, genuine: set[bytes]) -> tuple[str, str]:
    """Load in one way; return the end of the load and the violation, if any."""
    try:
        loaded = ways.through(way, directory, framework=framework, io="threads", threads=1)
    except (OSError, fastckpt.CheckpointError) as error:
        return type(error).__name__, "" if str(error) else "says nothing"
    except BaseException as error:
        kind = type(error).__name__
        # A state without tensors has no names.
        if way == "keys" and kind == "KeyError":
            return kind, ""
        return kind, f"{kind}: {error}"[:300]
    if way == "verify":
        return "loaded" if loaded.ok else "damage", ""
    if not all(leaf in genuine for leaf in ways.contents(loaded)):
        return "loaded", "loaded bytes that were never saved"
    return "loaded equal" if way == "load" and same(loaded, whole) else "loaded", ""


def metadata_of(channel: Channel, *, directory: str, mutants: str) -> list[str]:
    """Read the metadata under every mutant of a manifest; return the end of each read."""
    ends = []
    for case in json.loads(Path(mutants).read_text(encoding="ascii")):
        (Path(directory) / "fastckpt.json").write_bytes(bytes.fromhex(case["bytes"]))
        start = time.process_time()
        try:
            _ = fastckpt.open(directory).metadata
        except Exception as error:
            ends.append(type(error).__name__)
        else:
            ends.append("loaded")
        if time.process_time() - start > 2:
            ends[-1] += ", slowly"
    return ends


#: The imports of a child with which ``import`` examines a file.
LOOKING = "fastckpt._tensors.torch,fastckpt._tools.convert.pickled,fastckpt._tools.convert.distributed"
#: The exit status of a process that has no memory left to report its error.
OUT_OF_MEMORY = 71


def look_first(channel: Channel, *, path: str, answer: str, memory: int, seconds: int) -> None:
    """Do the work of a child of ``import`` under these limits, and end the process, with an exception if the child
    raised one."""
    from fastckpt._tools.convert import pickled

    pickled._MEMORY, pickled._SECONDS = memory, seconds
    try:
        pickled.look(path, os.open(answer, os.O_WRONLY))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # a report would need memory, too


def _limit_address_space(headroom: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
