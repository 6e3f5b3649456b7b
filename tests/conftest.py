"""What all tests share."""

from __future__ import annotations

import signal

import pytest

import fastckpt
from harness import groups, zygote
from harness.s3 import s3, s3_server  # noqa: F401 - fixtures

# A shell runs what is in the background without Ctrl-C, and nohup without a hang-up; their children would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(scope="session")
def forge():
    """Makes groups of real processes with a gloo process group: see :mod:`harness.groups`."""
    with groups.forge() as made:
        yield made


@pytest.fixture(scope="session")
def children():
    """Forks the jobs of :mod:`harness.jobs`, without torch."""
    with zygote.running() as running:
        yield running


@pytest.fixture(scope="session")
def children_with_torch():
    """Forks the jobs of :mod:`harness.jobs` with torch imported, which takes seconds."""
    with zygote.running(env={"FASTCKPT_TEST_TORCH": "1"}) as running:
        yield running


@pytest.fixture(params=["uring", "threads", "buffered"])
def engine(request):
    """Each engine by name. Where the machine refuses one, the core falls back and says so: the state is the same."""
    return request.param


@pytest.fixture(params=["uring", "threads", "buffered", "mapped"])
def trip(request, tmp_path):
    """Save and load a state through one engine, or load it by a mapping of its files."""
    mapped = request.param == "mapped"
    io = "auto" if mapped else request.param

    def go(state, **options):
        fastckpt.save(state, tmp_path / "trip", io=io)
        return fastckpt.load(tmp_path / "trip", io=io, mmap=mapped and "into" not in options, **options)

    return go


@pytest.fixture
def registry():
    """Registrations last for one test."""
    from fastckpt._state.registry import PROCESS

    tables = PROCESS._by_class, PROCESS._by_name
    kept = [dict(table) for table in tables]
    yield fastckpt.register_type
    for table, former in zip(tables, kept, strict=True):
        table.clear()
        table.update(former)
