"""Drawn trials: the gate makes each third of them, the same ones each time; ``FASTCKPT_TEST_RUNS=all`` makes all."""

from __future__ import annotations

import os

STEP = 1 if os.environ.get("FASTCKPT_TEST_RUNS") == "all" else 3
