"""Private modules of fastckpt that tests read or change: the only file that names modules which may move."""

import threading
import time

from fastckpt._api import host_memory, in_flight
from fastckpt._api.save_request import build_request
from fastckpt._api.save_settings import SaveSettings
from fastckpt._background.guard import unhook as unhook_optimizers
from fastckpt._background.save_async import Job
from fastckpt._background.staging import Staging
from fastckpt._ranks import process_group
from fastckpt._ranks.agreement import Agreement
from fastckpt._ranks.background import Job as RanksJob
from fastckpt._ranks.process_group import AgreedByRanks
from fastckpt._state.built_in import RESERVED
from fastckpt._state.registry import PROCESS
from fastckpt._state.select import ends_of
from fastckpt._tensors.spreads import Spreads

__all__ = [
    "PROCESS",
    "RESERVED",
    "AgreedByRanks",
    "Agreement",
    "Job",
    "RanksJob",
    "Staging",
    "ends_of",
    "join_saves",
    "kept_memory",
    "local_of",
    "process_group",
    "unhook_optimizers",
    "waiting_calls",
]


def join_saves():
    """Wait until the threads of asynchronous saves have ended: they go on after ``result()`` has returned."""
    for thread in threading.enumerate():
        if thread.name == "fastckpt-save":
            thread.join(60)
            assert not thread.is_alive()


def kept_memory(*, staging=False):
    """The pieces of host memory kept for the next snapshots, or for copies from and to devices."""
    return list(host_memory._free_staging if staging else host_memory._free)


def waiting_calls():
    """The number of calls that wait until fewer saves are in flight."""
    return len(in_flight._waiting)


def local_of(state, rank, ranks, *, per_rank=None, metadata=None, **options):
    """A rank's part of the agreement on a save, before it is sent to any other rank."""
    settings = SaveSettings.of("save", options)
    spreads = Spreads(ranks, rank)
    request = build_request(
        "save", "/c", state, metadata, settings, began=time.perf_counter(), per_rank=per_rank, spreads=spreads
    )
    return Agreement(request, rank, len(ranks))
