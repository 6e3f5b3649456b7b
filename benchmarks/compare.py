"""Save and load one state with fastckpt and its peers, beside the raw device.

    python benchmarks/compare.py --size 2 --rounds 5 --markdown --json result.json --plot docs/compare.svg
    python benchmarks/compare.py --workload one,numpy,optimizer
    python benchmarks/compare.py --size 0 --many 100000
    python benchmarks/compare.py --workload small --check
    python benchmarks/compare.py --peers '' --against DIR     # an older build: pip install --no-deps --target DIR WHEEL
    sudo .venv/bin/python benchmarks/compare.py --loop 6 --check

How it measures, and why:

- **The state** is Llama-shaped, bfloat16, of random bytes (``--workload model``); or one tensor (``one``), many small
  ones (``many``), numpy arrays (``numpy``), a model with AdamW's state (``optimizer``), or models of 1, 10 and 100 MB
  (``small``).
- **Durable**: a save ends when an fsync of every file and of the directory has returned.
- **Cold**: the page cache is dropped before each cold load; the output says how. **Hot**: all files are read through
  the page cache before. **into=** fills existing, resident tensors; peers without such a load load the state and copy
  it. Every load ends when one byte of each page of the result has been read, or with ``--touch write`` also written:
  safetensors maps the file and would otherwise return before it has read anything.
- **Verified**: fastckpt checks every checksum while it loads, the default (except for ``mmap-only``). In the
  first round every contender's result is compared with the state, outside the timing.
- **Raw** is fio with direct io_uring (4 MiB blocks, 8 in flight, file allocated beforehand, fsync at the end) or,
  without fio, eight Python threads with O_DIRECT. It is a contender in every round, so that ratios are taken
  from the same minutes.
- **Interleaved**: see bench/rounds.py. **One process a contender**: see bench/process.py. **CPU, faults, memory**: see
  bench/measure.py. A contender that is not installed or fails is named with its reason.

GB is 10^9 bytes, MB 10^6. ``--check`` exits with 1 when a bar is not met; it then also runs the engines and the ways of
writing that the bars compare.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from bench import GB, bars, options, report
from bench.contenders import VARIANTS, Spec, registry
from bench.process import OPERATIONS, say
from bench.rounds import Rounds
from bench.states import KINDS, SMALL_SIZES, Workload
from bench.summary import section

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

PEERS = tuple(name for name in registry() if bars.is_peer(name))
CHECKED = ("auto", "uring", "threads", "slabs", "zero-copy", "mmap-only", "torch-file")
# A short run is noisy but cheap.
SMALL_ROUNDS = 5


def parse_options() -> argparse.Namespace:
    """Parse the command line and return its options."""
    parser = options.parser(__doc__)
    words = options.several(str)
    parser.add_argument("--size", type=float, default=2.0, help="GB of a large state, 0 for none (default: 2)")
    parser.add_argument(
        "--workload",
        type=words,
        default=["model"],
        help=f"one or more of {', '.join(KINDS)}, with commas (default: model)",
    )
    parser.add_argument(
        "--many", type=int, default=0, metavar="N", help="also N small tensors (default: 0, off; 100000 for many)"
    )
    parser.add_argument("--tensor-size", type=options.amount, default=4, help="bytes of each small tensor (default: 4)")
    parser.add_argument(
        "--peers", type=words, help=f"of {', '.join(PEERS)}; may be empty (default: all; for many: torch, safetensors)"
    )
    parser.add_argument(
        "--engines", type=words, help=f"fastckpt's variants, some of {', '.join(VARIANTS)} (default: auto)"
    )
    options.add_against(parser)
    parser.add_argument(
        "--operations", type=words, default=list(OPERATIONS), help=f"of {','.join(OPERATIONS)} (default: all)"
    )
    parser.add_argument(
        "--touch",
        choices=("read", "write"),
        default="read",
        help="whether a load ends with a read or with a write of each page (default: read)",
    )
    parser.add_argument("--syscalls", action="store_true", help="count system calls in one more round (strace -c -f)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    chosen = parser.parse_args()
    chosen.engines = chosen.engines or list(CHECKED if chosen.check else ("auto",))
    for option, allowed in (
        ("workload", KINDS),
        ("peers", PEERS),
        ("engines", tuple(VARIANTS)),
        ("operations", OPERATIONS),
    ):
        if unknown := set(getattr(chosen, option) or ()) - set(allowed):
            parser.error(f"--{option}: unknown {', '.join(sorted(unknown))}; there are {', '.join(allowed)}")
    if chosen.size < 0 or chosen.many < 0 or chosen.tensor_size < 1 or not workloads(chosen):
        parser.error("nothing to do: pass --size or --many above 0, or --workload small")
    return chosen


def workloads(chosen: argparse.Namespace) -> list[Workload]:
    """Return the requested workloads."""
    made = []
    for kind in chosen.workload:
        if kind == "small":
            made += [Workload("small", size) for size in SMALL_SIZES]
        elif kind == "many":
            chosen.many = chosen.many or 100_000
        elif chosen.size:
            made.append(Workload(kind, int(chosen.size * GB)))
    if chosen.many:
        made.append(Workload("many", chosen.tensor_size, chosen.many))
    return made


def contenders(chosen: argparse.Namespace, workload: Workload) -> list[Spec]:
    """Return the contenders of one workload, in the order of the table."""
    small = workload.kind in ("many", "small")
    kinds = registry()
    # Contenders that this workload does not concern are left out silently; those that cannot store its state are named.
    numpy = workload.kind == "numpy"
    # Some peers take minutes for many tensors; these peers run only on request.
    wanted = (
        chosen.peers if chosen.peers is not None else ("torch", "safetensors") if workload.kind == "many" else PEERS
    )
    peers = [name for name in wanted if (kinds[name].kinds == {"numpy"}) == numpy]
    ours = [*(VARIANTS[engine] for engine in chosen.engines), *chosen.against]
    return [*([] if small else [Spec("raw")]), *map(Spec, peers), *ours]


def bars_of(chosen: argparse.Namespace, workload: Workload, results: dict[str, Any]) -> list[bars.Bar]:
    """Return the bars for this workload."""
    if workload.kind in ("many", "small"):
        wanted = tuple(operation for operation in ("save", "load") if operation in chosen.operations)
        return bars.no_slower(results, wanted, workload.name)
    if workload.kind != "model":
        return []
    return bars.loop_bars(results) if chosen.loop else bars.disk_bars(results)


def run(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run everything; return the JSON document."""
    document: dict[str, Any] = {"rounds": chosen.rounds, "touch": chosen.touch, "machine": report.machine(directory)}
    document["workloads"], document["bars"] = [], []
    for workload in workloads(chosen):
        rounds = chosen.rounds * (SMALL_ROUNDS if workload.kind == "small" else 1)
        outcome = Rounds(
            contenders(chosen, workload),
            workload,
            directory,
            operations=tuple(chosen.operations),
            rounds=rounds,
            write=chosen.touch == "write",
            syscalls=chosen.syscalls,
        ).run()
        document["workloads"].append({**section(workload, outcome), "rounds": rounds})
        results = document["workloads"][-1]["results"]
        document["bars"] += [bar.document() for bar in bars_of(chosen, workload, results)]
        for bar in bars_of(chosen, workload, results):
            say(str(bar))
    return document


def show(document: dict[str, Any], *, markdown: bool) -> None:
    """Print the tables and the notes for their readers."""
    for one in document["workloads"]:
        results = one["results"]
        how = f"medians of {one['rounds']} interleaved rounds, saves durable; caches {one['caches']}"
        print(f"{one['workload']}; {how}.\n")
        if one["kind"] == "many":
            print(report.render(report.many_table(results, one["count"], one["workload"]), markdown=markdown), "\n")
        tables = [] if one["kind"] == "many" else [report.speed_table(results)]
        tables += [report.cost_table(results, operation) for operation in report.operations_of(results)]
        for table in tables:
            print(report.render(table, markdown=markdown), "\n")
        print("\n".join([*report.remarks(one), ""]))
    print("\n".join(report.machine_lines(document["machine"])))


def main() -> int:
    """Run, print, and return the exit status."""
    chosen = parse_options()
    if chosen.plot:
        from bench import plot

        plot.pyplot()
    with options.working_directory(chosen, "compare") as directory:
        document = run(chosen, directory)
    report.write_json(chosen.json, document)
    show(document, markdown=chosen.markdown)
    if chosen.plot:
        first, where = document["workloads"][0], document["machine"]["file_system"]
        heading = f"{first['workload']}, durable saves, {where}: medians of {first['rounds']}"
        plot.bars(chosen.plot, first["results"], heading)
    return 1 if chosen.check and not all(bar["met"] for bar in document["bars"]) else 0


if __name__ == "__main__":
    sys.exit(main())
