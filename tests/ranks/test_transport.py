"""The transport between ranks: torch's stores, with stopped or killed ranks, and the gloo group for bytes,
which is made on demand, kept, ended by a failure, and then made anew.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed
from fastckpt._ranks import store as store_module
from fastckpt._ranks import torch_distributed
from fastckpt._ranks.exchange import Exchange, Link
from fastckpt._ranks.peers import Peers
from fastckpt._ranks.protocol import VALUE
from fastckpt._ranks.requests import Get, Put, UnreachableError
from fastckpt._ranks.session import session
from fastckpt._ranks.store import Transport
from fastckpt._ranks.torch_distributed import DataGroup, Group
from harness import groups, parallel, points, stillness
from harness.groups import Strike

# The timeout of operations that must fail, and that of all others, because a machine may stop for seconds.
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
    """A store in a separate process: (process, port)."""
    process = forge.zygote.start("harness.member:store", host="127.0.0.1")
    try:
        yield process, int(process.next())
    finally:
        process.kill()
        process.channel.sock.close()


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def stores(request, tmp_path):
    """A function that returns a rank's store, and a function that counts the keys."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store, store.num_keys
    if request.param == "file":
        path = str(tmp_path / "store")
        first = dist.FileStore(path, -1)
        first.set("of others", "")
        return lambda: dist.FileStore(path, -1), lambda: first.num_keys() - 2  # without this key and the count of users
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
    """Run an operation on all ranks; return the result or exception of each, and its seconds."""
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
            assert isinstance(outcome, fastckpt.exceptions.RanksError)
            assert [(one.rank, one.host) for one in outcome.failures] == [(2, "host-2")]
        assert [outcome for outcome, _ in together(peers, large)] == [3 * (VALUE // 2)] * 5
        assert keys() == 0
        assert len({one.session for one in peers}) == 1
        assert peers[3].host_of(0) == "host-0"


def test_a_group_that_starts_anew_in_the_same_store(stores):
    """Earlier processes ended within their first operation, and their keys are still in the store."""
    store, keys = stores
    with group(4, store) as former:
        assert all(
            isinstance(outcome, fastckpt.exceptions.RanksError) for outcome, _ in together(former[1:], calm, 2.0)
        )
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
                assert isinstance(outcome, fastckpt.exceptions.RanksError)
                assert f"the store of the process group at 127.0.0.1:{port} has not answered for 3.0 s" in str(outcome)
                assert seconds < TIMEOUT + 5 + still.since(began)
                assert outcome.failures == ()
            began = time.monotonic()
            for outcome, seconds in together(peers, calm, TIMEOUT):
                assert isinstance(outcome, fastckpt.exceptions.RanksError)
                assert seconds < TIMEOUT + 5 + still.since(began)
        finally:
            process.signal(signal.SIGCONT)
        # The two abandoned operations have ended, and the next one works.
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
            assert seconds < LONG / 2, "the error came at once, and not by the timeout"


def test_a_server_that_goes_while_a_client_connects_again(monkeypatch):
    """The server accepts the connection but does not answer, so torch tries for minutes."""
    monkeypatch.setattr(store_module, "_CONNECTED", 0.1)
    ends = threading.Event()

    class Broken:
        def compare_set(self, *_arguments):
            raise RuntimeError("Connection reset by peer")

    class Store:
        host = "127.0.0.1"

        def __init__(self, listener):
            self.listener, self.port, self.clones = listener, listener.getsockname()[1], 0

        def clone(self):
            self.clones += 1
            if self.clones > 2:  # the transport makes the first two clones immediately
                self.listener.close()
                ends.wait()
            return Broken()

    transport = Transport(Store(socket.create_server(("127.0.0.1", 0))))
    try:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="is gone or stopped"):
            transport.serve(Get(("key",)), LONG)
        assert time.monotonic() - began < LONG / 2
    finally:
        ends.set()
        transport.close()


def test_waiting_leaves_the_store_to_others(server):
    _, port = server
    store = client(port)
    with group(2, lambda: store) as (first, second), stillness.watched() as still:
        waits = threading.Thread(target=together, args=([first], calm))
        waits.start()
        time.sleep(0.3)
        began = time.monotonic()
        # Otherwise each set would wait for the end of the rank's poll, which takes a tenth of a second or more.
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
            # The process ends normally, although its threads waited for the store.
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
    assert "rank 1 has not answered for 1.0 s (Ranks(timeout=)); rank 2 has not answered" in ended.stdout
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


def test_a_turn_keeps_its_number_while_a_later_one_of_its_rank_is_entered(stores):
    store, _ = stores
    numbering, entered = threading.Event(), threading.Event()

    def slow(take_number):
        def take(turn):
            if turn.path == "/a" and turn.member.rank and not numbering.is_set():
                numbering.set()
                entered.wait(1)
            take_number(turn)

        return take

    def run(one, path):
        with one.operation("save", path, TIMEOUT) as operation:
            outcomes.append(operation.round("done", path))

    def start(one, path):
        threads.append(threading.Thread(target=run, args=(one, path)))
        threads[-1].start()

    outcomes, threads = [], []
    with group(2, store) as peers, points.replaced(points.TAKE_NUMBER, slow):
        for one in peers:
            start(one, "/a")
        assert numbering.wait(LONG)
        start(peers[1], "/b")
        threads[0].join(0.1)
        entered.set()
        threads[0].join(LONG)
        start(peers[0], "/b")
        for thread in threads:
            thread.join(LONG)
    assert outcomes == [["/a", "/a"]] * 2 + [["/b", "/b"]] * 2


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
        raise AssertionError("the rank got no error")

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
    assert not ended, "the error came only after the store's answer"
    hangs.set()


def test_the_protocol_does_not_import_torch():
    text = "import sys; from fastckpt._ranks import peers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, env={**os.environ})


# --- bytes between ranks ----------------------------------------------------------------------------------------------


ROWS, COLUMNS = 600, 5000


def columns():
    """A tensor of which each rank has some columns, so that nearly all of its bytes are sent."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return {"w": parallel.distributed(whole, mesh, [Shard(1)])}


def save_columns(path, *, timeout=30.0, connect_all=None, network=False):
    if network:
        os.environ["FASTCKPT_CMA"] = "0"
    if connect_all is not None:
        torch_distributed._CONNECT_ALL = connect_all
    state = columns()
    groups.report(time.monotonic())
    report = distributed.save(state, path, ranks=distributed.Ranks(timeout=timeout))
    return session("save", None).link._name, report.bytes_sent


def check(path):
    found = fastckpt.load(path)["w"]
    assert torch.equal(found, torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS))


# Each rank connects to all others, or only to the ranks that it sends to.
@pytest.mark.parametrize("connect_all", [32, 1])
def test_one_group_serves_many_operations(forge, tmp_path, connect_all):
    with forge.group(4) as group:
        first = group.run(save_columns, tmp_path / "c", connect_all=connect_all)
        second = group.run(save_columns, tmp_path / "d")
    assert len({name for name, _ in first + second}) == 1
    assert sum(sent for _, sent in first) > ROWS * COLUMNS * 4 // 2
    check(tmp_path / "c")
    check(tmp_path / "d")


def save_values(path):
    distributed.save({"step": 3}, path)
    return session("save", None).link._data


def test_no_group_is_made_where_nothing_travels(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(save_values, tmp_path / "c") == [None, None]


@pytest.mark.parametrize("where", ["Exchange.join", "DataGroup.send", "DataGroup.receive"])
def test_after_a_failure_there_is_another_group(forge, tmp_path, where):
    module = "exchange" if where == "Exchange.join" else "torch_distributed"
    strike = Strike(1, f"fastckpt._ranks.{module}:{where}", signal=OSError(5, "Input/output error"))
    with forge.group(3) as group:
        before = group.run(save_columns, tmp_path / "c", network=True)
        group.start(save_columns, tmp_path / "d", strike=strike)
        outcomes = group.outcomes()
        assert outcomes[1].raised.errno == 5, outcomes
        assert all(each.raised.failures[0][0] == 1 for each in (outcomes[0], outcomes[2])), outcomes
        after = group.run(save_columns, tmp_path / "e")
    names = [{name for name, _ in each} for each in (before, after)]
    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "e"]
    check(tmp_path / "e")


@pytest.mark.parametrize("where", ["Exchange.join", "Link.meet"])
def test_a_rank_that_is_stopped_in_the_exchange_is_named(forge, tmp_path, where):
    strike = Strike(2, f"fastckpt._ranks.exchange:{where}", signal=signal.SIGSTOP)
    with forge.group(3) as group, stillness.watched() as still:
        group.start(save_columns, tmp_path / "c", timeout=3.0, strike=strike)
        outcomes = group.outcomes(ranks=[0, 1])
        assert all(each.raised.kind == "RanksError" and "rank 2" in each.raised.text for each in outcomes), outcomes
        # The errors come within the timeout and 5 seconds.
        for each in outcomes:
            began = group.heard(each.rank)
            assert each.ended - began < 3 + 5 + still.since(began), outcomes
    assert not (tmp_path / "c").exists()


def wait_for_a_message(what):
    """Wait for a message that no rank sends, until rank 1 ends the group; return the error and the seconds."""
    group = session("save", None).group
    data = DataGroup(group, what, 60.0)
    memory = np.zeros(100, np.uint8)
    began = time.monotonic()
    error = None
    if group.rank == 0:
        transfer = data.receive(1, memory.ctypes.data, 100, memory)
        try:
            transfer.wait(60.0)
        except RuntimeError as raised:
            error = str(raised)
    else:
        thread = threading.Timer(0.2, data.end)
        thread.start()
        transfer = data.receive(0, memory.ctypes.data, 100, memory)
        try:
            transfer.wait(60.0)
        except RuntimeError as raised:
            error = str(raised)
        thread.join()
    return error, time.monotonic() - began


def test_the_end_of_a_group_ends_all_waits_on_both_sides(forge):
    with forge.group(2) as group:
        for error, seconds in group.run(wait_for_a_message, "ended"):
            assert error
            assert seconds < 30, "the wait ended by the timeout, and not with the group"


class Slow:
    """A stand-in for a group, its mail and its transfer, which end only when the test permits it."""

    def __init__(self):
        self.may_end = threading.Event()
        self.stop = self.end = self.pack = self.admit = self.sent = self.arrived = lambda *_: None

    def travelling(self):
        return [(0, 1, 8)], []

    def send(self, *_):
        return self

    receive = send

    def wait(self, _):
        assert self.may_end.wait(60)


def test_a_rank_that_ends_its_exchange_says_that_it_lives():
    slow, told = Slow(), []

    def alive():
        told.append(None)
        if len(told) == 3:
            slow.may_end.set()
        if len(told) == 2:
            raise fastckpt.exceptions.RanksError("the store does not answer")

    exchange = Exchange(slow, slow, str, 60.0)
    exchange.end("it has failed", alive)
    assert len(told) >= 3
    assert not exchange.busy


def test_who_interrupts_does_not_wait_for_the_store():
    slow = Slow()
    exchange = Exchange(slow, slow, str, 60.0)
    threading.Timer(0.2, slow.may_end.set).start()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        exchange.end("interrupted", lambda: pytest.fail("asked the store"))
    assert not exchange.busy


def save_and_destroy(path, port):
    name, _ = save_columns(f"{path}-1")
    known = weakref.ref(session("save", None))
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    gc.collect()
    gone = known() is None
    alone = session("save", None).group.size
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    again, _ = save_columns(f"{path}-2")
    return gone, alone, name != again


def port_of():
    return dist.distributed_c10d._get_default_store()._underlying_non_prefix_store.port


def test_a_process_group_that_is_destroyed_takes_its_session_along(forge, tmp_path):
    with forge.group(2) as group:
        port = group.run(port_of)[0]
        assert group.run(save_and_destroy, tmp_path / "c", port) == [(True, 1, True)] * 2
    check(tmp_path / "c-2")


def test_ranks_agree_on_a_group_only_if_all_have_it():
    link = Link(Group(0, 1, (0,), "here", None), lambda _: "here")
    assert link.offer(needed=False) == [False, ""]
    assert Link.agree(Link.combine([[False, "a"], [False, "a"]])) == ""
    assert Link.agree(Link.combine([[False, "a"], [True, "a"]])) == "a"
    made = Link.agree(Link.combine([[True, "a"], [True, ""]]))
    assert made not in {"", "a"}
