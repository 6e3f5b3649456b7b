"""Rows that are tests of the gate: pytest runs these tests, and the campaign counts them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from .row import Run

ROOT = Path(__file__).parents[2]


def run(tests: tuple[str, ...], options: tuple[str, ...], run: Run, under: tuple[str, ...] = ()) -> None:
    """Run all trials of the tests, perhaps under another program. A test counts as its property ``trials``, or as 1."""
    report = run.place / "report.xml"
    command = [*under, sys.executable, "-m", "pytest", "-q", "-x" if run.most == 1 else "--maxfail=10"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command += [f"--basetemp={run.place / 'tmp'}", *options]
    all_runs = os.environ | {"FASTCKPT_TEST_RUNS": "all"}
    done = subprocess.run([*command, *tests], cwd=ROOT, env=all_runs, stdout=subprocess.PIPE, text=True, check=False)
    if not report.exists():
        raise AssertionError(f"pytest: exit {done.returncode}: {done.stdout[-2000:]}")
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            run.count("skipped tests")
            continue
        noted = [each for each in case.iter("property") if each.get("name") == "trials"]
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        wrong = "" if bad is None else f"{case.get('name')}: {(bad.get('message') or '')[:500]}"
        run.done(wrong, int(noted[0].get("value") or 1) if noted else 1)
    if run.made == 0:
        raise AssertionError(f"no test ran: {done.stdout[-2000:]}")


def row(tests: tuple[str, ...], *options: str) -> dict[str, Any]:
    """Return the arguments of a :class:`Row` for these tests. Each tier has the same number of trials."""
    return {"run": partial(run, tests, options), "tests": tests, "fast": 1, "nightly": 1}
