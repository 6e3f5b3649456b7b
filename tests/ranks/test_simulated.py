"""The protocol under drawn delays, deaths, stops, losses and late starts: 10,000 simulations, each with its own seed.

The gate runs every sixth simulation; the nightly fault campaign runs all with ``FASTCKPT_TEST_RUNS=all``.
"""

from __future__ import annotations

import pytest

from fastckpt._ranks import protocol, tree, words
from fastckpt._ranks.silence import Silence
from fastckpt.exceptions import RanksError
from harness.draws import one_in
from harness.simulated import Faults, Job, ViolationError, World

STEP = one_in(6)
#: Seconds allowed beyond the timeout, not counting two polling intervals of a 20th of the timeout each.
SLACK = protocol.GRACE + 3


def drawn(seed, operations=2, *, sizes=(1, 100), timeout=None, turn=protocol.Turn, atomic=True):
    """A job of drawn size with drawn delays; most jobs are small."""
    world = World(seed, atomic=atomic)
    draw = world.draw
    low, high = sizes
    # Above 33 ranks the tree is two levels deep.
    usual = draw.choices((3, 6, 12, 40, 100), (10, 8, 3, 1, 0.5))[0]
    size = draw.randint(low, max(low, min(high, usual)))
    world.timeout = timeout or draw.choice((5.0, 30.0, 60.0))
    world.delay = draw.choice((0.0001, 0.01, world.timeout / 200))
    world.slow = draw.choice((0.0, world.timeout / 20))
    job = Job(world, size, operations, turn=turn)
    for number in range(operations):
        for rank in range(size):
            if draw.random() < 0.2:
                job.lateness[number, rank] = draw.random() * world.timeout * 0.5
            if draw.random() < 0.3:
                job.work[number, rank] = draw.random() * world.timeout * draw.choice((0.01, 0.1, 2))
    return job


def run(job):
    job.start()
    if job.begins:
        job.world.run(until=10 * job.world.timeout, stop=True)
        job.world.faults = Faults(deaths=job.world.faults.deaths)
    # Each operation may take the time of its work and one timeout for each fault, but no longer.
    job.world.run(until=40 * (job.operations + 1) * job.world.timeout)
    job.check()


def last_works(job):
    """Let the last operation begin after all faults, so that it must succeed."""
    job.begins[job.operations - 1] = 20 * job.world.timeout


def clean(job):
    if job.world.store:
        raise ViolationError(f"left in the store: {sorted(job.world.store)}")


def one_run_that_is_calm(seed, **options):
    job = drawn(seed, **options)
    run(job)
    for number in range(job.operations):
        job.check_success(number)
    clean(job)


def one_run_with_late_ranks(seed, **options):
    """Some ranks are ten minutes late."""
    job = drawn(seed, operations=1, sizes=(2, 12), timeout=700.0, **options)
    for rank in range(job.size):
        if job.world.draw.random() < 0.5:
            job.lateness[0, rank] = 600 * job.world.draw.random() ** 0.2
    job.work.clear()
    run(job)
    job.check_success(0)
    clean(job)


def one_run_with_a_death(seed, **options):
    job = drawn(seed, sizes=(2, 100), **options)
    draw = job.world.draw
    dead = draw.randrange(job.size)
    job.world.faults = Faults(deaths={dead: (draw.randint(1, 60), draw.random() < 0.5)})
    run(job)
    for number in range(job.operations):
        job.check_named(number, {dead})
        job.check_in_time(number, SLACK + job.world.timeout / 10)


def one_run_with_deaths(seed, **options):
    job = drawn(seed, sizes=(3, 100), **options)
    draw = job.world.draw
    dead = draw.sample(range(job.size), min(job.size - 1, draw.randint(2, 5)))
    job.world.faults = Faults(deaths={rank: (draw.randint(1, 60), draw.random() < 0.5) for rank in dead})
    run(job)
    for number in range(job.operations):
        job.check_named(number, set(dead))
        job.check_in_time(number, SLACK + job.world.timeout * 2)


def one_run_with_stops(seed, **options):
    """Ranks stop and continue after a while, perhaps after the others have given them up."""
    job = drawn(seed, 3, sizes=(2, 100), **options)
    draw = job.world.draw
    stopped = draw.sample(range(job.size), min(job.size, draw.randint(1, 3)))
    job.world.faults = Faults(
        stops={rank: (draw.randint(1, 60), draw.random() * 3 * job.world.timeout) for rank in stopped}
    )
    last_works(job)
    run(job)
    job.check_success(2)


def one_run_with_failures(seed, **options):
    """Ranks raise or are interrupted, each at a drawn step, and all others learn which ranks these are."""
    job = drawn(seed, 2, sizes=(2, 100), **options)
    draw = job.world.draw
    failing = draw.sample(range(job.size), min(job.size, draw.choice((1, 1, 2, 30))))
    interrupted = draw.random() < 0.3
    steps = {rank: draw.randrange(4) + 10 * (interrupted and draw.random() < 0.5) for rank in failing}
    job.world.faults = Faults(raises={(0, rank): step for rank, step in steps.items()})
    job.answers = draw.random() < 0.5
    last_works(job)
    run(job)
    if job.committed[:1] == [0]:
        raise ViolationError("committed although a rank failed")
    job.check_named(0, set(failing))
    for rank, result in job.outcomes(0).items():
        if not isinstance(result.error, RanksError) and rank not in failing:
            raise ViolationError(f"rank {rank} has no error")
    job.check_success(1)
    clean(job)


def one_run_with_losses(seed, **options):
    job = drawn(seed, 3, sizes=(2, 100), **options)
    job.world.faults = Faults(loss=job.world.draw.choice((0.001, 0.01, 0.1, 0.5)))
    last_works(job)
    run(job)
    job.check_success(2)


def one_run_with_cuts(seed, **options):
    """The store does not answer some ranks for a short or a long time."""
    job = drawn(seed, 3, sizes=(2, 100), **options)
    draw = job.world.draw
    cut = draw.sample(range(job.size), min(job.size, draw.choice((1, 2, 100))))
    job.world.faults = Faults(cuts={rank: (draw.randint(1, 60), draw.random() * 3 * job.world.timeout) for rank in cut})
    last_works(job)
    run(job)
    job.check_success(2)


def one_run_with_a_restart(seed, **options):
    """All processes are killed at a drawn time, and a new group starts in the same store."""
    job = drawn(seed, 2, sizes=(2, 100), **options)
    draw = job.world.draw
    job.start()
    job.world.run(until=draw.choice((0.001, 0.1, 1, 10)) * draw.random() * job.world.timeout, stop=True)
    for process in job.processes:
        process.dead = True
    again = Job(job.world, max(2, job.size + draw.choice((-1, 0, 0, 0, 1))), 2, turn=job.turn)
    again.lateness = {(0, rank): draw.random() * 0.5 * job.world.timeout for rank in range(again.size)}
    again.start()
    job.world.run(until=1000 * job.world.timeout)
    again.check()
    again.check_success(0)
    again.check_success(1)


def one_run_with_mismatched_calls(seed, **options):
    job = drawn(seed, 2, sizes=(2, 100), **options)
    draw = job.world.draw
    odd = draw.randrange(job.size)
    job.call_of = lambda number, rank: ("load", "/other") if number == 0 and rank == odd else ("save", "/checkpoint")
    last_works(job)
    run(job)
    for rank, result in job.outcomes(0).items():
        if "same calls in the same order" not in str(result.error):
            raise ViolationError(f"rank {rank} has the error {result.error}")
    job.check_named(0, {odd, *tree.below(odd, job.size)})
    job.check_success(1)
    clean(job)


def one_run_with_missed_calls(seed, **options):
    """A rank misses a call by an error outside it; the others give this call up, and the next one works."""
    job = drawn(seed, 6, sizes=(2, 100), **options)
    draw = job.world.draw
    job.apart = draw.choice(("path", "mark", "value"))
    job.work.clear()
    for number in draw.sample(range(5), draw.randint(1, 3)):
        job.missed |= {(number, rank) for rank in draw.sample(range(job.size), min(job.size, draw.choice((1, 1, 2))))}
    job.begins = {number: number * 20 * job.world.timeout for number in range(6)}
    job.start()
    job.world.run(until=1000 * job.world.timeout)
    job.check()
    missed = {number for number, _ in job.missed}
    for number in range(6):
        if number not in missed:
            job.check_success(number)


def one_run_with_calls_out_of_step(seed, **options):
    """A rank misses a call, and makes its next call while the others are still in the missed one."""
    job = drawn(seed, 8, sizes=(2, 12), **options)
    draw = job.world.draw
    job.apart = draw.choice(("path", "mark", "value"))
    job.work.clear()
    job.lateness.clear()
    odd = draw.randrange(job.size)
    job.missed = {(number, odd) for number in draw.sample(range(3), draw.randint(1, 2))}
    job.start()
    job.world.run(until=1000 * job.world.timeout)
    job.check()
    job.check_success(7)
    if any(number in job.committed for number, _ in job.missed):
        raise ViolationError("committed without a rank")


def one_run_with_calls_that_nothing_tells_apart(seed, **options):
    """Ranks make calls that the others have given up: such calls fail, and no values are mixed."""
    job = drawn(seed, 6, sizes=(2, 12), **options)
    draw = job.world.draw
    paths = draw.choice((("/a",), ("/a", "/b")))
    job.call_of = lambda number, _: ("save" if number % 3 else "load", paths[number % len(paths)])
    for number in range(4):
        job.lateness[number, draw.randrange(job.size)] = draw.random() * 3 * job.world.timeout
    last_works(job)
    run(job)
    job.check_success(5)


def one_run_with_missed_loads(seed, **options):
    """Loads are indistinguishable: a rank that missed one counts as late once, and not again."""
    job = drawn(seed, 6, sizes=(2, 100), **options)
    draw = job.world.draw
    job.call_of = lambda *_: ("load", "/checkpoint")
    job.work.clear()
    missed = draw.randrange(3)
    job.missed = {(missed, draw.randrange(job.size))}
    job.begins = {number: number * 20 * job.world.timeout for number in range(6)}
    job.start()
    job.world.run(until=1000 * job.world.timeout)
    job.check()
    for number in range(6):
        if number not in {missed, missed + 1}:
            job.check_success(number)


def one_run_with_a_pause_of_the_store(seed, **options):
    """The store stops for less or more than the timeout while ranks save, or wait for a save."""
    job = drawn(seed, 8, sizes=(2, 12), **options)
    draw = job.world.draw
    job.apart = draw.choice(("path", "mark", "value"))
    job.lateness.clear()
    job.work = {key: seconds / 10 for key, seconds in job.work.items()}
    timeout = job.world.timeout
    for number in draw.sample(range(6), 3):
        job.waits[number] = {rank: draw.random() * timeout / 5 for rank in range(job.size)}
    job.world.faults = Faults(pause=(draw.random() * timeout, draw.random() * 3 * timeout))
    last_works(job)
    run(job)
    job.check_success(7)


def one_run_with_a_pause_of_the_store_in_a_restore(seed, **options):
    """The store stops in a restore: ranks that give up the question do not load, unlike ranks that have the answer.

    Ranks meet before each restore. The restores after the pause succeed.
    """
    job = drawn(seed, 4, sizes=(2, 12), **options)
    draw = job.world.draw
    job.restores = True
    job.call_of = lambda *_: ("load", "/run/step-1")
    timeout = job.world.timeout
    job.lateness = {key: seconds / 5 for key, seconds in job.lateness.items()}
    job.work.clear()
    paused = draw.choice((0, 1))
    job.begins = {number: number * 20 * timeout for number in range(4)}
    job.world.faults = Faults(pause=(job.begins[paused] + draw.random() * timeout / 5, draw.random() * 3 * timeout))
    job.start()
    job.world.run(until=1000 * timeout)
    job.check()
    for number in {*range(4)} - {paused}:
        job.check_success(number)


def one_run_with_a_rank_late_to_the_first_call(seed, **options):
    """A rank is late to the first call: it soon gets the others' outcome, and blames no other rank."""
    job = drawn(seed, 2, sizes=(2, 30), **options)
    draw = job.world.draw
    timeout = job.world.timeout
    late = draw.randrange(1, job.size)
    job.work.clear()
    job.lateness = {(0, late): timeout * (1.2 + draw.random())}
    job.begins = {1: 20 * timeout}
    job.start()
    job.world.run(until=1000 * timeout)
    job.check()
    job.check_named(0, {late})
    told = job.results[0, late]
    if told.ended - job.ready[0, late] > SLACK + timeout / 10:
        raise ViolationError(f"rank {late} raises after {told.ended - job.ready[0, late]:.1f} s: {told.error}")
    job.check_success(1)


def one_run_with_all_of_it(seed, **options):
    job = drawn(seed, 3, sizes=(2, 100), **options)
    draw = job.world.draw

    def some(of):
        return {rank: of() for rank in draw.sample(range(job.size), min(job.size, draw.choice((0, 0, 1, 2))))}

    timeout = job.world.timeout
    job.world.faults = Faults(
        deaths=some(lambda: (draw.randint(1, 90), draw.random() < 0.5)),
        stops=some(lambda: (draw.randint(1, 90), draw.random() * 3 * timeout)),
        cuts=some(lambda: (draw.randint(1, 90), draw.random() * 3 * timeout)),
        loss=draw.choice((0, 0, 0.01)),
        raises={(0, rank): step for rank, step in some(lambda: draw.randrange(14)).items()},
        pause=draw.choice((None, None, (draw.random() * timeout, draw.random() * 3 * timeout))),
    )
    job.apart = "mark"
    job.missed = {(1, rank) for rank in some(lambda: None)} if draw.random() < 0.3 else set()
    last_works(job)
    run(job)
    if not job.world.faults.loss and not any(process.dead for process in job.processes):
        job.check_success(2)


RUNS = {
    one_run_that_is_calm: 300,
    one_run_with_late_ranks: 400,
    one_run_with_a_death: 1500,
    one_run_with_deaths: 800,
    one_run_with_stops: 800,
    one_run_with_failures: 800,
    one_run_with_losses: 400,
    one_run_with_cuts: 600,
    one_run_with_a_restart: 700,
    one_run_with_mismatched_calls: 400,
    one_run_with_missed_calls: 500,
    one_run_with_calls_out_of_step: 500,
    one_run_with_calls_that_nothing_tells_apart: 600,
    one_run_with_missed_loads: 300,
    one_run_with_a_pause_of_the_store: 800,
    one_run_with_a_pause_of_the_store_in_a_restore: 500,
    one_run_with_a_rank_late_to_the_first_call: 300,
    one_run_with_all_of_it: 1000,
}


def broken(one_run, seed, **options):
    try:
        one_run(seed, **options)
    except (ViolationError, ValueError, TypeError, AttributeError, KeyError) as error:
        return f"{one_run.__name__}({seed}): {error!r}"
    return None


def breaks(one_run, step=1, **options):
    """Return the first simulation that breaks a promise, None if there is none."""
    return next(filter(None, (broken(one_run, seed, **options) for seed in range(0, RUNS[one_run], step))), None)


def test_there_are_ten_thousand_runs():
    assert sum(RUNS.values()) >= 10_000


@pytest.mark.slow
@pytest.mark.parametrize("one_run", RUNS, ids=lambda one_run: one_run.__name__[len("one_run_") :])
def test_runs(one_run, record_property):
    record_property("trials", len(range(0, RUNS[one_run], STEP)))
    assert breaks(one_run, STEP) is None


# Each class switches off a rule of the protocol: some simulation must then break a promise.


class Counts(protocol.Turn):
    """A rank gives another rank up after a time, despite its heartbeats."""

    def _listen(self, state, own):
        state.silence.hear = lambda rank, _, now: Silence.hear(state.silence, rank, None, now)
        yield from super()._listen(state, own)


class Patient(protocol.Turn):
    """A rank waits forever."""

    def __init__(self, member, kind, path, timeout):
        super().__init__(member, kind, path, timeout)
        self.timeout = float("inf")


class Forgiving(protocol.Turn):
    """A rank takes a missing message for success."""

    def _collect(self, own):
        messages = yield from super()._collect(own)
        own.failures.clear()
        return messages


class Hasty(protocol.Turn):
    """The coordinator decides without a check of the register."""

    def _decide(self, joined, *how):
        verdict = yield from super()._decide(joined, *how)
        return b"=" + words.encode([]) if verdict[:1] == b"!" and not joined.failures else verdict


class Deaf(protocol.Turn):
    """A rank does not check whether the bell stays silent."""

    def _await(self):
        while not (yield protocol.Wait((self._bell(),), self.timeout, 0)):
            pass
        return (yield from protocol.value_of(self._register()))


class Drifting(protocol.Turn):
    """A call that fails early takes no turn."""

    def end(self, error):
        if error is not None and not self.rounds:
            self.over = True
            return None
        return (yield from super().end(error))


class Untidy(protocol.Turn):
    """A rank leaves its keys in the store."""

    def _depart(self, *, failed=False):  # noqa: ARG002 - as the method that it stands for
        self.over = True
        yield from ()


class Mute(protocol.Turn):
    """A rank sends no heartbeats while it waits for others."""

    def alive(self):
        if self.inside:
            return
        yield from super().alive()


class Strange(protocol.Turn):
    """A rank answers only another rank's first hello, which may be from an earlier process."""

    def _listen(self, state, own):
        answer, self.member.answer = self.member.answer, lambda _: iter(())
        yield from super()._listen(state, own)
        self.member.answer = answer


class Closed(protocol.Turn):
    """A rank leaves although ranks from which it has not heard then cannot learn the verdict."""

    def _has_waited(self, state):
        return state.decided or (state.failed is not None and state.now - state.failed >= self._grace)


class Stubborn(protocol.Turn):
    """A rank accepts the verdict of a turn that it has missed."""

    def _is_of_others(self, verdict):  # noqa: ARG002 - as the method that it stands for
        return False


class Tardy(protocol.Turn):
    """A rank accepts every verdict of missed calls that cannot be distinguished from its own."""

    def _attempt(self, own, *how):
        self.member.was_told = lambda _: False
        return (yield from super()._attempt(own, *how))


class Careless(protocol.Turn):
    """A rank skips every turn that has failed without it, even that of its own call."""

    def _is_of_others(self, verdict):
        return verdict[:1] == b"!" and not self.passed

    passed = False

    def _pass(self):
        self.passed = True
        yield from super()._pass()


class Forgetful(protocol.Turn):
    """A rank does not notice that it is ahead of the others."""

    def round(self, *given):
        self.member.behind = []
        return (yield from super().round(*given))


class Unmarked(protocol.Turn):
    """A rank identifies its call only by kind and path."""

    @property
    def called(self):
        return super().called._replace(marks={})


MUTANTS = {
    Counts: one_run_that_is_calm,
    Patient: one_run_with_a_death,
    Forgiving: one_run_with_a_death,
    Hasty: one_run_with_stops,
    Deaf: one_run_with_a_death,
    Drifting: one_run_with_failures,
    Untidy: one_run_that_is_calm,
    Mute: one_run_that_is_calm,
    Strange: one_run_with_a_restart,
    Closed: one_run_with_failures,
    Stubborn: one_run_with_missed_calls,
    Tardy: one_run_with_missed_loads,
    Careless: one_run_with_calls_that_nothing_tells_apart,
    Forgetful: one_run_with_calls_out_of_step,
    Unmarked: one_run_with_a_pause_of_the_store_in_a_restore,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_no_rule_can_be_left_out(mutant):
    found = breaks(MUTANTS[mutant], turn=mutant)
    assert found is not None
    # The mutant must fail by a broken promise: one that crashes proves nothing.
    assert "ViolationError" in found, found


def test_a_register_that_is_not_compared_lets_two_verdicts_be():
    assert breaks(one_run_with_stops, atomic=False) is not None
