"""``fastckpt bench DIR``: the options, and the result."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from fastckpt._tools.places import path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

HELP = """usage: fastckpt bench DIR [OPTION]...

Save and load in DIR like a job of several ranks, and compare the throughput
with the raw device and with a target. Everything written is removed again.

  --ranks N        processes that save and load at the same time (1)
  --size BYTES     state of each rank: 500MB, 2GB, 1GiB (1GB)
  --workload NAME  a state of MLPerf Storage instead of --size: llama3-8b,
                   llama3-70b, llama3-405b, llama3-1t
  --scale X        shrink the workload: 0.1 is a tenth (1)
  --tensors N      tensors of each rank (512)
  --rounds N       number of rounds (5)
  --io ENGINE      auto, uring, threads, direct, buffered (auto)
  --threads N      worker threads of each rank (its cores)
  --target T       per GPU: light, medium, high, 2.5GB/s, save=R,load=R (light)
  --gpus N         GPUs that share the storage (one per rank)
  --check          exit with status 1 if the target is not reached
  --plot FILE      draw the result; needs matplotlib
  --json           print one JSON document
  --quiet          print nothing but errors

example:
  fastckpt bench /mnt/checkpoints --ranks 2 --size 4GB --target medium --check
docs/bench.md explains every line of the output."""

_OPTIONS = ("size", "ranks", "tensors", "workload", "scale", "rounds", "io", "threads")
_MOST_RANKS, _MOST_TENSORS = 1024, 1_000_000


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, page)`` makes its parser."""
    parser = command("bench", "measure saves and loads in a directory", page=HELP)
    parser.add_argument("path", metavar="DIR", type=path)
    for name, default in {"ranks": 1, "tensors": None, "rounds": 5, "threads": None, "gpus": None}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size")
    parser.add_argument("--workload")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--io", default="auto", choices=("auto", "uring", "threads", "direct", "buffered"))
    parser.add_argument("--target", default="light")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plot", type=path)


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Run the benchmark; return exit status, JSON document and lines."""
    # Imported here, so that the other commands start without these modules.
    import fastckpt  # noqa: PLC0415
    from fastckpt._paths import refuse_url  # noqa: PLC0415

    from . import rounds, text  # noqa: PLC0415

    refuse_url("bench", str(options.path))
    # This process neither saves nor loads: it sets the target only to parse it.
    try:
        save, load = fastckpt.tools.set_target(options.target)
        io = fastckpt.IO(options.io, threads=options.threads)
    except ValueError as error:
        raise ValueError(str(error).replace("set_target", "bench: --target", 1)) from None
    target = save / 1e9, load / 1e9
    for name, most in {"ranks": _MOST_RANKS, "rounds": 10**6, "gpus": 10**9, "tensors": _MOST_TENSORS}.items():
        _within(name, getattr(options, name), most)
    gpus = options.gpus or options.ranks
    shares = _shares(options)
    if options.plot is not None:
        from . import picture  # noqa: PLC0415

        picture.check(options.plot)
    notes = _fits(options.path, shares)
    # The monitor compares the speed of each rank with this target.
    rates = zip(("save", "load"), target, strict=True)
    per_rank = [f"{kind}={rate * gpus / len(shares)}GB/s" for kind, rate in rates if rate]
    plan = rounds.Run(
        directory=options.path,
        shares=shares,
        rounds=options.rounds,
        io=io,
        target=",".join(per_rank),
        hot=not notes,
    )
    measured = rounds.measure(plan, _say if options.progress else lambda _: None)
    document = _document(options, shares, measured, target=target, gpus=gpus)
    document["notes"] += notes
    document["summary"] = text.summary(document)
    if options.plot is not None:
        picture.draw(options.plot, document)
    status = 1 if options.check and not document["target"]["met"] else 0
    return status, document, text.lines(document)


def _within(name: str, value: int | None, most: int) -> None:
    if value is not None and not 1 <= value <= most:
        raise ValueError(f"bench: --{name} must be from 1 to {most}, not {value}")


def _shares(options: argparse.Namespace) -> list[Any]:
    """The share of each rank."""
    from fastckpt._units import bytes_of  # noqa: PLC0415

    from . import shapes  # noqa: PLC0415

    tensors = options.tensors or shapes.TENSORS
    if not 0 < options.scale <= 1:
        raise ValueError(f"bench: --scale must be more than 0 and at most 1, not {options.scale:g}")
    if options.workload is None:
        if options.scale != 1:
            raise ValueError("bench: --scale shrinks a --workload: without one, give --size")
        return shapes.of_size(bytes_of("bench: --size", options.size or "1GB"), options.ranks, tensors)
    if options.size is not None:
        raise ValueError("bench: give --size or --workload, not both")
    return shapes.of_workload(options.workload, options.scale, options.ranks, tensors)


def _fits(directory: Path, shares: list[Any]) -> list[str]:
    """Refuse shares that do not fit; returns the omitted operations, with reasons."""
    from . import room  # noqa: PLC0415

    if not directory.is_dir():
        kind = NotADirectoryError if directory.exists() else FileNotFoundError
        raise kind(f"bench {directory}: it is not a directory: give one that exists")
    less = room.check(directory, shares, hot=True)
    return [f"no hot loads: {less}"] if less else []


def _say(line: str) -> None:
    """Show progress to a waiting user."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _document(
    options: argparse.Namespace, shares: list[Any], measured: Any, *, target: tuple[float, float], gpus: int
) -> dict[str, Any]:
    """The result for JSON; ``docs/bench.md`` describes the keys."""
    import platform  # noqa: PLC0415

    import fastckpt  # noqa: PLC0415
    from fastckpt._tools.doctor import facts  # noqa: PLC0415

    from . import raw, scores  # noqa: PLC0415

    found = scores.scores(measured.samples)
    direct = all(sample["direct"] for samples in measured.samples["raw_write"] for sample in samples)
    how = "direct I/O" if direct else "buffered I/O, since direct I/O is refused here"
    notes = []
    if facts.file_system(options.path)["type"] in ("tmpfs", "ramfs"):
        notes.append("this file system is in memory: nothing is durable, and no load is cold")
    return {
        "versions": {
            "fastckpt": fastckpt.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "cores": len(os.sched_getaffinity(0)),
        "directory": {"path": os.path.realpath(options.path), **facts.file_system(options.path)},
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "ranks": [{"bytes": share.bytes, "weights": share.weights, "tensors": share.tensors} for share in shares],
        "raw": f"{raw.IN_FLIGHT} threads per rank, blocks of {raw.BLOCK >> 20} MiB, {how}, synced",
        "caches": measured.caches,
        "scores": found,
        "target": {"name": options.target.strip().lower(), **scores.verdict(found, target, gpus)},
        "how": {name: scores.engine(measured.samples[name]) for name in ("save", "load", "hot") if name in found},
        "samples": measured.samples,
        "notes": notes,
        "summary": "",
    }
