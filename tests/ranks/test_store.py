"""Ranks over torch's own stores: threads as ranks, and processes where one of them is stopped or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

import fastckpt
from fastckpt._ranks.peers import Peers
from fastckpt._ranks.protocol import VALUE
from fastckpt._ranks.requests import Get, Put, UnreachableError
from fastckpt._ranks.store import Transport
from harness import stillness

# Of operations that must fail, and of all others: a machine may stand still for seconds.
TIMEOUT, LONG = 3.0, 60.0


def client(port):
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


@contextlib.contextmanager
def program(text, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def server(forge):
    """A store in a process of its own: (process, port)."""
    process = forge.zygote.start("harness.member:store", host="127.0.0.1")
    try:
        yield process, int(process.next())
    finally:
        process.kill()
        process.channel.sock.close()


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def stores(request, tmp_path):
    """A function that gives each rank its store, and one that counts the keys."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store, store.num_keys
    if request.param == "file":
        path = str(tmp_path / "store")
        first = dist.FileStore(path, -1)
        first.set("of others", "")
        return lambda: dist.FileStore(path, -1), lambda: first.num_keys() - 2  # that, and the count of its users
    master = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    if request.param == "tcp":
        return lambda: client(master.port), master.num_keys
    return lambda: dist.PrefixStore("a", dist.PrefixStore("b", client(master.port))), master.num_keys


@contextlib.contextmanager
def group(size, store):
    peers = [Peers(rank, size, store(), f"host-{rank}") for rank in range(size)]
    try:
        yield peers
    finally:
        for one in peers:
            one.close()


def together(peers, body, timeout=LONG):
    """Run an operation on all ranks; return of each what it returned or raised, and its seconds."""
    outcomes = {}

    def run(one):
        began = time.monotonic()
        try:
            with one.operation("save", "/checkpoint", timeout) as operation:
                outcome = body(operation, one.rank)
        except Exception as error:  # noqa: BLE001 - the outcome
            outcome = error
        outcomes[one.rank] = outcome, time.monotonic() - began

    threads = [threading.Thread(target=run, args=(one,)) for one in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
        assert not thread.is_alive()
    return [outcomes[one.rank] for one in peers]


def calm(operation, rank):
    everybody = operation.round("arrive", rank)
    return operation.round("done", b"x" * rank, decide=lambda values: [len(everybody), sum(map(len, values))])


def test_operations_over_each_store(stores):
    store, keys = stores

    def fails(operation, rank):
        operation.round("arrive", None)
        if rank == 2:
            raise OSError(28, "No space left on device")
        return operation.round("done", None)

    def large(operation, rank):
        return len(operation.round("done", b"x" * 3, combine=lambda values: values[0] * (VALUE // 2)))

    with group(5, store) as peers:
        assert [outcome for outcome, _ in together(peers, calm)] == [[5, 10]] * 5
        outcomes = [outcome for outcome, _ in together(peers, fails)]
        assert isinstance(outcomes[2], OSError)
        for outcome in (*outcomes[:2], *outcomes[3:]):
            assert isinstance(outcome, fastckpt.RanksError)
            assert [(one.rank, one.host) for one in outcome.failures] == [(2, "host-2")]
        assert [outcome for outcome, _ in together(peers, large)] == [3 * (VALUE // 2)] * 5
        assert keys() == 0
        assert len({one.session for one in peers}) == 1
        assert peers[3].host_of(0) == "host-0"


def test_a_group_that_starts_anew_in_the_same_store(stores):
    """Former processes went in the middle of their first operation; their keys are still there."""
    store, keys = stores
    with group(4, store) as former:
        assert all(isinstance(outcome, fastckpt.RanksError) for outcome, _ in together(former[1:], calm, 2.0))
    assert keys() == 3
    with group(4, store) as peers:
        assert [outcome for outcome, _ in together(peers, calm)] == [[4, 6]] * 4
        assert peers[1].session not in {one.session for one in former}


def test_a_server_that_is_stopped(server):
    process, port = server
    arrived = threading.Barrier(4)

    def stops(operation, rank):
        operation.round("arrive", None)
        arrived.wait()
        if rank == 0:
            process.stop()
        arrived.wait()
        return operation.round("done", None)

    with group(4, lambda: client(port)) as peers, stillness.watched() as still:
        together(peers, calm)
        try:
            began = time.monotonic()
            for outcome, seconds in together(peers, stops, TIMEOUT):
                assert isinstance(outcome, fastckpt.RanksError)
                assert f"the store of the process group at 127.0.0.1:{port} has not answered for 3.0 s" in str(outcome)
                assert seconds < TIMEOUT + 5 + still.since(began)
                assert outcome.failures == ()
            began = time.monotonic()
            for outcome, seconds in together(peers, calm, TIMEOUT):
                assert isinstance(outcome, fastckpt.RanksError)
                assert seconds < TIMEOUT + 5 + still.since(began)
        finally:
            process.signal(signal.SIGCONT)
        # The two operations that were left are settled, and the next one works.
        assert [outcome for outcome, _ in together(peers, calm)] == [[4, 6]] * 4


def test_a_server_that_is_gone(server):
    process, port = server

    def kills(operation, rank):
        operation.round("arrive", None)
        if rank == 0:
            process.kill()
        return operation.round("done", None)

    with group(3, lambda: client(port)) as peers:
        for outcome, seconds in together(peers, kills):
            assert "its host, usually rank 0 or the launcher, is gone or stopped" in str(outcome)
            assert seconds < LONG / 2, "it is known at once, and not by the timeout"


def test_waiting_leaves_the_store_to_others(server):
    _, port = server
    store = client(port)
    with group(2, lambda: store) as (first, second), stillness.watched() as still:
        waits = threading.Thread(target=together, args=([first], calm))
        waits.start()
        time.sleep(0.3)
        began = time.monotonic()
        # Each would wait for the end of a look of the other, which takes a tenth of a second and more.
        for number in range(200):
            store.set("mine", str(number))
            assert time.monotonic() - began < 15 + still.since(began)
        assert store.get("mine") == b"199"
        assert waits.is_alive()
        together([second], calm)
        waits.join()


RANK = """
import sys, time, torch.distributed as dist
from fastckpt._ranks.peers import Peers
rank, size, port, timeout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
peers = Peers(rank, size, store, f"host-{rank}")
with peers.operation("save", "/first", 60) as operation:
    operation.round("done", None)
print("first", flush=True)
try:
    with peers.operation("save", "/checkpoint", timeout) as operation:
        operation.round("arrive", rank)
        print("arrived", flush=True)
        if rank == 2:
            time.sleep(100)
        operation.round("done", None)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
print("ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_goes_is_named_by_all_others(server, sent):
    _, port = server
    with contextlib.ExitStack() as stack, stillness.watched() as still:
        ranks = [stack.enter_context(program(RANK, rank, 3, port, TIMEOUT)) for rank in range(3)]
        for process in ranks:
            assert process.stdout.readline() == "first\n", process.communicate()
        assert ranks[2].stdout.readline() == "arrived\n"
        ranks[2].send_signal(sent)
        began = time.monotonic()
        for process in ranks[:2]:
            assert process.stdout.readline() == "arrived\n"
            told = process.stdout.readline()
            assert "RanksError: save: /checkpoint: rank 2 on host-2 has not answered for 3.0 s" in told
            assert time.monotonic() - began < TIMEOUT + 5 + still.since(began)
        for process in ranks[:2]:
            # It ends as a program does, though threads of it waited for the store.
            assert process.stdout.readline() == "ends\n"
            assert process.wait(LONG) == 0


HOST = """
import torch.distributed as dist
from fastckpt._ranks.peers import Peers
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
try:
    with Peers(0, 3, store, "here").operation("save", "/checkpoint", 1.0) as operation:
        operation.round("done", None)
except Exception as error:
    print(error)
"""


def test_a_process_that_hosts_the_store_ends_well():
    ended = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, timeout=100, check=False)
    assert "rank 1 has not answered for 1.0 s (timeout=); rank 2 has not answered" in ended.stdout
    assert (ended.returncode, ended.stderr) == (0, "")


PARTING = """
import os, sys, time
import torch.distributed as dist
from fastckpt._ranks import peers as module
from fastckpt._ranks.peers import Peers
from fastckpt._ranks.protocol import Turn
module._PARTING = 30.0
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
print(store.port, flush=True)
peers = Peers(rank, 2, store, "here")
awaits = Turn._await
def late(turn):
    time.sleep(1)
    return (yield from awaits(turn))
Turn._await = late
with peers.operation("save", "/checkpoint", 60.0) as operation:
    print(operation.round("done", rank), flush=True)
peers.close()
os._exit(0)
"""


def test_the_host_of_the_store_does_not_end_before_the_others_have_the_verdict():
    with program(PARTING, 0, 0) as first:
        port = int(first.stdout.readline())
        with program(PARTING, 1, port) as second:
            assert second.stdout.readline() == f"{port}\n"
            for process in (first, second):
                assert process.stdout.readline() == "[0, 1]\n", process.communicate()
                assert process.wait(LONG) == 0


def test_a_group_of_one_needs_no_store():
    peers = Peers(0, 1, None, "here")
    with peers.operation("save", "/checkpoint", 1.0) as operation:
        operation.alive()
        operation.check()
        assert operation.round("arrive", 3) == [3]
        assert operation.round("done", 3, combine=sum, decide=lambda value: value + 1) == 4
    with pytest.raises(ZeroDivisionError), peers.operation("save", "/checkpoint", 1.0) as operation:
        operation.round("done", 3, decide=lambda _: 1 // 0)


def test_operations_of_one_rank_wait_for_each_other_in_the_order_of_their_calls(stores):
    store, _ = stores
    order = []
    with group(2, store) as peers:

        def run(operation, number):
            with operation:
                operation.round("done", None)
                order.append(number)

        threads = []
        for one in peers:
            operations = [(number, one.operation("save", f"/{number}", LONG)) for number in range(3)]
            for _, operation in operations:
                operation.take()
            threads += [threading.Thread(target=run, args=(operation, number)) for number, operation in operations]
        for thread in reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(4 * LONG)
    assert order == [0, 0, 1, 1, 2, 2]


def test_a_body_is_told_that_another_rank_failed(stores):
    store, _ = stores

    def works(operation, rank):
        operation.round("arrive", None)
        if rank == 1:
            raise ValueError("no such dtype")
        until = time.monotonic() + LONG / 2
        while time.monotonic() < until:
            time.sleep(0.02)
            operation.alive()
            operation.check()
        raise AssertionError("it was not told")

    with group(3, store) as peers:
        outcomes = together(peers, works)
    for outcome, _ in (outcomes[0], outcomes[2]):
        assert "rank 1 on host-1 failed: ValueError: no such dtype" in str(outcome)
    assert "rank 1 on host-1 failed" in "".join(getattr(outcomes[1][0], "__notes__", ["rank 1 on host-1 failed"]))


def test_a_broken_connection_is_made_anew(server):
    _, port = server
    broken = []
    here = port

    class Breaks:
        """A store whose first clone fails once."""

        host, port = "127.0.0.1", here

        def __init__(self):
            self.inner = client(port)

        def clone(self):
            made = self.inner.clone()
            if not broken:
                broken.append(made)
                return Closed()
            return made

    class Closed:
        def __getattr__(self, name):
            raise RuntimeError("Broken pipe")

    transport = Transport(Breaks())
    transport.serve(Put({"key": b"value"}), LONG)
    assert transport.serve(Get(("key", "other")), LONG) == [b"value", None]
    transport.close()


def test_a_store_of_another_kind_that_hangs():
    hangs, ended = threading.Event(), []

    class Hanging:
        def compare_set(self, *_):
            ended.append(hangs.wait(LONG))
            return b"value"

    transport = Transport(Hanging())
    with pytest.raises(UnreachableError, match=r"group \(Hanging\) has not answered for 0.2 s"):
        transport.serve(Get(("key",)), 0.2)
    assert not ended, "it was told only when the store had answered"
    hangs.set()


def test_the_protocol_does_not_import_torch():
    text = "import sys; from fastckpt._ranks import peers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, env={**os.environ})
