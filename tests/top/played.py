"""The processes of a played history: ranks that save on command and report, and the monitor's command.

All are forks of one warm process (:mod:`harness.zygote`), which runs these functions as ``top.played:NAME``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import time
from pathlib import Path

import numpy as np

import fastckpt

NAMED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FASTCKPT_TOP_TARGET")


def rank(channel, *, environment):
    """Save and drain on command, and send the contents of each report."""
    for name in NAMED:
        os.environ.pop(name, None)
    os.environ.update(environment)
    kept = []
    while (order := channel.receive()) is not None:
        channel.send({"report": drain(kept, **order) if "remote" in order else save(**order)})


def save(path, size, fill, step=None, limit=None, base=None, room=None):
    """Save `size` bytes, and return the contents of the report; `room` limits the size of files."""
    state = {"weights": np.full(size, fill, np.uint8)}
    metadata = {} if step is None else {"step": step}
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (room or hard, hard))
    begun = time.monotonic()
    try:
        report = fastckpt.save(state, path, io=fastckpt.IO(bandwidth_limit=limit), base=base, metadata=metadata)
        told = {"outcome": "ok", "linked": report.linked_bytes, "seconds": report.seconds, "step": report.step}
        told |= {
            "bytes": report.bytes,
            "written": written(report.path),
            "least": moving(report),
        }
    except OSError as error:
        told = {"outcome": errno.errorcode[error.errno]}
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return {**told, "begun": begun, "ended": time.monotonic(), "real": time.time()}


def moving(report):
    """Seconds of a save during which its counters ran; the report also has the time before and after."""
    return report.phases["write"] + report.phases["fsync"]


def written(path):
    """Bytes of the shards that only this checkpoint has: the report counts tensors without headers."""
    found = [file.stat() for file in Path(path).glob("*.safetensors")]
    return sum(file.st_size for file in found if file.st_nlink == 1)


def drain(kept, path, remote, size, fill, step, limit):
    """Save a step of a run and, unless `limit` slows the drain, wait for the copy in the remote tier."""
    begun = time.monotonic()
    manager = fastckpt.Manager(path, remote=remote, remote_bandwidth_limit=limit, async_save=False)
    kept.append(manager)
    manager.save(step, {"weights": np.full(size, fill, np.uint8)})
    told = {"outcome": "ok", "linked": 0, "step": step, "written": written(f"{path}/step-{step:08d}")}
    told |= {"begun": begun, "ended": time.monotonic(), "real": time.time()}
    if limit is None:
        report = manager.wait()
        told |= {"seconds": report.seconds, "least": moving(report), "safe": time.time()}
        files = [file for file in Path(remote, f"step-{step:08d}").iterdir() if file.name != "fastckpt.json"]
        told["copied"] = sum(file.stat().st_size for file in files)
    return told


def command(channel, *, arguments):
    """Run the monitor's command, and send its exit status and output."""
    from fastckpt_top.cli import main

    os.environ.pop("FASTCKPT_TOP_TARGET", None)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(arguments)
    return [status, out.getvalue()]
