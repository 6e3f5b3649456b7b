"""After a missed call, a late call, or an error outside calls, a group's next call works."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
import fastckpt.distributed
from fastckpt.distributed import Ranks
from harness import groups, limits, machines, parallel, points

#: The timeout after which a rank is missed: longer than the delays of a busy machine.
SHORT = 8.0
LONG = 60.0


def state(number: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": parallel.distributed(torch.full((64, 100), float(number)), mesh, [Shard(0)]), "step": number}


def outcome(function, *args, **kwargs) -> str:
    """The outcome of a call: ``ok``, or the error."""
    try:
        function(*args, **kwargs)
    except (fastckpt.CheckpointError, RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def within(timeout: float) -> dict[str, Any]:
    """Options of a call: the timeout for silent ranks, and one writing thread."""
    return {"ranks": Ranks(timeout=timeout), "io": fastckpt.IO(threads=1)}


def save(path: str, number: int, timeout: float = LONG) -> str:
    return outcome(fastckpt.distributed.save, state(number), path, **within(timeout))


def save_in_background(path: str, number: int, timeout: float = LONG) -> str:
    pending = fastckpt.distributed.save_async(state(number), path, **within(timeout))
    return outcome(pending.result, LONG)


def load(path: str, number: int, timeout: float = LONG) -> str:
    del number
    return outcome(fastckpt.distributed.load, path, **within(timeout))


def missed(call, path: str, odd: int, same: bool) -> list[str]:
    """Make four calls, of which one rank misses the second; ranks meet before each call, as in training."""
    told = []
    for number in range(4):
        dist.barrier()
        where = path if same or call is load else f"{path}-{number}"
        if number == 1 and dist.get_rank() == odd:
            told.append("missed")
            continue
        told.append(call(where, number, SHORT if number == 1 else LONG))
    return told


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("call", "same"),
    [(save, False), (save, True), (save_in_background, False)],
    ids=["save", "save-to-one-path", "save_async"],
)
def test_the_call_after_a_missed_one_works(forge, tmp_path, call, same, odd):
    path = tmp_path / "c"
    with forge.group(3) as group:
        for rank, told in enumerate(group.run(missed, call, str(path), odd, same)):
            assert [told[number] for number in (0, 2, 3)] == ["ok"] * 3, told
            if rank != odd:
                assert f"rank {odd}" in told[1]
                assert "nothing was committed" in told[1]
    last = path if same else Path(f"{path}-3")
    assert fastckpt.load(last)["step"] == 3


def late(path: str, odd: int, plain: bool) -> list[str]:
    """Make calls, with one rank in its second call while the others wait in the third."""
    told = []
    for number in range(5):
        if number == 3:
            dist.barrier()
        given = state(number)
        if plain:
            del given["step"]
        if number == 1 and dist.get_rank() == odd:
            # The others have given this rank up, and more than one of them is in the next call.
            until(path, "given up")
            time.sleep(0.3)
        timeout = SHORT if number == 1 else LONG
        told.append(outcome(fastckpt.distributed.save, given, path, **within(timeout)))
        if number == 1 and dist.get_rank() != odd:
            Path(f"{path}.given up").touch()
    return told


def ahead(path: str, odd: int) -> list[str]:
    """Save to one path, with one rank in the next call while the others still wait in the call that it misses."""
    told = []
    for number in range(6):
        given = {"w": state(number)["w"], "scheduler": {"last_epoch": number}}
        if number == 1 and dist.get_rank() == odd:
            told.append("missed")
        else:
            told.append(outcome(fastckpt.distributed.save, given, path, **within(LONG)))
    return told


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_comes_with_the_next_call_while_others_wait_meets_them_later(forge, tmp_path, odd):
    """A scheduler's count deep in the state distinguishes the calls."""
    path = tmp_path / "c"
    with forge.group(3) as group:
        for rank, told in enumerate(group.run(ahead, str(path), odd, timeout=LONG)):
            assert told[1].startswith("missed" if rank == odd else ("ValueError", "RanksError"))
            assert [told[number] for number in (0, 3, 4, 5)] == ["ok"] * 4, told
    found = fastckpt.load(path)
    assert (found["w"].unique().tolist(), found["scheduler"]) == ([5.0], {"last_epoch": 5})


def until(path: str, what: str) -> None:
    while not Path(f"{path}.{what}").exists():
        time.sleep(0.01)


@pytest.mark.parametrize("plain", [False, True])
def test_a_rank_that_comes_with_an_old_call_is_not_taken_for_one_with_the_next(forge, tmp_path, plain):
    """The old call fails even if nothing distinguishes the calls because the state has only tensors."""
    path = tmp_path / "c"
    with forge.group(3) as group:
        for told in group.run(late, str(path), 1, plain):
            assert "rank 1" in told[1]
            assert "has not answered" in told[1]
            assert [told[number] for number in (0, 2, 3, 4)] == ["ok"] * 4, told
    assert fastckpt.load(path)["w"].unique().tolist() == [4.0]


def plain_saves(path: str, odd: int) -> list[str]:
    """Make three indistinguishable saves; one rank misses the second, and makes the third when that has failed."""
    told = []
    for number in range(3):
        dist.barrier()
        if number == 1 and dist.get_rank() == odd:
            told.append("missed")
            continue
        given = {"w": state(number)["w"]}
        told.append(outcome(fastckpt.distributed.save, given, path, **within(LONG if number == 0 else 2)))
    return told


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_missed_a_save_like_others_stays_behind_and_says_what_to_do(forge, tmp_path, odd):
    path = tmp_path / "c"
    with forge.group(2) as group:
        found = group.run(plain_saves, str(path), odd)
    assert [told[0] for told in found] == ["ok"] * 2
    behind, other = found[odd][2], found[1 - odd][2]
    assert "has not answered" in behind
    assert "metadata={'step': step}" in behind
    assert f"rank {odd}" in other
    assert "it was late, or it missed a save" not in other
    assert fastckpt.load(path)["w"].unique().tolist() == [0.0], "the checkpoint has one state only"


def warnings_of(path: str, told: dict[str, object], background: bool) -> list[tuple[str, ...]]:
    """The warnings of three saves to one path."""
    call = fastckpt.distributed.save_async if background else fastckpt.distributed.save
    reports = []
    for number in range(3):
        given = {"w": state(number)["w"]}
        metadata = {name: value if name == "run" else number for name, value in told.items()}
        report = call(given, path, metadata=metadata, **within(LONG))
        reports.append(report.result(LONG) if background else report)
    return [report.warnings for report in reports]


@pytest.mark.parametrize("background", [False, True])
def test_the_first_save_that_nothing_distinguishes_from_an_earlier_one_warns(forge, tmp_path, background):
    with forge.group(2) as group:
        for first, second, third in group.run(warnings_of, str(tmp_path / "c"), {"run": "a"}, background):
            assert first == third == ()
            (warning,) = second
            assert "nothing distinguishes this save from an earlier one" in warning
            assert "metadata={'step': step}" in warning
        for told in group.run(warnings_of, str(tmp_path / "d"), {"step": 0}, background):
            assert told == [()] * 3


def first_call_late(path: str) -> tuple[list[str], float]:
    """Make a first call to which one rank is late; return this rank's outcomes and how long it waited."""
    began = time.monotonic()
    if dist.get_rank() == 1:
        until(path, "given up")
        began = time.monotonic()
    told = [save(path, 0, SHORT)]
    took = time.monotonic() - began
    Path(f"{path}.given up").touch()
    dist.barrier()
    return [*told, save(path, 1)], took


def test_a_rank_that_is_late_to_the_first_call_is_told_so_at_once(forge, tmp_path):
    path = tmp_path / "c"
    with forge.group(3) as group:
        found = group.run(first_call_late, str(path))
    for told, _ in found:
        assert "rank 1 has not answered" in told[0], told
        assert told[1] == "ok"
    # The others wait for the whole timeout, but the late rank does not.
    assert found[1][1] < SHORT < found[0][1]


def other_orders(path: str) -> list[str]:
    """Save in two groups, in a different order on each rank."""
    two = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    given = {"w": torch.full((1000,), 1.0)}
    pending = {
        number: fastckpt.distributed.save_async(
            given, f"{path}-{number}", ranks=Ranks(two[number], timeout=LONG), io=fastckpt.IO(threads=1)
        )
        for number in order
    }
    return [outcome(pending[number].result, LONG) for number in range(2)]


def test_groups_save_in_the_background_in_any_order(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(other_orders, str(tmp_path / "c"), timeout=2 * LONG) == [["ok"] * 2] * 2
    for number in range(2):
        assert fastckpt.verify(tmp_path / f"c-{number}").ok


def two_names(first: str, second: str) -> list[str]:
    """Save to one directory, which has a different path on each rank."""
    here = first if dist.get_rank() == 0 else second
    told = [save(f"{here}/c", 1), load(f"{here}/c", 1)]
    with fastckpt.Manager(f"{here}/run", ranks=Ranks(timeout=LONG)) as manager:
        told += [outcome(manager.save, step, state(step)) for step in (1, 2)]
        told.append(outcome(manager.wait))
    return told


def test_a_directory_may_have_another_name_on_each_rank(forge, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with forge.group(2) as group:
        for told in group.run(two_names, str(tmp_path / "there"), str(tmp_path / "link")):
            assert told == ["ok"] * 5
        (tmp_path / "other").mkdir()
        for told in group.run(two_names_of_two, str(tmp_path / "there" / "c"), str(tmp_path / "other" / "c")):
            assert "all ranks must make the same calls in the same order" in told
    assert fastckpt.load(tmp_path / "there" / "c")["step"] == 1
    assert fastckpt.Manager(tmp_path / "there" / "run", read_only=True).steps() == [1, 2]


def two_names_of_two(first: str, second: str) -> str:
    return save(first if dist.get_rank() == 0 else second, 2)


def leave_at_once(path: str) -> None:
    limits.put("seconds of grace for a rank", LONG)  # a busy machine may take seconds to wake a rank
    told = save(path, 1)
    if told != "ok" or fastckpt.load(path)["step"] != 1:
        raise AssertionError(told)
    groups.report("saved")
    os._exit(0)


def test_ranks_that_leave_at_once_have_all_saved(forge, tmp_path):
    """Rank 0 has the store, which ends with rank 0, while rank 2 is slow to read the last answer."""
    with forge.group(3, store="rank0") as group:
        strike = groups.Strike(2, points.LOOK_FOR_ANSWERS, signal.SIGSTOP, nth=4)
        group.start(leave_at_once, str(tmp_path / "c"), strike=strike)
        [stopped] = group.outcomes(LONG, ranks=[2])
        assert stopped.kind == "stopped", stopped
        assert group.heard(1) == "saved"
        time.sleep(0.5)
        group.resume(2)
        assert [group.heard(rank) for rank in (2, 0)] == ["saved"] * 2


def late_with_a_step(path: str) -> list[str]:
    """Save a step to which one rank comes late, and save the step again: no rank is out of step."""
    told = []
    for step, timeout in ((0, LONG), (1, 2.0), (1, LONG), (1, LONG)):
        if timeout < LONG and dist.get_rank() == 1:
            until(path, "given up")
        given, options = {"w": state(step)["w"]}, {"metadata": {"step": step}, **within(timeout)}
        told.append(outcome(fastckpt.distributed.save, given, path, **options))
        if timeout < LONG:
            Path(f"{path}.given up").touch()
        dist.barrier()
    return [*told, *fastckpt.distributed.save(given, path, **options).warnings]


def test_a_step_says_that_a_late_rank_has_missed_nothing(forge, tmp_path):
    with forge.group(2) as group:
        for told in group.run(late_with_a_step, str(tmp_path / "c")):
            assert [told[0], *told[2:]] == ["ok"] * 3, told
            assert "has not answered" in told[1]
            assert "it missed a save" not in told[1]


class Late(dict):
    """A part of a state that is read only once the other ranks wait for the save."""

    def __init__(self, waiting: list[Path]) -> None:
        super().__init__(bad=object())
        self.waiting = waiting

    def items(self):
        machines.wait_until(lambda: all(path.exists() for path in self.waiting))
        return super().items()


def fails_in_the_save(out: str, *, late: bool) -> list[str]:
    """Let one rank's save raise, so that it does not wait, while the others wait. Then all ranks continue.

    If that rank is late, the others ask each other about the save's end before it has failed.
    """
    told = []
    rank, asking = dist.get_rank(), [Path(f"{out}-asks-{rank}") for rank in range(dist.get_world_size())]

    def asks(decide):
        def ask(manager, operation, asked):
            if operation == "wait":
                asking[rank].touch()
            return decide(manager, operation, asked)

        return ask

    points.replace(points.ASK, asks)
    with fastckpt.Manager(out, ranks=Ranks(timeout=LONG)) as manager:
        for step in (1, 2):
            given = state(step)
            if step == 1 and rank == 1:
                given["bad"] = Late([asking[0], asking[2]] if late else [])
            told.append(outcome(manager.save, step, given))
            if step == 2 or dist.get_rank() != 1:
                began = time.monotonic()
                told.append(outcome(manager.wait))
                assert time.monotonic() - began < LONG / 2
            dist.barrier()
    return told


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_waits_for_a_save_is_told_at_once_why_it_failed(forge, tmp_path, late):
    with forge.group(3) as group:
        first, odd, last = group.run(fails_in_the_save, str(tmp_path / "run"), late=late, timeout=2 * LONG)
    for told in (first, last):
        assert told[0] == "ok"
        assert "rank 1" in told[1]
        assert "UnsupportedTypeError" in told[1]
        assert told[2:] == ["ok", "ok"]
    assert "bad" in odd[0]
    assert odd[1:] == ["ok", "ok"]
    assert fastckpt.Manager(tmp_path / "run", read_only=True).steps() == [2]
