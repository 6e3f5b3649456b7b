"""Makes the table of libraries in docs/reliability.md from docs/league.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[3] / "docs" / "league.json"

_HEAD = """## Other libraries

The table shows the same faults with the usual ways to save checkpoints, each as in its documentation, with one process
and 4 MiB: how many trials ended well, and how the others ended. A trial is **good** if the run continues from the last
step that was reported as saved, and saves again; after a flipped bit or a zeroed block, if no wrong bytes are loaded
silently. Otherwise the step is **lost** (the run continues from an older step, or from the beginning), the run is
**stuck** until a person removes or repairs something, the state is silently **wrong**, or the program does not end
within a minute (**hung**; ranks may wait for 20 s). The resume uses the newest checkpoint, as the library finds it, or
by the number in its name if the library has no rule. Few of these libraries promise to survive these faults; the links
lead to their promises. `python -m tests.faults.league` repeats these trials.
"""


def table(data: Path = DATA) -> list[str]:
    """Return the lines of the table; none without data."""
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
