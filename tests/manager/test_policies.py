"""``fastckpt.keep`` and ``fastckpt.save_when``: what each policy says, alone and with others."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import random

import pytest

import fastckpt
from fastckpt import keep, save_when
from fastckpt._interval import best_interval
from fastckpt._manager.step_timing import StepTiming
from fastckpt._manager.tier import reasons
from fastckpt.keep import Saved

MINUTE = 60.0


def run(steps, losses=None):
    """A checkpoint each minute."""
    losses = losses or {}
    return [
        Saved(step, index * MINUTE, {"loss": losses[step]} if step in losses else {})
        for index, step in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (keep.Last(), {900}),
        (keep.Last(3), {700, 800, 900}),
        (keep.Last(99), {0, 100, 200, 300, 400, 500, 600, 700, 800, 900}),
        (keep.Best(1, "loss"), {600}),
        (keep.Best(2, "loss"), {600, 200}),
        (keep.Best(1, "loss", mode="max"), {300}),
        (keep.Best(1, "accuracy"), set()),
        (keep.Every(steps=300), {0, 300, 600, 900}),
        (keep.Every(time="3min"), {0, 300, 600, 900}),
        (keep.Every(time=200), {0, 400, 800}),
        (keep.Younger("2min"), {800, 900}),
        (keep.Steps(100, 150, 900), {100, 900}),
    ],
)
def test_each_policy_keeps_what_it_says(policy, kept):
    losses = {100: 5.0, 200: 1.0, 300: 9.0, 400: math.nan, 500: 1.0, 600: 1.0, 700: math.inf}
    if policy == keep.Best(2, "loss"):
        losses[500] = 2.0
    assert policy.kept(run(range(0, 1000, 100), losses), now=9 * MINUTE + 60) == kept


@pytest.mark.parametrize("now", [0.0, 9 * MINUTE, 24 * 60 * MINUTE, 1e12])
def test_ages_go_by_the_newest_and_not_by_the_clock_of_who_removes(now):
    saved = run(range(0, 1000, 100))
    assert keep.Younger("150s").kept(saved, now) >= {700, 800, 900}
    assert keep.Younger("150s").kept([], now) == set()
    # Of a host whose clock is ahead, and saved before.
    ahead = dataclasses.replace(saved[5], created=24 * 60 * MINUTE)
    assert keep.Younger("150s").kept([*saved[:5], ahead, *saved[6:]], now) >= {500, 700, 800, 900}
    if now >= 9 * MINUTE:
        assert keep.Younger("150s").kept(saved, now) == {700, 800, 900}


def test_policies_keep_any_of_what_they_want_and_say_why():
    found = reasons(run(range(1, 8), {2: 0.5}), [keep.Last(2), keep.Best(1, "loss"), keep.Every(steps=3)], {4}, 0.0)
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
    assert reasons(run([1, 2]), [keep.Steps(7)], (), 0.0) == {1: [], 2: ["newest"]}
    assert reasons(run([1, 2]), [], (), 0.0) == {1: ["no policy"], 2: ["newest", "no policy"]}
    assert reasons([], [keep.Last(1)], {3}, 0.0) == {}


def test_one_by_one_or_all_at_once_the_same_stay():
    """What ``Every`` keeps does not depend on what has been removed before, whatever the times."""
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


@pytest.mark.parametrize(
    "policy",
    [
        keep.Last(3),
        keep.Best(2, "eval:loss", "max"),
        keep.Every(steps=1000),
        keep.Every(time="6h"),
        keep.Every(time="90s"),
        keep.Younger("2d"),
        keep.Steps(3, 1),
    ],
)
def test_a_policys_text_names_it(policy):
    assert keep.parse(str(policy)) == policy
    assert hash(keep.parse(str(policy))) == hash(policy)
    assert isinstance(policy, keep.Policy)


@pytest.mark.parametrize("text", ["", "last", "last=", "last=x", "last=0", "worst=3", "best=2", "best=2:", "every=1z"])
def test_a_text_that_names_no_policy(text):
    with pytest.raises(ValueError, match="keep: "):
        keep.parse(text)


@pytest.mark.parametrize(
    "make",
    [
        keep.Every,
        lambda: keep.Every(steps=1, time=1),
        save_when.Every,
        lambda: keep.Best(1, ""),
        lambda: keep.Best(1, "loss", "least"),
        keep.Steps,
        lambda: save_when.Steps(-1),
        lambda: keep.Younger(-1),
        lambda: save_when.Auto("0h"),
    ],
)
def test_policies_out_of_range(make):
    with pytest.raises(ValueError, match=r"^(keep|save_when)\."):
        make()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Training:
    """A simulated run: steps take ``step`` seconds, saves stop it for ``stall`` and are durable ``durable`` later."""

    def __init__(self, policy, *, step=1.0, stall=0.5, durable=4.0, slower=1.0):
        self.clock = Clock()
        self.timing = StepTiming(self.clock)
        self.policy = policy
        self.step_seconds, self.stall, self.durable_seconds, self.slower = step, stall, durable, slower
        self.step = 0
        self.began = None
        self.saved = []

    def run(self, seconds):
        """Train; the seconds between the begins of saves are in ``gaps``."""
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
            self.timing.reach(self.step, in_flight=in_flight)  # asked twice, a step is one step
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
    training = Training(save_when.Every(steps=10))
    training.run(60)
    assert [step for step, _ in training.saved] == [10, 20, 30, 40, 50]
    timing = StepTiming()
    found = []
    for step in range(0, 100, 7):
        timing.reach(step, in_flight=False)
        if save_when.Every(steps=20).due(timing.moment(in_flight=False)):
            found.append(step)
    assert found == [21, 42, 63, 84]


def test_a_clock_that_was_put_back_keeps_what_is_in_doubt():
    times = [9000.0, 9100.0, 500.0, 600.0, 1100.0, 1150.0]
    saved = [keep.Saved(step, time) for step, time in enumerate(times)]
    kept = keep.Every(time="10min").kept(saved, 1200.0)
    assert kept == {0, 2, 4}
    assert keep.Every(time="10min").kept([one for one in saved if one.step in kept], 1200.0) == kept


def test_every_time_and_continuously():
    training = Training(save_when.Every(time="30s"))
    training.run(300)
    assert set(training.gaps) == {30.5}  # whole steps, and the stall
    training = Training(save_when.Continuously())
    training.run(100)
    assert all(4.0 <= gap <= 5.5 for gap in training.gaps)
    training = Training(save_when.Continuously(apart=20))
    training.run(100)
    assert all(20.0 <= gap <= 21.5 for gap in training.gaps)


def test_first_and_named_steps():
    training = Training(save_when.First())
    training.run(20)
    assert [step for step, _ in training.saved] == [1]
    training = Training(save_when.Steps(3, 7))
    training.run(20)
    assert [step for step, _ in training.saved] == [3, 7]


def test_auto_takes_the_optimum_of_what_was_measured(caplog):
    with caplog.at_level(logging.INFO, "fastckpt"):
        training = Training(save_when.Auto(mttf="2h", overhead=0.05), step=1.0, stall=2.0, durable=10.0)
        training.run(4000)
    # The second step is saved to measure; then the optimum, to the step.
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
        training = Training(save_when.Auto(mttf="5min", overhead=0.01), stall=2.0, durable=10.0)
        training.run(2000)
    assert min(training.gaps) >= 200.0
    assert max(training.gaps) <= 202.5
    assert "but overhead=1.00 %" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "fastckpt"):
        training = Training(save_when.Auto(mttf="5min", overhead=0.9), stall=0.1, durable=100.0)
        training.run(1000)
    assert min(training.gaps) >= 100.0
    assert training.policy.interval(cost=0.1, durable_seconds=100.0) == 100.0
    assert "but a save is durable only after 100 s" in caplog.text or "1.67 min" in caplog.text


def test_auto_adapts_when_the_cost_changes(caplog):
    training = Training(save_when.Auto(mttf="2h"), stall=1.0, durable=5.0)
    training.run(3000)
    before = training.gaps[-1]
    with caplog.at_level(logging.INFO, "fastckpt"):
        training.stall, training.durable_seconds = 9.0, 45.0
        training.run(6000)
    assert before == pytest.approx(best_interval(1.0, 7200.0), abs=1.5)
    assert training.gaps[-1] == pytest.approx(best_interval(9.0, 7200.0), abs=9)
    assert caplog.text.count('save_when="auto"') >= 2


def test_auto_counts_what_steps_take_longer_while_a_save_is_written():
    alone = Training(save_when.Auto(mttf="2h"), stall=0.5, durable=40.0)
    slowed = Training(save_when.Auto(mttf="2h"), stall=0.5, durable=40.0, slower=1.25)
    alone.run(4000)
    slowed.run(4000)
    assert alone.timing.cost == pytest.approx(0.5)
    # A fifth of the time in which the save is written is lost.
    assert slowed.timing.cost == pytest.approx(0.5 + 39.5 * 0.2, rel=0.01)
    assert slowed.gaps[-1] > 3 * alone.gaps[-1]


def test_an_evaluation_is_no_step():
    training = Training(save_when.Auto(mttf="2h"))
    training.run(20)
    training.clock.now += 500
    training.run(8)
    assert training.timing.step_seconds == pytest.approx(1.0)


def test_auto_is_what_plan_computes():
    planned = fastckpt.plan(size="10GB", write=1.0, stall="2s", mttf_cluster="2h", gpus=1)
    assert save_when.Auto(mttf="2h").interval(cost=2.0, durable_seconds=10.0) == pytest.approx(planned.interval)


def test_a_manager_takes_auto_with_its_measure(tmp_path):
    manager = fastckpt.Manager(tmp_path, save_when="auto", mttf="6h", overhead=0.02)
    (policy,) = manager._boundary.schedule.policies
    assert (policy.mttf, policy.overhead) == (6 * 3600.0, 0.02)
    both = fastckpt.Manager(tmp_path, save_when=["auto", 100, save_when.First()])
    assert [type(one) for one in both._boundary.schedule.policies] == [save_when.Auto, save_when.Every, save_when.First]
    assert both._boundary.schedule.policies[0].mttf == 50_000 * 3600.0


def test_auto_in_a_real_run_saves_the_second_step_and_measures(tmp_path):
    with fastckpt.Manager(tmp_path, save_when="auto", mttf="1h") as manager:
        saved = [step for step in range(1, 4) if manager.save(step, {"a": step}) and manager.wait()]
        assert saved[0] == 2
        moment = manager._saves.timing.moment(in_flight=False)
    assert moment.cost is not None
    assert moment.durable_seconds >= moment.cost > 0
