"""Internal parts of the tools: scores, shares, room, ranks and the raw device of ``bench``,
``diff`` in pieces, names and shares of runs, and the options that ``--help`` lists.
"""

# ruff: noqa: PTH208 - names as the directory has them

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt._tools import cli as command_line
from fastckpt._tools import diff, runs
from fastckpt._tools.bench import room, scores, shapes, text
from fastckpt._tools.tiers import TIERS, WORKLOADS
from harness import cli, needs, zygote

GB, GIB = 10**9, 2**30


def sample(seconds, size=GB, **others):
    how = {"engine": "uring", "fallback": None, "threads": 2, "paths": {}, "copied": 0, "thread_bytes": None}
    return {"bytes": size, "seconds": seconds, **how, **others}


# -- scores ------------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_counts():
    found = scores.score([[sample(1.0), sample(4.0), sample(2.0)]])
    assert found["seconds"] == {"min": 4.0, "median": 4.0, "max": 4.0}
    assert found["bytes"] == 3 * GB
    assert found["gigabytes_per_second"]["median"] == pytest.approx(0.75)
    assert found["slowest_rank_gigabytes_per_second"]["median"] == pytest.approx(0.25)
    assert found["slowest_rank"] == 1
    assert found["rank_gigabytes_per_second"] == pytest.approx([1.0, 0.25, 0.5])


def test_the_slowest_throughput_need_not_be_the_longest_time():
    """Shares differ, so a rank with much to write may take longest, but have the highest throughput."""
    found = scores.score([[sample(2.0, 8 * GB), sample(1.0, GB)]])
    assert found["seconds"]["median"] == 2.0
    assert found["gigabytes_per_second"]["median"] == pytest.approx(4.5)
    assert found["slowest_rank_gigabytes_per_second"]["median"] == pytest.approx(1.0)


def test_rounds_are_told_by_median_and_spread_and_the_first_apart():
    found = scores.score([[sample(seconds)] for seconds in (5.0, 1.0, 2.0, 4.0, 10.0)])
    assert found["seconds"] == {"min": 1.0, "median": 4.0, "max": 10.0}
    assert found["gigabytes_per_second"] == pytest.approx({"min": 0.1, "median": 0.25, "max": 1.0})
    assert (found["first_seconds"], found["rounds"]) == (5.0, 5)


def test_who_is_slowest_most_often():
    found = scores.score([[sample(1.0), sample(2.0)], [sample(3.0), sample(2.0)], [sample(1.0), sample(1.5)]])
    assert found["slowest_rank"] == 1


def test_threads_by_their_own_bytes_and_their_ranks_time():
    found = scores.score([[sample(2.0, thread_bytes=[600_000_000, 400_000_000]), sample(1.0, thread_bytes=[GB])]])
    assert found["thread_gigabytes_per_second"] == pytest.approx({"min": 0.2, "median": 0.3, "max": 1.0})
    assert scores.score([[sample(2.0)]])["thread_gigabytes_per_second"] is None


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
        ("light", 2, 1.0, 1.0, (True, True)),  # 1 GB/s per GPU, of 0.75 to write and 1 to read
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
    # These are a hundredth of the 11.8 and 8.85 GiB of MLPerf's ranks.
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


# --- ranks, caches and the raw device ---------------------------------------------------------------------------------


def test_a_rank_that_comes_back_with_other_bytes_ends_the_run(where, monkeypatch):
    from fastckpt._tools.bench import rank, shapes

    spec = rank.Spec(0, where, shapes.of_size(10**6, 1, 8)[0], fastckpt.IO(), "light")
    one = rank._Rank(spec)
    one.prepare(rank.Request("save", 1))(time.monotonic())
    loading = one.prepare(rank.Request("load", 1))
    shapes.stamp(one.state["model"]["layers.0.0"])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.0 is not what was saved"):
        loading(time.monotonic())


def test_caches_are_dropped_before_what_has_to_be_cold(monkeypatch):
    from fastckpt._tools.bench import rounds

    for may in (True, False):
        done = []
        monkeypatch.setattr(rounds.caches, "drop", lambda may=may, done=done: done.append("drop") or may)
        monkeypatch.setattr(rounds.os, "sync", lambda done=done: done.append("sync"))
        ranks = type(
            "Fake", (), {"ask": lambda _, request, done=done: done.append((request.operation, request.forget))}
        )
        measured = rounds.Measured()
        for operation in ("raw_write", "raw_read", "save", "load", "hot"):
            rounds._once(ranks(), operation, 1, measured)
        cold = [[step for part in ("raw_read", "load") for step in ("sync", "drop", (part, not may))]]
        expected = [
            "sync",
            ("raw_write", False),
            *cold[0][:3],
            "sync",
            ("save", False),
            *cold[0][3:],
            "sync",
            ("hot", False),
        ]
        assert done == expected
        assert ("drop_caches (" not in measured.caches) == may or "posix_fadvise" in measured.caches


def test_a_rank_forgets_its_files_and_warms_them(where):
    from fastckpt._tools.bench import caches, rank, shapes

    one = rank._Rank(rank.Spec(0, where, shapes.of_size(10**6, 1, 8)[0], fastckpt.IO(), "light"))
    one.prepare(rank.Request("save", 1))(time.monotonic())
    caches.warm(where)
    assert caches.resident(where) == 1.0
    assert one.prepare(rank.Request("load", 1))(time.monotonic())["resident"] == 1.0
    os.sync()
    assert one.prepare(rank.Request("load", 1, forget=True))(time.monotonic())["resident"] < 0.05
    assert one.prepare(rank.Request("hot", 1))(time.monotonic())["resident"] == 1.0


def test_the_ranks_are_ended_before_their_directory_goes(where):
    from fastckpt._tools.scratch import scratch

    seen = []
    with scratch(where, "bench") as (path, ending):
        ending.callback(lambda: seen.append(path.exists()))
    assert seen == [True]
    assert os.listdir(where) == []


def test_the_raw_device_writes_and_reads_every_byte(tmp_path):
    from fastckpt._tools.bench import raw

    device = raw.Device()
    blocks = raw.IN_FLIGHT + 3  # more than there are buffers
    size = blocks * raw.BLOCK + 5000
    done = device.write(tmp_path / "plain", size).run(time.monotonic())
    assert done["bytes"] == blocks * raw.BLOCK + 8192 == (tmp_path / "plain").stat().st_size
    assert done["direct"]
    data = (tmp_path / "plain").read_bytes()
    assert len({data[at : at + 4096] for at in range(0, len(data), 4096)}) == len(data) // 4096, (
        "no two pages are equal"
    )
    for block in device._blocks:
        block[:] = 0
    assert device.read(tmp_path / "plain").run(time.monotonic())["bytes"] == len(data)
    written = {data[at : at + raw.BLOCK] for at in range(0, len(data), raw.BLOCK)}
    # The end of the file fills only a part of one buffer.
    assert sum(bytes(block) in written for block in device._blocks) >= raw.IN_FLIGHT - 1


def test_the_raw_write_is_direct_preallocated_and_synced(tmp_path):
    needs.tool("strace", "strace")
    code = f"""
import time
from pathlib import Path
from fastckpt._tools.bench import raw
device = raw.Device()
device.write(Path({str(tmp_path / "plain")!r}), 6 * raw.BLOCK).run(time.monotonic())
device.read(Path({str(tmp_path / "plain")!r})).run(time.monotonic())
"""
    log = tmp_path / "log"
    trace = ["strace", "-f", "-o", str(log), "-e", "openat,fallocate,pwritev,pwritev2,preadv,preadv2,fdatasync"]
    subprocess.run([*trace, sys.executable, "-c", code], check=True, timeout=120, env=zygote.environment())
    calls = [
        line
        for line in log.read_text().splitlines()
        if "plain" in line
        or "resumed" in line
        or "vec" in line
        or "sync" in line
        or "pwritev" in line
        or "fallocate" in line
    ]
    text = "\n".join(calls)
    opens = [line for line in calls if "openat" in line and "plain" in line]
    assert len(opens) == 2
    assert all("O_DIRECT" in line for line in opens)
    assert text.index("fallocate(") < text.index("pwritev")
    assert text.rindex("pwritev") < text.index("fdatasync(") < text.index("preadv")


# --- diff, runs, help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [16 << 20, 64])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int64, torch.uint8, torch.complex64, torch.complex32, torch.bool),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_figures(compared, monkeypatch, dtype, piece):
    monkeypatch.setattr(diff, "_PIECE", piece)
    before = torch.ones(16, 4).to(dtype)
    after = before.clone()
    after[3, 1] = after[15, 3] = 0
    document, screen = compared({"w": before, "tied": before}, {"w": after, "tied": before})
    (found,) = document["changed"]
    assert (found["name"], found["shape"], found["elements"], found["max_abs"]) == ("w", "[16, 4]", 2, 1.0)
    assert found["dtype"] == str(dtype).removeprefix("torch.")
    assert found["relative"] == pytest.approx(math.sqrt(2 / 64))
    assert document["equal"] == 1
    assert "0.177" in screen


@pytest.mark.parametrize(
    ("names", "form"),
    [
        ([], "step-{step:08d}"),
        (["final"], "step-{step:08d}"),
        (["step-00000900", "step-123456789"], "step-{step:08d}"),
        (["step-0", "step-10"], "step-{step}"),
        (["007"], "{step:03d}"),
        (["{a}7.ckpt", "{a}9.ckpt", "b1"], "{{a}}{step}.ckpt"),
        (["gpt-2-100", "gpt-2-900"], "gpt-2-{step}"),
    ],
)
def test_the_names_of_a_run_are_those_that_most_have(names, form):
    assert runs.form_of(names) == form


def test_a_small_share_is_not_told_as_none():
    assert [runs._percent(share) for share in (0.0, 1e-9, 0.02)] == ["0 %", "< 0.1 %", "2 %"]


COMMANDS = {
    name: parser for action in command_line._parser()._actions for name, parser in (action.choices or {}).items()
}


# The monitor has its own help.
@pytest.mark.parametrize("name", ["", *(name for name in COMMANDS if name != "top")])
def test_help_fits_a_screen_and_names_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*([name] if name else []), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 3 < len(lines) <= 24
    assert max(map(len, lines)) <= 80
    named = set(re.findall(r"--[a-z][a-z-]*", "\n".join(lines)))
    if name:
        options = {option for option in COMMANDS[name]._option_string_actions if option.startswith("--")}
        assert named | {"--help"} == options
    else:
        assert all(any(line.split()[:1] == [command] for line in lines) for command in COMMANDS)
