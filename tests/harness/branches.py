"""Runs of a manager that restore an older step and continue: saves, restarts, and a remote tier that fails."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import fastckpt

FORM = "step-{step:08d}"

#: The file beside the checkpoints in which a Manager caches facts (docs/manager.md).
CACHE = ".fastckpt-run.json"


def state(step, branch="a"):
    return {"model": {"w": np.full(1000, step)}, "branch": branch}


def save(directory, steps, branch="a", *, at=None, discard=False, **options):
    """Save steps with a new manager, after it has restored the newest step, or step ``at``."""
    with fastckpt.Manager(directory, **options) as manager:
        found = manager.restore(step=at, discard_newer=discard)
        for step in steps:
            manager.save(step, state(step, branch), {"loss": float(step)})
            manager.wait()
    return found


def restored(directory, **options):
    found = fastckpt.Manager(directory, read_only=True, **options).restore()
    return found.step, found.state["branch"]


def damage(path):
    with Path(path, "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def silence(patch, manager):
    """Make each request to a manager's remote tier fail; return the list of requests."""
    asked = []

    def refuse(*_):
        asked.append(1)
        raise OSError("no route to the store")

    for name in ("look", "identity", "read"):
        patch.setattr(manager._remote.place, name, refuse)
    return asked


def place(tmp_path, kind):
    return {"none": None, "path": str(tmp_path / "far"), "memory": f"memory://{tmp_path.name}/far"}[kind]


def take_aside(checkpoint):
    """Leave a checkpoint as a save does that is killed between two renames, where names cannot be exchanged."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:16]
    writer = f"node7-{boot}-{Path('/proc/self/ns/pid').stat().st_ino}-4194303-7-0123abcd"
    workspace = checkpoint.with_name(f".{checkpoint.name}.tmp-{writer}")
    workspace.mkdir()
    (workspace / "fastckpt.json").touch()
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old-{writer}00"))
