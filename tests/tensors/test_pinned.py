"""Pinned host memory: the requests to CUDA, their threads, and leftovers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastckpt._api import host_memory
from fastckpt._tensors import pinned

PAGE = 4096
PIECE = 4 * PAGE
BASE = 1 << 40


class Cudart:
    """The pinning calls of CUDA's runtime. Each thread has a last error, which stays until that thread reads it."""

    def __init__(self):
        self.status = 0
        #: Statuses for certain addresses, which replace `status`.
        self.refused = {}
        self.calls = []
        self.ranges = {}
        self.last = threading.local()
        self.before = lambda *_: None

    def _call(self, name, address, status):
        self.before(name, address)
        self.calls.append((threading.get_ident(), name, address))
        status = status or self.refused.get(address, self.status)
        if status:
            self.last.error = status
        return status

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        assert flags == 1, "portable"
        known = any(at < address + nbytes and address < at + size for at, size in self.ranges.items())
        status = self._call("register", address, 712 if known else 0)
        if not status:
            self.ranges[address] = nbytes
        return status

    def cudaHostUnregister(self, address):  # noqa: N802
        return self._call("unregister", address, 0 if self.ranges.pop(address, 0) else 713)

    def cudaGetErrorString(self, status):  # noqa: N802
        return f"what {status} means"

    def launch(self):
        """Check for errors, as after every kernel."""
        error, self.last.error = getattr(self.last, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def names(self):
        return [name for _, name, _ in self.calls]


class Torch:
    """A stand-in for torch with this runtime. A thread must select the device before it makes calls."""

    def __init__(self, cudart):
        self.runtime = cudart
        self.selected = threading.local()

    def get_device_module(self, device):
        assert device.type == "cuda"
        return self

    @contextlib.contextmanager
    def device(self, device):
        before = getattr(self.selected, "device", None)
        self.selected.device = device
        yield
        self.selected.device = before

    def cudart(self):
        assert self.selected.device is CUDA
        if isinstance(self.runtime, Exception):
            raise self.runtime
        return self.runtime


CUDA = SimpleNamespace(type="cuda", index=3)


@pytest.fixture(autouse=True)
def nothing_known():
    yield
    left = list(pinned._known.live)
    for registration in left:
        registration.close()
    assert (left, pinned._known.nbytes, pinned._known.borders) == ([], 0, [])


def register(cudart, pieces=3, limit=None, address=BASE):
    return pinned.register(Torch(cudart), CUDA, address, pieces * PIECE, limit, PIECE)


def cuts(address, nbytes):
    pinned.wait(address, nbytes)
    return [(at - BASE, size) for at, size in pinned.split(address, nbytes)]


def test_memory_is_pinned_in_pieces_by_a_thread_of_its_own():
    cudart = Cudart()
    registration = pinned.register(Torch(cudart), CUDA, BASE, 2 * PIECE + PAGE, None, PIECE)
    registration.wait()
    assert cudart.ranges == {BASE: PIECE, BASE + PIECE: PIECE, BASE + 2 * PIECE: PAGE}
    assert (registration.pinned, registration.nbytes, registration.problem) == (
        2 * PIECE + PAGE,
        2 * PIECE + PAGE,
        None,
    )
    assert pinned._known.nbytes == registration.pinned
    registration.close()
    assert cudart.ranges == {}
    assert registration.pinned == 0
    assert threading.get_ident() not in {thread for thread, *_ in cudart.calls}
    calls = list(cudart.calls)
    registration.close()
    assert cudart.calls == calls


def test_copies_are_cut_where_pieces_meet_and_at_their_ends():
    registration = register(Cudart())
    whole = 3 * PIECE
    assert cuts(BASE - 100, 50) == [(-100, 50)]
    assert cuts(BASE, PIECE) == [(0, PIECE)]
    assert cuts(BASE + 1, PIECE - 1) == [(1, PIECE - 1)]
    assert cuts(BASE + 1, PIECE) == [(1, PIECE - 1), (PIECE, 1)]
    assert cuts(BASE - 5, whole + 10) == [(-5, 5), (0, PIECE), (PIECE, PIECE), (2 * PIECE, PIECE), (whole, 5)]
    assert cuts(BASE + whole, 7) == [(whole, 7)]
    registration.close()
    assert cuts(BASE - 5, whole + 10) == [(-5, whole + 10)]


def test_a_copy_waits_for_the_pieces_it_reaches_into_and_no_others():
    cudart = Cudart()
    gates = {BASE + at * PIECE: threading.Event() for at in range(3)}
    cudart.before = lambda name, address: name == "unregister" or gates[address].wait(60)
    registration = register(cudart)
    gates[BASE].set()
    assert cuts(BASE, PIECE) == [(0, PIECE)]
    assert not registration.is_done()
    assert registration.problem is None
    came = []
    waiting = threading.Thread(target=lambda: came.append(cuts(BASE + PIECE - 1, 2)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gates[BASE + PIECE].set()
    waiting.join(60)
    assert came == [[(PIECE - 1, 1), (PIECE, 1)]]
    assert not registration.is_done()
    gates[BASE + 2 * PIECE].set()
    registration.wait()
    assert registration.is_done()
    registration.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_a_refusal_the_rest_is_not_tried_and_no_error_is_left_behind(at):
    cudart = Cudart()
    cudart.refused = {BASE + at * PIECE: 2}
    registration = register(cudart)
    registration.wait()
    assert cudart.names() == ["register"] * (at + 1)
    assert registration.pinned == pinned._known.nbytes == at * PIECE
    assert "CUDA refused (error 2: what 2 means; a smaller IO(pin=)" in registration.problem
    # The target of a copy must be entirely pinned or not pinned at all.
    assert cuts(BASE, 3 * PIECE)[:at] == [(number * PIECE, PIECE) for number in range(at)]
    cudart.launch()
    registration.close()
    cudart.launch()
    assert cudart.ranges == {}
    assert cudart.names() == ["register"] * (at + 1) + ["unregister"] * at


def test_what_cannot_be_unpinned_is_told_in_the_log_and_leaves_no_error_behind(caplog):
    cudart = Cudart()
    registration = register(cudart, pieces=1)
    registration.wait()
    cudart.status = 713
    registration.close()
    cudart.launch()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot unpin {PIECE} bytes of host memory: error 713: what 713 means"
    ]
    cudart.ranges.clear()


def test_the_cap_is_for_the_whole_process():
    cudart = Cudart()
    first = register(cudart, limit=5 * PIECE)
    first.wait()
    assert first.problem is None
    second = register(cudart, limit=5 * PIECE, address=BASE + 10 * PIECE)
    second.wait()
    assert second.pinned == 2 * PIECE
    assert second.problem == (
        "32.8 kB of 49.2 kB of host memory are pinned, because IO(pin=) allows no more; "
        "copies that use the rest are correct, but slower"
    )
    first.close()
    third = register(cudart, limit=5 * PIECE)
    third.wait()
    assert third.pinned == 3 * PIECE
    for registration in (second, third):
        registration.close()


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (PAGE - 1, []), (PIECE + 5000, [PIECE, PAGE])])
def test_a_cap_that_is_less_than_the_memory_cuts_at_a_page(limit, expected):
    cudart = Cudart()
    registration = register(cudart, limit=limit)
    registration.wait()
    assert list(cudart.ranges.values()) == expected
    if limit:
        assert "IO(pin=) allows no more" in registration.problem
    else:
        assert registration.problem is None
    # No copy crosses the end of the pinned memory.
    assert cuts(BASE, 3 * PIECE)[-1] == (sum(expected), 3 * PIECE - sum(expected))
    registration.close()


@pytest.mark.parametrize("failure", ["cudart", "incomplete", "thread"])
def test_where_nothing_can_be_pinned_copies_do_without(failure, monkeypatch):
    cudart = Cudart()
    if failure == "cudart":
        cudart, told = RuntimeError("no CUDA here"), "no CUDA here"
    elif failure == "incomplete":
        cudart, told = SimpleNamespace(cudaHostRegister=None), "torch cannot pin memory for a device of type cuda"
    else:

        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        told = "no thread could be started for pinning (can't start new thread)"
    registration = register(cudart)
    registration.wait()
    assert registration.problem.startswith(f"0 B of 49.2 kB of host memory are pinned, because {told};")
    assert registration.pinned == 0
    registration.close()


def test_devices_that_know_no_pinning_are_left_alone():
    torch = SimpleNamespace(get_device_module=lambda _device: SimpleNamespace())
    assert pinned.register(torch, SimpleNamespace(type="xpu"), BASE, PIECE) is None


def test_memory_that_is_given_up_early_waits_for_one_piece_alone():
    cudart = Cudart()
    begun, go_on = threading.Event(), threading.Event()

    def before(name, address):
        if name == "register":
            begun.set()
            assert go_on.wait(60)

    cudart.before = before
    registration = register(cudart)
    assert begun.wait(60)
    closing = threading.Thread(target=registration.close)
    closing.start()
    while not registration._is_closed:
        time.sleep(0.001)
    assert closing.is_alive()
    go_on.set()
    closing.join(60)
    assert cudart.names() == ["register", "unregister"]
    assert registration.is_done()


def test_memory_is_unpinned_in_the_calling_thread_where_there_are_no_more_threads(monkeypatch):
    cudart = Cudart()
    registration = register(cudart)
    registration.wait()

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    registration.close()
    assert cudart.ranges == {}


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_while_the_thread_starts_leaves_nothing_pinned(begun, monkeypatch):
    cudart = Cudart()
    real = threading.Thread.start
    late = []

    def start(thread):
        if late:
            real(thread)
            return
        late.append(thread)
        if begun:
            real(thread)
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        register(cudart)
    if not begun:
        real(late[0])
        late[0].join()
    assert cudart.ranges == {}
    assert cudart.names() == (["register"] * 3 + ["unregister"] * 3 if begun else [])


@pytest.mark.parametrize("at", ["start", "started", "wait", "call"])
def test_memory_is_unpinned_despite_an_interrupt(at, monkeypatch):
    """Memory must not be unmapped while it is registered with CUDA."""
    cudart = Cudart()
    registration = register(cudart)
    registration.wait()
    real, plain = threading.Thread.start, threading.Event
    interrupts, interrupted, armed = [KeyboardInterrupt()], plain(), []

    def interrupt(here):
        if here == at and interrupts:
            interrupted.set()
            raise interrupts.pop()

    def start(thread):
        interrupt("start")
        if at == "call":
            raise RuntimeError("can't start new thread")
        real(thread)
        armed.append(thread)
        interrupt("started")

    class Event(plain):
        def wait(self, timeout=None):
            if armed:
                interrupt("wait")
            return super().wait(timeout)

    def before(name, address):
        if at == "wait":
            assert interrupted.wait(60)
        if address > BASE:
            interrupt("call")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading, "Event", Event)
    cudart.before = before
    with pytest.raises(KeyboardInterrupt):
        registration.close()
    assert interrupts == []
    assert cudart.ranges == {}


def test_no_more_is_pinned_when_the_program_ends(monkeypatch):
    cudart = Cudart()
    begun, go_on = threading.Event(), threading.Event()

    def before(name, address):
        begun.set()
        assert go_on.wait(60)

    cudart.before = before
    registration = register(cudart)
    assert begun.wait(60)
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    go_on.set()
    registration.wait()
    monkeypatch.undo()
    assert cudart.names() == ["register"]
    assert registration.problem.startswith("16.4 kB of 49.2 kB of host memory are pinned, because the program ends;")
    registration.close()


def test_a_forked_child_knows_of_nothing():
    cudart = Cudart()
    registration = register(cudart)
    registration.wait()
    slow = Cudart()
    go_on = threading.Event()
    slow.before = lambda name, _: name == "register" and go_on.wait(60)
    on_its_way = register(slow, address=BASE + 100 * PIECE)
    with pinned._known.lock:  # the lock is held when the child is forked
        child = os.fork()
        if not child:
            # pytest must not run in the child: its exit status shows the result.
            try:
                pinned.wait(BASE, 200 * PIECE)
                fine = list(pinned.split(BASE, 200 * PIECE)) == [(BASE, 200 * PIECE)]
                before = len(cudart.calls), len(slow.calls)
                registration.close()
                on_its_way.close()
                fine = fine and (len(cudart.calls), len(slow.calls)) == before
                again = Cudart()
                own = register(again)
                own.wait()
                fine = fine and own.pinned == pinned._known.nbytes == 3 * PIECE
                own.close()
                os._exit(0 if fine and again.ranges == {} else 1)
            finally:
                os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    assert len(cudart.ranges) == 3
    registration.close()
    on_its_way.close()


def test_what_is_pinned_is_unpinned_when_the_interpreter_ends():
    program = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import test_pinned
from fastckpt._tensors import pinned
cudart = test_pinned.Cudart()
cudart.before = lambda name, address: print(name, flush=True)
kept = test_pinned.register(cudart, pieces=2)
kept.wait()
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["register", "register", "end", "unregister", "unregister"]
    assert done.stderr == ""


def test_what_a_signal_handler_registers_meanwhile_is_known():
    """A signal handler that saves may run while the index is being built."""
    inner = SimpleNamespace(pieces=[pinned._Piece(BASE, BASE + PAGE)])

    class Interrupted:
        has_come = False

        @property
        def pieces(self):
            if not self.has_come:
                self.has_come = True
                pinned._known.add(inner)
            return [pinned._Piece(BASE + PIECE, BASE + 2 * PIECE)]

    outer = Interrupted()
    pinned._known.add(outer)
    assert pinned._known.borders == [BASE, BASE + PAGE, BASE + PIECE, BASE + 2 * PIECE]
    pinned._known.remove(outer)
    pinned._known.remove(inner)


class Devices:
    """A stand-in for torch in host_memory."""

    def __init__(self, monkeypatch):
        self.cudart = Cudart()
        self.asked = []
        from fastckpt._tensors import torch

        def pin(devices, address, nbytes, limit, piece):
            self.asked.append((tuple(devices), nbytes, limit, piece))
            return pinned.register(Torch(self.cudart), CUDA, address, nbytes, limit, piece or pinned.PIECE)

        monkeypatch.setattr(torch, "pin", pin)


@pytest.fixture
def devices(monkeypatch):
    host_memory.release_buffers()
    yield Devices(monkeypatch)
    host_memory.release_buffers()


def test_memory_stays_pinned_from_save_to_save(devices):
    memory = host_memory.take(1 << 20)
    memory.pin([CUDA])
    memory.registration.wait()
    assert memory.is_pinned()
    memory.give()
    again = host_memory.take(1000)
    assert again is memory
    again.pin([CUDA])
    assert devices.cudart.names() == ["register"]
    # Another limit needs another registration.
    again.pin([CUDA], PAGE)
    again.registration.wait()
    assert devices.cudart.ranges == {memory.core.address: PAGE}
    assert not again.is_pinned()
    assert "IO(pin=) allows no more" in again.problem
    again.give()
    larger = host_memory.take(1 << 22)
    assert devices.cudart.ranges == {}, "memory that is too small is freed"
    assert larger.problem is None
    larger.give()


def test_memory_without_devices_is_not_pinned(devices):
    memory = host_memory.take(1 << 20)
    memory.pin([])
    assert (memory.registration, memory.problem, memory.is_pinned(), devices.asked) == (None, None, True, [])
    memory.give()
    with host_memory.staging([], 1 << 30) as none, host_memory.staging([CUDA], 0) as nothing:
        assert none is nothing is None


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, host_memory.LEAST_STAGING), (100 << 20, 100 << 20), (1 << 40, host_memory.STAGING)]
)
def test_staging_memory_is_pinned_lent_and_kept(devices, nbytes, expected):
    with host_memory.staging([CUDA], nbytes) as memory:
        assert expected <= memory.nbytes < expected + (4 << 20)
        memory.registration.wait()
        assert sum(devices.cudart.ranges.values()) == memory.nbytes
        assert host_memory._free_staging == []
    assert host_memory._free_staging == [memory]
    with host_memory.staging([CUDA], nbytes) as again:
        assert again is memory
        host_memory.release_buffers()
        assert devices.cudart.ranges, "in use"
    assert devices.cudart.ranges == {}
    assert host_memory._free_staging == []


def test_staging_memory_is_given_back_after_a_failure(devices):
    with pytest.raises(ZeroDivisionError), host_memory.staging([CUDA], 1000) as memory:
        raise ZeroDivisionError
    assert host_memory._free_staging == [memory]
    snapshot = host_memory.take(1000)
    assert snapshot is not memory, "snapshots do not use staging memory"
    snapshot.give()


@pytest.mark.parametrize("kind", ["staging", "snapshot"])
def test_an_operation_that_has_ended_asks_cuda_for_nothing(devices, kind):
    """The program may capture a graph next, and a call of CUDA from any thread would break the capture."""
    asked, go_on = threading.Event(), threading.Event()

    def before(*_):
        asked.set()
        assert go_on.wait(60)

    devices.cudart.before = before
    timer = threading.Timer(0.1, go_on.set)
    if kind == "staging":
        with host_memory.staging([CUDA], 64 << 20) as memory:
            assert asked.wait(60)
            timer.start()
    else:
        memory = host_memory.take(1000)
        memory.pin([CUDA])
        assert asked.wait(60)
        timer.start()
        memory.give()
    assert memory.registration.is_done()
    assert sum(devices.cudart.ranges.values()) == memory.nbytes
    timer.join()


def test_memory_that_is_lost_stays_while_it_is_pinned(devices):
    """A signal handler may raise before memory is returned, while CUDA still uses its pages."""
    memory = host_memory.take(1000)
    memory.pin([CUDA])
    memory.registration.wait()
    address = memory.core.address
    del memory
    (registration,) = pinned._known.live
    assert registration.owner.address == address
    registration.close()
