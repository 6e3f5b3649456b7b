"""The table of libraries: a row of it that finds what it should, and one that finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


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
