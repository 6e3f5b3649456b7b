"""The storage of one rank does not answer: its save fails, and the others' errors name that rank."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import fastckpt
import fastckpt.distributed
from harness import mounts

RANKS = 2


def _save(path: str, deadline: float, *, background: bool) -> tuple[str, str]:
    state = {"w": torch.arange(300_000.0) + dist.get_rank()}
    io = fastckpt.IO(deadline=deadline)
    try:
        if background:
            fastckpt.distributed.save_async({"all": torch.ones(9)}, path, per_rank=state, io=io).result()
        else:
            fastckpt.distributed.save({"all": torch.ones(9)}, path, per_rank=state, io=io)
    except (fastckpt.exceptions.CheckpointError, OSError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.root
@pytest.mark.parametrize("background", [False, True])
def test_the_others_hear_of_it(lasting, background):
    with mounts.hanging() as (point, hang), lasting(RANKS) as group:
        for number in itertools.count():
            hang("write", str(group.children[1].pid))
            (first, told), (kind, why) = group.run(_save, point / str(number), 0.2 * 4**number, background=background)
            hang()
            # On a busy machine, a call to storage that answers may be late, too.
            if "cannot write" in why or number == 4:
                break
        assert (first, kind) == ("RanksError", "DeadlineError")
        assert "cannot write" in why
        assert "rank 1" in told
        assert "DeadlineError" in told
        assert "cannot write" in told
        assert group.run(_save, point / "again", 1000.0, background=background) == [("", "")] * RANKS
