"""The table of libraries: a row that finds a fault, and one that finds none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from faults.league import table


def test_the_table_counts_what_was_not_good(tmp_path):
    data = tmp_path / "league.json"
    rows = {"undisturbed": {"good": 2}, "killed": {"good": 3, "stuck": 1}}
    data.write_text(json.dumps({"one": {"title": "One", "version": "1.0", "promise": "https://one", "rows": rows}}))
    *_, head, line, cells = table.table(data)
    assert (head, line) == ("| | killed |", "|---|---|")
    assert cells == "| [One](https://one) 1.0 | 3 of 4, 1 stuck |"


def test_a_row_is_tried_over_libraries(tmp_path):
    found = tmp_path / "league.json"
    words = ["--library", "torch.save+rename", "--library", "fastckpt", "--row", "one bit flipped", "--trials", "1"]
    command = [sys.executable, "-m", "tests.faults.league", *words, "--json", found]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=240)
    table = json.loads(found.read_text())
    assert {name: each["rows"] for name, each in table.items()} == {
        "torch.save+rename": {"one bit flipped": {"wrong": 1}},
        "fastckpt": {"one bit flipped": {"good": 1}},
    }
