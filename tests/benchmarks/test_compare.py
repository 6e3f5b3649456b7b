"""The benchmarks run once, with small sizes, as documented, and name each missing contender."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fastckpt
from harness import needs, programs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _torch():
    if importlib.util.find_spec("torch") is None:
        needs.missing("torch")


@pytest.fixture
def script(children_with_torch, tmp_path):
    """Run a script once, in ``tmp_path``; return its JSON document and its output. No other files may be left there.

    ``spawns``: run the script and each contender in new interpreters, as users do; the import of torch takes seconds
    there. ``children``: the process to fork from, for scripts with more imports.
    """

    def go(name, *options, spawns=False, children=children_with_torch):
        out = tmp_path / "out.json"
        command = [BENCHMARKS / name, "--rounds", "1", "--dir", tmp_path, "--json", out, *options]
        if spawns:
            command.insert(0, sys.executable)
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        else:
            done = programs.run(children, command, timeout=240, forks=True)
        assert done.returncode == 0, done.stderr
        assert {path.name for path in tmp_path.iterdir()} <= {"out.json", "out.svg"}
        return json.loads(out.read_text()), done.stdout

    return go


def test_compare_runs_every_contender(script):
    document, printed = script("compare.py", "--size", "0.02", "--markdown")
    (one,) = document["workloads"]
    expected = {"fastckpt", "raw", "torch", "dcp"}
    if importlib.util.find_spec("safetensors"):
        expected.add("safetensors")
    assert expected <= one["results"].keys(), one["not_run"]
    for name in expected:
        operations = {"save", "load"} if name == "raw" else {"save", "load", "into", "hot"}
        assert one["results"][name].keys() == operations, name
        for figures in one["results"][name].values():
            assert len(figures["samples"]) == 1
            assert figures["gigabytes_per_second"] > 0
            assert figures["cpu_seconds_per_gigabyte"] >= 0
    # Missing contenders are listed, with a reason, and unknown values are dashes.
    assert one["results"].keys() | one["not_run"].keys() >= {"torch_checkpointing", "runai", "tensorizer", "deepspeed"}
    assert all(one["not_run"].values())
    assert printed.count("Not run: ") >= (1 if one["not_run"] else 0)
    assert "| **fastckpt** |" in printed


@pytest.mark.parametrize("options", [("compare.py", "--size", "0.01"), ("scale.py", "--axes", "threads")])
def test_another_build_takes_part(script, tmp_path_factory, options):
    there = tmp_path_factory.mktemp("other")
    shutil.copytree(Path(fastckpt.__file__).parent, there / "fastckpt", ignore=shutil.ignore_patterns("__pycache__"))
    told = there / "imported"
    with (there / "fastckpt" / "__init__.py").open("a") as package:
        package.write(f"\n__import__('pathlib').Path({str(told)!r}).touch()\n")
    small = (
        ("--size", "0.01", "--threads", "1")
        if options[0] == "scale.py"
        # This runs without torch, which each contender would import.
        else ("--workload", "numpy", "--operations", "save")
    )
    document, printed = script(*options, *small, "--peers", "", "--against", there, spawns=True)
    assert told.exists()
    (one,) = document["workloads"] if options[0] == "compare.py" else document["axes"]["threads"]
    assert {"fastckpt", "fastckpt:other"} <= one["results"].keys()
    assert "the build of --against" in printed


def test_a_directory_without_another_build_is_refused(tmp_path):
    command = [sys.executable, BENCHMARKS / "compare.py", "--against", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} has no fastckpt" in done.stderr


@pytest.mark.parametrize(("kind", "peers"), [("numpy", "savez"), ("optimizer", "safetensors")])
def test_compare_takes_every_workload(script, kind, peers):
    document, _ = script(
        *("compare.py", "--size", "0.005", "--workload", kind, "--peers", peers, "--operations", "save,into"),
        spawns=kind == "numpy",
    )
    (one,) = document["workloads"]
    assert {"raw", "fastckpt"} <= one["results"].keys()
    if kind == "optimizer":
        assert "flat dict of tensors" in one["not_run"]["safetensors"]
    if kind == "numpy":
        assert "savez" in one["results"]


def test_compare_checks_small_states_and_counts_system_calls(tmp_path):
    needs.tool("strace", "strace")
    out = tmp_path / "out.json"
    options = ["--size", "0", "--many", "100", "--peers", "", "--operations", "save,load", "--rounds", "1"]
    command = [sys.executable, BENCHMARKS / "compare.py", *options, "--syscalls", "--check", "--engines", "auto"]
    done = subprocess.run(
        [*command, "--dir", tmp_path, "--json", out], capture_output=True, text=True, timeout=240, check=False
    )
    # Without safetensors, the bars are not measured, and so they are not met.
    assert done.returncode == 1, done.stderr
    assert "not measured" in done.stderr
    document = json.loads(out.read_text())
    assert [bar["met"] for bar in document["bars"]] == [False, False]
    results = document["workloads"][0]["results"]["fastckpt"]
    assert results.keys() == {"save", "load"}
    for figures in results.values():
        assert figures["system_calls_per_gigabyte"] * figures["bytes"] / 1e9 > 10


def test_a_sweep_leaves_no_setting_out_silently(script, tmp_path):
    options = ["--axes", "engine,copying", "--engine", "threads", "--copying", "0", "--operations", "save"]
    document, printed = script("sweep.py", "--size", "0.005", *options, "--plot", str(tmp_path / "out.svg"))
    assert document["results"]["fastckpt:engine=threads"]["save"]["samples"][0]["notes"]["engine"] == "threads"
    assert document["settings"].keys() == {"fastckpt:engine=threads", "fastckpt:copying=0"}
    assert ("fastckpt:copying=0" in document["results"]) != ("FASTCKPT_ZERO_COPY" in printed)
    assert "engine=threads" in printed
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_scale_goes_over_its_points(script, tmp_path):
    options = ["--axes", "tensors,threads", "--tensors", "10,100", "--threads", "1", "--size", "0.005", "--peers", ""]
    document, printed = script("scale.py", *options, "--plot", str(tmp_path / "out.svg"))
    assert [one["value"] for one in document["axes"]["tensors"]] == [10, 100]
    assert [one["value"] for one in document["axes"]["threads"]] == [1]
    assert all(one["results"]["fastckpt"]["load"] for axis in document["axes"].values() for one in axis)
    assert "us a tensor" in printed


def test_neighbour_measures_both_sides(script):
    document, printed = script("neighbour.py", "--size", "0.04", "--seconds", "0.1")
    (figures,) = document["rounds"]
    assert all(rate > 0 for rate in figures.values())
    assert len(document["bars"]) == 4
    assert "bandwidth_limit=" in printed


def test_unchanged_writes_what_has_changed(script):
    document, printed = script("unchanged.py", "--size", "0.01", "--rounds", "1")
    full, same, tuned = (document[way][0]["bytes"] for way in ("full", "same", "tuned"))
    assert 0 < same < 0.01 * full
    assert 0.01 * full < tuned < 0.05 * full
    assert "| same |" in printed


@pytest.mark.slow
def test_doors_stand_beside_their_frameworks(script, libraries):
    if importlib.util.find_spec("torchtitan") is None:
        needs.missing("torchtitan (scripts/setup)")
    # Ray Train is left out: it starts a cluster, which takes longer than all of these.
    names = [
        "transformers' Trainer",
        "accelerate",
        "Lightning",
        "torchtitan, disabled",
        "torchtitan, async",
        "DeepSpeed",
    ]
    wanted = [word for name in names for word in ("--framework", name)]
    # The imports take most of the time of the script.
    document, printed = script("doors.py", "--size", "0.04", "--markdown", *wanted, children=libraries.zygote)
    assert all(seconds > 0 for (sample,) in document.values() for seconds in sample.values())
    assert printed.count("| with fastckpt | ") == len(document) / 2 == 6


@pytest.mark.root
def test_a_loop_device_is_gone_when_the_run_is_terminated(tmp_path):
    needs.root()
    needs.tool("losetup", "util-linux")
    needs.tool("mkfs.ext4", "e2fsprogs")
    mounts = Path("/proc/self/mounts")
    options = ["--loop", "0.2", "--size", "0.02", "--rounds", "1000", "--peers", "", "--operations", "save"]
    # This runs without torch, which takes seconds to import.
    command = [sys.executable, BENCHMARKS / "compare.py", *options, "--workload", "numpy"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            point = ""
            while not point:
                assert running.poll() is None, running.stderr.read()
                lines = [line.split() for line in mounts.read_text().splitlines()]
                ours = [line[1] for line in lines if "/fastckpt-loop-" in line[1]]
                point = ours[0] if ours else ""
                time.sleep(0.05)
            # The script is in the middle of a round when it prints this line.
            line = running.stderr.readline()
            assert "round 1 of 1000" in line, line
            running.send_signal(signal.SIGTERM)
            rest = running.stderr.read()
        finally:
            running.terminate()
        assert running.wait(60) == 143, rest
    assert point not in mounts.read_text()
    assert not Path(point).parent.exists()
    backing = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=True).stdout
    assert str(Path(point).parent) not in backing
