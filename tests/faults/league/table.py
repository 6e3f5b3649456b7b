"""The table of libraries in docs/reliability.md, from docs/league.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[3] / "docs" / "league.json"

_HEAD = """## Other libraries

The same faults over the ways in which people save checkpoints, each as its documentation has it, with one process and 4
MiB: which trials of how many ended well, and how the others ended. A trial is **good** if the run goes on from the last
step that was reported as saved, and saves again; of a flipped bit and a zeroed block, if other bytes are not loaded
without a word. Else the step is **lost**: it was reported as saved, and an older one goes on, or the beginning. Or the
run is **stuck** until a person removes or repairs something, or the state is **wrong** without a word, or nothing ends
within a minute (**hung**; ranks may wait for 20 s). The resume takes the newest checkpoint, as the library finds it, or
by the number in its name where it has no rule. Few of these libraries promise to survive these faults; the links lead
to what they do. `python -m tests.faults.league` repeats it.
"""


def table(data: Path = DATA) -> list[str]:
    """The lines; none without data."""
    if not data.exists():
        return []
    found: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    rows = list(dict.fromkeys(row for library in found.values() for row in library["rows"] if row != "undisturbed"))
    made = [_HEAD, "| | " + " | ".join(rows) + " |", "|---|" + "---|" * len(rows)]
    for library in found.values():
        promise = library["promise"]
        shown = promise.removeprefix("docs/") if promise.startswith("docs/") else promise
        cells = [_cell(library["rows"].get(row)) for row in rows]
        made.append(f"| [{library['title']}]({shown}) {library['version']} | " + " | ".join(cells) + " |")
    return made


def _cell(ends: dict[str, int] | None) -> str:
    if ends is None:
        return "one rank writes"
    good, trials = ends.get("good", 0), sum(ends.values())
    bad = [f"{number} {how}" for how, number in sorted(ends.items()) if how != "good"]
    return f"{good} of {trials}" + "".join(f", {one}" for one in bad)
