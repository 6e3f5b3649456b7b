"""How time and CPU grow with bytes, with the number of tensors, with shards and with threads.

    python benchmarks/scale.py --rounds 5 --json scale.json --plot scale.svg
    python benchmarks/scale.py --axes tensors --tensors 1000,10000,100000,1000000

The axis ``bytes`` saves models from 1 MB to 2 GB, and ``tensors`` saves many tensors of ``--tensor-size`` bytes, with
safetensors and torch.save beside fastckpt; ``shards`` and ``threads`` save one model (``--size``) with fastckpt alone.
Each point has its own processes and interleaved rounds, as described in compare.py; figures are medians. Loads are
cold. torch and safetensors are left out above ``--peer-limit`` tensors, where their rounds take minutes. ``--against``
includes another build of fastckpt at every point.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench import GB, MB, options, report
from bench.bars import is_peer
from bench.contenders import Spec, registry
from bench.process import OPERATION_TITLES
from bench.rounds import Rounds
from bench.states import Workload
from bench.summary import section

if TYPE_CHECKING:
    import argparse

OPERATIONS = ("save", "load")
AXES = ("bytes", "tensors", "shards", "threads")


def parse_options() -> argparse.Namespace:
    """Parse the command line and return its options."""
    parser = options.parser(__doc__)
    words, amounts, numbers = options.several(str), options.several(options.amount), options.several(options.positive)
    parser.add_argument("--axes", type=words, default=list(AXES), help=f"of {','.join(AXES)} (default: all)")
    parser.add_argument("--bytes", type=amounts, default=amounts("1e6,1e7,1e8,1e9,2e9"), help="sizes (1e6 to 2e9)")
    parser.add_argument("--tensors", type=amounts, default=amounts("1e3,1e4,1e5,1e6"), help="counts (1e3 to 1e6)")
    parser.add_argument("--tensor-size", type=options.amount, default=4, help="bytes of each tensor (default: 4)")
    parser.add_argument("--shards", type=numbers, default=[1, 2, 4, 8, 16], help="(default: 1,2,4,8,16)")
    parser.add_argument("--threads", type=numbers, default=[1, 2, 4], help="(default: 1,2,4)")
    parser.add_argument("--size", type=float, default=1.0, help="GB saved for shards and threads (default: 1)")
    parser.add_argument("--peers", type=words, default=["torch", "safetensors"], help="(default: torch,safetensors)")
    parser.add_argument("--peer-limit", type=options.amount, default=100_000, help="tensors (default: 100000)")
    options.add_against(parser)
    chosen = parser.parse_args()
    peers = [name for name in registry() if is_peer(name)]
    for option, allowed in (("axes", AXES), ("peers", peers)):
        if unknown := set(getattr(chosen, option)) - set(allowed):
            parser.error(f"--{option}: unknown {', '.join(sorted(unknown))}; there are {', '.join(allowed)}")
    if min([*chosen.bytes, *chosen.tensors, chosen.tensor_size, chosen.size]) <= 0:
        parser.error("sizes and counts must be more than 0")
    return chosen


def points(chosen: argparse.Namespace, axis: str) -> list[tuple[int, Workload, list[Spec]]]:
    """Return the points of an axis: value, workload and contenders."""
    peers, ours = list(map(Spec, chosen.peers)), [Spec("fastckpt"), *chosen.against]
    if axis == "bytes":
        return [(size, Workload("model", size), [*peers, *ours]) for size in chosen.bytes]
    if axis == "tensors":
        return [
            (
                count,
                Workload("many", chosen.tensor_size, count),
                [*(peers if count <= chosen.peer_limit else []), *ours],
            )
            for count in chosen.tensors
        ]
    model = Workload("model", int(chosen.size * GB))
    return [(value, model, [replace(one, options={axis: value}) for one in ours]) for value in getattr(chosen, axis)]


def cells(axis: str, value: int, figures: dict[str, Any]) -> list[str]:
    """Return seconds and CPU seconds, in all and for one tensor or one GB."""
    cpu = sum(sample["cpu"] for sample in figures["samples"]) / len(figures["samples"])
    if axis == "tensors":
        unit = report.number(figures["seconds"] / value * 1e6, 1)
    else:
        unit = report.number(figures["gigabytes_per_second"])
    return [report.number(figures["seconds"], 4), report.number(cpu, 4), unit]


def table(axis: str, sections: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table of one axis, head first."""
    rows = [[axis, ""]]
    for operation in OPERATIONS:
        unit = "us a tensor" if axis == "tensors" else "GB/s"
        rows[0] += [f"{OPERATION_TITLES[operation]}, s", "CPU s", unit]
    for one in sections:
        for name, pair in one["results"].items():
            row = [f"{one['value']:,}", report.name_of(name)]
            for operation in OPERATIONS:
                row += cells(axis, one["value"], pair[operation])
            rows.append(row)
    return rows


def x_of(axis: str, value: int) -> float | str:
    """Return the position of a value; shards and threads have equal distances."""
    if axis == "bytes":
        return value / MB
    return value if axis == "tensors" else str(value)


def panels(axis: str, sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plot's panels of one axis: wall clock and CPU, each operation of each contender a line."""
    what = {
        "bytes": ("GB/s", "CPU s per GB", lambda figures, _: figures["gigabytes_per_second"]),
        "tensors": ("us a tensor", "CPU us a tensor", lambda figures, value: figures["seconds"] / value * 1e6),
    }
    label, cpu_label, rate = what.get(axis, what["bytes"])

    def cpu(figures: dict[str, Any], value: int) -> float:
        per_gigabyte: float = figures["cpu_seconds_per_gigabyte"]
        return per_gigabyte * figures["bytes"] / GB / value * 1e6 if axis == "tensors" else per_gigabyte

    made = []
    for title, y, function in ((axis, label, rate), (f"{axis}: CPU", cpu_label, cpu)):
        lines: dict[tuple[str, str], list[Any]] = {}
        for one in sections:
            value = one["value"]
            for name, pair in one["results"].items():
                for operation, figures in pair.items():
                    who = report.name_of(name).replace("**", "")
                    point = (x_of(axis, value), function(figures, value))
                    lines.setdefault((who, OPERATION_TITLES[operation]), []).append(point)
        scales = {"bytes": "x", "tensors": "xy"}.get(axis, "")
        made.append({"title": title, "x": "MB" if axis == "bytes" else axis, "y": y, "log": scales, "lines": lines})
    return made


def main() -> int:
    """Run, print, and return the exit status."""
    chosen = parse_options()
    if chosen.plot:
        from bench import plot

        plot.pyplot()
    document: dict[str, Any] = {"rounds": chosen.rounds, "axes": {}}
    with options.working_directory(chosen, "scale") as directory:
        document["machine"] = report.machine(directory)
        for axis in chosen.axes:
            document["axes"][axis] = sections = []
            for value, workload, specs in points(chosen, axis):
                rounds = Rounds(specs, workload, directory, operations=OPERATIONS, rounds=chosen.rounds)
                sections.append({"value": value, **section(workload, rounds.run())})
    report.write_json(chosen.json, document)
    for axis, sections in document["axes"].items():
        print(report.render(table(axis, sections), markdown=chosen.markdown), "\n")
        for one in sections:
            for line in report.not_run(one["not_run"], report.name_of):
                print(f"{axis} {one['value']:,}: {line}")
    if "tensors" in chosen.axes and max(chosen.tensors) > chosen.peer_limit:
        print(f"Left out above {chosen.peer_limit:,} tensors: {', '.join(chosen.peers)} (--peer-limit).")
    print(f"Medians of {chosen.rounds} interleaved rounds, saves durable, loads cold.")
    print("\n".join(report.machine_lines(document["machine"])))
    if chosen.plot:
        drawn = [panel for axis, sections in document["axes"].items() for panel in panels(axis, sections)]
        plot.curves(chosen.plot, drawn, f"{document['machine']['file_system']}: medians of {chosen.rounds}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
