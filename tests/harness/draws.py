"""Drawn trials: the gate makes some of them, the same ones each time; ``FASTCKPT_TEST_RUNS=all`` makes all."""

from __future__ import annotations

import os


def one_in(step: int) -> int:
    """The step through the trials: ``step`` in the gate, 1 where all are asked for."""
    return 1 if os.environ.get("FASTCKPT_TEST_RUNS") == "all" else step
