"""``benchmarks/nodes.py`` measures its situations; no test here depends on a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import needs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "nodes.py"


@pytest.mark.parametrize("only", ["tmpfs, cores 0, ranks 8", "fuse, cores all, ranks 1, quota 1.5"])
def test_a_situation_is_measured(tmp_path, only):
    needs.root()
    figures = tmp_path / "figures.json"
    words = [sys.executable, BENCHMARK, "--size", "0.008", "--rounds", "1", "--delay", "0"]
    done = subprocess.run([*words, "--only", only, "--json", figures], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [(name, found)] = json.loads(figures.read_text()).items()
    assert name == only
    assert name in done.stdout
    assert set(found) == {"save", "load"} | ({"same"} if "ranks 8" in only else set())
    for told in found.values():
        assert told["best"] != "default"
        assert {"default", told["best"]} < set(told["rates"])
        assert all(rate > 0 for rate in told["rates"].values())
