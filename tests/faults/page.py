"""Makes docs/reliability.md from docs/reliability.json, the results of campaigns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faults.league import table as league
from faults.row import DISTINCT
from faults.rows import rows

DATA = Path(__file__).parents[2] / "docs" / "reliability.json"

_HEAD = """# What survives

For those who decide: which faults were injected, how often, and what was lost. `python -m tests.faults` repeats the
campaign in a checkout ([how](../CONTRIBUTING.md)).

A trial is one fault and the check after it. The record of acknowledged saves is kept outside the program under test. 0
violations in N random trials mean that the true rate is below 3/N, at 95 % confidence; they do not mean never. If a
fault is injected at each system call in turn, the trials cover all cases. Each row shows its last run, or a longer one
before it; its commit is the last one that changed the product before the run.
"""


def write(source: Path, data: Path = DATA) -> None:
    """Add the results of a campaign to the data, row by row, and write the page."""
    document = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {"rows": {}, "mutants": {}}
    found = json.loads(source.read_text(encoding="utf-8"))
    about = {name: found[name] for name in ("date", "commit", "tier", "machine")}
    for name, parts in found["parts"].items():
        if not parts:
            continue
        document["rows"][name] = {
            **about,
            "seeds": f"{parts[0]['seed']} to {parts[-1]['seed']}",
            "trials": sum(part["trials"] for part in parts),
            "violations": sum(len(part["violations"]) for part in parts),
        }
        if distinct := sum(part.get("details", {}).get(DISTINCT, 0) for part in parts):
            document["rows"][name]["distinct"] = distinct
    for name, caught in found["mutants"].items():
        known = document["mutants"].setdefault(name, {})
        known |= {row: {"trials": one["trials"], "caught": bool(one["by"])} | about for row, one in caught.items()}
    document = {kind: dict(sorted(document[kind].items())) for kind in ("rows", "mutants")}
    data.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    data.with_suffix(".md").write_text(page(document), encoding="utf-8")


def page(document: dict[str, Any]) -> str:
    """Return the text of the page."""
    made = [_HEAD, "## Promises", "", "| | promise | fault | trials | violations | violation rate |"]
    made.append("|---:|---|---|---:|---:|---|")
    for row in rows().values():
        found = document["rows"].get(row.name)
        enumerated = bool(row.tests) and not row.drawn
        counts = _counts(found, enumerated=enumerated) if found else f"{_UNCOUNTED[bool(row.tests)]} | | |"
        made.append(f"| {row.number} | {row.promise} | {row.fault} | {counts}")
    made += ["", "## Mutants", "", _MUTANTS, "| removed | caught by | trials until then |", "|---|---|---:|"]
    for name, caught in document["mutants"].items():
        made += [
            f"| {name} | {row if one['caught'] else f'**not** by {row}'} | {one['trials']} |"
            for row, one in sorted(caught.items())
        ]
    made += ["", *league.table()]
    made += ["", "## Runs", "", "| row | date | commit | tier | seeds | machine |", "|---|---|---|---|---|---|"]
    made += [
        f"| {name} | {one['date']} | {one['commit']} | {one['tier']} | {one['seeds']} | {one['machine']} |"
        for name, one in document["rows"].items()
    ]
    return "\n".join(made) + "\n"


_UNCOUNTED = {True: "at each change, by the gate", False: "not run"}
_MUTANTS = """A campaign that finds nothing may be blind. So fastckpt is built with one guard removed at a time, and the
rows must detect each mutant. Each is caught. The file system decides when a missing sync shows: for a shard, whose
blocks are allocated beforehand, at once on btrfs, but on ext4 and XFS only if the device completes late.
"""


def _counts(found: dict[str, Any], *, enumerated: bool) -> str:
    trials, violations = found["trials"], found["violations"]
    if enumerated or not trials:
        said = "all cases, each once"
    else:
        said = f"below {300 / trials:.2g} %" if not violations else f"about {100 * violations / trials:.2g} %"
    distinct = f" ({found['distinct']:,} distinct states)" if "distinct" in found else ""
    return f"{trials:,}{distinct} | {violations} | {said} |"
