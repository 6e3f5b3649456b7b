"""Asynchronous saves of all ranks: concurrent changes of the state, failures, order, and the end of the process."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from unittest import mock

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed
from harness import parallel, points
from harness.groups import Strike
from harness.internals import Job, RanksJob
from harness.parallel import dist, torch


def state(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((60, 5000), float(value))
    return {
        "spread": parallel.distributed(whole, mesh, [Shard(1)]),
        "turned": torch.full((50, 40), float(value)).t(),
        "step": value,
    }


def check(path, value):
    found = fastckpt.load(path)
    assert found["step"] == value
    assert bool((found["spread"] == value).all())
    assert bool((found["turned"] == value).all())


def copied(path):
    """Bytes that this rank copies of a sharded and of a replicated tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.ones(64, 1000)
    cut = distributed.save_async({"w": parallel.distributed(whole, mesh, [Shard(0)])}, path).result(60)
    return cut.staged, distributed.save_async({"w": whole}, path).result(60).staged


def test_a_rank_copies_what_a_plan_says(forge, tmp_path):
    plans = [fastckpt.tools.plan(size=64 * 4000, gpus=2, zero=zero) for zero in (3, 0)]
    with forge.group(2) as group:
        for found in group.run(copied, tmp_path / "c"):
            assert found == tuple(plan.rank_bytes for plan in plans) == (32 * 4000, 64 * 4000)


def save_twice(path):
    """Save twice, where the second save waits for the first, and change the state as soon as the calls return."""
    handles = []
    for value in (1, 2):
        mine, number = state(value), dist.get_rank() + value
        own = {"own": torch.full((9,), number), "turned": torch.full((30, 20), number).t(), "bytes": bytes([number])}
        handles.append(distributed.save_async(mine, path, per_rank=own))
        handles[-1].wait_staged()
        for tensor in (mine["spread"].to_local(), mine["turned"], own["own"], own["turned"]):
            tensor.fill_(9)
    second = handles[1].result(60)
    first = handles[0].result(0)
    phases = list(second.phases)
    return handles[0].done(), handles[1].progress().phase, first.bytes_total, second.bytes_total, phases, second.staged


def test_the_state_may_change_when_the_call_returns(forge, tmp_path):
    with forge.group(3) as group:
        for done, phase, first, second, phases, staged in group.run(save_twice, tmp_path / "c"):
            assert (done, phase) == (True, "done")
            assert first == second
            assert phases[:2] == ["wait", "stage"]
            assert "commit" in phases
            assert staged > 0
    check(tmp_path / "c", 2)
    own = distributed.load_per_rank(tmp_path / "c", rank=1)
    assert (own["own"].tolist(), own["bytes"]) == ([3] * 9, b"\3")
    assert own["turned"].tolist() == [[3] * 30] * 20


def mix(path):
    """Mix asynchronous and other operations of a group, which keep their order on all ranks."""
    pending = distributed.save_async(state(1), f"{path}-1")
    distributed.save(state(2), f"{path}-2")
    assert pending.done()
    later = distributed.save_async(state(3), f"{path}-3")
    found = distributed.load(f"{path}-1", into=state(0))
    assert later.done()
    fastckpt.background.drain()
    return float(found["spread"].to_local().sum()) / found["spread"].to_local().numel()


def test_operations_keep_their_order(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(mix, tmp_path / "c") == [1.0, 1.0]
    for number in (1, 2, 3):
        check(f"{tmp_path}/c-{number}", number)


def save_beside(path):
    """Make a save that copies while its base is still being written, and a save beside that of a single process."""
    release, real = threading.Event(), RanksJob._write

    def held(job):
        assert release.wait(60)
        return real(job)

    RanksJob._write = held
    mine = state(1)
    first = distributed.save_async(mine, f"{path}-1", io=fastckpt.IO(max_in_flight=2))
    second = distributed.save_async(mine, f"{path}-2", base=f"{path}-1", io=fastckpt.IO(max_in_flight=2))
    phases = [pending.progress().phase for pending in (first, second)]
    mine["turned"].fill_(9)
    release.set()
    linked = [second.result(60).linked_files]
    mine["turned"].fill_(1)
    if dist.get_rank() == 0:
        whole = {
            name: torch.full_like(value, 1) for name, value in fastckpt.load(f"{path}-1").items() if name != "step"
        }
        fastckpt.save_async({**whole, "step": 1}, f"{path}-0", io=fastckpt.IO(bandwidth_limit=2_000_000))
    dist.barrier()
    third = distributed.save_async(mine, f"{path}-3", base=f"{path}-0")
    return phases, [*linked, third.result(60).linked_files]


def test_saves_of_a_group_overlap_and_wait_for_their_base(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(save_beside, tmp_path / "c") == [(["writing", "writing"], [1, 1])] * 2
    for number in (1, 2, 3):
        check(f"{tmp_path}/c-{number}", 1)


def save_and_ask(path):
    distributed.save_async(state(1), path, ranks=distributed.Ranks(timeout=60)).result()


def test_a_failure_in_the_background_reaches_all_ranks(forge, tmp_path):
    strike = Strike(1, points.JOIN, signal=OSError(28, "No space left on device"))
    with forge.group(3) as group:
        group.start(save_and_ask, tmp_path / "c", strike=strike)
        outcomes = group.outcomes()
        assert outcomes[1].raised.errno == 28
        assert all(outcomes[rank].raised.failures[0][0] == 1 for rank in (0, 2)), outcomes
        assert list(tmp_path.iterdir()) == []
        group.run(save_and_ask, tmp_path / "c")
    check(tmp_path / "c", 1)


def fail_and_save_again(path):
    rank = dist.get_rank()
    told = []
    mine = {"w": torch.ones(3)} if rank else {"w": object()}
    try:
        pending = distributed.save_async(mine, path, ranks=distributed.Ranks(timeout=60))
        error = pending.exception()
        told.append(type(error).__name__)
    except fastckpt.exceptions.UnsupportedTypeError as error:
        told.append(type(error).__name__)
    distributed.save_async({"w": torch.ones(3)}, path).result()
    return told


def test_a_call_that_fails_on_one_rank_fails_the_save_of_all(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(fail_and_save_again, tmp_path / "c") == [["UnsupportedTypeError"], ["RanksError"]]
    assert fastckpt.load(tmp_path / "c")["w"].tolist() == [1.0] * 3


def fail_unasked(path, other):
    distributed.save_async({"w": torch.ones(3), "step": dist.get_rank()}, path, ranks=distributed.Ranks(timeout=60))
    try:
        distributed.save_async({"w": torch.ones(3)}, other)
    except (fastckpt.exceptions.RanksError, ValueError) as error:
        error.pending_save.result()
        return str(error)
    raise AssertionError("no error was reported")


def test_the_next_save_raises_what_nobody_asked_for(forge, tmp_path):
    with forge.group(2) as group:
        assert all("step" in text for text in group.run(fail_unasked, tmp_path / "c", tmp_path / "d"))
    assert fastckpt.load(tmp_path / "d")["w"].tolist() == [1.0] * 3


def cancel(path):
    dist.barrier()
    if dist.get_rank() == 0:
        # The other rank calls later, so nothing is durable before that.
        pending = distributed.save_async(state(1), path, ranks=distributed.Ranks(timeout=60))
        pending._cancelled = True
        time.sleep(0.2)
        dist.barrier()
        return pending.cancel(), pending.cancelled()
    dist.barrier()
    pending = distributed.save_async(state(1), path, ranks=distributed.Ranks(timeout=60))
    return type(pending.exception()).__name__, pending.cancelled()


def test_to_cancel_on_one_rank_fails_it_on_all(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(cancel, tmp_path / "c") == [(True, True), ("RanksError", False)]
    assert list(tmp_path.iterdir()) == []


def test_the_process_does_not_end_before_the_checkpoint_is_durable(tmp_path):
    program = """
        import sys, torch
        from fastckpt import distributed
        distributed.save_async({"w": torch.ones(1_000_000)}, sys.argv[1])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path / "c"], check=True, env={**os.environ})
    assert fastckpt.load(tmp_path / "c")["w"].sum() == 1_000_000


def test_a_child_that_is_forked_beside_a_save_saves_and_loads(tmp_path):
    program = """
        import os, signal, sys
        import fastckpt
        from fastckpt import distributed
        path = sys.argv[1]
        first = distributed.save_async({"w": b"1" * 1_000_000}, path, io=fastckpt.IO(bandwidth_limit="1MB"))
        child = os.fork()
        if not child:
            signal.alarm(20)
            distributed.save({"n": 2}, path + "-child")
            assert distributed.load(path + "-child") == {"n": 2}
            os._exit(0)
        assert not first.done()
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path / "c"], check=True, env={**os.environ})
    assert fastckpt.load(tmp_path / "c")["w"] == b"1" * 1_000_000


def test_a_call_whose_options_are_refused_holds_up_no_later_one(tmp_path):
    with pytest.raises(ValueError, match="save_async: io must be"):
        distributed.save_async({"w": 1}, tmp_path / "c", io="fast")
    assert distributed.save({"w": 1}, tmp_path / "c").ranks == 1


@pytest.mark.parametrize(
    ("save", "job"), [(fastckpt.save_async, Job), (distributed.save_async, RanksJob)], ids=["alone", "ranks"]
)
def test_a_call_that_fails_keeps_nothing_of_the_state_while_its_error_is_kept(tmp_path, save, job):
    alive = []

    def made(_):
        tensor = torch.ones(300)
        alive.append(weakref.ref(tensor))
        return tensor

    gc.disable()
    try:
        with mock.patch.object(job, "__init__", side_effect=MemoryError), pytest.raises(MemoryError):
            save({"w": object()}, tmp_path / "c", registry=fastckpt.Registry(encode=made))
        assert [one() for one in alive] == [None]
    finally:
        gc.enable()
    save({"w": torch.ones(3)}, tmp_path / "c").result()
