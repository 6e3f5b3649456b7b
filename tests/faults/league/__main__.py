"""python -m tests.faults.league [--library NAME] [--row TEXT] [--trials N] [--seed S] [--json FILE]

Measures how libraries survive faults. Each cell of FILE has the number of trials by outcome. Cells that FILE has are
not measured again. A library that is not installed is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from . import libraries, rows


def inside(name: str, chosen: list[str], trials: int, seed: int) -> None:
    """Make all trials of one library in this process; print a line of JSON with facts, and a line for each row."""
    # The output of libraries goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library = libraries.ALL[name]()
    library.load_modules()
    about = {"title": library.title, "version": library.version(), "promise": library.promise}
    print(json.dumps(about), file=out, flush=True)
    for row in chosen:
        if row in rows.RANKED and not library.ranked:
            continue
        ends: Counter[str] = Counter()
        for number in range(trials):
            draw = random.Random(f"{seed}/{name}/{row}/{number}")
            with tempfile.TemporaryDirectory(prefix="league-") as place:
                ends[rows.ALL[row](rows.Trial(library, Path(place) / "run", draw))] += 1
        print(json.dumps({row: dict(ends)}), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=list(libraries.ALL), action="append", help="default: all")
    parser.add_argument("--row", default="", metavar="TEXT", help="rows whose names contain TEXT")
    parser.add_argument("--trials", type=int, default=20, help="trials of each row and library (default: 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.library[0], json.loads(options.inside), options.trials, options.seed)
    table: dict[str, Any] = {}
    if options.json and options.json.exists():
        table = json.loads(options.json.read_text())
    for name in options.library or libraries.ALL:
        about = table.get(name, {"rows": {}})
        left = [row for row in rows.ALL if options.row in row and row not in about["rows"]]
        words = ["--library", name, "--trials", str(options.trials), "--seed", str(options.seed)]
        command = [sys.executable, "-W", "ignore", "-m", __spec__.parent, *words, "--inside", json.dumps(left)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                said = json.loads(line)
                if "title" in said:
                    about |= said
                    continue
                about["rows"] |= said
                table[name] = about
                print(f"{about['title']}: {said}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(table, indent=1) + "\n")
        if running.returncode:
            print(f"{name}: not run: exit {running.returncode}", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
