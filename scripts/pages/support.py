"""The page docs/support.md, from docs/support.json: what ran, where and when. ``scripts/matrix --record`` writes both.

The file has sections, and in each rows: ``name``, ``what``, ``result`` (one of RESULTS), ``date`` of the last run or
None, ``on`` (kernel, machine, versions), ``ran`` (what ran, or why nothing did). scripts/matrix writes the rows that
have the names of its own rows; a person writes the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "docs" / "support.json"
#: The possible results. ``part``: the row names the part that ran. ``no``: what it names is refused, or does not work.
RESULTS = ("passed", "part", "failed", "not run", "no")

_HEAD = """# What ran, and what did not

For those who decide: on which systems fastckpt has run, when it last ran there, and where nobody has tried it.
[Versions](compatibility.md) lists what is promised.

`scripts/matrix --record` writes this page and its data, [support.json](support.json), for its own rows; the others
are entered by hand. A row keeps its last run. **part**: the row names the part that ran. **no**: refused.
"""


def record(name: str, *, result: str, date: str, on: str, ran: str, data: Path = DATA) -> None:
    """Replace the row's last run with this one, and write the page. A run is never replaced with ``not run``.

    Raises:
        KeyError: the file has no such row.
    """
    document = json.loads(data.read_text(encoding="utf-8"))
    row = {row["name"]: row for section in document["sections"] for row in section["rows"]}[name]
    if result != "not run":
        row |= {"result": result, "date": date, "on": on, "ran": ran}
    elif row["date"] is None:
        row |= {"result": result, "ran": ran}
    data.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    data.with_suffix(".md").write_text(page(document), encoding="utf-8")


def page(document: dict[str, Any]) -> str:
    """The text of the page."""
    parts = [_HEAD]
    for section in document["sections"]:
        rows = [f"| {row['what']} | {_result(row)} | {row['on'] or ''} | {row['ran']} |" for row in section["rows"]]
        head = [f"## {section['title']}", "", "| | result | on | what ran |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *rows, ""]))
    return "\n".join(parts)


def _result(row: dict[str, Any]) -> str:
    said = row["result"] if row["result"] == "passed" else f"**{row['result']}**"
    return f"{said}, {row['date']}" if row["date"] else said
