"""The grammar of targets in the package; the core and fastckpt-top are tested with the same table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parents[1] / "data" / "targets.txt"

PROGRAM = """
import json, sys
import fastckpt
found = {}
for text in json.loads(sys.argv[1]):
    try:
        found[text] = fastckpt.tools.set_target(text)
    except ValueError as error:
        assert str(error).startswith("set_target: ") and "give light, medium, high" in str(error), error
        found[text] = None
print(json.dumps(found))
assert fastckpt.tools.set_target(2.5e9) == (2_500_000_000, 2_500_000_000)
"""


def test_set_target_takes_the_table():
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = dict(line.split(" -> ") for line in lines if not line.startswith("#"))
    assert len(rows) >= 40
    # A target applies to the whole process.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(rows))],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "FASTCKPT_TOP": "0"},
    )
    for text, found in json.loads(done.stdout.splitlines()[0]).items():
        meant = "refused" if found is None else " ".join(map(str, found))
        assert meant == rows[text], text
