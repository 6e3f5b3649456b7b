"""``fastckpt.keep`` and ``fastckpt.when``: the decisions of policies, alone and together."""

from __future__ import annotations

import dataclasses
import math

import pytest

import fastckpt
from fastckpt import keep, when
from fastckpt.keep import Saved

MINUTE = 60.0


def run(steps, losses=None):
    """Return the facts of one checkpoint per minute."""
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
    # This checkpoint was saved earlier, by a host whose clock is ahead.
    ahead = dataclasses.replace(saved[5], created=24 * 60 * MINUTE)
    assert keep.Younger("150s").kept([*saved[:5], ahead, *saved[6:]], now) >= {500, 700, 800, 900}
    if now >= 9 * MINUTE:
        assert keep.Younger("150s").kept(saved, now) == {700, 800, 900}


def test_a_host_whose_clock_is_ahead_does_not_make_the_one_before_its_first_too_old():
    """The host that saves the newest checkpoint also removes old ones, by its own clock."""
    day = 24 * 60 * MINUTE
    saved = [Saved(1, 0.0), Saved(2, 5 * MINUTE), Saved(3, day + 10 * MINUTE)]
    assert keep.Younger("2h").kept(saved, day + 10 * MINUTE) == {2, 3}
    assert keep.Younger("2h").kept(saved[2:], day + 10 * MINUTE) == {3}


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
        when.Every,
        lambda: keep.Best(1, ""),
        lambda: keep.Best(1, "loss", "least"),
        keep.Steps,
        lambda: when.Steps(-1),
        lambda: keep.Younger(-1),
        lambda: keep.Younger(2),  # hours are meant
        lambda: when.Auto("0h"),
        lambda: when.Auto("soon"),
        lambda: when.Auto(overhead=2),
    ],
)
def test_policies_out_of_range(make):
    with pytest.raises(ValueError, match=r"^(keep|when)\."):
        make()


def test_a_clock_that_was_put_back_keeps_what_is_in_doubt():
    times = [9000.0, 9100.0, 500.0, 600.0, 1100.0, 1150.0]
    saved = [keep.Saved(step, time) for step, time in enumerate(times)]
    kept = keep.Every(time="10min").kept(saved, 1200.0)
    assert kept == {0, 2, 4}
    assert keep.Every(time="10min").kept([one for one in saved if one.step in kept], 1200.0) == kept


def test_auto_is_what_plan_computes():
    planned = fastckpt.tools.plan(size="10GB", write="1.0GB/s", stall="2s", mttf_cluster="2h", gpus=1)
    assert when.Auto(mttf="2h").interval(cost=2.0, durable_seconds=10.0) == pytest.approx(planned.interval)


def test_a_manager_takes_auto_with_its_measure(tmp_path):
    manager = fastckpt.Manager(tmp_path, save_when=when.Auto(mttf="6h", overhead=0.02))
    (policy,) = manager._boundary.schedule.policies
    assert (policy.mttf, policy.overhead) == (6 * 3600.0, 0.02)
    both = fastckpt.Manager(tmp_path, save_when=["auto", 100, when.First()])
    assert [type(one) for one in both._boundary.schedule.policies] == [when.Auto, when.Every, when.First]
    assert both._boundary.schedule.policies[0].mttf == 50_000 * 3600.0


def test_auto_in_a_real_run_saves_the_second_step_and_measures(tmp_path):
    with fastckpt.Manager(tmp_path, save_when=when.Auto(mttf="1h")) as manager:
        saved = [step for step in range(1, 4) if manager.save(step, {"a": step}) and manager.wait()]
        assert saved[0] == 2
        moment = manager._saves.timing.moment(in_flight=False)
    assert moment.cost is not None
    assert moment.durable_seconds >= moment.cost > 0
