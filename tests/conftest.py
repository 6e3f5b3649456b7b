"""Fixtures and hooks for all tests."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys

import pytest

import fastckpt
from harness import dealing, groups, sharing, workers, zygote
from harness.options import grouped
from harness.s3 import s3, s3_server  # noqa: F401 - fixtures

# Torch's idle threads spin until the next operator. On a busy machine, spinning takes most of the time of a test that
# trains. The thread library reads the variable once, when torch is imported, here and in all processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests with drawn values draw the same ones each time, so that a failure comes from the current change.
# FASTCKPT_TEST_DRAWS=new draws anew, and hypothesis prints how to repeat a draw.
with contextlib.suppress(ImportError):  # scripts/gpu installs no packages
    from hypothesis import settings

    settings.register_profile("same", derandomize=True)
    settings.register_profile("new", derandomize=False, print_blob=True)
    settings.load_profile(os.environ.get("FASTCKPT_TEST_DRAWS", "same"))

# A shell's background processes ignore Ctrl-C, and nohup's ignore hang-ups. Child processes would inherit this.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_configure(config):
    """Fork all workers from one process, and let them share zygotes."""
    if hasattr(config, "workerinput"):
        zygote.broker = config.workerinput["zygotes"]
    elif config.getoption("numprocesses", 0) and not config.option.collectonly:
        lasting = contextlib.ExitStack()
        zygote.broker = lasting.enter_context(sharing.broker())
        forked = lasting.enter_context(workers.trunk(config.invocation_params.args))
        config.option.tx = [forked] * len(config.option.tx)
        config.add_cleanup(lasting.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["zygotes"] = zygote.broker


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze the 700,000 objects of imports and collection: otherwise each garbage collection, during collection
    and in all tests, would visit them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Make workers begin with long tests."""
    if hasattr(config, "workerinput"):
        workers = config.workerinput["workercount"]
        items[:] = dealing.dealt(
            items, workers, file=lambda item: item.path, slow=lambda item: item.get_closest_marker("slow") is not None
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """End workers, and a process that only collected, without freeing torch and the collected tests, which takes
    an interpreter seven seconds."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        atexit.register(_leave, session)
    else:
        gc.unfreeze()  # libraries complain about objects that remain at the end of the process


def _leave(session):
    """Take the steps of an interpreter's end that precede the freeing of objects, then exit."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # functions that other libraries registered
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_type") else session.exitstatus)  # 1: an exception was not caught


@pytest.fixture(scope="module", autouse=True)
def _memory_goes_back():
    """Free memory after each file: malloc keeps freed memory and fastckpt keeps buffers, hundreds of MB per worker."""
    yield
    fastckpt.background.release_buffers()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session")
def forge():
    """Makes groups of real processes with a gloo process group: see :mod:`harness.groups`."""
    with groups.forge() as made:
        yield made


@pytest.fixture(scope="session")
def libraries():
    """Makes groups of processes that have imported transformers, accelerate and Lightning, which takes ten seconds."""
    with groups.frameworks() as made:
        yield made


@pytest.fixture(scope="module")
def lasting(forge):
    """Groups by size, each shared by the tests of a file: a rank takes half a second to spread its first model
    and a tenth of a second for each later model. A failed test ends its group."""
    with contextlib.ExitStack() as made:
        free = {}

        @contextlib.contextmanager
        def group(size):
            one = free.pop(size, None)
            if one is None:
                one = made.enter_context(forge.group(size, backend="gloo" if size > 1 else ""))
            yield one
            free[size] = one

        yield group


@pytest.fixture(scope="session")
def children():
    """Forks the jobs of :mod:`harness.jobs`, without torch."""
    with zygote.running() as running:
        yield running


@pytest.fixture(scope="session")
def children_with_torch():
    """Forks the jobs of :mod:`harness.jobs` with torch imported, which takes seconds."""
    with zygote.running(env={"FASTCKPT_TEST_TORCH": "1", "FASTCKPT_TEST_HUGE": "1"}) as running:
        yield running


@pytest.fixture(params=["uring", "threads", "buffered"])
def engine(request):
    """Each engine by name. If the machine refuses an engine, the core reports a fallback, and the state is the same."""
    return request.param


@pytest.fixture(params=["uring", "threads", "buffered", "mapped"])
def trip(request, tmp_path):
    """Save and load a state through one engine, or load it by a mapping of its files."""
    mapped = request.param == "mapped"
    io = "auto" if mapped else request.param

    def go(state, **options):
        fastckpt.save(state, tmp_path / "trip", io=io)
        given = grouped({"io": io, "mmap": mapped and "into" not in options, **options})
        return fastckpt.load(tmp_path / "trip", **given)

    return go


@pytest.fixture
def registry():
    """Undo a test's registrations at its end."""
    from harness.internals import PROCESS

    tables = PROCESS._by_class, PROCESS._by_name
    kept = [dict(table) for table in tables]
    yield fastckpt.register_type
    for table, former in zip(tables, kept, strict=True):
        table.clear()
        table.update(former)


@pytest.fixture
def undeclare(registry):
    """Clears all type declarations of this program for the rest of a test."""
    from harness.internals import PROCESS

    return PROCESS._by_name.clear
