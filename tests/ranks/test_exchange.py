"""The gloo group that bytes travel in: made when it is needed, kept, ended by a failure, made anew."""

import gc
import signal
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed
from fastckpt._ranks import torch_distributed
from fastckpt._ranks.exchange import Exchange, Link
from fastckpt._ranks.session import session
from fastckpt._ranks.torch_distributed import DataGroup, Group
from harness import groups, parallel, stillness
from harness.groups import Strike
from harness.parallel import dist, torch

ROWS, COLUMNS = 600, 5000


def columns():
    """A tensor of which each rank has some columns: nearly all of its bytes travel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return {"w": parallel.distributed(whole, mesh, [Shard(1)])}


def save_columns(path, *, timeout=30.0, connect_all=None):
    if connect_all is not None:
        torch_distributed._CONNECT_ALL = connect_all
    state = columns()
    groups.report(time.monotonic())
    report = distributed.save(state, path, timeout=timeout)
    return session("save", None).link._name, report.bytes_sent


def check(path):
    found = fastckpt.load(path)["w"]
    assert torch.equal(found, torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS))


# All ranks connect to all, or each to those that it has something to say to.
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
        before = group.run(save_columns, tmp_path / "c")
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
        # The timeout, and 5 seconds.
        for each in outcomes:
            began = group.heard(each.rank)
            assert each.ended - began < 3 + 5 + still.since(began), outcomes
    assert not (tmp_path / "c").exists()


def wait_for_a_message(what):
    """Rank 0 waits for a message that nobody sends; rank 1 ends the group."""
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
            assert seconds < 30, "it was ended by the timeout, and not by the end of the group"


class Slow:
    """A group, its mail and its transfer: nothing ends before it may."""

    def __init__(self):
        self.may_end = threading.Event()
        self.stop = self.end = self.pack = self.admit = self.sent = self.arrived = lambda *_: None

    def outgoing(self):
        return [(1, 8)]

    def incoming(self):
        return []

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
            raise fastckpt.RanksError("the store does not answer")

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
