"""Two hosts as network namespaces: with one file system, and with two that are not shared."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import hosts


def _where(path):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return socket.gethostname(), sorted(each.name for each in Path(path).iterdir()), float(total)


@pytest.fixture
def shared(tmp_path):
    place = tmp_path / "shared"
    place.mkdir()
    return place


def test_the_two_hosts_are_two_and_reach_each_other(shared):
    (shared / "here").touch()
    with hosts.two(hidden=shared) as two, two.group(4) as group:
        assert group.run(_where, str(shared)) == [("node-a", ["here"], 6.0)] * 2 + [("node-b", [], 6.0)] * 2
