"""The command of the simulation; see :mod:`faults.simulated`.

python -m tests.faults.simulated_command --states 1000000 --seed 1 --results target/faults/simulated.json
python -m tests.faults.simulated_command --mutants
python -m tests.faults.simulated_command --record violation-1-17.pickle
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from faults import simulated  # noqa: E402 - the paths come first
from faults.campaign import commit, machine  # noqa: E402
from faults.row import DISTINCT  # noqa: E402
from faults.rows.r04_simulated import NAME  # noqa: E402
from faults.simulated_mutants import MUTANTS, Catcher  # noqa: E402
from faults.simulated_reader import Reader  # noqa: E402

#: The programs that one process runs before it reports; one of these programs has ranks.
BLOCK = simulated.RANKS


def block_of(stage: simulated.Stage, seed: int, number: int, states: int, keep: Path) -> dict[str, Any]:
    """Run the programs of a block; records of violations go to ``keep``."""
    total = {"programs": 0, "operations": 0, "drawn": 0, "states": 0, "saved over": 0, "kinds": {}, "violations": []}
    reader = Reader(stage.place)
    for each in range(number * BLOCK, (number + 1) * BLOCK):
        name = f"{seed}-{each}"
        program, record, found = simulated.attempt(stage, reader, name, states)
        wrong = [f"after operation {at}, {mode}: {why}" for at, mode, why in found.wrong]
        total["programs"] += 1
        total["operations"] += len(record)
        total["drawn"] += found.drawn
        total["states"] += found.states
        total["saved over"] += found.over
        total["kinds"][program["kind"]] = total["kinds"].get(program["kind"], 0) + found.drawn
        if wrong:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"violation-{name}.pickle").write_bytes(pickle.dumps((name, program, record)))
        total["violations"] += [f"{name} ({program['kind']}): {why}" for why in wrong]
    return total


def work(seed: int, states: int, keep: Path) -> int:
    """Serve as one process of a campaign: read numbers of blocks, and print the findings of each."""
    with simulated.stage(ranks=True) as stage:
        for line in sys.stdin:
            print(json.dumps(block_of(stage, seed, int(line), states, keep)), flush=True)
    return 0


class Campaign:
    """Blocks of programs, and the file with their findings: blocks in the file are not run again."""

    def __init__(self, path: Path, seed: int, each: int) -> None:
        self.path = path
        self.found: dict[str, Any] = {"seed": seed, "states of a program": each, "blocks": {}}
        if path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))
            if (self.found["seed"], self.found["states of a program"]) != (seed, each):
                raise SystemExit(f"{path} is of another campaign: pass its seed and --each, or another path")

    def total(self, what: str) -> int:
        """Return the sum over all blocks."""
        return sum(block[what] for block in self.found["blocks"].values())

    def write(self) -> None:
        """Write the file."""
        violations = [each for block in self.found["blocks"].values() for each in block["violations"]]
        sums = {what: self.total(what) for what in ("programs", "operations", "drawn", "states", "saved over")}
        part = {
            "seed": self.found["seed"],
            "trials": sums["drawn"],
            "violations": violations,
            "details": {DISTINCT: sums["states"]},
        }
        head = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": commit(),
            "machine": machine(),
            # The page reads this form, which is that of a campaign of all rows.
            "tier": "nightly",
            "parts": {NAME: [part]},
            "mutants": {},
            **sums,
            "violations": violations,
        }
        new = self.path.with_suffix(".new")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({**self.found, **head}, indent=1), encoding="utf-8")
        new.replace(self.path)

    def run(self, states: int, workers: int, seconds: float) -> int:
        """Run until a number of states or a time is reached; return 1 if a promise was broken."""
        end, keep = time.monotonic() + seconds, self.path.parent
        given = ["--seed", str(self.found["seed"]), "--each", str(self.found["states of a program"])]
        command = [sys.executable, "-m", "faults.simulated_command", "--inside", *given, "--results", str(keep)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        running = [subprocess.Popen(command, **pipes) for _ in range(workers)]
        numbers = (number for number in range(10**9) if str(number) not in self.found["blocks"])
        busy = {process: self._give(process, next(numbers)) for process in running}
        while busy:
            for process in _answering(list(busy)):
                number, line = busy.pop(process), process.stdout.readline()
                if not line:
                    raise SystemExit(f"a process ended in block {number}")
                self.found["blocks"][str(number)] = block = json.loads(line)
                self.write()
                for each in block["violations"]:
                    print(f"VIOLATION {each}", flush=True)
                print(f"block {number}: {self.total('drawn')} power cuts, {self.total('states')} states", flush=True)
                if self.total("drawn") < states and time.monotonic() < end:
                    busy[process] = self._give(process, next(numbers))
        for process in running:
            process.stdin.close()
            process.wait(60)
        return int(any(block["violations"] for block in self.found["blocks"].values()))

    @staticmethod
    def _give(process: Any, number: int) -> int:
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        return number


def _answering(processes: list[Any]) -> list[Any]:
    import select

    ready = select.select([process.stdout for process in processes], [], [])[0]
    return [process for process in processes if process.stdout in ready]


def mutants(seed: int) -> int:
    """Try each mutant until it is caught; return 1 if a mutant is not caught."""
    missed = 0
    with simulated.stage() as stage:
        catcher = Catcher(stage, seed)
        for name in MUTANTS:
            caught = catcher.caught(name)
            print(f"caught: {name}: {caught}" if caught else f"MISSED: {name}", flush=True)
            missed += not caught
    return int(missed > 0)


def again(path: Path, states: int) -> int:
    """Try a kept record again, and print where it breaks a promise."""
    name, program, record = pickle.loads(path.read_bytes())
    print(json.dumps(program))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        found = simulated.explore(record, program, Reader(Path(place)), name, states)
    for at, mode, why in found.wrong:
        print(f"after operation {at} ({record[at]!r:.200}), {mode}: {why}")
    return int(bool(found.wrong))


def main() -> int:
    """Run the requested command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.simulated_command")
    parser.add_argument("--states", type=int, default=1_000_000, help="power cuts to draw")
    parser.add_argument("--each", type=int, default=600, help="power cuts of each program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--hours", type=float, default=24.0, help="maximum time in hours")
    parser.add_argument("--results", type=Path, default=TESTS.parent / "target" / "faults" / "simulated.json")
    parser.add_argument("--mutants", action="store_true", help="try the mutants")
    parser.add_argument("--record", type=Path, help="try the record of a violation again")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return work(options.seed, options.each, options.results)
    if options.mutants:
        return mutants(options.seed)
    if options.record:
        return again(options.record, options.each)
    campaign = Campaign(options.results, options.seed, options.each)
    return campaign.run(options.states, options.workers, options.hours * 3600)


if __name__ == "__main__":
    sys.exit(main())
