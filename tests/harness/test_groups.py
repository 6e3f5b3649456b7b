"""Tests of rank groups in the harness: faults of ranks are reported, and all topologies have the same values."""

import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import groups, parallel


def _sum():
    mine = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(mine)
    return dist.get_rank(), int(mine)


def _sleep(seconds):
    time.sleep(seconds)
    return seconds


def _tell_and_raise():
    groups.report("so far")
    raise OSError(28, "full", "here")


def _crash():
    signal.raise_signal(signal.SIGSEGV)


def _warn():
    warnings.warn("mind", DeprecationWarning, stacklevel=1)


def _values(topology, tied):
    """Shape and bytes of every tensor of the state, gathered from all ranks."""
    found = {}

    def walk(value, path):
        if isinstance(value, dict):
            for key, each in value.items():
                walk(each, (*path, key))
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[path] = (tuple(full.shape), full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    walk(parallel.state(topology, tied=tied), ())
    return found


@pytest.mark.parametrize("store", ["apart", "rank0"])
def test_ranks_form_a_group(forge, store):
    with forge.group(3, store=store) as group:
        assert group.run(_sum) == [(0, 6), (1, 6), (2, 6)]
        assert group.run(_sum) == [(0, 6), (1, 6), (2, 6)]


def test_what_a_rank_says_raises_and_warns_of_comes_back(forge):
    with forge.group(2) as group:
        group.start(_tell_and_raise, ranks=[1])
        assert group.heard(1) == "so far"
        [outcome] = group.outcomes()
        assert (outcome.kind, outcome.raised.kind, outcome.raised.errno) == ("raised", "OSError", 28)
        assert "_tell_and_raise" in outcome.raised.trace
        with pytest.raises(groups.FailedError, match="rank 0 raised; rank 1 raised"):
            group.run(_tell_and_raise)
        with pytest.warns(DeprecationWarning, match="rank 0: mind"):
            group.run(_warn, ranks=[0])


def test_a_rank_is_killed_or_stopped_at_a_named_step(forge):
    with forge.group(3) as group:
        group.start(_sleep, 0, strike=groups.Strike(1, "time:sleep"))
        assert [each.kind for each in group.outcomes()] == ["returned", "died", "returned"]
        group.start(_sleep, 0, ranks=[0, 2], strike=groups.Strike(2, "time:sleep", signal.SIGSTOP, "after", match=0))
        assert [each.kind for each in group.outcomes()] == ["returned", "stopped"]
        group.resume(2)
        assert group.outcomes()[0].value == 0
        group.start(_sleep, 0, ranks=[0], strike=groups.Strike(0, "time:sleep", OSError(5, "worn out")))
        assert group.outcomes()[0].raised.errno == 5
        assert group.run(_sleep, 0, ranks=[0]) == [0]
        with pytest.raises(groups.FailedError, match=r"^rank 0 died of SIGSEGV$"):
            group.run(_crash, ranks=[0])


def test_a_hung_rank_hangs_nobody_and_leaves_nothing(forge):
    with forge.group(2) as group:
        group.start(_sleep, 3600)
        group.kill(0)
        assert [each.kind for each in group.outcomes(0.2)] == ["died", "silent"]
        left = [child.pid for child in group.children]
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


@pytest.mark.parametrize(
    ("topology", "size"),
    [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("tp_fsdp", 4), ("pipeline", 2)],
)
def test_every_topology_has_the_values_of_one_process(forge, topology, size):
    with forge.group(size) as group:
        for tied in (False,) if topology == "pipeline" else (True, False):
            wanted = _values("single", tied)
            ranks = group.run(_values, topology, tied)
            if topology == "pipeline":
                assert all(ranks)
                assert {**ranks[0], **ranks[1]} == wanted
            else:
                assert ranks == [wanted] * size
