"""The benchmark of several ranks runs once, with small sizes, as documented."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import needs, programs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranks.py"


def run(tmp_path, *options, children=None):
    """Run the benchmark; ``children``, if passed, forks it and its ranks, which users would start anew."""
    out = tmp_path / "out.json"
    command = [SCRIPT, "--rounds", "1", "--dir", tmp_path, "--json", out, *options]
    if children is None:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, check=False)
    else:
        done = programs.run(children, command, timeout=280, forks=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"out.json"}
    return done, json.loads(out.read_text(encoding="ascii")) if out.exists() else None


@pytest.mark.slow
def test_ranks_measures_everybody_and_checks_its_bars(children_with_torch, tmp_path):
    needs.tool("fio", "fio")
    options = ("--size", "0.03", "--ranks", "2", "--tensors", "50", "--markdown", "--check")
    done, document = run(tmp_path, *options, children=children_with_torch)
    assert document is not None, done.stderr
    results = document["results"]
    for kind in ("fsdp", "column", "replicas"):
        for action in ("save", "load"):
            for name in ("fio", "fastckpt", "dcp"):
                figures = results[f"{kind} {action} {name}"]
                assert len(figures["samples"]) == 1
                assert figures["gigabytes_per_second"] > 0
    assert "fsdp save dcp_hf" in results
    assert results["many plan dcp"]["coordination_seconds"] > 0
    assert results["many save fastckpt"]["coordination_seconds"] > 0
    # Direct and buffered writes both count: everything is written once.
    assert 0.9 < results["fsdp save fastckpt"]["written_per_byte"] < 1.5
    assert results["fsdp save dcp_hf"]["written_per_byte"] > 1.9
    # A state this small may miss any bar, but each bar is measured and has a status.
    assert len(document["bars"]) == 8
    assert all(bar["measured"] is not None for bar in document["bars"])
    assert done.returncode == int(not all(bar["met"] for bar in document["bars"]))
    assert done.stdout.count("\nmet ") + done.stdout.count("\nMISSED ") == 8
    assert "| **fastckpt.distributed** |" in done.stdout


@pytest.mark.slow
def test_ranks_names_the_rank_that_fails(tmp_path):
    needs.tool("fio", "fio")
    # The script and each rank run in new interpreters.
    done, _ = run(tmp_path, "--size", "0.01", "--ranks", "2", "--kinds", "fsdp", "--saves", "nobody", "--loads", "")
    assert done.returncode != 0
    assert "nobody" in done.stderr


@pytest.mark.slow
def test_many_ranks_are_simulated_and_drawn(tmp_path):
    picture, out = tmp_path / "ranks.svg", tmp_path / "out.json"
    options = ("--simulate", "--points", "8x500,40x20", "--plot", picture, "--json", out, "--check")
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text(encoding="ascii"))["points"]
    assert [(point["ranks"], point["tensors"]) for point in points] == [(8, 500), (40, 20)]
    assert all(point["peer"]["coordinator_cpu"] > point["coordinator_cpu"] > 0 for point in points)
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.slow
def test_the_layout_of_many_ranks_is_planned(tmp_path):
    out = tmp_path / "out.json"
    options = ("--layout", "--ranks", "512", "--kinds", "FSDP2", "--json", out)
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="ascii"))
    points, bars = found["points"], found["bars"]
    # Except for the seconds, no bar depends on the machine.
    assert all(bar["met"] for bar in bars if "CPU" not in bar["what"]), bars
    assert {bar["what"].partition(",")[0] for bar in bars} == {"FSDP2"}
    teams, load, alone, parts, own = points
    assert [point["what"] for point in points] == ["save", "load", "save", "load", "either"]
    assert (teams["team"], alone["team"]) == (4, 1)
    # In place, each rank writes a short piece of each tensor into each file.
    assert alone["run_bytes"] < 1 << 20 < 4 << 20 <= teams["run_bytes"]
    assert teams["files_max"] <= 216 / 4 + 3 < alone["files"] <= alone["files_max"] == 216
    assert 0.75 < teams["travels"] <= 1 > alone["travels"]
    assert teams["busiest"] <= 1.15
    # With teams, a grain has one writer; in place, several.
    assert alone["whole"] < 0.1 < 0.99 <= teams["whole"]
    assert (own["runs"], own["opens"], own["travels"]) == (1, 512, 0)
    for point in (teams, load):
        assert point["peers_p95"] <= 3 * 4 + 128
        assert point["peers_max"] <= 400 + 512 / 4
    # Without teams, all ranks have pieces of a norm.
    assert parts["peers_max"] == 511
