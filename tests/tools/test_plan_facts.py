"""What the field publishes, each figure within its own rounding: the plan's arithmetic has to agree with it.

Published figures are rounded, or cut, to few digits; each assertion says to which.
"""

from __future__ import annotations

import math

import pytest
from fastckpt_top import targets

import fastckpt
from fastckpt._interval import best_interval, cluster_mttf, daly, goodput_rule, young
from fastckpt._tools.tiers import GIB, TIERS, WORKLOADS

TRILLION = {"size": "13.8TB", "tp": 8, "pp": 64, "dp": 6}


def minutes(seconds: float) -> float:
    return seconds / 60


# -- failures: 24,000 accelerators -------------------------------------------------------------------------------------


def test_24_000_accelerators_fail_every_124_minutes() -> None:
    assert minutes(cluster_mttf(49_600 * 3600, 24_000)) == pytest.approx(124, abs=1e-9)
    assert fastckpt.plan(size=1, gpus=24_000, mttf_gpu="49600h").mttf == pytest.approx(124 * 60)
    # MLCommons reckons with 50,000 h, which is the default: 125 min.
    assert round(minutes(fastckpt.plan(size=1, gpus=24_000).mttf)) == 125


def test_the_largest_clusters_fail_in_under_30_minutes() -> None:
    assert minutes(fastckpt.plan(size=1, gpus=100_000).mttf) <= 30
    assert minutes(fastckpt.plan(size=1, gpus=110_000).mttf) < 30


def test_20_checkpoints_between_failures_give_95_percent() -> None:
    assert goodput_rule(0.95, 1.0) == pytest.approx(1 / 20)


def test_24_000_accelerators_save_every_6_2_minutes() -> None:
    plan = fastckpt.plan(size="5TB", gpus=24_000, mttf_cluster="124min", goodput=0.95)
    assert minutes(plan.interval) == pytest.approx(6.2, abs=1e-9)
    # 232.3 fit into a day, so that 233 begin in one.
    assert math.ceil(plan.checkpoints_per_day) == 233
    assert "up to 233 checkpoints" in str(plan)
    # 1.16 PB: the published 1.1 is cut, not rounded.
    assert math.floor(plan.bytes_per_day / 1e14) / 10 == 1.1
    assert round(plan.sustained) == 13


# -- 1 T parameters on 3072 GPUs ---------------------------------------------------------------------------------------


def test_a_trillion_parameters_are_about_14_bytes_each() -> None:
    # Published are 13.8 TB (Megatron-LM) and about 15 TB (DDN); 14 bytes a parameter lie between.
    assert 13.8e12 <= fastckpt.plan(params="1T", gpus=8).bytes <= 15e12
    assert fastckpt.plan(params="1T", gpus=8).bytes_per_parameter == 2 + 4 + 8


def test_3072_gpus_with_data_parallelism_6_have_512_writers() -> None:
    plan = fastckpt.plan(**TRILLION, write=273)
    assert plan.layout.gpus == 3072
    assert plan.nodes == 384
    assert plan.writers == 512
    assert plan.writers_per_node == 8
    assert round(plan.write_per_gpu, 2) == 0.53
    assert round(plan.write_per_node, 1) == 4.3
    # 50.5 s; the published 50 has one significant digit.
    assert round(plan.seconds, -1) == 50


def test_a_restore_reads_six_times_as_much() -> None:
    plan = fastckpt.plan(**TRILLION, write=273)
    assert plan.read_fan_out == 6
    assert round(plan.restore_rate) == 1638
    assert fastckpt.plan(**TRILLION, write=273, read=1638).restore_seconds == pytest.approx(plan.seconds)


def test_50_seconds_every_4_hours_are_0_3_percent() -> None:
    plan = fastckpt.plan(**TRILLION, target_seconds=50, interval="4h")
    assert plan.seconds == 50
    assert round(100 * plan.overhead, 1) == 0.3
    # 50 s need 276 GB/s; with the published 273, and so 50.5 s, it is 0.35 %.
    assert plan.write == pytest.approx(276)


# -- the tiers ---------------------------------------------------------------------------------------------------------


def test_the_tiers() -> None:
    found = {tier.name: (tier.read, tier.write) for tier in TIERS.values()}
    assert found == {"light": (1, 0.75), "medium": (2, 1.5), "high": (4, 3)}


def test_the_monitor_has_the_same_tiers() -> None:
    assert {tier.name: (tier.write * 1e9, tier.read * 1e9) for tier in TIERS.values()} == targets.TIERS


@pytest.mark.parametrize("name", list(TIERS))
def test_a_plan_judges_each_tier_by_its_rate_for_each_gpu(name: str) -> None:
    plan = fastckpt.plan(**TRILLION, tier=name)
    verdict = next(verdict for verdict in plan.verdicts if verdict.tier == name)
    assert verdict.seconds == pytest.approx(13.8e12 / 512 / TIERS[name].write / 1e9) == plan.seconds
    assert verdict.restore_seconds == pytest.approx(13.8e12 / 512 / TIERS[name].read / 1e9) == plan.restore_seconds
    assert plan.write_per_gpu == pytest.approx(TIERS[name].write)


# -- MLPerf Storage v2.0 -----------------------------------------------------------------------------------------------

#: Model: published size, bytes it is off by at most where it is rounded, shape, ZeRO, processes.
#: 105 is rounded to 1 GiB and 5.29 to 10 GiB; 912 is eight nodes of a 114 that is rounded to 1; 18 is rounded to 1000.
PUBLISHED = {
    "llama3-8b": (105, 0.5, (1, 1, 8), 3, 8),
    "llama3-70b": (912, 8 * 0.5, (8, 1, 8), 3, 64),
    "llama3-405b": (5290, 5, (8, 32, 2), 1, 512),
    "llama3-1t": (18000, 500, (8, 64, 2), 1, 1024),
}

#: What MLPerf's guidelines say of single processes, in GiB, cut to two digits: first and last rank.
RANKS = {"llama3-70b": (14.23, 14.23), "llama3-405b": (11.8, 8.85)}

#: What they say of the eight processes of its subset mode, in GiB, rounded to one.
EIGHT = {"llama3-8b": 105, "llama3-70b": 114, "llama3-405b": 94, "llama3-1t": 161}

#: The architectures that they list.
ARCHITECTURES = {
    "llama3-8b": (4096, 14336, 32, 8, 32),
    "llama3-70b": (8192, 28672, 128, 8, 80),
    "llama3-405b": (16384, 53248, 128, 8, 126),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_mlperf_sizes_and_shapes(name: str) -> None:
    size, rounding, shape, zero, processes = PUBLISHED[name]
    workload = WORKLOADS[name]
    assert (workload.gib, workload.zero, workload.processes) == (size, zero, processes)
    assert (workload.tp, workload.pp, workload.dp) == shape
    tp, pp, dp = shape
    plan = fastckpt.plan(params=workload.parameters, tp=tp, pp=pp, dp=dp, zero=zero)
    assert plan.bytes == workload.bytes
    assert plan.writers == processes
    assert abs(plan.bytes / GIB - size) <= rounding


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_mlperf_shares_are_those_of_the_plan_and_make_up_the_whole(name: str) -> None:
    workload = WORKLOADS[name]
    plan = fastckpt.plan(params=workload.parameters, tp=workload.tp, pp=workload.pp, dp=workload.dp, zero=workload.zero)
    shares = [sum(workload.share(rank)) for rank in range(workload.processes)]
    assert sum(shares) == pytest.approx(workload.bytes, abs=2 * workload.processes)
    expected = [share.bytes for share in plan.shares for _ in range(share.gpus)]
    assert shares == pytest.approx(expected, abs=2)
    assert abs(sum(shares[:8]) / GIB - EIGHT[name]) < 0.51
    with pytest.raises(ValueError, match="rank must be from 0"):
        workload.share(workload.processes)


@pytest.mark.parametrize("name", list(RANKS))
def test_mlperf_ranks(name: str) -> None:
    workload = WORKLOADS[name]
    for rank, published in zip((0, workload.processes - 1), RANKS[name], strict=True):
        share = sum(workload.share(rank)) / GIB
        digits = 1 if published == 11.8 else 2
        assert math.floor(share * 10**digits) / 10**digits == published


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_mlperf_parameters_are_counted_from_the_published_architecture(name: str) -> None:
    from fastckpt._tools.plan.architectures import count

    hidden, inner, heads, key_heads, layers = ARCHITECTURES[name]
    fields = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": layers,
        "vocab_size": 128256,
    }
    assert count(fields).parameters == WORKLOADS[name].parameters


def test_llama_3_405b_is_about_5_tb() -> None:
    # In TiB; in TB it is 5.7.
    assert round(fastckpt.plan(params=WORKLOADS["llama3-405b"].parameters, gpus=8).bytes / 2**40) == 5


# -- Young and Daly ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mttf_hours", "published"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_own_examples(mttf_hours: float, published: float) -> None:
    """Figures 3 to 5 of his paper: a dump of 5 minutes, and what his model predicts, in minutes."""
    digits = 1 if published < 10 else 0
    found = minutes(daly(5 * 60, mttf_hours * 3600))
    assert round(found, digits) == published
    # Our exact minimum of the same model agrees with his expansion, also where dumps are a third of the MTTF.
    assert minutes(best_interval(5 * 60, mttf_hours * 3600) - 5 * 60) == pytest.approx(found, rel=0.005)


def test_young() -> None:
    assert young(50, 10_000) == 1000
    plan = fastckpt.plan(**TRILLION, write=273)
    assert plan.interval_young == pytest.approx(math.sqrt(2 * plan.seconds * plan.mttf) + plan.seconds)
