"""``fastckpt bench DIR``: the options, and the result."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

EXAMPLE = """example:
  Two ranks of 4 GB each, held against what NVIDIA's light tier gives two GPUs:
    fastckpt bench /mnt/checkpoints --ranks 2 --size 4GB
  A hundredth of what one node of MLPerf Storage's Llama 3 70B writes; exit status 1 if the storage is too slow:
    fastckpt bench /mnt/checkpoints --workload llama3-70b --ranks 8 --scale 0.01 --tier medium --check
  What that storage means for months of training:
    fastckpt bench /mnt/checkpoints --ranks 8 --json > node.json
    fastckpt bench --simulate --from node.json --params 405B --gpus 16384 --tp 8 --pp 16 --restart 5min
docs/bench.md explains every line of the output.
"""

#: Options of the measurement that a simulation has no use for, with their defaults; None in the parsed arguments
#: says that one was not given.
_DEFAULTS: dict[str, Any] = {
    "ranks": 1,
    "tensors": None,
    "workload": None,
    "scale": 1.0,
    "rounds": 5,
    "io": "auto",
    "threads": None,
    "check": False,
}
#: Options of the simulation that the measurement takes as well.
_SHARED = ("size", "tier", "gpus")
_MOST_RANKS, _MOST_TENSORS = 1024, 1_000_000
_SIZE = "1GB"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement; those of the simulation, some of which it shares, are there already."""
    parser.epilog = EXAMPLE + (parser.epilog or "").removeprefix("example:\n")
    parser.add_argument(
        "path", metavar="DIR", type=Path, nargs="?", help="measure there; what is made is removed again"
    )
    group = parser.add_argument_group(
        "measurement (of DIR)",
        "and, as below: --size BYTES of each rank (default: 1GB), --tier NAME to be held against (default: light), "
        "--gpus N that share the storage (default: one a rank), --plot FILE",
    )
    group.add_argument("--ranks", metavar="N", type=int, help="processes that save and load at once (default: 1)")
    group.add_argument("--tensors", metavar="N", type=int, help="tensors of each rank (default: 512)")
    group.add_argument(
        "--workload",
        metavar="NAME",
        help="the shares of MLPerf Storage's processes instead of a size: "
        "llama3-8b, llama3-70b, llama3-405b, llama3-1t",
    )
    group.add_argument("--scale", metavar="X", type=float, help="shrink the workload: 0.1 is a tenth (default: 1)")
    group.add_argument("--rounds", metavar="N", type=int, help="how often (default: 5)")
    group.add_argument("--io", metavar="ENGINE", help="auto (default), uring, threads or buffered")
    group.add_argument("--threads", metavar="N", type=int, help="worker threads of each rank (default: its cores)")
    group.add_argument("--check", action="store_const", const=True, help="exit with 1 if the tier is not reached")


def given(options: argparse.Namespace) -> list[str]:
    """The options of the measurement that were given, DIR first: a simulation refuses them."""
    names = [f"--{name}" for name in _DEFAULTS if getattr(options, name) is not None]
    return [*(["DIR"] if options.path is not None else []), *names]


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Measure: exit status, document, lines."""
    # Imported here, so that the other commands start without it.
    from fastckpt._api.options import check_engine, refuse_url  # noqa: PLC0415
    from fastckpt._tools.tiers import TIERS  # noqa: PLC0415

    from . import rounds, text  # noqa: PLC0415

    _refuse_simulation(options)
    refuse_url("bench", str(options.path))
    chosen = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in _DEFAULTS.items()
    }
    tier = options.tier or "light"
    if tier not in TIERS:
        raise ValueError(f"bench: --tier must be one of {', '.join(TIERS)}, not {tier!r}")
    _within("--ranks", chosen["ranks"], _MOST_RANKS)
    _within("--rounds", chosen["rounds"], 10**6)
    gpus = chosen["ranks"] if options.gpus is None else options.gpus
    _within("--gpus", gpus, 10**9)
    check_engine("bench", chosen["io"], chosen["threads"])
    shares = _shares(options.size, chosen)
    if options.plot is not None:
        from . import picture  # noqa: PLC0415

        picture.check(options.plot)
    notes = _fits(options.path, shares)
    of = TIERS[tier]
    # The monitor holds each rank's own speed against it.
    part = gpus / len(shares)
    plan = rounds.Run(
        directory=options.path,
        shares=shares,
        rounds=chosen["rounds"],
        io=chosen["io"],
        threads=chosen["threads"],
        target=tier if part == 1 else f"save={of.write * part},load={of.read * part}",
        hot=not notes,
    )
    measured = rounds.measure(plan, _say)
    document = _document(options, chosen, plan, measured, tier=tier, gpus=gpus)
    document["notes"] += notes
    document["summary"] = text.summary(document)
    if options.plot is not None:
        picture.draw(options.plot, document)
    status = 1 if chosen["check"] and not document["tier"]["met"] else 0
    return status, document, text.lines(document)


def _refuse_simulation(options: argparse.Namespace) -> None:
    from fastckpt._tools.plan import simulate_command  # noqa: PLC0415

    others = [name for name in simulate_command.given(options) if name[2:] not in _SHARED]
    if others:
        raise ValueError(f"bench {options.path}: {', '.join(others)} can only be given with --simulate")


def _within(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"bench: {name} must be from 1 to {most}, not {value}")


def _shares(size: str | None, chosen: dict[str, Any]) -> list[Any]:
    """What each rank saves."""
    from fastckpt import _units as units  # noqa: PLC0415

    from . import shapes  # noqa: PLC0415

    tensors = chosen["tensors"]
    if tensors is not None:
        _within("--tensors", tensors, _MOST_TENSORS)
    if not 0 < chosen["scale"] <= 1:
        raise ValueError(f"bench: --scale must be more than 0 and at most 1, not {chosen['scale']:g}")
    if chosen["workload"] is None:
        if chosen["scale"] != 1:
            raise ValueError("bench: --scale shrinks a --workload: without one, give --size")
        return shapes.of_size(
            units.bytes_of("bench: --size", size or _SIZE), chosen["ranks"], tensors or shapes.TENSORS
        )
    if size is not None:
        raise ValueError("bench: give --size or --workload, not both")
    return shapes.of_workload(chosen["workload"], chosen["scale"], chosen["ranks"], tensors or shapes.TENSORS)


def _fits(directory: Path, shares: list[Any]) -> list[str]:
    """Refuse what does not fit; what is left out, and why."""
    from . import room  # noqa: PLC0415

    if not directory.is_dir():
        kind = NotADirectoryError if directory.exists() else FileNotFoundError
        raise kind(f"bench {directory}: it is no directory: give one that exists")
    less = room.check(directory, shares, hot=True)
    return [f"no hot loads: {less}"] if less else []


def _say(line: str) -> None:
    """Show progress to somebody who waits for it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _document(
    options: argparse.Namespace,
    chosen: dict[str, Any],
    plan: Any,
    measured: Any,
    *,
    tier: str,
    gpus: int,
) -> dict[str, Any]:
    """The result as JSON holds it; ``docs/bench.md`` describes the keys."""
    import platform  # noqa: PLC0415

    import fastckpt  # noqa: PLC0415
    from fastckpt._tools.doctor import facts  # noqa: PLC0415
    from fastckpt._tools.tiers import TIERS  # noqa: PLC0415

    from . import raw, scores  # noqa: PLC0415

    found = scores.scores(measured.samples)
    direct = all(sample["direct"] for samples in measured.samples["raw_write"] for sample in samples)
    how = "direct I/O" if direct else "buffered I/O, since direct I/O is refused here"
    notes = []
    if facts.file_system(options.path)["type"] in ("tmpfs", "ramfs"):
        notes.append("this file system lies in memory: nothing is durable, and nothing is ever cold")
    return {
        "fastckpt_bench": 1,
        "versions": {
            "fastckpt": fastckpt.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "cores": len(os.sched_getaffinity(0)),
        "directory": {"path": os.path.realpath(options.path), **facts.file_system(options.path)},
        "options": {"size": options.size, **{name: chosen[name] for name in _DEFAULTS if name != "check"}},
        "ranks": [{"bytes": share.bytes, "weights": share.weights, "tensors": share.tensors} for share in plan.shares],
        "raw": f"{raw.IN_FLIGHT} threads a rank, blocks of {raw.BLOCK >> 20} MiB, {how}, synced",
        "caches": measured.caches,
        "scores": found,
        "tier": scores.verdict(found, TIERS[tier], gpus),
        "how": {name: scores.engine(measured.samples[name]) for name in ("save", "load", "hot") if name in found},
        "samples": measured.samples,
        "notes": notes,
        "summary": "",
    }
