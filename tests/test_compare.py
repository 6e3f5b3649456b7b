"""The benchmark that the README quotes runs: small, once, with every contender that is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from harness import needs

COMPARE = Path(__file__).parent.parent / "benchmarks" / "compare.py"


def test_compare_runs_every_contender(tmp_path):
    if importlib.util.find_spec("torch") is None:
        needs.missing("torch")
    out = tmp_path / "out.json"
    options = ["--size", "0.02", "--rounds", "1", "--dir", str(tmp_path), "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(COMPARE), *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["workloads"][0]["results"]
    expected = {"fastckpt", "raw", "torch", "dcp"}
    if importlib.util.find_spec("safetensors"):
        expected.add("safetensors")
    assert expected <= results.keys(), done.stderr
    for name in expected:
        for operation in ("save", "load"):
            assert results[name][operation], (name, operation)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
