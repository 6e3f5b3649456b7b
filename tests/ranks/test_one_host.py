"""Ranks of one host read each other's memory instead of sending messages, if the system permits it."""

import hashlib
import os
import re
import time
from pathlib import Path

import pytest
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed
from harness import points
from harness.groups import Strike
from harness.parallel import dist, distribute_tensor, init_device_mesh, torch

RANKS, TIMEOUT = 3, 60.0


def full():
    """Tensors of 12 MB, more than one message to each rank if spread by columns."""
    return {name: torch.arange(1000 * 1000, dtype=torch.float32).view(1000, 1000) + at for at, name in enumerate("abc")}


def spread():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(1)]) for name, tensor in full().items()}


def saved(path, *, strided=False):
    """Facts from the reports of a save, and of a save in the background during which the state changes."""
    ranks, state = distributed.Ranks(timeout=TIMEOUT), spread()
    if strided and dist.get_rank() == 1:
        # The tensor's strided parts have no single address: the core asks Python for their bytes.
        state["a"] = torch.distributed.tensor.DTensor.from_local(
            state["a"].to_local().t().contiguous().t(),
            state["a"].device_mesh,
            state["a"].placements,
            shape=state["a"].shape,
            stride=state["a"].stride(),
        )
    now = distributed.save(state, f"{path}-1", ranks=ranks)
    later = distributed.save_async(state, f"{path}-2", ranks=ranks)
    later.wait_staged(TIMEOUT)
    for tensor in state.values():
        tensor.to_local().zero_()
    return [(one.bytes_received, one.bytes_host, one.host_fallback) for one in (now, later.result(TIMEOUT))]


def without(path, what, rank):
    """Like `saved`, but one rank may not read others, has reading turned off, or is in another container."""
    if dist.get_rank() != rank:
        return saved(path)
    if what == "off":
        os.environ["FASTCKPT_CMA"] = "0"
        return saved(path)

    def reads(*_):
        if what == "refused":
            raise OSError(1, "Operation not permitted")
        return False

    with points.replaced(points.READS, lambda _: reads):
        return saved(path)


def files(path):
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in Path(path).glob("*.safetensors")}


def check(tmp_path):
    fastckpt.save(full(), tmp_path / "one")
    for path in ("many-1", "many-2"):
        assert files(tmp_path / path) == files(tmp_path / "one")


def test_no_bytes_travel_between_ranks_that_read_each_other(forge, tmp_path):
    with forge.group(RANKS) as group:
        for each in group.run(saved, tmp_path / "many"):
            for received, read, why in each:
                assert read == received > 0
                assert not why
    check(tmp_path)


@pytest.mark.parametrize(
    ("what", "there", "here"),
    [
        (
            "refused",
            r"rank 1 cannot read the memory of this rank",
            r"rank 0: Operation not permitted \(process_vm_readv\)",
        ),
        ("container", r"rank 1 cannot read", r"rank 0: it is in another container"),
        ("off", r"rank 1: FASTCKPT_CMA=0", r"rank 0: FASTCKPT_CMA=0"),
    ],
)
def test_bytes_of_a_rank_that_cannot_read_others_travel_and_the_report_says_why(forge, tmp_path, what, there, here):
    with forge.group(RANKS) as group:
        found = group.run(without, tmp_path / "many", what, 1)
    for rank, each in enumerate(found):
        for received, read, why in each:
            assert (read == 0) == (rank == 1)
            assert read < received
            assert re.fullmatch(here if rank == 1 else there + ".*", why), why
    check(tmp_path)


def test_what_has_no_address_travels(forge, tmp_path):
    with forge.group(RANKS) as group:
        found = group.run(saved, tmp_path / "many", strided=True)
    (now, later) = zip(*found, strict=True)
    assert {why for received, read, why in now if read < received} == {
        "rank 1: not all that it gives is in host memory"
    }
    assert now[1][0] == now[1][1]
    # A save in the background copies to host memory first.
    assert all(received == read for received, read, _ in later)
    check(tmp_path)


def joined(path, read):
    """Whether rank 0, which writes late, had written by the time this rank had sent everything."""
    late = dist.get_rank() == 0
    found = []

    def write(real):
        def after_a_while(*arguments):
            time.sleep(0.5)
            report = real(*arguments)
            read.touch()
            return report

        return after_a_while if late else real

    def join(real):
        def seen_off(*arguments):
            real(*arguments)
            found.append(read.exists())

        return seen_off

    with points.replaced(points.WRITE, write), points.replaced(points.JOIN, join):
        save(path)
    return found


def test_a_rank_is_done_when_others_have_read_its_memory(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(joined, tmp_path / "c", tmp_path / "read") == [[True], [True]]


def save(path):
    distributed.save(spread(), path, ranks=distributed.Ranks(timeout=10.0))


@pytest.mark.parametrize("where", [points.SHARE, points.WRITE, points.JOIN])
def test_a_rank_that_is_killed_is_named_and_nothing_is_committed(forge, tmp_path, where):
    with forge.group(RANKS) as group:
        group.run(save, tmp_path / "first")
        group.start(save, tmp_path / "c", strike=Strike(2, where))
        outcomes = group.outcomes(ranks=[0, 1])
        assert all("rank 2" in str(each.raised) for each in outcomes), outcomes
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first"]
