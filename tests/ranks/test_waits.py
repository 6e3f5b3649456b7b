"""A rank's live counters while it waits for another rank."""

import os
import time

from fastckpt_top.feed import ShmFeed

from fastckpt import distributed
from harness.parallel import dist, torch

PEERS = 6  # docs/telemetry.md, 5.4


def save_late(path, counters, go):
    """Save a tensor of which each rank has half of the rows; rank 1 sends its half once the file ``go`` exists."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from harness.internals import process_group

    os.environ["FASTCKPT_TOP_DIR"] = str(counters)
    os.environ["FASTCKPT_CMA"] = "0"
    if dist.get_rank() == 1:
        exchange = process_group.Exchange

        def late(*arguments):
            while not go.exists():
                time.sleep(0.01)
            return exchange(*arguments)

        process_group.Exchange = late
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(64 * 4096.0).reshape(4096, 64), mesh, [Shard(1)])
    return distributed.save({"rows": rows}, path).bytes_received


def test_a_worker_without_bytes_of_another_rank_waits_for_peers(forge, tmp_path):
    counters = tmp_path / "counters"
    counters.mkdir(mode=0o700)
    go = tmp_path / "go"
    feed = ShmFeed([str(counters)])

    def waiting():
        return [
            thread
            for proc in feed.poll().procs
            if proc.process.group_rank == 0
            for _, thread in proc.threads
            if thread.state == PEERS and thread.peer_wait_ms > 100
        ]

    with forge.group(2) as group:
        group.start(save_late, tmp_path / "c", counters, go)
        deadline = time.monotonic() + 60
        while not (threads := waiting()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for thread in threads:
            # Nothing has been written, so the only possible wait is for the other rank.
            assert thread.fsync_wait_ms == 0
            assert (thread.busy_ns + thread.source_wait_ns) / 1e6 < thread.peer_wait_ms
        go.touch()
        received, _ = group.outcomes()
        assert received.value > 0
    feed.close()
