"""Memory and threads of the core."""

from __future__ import annotations

import os
import re
import subprocess

from faults.campaign import ROOT
from faults.row import Row, Run


def _passed(run: Run, command: list[str], **more: str) -> list[int]:
    """Run a script, and return how many tests passed in each Rust program that it runs. A failure is a violation."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = [int(each) for each in re.findall(r"(\d+) passed", done.stdout)]
    if done.returncode != 0 or not passed:
        run.done(done.stdout[-3000:], 0)
    return passed


def sanitized(run: Run) -> None:
    """Run the tests of the core."""
    run.done(trials=sum(_passed(run, ["scripts/sanitize"])))


def orders(run: Run) -> None:
    """Run the scenes, each in a number of drawn orders, and those that are tried in full."""
    passed = _passed(run, ["scripts/interleavings"], FASTCKPT_ORDERS=str(run.trials))
    run.done(trials=sum(passed[:1]) * run.trials)
    run.count("tried in full", sum(passed[1:]))


ROWS = [
    Row(
        35,
        "sanitizers",
        "The core accesses only its own memory.",
        "none: the Rust tests of the core run with AddressSanitizer",
        "a read beyond a buffer is reported",
        sanitized,
        fast=0,
        nightly=1,
    ),
    Row(
        35,
        "orders of threads",
        "The mail of ranks, the pool of workers and the counters never deadlock, and never show partial updates.",
        "shuttle draws random thread orders; loom tries all with up to three preemptions, and all delays of stores",
        "a missing wake-up, fence or condition is detected",
        orders,
        fast=0,
        nightly=10_000,
    ),
]
