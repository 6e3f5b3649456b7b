"""The types of the public API, in a user's program under ``mypy --strict``."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing

import pytest

import fastckpt
from harness import needs

# ``--strict`` reports unused ignores, so each ignore must match an error.
PROGRAM = """
import asyncio
import os
import pathlib

import fastckpt


def paths(text: str, raw: bytes, path: pathlib.Path, entry: os.DirEntry[bytes]) -> None:
    fastckpt.save({}, text)
    fastckpt.save({}, raw)
    fastckpt.save_async({}, raw)
    fastckpt.load(raw)
    fastckpt.verify(raw)
    fastckpt.tools.doctor(raw)
    fastckpt.tools.plan(checkpoint=raw, gpus=8, tier="light")
    fastckpt.open(path)
    fastckpt.open(entry)
    fastckpt.open(7)  # type: ignore[arg-type]


def context(path: str, optimizer: object) -> None:
    with fastckpt.open(path) as checkpoint:
        reveal_type(checkpoint)
        checkpoint.nonsense()  # type: ignore[attr-defined]
    with fastckpt.background.guard(optimizer) as guard:
        reveal_type(guard)
        guard.nonsense()  # type: ignore[attr-defined]


def choices(path: str) -> None:
    fastckpt.load(path, framework="numpy", io="uring")
    fastckpt.load(path, framework="jax")  # type: ignore[arg-type]
    fastckpt.load(path, io="fast")  # type: ignore[arg-type]
    fastckpt.load(path, io=fastckpt.IO("uring", threads=2, mmap=True))
    fastckpt.load(path, io=fastckpt.IO("fast"))  # type: ignore[arg-type]
    fastckpt.load(path, registry=fastckpt.Registry(undeclared="ignore"))  # type: ignore[arg-type]
    fastckpt.load(path, threads=2)  # type: ignore[call-arg]
    fastckpt.save({}, path, files={"config.json": "{}"})
    fastckpt.save({}, path, files=fastckpt.Files({"config.json": "{}"}, shard_size="2GB", frozen=["a", "b"]))
    fastckpt.save({}, path, files="config.json")  # type: ignore[arg-type]
    fastckpt.distributed.save({}, path, ranks=fastckpt.distributed.Ranks(replicas="full"))
    fastckpt.distributed.Ranks(replicas="some")  # type: ignore[arg-type]
    fastckpt.save({}, path, io="buffered")
    fastckpt.save({}, path, io="mmap")  # type: ignore[arg-type]
    fastckpt.save_async({}, path, io="mmap")  # type: ignore[arg-type]
    fastckpt.verify(path, io="mmap")  # type: ignore[arg-type]


def reports(path: str) -> float:
    pending: fastckpt.types.PendingSave = fastckpt.save_async({}, path)
    report: fastckpt.types.SaveReport = pending.result()
    if report.engine == "mmap":  # type: ignore[comparison-overlap]
        return 0.0
    return report.seconds


async def awaited(path: str) -> int:
    report = await fastckpt.save_async({}, path)
    reveal_type(report)
    return report.bytes


asyncio.run(awaited("c"))
"""


# The annotations of other packages are not tested here, and would take minutes.
OTHERS = ("accelerate", "lightning", "numpy", "peft", "torch", "torch_checkpointing", "transformers")
CONFIG = "[mypy]\nstrict = true\n" + "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in OTHERS)


@pytest.mark.slow
def test_a_program_under_mypy_strict(tmp_path):
    """Python 3.10 has no ``typing.Self``: a missing name silently becomes Any."""
    needs.package("mypy")
    program = tmp_path / "user.py"
    program.write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--python-version=3.10", str(program)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        check=False,
    )
    revealed = [line.partition("Revealed type is ")[2] for line in found.stdout.splitlines() if "Revealed" in line]
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert [text.strip('"').rpartition(".")[2] for text in revealed] == [
        "Checkpoint",
        "Guard",
        "SaveReport",
    ]


def test_the_types_of_public_signatures_are_there_at_run_time():
    resolved = set()
    names = [(module, name) for module in (fastckpt, fastckpt.distributed, fastckpt.types) for name in module.__all__]
    for module, name in names:
        public = getattr(module, name)
        members = [public, *vars(public).values()] if inspect.isclass(public) else [public]
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            # Skips methods that CPython generates for a named tuple: since 3.14, their types cannot be resolved.
            ours = getattr(function, "__module__", "").partition(".")[0] == "fastckpt"
            if ours and (inspect.isclass(function) or inspect.isfunction(function)):
                # CPython 3.10 takes a dataclass's KW_ONLY mark for a type, and cannot resolve it.
                marked = sys.version_info < (3, 11) and "_" in getattr(function, "__annotations__", ())
                typing.get_type_hints(function.__init__ if marked else function)
                resolved.add(function)
    assert resolved >= {
        fastckpt.save,
        fastckpt.load,
        fastckpt.types.Checkpoint.tensor,
        fastckpt.types.PendingSave.result,
    }
    assert resolved >= {fastckpt.IO, fastckpt.Files, fastckpt.distributed.Ranks}
