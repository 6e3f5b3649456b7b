"""``Manager.save_on_signal`` over a process group: real signals to some ranks, and all save the same step."""

from __future__ import annotations

import signal
import time
import warnings

import pytest
import torch.distributed as dist

import fastckpt
from fastckpt import distributed, when
from harness import groups, points

#: A long timeout, for busy machines.
TIMEOUT = 60.0
#: All ranks, with the long timeout.
RANKS = distributed.Ranks(timeout=TIMEOUT)
#: Elements of a state that takes 0.4 s at 2 MB/s, and 40 s at 20 kB/s.
LARGE = 200_000


@pytest.fixture(scope="module")
def four(forge):
    with forge.group(4) as group:
        yield group


def state(step, size=1000):
    import torch

    return {"w": torch.full((size,), step, dtype=torch.int32), "step": step}


def train(out, how):
    """Train until the manager ends the run; return this rank's record.

    Args:
        out: the directory of the run.
        how: ``exit``, ``handlers`` and ``calls`` (the signals that this rank sends itself, by step).
    """
    rank = dist.get_rank()
    told, asked = [], []
    if how.get("handlers"):
        signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    policy = when.Every(time="1h") if how.get("skips") else when.Steps(2)
    with fastckpt.Manager(out, ranks=RANKS, save_when=policy) as manager:
        manager.save_on_signal(signal.SIGUSR1, signal.SIGUSR2, exit=how.get("exit", False))
        first = manager._ranks.first
        manager._ranks.first = lambda what, *given, **more: (asked.append(what), first(what, *given, **more))[1]
        for step in range(1, 10**9):
            dist.barrier()
            for number in how.get("calls", {}).get((rank, step), ()):
                signal.raise_signal(number)
            if manager.save(step, state(step)) and step == 2:
                manager.wait()
            if step == 3:
                groups.report("ready")
            if manager.preempted is not None:
                break
    return int(manager.preempted), step, told, manager.steps(), [what for what in asked if "signal" in what]


def whole(out):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fastckpt.Manager(out, read_only=True).restore()
    assert (found.state["w"] == found.step).all()
    assert not [path for path in out.iterdir() if path.name.startswith(".step")]
    return found.step


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("skips", [False, True])
def test_a_signal_on_one_rank_ends_all_at_the_same_step(four, tmp_path, rank, skips):
    four.start(train, tmp_path / "run", {"exit": True, "skips": skips})
    for each in range(4):
        assert four.heard(each) == "ready"
    four.children[rank].signal(signal.SIGUSR1)
    for each in four.outcomes(2 * TIMEOUT):
        assert (each.raised.kind, each.raised.text) == ("SystemExit", str(128 + signal.SIGUSR1))
    assert whole(tmp_path / "run") > 2


def test_signals_at_different_steps_are_answered_at_one(four, tmp_path):
    """One rank gets another signal, one gets it later; all pass on both. They ask once: no rank saved that step."""
    calls = {(1, 5): [signal.SIGUSR2], (3, 5): [signal.SIGUSR2, signal.SIGUSR1], (2, 6): [signal.SIGUSR1]}
    seen = four.run(train, tmp_path / "run", {"handlers": True, "calls": calls}, timeout=2 * TIMEOUT)
    # The ranks stop at the boundary after the last one that a rank had reached when it heard of the signal.
    step = seen[0][1]
    assert step >= 5
    assert seen == [(signal.SIGUSR2, step, [signal.SIGUSR2], [2, step], ["steady: signal"])] * 4
    assert whole(tmp_path / "run") == step
    for rank in range(4):
        assert four.heard(rank) == "ready"


def notices(out):
    """Train with a notice that is a barrier, like Ray's, and has news twice; return the saved steps."""
    asked, saved = [], {}

    def ask():
        dist.barrier()
        asked.append(step)
        return {3: "goes", 4: "goes", 8: "another"}.get(step)

    with fastckpt.Manager(out, ranks=RANKS, save_when=when.Every(time="1h")) as manager:
        manager.save_on(notice=ask)
        for step in range(1, 10):
            saved[step] = manager.save(step, state(step))
    return [step for step in saved if saved[step]], asked, manager.steps()


def test_a_notice_has_the_same_step_saved_on_all_ranks(four, tmp_path):
    assert four.run(notices, tmp_path / "run", timeout=TIMEOUT) == [([3, 8], [*range(1, 10)], [3, 8])] * 4
    assert whole(tmp_path / "run") == 8


def hold(out, where, grace):
    """Send one rank a signal in a steady stretch or at another point; return this rank's record."""
    mine = dist.get_rank() == 2
    # The save is slow enough to be in flight, or not to be durable in time.
    options = {"io": fastckpt.IO(bandwidth_limit="20kB" if grace else "2MB")}
    told = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append((number, manager.steps())))
    with fastckpt.Manager(out, ranks=RANKS, save_options=options) as manager:
        manager.save_on_signal(signal.SIGUSR1, grace=grace)
        if where in {"flight", "end"}:
            manager.save(1, state(1, LARGE))
        if where == "steady":
            with manager.steady(1, state(1)):
                if mine:
                    signal.raise_signal(signal.SIGUSR1)
                assert not told
            assert told
        elif mine:
            signal.raise_signal(signal.SIGUSR1)
        if where == "flight":
            assert not manager.should_save(1)
            assert told
        if where == "late":
            time.sleep(1)
            assert manager.should_save(1)
            assert not manager.save(1, state(1))
    return told, int(manager.preempted)


@pytest.mark.parametrize("where", ["steady", "flight", "end"])
def test_a_signal_beside_the_boundaries(four, tmp_path, where):
    """The signal comes within a steady stretch, during a save, or after the last boundary: all pass it on once."""
    seen = four.run(hold, tmp_path / "run", where, None, timeout=2 * TIMEOUT)
    assert seen == [([(signal.SIGUSR1, [1])], signal.SIGUSR1)] * 4


@pytest.mark.parametrize("where", ["flight", "end", "late"])
def test_what_cannot_be_durable_in_time_is_given_up_on_all_ranks(four, tmp_path, where):
    """The save would take 40 s, beyond a grace period of 1 s, or the boundary comes after that period."""
    seen = four.run(hold, tmp_path / "run", where, "1s", timeout=2 * TIMEOUT)
    assert seen == [([(signal.SIGUSR1, [])], signal.SIGUSR1)] * 4
    assert not [*tmp_path.rglob(".step*")]


def hold_two(out):
    """Raise a signal during two saves of 40 s each; return whether it was answered in time, and the steps."""
    options = {"io": fastckpt.IO(bandwidth_limit="20kB", max_in_flight=2)}
    with fastckpt.Manager(out, ranks=RANKS, save_options=options) as manager:
        manager.save_on_signal(signal.SIGUSR1, grace="1s", exit=False)
        for step in (1, 2):
            manager.save(step, state(step, LARGE))
        began = time.monotonic()
        signal.raise_signal(signal.SIGUSR1)
        manager.should_save(2)
    return time.monotonic() - began < 10, manager.steps()


def test_all_that_is_in_flight_is_given_up_in_time(four, tmp_path):
    """Ranks write their saves in sequence: the second cannot end before the first."""
    assert four.run(hold_two, tmp_path / "run", timeout=2 * TIMEOUT) == [(True, [])] * 4
    assert hold_two(tmp_path / "alone") == (True, [])


def signal_late(out):
    """Raise a signal after all ranks have agreed to end; return this rank's outcome."""
    told = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))

    def signalled(leave):
        return lambda *arguments: (signal.raise_signal(signal.SIGUSR1), leave(*arguments))

    with (
        points.replaced(points.LEAVE_DRAIN, signalled),
        fastckpt.Manager(out / "local", remote=out / "remote", ranks=RANKS) as manager,
    ):
        manager.save_on_signal(signal.SIGUSR1)
        manager.save(1, state(1))
    return told, manager.preempted


def test_a_signal_while_the_last_copies_are_given_up_is_passed_on(four, tmp_path):
    seen = four.run(signal_late, tmp_path)
    # Only one process on each host copies.
    assert seen == [([signal.SIGUSR1], signal.SIGUSR1), *[([], None)] * 3]


def save_for_it(out):
    with fastckpt.Manager(out, ranks=RANKS) as manager:
        manager.save_on_signal(signal.SIGUSR1, exit=False)
        manager.save(1, state(1))
        manager.wait()
        if dist.get_rank() == 0:
            signal.raise_signal(signal.SIGUSR1)
        try:
            manager.save(2, state(2))
        except (OSError, fastckpt.exceptions.RanksError) as error:
            return type(error).__name__, int(manager.preempted), manager.steps()
    return None


def test_the_save_for_a_signal_that_fails_on_one_rank_fails_on_all_and_the_signal_is_passed_on(four, tmp_path):
    strike = groups.Strike(1, points.WRITE, OSError(5, "Input/output error"), nth=2)
    four.start(save_for_it, tmp_path / "run", strike=strike)
    for each in four.outcomes(2 * TIMEOUT):
        kind = "OSError" if each.rank == 1 else "RanksError"
        assert each.value == (kind, signal.SIGUSR1, [1])
