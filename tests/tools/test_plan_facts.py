"""Published figures: the plan's arithmetic must agree with each within its rounding.

Published figures are rounded, or cut, to few digits; each assertion shows to how many.
"""

from __future__ import annotations

import math

import pytest

import fastckpt

TRILLION = {"size": "13.8TB", "tp": 8, "pp": 64, "dp": 6}


def minutes(seconds: float) -> float:
    return seconds / 60


# -- failures: 24,000 accelerators -------------------------------------------------------------------------------------


def test_the_largest_clusters_fail_in_under_30_minutes() -> None:
    assert minutes(fastckpt.tools.plan(size=1, gpus=100_000).mttf) <= 30
    assert minutes(fastckpt.tools.plan(size=1, gpus=110_000).mttf) < 30


def test_24_000_accelerators_save_every_6_2_minutes() -> None:
    plan = fastckpt.tools.plan(size="5TB", gpus=24_000, mttf_cluster="124min", goodput=0.95)
    assert minutes(plan.interval) == pytest.approx(6.2, abs=1e-9)
    # A day has room for 232.3 checkpoints, so 233 begin in a day.
    assert math.ceil(plan.checkpoints_per_day) == 233
    assert "up to 233 checkpoints" in str(plan)
    # The plan has 1.16 PB: the published 1.1 is cut, not rounded.
    assert math.floor(plan.bytes_per_day / 1e14) / 10 == 1.1
    assert round(plan.sustained / 1e9) == 13


# -- 1 T parameters on 3072 GPUs ---------------------------------------------------------------------------------------


def test_a_trillion_parameters_are_about_14_bytes_each() -> None:
    # The published sizes are 13.8 TB (Megatron-LM) and about 15 TB (DDN); 14 bytes per parameter are between them.
    assert 13.8e12 <= fastckpt.tools.plan(params="1T", gpus=8).bytes <= 15e12
    assert fastckpt.tools.plan(params="1T", gpus=8).bytes_per_parameter == 2 + 4 + 8


def test_3072_gpus_with_data_parallelism_6_have_512_writers() -> None:
    plan = fastckpt.tools.plan(**TRILLION, write="273GB/s")
    assert plan.layout.gpus == 3072
    assert plan.nodes == 384
    assert plan.writers == 512
    assert plan.writers_per_node == 8
    assert round(plan.write_per_gpu / 1e9, 2) == 0.53
    assert round(plan.write_per_node / 1e9, 1) == 4.3
    # The plan has 50.5 s; the published 50 has one significant digit.
    assert round(plan.seconds, -1) == 50


def test_a_restore_reads_six_times_as_much() -> None:
    plan = fastckpt.tools.plan(**TRILLION, write="273GB/s")
    assert plan.read_fan_out == 6
    assert round(plan.restore_rate / 1e9) == 1638
    assert fastckpt.tools.plan(**TRILLION, write="273GB/s", read="1638GB/s").restore_seconds == pytest.approx(
        plan.seconds
    )


def test_50_seconds_every_4_hours_are_0_3_percent() -> None:
    plan = fastckpt.tools.plan(**TRILLION, target_seconds=50, interval="4h")
    assert plan.seconds == 50
    assert round(100 * plan.overhead, 1) == 0.3
    # 50 s need 276 GB/s; with the published 273 GB/s, and so 50.5 s, the overhead is 0.35 %.
    assert plan.write == pytest.approx(276e9)
