"""Parts of a manager, with a simulated clock: leftovers of lost machines in a run, policies with
their reasons, the times of steps, changes, answers of ranks about a failed load, and when ranks ask each other.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed import HashStore, TCPStore

import fastckpt
from fastckpt import keep, when
from fastckpt._interval import best_interval
from fastckpt._manager import after_save, crew, preemption, restore, stale
from fastckpt._manager.directory import Directory, Names
from fastckpt._manager.leftovers import UNCHANGED, Leftovers
from fastckpt._manager.step_boundary import StepBoundary
from fastckpt._manager.step_timing import StepTiming
from fastckpt._manager.summons import Called, Came, Summons
from fastckpt._manager.tier import reasons
from fastckpt._ranks import tree
from fastckpt._ranks.peers import Peers
from fastckpt._ranks.store import Transport
from fastckpt.exceptions import RanksError
from fastckpt.keep import Saved

STATE = {"w": np.arange(1000.0)}
#: The suffix of a machine whose processes are not visible here.
ELSEWHERE = "node7-0000000000000001-1-1-1"


def leave(run, name="step-00000001", kind="tmp", digits="0123abcd"):
    """Make a half-written workspace of another machine."""
    path = run / f".{name}.{kind}-{ELSEWHERE}-{digits}"
    (path / "training").mkdir(parents=True)
    (path / "fastckpt.json").touch()
    for file in ("model.safetensors", "training/training.safetensors"):
        (path / file).write_bytes(bytes(1 << 20))
    return path


class Clock:
    now = 7.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched(tmp_path):
    """A run, the watcher of its leftovers, and its clock."""
    clock = Clock()
    return tmp_path, Leftovers(Directory(str(tmp_path), Names("step-{step:08d}")), clock), clock


def test_a_start_tells_what_nobody_may_remove(tmp_path, caplog):
    """Mutants: no warning; a warning about other names, too; a warning of a read-only manager, too."""
    leave(tmp_path)
    leave(tmp_path, "step-00000002", digits="11111111")
    leave(tmp_path, "somebodys", digits="22222222")
    fastckpt.Manager(tmp_path, read_only=True)
    assert not caplog.records
    manager = fastckpt.Manager(tmp_path, async_save=False)
    (record,) = caplog.records
    for word in ("2 leftovers", "node7", "4.19 MB", "10 minutes"):
        assert word in record.getMessage()
    manager.save(3, STATE)
    assert record.getMessage() in manager.wait().warnings
    manager.save(4, STATE)
    assert record.getMessage() not in manager.wait().warnings
    assert len(fastckpt.clean(tmp_path)) == 3


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_removes_what_has_stood_still(tmp_path, async_save):
    path, other = leave(tmp_path), leave(tmp_path, "somebodys")
    with fastckpt.Manager(tmp_path, async_save=async_save) as manager:
        clock = manager._after_save.leftovers._clock = Clock()
        manager._after_save.leftovers.begin()
        manager.save(3, STATE)
        manager.wait()
        assert path.exists()
        # The age is measured by the manager's clock, regardless of the times of the files.
        clock.now += 1e6
        manager.save(4, STATE)
        manager.wait()
    assert path.exists() is False
    assert other.exists()


def test_what_changes_is_watched_anew(watched):
    """Mutants: only the directory is checked, or only its names; only the first check counts."""
    run, leftovers, clock = watched
    path = leave(run)
    leftovers.begin()
    for file in ("model.safetensors", "training/training.safetensors"):
        clock.now += UNCHANGED - 1
        with (path / file).open("ab") as writing:
            writing.write(bytes(1 << 20))
        leftovers.clear()
        clock.now += 2
        leftovers.clear()
        assert path.exists()
    clock.now += UNCHANGED
    leftovers.clear()
    assert not path.exists()


def test_age_counts_for_nothing(watched):
    run, leftovers, clock = watched
    path = leave(run)
    for each in (path / "model.safetensors", path):
        os.utime(each, (1, 1))
    leftovers.begin()
    clock.now += UNCHANGED - 1
    leftovers.clear()
    assert path.exists()


def test_what_an_old_checkpoint_is_put_back_by_stays(watched):
    """Only the workspace shows that the old checkpoint must be put back."""
    run, leftovers, clock = watched
    fastckpt.save(STATE, run / "step-00000001")
    path = leave(run)
    (run / "step-00000001").rename(run / f".step-00000001.old-{ELSEWHERE}-0123abcd00")
    leftovers.begin()
    clock.now += 2 * UNCHANGED
    leftovers.clear()
    assert path.exists()
    # As long as the lost machine may live, the checkpoint is read in place.
    assert (fastckpt.load(run / "step-00000001")["w"] == STATE["w"]).all()


def test_one_that_has_come_later_is_not_taken_for_one_that_was_there(watched):
    run, leftovers, clock = watched
    first = leave(run)
    leftovers.begin()
    clock.now += UNCHANGED
    second = leave(run, "step-00000002")
    leftovers.clear()
    assert not first.exists()
    assert second.exists()
    leftovers.clear()
    assert second.exists()


def test_what_cannot_be_removed_is_told(watched, caplog, monkeypatch):
    run, leftovers, clock = watched
    leave(run)
    leftovers.begin()
    clock.now += UNCHANGED

    def refuse(*_, **__):
        raise PermissionError(13, "no")

    monkeypatch.setattr("fastckpt._manager.leftovers.remove_leftover", refuse)
    caplog.clear()
    leftovers.clear()
    assert "not removed" in caplog.text


# --- policies and times -----------------------------------------------------------------------------------------------


def each_minute(steps, losses=None):
    """Return the facts of one checkpoint per minute."""
    metrics = {step: {"loss": loss} for step, loss in (losses or {}).items()}
    return [keep.Saved(step, 60.0 * index, metrics.get(step, {})) for index, step in enumerate(steps)]


def test_policies_keep_any_of_what_they_want_and_say_why():
    found = reasons(
        each_minute(range(1, 8), {2: 0.5}), [keep.Last(2), keep.Best(1, "loss"), keep.Every(steps=3)], {4}, 0.0
    )
    assert found == {
        1: [],
        2: ["best=1:loss:min"],
        3: ["every=3"],
        4: ["pinned"],
        5: [],
        6: ["last=2", "every=3"],
        7: ["last=2"],
    }


def test_the_newest_stays_whatever_policies_say():
    assert reasons(each_minute([1, 2]), [keep.Steps(7)], (), 0.0) == {1: [], 2: ["newest"]}
    assert reasons(each_minute([1, 2]), [], (), 0.0) == {1: ["no policy"], 2: ["newest", "no policy"]}
    assert reasons([], [keep.Last(1)], {3}, 0.0) == {}


def test_one_by_one_or_all_at_once_the_same_stay():
    """Whatever the times, the checkpoints that ``Every`` keeps do not depend on earlier removals."""
    seed = random.Random(3)
    for _ in range(200):
        times = sorted(seed.uniform(0, 1000) for _ in range(30))
        everything = [Saved(step, time) for step, time in enumerate(times)]
        policies = [keep.Every(time=seed.uniform(1, 300)), keep.Last(seed.randint(1, 3))]
        left = []
        for one in everything:
            left.append(one)
            why = reasons(left, policies, (), one.created)
            left = [saved for saved in left if why[saved.step]]
        assert left == [one for one in everything if reasons(everything, policies, (), times[-1])[one.step]]


class Training:
    """A simulated run: steps take ``step`` seconds, saves stall it for ``stall`` and are durable ``durable`` later."""

    def __init__(self, policy, *, step=1.0, stall=0.5, durable=4.0, slower=1.0):
        self.clock = Clock()
        self.timing = StepTiming(self.clock)
        self.policy = policy
        self.step_seconds, self.stall, self.durable_seconds, self.slower = step, stall, durable, slower
        self.step = 0
        self.began = None
        self.saved = []

    def run(self, seconds):
        """Train; add the seconds between the starts of saves to ``gaps``."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.step += 1
            in_flight = self.began is not None
            self.clock.now += self.step_seconds * (self.slower if in_flight else 1.0)
            if self.began is not None and self.clock.now >= self.began + self.durable_seconds:
                now, self.clock.now = self.clock.now, self.began + self.durable_seconds
                self.timing.durable(self.began, self.stall)
                self.clock.now, self.began = now, None
            self.timing.reach(self.step, in_flight=in_flight)
            self.timing.reach(self.step, in_flight=in_flight)  # a repeated call does not count as another step
            if self.policy.due(self.timing.moment(in_flight=self.began is not None)):
                assert self.policy.due(self.timing.moment(in_flight=self.began is not None))
                self.saved.append((self.step, self.clock.now))
                self.began = self.timing.begin()
                self.clock.now += self.stall
                self.timing.leave()

    @property
    def gaps(self):
        times = [time for _, time in self.saved]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_every_steps_also_in_larger_strides():
    training = Training(when.Every(steps=10))
    training.run(60)
    assert [step for step, _ in training.saved] == [10, 20, 30, 40, 50]
    timing = StepTiming()
    found = []
    for step in range(0, 100, 7):
        timing.reach(step, in_flight=False)
        if when.Every(steps=20).due(timing.moment(in_flight=False)):
            found.append(step)
    assert found == [21, 42, 63, 84]


def test_every_time_and_continuously():
    training = Training(when.Every(time="30s"))
    training.run(300)
    assert set(training.gaps) == {30.5}  # 30 steps of 1 s, one stall
    training = Training(when.Continuously())
    training.run(100)
    assert all(4.0 <= gap <= 5.5 for gap in training.gaps)
    training = Training(when.Continuously(apart=20))
    training.run(100)
    assert all(20.0 <= gap <= 21.5 for gap in training.gaps)


def test_first_and_named_steps():
    training = Training(when.First())
    training.run(20)
    assert [step for step, _ in training.saved] == [1]
    training = Training(when.Steps(3, 7))
    training.run(20)
    assert [step for step, _ in training.saved] == [3, 7]


def test_auto_takes_the_optimum_of_what_was_measured(caplog):
    with caplog.at_level(logging.INFO, "fastckpt"):
        training = Training(when.Auto(mttf="2h", overhead=0.05), step=1.0, stall=2.0, durable=10.0)
        training.run(4000)
    # The save of the second step measures the cost; then the interval is optimal, rounded to steps.
    assert training.saved[0][0] == 2
    best = best_interval(2.0, 7200.0)
    assert best > 2.0 / 0.05
    assert all(abs(gap - best) <= 1.5 for gap in training.gaps)
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert 'save_when="auto": a save every' in told[0]
    assert "a save costs 2.00 s of training and is durable after 10.0 s" in told[0]
    assert "the optimum for a mean time to failure of 120 min" in told[0] or "2.00 h" in told[0]


def test_auto_stays_within_the_overhead_and_waits_until_the_last_is_durable(caplog):
    with caplog.at_level(logging.INFO, "fastckpt"):
        training = Training(when.Auto(mttf="5min", overhead=0.01), stall=2.0, durable=10.0)
        training.run(2000)
    assert min(training.gaps) >= 200.0
    assert max(training.gaps) <= 202.5
    assert "but overhead=1.00 %" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "fastckpt"):
        training = Training(when.Auto(mttf="5min", overhead=0.9), stall=0.1, durable=100.0)
        training.run(1000)
    assert min(training.gaps) >= 100.0
    assert training.policy.interval(cost=0.1, durable_seconds=100.0) == 100.0
    assert "but a save is durable only after 100 s" in caplog.text or "1.67 min" in caplog.text


def test_auto_adapts_when_the_cost_changes(caplog):
    training = Training(when.Auto(mttf="2h"), stall=1.0, durable=5.0)
    training.run(3000)
    before = training.gaps[-1]
    with caplog.at_level(logging.INFO, "fastckpt"):
        training.stall, training.durable_seconds = 9.0, 45.0
        training.run(6000)
    assert before == pytest.approx(best_interval(1.0, 7200.0), abs=1.5)
    assert training.gaps[-1] == pytest.approx(best_interval(9.0, 7200.0), abs=9)
    assert caplog.text.count('save_when="auto"') >= 2


def test_auto_counts_what_steps_take_longer_while_a_save_is_written():
    alone = Training(when.Auto(mttf="2h"), stall=0.5, durable=40.0)
    slowed = Training(when.Auto(mttf="2h"), stall=0.5, durable=40.0, slower=1.25)
    alone.run(4000)
    slowed.run(4000)
    assert alone.timing.cost == pytest.approx(0.5)
    # Training loses a fifth of the time of the write.
    assert slowed.timing.cost == pytest.approx(0.5 + 39.5 * 0.2, rel=0.01)
    assert slowed.gaps[-1] > 3 * alone.gaps[-1]


def test_an_evaluation_is_no_step():
    training = Training(when.Auto(mttf="2h"))
    training.run(20)
    training.clock.now += 500
    training.run(8)
    assert training.timing.step_seconds == pytest.approx(1.0)


def test_no_data_is_read(tmp_path):
    with fastckpt.Manager(tmp_path) as manager:
        for step in (1, 2):
            model = {"w": np.full(10, step, np.float32), "frozen": np.zeros(30, np.float32)}
            manager.save(step, {"model": model, "optimizer": {"m": np.full(10, step, np.float32)}})
            manager.wait()
    for path in tmp_path.glob("step-*/*.safetensors"):
        path.write_bytes(b"")
    first, second = (stale.sums_of(str(tmp_path / f"step-0000000{step}")) for step in (1, 2))
    assert stale.changed(first, second) == {"model": 0.25, "optimizer": 1.0}


def test_an_endless_grace_period_is_no_limit():
    assert after_save.seconds_until(float("inf")) is None


class Ranks:
    """Many ranks that ask for the outcome of a load, in groups of 32 as in a tree, and the reports of each."""

    host = "node"

    def __init__(self, errors):
        self.errors = errors
        self.said = []

    def outcome(self, said, combine, decide):
        self.said.append(json.loads(json.dumps(said)))
        if len(self.said) < len(self.errors):
            return None
        groups = [self.said[at : at + 32] for at in range(0, len(self.said), 32)]
        messages = [json.dumps(combine(group)) for group in groups]
        self.longest = max(map(len, messages))
        return json.loads(json.dumps(decide(combine([json.loads(message) for message in messages]))))

    def ask(self):
        """Return the answer, which is the same for all ranks."""
        for rank, error in enumerate(self.errors):
            self.rank = rank
            answer = restore.failures_of(self, error)
        return answer


def test_what_a_thousand_ranks_could_not_load_travels_as_the_first_failures_and_a_count():
    """Mutants: all failures are listed, or ranks that only heard of one; a rank that must not skip it is ignored."""
    damage, heard = fastckpt.CorruptCheckpointError("d" * 5000), RanksError("r" * 5000, ())
    failed = {3, *range(40, 1000)}
    ranks = Ranks([damage if rank in failed else heard for rank in range(1000)])
    answer = ranks.ask()
    assert [one.rank for one in answer.listed] == sorted(failed)[:16]
    assert answer.more == len(failed) - 16
    assert (answer.kinds, answer.skips, answer.gone) == (["CorruptCheckpointError"], True, False)
    assert ranks.longest < 34 * 2200
    assert "and 945 more" in str(restore._of_others("run", answer))

    some = Ranks([damage, None, OSError(28, "No space left on device"), *[heard] * 61]).ask()
    assert ([one.rank for one in some.listed], some.more, some.skips) == ([0, 2], 0, False)
    gone = Ranks([FileNotFoundError("gone"), heard]).ask()
    assert (gone.skips, gone.gone) == (True, True)
    assert [one.kind for one in Ranks([heard, heard]).ask().listed] == ["RanksError"] * 2
    assert Ranks([None] * 40).ask() is None


#: The number of boundaries after which a rank stops waiting for a call.
LONGEST = 50_000


class Crowd:
    """Some ranks in one process; a thread reaches the boundaries of each rank."""

    def __init__(self, size, store=None):
        self.came = [0] * size
        self.signals = [()] * size
        self.peers = [Peers(rank, size, store or HashStore(), f"host-{rank}", shown=False) for rank in range(size)]
        self.ranks = [Summons(peers, "run", 60.0, None) for peers in self.peers]
        for rank, each in enumerate(self.ranks):
            each.listen(lambda rank=rank: Came(self.came[rank], self.signals[rank], 60.0 - rank))

    def each(self, function):
        """Call a function with each rank's number; return the results."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(function, range(len(self.ranks))))

    def until_asked(self, rank):
        """Return how many boundaries a rank reaches until it asks at one."""
        for at in range(1, LONGEST):
            if self.ranks[rank].reach(passes=True):
                return at
            time.sleep(0.001)
        return None

    def until_called(self, rank):
        """Return the signals of the call for which a rank asks."""
        for _ in range(LONGEST):
            if call := self.ranks[rank].reach(passes=True):
                return call.signals
            time.sleep(0.001)
        return None

    def end(self):
        self.each(lambda rank: self.ranks[rank].end())
        for peers in self.peers:
            peers.close()


@pytest.fixture
def crowd(monkeypatch):
    """Seven ranks in a tree, of which four are two levels below the first."""
    monkeypatch.setattr(tree, "FAN_IN", 2)
    store = HashStore()
    made = Crowd(7, store)
    yield made
    made.end()


@pytest.mark.parametrize("calls", [{3: 1}, {0: 40}, dict.fromkeys(range(7), 5), {2: 1, 5: 300}])
def test_ranks_at_any_pace_ask_at_one_boundary_when_one_has_called(crowd, calls):
    """Mutants: ranks ask at the last boundary reached; no rank waits during the agreement; a waiting rank passes."""
    draw = [random.Random(rank) for rank in range(7)]

    def train(rank):
        """Return the boundaries at which this rank asks for a call, until it has heard of all calls."""
        asked, at = [], 0
        while (not asked or at <= max(calls.values())) and at < LONGEST:
            at += 1
            if calls.get(rank) == at:
                crowd.signals[rank] = (rank + 1,)
                crowd.came[rank] += 1
            if call := crowd.ranks[rank].reach(passes=True):
                assert 0 < call.left <= 60.0
                asked.append((at, call.signals))
            if draw[rank].random() < 0.3:
                time.sleep(draw[rank].random() / 100)
        return asked

    first, *others = crowd.each(train)
    assert others == [first] * 6
    assert 1 <= len(first) <= len(calls)
    told = [number for _, signals in first for number in signals]
    assert len(told) == len(set(told))
    assert set(told) <= {rank + 1 for rank in calls}
    assert told


def test_what_was_told_is_not_told_again_before_it_is_answered(crowd):
    """Mutant: each call reports all pending signals."""
    crowd.signals[2], crowd.came[2] = (10,), 1
    assert crowd.each(crowd.until_called) == [(10,)] * 7
    crowd.signals[5], crowd.came[5] = (12,), 1
    for _ in range(LONGEST):
        if all(rank._called for rank in crowd.ranks):
            break
        time.sleep(0.001)
    assert [rank.reach(passes=True).signals for rank in crowd.ranks] == [(12,)] * 7


def test_signals_that_a_call_has_told_need_no_question(tmp_path):
    """Mutants: the signals are taken while some ranks may not know of the call; they are taken twice; a later one
    is forgotten.
    """
    ranks = crew.Crew("alone", str(tmp_path))
    ranks._summons = SimpleNamespace(reach=lambda **_: Called((10,), None), urge=lambda: urged.append(12))
    signals = preemption.Signals(shared=True)
    saves, urged = SimpleNamespace(step=4), []
    boundary = StepBoundary(ranks, None, None, saves, None, SimpleNamespace(signals=signals))
    for pending, expected in ([10], []), ([10, 12], [12]):
        ranks._skip, signals._pending[:] = 3, pending
        assert not ranks.passes(needed=False)
        # The ranks are not asked: the call has already told them of signal 10.
        agreed = boundary.ask("should_save", 5, None, 0.0)
        assert (agreed.signals, agreed.due, signals.called, urged) == ((10,), True, True, expected)
        assert (ranks.take_call(), ranks._skip) == (None, 0)
    assert not ranks.passes(needed=True)
    assert ranks.take_call() is None


def test_a_rank_may_have_all_ask_soon(crowd):
    crowd.ranks[0].urge()
    first, *others = crowd.each(crowd.until_asked)
    assert first is not None
    assert others == [first] * 6


def test_a_rank_that_ends_is_named_at_the_next_boundary(crowd):
    """Mutant: the thread ends silently."""

    def train(rank):
        if rank == 4:
            crowd.ranks[4].end("its `with` statement ended with KeyError: 'x'")
            return None
        with pytest.raises(RanksError, match=r"rank 4 on host-4 .*: its `with` .* ended with KeyError: 'x'") as caught:
            crowd.until_asked(rank)
        return [failure.rank for failure in caught.value.failures]

    assert crowd.each(train) == [[4] if rank != 4 else None for rank in range(7)]


def test_while_nobody_calls_the_store_is_asked_nothing(monkeypatch):
    """Mutant: each slice of the wait reads the key once."""
    looks, asked = [threading.Semaphore(0) for _ in range(3)], []
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    woken, call = Peers.is_woken, Transport._call

    def look(peers, seconds, limit):
        found = woken(peers, seconds / 50, limit)
        looks[peers.rank].release()
        return found

    monkeypatch.setattr(Peers, "is_woken", look)
    crowd = Crowd(3, server)

    def pass_on(rank):
        for _ in range(20):
            looks[rank].acquire()
            assert not crowd.ranks[rank].reach(passes=True)

    crowd.each(pass_on)
    monkeypatch.setattr(Transport, "_call", lambda *given, **named: asked.append(given) or call(*given, **named))
    crowd.each(pass_on)
    monkeypatch.setattr(Transport, "_call", call)
    crowd.end()
    assert asked == []
