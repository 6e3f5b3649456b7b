"""Runs rows and mutants, part by part, and saves the results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import mutants

if TYPE_CHECKING:
    from collections.abc import Iterable

    from faults.row import Row

ROOT = Path(__file__).parents[2]
#: Seconds after which a part counts as hung, which is a finding.
LONGEST = 3600


def part_of(row: Row, *, tier: str, seed: int, trials: int, most: int = 10, mutant: str = "") -> dict[str, Any]:
    """Run a part of a row in a separate process, perhaps with a mutant of the product; return the result."""
    given = {"tier": tier, "seed": seed, "trials": trials, "most": most}
    with tempfile.TemporaryDirectory(prefix="fastckpt-part-") as folder:
        path = Path(folder, "result")
        # The part tests the package of this process, or that of the mutant.
        given_paths = [os.environ.get("PYTHONPATH", "")]
        paths = [*([str(mutants.built())] if mutant else []), str(ROOT / "tests"), *filter(None, given_paths)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), mutants.SWITCH: mutant}
        command = [sys.executable, "-m", "faults.inside", row.name, json.dumps(given | {"to": str(path)})]
        try:
            ended = (
                f"it ended with {subprocess.run(command, cwd=ROOT, env=env, timeout=LONGEST, check=False).returncode}"
            )
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {LONGEST} s"
        if not path.exists():
            return {"seed": seed, "trials": 0, "violations": [ended], "details": {}}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def commit() -> str:
    """Return the last commit that changed the product, with a plus sign if the sources differ from the commit."""
    git, product = ["git", "-C", str(ROOT)], ["--", "python", "rust"]
    name = subprocess.run([*git, "log", "-1", "--format=%h", *product], capture_output=True, text=True, check=False)
    dirty = subprocess.run([*git, "status", "--short", "-uno", *product], capture_output=True, text=True, check=False)
    return (name.stdout.strip() or "unknown") + ("+" if dirty.stdout.strip() else "")


def machine() -> str:
    """Return the kernel, the architecture and the number of cores of this machine."""
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{platform.system()} {kernel}, {platform.machine()}, {os.cpu_count()} cores"


@dataclass
class Campaign:
    """A campaign, and the file with its results: parts whose results are in the file are not run again.

    Attributes:
        path: the file.
        tier: the tier of trials.
        seed: the first seed.
    """

    path: Path
    tier: str
    seed: int
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        about = {"tier": self.tier, "seed": self.seed, "commit": commit()}
        if self.path.exists():
            self.document = json.loads(self.path.read_text(encoding="utf-8"))
        if any(self.document.get(name) != value for name, value in about.items()):
            self.document = {**about, "machine": machine(), "parts": {}, "mutants": {}}

    def _keep(self) -> None:
        self.document["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)

    def run_rows(self, rows: Iterable[Row]) -> int:
        """Run all missing parts of these rows; return the number of violations."""
        wrong = 0
        for row in rows:
            parts = self.document["parts"].setdefault(row.name, [])
            wanted = row.parts(self.tier)
            for number in range(len(parts), len(wanted)):
                print(f"row {row.number}, {row.name}: part {number + 1} of {len(wanted)}", file=sys.stderr, flush=True)
                seed = self.seed * 10_000 + number
                parts.append(part_of(row, tier=self.tier, seed=seed, trials=wanted[number]))
                self._keep()
            found = [one for part in parts for one in part["violations"]]
            wrong += len(found)
            trials = sum(part["trials"] for part in parts)
            print(f"row {row.number}, {row.name}: {trials} trials, {len(found)} violations", flush=True)
        return wrong

    def run_mutants(self, rows: Iterable[Row], names: Iterable[str]) -> int:
        """Run each mutant against the rows that must catch it; return how many were not caught."""
        missed = 0
        rows = list(rows)
        for name in names:
            caught = self.document["mutants"].setdefault(name, {})
            catchers = [row for row in rows if name in row.mutants]
            for row in catchers:
                if row.name in caught:
                    continue
                trials = row.tried or row.fast
                part = part_of(row, tier="fast", seed=self.seed * 10_000, trials=trials, most=1, mutant=name)
                caught[row.name] = {"trials": part["trials"], "by": "".join(part["violations"])[:300]}
                self._keep()
                said = "caught" if part["violations"] else "NOT CAUGHT"
                print(f"mutant {name}: {said} by row {row.number}, {row.name}: {part['trials']} trials", flush=True)
            lost = [row for row, found in caught.items() if not found["by"]]
            if lost or not catchers:
                missed += 1
                print(f"mutant {name}: {f'not caught by {lost}' if lost else 'no row names it'}", flush=True)
        return missed
