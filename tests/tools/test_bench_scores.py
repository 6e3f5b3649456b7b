"""``fastckpt bench DIR``, what needs no disk: scores of made-up samples, shares and tensors, room."""

from __future__ import annotations

import numpy as np
import pytest

from fastckpt._tools.bench import room, scores, shapes, text
from fastckpt._tools.tiers import TIERS, WORKLOADS

GB, GIB = 10**9, 2**30


def sample(seconds, size=GB, **others):
    how = {"engine": "uring", "fallback": None, "threads": 2, "paths": {}, "copied": 0, "thread_bytes": None}
    return {"bytes": size, "seconds": seconds, **how, **others}


# -- scores ------------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_counts():
    found = scores.score([[sample(1.0), sample(4.0), sample(2.0)]])
    assert found["seconds"] == {"min": 4.0, "median": 4.0, "max": 4.0}
    assert found["bytes"] == 3 * GB
    assert found["gb_per_s"]["median"] == pytest.approx(0.75)
    assert found["slowest_rank_gb_per_s"]["median"] == pytest.approx(0.25)
    assert found["slowest_rank"] == 1
    assert found["rank_gb_per_s"] == pytest.approx([1.0, 0.25, 0.5])


def test_the_slowest_throughput_need_not_be_the_longest_time():
    """Shares differ: who has much to write takes longest, and may be the fastest all the same."""
    found = scores.score([[sample(2.0, 8 * GB), sample(1.0, GB)]])
    assert found["seconds"]["median"] == 2.0
    assert found["gb_per_s"]["median"] == pytest.approx(4.5)
    assert found["slowest_rank_gb_per_s"]["median"] == pytest.approx(1.0)


def test_rounds_are_told_by_median_and_spread_and_the_first_apart():
    found = scores.score([[sample(seconds)] for seconds in (5.0, 1.0, 2.0, 4.0, 10.0)])
    assert found["seconds"] == {"min": 1.0, "median": 4.0, "max": 10.0}
    assert found["gb_per_s"] == pytest.approx({"min": 0.1, "median": 0.25, "max": 1.0})
    assert (found["first_seconds"], found["rounds"]) == (5.0, 5)


def test_who_is_slowest_most_often():
    found = scores.score([[sample(1.0), sample(2.0)], [sample(3.0), sample(2.0)], [sample(1.0), sample(1.5)]])
    assert found["slowest_rank"] == 1


def test_threads_by_their_own_bytes_and_their_ranks_time():
    found = scores.score([[sample(2.0, thread_bytes=[600_000_000, 400_000_000]), sample(1.0, thread_bytes=[GB])]])
    assert found["thread_gb_per_s"] == pytest.approx({"min": 0.2, "median": 0.3, "max": 1.0})
    assert scores.score([[sample(2.0)]])["thread_gb_per_s"] is None


def made_up(save=2.0, load=1.0, raw_write=1.0, raw_read=0.9, ranks=2):
    seconds = {"raw_write": raw_write, "raw_read": raw_read, "save": save, "load": load, "hot": 0.5}
    return {name: [[sample(value)] * ranks] for name, value in seconds.items()}


def test_fractions_of_the_raw_device():
    found = scores.scores(made_up())
    assert found["save"]["of_raw"] == pytest.approx(0.5)
    assert found["load"]["of_raw"] == pytest.approx(0.9)
    assert found["hot"]["of_raw"] is None
    assert found["raw_write"]["of_raw"] is None


@pytest.mark.parametrize(
    ("tier", "gpus", "save", "load", "met"),
    [
        ("light", 2, 1.0, 1.0, (True, True)),  # 1 GB/s each, of 0.75 and 1
        ("light", 2, 1.4, 1.0, (False, True)),
        ("light", 2, 1.0, 1.01, (True, False)),
        ("medium", 1, 1.0, 1.0, (True, True)),  # two ranks for one GPU
        ("high", 2, 1.0, 1.0, (False, False)),
    ],
)
def test_the_verdict_of_a_tier(tier, gpus, save, load, met):
    found = scores.verdict(scores.scores(made_up(save, load)), (TIERS[tier].write, TIERS[tier].read), gpus)
    assert (found["write"]["met"], found["read"]["met"]) == met
    assert found["met"] == all(met)
    assert found["write"]["needed"] == TIERS[tier].write
    assert found["read"]["needed"] == TIERS[tier].read
    assert found["write"]["reached"] == pytest.approx(2 / save / gpus)
    assert found["read"]["reached"] == pytest.approx(2 / load / gpus)


def test_what_has_no_target_meets_it():
    found = scores.verdict(scores.scores(made_up()), (0.0, 4.0), 1)
    assert (found["write"]["met"], found["read"]["met"], found["met"]) == (True, False, False)


def test_how_it_ran_is_added_up():
    one = sample(1.0, paths={"zero-copy": 3, "staged: small": 1}, resident=0.25)
    other = sample(1.0, engine="threads", fallback="no io_uring", threads=1, paths={"staged: small": 4}, resident=1.0)
    found = scores.engine([[one, other], [one, other]])
    assert found["engines"] == {"uring": 2, "threads": 2}
    assert found["fallbacks"] == ["no io_uring"]
    assert found["threads"] == [1, 2]
    assert found["paths"] == {"staged: small": 10, "zero-copy": 6}
    assert found["resident"] == {"min": 0.25, "median": 0.625, "max": 1.0}
    assert scores.engine([[one, {**one, "resident": None}]])["resident"] is None


def test_the_summary_says_it_in_a_line():
    found = scores.scores(made_up())
    document = {"scores": found, "target": {"name": "light", **scores.verdict(found, (0.75, 1.0), 2)}}
    assert text.summary(document) == (
        "saved 2.00 GB at 1 GB/s (0.50 of raw), loaded at 2 GB/s (0.90 of raw): target light for 2 GPUs not met "
        "(per GPU 0.5 of 0.75 GB/s written, 1 of 1 GB/s read)"
    )


# -- shares ------------------------------------------------------------------------------------------------------------


def test_a_size_is_of_each_rank_and_made_of_whole_parameters():
    shares = shapes.of_size(GB, 3, 100)
    assert len(shares) == 3
    assert {share.bytes for share in shares} == {GB // 14 * 14}
    assert shares[0].optimizer == 6 * shares[0].weights


@pytest.mark.parametrize(("name", "ranks", "gib"), [("llama3-8b", 8, 105), ("llama3-70b", 64, 912)])
def test_all_ranks_of_a_workload_make_the_published_size(name, ranks, gib):
    total = sum(share.bytes for share in shapes.of_workload(name, 1.0, ranks, 512))
    assert total / GIB == pytest.approx(gib, abs=1)


def test_with_zero_1_the_weights_are_the_first_replicas_alone():
    shares = shapes.of_workload("llama3-405b", 0.01, 512, 300)
    assert all(share.weights for share in shares[:256])
    assert not any(share.weights for share in shares[256:])
    assert sum(share.bytes for share in shares) == pytest.approx(0.01 * WORKLOADS["llama3-405b"].bytes, rel=1e-4)
    # The 11.8 and 8.85 GiB of MLPerf's ranks, a hundredth of them.
    assert shares[0].bytes / GIB == pytest.approx(0.118, rel=0.01)
    assert shares[511].bytes / GIB == pytest.approx(0.0885, rel=0.01)


def test_a_node_of_the_1t_workload_is_what_was_published():
    total = sum(share.bytes for share in shapes.of_workload("llama3-1t", 1.0, 8, 512))
    assert total / GIB == pytest.approx(161, rel=0.01)


@pytest.mark.parametrize("share", [*shapes.of_size(10**7, 1, 512), shapes.Share(0, 1_200_000, 37)])
def test_the_tensors_add_up_and_are_of_many_sizes(share):
    tensors = shapes.layout(share)
    assert len(tensors) == share.tensors
    assert sum(np.dtype(dtype).itemsize * elements for *_, dtype, elements in tensors) == share.bytes
    assert min(elements for *_, elements in tensors) >= 1
    assert len({(group, name) for group, name, *_ in tensors}) == share.tensors
    assert max(elements for *_, elements in tensors) > 1000 * min(elements for *_, elements in tensors)
    assert {group for group, *_ in tensors} == {"master", "exp_avg", "exp_avg_sq"} | (
        {"model"} if share.weights else set()
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 511])
def test_any_number_of_tensors(count):
    share = shapes.Share(2 * 10**5, 12 * 10**5, count)
    tensors = shapes.layout(share)
    assert len(tensors) == count
    assert sum(np.dtype(dtype).itemsize * elements for *_, dtype, elements in tensors) == share.bytes


def test_a_state_is_incompressible_and_never_the_same_twice():
    import zlib

    share = shapes.of_size(2_000_000, 1, 40)[0]
    state, other = shapes.make(share), shapes.make(share)
    data = b"".join(tensor.tobytes() for group in state.values() for tensor in group.values())
    assert len(data) == share.bytes
    assert len(zlib.compress(data)) > 0.99 * len(data)
    assert shapes.difference(state, state) is None
    assert shapes.difference(state, other)
    before = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    shapes.stamp_all(state)
    data = b"".join(tensor.tobytes() for group in state.values() for tensor in group.values())
    after = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    same = sum(one == two for one, two in zip(before, after, strict=True))
    assert same < 0.01 * len(before), "a store that finds equal pages gains"


def test_a_difference_is_found_in_any_byte_and_dtype():
    state = {"model": {"a": np.zeros(5, np.float16), "b": np.full(3, np.nan, np.float32)}}
    copy = {"model": {name: tensor.copy() for name, tensor in state["model"].items()}}
    assert shapes.difference(state, copy) is None
    copy["model"]["b"].view(np.uint8)[11] ^= 1
    assert shapes.difference(state, copy) == "model.b"
    copy["model"]["a"] = copy["model"]["a"].view(np.int16)
    assert shapes.difference(state, copy) == "model.a"
    assert shapes.difference(state, {"model": {}}) == "model.a"


# -- room --------------------------------------------------------------------------------------------------------------


def with_memory(monkeypatch, available):
    monkeypatch.setattr(room.limits, "memory", lambda: {"available_bytes": available})


def test_what_the_disk_has_no_room_for_is_refused_with_what_would_fit(tmp_path, monkeypatch):
    with_memory(monkeypatch, 10**18)
    with pytest.raises(ValueError, match=r"2 ranks with \S+ TB in total need .* are free: give --size \d+MB or less"):
        room.check(tmp_path, [shapes.Share(0, 10**15, 512)] * 2, hot=True)


def test_what_memory_has_no_room_for_is_refused_with_what_would_fit(tmp_path, monkeypatch):
    with_memory(monkeypatch, 2 * GB)
    with pytest.raises(
        ValueError, match=r"need 2\.\d+ GB of memory \(the state, its loaded copy\).*give --size (\d+)MB"
    ) as caught:
        room.check(tmp_path, [shapes.Share(0, GB, 512)], hot=True)
    fits = int(str(caught.value).split("--size ")[1].split("MB")[0])
    room.check(tmp_path, [shapes.Share(0, fits * 10**6, 512)], hot=False)


def test_hot_loads_are_left_out_where_the_files_would_not_stay_cached(tmp_path, monkeypatch):
    with_memory(monkeypatch, int(2.5 * GB))
    assert "of memory" in room.check(tmp_path, [shapes.Share(0, GB, 512)], hot=True)
    assert room.check(tmp_path, [shapes.Share(0, GB, 512)], hot=False) is None
    with_memory(monkeypatch, 4 * GB)
    assert room.check(tmp_path, [shapes.Share(0, GB, 512)], hot=True) is None
