"""Drawn trials: the gate always runs the same part of them; ``FASTCKPT_TEST_RUNS=all`` runs all."""

from __future__ import annotations

import os


def one_in(step: int) -> int:
    """The step from one trial to the next: ``step`` in the gate, 1 if all trials are requested."""
    return 1 if os.environ.get("FASTCKPT_TEST_RUNS") == "all" else step
