"""The effect of one setting on fastckpt's speed: block size, queue depth, threads, engine, number of files, copying.

    python benchmarks/sweep.py --size 2 --rounds 5 --json sweep.json --plot sweep.svg
    python benchmarks/sweep.py --axes block,depth --grid --block 1M,4M --depth 4,8,16
    sudo .venv/bin/python benchmarks/sweep.py --loop 4 --size 1

The script varies one axis at a time and leaves the others to fastckpt, or with ``--grid`` takes every combination. Each
setting has its own process, and each round visits all settings and the raw device; figures are medians. Engine, threads
and files are arguments of ``save`` and ``load``; block size, queue depth and copying are environment variables that
exist for benchmarks only (FASTCKPT_BLOCK_SIZE, FASTCKPT_QUEUE_DEPTH, FASTCKPT_ZERO_COPY): the script leaves out a
variable that this build does not read, and reports that. To hold an axis fixed at another value, set its variable, or
FASTCKPT_IO, for the whole run. The method is described in compare.py. Block sizes accept K, M and G for powers of 1024.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from bench import GB, options, report
from bench.contenders import Spec
from bench.process import OPERATION_TITLES
from bench.rounds import Rounds
from bench.states import KINDS, Workload
from bench.summary import section

if TYPE_CHECKING:
    import argparse

# By axis: an argument or an environment variable, whether it is a variable, the values to try, and their type.
AXES: dict[str, tuple[str, bool, str, Any]] = {
    "block": ("FASTCKPT_BLOCK_SIZE", True, "256K,1M,2M,4M,8M,16M", options.amount),
    "depth": ("FASTCKPT_QUEUE_DEPTH", True, "1,2,4,8,16,32", int),
    "threads": ("threads", False, "1,2,4", int),
    "engine": ("io", False, "uring,threads,buffered", str),
    "files": ("shards", False, "1,2,4,8", int),
    "copying": ("FASTCKPT_ZERO_COPY", True, "0,1", int),
}
OPERATIONS = ("save", "load", "into")


def parse_options() -> argparse.Namespace:
    """Parse the command line and return its options."""
    parser = options.parser(__doc__)
    words = options.several(str)
    parser.add_argument("--size", type=float, default=2.0, help="GB of the state (default: 2)")
    kinds = [kind for kind in KINDS if kind not in ("many", "small")]
    parser.add_argument("--workload", choices=kinds, default="model", help="(default: model)")
    parser.add_argument("--axes", type=words, default=list(AXES), help=f"of {','.join(AXES)} (default: all)")
    parser.add_argument("--grid", action="store_true", help="measure every combination, not one axis at a time")
    parser.add_argument("--operations", type=words, default=list(OPERATIONS), help="of save,load,into,hot")
    for axis, (what, _, values, kind) in AXES.items():
        parse = options.several(kind)
        parser.add_argument(f"--{axis}", type=parse, default=parse(values), help=f"{what} (default: {values})")
    chosen = parser.parse_args()
    if unknown := set(chosen.axes) - set(AXES):
        parser.error(f"--axes: unknown {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    if unknown := set(chosen.operations) - set(OPERATION_TITLES):
        parser.error(f"--operations: unknown {', '.join(sorted(unknown))}")
    if chosen.size <= 0:
        parser.error("--size must be more than 0")
    return chosen


def setting(values: dict[str, Any]) -> Spec:
    """Return fastckpt with these values, by axis."""
    name = ",".join(f"{axis}={value}" for axis, value in values.items())
    arguments = {AXES[axis][0]: value for axis, value in values.items() if not AXES[axis][1]}
    variables = {AXES[axis][0]: str(value) for axis, value in values.items() if AXES[axis][1]}
    return Spec(f"fastckpt:{name}", arguments, variables, name.replace(",", ", "))


def settings(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the values of each setting."""
    values = {axis: getattr(chosen, axis) for axis in chosen.axes}
    if chosen.grid:
        return [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]
    return [{axis: value} for axis, several in values.items() for value in several]


def table(results: dict[str, Any], titles: dict[str, str]) -> list[list[str]]:
    """Return the table, head first; the engine that ran is from the save's report."""
    operations = report.operations_of(results)
    rows = [["", "engine", "threads", "files", "blocks"]]
    for operation in operations:
        rows[0] += [f"{OPERATION_TITLES[operation]}, GB/s", "of raw", "CPU s/GB"]
    for name, pair in results.items():
        notes = next(iter(pair.values()))["samples"][-1]["notes"] if pair else {}
        paths = " ".join(f"{path} {count}" for path, count in notes.get("blocks", {}).items() if count)
        row = [titles[name], *(str(notes.get(key, "-")) for key in ("engine", "threads", "shards")), paths or "-"]
        for operation in operations:
            figures = pair.get(operation, {})
            row += [report.number(figures.get(key)) for key in ("gigabytes_per_second", "of_raw")]
            row.append(report.number(figures.get("cpu_seconds_per_gigabyte")))
        rows.append(row)
    return rows


def panels(results: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plot's panels: one per axis, with the rates of every operation over its values."""
    made = []
    for axis in dict.fromkeys(axis for values in found.values() for axis in values):
        lines: dict[tuple[str, str], list[Any]] = {}
        for name, values in found.items():
            if set(values) == {axis} and name in results:
                for operation, figures in results[name].items():
                    label = values[axis] if AXES[axis][3] is not options.amount else f"{values[axis] / 2**20:g}"
                    points = lines.setdefault(("fastckpt", OPERATION_TITLES[operation]), [])
                    points.append((str(label), figures["gigabytes_per_second"]))
        unit = f"{AXES[axis][0]}{', MiB' if axis == 'block' else ''}"
        if lines:
            made.append({"title": axis, "x": unit, "y": "GB/s", "lines": lines})
    return made


def main() -> int:
    """Run, print, and return the exit status."""
    chosen = parse_options()
    if chosen.plot:
        from bench import plot

        plot.pyplot()
        if chosen.grid:
            raise SystemExit("--plot draws one axis at a time: omit --grid")
    workload = Workload(chosen.workload, int(chosen.size * GB))
    values = settings(chosen)
    specs = [Spec("raw"), Spec("fastckpt", title="as fastckpt chooses"), *map(setting, values)]
    titles = {spec.name: spec.title or report.name_of(spec.name) for spec in specs}
    with options.working_directory(chosen, "sweep") as directory:
        machine = report.machine(directory)
        rounds = Rounds(specs, workload, directory, operations=tuple(chosen.operations), rounds=chosen.rounds)
        one = section(workload, rounds.run())
    found = {setting(value).name: value for value in values}
    document = {"rounds": chosen.rounds, "machine": machine, "settings": found, **one}
    report.write_json(chosen.json, document)
    print(f"{one['workload']}; medians of {chosen.rounds} interleaved rounds; caches {one['caches']}.\n")
    print(report.render(table(one["results"], titles), markdown=chosen.markdown), "\n")
    print("\n".join([*report.not_run(one["not_run"], titles.__getitem__), *report.machine_lines(machine)]))
    if chosen.plot:
        heading = f"fastckpt, {one['workload']}, {machine['file_system']}: medians of {chosen.rounds}"
        drawn = panels(one["results"], found)
        if not drawn:
            raise SystemExit("--plot: no axis was measured")
        plot.curves(chosen.plot, drawn, heading)
    return 0


if __name__ == "__main__":
    sys.exit(main())
