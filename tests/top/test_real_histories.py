"""Drawn histories of jobs, played by real processes: the monitor's outputs agree with the saves' reports.

The gate plays every fifth history; ``FASTCKPT_TEST_RUNS=all`` plays all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil

import pytest
from comparing import Comparison
from fastckpt_top.app import TopApp
from fastckpt_top.feed import ShmFeed
from fastckpt_top.model import Model
from fastckpt_top.session import Live
from fastckpt_top.targets import parse
from fastckpt_top.views.state import Ui
from looking import eventually
from playing import Play
from truth import Truth

from harness import zygote
from harness.draws import one_in

HISTORIES = 40
STEP = one_in(5)
NAMES = ("gpt", "bert", "vit", "moe", "eval", "llama")
STRANGERS = (3, 10, 30, 100)
SIZE = (200, 60)


@pytest.fixture(scope="module")
def warm():
    """Forks ranks and the monitor's command."""
    modules = ("top.played", *(f"fastckpt_top.{name}" for name in ("cli", "lines", "jsonout", "prometheus")))
    with zygote.running(env={"FASTCKPT_TEST_IMPORT": ",".join(modules)}) as made:
        yield made


# --- what happens: an act at each `yield`, after which another job may act, or after "look" only the monitor ---------


def begun(play, name, least=1):
    """Start a job of up to four ranks, or one process without a rank, and save up to two steps."""
    ranks = play.rng.choice([(None,), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]) if least == 1 else tuple(range(least))
    job = play.job(name, len(ranks))
    play.start(job, ranks)
    for step in range(play.rng.randrange(3)):
        play.save(job, f"step-{step}")
        yield
    return job


def closed(play, job):
    """The job ends normally, is killed between operations, or goes on."""
    how = play.rng.choice(("ends", "ends", "is killed", "stays"))
    if how == "is killed":
        for process in job.living:
            play.kill(process)
    elif how == "ends":
        play.end(job)
    yield


def ends_well(play, name):
    job = yield from begun(play, name)
    play.save(job, play.rng.choice(("last", "step-7")))
    yield
    yield from closed(play, job)


def fails(play, name):
    """The last rank's save fails at a file size limit; perhaps the job saves again."""
    job = yield from begun(play, name)
    play.save(job, "step-7", failing=job.living[-1:])
    yield
    if play.rng.random() < 0.5:
        play.save(job, "step-8")
        yield
    yield from closed(play, job)


def died(play, job):
    """One rank or all ranks are killed in the middle of a save; the others have saved their part."""
    victims = job.living if play.rng.random() < 0.5 else [play.rng.choice(job.living)]
    play.save(job, "step-9", held=victims)
    yield "look"
    for process in victims:
        play.kill(process)
        yield "look"


def dies(play, name):
    job = yield from begun(play, name)
    yield from died(play, job)
    yield
    if job.living and play.rng.random() < 0.5:
        play.save(job, "step-10")
        yield
    yield from closed(play, job)


def starts_again(play, name):
    """A whole job dies, and the same launcher or another one starts it again."""
    job = yield from begun(play, name)
    yield from died(play, job)
    for process in job.living:
        play.kill(process)
    yield
    again = job if play.rng.random() < 0.5 else play.job(name, job.world)
    play.start(again, [process.rank for process in job.processes])
    yield
    for step in range(9, play.rng.randrange(10, 12)):
        play.save(again, f"step-{step}")
        yield
    yield from closed(play, again)


def is_run_again(play, name):
    """A job succeeds or fails, and is run once more."""
    job = yield from begun(play, name)
    play.save(job, "step-7", failing=play.rng.choice(([], job.living[-1:])))
    play.end(job)
    yield
    again = play.job(name, job.world)
    play.start(again, [process.rank for process in job.processes])
    yield
    play.save(again, "step-7")
    yield
    yield from closed(play, again)


def has_nothing_to_write(play, name):
    job = yield from begun(play, name)
    play.save(job, "step-7")
    yield
    play.save(job, "step-8", same="step-7")
    yield
    yield from closed(play, job)


def misses_ranks(play, name):
    world = play.rng.choice((3, 4))
    job = play.job(name, world)
    play.start(job, sorted(play.rng.sample(range(world), world - 1)))
    for step in range(play.rng.randrange(1, 3)):
        play.save(job, f"step-{step}")
        yield
    yield from closed(play, job)


def is_at_work(play, name):
    job = yield from begun(play, name)
    play.save(job, "step-7", held=job.living)
    yield


def drains(play, name):
    job = play.job(name)
    play.start(job, [play.rng.choice((None, 0))])
    for step in range(play.rng.randrange(3)):
        play.drain(job, step, held=False)
        yield
    how = play.rng.choice(("done", "held", "killed"))
    play.drain(job, 7, held=how != "done")
    yield "look"
    if how == "killed":
        play.kill(job.living[0])
    yield
    if how == "done":
        yield from closed(play, job)


def leaves_dead(play, name):
    """Other jobs on the machine are killed in their saves."""
    for number in range(play.rng.choice(STRANGERS)):
        job = play.job(name)
        play.start(job)
        play.save(job, f"step-{number}", held=job.living)
        play.kill(job.living[0])
        yield from ("look",) * (number < 2)
    yield


FATES = (
    ends_well,
    fails,
    dies,
    starts_again,
    is_run_again,
    has_nothing_to_write,
    misses_ranks,
    is_at_work,
    drains,
    leaves_dead,
)


def acts(play, seed):
    """The acts of one to five jobs, each in its order. The seed sets the first job's fate, so that all fates occur."""
    names = play.rng.sample(NAMES, len(NAMES))
    fates = [FATES[seed * len(FATES) // HISTORIES], *(play.rng.choice(FATES) for _ in range(play.rng.randrange(5)))]
    jobs = [fate(play, names.pop()) for fate in fates]
    while jobs:
        job = play.rng.choice(jobs)
        while (then := next(job, "over")) == "look":
            yield
        if then == "over":
            jobs.remove(job)
        else:
            yield


# --- what is compared ----------------------------------------------------------------------------------------------


def target_of(truth, rng):
    """A target per GPU, in bytes/s, that each operation clearly reaches or misses; if possible between two of them."""
    ended = [one for one in truth.operations if one.average]
    known = sorted((one.average.least / one.gpus, one.average.most / one.gpus) for one in ended)
    gaps = [(low * high) ** 0.5 for (_, low), (high, _) in itertools.pairwise(known) if 2 * low < high]
    # The rate of a running save is unknown, but lower than any of these.
    slow = any(one.running and not one.copies for one in truth.operations)
    between = [] if slow else [gap for gap in gaps if all(most < gap or least > gap for least, most in known)]
    return rng.choice([*between, *between, 1e12, *([] if slow else [1.0])])


def screens(session, jobs, alive):
    """The text of the application's screen for each job, and of the history."""
    # Liveness is checked once a second.
    assert eventually(lambda: session.tick() or session.model.node.alive == alive)
    app = TopApp(session, Ui(interval=60.0))
    found = []

    async def look():
        async with app.run_test(size=SIZE) as pilot:
            for _ in range(jobs):
                found.append(app.canvas.painted().plain)
                await pilot.press("j")
            await pilot.press("3")
            found.append(app.canvas.painted().plain)

    asyncio.run(look())
    *live, history = found
    return live, history


def judge(warm, place, play, session, top, seed):
    """Check that four outputs of a first look are true, and the screen of a session that has run from the beginning."""
    truth = Truth(play.jobs)
    if not truth.operations:
        return
    target = target_of(truth, random.Random(seed))
    asked = ["--target", f"{target / 1e9!r}GB/s"]
    page = place.parent / "page.prom"

    def command(*arguments):
        every = ["--dir", str(place), *asked, "-d", "0.1", *arguments]
        return warm.run("top.played:command", arguments=every)

    found = Comparison(truth, target)
    found.json(json.loads(command("--once", "--json", "--prometheus", str(page))[1]))
    found.prometheus(page.read_text())
    found.table(command("--once")[1])
    status, words = command("--check")
    found.check(status, words)
    found.same("status of the command", top("--check", *asked).returncode, status)
    session.model.set_target(parse(asked[1], "option"))
    found.screens(*screens(session, len(truth.shown), sum(len(truth.alive(job)) for job in truth.jobs)))
    assert not found.differences, "\n".join(found.differences)


@pytest.mark.parametrize("seed", range(3 % STEP, HISTORIES, STEP))
def test_what_is_shown_is_what_the_saves_reported(seed, warm, place, tmp_path, top):
    rng = random.Random(seed)
    play = Play(warm, place, tmp_path, rng)
    look = rng.randrange(1, 12)
    session = Live(ShmFeed([str(place)]), Model())
    try:
        for number, _ in enumerate(acts(play, seed)):
            session.tick()
            if number == look:
                judge(warm, place, play, session, top, seed)
        judge(warm, place, play, session, top, seed)
    finally:
        play.over()
        session.close()
        shutil.rmtree(tmp_path, ignore_errors=True)
